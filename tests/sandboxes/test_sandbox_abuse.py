"""Hostile code at every isolation level, and its effect on the machine.

At strict nothing of the machine is visible. At landlock the names of files are visible but none can be opened, sockets
are denied, and the size of each file is limited. "none" is no boundary; attacks that would succeed are not run there.
"""

import asyncio
import ctypes
import itertools
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import errors
import pytest
import pytest_asyncio
from levels import MARKS, few
from test_sandbox_python import below
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.sandboxes.host import commands, isolation, seccomp
from agentfly_kit.sandboxes.host.limits import Limits


def levels(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("level", [pytest.param(name, marks=MARKS[name]) for name in names])


# Where bubblewrap is installed, `make test-bare` tests landlock.
every_level = pytest.mark.parametrize("level", few("strict", "none"))
confined = pytest.mark.parametrize("level", [each for each in few("strict", "none") if each.values != ("none",)])
strict = levels("strict")


@pytest_asyncio.fixture
async def sandbox(level: str) -> AsyncIterator[af.PythonSandbox]:
    async with af.PythonSandbox(isolation=level, memory_mb=96, processes=16, disk_mb=8) as one:
        yield one


ATTEMPT = """
def attempt(call, *arguments):
    try:
        call(*arguments)
        return 'done'
    except OSError as error:
        return type(error).__name__
"""


async def attack(sandbox: af.PythonSandbox, code: str, timeout: float = GUARD) -> af.SandboxResult:
    """Run code, which may call `attempt`, and check that the sandbox is still usable."""
    result = await sandbox.run(ATTEMPT + textwrap.dedent(code), timeout=timeout)
    assert (await sandbox.run("6 * 7")).value == "42"
    return result


# --- reading --------------------------------------------------------------------------------------


@every_level
async def test_home_and_secrets_of_the_host(sandbox: af.PythonSandbox, level: str, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's secret")
    paths = [
        str(secret), "/etc/shadow", "/etc/passwd", "/etc/hostname", str(Path.home() / ".ssh"),
        str(Path.home() / ".bashrc"), os.getcwd(), __file__, "/var/log", "/root/.bashrc", "/proc/1/root/etc/passwd",
        "/sys/class",
    ]  # fmt: skip
    code = f"""
    import os
    def look(path):
        try:
            return bool(os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1))
        except OSError:
            return False
    [p for p in {paths!r} if os.path.lexists(p)], [p for p in {paths!r} if look(p)]
    """
    there, read = eval((await attack(sandbox, code)).value or "")
    if level == "none":
        assert str(secret) in read
    else:
        assert [path for path in read if path != "/etc/passwd" or level != "strict"] == []
    if level == "strict":
        assert there == ["/etc/passwd"]
        users = (await sandbox.run("open('/etc/passwd').read()")).value
        assert users == repr("sandbox:x:65534:65534::/tmp:/bin/bash\n")


@every_level
async def test_environment_of_the_host(level: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-of-the-host")
    async with af.PythonSandbox(isolation=level) as sandbox:
        code = """
        import glob, os
        found = str(os.environ)
        for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/task/*/environ') + glob.glob('/proc/*/cmdline'):
            try:
                found += open(path, 'rb').read().decode(errors='replace')
            except OSError:
                pass
        'hunter2' in found, 'SECRET_TOKEN' in found, len(found) > 100
        """
        assert (await attack(sandbox, code)).value == "(False, False, True)"
        result = await attack(sandbox, "open(f'/proc/{os.getppid()}/environ').read()")
        assert result.error_type == "PermissionError" or level == "none"


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of the zygote, or 0 if the user may not count them."""
    (zygote,) = [each for each in (pid, *below(pid)) if len(below(each)) == 1]  # its child is the interpreter
    return len(os.listdir(f"/proc/{zygote}/fd")) if os.access(f"/proc/{zygote}/fd", os.R_OK) else 0


@confined
async def test_the_zygote_is_out_of_reach(sandbox: af.PythonSandbox, level: str):
    """The zygote has the same uid as the code inside, and serves later chains."""
    code = """
    import ctypes, os, resource, signal
    zygote = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    def ptrace():
        if libc.ptrace(16, zygote, 0, 0) < 0:
            raise PermissionError(ctypes.get_errno())
    {
        'mem': attempt(open, f'/proc/{zygote}/mem', 'r+b'),
        'fds': attempt(os.readlink, f'/proc/{zygote}/fd/0'),
        'open': attempt(open, f'/proc/{zygote}/fd/0'),
        'maps': attempt(lambda: open(f'/proc/{zygote}/maps').read()),
        'rlimit': attempt(resource.prlimit, zygote, resource.RLIMIT_NOFILE, (3, 3)),
        'nice': attempt(os.setpriority, os.PRIO_PROCESS, zygote, 19),
        'affinity': attempt(os.sched_setaffinity, zygote, {0}),
        'ptrace': attempt(ptrace),
        'kill': attempt(os.kill, zygote, signal.SIGKILL),
        'int': attempt(os.kill, zygote, signal.SIGINT),
        'term': attempt(os.kill, zygote, signal.SIGTERM),
        'stop': attempt(os.kill, zygote, signal.SIGSTOP),
    }
    """
    pid = sandbox.pid or 0
    opened = descriptors(pid)
    found = eval((await attack(sandbox, code)).value or "{}")
    refused = {name for name, outcome in found.items() if outcome == "PermissionError"}
    signals = {"kill", "int", "term", "stop"} if level == "landlock" else set()
    # At strict the kernel accepts these signals without effect: the zygote is the first process of its namespace.
    assert refused == {"mem", "fds", "open", "maps", "rlimit", "nice", "affinity", "ptrace"} | signals, found
    # This is allowed if the host runs as root.
    await sandbox.run("open(f'/proc/{zygote}/oom_score_adj', 'w').write('1000')")
    await sandbox.reset()
    assert await asyncio.to_thread(Path(f"/proc/{sandbox.pid}/oom_score_adj").read_text) == "0\n"
    if level == "strict":
        assert (await sandbox.run("open('/proc/1/oom_score_adj').read()")).value == repr("0\n")
    assert (sandbox.pid, descriptors(pid)) == (pid, opened)


@confined
async def test_nothing_of_the_machine_can_be_written(sandbox: af.PythonSandbox, level: str, tmp_path: Path):
    (tmp_path / "mine").write_text("untouched")
    places = [
        "/", "/usr", "/etc", "/dev", "/proc/sys/kernel", "/var/tmp", "/sandbox", "/home", "/run", sys.prefix,
        sys.base_prefix, str(tmp_path), *(["/tmp", "/dev/shm"] if level == "landlock" else []),
    ]  # fmt: skip
    code = f"[place for place in {places!r} if attempt(open, place + '/mark', 'w') == 'done']"
    assert (await attack(sandbox, code)).value == "[]"
    result = await attack(sandbox, f"open({str(commands.INSIDE / 'zygote.py')!r}, 'a')")
    assert result.error_type in ("OSError", "PermissionError", "FileNotFoundError")
    # Changes that do not open the file.
    code = f"""
    import os
    mine = {str(tmp_path / "mine")!r}
    changes = ((os.chmod, 0), (os.chown, 1, 1), (os.truncate, 0), (os.utime, (0, 0)), (os.unlink,),
               (os.rename, mine + '2'), (os.setxattr, 'user.mark', b'x'), (os.link, 'link'))
    [change for change, *arguments in changes if attempt(change, mine, *arguments) == 'done']
    """
    assert (await attack(sandbox, code)).value == "[]"
    found = (tmp_path / "mine").stat()
    assert ((tmp_path / "mine").read_text(), found.st_mode & 0o400, found.st_mtime > 0) == ("untouched", 0o400, True)


# --- network and signals --------------------------------------------------------------------------


@every_level
async def test_sockets_of_the_host(sandbox: af.PythonSandbox, level: str):
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        path = f"/tmp/agentfly-test-{os.getpid()}.sock"
        try:
            named.bind(path)
            named.listen()
            abstract.bind(f"\0agentfly-test-{os.getpid()}")
            abstract.listen()
            code = f"""
            import socket
            def connect(family, address, seconds={GUARD}):
                with socket.socket(family) as s:
                    s.settimeout(seconds)
                    s.connect(address)
            [
                attempt(connect, socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]})),
                attempt(connect, socket.AF_UNIX, {path!r}),
                attempt(connect, socket.AF_UNIX, '\\0agentfly-test-{os.getpid()}'),
                attempt(connect, socket.AF_INET, ('192.0.2.1', 80), 1),
                attempt(connect, 40, (2, 80)),
            ]
            """
            found = eval((await attack(sandbox, code)).value or "[]")
            if level == "none":
                assert found[:3] == ["done"] * 3
            elif level == "landlock":
                assert found == ["PermissionError"] * 5
            else:
                assert "done" not in found and found[4] == "PermissionError", found
        finally:
            await asyncio.to_thread(os.unlink, path)
    if level == "none":
        return
    result = await attack(sandbox, "import os\nos.listdir('/sys/class/net') if os.path.exists('/sys') else 'no /sys'")
    assert result.value == "'no /sys'" or result.error_type == "PermissionError"
    result = await attack(sandbox, "import socket\n[name for _, name in socket.if_nameindex()]")
    assert result.value == "['lo']" or (level == "landlock" and result.error_type == "PermissionError")


@every_level
async def test_the_loopback_of_the_sandbox(sandbox: af.PythonSandbox, level: str):
    """A chain may connect to its own server, except at landlock, where the loopback is that of the machine."""
    code = """
    import socket, threading
    server = socket.create_server(('127.0.0.1', 0))
    threading.Thread(target=lambda: server.accept()[0].sendall(b'hello'), daemon=True).start()
    socket.create_connection(server.getsockname()).recv(5)
    """
    result = await attack(sandbox, code)
    assert result.error_type == "PermissionError" if level == "landlock" else result.value == "b'hello'"
    code = "import socket\na, b = socket.socketpair()\na.send(b'x')\nb.recv(1)"
    assert (await attack(sandbox, code)).value == "b'x'"


@every_level
async def test_network_access_if_requested(level: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]})).fileno() > 0"
        async with af.PythonSandbox(isolation=level, network=True) as sandbox:
            assert (await attack(sandbox, code)).value == "True"
            if level == "landlock":
                result = await attack(sandbox, "socket.socket(socket.AF_UNIX)")
                assert result.error_type == "PermissionError"
        async with af.PythonSandbox(isolation=level) as sandbox:
            result = await attack(sandbox, code)
    assert result.error_type == {"landlock": "PermissionError", "none": None}.get(level, "ConnectionRefusedError")


@confined
async def test_signals_to_the_host(sandbox: af.PythonSandbox, level: str):
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        pids = {os.getpid(), os.getppid(), sandbox.pid or 0}
        code = f"""
        import os, signal
        [pid for pid in {sorted(pids)} if attempt(os.kill, pid, signal.SIGUSR1) == 'done']
        """
        assert (await attack(sandbox, code)).value == "[]"
        if level == "strict":  # at landlock, -1 would address all processes of the machine
            await sandbox.run("import os, signal\nos.kill(-1, signal.SIGUSR1)")
        assert (await sandbox.run("1")).value == "1"
        assert got == []  # a signal would have been pending since before the answers
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "call",
    ["unshare", "mount", "ptrace", "keyctl", "bpf", "io_uring_setup", "userfaultfd", "shmget", "mq_open", "setns"],
)
@confined
async def test_the_filter_refuses(sandbox: af.PythonSandbox, call: str):
    number = seccomp._DENIED[call][0 if platform.machine() == "x86_64" else 1]
    code = f"""
    import ctypes, errno
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall({number}, 0, 0, 0, 0, 0)
    result, errno.errorcode.get(ctypes.get_errno())
    """
    assert (await attack(sandbox, code)).value == "(-1, 'EPERM')"


@confined
async def test_no_new_user_namespace(sandbox: af.PythonSandbox):
    code = """
    import ctypes, errno, platform
    libc = ctypes.CDLL(None, use_errno=True)
    clone, clone3 = (56, 435) if platform.machine() == 'x86_64' else (220, 435)
    out = []
    for number, arguments in ((clone, (0x10000000 | 17, 0, 0, 0, 0)), (clone3, (0, 0))):
        libc.syscall(number, *arguments)
        out.append(errno.errorcode[ctypes.get_errno()])
    out
    """
    assert (await attack(sandbox, code)).value == "['EPERM', 'ENOSYS']"
    assert (
        await attack(sandbox, "import subprocess\nsubprocess.run(['unshare', '-Ur', 'id']).returncode")
    ).value != "0"


# --- resource limits ------------------------------------------------------------------------------


def need_process_limit(sandbox: af.PythonSandbox) -> None:
    if sandbox.limit_mechanisms["processes"] == "not limited":
        pytest.skip(f"nothing limits the number of processes at isolation={sandbox.isolation!r} for this user")


@every_level
async def test_fork_bomb(sandbox: af.PythonSandbox):
    code = """
    import os, time
    born = 0
    while True:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        born += 1
    """
    need_process_limit(sandbox)
    result = await attack(sandbox, code)
    assert (result.limit, result.error_type, result.died) == ("processes", "BlockingIOError", False)
    assert 8 <= int((await sandbox.run("born")).value or -1) <= 16
    # Every child forks too, and none stops when a fork is refused.
    code = """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """
    result = await attack(sandbox, code, timeout=1)
    assert result.limit in ("time", "processes")
    await sandbox.reset()
    await until(lambda: len(below(sandbox.pid or 0)) <= 2)


@every_level
async def test_threads_are_counted(sandbox: af.PythonSandbox):
    code = """
    import threading, time
    threading.stack_size(2 ** 16)
    threads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for _ in range(100)]
    for thread in threads:
        thread.start()
    """
    need_process_limit(sandbox)
    # Small stacks, because without control groups 16 stacks of 8 MB exceed the memory limit.
    assert (await attack(sandbox, code)).limit == "processes"


async def test_a_thread_that_lacks_memory_is_reported_as_memory():
    code = """
    import threading
    threading.stack_size(2 ** 29)
    threading.Thread(target=print, daemon=True).start()
    """
    async with af.PythonSandbox(isolation="none", memory_mb=96, processes=16, disk_mb=8) as sandbox:
        assert (await attack(sandbox, code)).limit == "memory"


@every_level
async def test_memory_bomb(sandbox: af.PythonSandbox):
    assert (await attack(sandbox, "x = []\nwhile True: x.append(bytearray(2 ** 20))")).limit == "memory"
    # Many processes, each below the limit, which applies to their total.
    if isolation.hierarchy() is None:
        pytest.skip("no control group is writable here: memory is limited for each process alone")
    code = """
    import os, time
    x = None
    reading, writing = os.pipe()
    for _ in range(6):
        if os.fork() == 0:
            x = b'x' * (48 * 2 ** 20)
            os.close(writing)
            time.sleep(1000)
            os._exit(0)
    os.close(writing)
    os.read(reading, 1)  # until every child has its memory or has been killed
    """
    for _ in range(2):  # the second kill must be recognized too
        assert (await attack(sandbox, code)).limit == "memory"


@strict
async def test_files_fill_their_own_disk_only(sandbox: af.PythonSandbox):
    code = """
    import os
    written = 0
    for place in ('/tmp', '/dev/shm'):
        try:
            for number in range(1000):
                with open(f'{place}/{number}', 'wb') as file:
                    for _ in range(16):
                        written += file.write(b'x' * 65536)
        except OSError as error:
            print(error)
    written / 2 ** 20
    """
    result = await attack(sandbox, code)
    assert float(result.value or 0) <= 8 + 8
    assert result.stdout.count("No space left") == 2
    result = await attack(sandbox, "open('/tmp/more', 'wb').write(bytes(2 ** 24))")
    assert (result.error_type, result.limit) == ("OSError", "disk")
    await sandbox.reset()
    assert (await sandbox.run("import os\nos.listdir('/tmp'), os.listdir('/dev/shm')")).value == "([], [])"


@levels("landlock", "none")
async def test_the_size_of_a_file_is_limited(sandbox: af.PythonSandbox):
    code = """
    written = 0
    with open('big', 'wb', buffering=0) as file:
        while True:
            written += file.write(b'x' * 65536)
    """
    result = await attack(sandbox, code)
    assert (result.error_type, result.limit) == ("OSError", "disk")
    assert (await sandbox.run("written")).value == str(8 * 2**20)
    await sandbox.reset()
    assert (await sandbox.run("import os\nos.listdir()")).value == "[]"


@strict
async def test_endless_empty_files(level: str):
    """Empty files use kernel memory, which counts towards the memory limit."""
    code = """
    import os
    for number in range(400_000):
        os.close(os.open(f'/tmp/{number}', os.O_CREAT | os.O_WRONLY))
    """
    settings = {"isolation": level, "memory_mb": 48, "processes": 16, "disk_mb": 8}
    async with af.Pool(af.PythonSandbox, size=1, **settings) as pool:
        async with pool.lease() as sandbox:
            result = await sandbox.run(textwrap.dedent(code), timeout=GUARD)
            expected = "memory" if isolation.hierarchy() else None
            assert result.limit == expected or (expected is None and not result.ok), result
        async with pool.lease() as sandbox:
            assert (await sandbox.run("import os\nos.listdir('/tmp')")).value == "[]"


@confined
async def test_the_interpreters_files_cannot_be_deleted(sandbox: af.PythonSandbox, level: str):
    code = """
    import os, sys
    library = os.path.join(os.path.dirname(os.__file__), 'this.py')
    [attempt(os.unlink, sys.executable), attempt(os.rename, sys.executable, sys.executable + '.x'),
     attempt(open, sys.executable, 'r+b'), attempt(os.unlink, library), attempt(os.truncate, library, 0),
     attempt(os.unlink, '/proc/self/exe'), os.path.exists(sys.executable), os.path.exists(library)]
    """
    outcomes = eval((await attack(sandbox, code)).value or "")
    assert "done" not in outcomes and outcomes[-2:] == [True, True], outcomes
    await attack(sandbox, "import sys, os\nsys.modules.clear()\nos._exit(0)")
    await attack(sandbox, "import builtins\nbuiltins.__dict__.clear()")
    await sandbox.reset()
    assert (await sandbox.run("import this as zen\nzen.d['T']")).value == "'G'"


@every_level
async def test_endless_loops_in_python_and_in_c(sandbox: af.PythonSandbox):
    for code in ("while True: pass", "import ctypes\nctypes.CDLL(None).pause()"):
        assert (await attack(sandbox, code, timeout=0.1)).timed_out
    endless = "import collections, itertools\ncollections.deque(itertools.repeat(0), maxlen=0)"
    result = await attack(sandbox, endless, timeout=0.1)  # C code that does not check for signals
    assert (result.timed_out, result.limit) == (True, "time")


@every_level
async def test_endless_output(sandbox: af.PythonSandbox):
    result = await attack(sandbox, "import os\nos.system('yes')")
    assert (result.limit, result.truncated, len(result.stdout)) == ("output", True, sandbox.max_output)
    code = "import subprocess, sys\nprint('before', flush=True)\nsubprocess.Popen(['yes'], stdout=sys.stdout)\n'here'"
    assert (await attack(sandbox, code)).value == "'here'"


@every_level
async def test_forged_replies(sandbox: af.PythonSandbox):
    """Code can write to the socket on which the interpreter answers, which affects only its own chain."""
    find = (
        "import os, socket, stat, json\ndef is_socket(f):\n    try: return stat.S_ISSOCK(os.fstat(f).st_mode)\n"
        "    except OSError: return False\n"
        "s = [socket.socket(fileno=os.dup(f)) for f in range(64) if is_socket(f)][0]\n"
    )
    for lie in (
        "s.send(b'x' * 10_000_000)",
        "s.send(b'not json\\n')",
        "s.send(b'[1, 2]\\n')",
        "s.send(b'[' * 100_000 + b'\\n')",
        "s.send(json.dumps({'id': 10 ** 9, 'value': 'early'}).encode() + b'\\n')",
        's.send(b\'{"id": [], "error": {}, "value": 7, "limit": "nonsense"}\\n\')',
    ):
        result = await sandbox.run(find + lie)
        assert isinstance(result, af.SandboxResult), lie
        assert (await sandbox.run("6 * 7")).value == "42", lie
    # With a known call id, which is random otherwise.
    lie = {"id": 77, "value": 7, "error": ["no text"], "type": None, "truncated": 3, "limit": "nonsense"}
    with mock.patch("agentfly_kit.sandboxes.sandbox.secrets.randbits", return_value=77):
        result = await sandbox.run(f"{find}s.send(json.dumps({lie!r}).encode() + b'\\n')")
    assert (result.value, result.error, result.limit) == (None, None, None)
    await sandbox.reset()
    assert (await sandbox.run("6 * 7")).value == "42"


# --- resets ---------------------------------------------------------------------------------------


@strict
async def test_a_reset_removes_everything(sandbox: af.PythonSandbox):
    code = """
    import os, socket, subprocess, sys, time
    os.makedirs('/tmp/' + 'd/' * 200)
    os.symlink('/usr', '/tmp/link')
    os.mkfifo('/tmp/fifo')
    open('/dev/shm/note', 'w').write('x')
    os.chmod('/tmp', 0)
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
    sock = socket.socket(socket.AF_UNIX); sock.bind('\\0note')
    """
    assert (await sandbox.run(textwrap.dedent(code))).ok
    before = sandbox.pid
    await sandbox.reset()
    assert sandbox.pid == before
    code = """
    import os, socket
    sock = socket.socket(socket.AF_UNIX); sock.bind('\\0note')
    os.listdir('/tmp'), os.listdir('/dev/shm'), sorted(int(p) for p in os.listdir('/proc') if p.isdigit())[0], len(
        [p for p in os.listdir('/proc') if p.isdigit()]), os.access('/usr/bin', os.R_OK)
    """
    assert (await sandbox.run(textwrap.dedent(code))).value == "([], [], 1, 2, True)"


@levels("landlock", "none")
async def test_a_reset_removes_everything_without_namespaces(sandbox: af.PythonSandbox, level: str):
    code = """
    import os, subprocess, sys
    os.makedirs('d/' * 200)
    os.symlink('/usr', 'link')
    os.mkfifo('fifo')
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
    """
    result = await sandbox.run(textwrap.dedent(code))
    assert result.ok, result.error
    before, children = sandbox.pid, below(sandbox.pid or 0)
    await sandbox.reset()
    after = below(sandbox.pid or 0)
    assert (sandbox.pid, len(children), len(after), children & after) == (before, 2, 1, set())
    assert (await sandbox.run("import os\nos.listdir(), os.access('/usr/bin', os.R_OK)")).value == "([], True)"


@every_level
async def test_deep_and_unreadable_folders_are_deleted_by_a_reset(sandbox: af.PythonSandbox, level: str):
    code = (
        "import os\ntop = os.getcwd()\n"
        "for _ in range(60):\n    os.mkdir('d' * 99); os.chdir('d' * 99)\nopen('secret', 'w').write('x')"
    )
    assert (await sandbox.run(code)).ok
    await sandbox.run("os.chdir(top); os.makedirs('a/b/c')")
    result = await sandbox.run("os.chdir(top)\nfor path in ('a/b/c', 'a/b', 'a'):\n    os.chmod(path, 0)")
    assert result.error_type == ("PermissionError" if level == "landlock" else None)
    await sandbox.reset()
    assert (await sandbox.run("import os\nos.listdir('.')")).value == "[]"


@strict
async def test_a_python_below_tmp_is_visible_and_survives_resets(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A Python below the host's /tmp is mounted elsewhere, because a reset empties the sandbox's own /tmp."""
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "module.py").write_text("x = 1")
    folders = [*commands.python_folders(), str(venv)]
    monkeypatch.setattr(commands, "python_folders", lambda packages=True: folders)
    async with af.PythonSandbox(isolation=level) as sandbox:
        look = f"import os\nos.path.exists({commands.inside_path(str(venv / 'module.py'))!r}), os.listdir('/tmp')"
        assert (await sandbox.run("open('/tmp/note', 'w').close()\n" + look)).value == "(True, ['note'])"
        await sandbox.reset()
        assert (await sandbox.run(look)).value == "(True, [])"


