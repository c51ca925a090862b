"""Attempts to change the machine from a sandbox by other means than the contents of its files.

Looked for: files, folders and devices that belong to the uid of the code (strict and landlock, as root); descriptors
that the interpreter inherits; signals that a file sends to its owner; datagram sockets without `socket`; names and
attributes of files that cannot be opened. Found: all but the second.
"""

import ast
import asyncio
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import errors
import pytest
from test_sandbox_abuse import attack, levels, sandbox, strict

import agentfly_kit as af
from agentfly_kit.sandboxes.host import commands, isolation
from agentfly_kit.sandboxes.inside.processes import descendants

__all__ = ["sandbox"]

# Try to change everything that is visible, with no effect if it succeeds: the mode and the times to what they are, and
# files are opened for writing.
CHANGE = """
import os, stat
found = set()
def change(path):
    status = os.lstat(path)
    changes = [lambda: os.chmod(path, stat.S_IMODE(status.st_mode)),
               lambda: os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))]
    if stat.S_ISREG(status.st_mode):
        changes.append(lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
    found.update(path for call in changes if attempt(call) == "done")
def walk(folder):
    for entry in os.scandir(folder):
        process = folder == "/proc" and entry.name.isdigit()
        if not (process or entry.is_symlink() or entry.path in OTHERS):
            attempt(change, entry.path)
            if entry.is_dir(): attempt(walk, entry.path)
for path in PATHS: attempt(change, path)
attempt(walk, "/")
sorted(found)
"""
# A trigger of /proc/pressure belongs to who opens it, and ns_last_pid to the sandbox's own namespace.
HARMLESS = {"/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory", "/proc/sys/kernel/ns_last_pid"}


@levels("strict", "landlock")
async def test_nothing_of_the_machine_can_be_changed(sandbox: af.PythonSandbox, level: str):
    """If the host process is root, the code must not own what root owns, such as kernel settings and devices."""
    # Read-only mounts with many files, and the sandbox's own file systems.
    others = ["/usr", sys.prefix, sys.base_prefix, "/tmp", "/dev/shm", "/dev/pts"]
    paths = [
        str(path)
        for folder in ("/dev", "/proc/sys", "/sys/kernel")
        for path in await asyncio.to_thread(files, folder)
    ]
    code = CHANGE.replace("OTHERS", repr(others)).replace(
        "PATHS", repr(["/", "/dev", "/proc", "/proc/cpuinfo", *paths])
    )
    found = await attack(sandbox, code)
    assert set(ast.literal_eval(found.value or "")) <= HARMLESS


def files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if not path.is_dir() and not path.is_symlink()][:2000]


@strict
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users")
async def test_code_of_root_runs_as_another_user(sandbox: af.PythonSandbox, level: str):
    """On the host it is user 65534, without capabilities and groups, and it can get neither back."""
    code = """
    import os, re
    [attempt(call, 0, 0, 0) for call in (os.setresuid, os.setresgid)], attempt(os.setgroups, [0]), os.getgroups(), \
        set(re.findall(r"Cap(?:Prm|Eff|Inh|Amb):\\t(\\w+)", open("/proc/self/status").read())), \
        {os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(64) if attempt(os.fstat, n) == "done"}
    """
    found = ast.literal_eval((await attack(sandbox, code)).value or "")
    assert found[:4] == (["PermissionError"] * 2, "PermissionError", [], {"0" * 16})
    assert found[4] == {"/dev/null", "pipe", "socket"}, "not the user namespace, and no file of the machine"
    # bwrap, which runs no code of the sandbox, then the zygote and the interpreter
    users = [
        (await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)).split("Uid:")[1].split()[:4]
        for pid in descendants(sandbox.pid or 0)
    ]
    assert users == [["65534", "65534", "0", "65534"], ["65534"] * 4]


@strict
@pytest.mark.skipif(os.geteuid() != 0, reason="concerns root")
async def test_strict_is_not_available_if_root_must_run_code_as_root(level: str, monkeypatch: pytest.MonkeyPatch):
    """As in a container whose root may not map other users. The probe finds that kernel settings can be written."""
    monkeypatch.setattr(commands, "unprivileged_namespace", lambda: None)
    isolation._probe_strict.cache_clear()
    try:
        reason = isolation.unavailable_reason("strict")
        assert reason.startswith("code inside could change /proc/sys/kernel/core_pattern of this machine, because")
        await errors.check(af.PythonSandbox(isolation="strict").start, af.errors.IsolationError, "core_pattern")
    finally:
        isolation._probe_strict.cache_clear()


