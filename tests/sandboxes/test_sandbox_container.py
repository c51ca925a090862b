"""Sandboxes in containers of podman, on a private socket and with an image of this machine's Python.

The attacks are those of test_sandbox_abuse.
"""

import ast
import asyncio
import gc
import inspect
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import errors
import pytest
import pytest_asyncio
import test_sandbox_abuse as abuse
from calls import each
from cancelling import cancelled_lives
from containers import IMAGE, Podman, trouble
from patience import begun
from test_sandbox_abuse import attack
from test_sandbox_agents import HOSTILE, check_hostile, check_reach
from test_sandbox_python import files
from waiting import GUARD, blocking_until

import agentfly_kit as af
from agentfly_kit.sandboxes.host import commands
from agentfly_kit.sandboxes.host import container as containers_module
from agentfly_kit.sandboxes.host.limits import Limits

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    """Start an engine. If that is not possible, the tests are skipped, or fail where CI requires them."""
    if trouble() and os.environ.get("AGENTFLY_TEST_CONTAINERS") != "must":
        pytest.skip(trouble())
    assert not trouble(), trouble()
    # With a long path podman does not remove containers that exit.
    with tempfile.TemporaryDirectory(prefix="afk-", ignore_cleanup_errors=True) as folder:
        podman = Podman(Path(folder))
        yield podman
        podman.stop()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    podman = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    asyncio.run(asyncio.to_thread(int))
    before = files()
    yield
    if podman is None:
        return
    gc.collect()
    blocking_until(lambda: podman.names() == [] and not streams())
    blocking_until(lambda: files() <= before)


def streams() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("agentfly-stream", "agentfly-container-removal")]


def place(engine: Podman, **settings: Any) -> af.Container:
    return af.Container(IMAGE, engine=engine.url, **settings)


@pytest_asyncio.fixture
async def sandbox(engine: Podman) -> AsyncIterator[af.PythonSandbox]:
    async with af.PythonSandbox(isolation=place(engine), memory_mb=96, processes=16, disk_mb=8) as inside:
        yield inside


# --- results --------------------------------------------------------------------------------------


async def test_results_are_those_of_other_levels(engine: Podman):
    async with af.PythonSandbox(isolation=place(engine)) as sandbox:
        result = await sandbox.run("print('out')\nimport sys\nprint('err', file=sys.stderr)\n6 * 7")
        assert (result.stdout, result.stderr, result.value, result.error) == ("out\n", "err\n", "42", None)
        result = await sandbox.run("def f():\n    return 1 / 0\nf()")
        assert result.error.startswith('Traceback (most recent call last):\n  File "<cell 2>", line 3, in <module>')
        assert "sandbox" not in result.error
        result = await sandbox.run("print('last words', flush=True)\nimport os\nos._exit(3)")
        error = "the interpreter exited with status 3"
        assert (result.died, result.stdout, result.error) == (True, "last words\n", error)
        long = "y" * 3_000_000
        assert await each("value", sandbox, "'x' in globals()", f"len('{long}')") == ["False", "3000000"]
        result = await sandbox.run("print('z' * 60_000)")
        assert len(result.stdout) == 60_001
        assert repr(sandbox) == f"<PythonSandbox container {IMAGE}, 6 calls>"
        assert sandbox.limit_mechanisms["processes"] == "the container's control group, all processes together"


async def test_a_pool_of_containers_serves_an_agent(engine: Podman):
    @af.tool
    async def python(code: str, sandbox: af.PythonSandbox) -> str:
        """Run Python.

        Args:
            code: what to run.
        """
        return (await sandbox.run(code)).text

    async with af.Pool(af.PythonSandbox, size=2, min_idle=1, isolation=place(engine)) as pool:
        assert pool.snapshot().isolation == f"container {IMAGE}"
        result = await python.try_(code="import os\nprint(os.getuid(), os.getpid() > 1)", pool=pool)
        assert result.observation.strip() == "65534 True"
        async with pool.lease() as first:
            await first.run("open('/tmp/note', 'w').write('mine')")
            async with pool.lease() as second:
                assert (await second.run("import os\nos.path.exists('/tmp/note')")).value == "False"
        for _ in range(4):
            async with pool.lease() as again:
                assert (await again.run("import os\nos.listdir('/tmp'), 'note' in globals()")).value == "([], False)"
        assert pool.snapshot().dead == 0