@every_level
async def test_a_reset_that_fails_ends_the_sandbox(sandbox: af.PythonSandbox, monkeypatch: pytest.MonkeyPatch):
    await sandbox.run("import os\nfor i in range(1, 400):\n    os.mkdir(str(i))")
    monkeypatch.setattr("agentfly_kit.sandboxes.sandbox.CONTROL_SECONDS", 1e-6)
    await errors.check(sandbox.reset, af.errors.SandboxError, "no answer from the sandbox")
    assert not sandbox.alive
    monkeypatch.undo()
    assert (await sandbox.run("import os\nos.listdir('.')")).value == "[]"


@every_level
async def test_limit_mechanisms(sandbox: af.PythonSandbox, level: str):
    group, used = isolation.hierarchy(), sandbox.limit_mechanisms
    memory = f"control group ({group.version}), all processes together" if group else "RLIMIT_DATA"
    disk = {"strict": "size of its own /tmp"}.get(level, "RLIMIT_FSIZE, each file")
    network = {"landlock": "no sockets", "none": "not limited"}.get(level, "only its own loopback interface")
    assert used["memory_mb"].startswith(memory) and (used["disk_mb"], used["network"]) == (disk, network)
    assert isolation.limit_mechanisms(level, Limits(network=True), group)["network"] == "allowed, as requested"
    open_files = (await sandbox.run("import resource\nresource.getrlimit(resource.RLIMIT_NOFILE)")).value
    assert (used["open_files"], open_files) == ("RLIMIT_NOFILE, 512 in each process", "(512, 512)")