@pytest.fixture
def older_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    real = commands.landlock_version()
    monkeypatch.setattr(commands, "landlock_version", lambda: min(real, request.param))


every_version = pytest.mark.parametrize("older_kernel", [1, 5, 99], indirect=True)
landlock = levels("landlock")


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@landlock
@every_version
@pytest.mark.usefixtures("older_kernel")
async def test_no_signal_through_the_owner_of_a_file(level: str, victim: subprocess.Popen[bytes]):
    """A pipe with an owner sends it a signal when data arrives. Landlock covers that from version 6."""
    pid = struct.pack("i", victim.pid)
    code = f"""
    import fcntl, os
    reader, writer = os.pipe()
    found = [attempt(fcntl.fcntl, reader, 10, 9), attempt(fcntl.fcntl, reader, 8, {victim.pid}),
             attempt(fcntl.fcntl, reader, 15, {struct.pack("ii", 1, victim.pid)}),
             attempt(fcntl.ioctl, reader, 0x8901, {pid}), attempt(fcntl.ioctl, reader, 0x8902, {pid})]
    attempt(fcntl.fcntl, reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    found
    """
    async with af.PythonSandbox(isolation=level) as sandbox:
        assert (await attack(sandbox, code)).value == str(["PermissionError"] * 5)
    assert victim.poll() is None


@landlock
@every_version
@pytest.mark.usefixtures("older_kernel")
async def test_no_datagram_to_a_socket_of_the_host(level: str, tmp_path: Path):
    """The ends of a datagram pair are not bound to each other, unlike those of stream and seqpacket pairs."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        path, name = f"/tmp/agentfly-test-{os.getpid()}-datagram", f"\0agentfly-test-{os.getpid()}-datagram"
        named.bind(path)
        try:
            abstract.bind(name)
            code = f"""
            import itertools, socket
            def send(kind, address):
                a, b = socket.socketpair(socket.AF_UNIX, kind)
                a.sendto(b"outside", address)
            def connect(kind, address):
                a, b = socket.socketpair(socket.AF_UNIX, kind)
                a.connect(address)
                a.send(b"outside")
            kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, socket.SOCK_RAW,
                     socket.SOCK_SEQPACKET)
            for call, kind, address in itertools.product((send, connect), kinds, ({path!r}, {name!r})):
                attempt(call, kind, address)
            [attempt(socket.socketpair, socket.AF_UNIX, kind) for kind in kinds]
            """
            async with af.PythonSandbox(isolation=level) as sandbox:
                refused = ["PermissionError"] * 3
                assert (await attack(sandbox, code)).value == str(["done", *refused, "done"])
            for server in (named, abstract):
                server.setblocking(False)
                errors.check(lambda: server.recv(100), BlockingIOError)
        finally:
            os.unlink(path)


@landlock
async def test_names_and_attributes_of_files_that_cannot_be_opened(
    sandbox: af.PythonSandbox, level: str, tmp_path: Path
):
    os.setxattr(tmp_path, "user.secret", b"value")
    number = 254 if platform.machine() == "x86_64" else 27
    code = f"""
    import ctypes, os
    libc, place = ctypes.CDLL(None, use_errno=True), {str(tmp_path)!r}
    def watch():
        if libc.syscall({number}, libc.inotify_init(), place.encode(), 0xFFF) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
    [attempt(watch), attempt(os.getxattr, place, "user.secret"), attempt(os.listxattr, place)]
    """
    assert (await attack(sandbox, code)).value == "['PermissionError', 'OSError', 'OSError']"
    # Programs that look for attributes take the error for a file system without them.
    code = "import subprocess\nsubprocess.run('echo 1 > a; ls -l a; cp a b; cat b', shell=True, capture_output=True)"
    done = (await attack(sandbox, code)).value or ""
    assert "returncode=0" in done and "stderr=b''" in done and r"a\n1\n" in done, done