async def test_other_sandbox_classes(engine: Podman):
    settings: dict[str, Any] = {"isolation": place(engine), "memory_mb": 128}
    async with af.ShellSandbox(**settings) as shell:
        await shell.run("x=6; cd /tmp; echo 7 > seven")
        result = await shell.run("echo $((x * $(cat seven))); id -u")
        assert (result.stdout, result.exit_code) == ("42\n65534\n", 0), result
    async with af.FileSandbox(**settings) as files:
        await files.seed({"a.txt": "one\ntwo\n"})
        assert "two" in await files.read("a.txt", start=2)
    async with af.SQLSandbox(**settings) as sql:
        assert (await sql.run("select 6 * 7")).rows == ((42,),)


# --- attacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempt",
    [
        abuse.test_the_zygote_is_out_of_reach, abuse.test_the_loopback_of_the_sandbox, abuse.test_no_new_user_namespace,
        abuse.test_fork_bomb, abuse.test_threads_are_counted, abuse.test_endless_loops_in_python_and_in_c,
        abuse.test_endless_output, abuse.test_forged_replies, abuse.test_memory_bomb,
        abuse.test_deep_and_unreadable_folders_are_deleted_by_a_reset,
    ],
    ids=lambda attempt: attempt.__name__.removeprefix("test_"),
)  # fmt: skip
async def test_attacks_of_the_strict_level(
    sandbox: af.PythonSandbox, attempt: Callable[..., Any], engine: Podman, monkeypatch: pytest.MonkeyPatch
):
    """The tests also inspect the container from the host, where the engine runs."""
    (name,) = engine.names()
    pid = int(engine.podman("inspect", "--format", "{{.State.Pid}}", name))
    monkeypatch.setattr(af.PythonSandbox, "pid", property(lambda self: pid))
    takes = inspect.signature(attempt).parameters
    await attempt(sandbox, **({"level": "strict"} if "level" in takes else {}))


async def test_the_filter_refuses(sandbox: af.PythonSandbox):
    for call in ("unshare", "mount", "ptrace", "keyctl", "bpf", "io_uring_setup", "userfaultfd", "mq_open", "setns"):
        await abuse.test_the_filter_refuses(sandbox, call)


# --- settings -------------------------------------------------------------------------------------


async def test_user_capabilities_and_environment(sandbox: af.PythonSandbox):
    code = "open('/proc/1/status').read()"
    status = eval((await attack(sandbox, "open('/proc/self/status').read()")).value or "''")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == fields["Gid"].split() == ["65534"] * 4
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert int(fields["Seccomp_filters"]) >= 2
    assert (await sandbox.run(code)).ok
    result = await attack(sandbox, "import os\nsorted(os.environ)")
    known = "HOME LANG LOGNAME PATH TMPDIR USER PYTHONHASHSEED PYTHONDONTWRITEBYTECODE PYTHONUTF8 OMP_NUM_THREADS "
    known += "OPENBLAS_NUM_THREADS MKL_NUM_THREADS HOSTNAME TERM container"
    assert set(eval(result.value or "[]")) <= set(known.split())


async def test_only_its_own_folders_can_be_written_and_a_reset_empties_them(sandbox: af.PythonSandbox):
    code = """
    import os
    done, seen = [], 0
    for place, folders, files in os.walk('/'):
        if place.startswith(('/proc', '/sys')):
            folders.clear()
            continue
        seen += 1
        try:
            with open(place + '/mark', 'w') as file:
                file.write('x')
            done.append(place)
        except OSError:
            pass
    seen > 20, sorted(done)
    """
    searched, done = eval((await attack(sandbox, code)).value or "()")
    assert searched and {"/tmp"} <= set(done) <= {"/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp"}, done
    await sandbox.reset()
    assert (await sandbox.run(f"import os\n[os.listdir(place) for place in {done}]")).value == repr(
        [[] for _ in done]
    )


async def test_files_fill_their_own_disk_only(sandbox: af.PythonSandbox):
    code = """
    import os
    written = 0
    for place in ('/tmp', '/dev/shm', '/var/tmp', '/run', '/dev/mqueue'):
        try:
            for number in range(1000):
                with open(f'{place}/{number}', 'wb') as file:
                    for _ in range(16):
                        written += file.write(b'x' * 65536)
                        file.flush()
        except OSError as error:
            pass
    written / 2 ** 20
    """
    assert float((await attack(sandbox, code)).value or 99) <= 8 + 8 + 0.1
    await sandbox.reset()
    assert (await sandbox.run("import os\nos.listdir('/tmp'), os.listdir('/dev/shm')")).value == "([], [])"


async def test_processor_time_of_all_processes_together(engine: Podman):
    async with af.PythonSandbox(isolation=place(engine), cpu_seconds=1.0) as sandbox:
        assert (await sandbox.run("import os\nfor _ in range(2): os.fork()\nwhile True: pass")).limit == "cpu"
        await sandbox.reset()  # ends the other processes
        assert (await sandbox.run("6 * 7")).value == "42"