# --- older kernels, other users, filters ----------------------------------------------------------


@levels("landlock")
@pytest.mark.parametrize("version", [1, 3])
async def test_the_filter_covers_what_an_older_landlock_lacks(
    level: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Landlock covers truncation from version 3 and signals from version 6."""
    real = commands.landlock_version()
    monkeypatch.setattr(commands, "landlock_version", lambda: min(real, version))
    (tmp_path / "mine").write_text("untouched")
    async with af.PythonSandbox(isolation=level) as sandbox:
        code = f"""
        import os, socket
        [attempt(c) for c in (lambda: os.kill(os.getppid(), 0), lambda: os.kill({os.getpid()}, 0), socket.socket,
          lambda: open({str(tmp_path / "mine")!r}), lambda: os.truncate({str(tmp_path / "mine")!r}, 0),
          lambda: os.listdir('/proc'))]
        """
        assert (await attack(sandbox, code)).value == str(["PermissionError"] * 6)
        assert (await sandbox.run("while True: pass", timeout=0.2)).timed_out
    assert (tmp_path / "mine").read_text() == "untouched"


USER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from agentfly_kit.errors import SandboxError
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes import sandbox as limits
from agentfly_kit.sandboxes.host import isolation
limits.CONTROL_SECONDS = 300  # and no call has a shorter limit, since the machine may be slow
PythonSandbox.run.__defaults__ = (300,)
async def main():
    async with PythonSandbox(isolation=sys.argv[2], processes=12, memory_mb=96) as sandbox:
        print(sandbox.limit_mechanisms["processes"], sandbox.limit_mechanisms["memory_mb"], sep="|")
        code = "import os, time\\nborn = 0\\nwhile True:\\n    if os.fork() == 0: time.sleep(1000)\\n    born += 1"
        result = await sandbox.run(code)
        print(result.limit, (await sandbox.run("born")).value, sep="|")
        print((await sandbox.run("x = bytearray(200 * 2 ** 20)")).limit)
        look = "import os\\ntry: seen = open('/etc/hostname')\\nexcept OSError: seen = None\\nos.getuid(), seen"
        print((await sandbox.run(look)).value)
        pid = sandbox.pid
        crowd = "import os, time\\nfor _ in range(40):\\n    if os.fork() == 0: time.sleep(1000)"
        fork = "import os\\nchild = os.fork()\\nif not child: os._exit(0)\\nos.waitpid(child, 0)[1]"
        async with PythonSandbox(isolation=sys.argv[2], processes=64) as other:
            await other.run(crowd)
            await sandbox.reset()
            print((await sandbox.run(fork)).value)
    print(os.path.exists(f"/proc/{pid}"), isolation.hierarchy())
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run without root")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="another user cannot reach this Python")
@confined
def test_without_root_and_without_control_groups(level: str, tmp_path: Path):
    """Run as another user, for whom the limits of a user namespace replace those of control groups."""
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    if version.stdout != b"True\n":
        pytest.skip("the system's Python is older than 3.11")
    package = Path("/tmp") / f"agentfly-test-{os.getpid()}"
    source = Path(isolation.__file__).parents[2]
    try:
        (package / "agentfly_kit").mkdir(parents=True)
        (package / "agentfly_kit" / "__init__.py").touch()
        for name in ("errors.py", "_display.py"):
            shutil.copy(source / name, package / "agentfly_kit")
        for name in ("_async", "sandboxes"):
            shutil.copytree(source / name, package / "agentfly_kit" / name)
        subprocess.run(["chmod", "-R", "a+rX", str(package)], check=True)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", USER, str(package), level],
            user=12345, group=12345, extra_groups=[], cwd="/", env={"PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=GUARD,
        )  # fmt: skip
    finally:
        shutil.rmtree(package)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert lines[0].replace(",", "") == "RLIMIT_NPROC in its own user namespace|RLIMIT_DATA each process"
    limit, born = lines[1].split("|")
    assert limit == "processes" and 6 <= int(born) <= 12
    assert lines[2:] == ["memory", ("(65534, None)" if level == "strict" else "(12345, None)"), "0", "False None"]


def test_the_filter_is_valid_for_both_machines():
    """Every jump stays within the program, which ends with a return instruction."""
    kinds = [{}, {"landlock": 1}, {"landlock": 6, "network": False}]
    for machine, kind in itertools.product(("x86_64", "aarch64"), kinds):
        program = seccomp.program(machine, **kind)
        steps = [program[i : i + 8] for i in range(0, len(program), 8)]
        for place, step in enumerate(steps):
            code, jt, jf = int.from_bytes(step[:2], "little"), step[2], step[3]
            if code in (seccomp._EQUAL, seccomp._AT_LEAST, seccomp._ANY_BIT):
                assert max(jt, jf) + place + 1 < len(steps)
        assert int.from_bytes(steps[-1][:2], "little") == seccomp._RETURN
    assert seccomp.program("riscv64") is None
    assert ctypes.sizeof(ctypes.c_long) == 8 or platform.machine() not in seccomp._MACHINES


FORGE = """
import json, os, stat, threading

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

sockets = [fd for fd in range(256) if is_socket(fd)]

called = threading.Event()

def forge():
    called.wait()
    reply = {"value": "'forged'", "error": None, "type": None, "truncated": False, "limit": None}
    for number in range(200):
        for fd in sockets:
            os.write(fd, json.dumps({"id": number, **reply}).encode() + bytes([10]))

forger = threading.Thread(target=forge, daemon=True)
forger.start()
len(sockets)
"""


@levels("strict", "none")
async def test_a_background_thread_cannot_forge_the_next_reply(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        assert (await sandbox.run(FORGE)).value not in (None, "0")
        assert (await sandbox.run("called.set()\nforger.join()\n'true'")).value == "'true'"