async def test_processors(engine: Podman):
    code = """
    import time
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < 1.5:
        pass
    time.process_time() - used
    """
    async with af.PythonSandbox(isolation=place(engine, cpus=0.25)) as sandbox:
        assert float((await sandbox.run(textwrap.dedent(code))).value or 9) < 0.8


async def test_network_access_only_if_requested(engine: Podman):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]})).fileno() > 0"
        async with af.PythonSandbox(isolation=place(engine, network="host"), network=True) as sandbox:
            assert (await attack(sandbox, code)).value == "True"
        async with af.PythonSandbox(isolation=place(engine, network="host")) as sandbox:
            assert (await attack(sandbox, code)).error_type == "ConnectionRefusedError"
            assert (await attack(sandbox, "[n for _, n in socket.if_nameindex()]")).value == "['lo']"


async def test_mounts(engine: Podman, tmp_path: Path):
    (tmp_path / "read").mkdir()
    (tmp_path / "write").mkdir()
    (tmp_path / "read" / "table").write_text("1,2")
    (tmp_path / "write").chmod(0o777)
    mounts = {str(tmp_path / "read"): "/data", str(tmp_path / "write"): "/out:rw"}
    async with af.PythonSandbox(isolation=place(engine, mounts=mounts)) as sandbox:
        assert (await attack(sandbox, "open('/data/table').read()")).value == "'1,2'"
        assert (await attack(sandbox, "open('/data/table', 'w')")).error_type == "OSError"
        assert (await attack(sandbox, "open('/out/kept', 'w').write('x')")).ok
        await sandbox.reset()
        assert (await attack(sandbox, "open('/out/kept').read()")).value == "'x'"
    assert (tmp_path / "write" / "kept").read_text() == "x"


# --- unavailable engines --------------------------------------------------------------------------


async def test_no_engine_no_image_no_python(engine: Podman, monkeypatch: pytest.MonkeyPatch):
    async with af.Pool(af.PythonSandbox, isolation=af.Container(IMAGE, engine="unix:///nowhere.sock")) as pool:
        await errors.check(pool.acquire, af.errors.IsolationError, "no container engine answers at unix:///nowhere")
    async with af.Pool(af.PythonSandbox, isolation=af.Container("no-such-image:1", engine=engine.url)) as pool:
        await errors.check(pool.acquire, af.errors.IsolationError, re.compile(r"no such image.*pull it first"))
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"isolation": place(engine, python="python9")}, af.errors.SandboxError, "python9"),
        ({"isolation": place(engine, runtime="no-such-runtime")}, af.errors.SandboxError, "no-such-runtime"),
        ({"isolation": place(engine), "preload": ["no_such_module"]}, af.errors.SandboxError,
         "No module named 'no_such_module'"),
        ({"isolation": af.Container(IMAGE, engine="ssh://host")}, af.errors.IsolationError,
         "forward the engine's socket"),
    ]  # fmt: skip
    for settings, error, text in refusals:
        await errors.check(af.PythonSandbox(**settings).start, error, text)
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    async with af.PythonSandbox(isolation=af.Container(IMAGE)) as sandbox:
        assert (await sandbox.run("6 * 7")).value == "42"


# --- ends -----------------------------------------------------------------------------------------

KERNEL = """
import asyncio, os, sys
from agentfly_kit.sandboxes.host.container import Container
from agentfly_kit.sandboxes.python import PythonSandbox
async def main():
    sandboxes = [PythonSandbox(isolation=Container(sys.argv[1], engine=sys.argv[2])) for _ in range(2)]
    for sandbox in sandboxes:
        await sandbox.start()
    print("ready", flush=True)
    await sandboxes[0].run("import os, time\\nos.fork()\\ntime.sleep(1000)", timeout=1000)
asyncio.run(main())
"""


def test_a_kernel_that_is_killed_leaves_nothing(engine: Podman):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, IMAGE, engine.url], stdout=subprocess.PIPE)
    try:
        assert kernel.stdout is not None and kernel.stdout.readline() == b"ready\n"
        assert len(engine.names()) == 2
    finally:
        kernel.kill()
        kernel.communicate()
    blocking_until(lambda: engine.names() == [])


def test_python_that_ends_without_closing_leaves_nothing(engine: Podman):
    code = KERNEL.replace('await sandboxes[0].run("', 'return sandboxes.append("')
    code = code.replace(", timeout=1000)", ")")
    done = subprocess.run(
        [sys.executable, "-c", code, IMAGE, engine.url], capture_output=True, text=True, timeout=GUARD
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
    blocking_until(lambda: engine.names() == [])


@pytest.mark.parametrize("way", ["destroy", "kill"])
def test_an_interrupt_while_a_container_is_ended_leaves_nothing(
    way: str, engine: Podman, monkeypatch: pytest.MonkeyPatch
):
    sandbox, loop = af.PythonSandbox(isolation=place(engine)), asyncio.new_event_loop()
    loop.run_until_complete(sandbox.start())
    handle: Any = sandbox._handle
    with monkeypatch.context() as patch:
        patch.setattr(handle, "close_channels", lambda: signal.raise_signal(signal.SIGINT))
        errors.check(getattr(handle, way), KeyboardInterrupt)
    blocking_until(lambda: engine.names() == [])
    handle.disconnect()
    sandbox.kill()
    loop.close()


def test_unstarted_containers_of_a_killed_process_are_removed(engine: Podman):
    """A container that was created but not started does not exit by itself; the next process removes it."""
    code = (
        "import sys\nfrom agentfly_kit.sandboxes.host.container import Container\n"
        "from agentfly_kit.sandboxes.host import container as c\n"
        "from agentfly_kit.sandboxes.host.limits "
        "import Limits\nwith c._client(sys.argv[2]) as api:\n    api.create_container_from_config(c._config(api, "
        "Container(sys.argv[1]), Limits(), True))"
    )
    subprocess.run([sys.executable, "-c", code, IMAGE, engine.url], check=True, timeout=GUARD)
    assert len(engine.names()) == 1
    with containers_module._client(engine.url) as api:
        ours = api.create_container_from_config(containers_module._config(api, place(engine), Limits(), True))["Id"]
        containers_module._remove_orphans(api)
        assert [each["Id"] for each in api.containers(all=True)] == [ours]
        api.remove_container(ours)


async def test_a_container_that_is_killed_from_outside(engine: Podman):
    async with af.Pool(af.PythonSandbox, size=1, isolation=place(engine)) as pool:
        async with pool.lease() as sandbox:
            await sandbox.run("x = 1")
            engine.podman("kill", *engine.names())
            await errors.check(lambda: sandbox.run("x"), af.errors.SandboxError, "ended from outside")
            await sandbox.start()
            assert (await sandbox.run("6 * 7")).value == "42"
            running = await begun(sandbox, "import time\nprint('begun', flush=True)\ntime.sleep(1000)")
            engine.podman("kill", *engine.names())
            await errors.check(lambda: running, af.errors.SandboxError, "ended from outside")
        async with pool.lease() as sandbox:
            assert (await sandbox.run("6 * 7")).value == "42"


async def test_cancelled_while_it_starts_and_while_it_runs(engine: Podman):
    def opened(chance: random.Random) -> af.Pool[af.PythonSandbox]:
        return af.Pool(af.PythonSandbox, size=2, isolation=place(engine), acquire_timeout=GUARD)

    assert await cancelled_lives(opened, random.Random(0), 24, late=1.0) >= 24
    for delay in (0.0, 0.02, 0.1):
        sandbox = af.PythonSandbox(isolation=place(engine))
        starting = asyncio.ensure_future(sandbox.start())
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.wait([starting])
        await sandbox.close()


async def test_printing_between_calls_blocks_nothing(sandbox: af.PythonSandbox):
    """Print more output than all buffers hold between calls. A call, a reset and another call must still work."""
    code = """
    import threading
    def flood():
        while True:
            print('x' * 1000, flush=True)
    threading.Thread(target=flood, daemon=True).start()
    """
    assert (await sandbox.run(textwrap.dedent(code))).ok
    for _ in range(2):
        await asyncio.sleep(0.3)  # for output to fill the buffers; less output makes the test easier
        await sandbox.run("y = 6")
    await sandbox.reset()
    result = await sandbox.run("6 * 7")
    assert (result.value, result.stdout) == ("42", "")


def test_inside_files_parse_with_the_oldest_supported_python():
    for name in containers_module._RELAY_FILES:
        ast.parse((commands.INSIDE / f"{name}.py").read_text(), feature_version=(3, 9))


def test_not_isolated():
    assert any("kernel is shared" in text for text in af.Container("x").not_isolated)


def test_address_of_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DOCKER_HOST", "tcp://there:1")
    assert containers_module.address(None) == "tcp://there:1"
    assert containers_module.address("unix:///x") == "unix:///x"
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr("os.path.exists", lambda path: str(path).startswith(str(tmp_path)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert containers_module.address(None) == f"unix://{tmp_path}/podman/podman.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    errors.check(lambda: containers_module.address(None), af.errors.IsolationError, "no container engine was found")


async def test_an_agent_reaches_its_own_chain_only(engine: Podman):
    await check_reach(place(engine), None)


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_agents_leave_nothing(engine: Podman, name: str):
    await check_hostile(name, place(engine))
