"""PythonSandbox: results, limits, resets, cancellation, isolation levels, and that no resource is left behind."""

import asyncio
import contextlib
import gc
import os
import re
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import errors
import pytest
import pytest_asyncio
from calls import each
from levels import LANDLOCK, STRICT, few
from patience import begun, time_out
from processes import running
from waiting import GUARD, blocking_until, until

import agentfly_kit as af
from agentfly_kit.sandboxes.host import cgroups, commands, isolation
from agentfly_kit.sandboxes.host.cgroups import Group, Hierarchy, find_hierarchy
from agentfly_kit.sandboxes.host.limits import Limits
from agentfly_kit.sandboxes.inside import processes


def zygotes() -> set[int]:
    """Return the sandbox processes that descend from this process, recognized by their command line."""
    return {pid for pid in running("zygote.py") if _descends(pid)}


def _descends(pid: int) -> bool:
    with contextlib.suppress(OSError):  # the process has ended
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return False


def below(root: int) -> set[int]:
    """Return the descendants of a process."""
    return set(processes.descendants(root))


def runs(pid: int) -> bool:
    return not processes.is_dead(pid)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def groups(pid: int) -> list[Path]:
    hierarchy = isolation.hierarchy()
    roots = hierarchy.roots.values() if hierarchy else []
    return [folder for root in roots for folder in root.glob(f"agentfly-{pid}-*")]


def no_groups(pid: int) -> bool:
    """Remove the control groups of a process that has ended, as the next process does. Return True if none is left."""
    hierarchy = isolation.hierarchy()
    if hierarchy is not None:
        cgroups.remove_orphans(hierarchy)
    return not groups(pid)


def scratch(pid: int) -> set[Path]:
    return set(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"agentfly-sandbox-{pid}-*"))


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    asyncio.run(_warm_up())
    before = files(), scratch(os.getpid())
    yield
    gc.collect()
    blocking_until(lambda: not zygotes() and not groups(os.getpid()) and scratch(os.getpid()) <= before[1])
    if "a_kernel_that" not in request.node.name:  # zmq keeps some files open in this process
        blocking_until(lambda: files() <= before[0])


async def _warm_up() -> None:
    """Run the probe and the executor once, because the process keeps the files that they open."""
    isolation.hierarchy()
    isolation.best()
    await asyncio.to_thread(int)


@pytest_asyncio.fixture
async def sandbox(level: str) -> AsyncIterator[af.PythonSandbox]:
    async with af.PythonSandbox(isolation=level) as one:
        yield one


# --- results --------------------------------------------------------------------------------------


async def test_value_output_and_error(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        result = await sandbox.run("print('out')\nimport sys\nprint('err', file=sys.stderr)\n6 * 7")
        assert (result.stdout, result.stderr, result.value, result.error) == ("out\n", "err\n", "42", None)
        assert (result.ok, result.text) == (True, "out\nerr\n42")
        assert await each("value", sandbox, "x = 1", "None", "_") == [None, None, "42"]
        result = await sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()")
        assert (result.stdout, result.error_type) == ("before\n", "ZeroDivisionError")
        assert result.error == (
            'Traceback (most recent call last):\n  File "<cell 5>", line 4, in <module>\n    f()\n'
            '  File "<cell 5>", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero'
        )
        result = await sandbox.run("if True print(1)")
        assert result.error_type == "SyntaxError" and "zygote" not in (result.error or "zygote")
        assert (await sandbox.run("")).ok
        assert (await sandbox.run("'é\\ud800'")).value is not None


async def test_cells_share_one_main_module(sandbox: af.PythonSandbox):
    await sandbox.run("import math\ndef area(r):\n    return math.pi * r ** 2")
    code = (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int\npickle.loads(pickle.dumps(P(3)))"
    )
    cells = ("round(area(1), 3)", code, "[area(i) > 0 for i in range(1, 3)]", "__name__")
    assert await each("value", sandbox, *cells) == ["3.142", "P(x=3)", "[True, True]", "'__main__'"]


async def test_output_of_child_processes(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        result = await sandbox.run(
            "import os, sys\nprint('one')\nsys.stdout.flush()\nos.system('echo two; echo three >&2')"
        )
        assert (result.stdout, result.stderr, result.value) == ("one\ntwo\n", "three\n", "0")
        result = await sandbox.run(
            "import subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout"
        )
        assert result.value == repr("5\n")


async def test_truncated_output(level: str):
    async with af.PythonSandbox(isolation=level, max_output=1000) as sandbox:
        result = await sandbox.run("print('a' * 5000)\n'b' * 5000")
        assert (len(result.stdout), len(result.value or ""), result.truncated) == (1000, 1000, True)
        assert result.ok and result.text.endswith("[output truncated]")
        assert not (await sandbox.run("print('a' * 500)")).truncated


async def test_a_forked_child_does_not_answer(sandbox: af.PythonSandbox):
    fork = "import os\npid = os.fork()\n'parent' if pid else 'child'"
    assert await each("value", sandbox, fork, "1 + 1") == ["'parent'", "2"]


async def test_a_large_cell_and_concurrent_calls(sandbox: af.PythonSandbox):
    text = "é" * 2_000_000
    assert (await sandbox.run(f"s = '{text}'\nlen(s)")).value == "2000000"
    results = await asyncio.gather(*(sandbox.run(f"x = {i}\nx") for i in range(20)))
    assert [result.value for result in results] == [str(i) for i in range(20)]


# --- timeouts and exits ---------------------------------------------------------------------------

IGNORES_INTERRUPTS = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('begun', flush=True)
while True:
    time.sleep(9)
"""


async def test_a_timeout_keeps_the_variables(sandbox: af.PythonSandbox, never_killed: None):
    await sandbox.run("x = 5")
    result = await sandbox.run("while True: pass", timeout=0.1)
    assert result.timed_out and result.seconds >= 0.1
    call = await begun(sandbox, "x = 6\nprint('begun', flush=True)\nwhile True: pass")
    time_out(sandbox)
    result = await call
    assert (result.timed_out, result.died, result.limit) == (True, False, "time")
    assert (result.stdout, result.error_type) == ("begun\n", "KeyboardInterrupt")
    assert (await sandbox.run("x")).value == "6"


async def test_code_that_ignores_the_interrupt_is_killed(sandbox: af.PythonSandbox):
    await sandbox.run("open('kept.txt', 'w').write('file')\nx = 5")
    call = await begun(sandbox, IGNORES_INTERRUPTS)
    time_out(sandbox)
    result = await call
    assert (result.timed_out, result.died, result.limit, result.stdout) == (True, True, "time", "begun\n")
    assert f"killed: time limit of {GUARD:g} s exceeded" in (result.error or "")
    assert await each("value", sandbox, "'x' in globals()", "open('kept.txt').read()") == ["False", "'file'"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(3)", "the interpreter exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "the interpreter was terminated by signal 9"),
        ("import ctypes; ctypes.string_at(0)", "the interpreter was terminated by signal 11"),
        ("import os; os.closerange(3, 256)", "the interpreter"),
    ],
)
async def test_death_is_reported_and_the_next_call_works(level: str, code: str, error: str):
    async with af.PythonSandbox(isolation=level, memory_mb=128) as sandbox:
        result = await sandbox.run(code)
        assert (result.died, result.timed_out, result.ok) == (True, False, False)
        assert error in (result.error or "")
        assert sandbox.alive and (await sandbox.run("1 + 1")).value == "2"


@pytest.mark.parametrize("level", [each for each in few("strict") if each.values != ("none",)])
async def test_a_sandbox_killed_from_outside_raises(level: str):
    """A kill from outside is a failure of the host, which leaves the chain unscored. Without isolation, the code itself
    could have killed the sandbox."""
    async with af.PythonSandbox(isolation=level) as sandbox:
        await sandbox.run("x = 1")
        call = await begun(sandbox, "print('begun', flush=True)\nwhile True: pass")
        os.kill(sandbox.pid, signal.SIGKILL)
        await errors.check(lambda: call, af.errors.SandboxError, "ended from outside, and the variables")
        assert not sandbox.alive
        await errors.check(lambda: sandbox.run("x"), af.errors.SandboxError, "ended from outside")
        await sandbox.start()
        assert (await sandbox.run("x")).error_type == "NameError"
        await sandbox.reset()
        os.kill(sandbox.pid, signal.SIGKILL)
        await until(lambda: not sandbox.alive)
        assert (await sandbox.run("1 + 1")).value == "2"


async def test_close_during_a_call(level: str):
    sandbox = af.PythonSandbox(isolation=level)
    await sandbox.start()
    call = await begun(sandbox, "print('begun', flush=True)\nwhile True: pass")
    await sandbox.close()
    result = await call
    assert (result.died, result.error) == (True, "the sandbox was closed")
    await errors.check(lambda: sandbox.run("1"), af.errors.SandboxError, "is closed")
    assert repr(sandbox) == f"<PythonSandbox {level}, closed>"


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.skipif(isolation.hierarchy() is None, reason="no control group is writable here")
async def test_all_processes_are_in_the_control_group(sandbox: af.PythonSandbox):
    await sandbox.run("import subprocess; subprocess.Popen(['sleep', '100'])")
    everything = {sandbox.pid, *processes.descendants(sandbox.pid)}
    assert len(everything) >= 3
    assert set(sandbox._handle.group.members()) == everything


@pytest.mark.parametrize(
    ("settings", "code", "errors", "limit"),
    [
        ({}, "import sys\nsys.exit(2)", ["SystemExit"], None),
        ({"memory_mb": 128}, "y = bytearray(2 ** 30)", ["MemoryError"], "memory"),
        # The limit is applied from inside and from outside of the process; either can be first.
        ({"cpu_seconds": 0.3}, "while True: pass", ["CpuLimit", "KeyboardInterrupt"], "cpu"),
    ],
    ids=["exit", "memory", "cpu"],
)
async def test_an_exit_or_a_limit_keeps_the_variables(
    level: str, settings: dict[str, float], code: str, errors: list[str], limit: str | None, never_killed: None
):
    async with af.PythonSandbox(isolation=level, **settings) as sandbox:
        await sandbox.run("x = 1")
        result = await sandbox.run(code)
        assert result.error_type in errors
        assert (result.limit, result.timed_out, result.died) == (limit, False, False)
        assert (await sandbox.run("x")).value == "1"


# --- resets and forks -----------------------------------------------------------------------------


async def test_a_reset_hides_the_previous_chain(level: str):
    async with af.Pool(af.PythonSandbox, size=1, isolation=level) as pool:
        async with pool.lease("first") as sandbox:
            await sandbox.run(
                "import os, builtins, math\nsecret = 7\nbuiltins.leak = 7\nmath.pi = 3\nos.environ['LEAK'] = '7'"
            )
            await sandbox.run(
                "os.makedirs('deep/er')\nopen('deep/er/f', 'w').write('7')\nos.chmod('deep', 0)\nopen('.h', 'w')"
            )
            await sandbox.run("import subprocess\nchild = subprocess.Popen(['sleep', '60'])")
            await sandbox.run(
                "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
            )
        async with pool.lease("second") as again:
            assert again is sandbox
            assert await each("error_type", again, "secret", "leak", "os") == ["NameError"] * 3
            assert (
                await again.run("import os, math\nmath.pi > 3.1, os.listdir('.'), 'LEAK' in os.environ")
            ).value == ("(True, [], False)")
            code = "[p for p in os.listdir('/proc') if p.isdigit() and 'sleep' in open(f'/proc/{p}/cmdline').read()]"
            if level == "strict":
                assert (await again.run(code)).value == "[]"
        assert pool.snapshot().sandboxes[0].uses == 2


async def test_fork_by_replay(level: str):
    async with (
        af.Pool(af.PythonSandbox, size=3, isolation=level) as pool,
        pool.lease() as parent,
        pool.lease() as child,
    ):
        cells = ("x = [1]\nopen('f', 'w').write('hello')", "x.append(1 / 0)", "x.append(2)\nx")
        assert await each("value", parent, *cells) == ["5", None, "[1, 2]"]
        await parent.fork(child)
        assert await each("value", child, "x, open('f').read()", "x.append(3)") == ["([1, 2], 'hello')", None]
        assert (await parent.run("x")).value == "[1, 2]"
        await parent.run("import time\ntime.time_ns()")
        async with pool.lease() as other:
            await errors.check(
                lambda: parent.fork(other), af.errors.SandboxError, "cannot fork: call 5 of 5 gave a different result"
            )
            assert (await other.run("x")).error_type == "NameError"


async def test_sets_of_strings_have_the_same_order_in_all_sandboxes(level: str):
    code = "list({'alpha', 'beta', 'gamma', 'delta'})"
    values = set()
    for _ in range(2):
        async with af.PythonSandbox(isolation=level) as sandbox:
            values.add((await sandbox.run(code)).value)
    assert len(values) == 1


async def test_preload(level: str):
    async with af.PythonSandbox(isolation=level, preload=["decimal"]) as sandbox:
        code = "import sys\n'decimal' in sys.modules, 'fractions' in sys.modules"
        assert (await sandbox.run(code)).value == "(True, False)"
    broken = af.PythonSandbox(isolation=level, preload=["no_such_module"])
    await errors.check(broken.start, af.errors.SandboxError, "No module named 'no_such_module'")
    assert not broken.alive


async def test_packages(level: str):
    site = commands.packages()[0]
    code = "import importlib.util, os\n[importlib.util.find_spec(name) is not None for name in ('numpy', 'json')]"
    async with af.PythonSandbox(isolation=level) as sandbox:
        code_in_child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}]).returncode"
        cells = (code, "import numpy\nint(numpy.arange(4).sum())", code_in_child)
        assert await each("value", sandbox, *cells) == ["[True, True]", "6", "0"]
        if level != "none":
            place = site if level == "landlock" else commands.inside_path(site)
            assert (await sandbox.run(f"open({place!r} + '/mark', 'w')")).error_type in ("OSError", "PermissionError")
    async with af.PythonSandbox(isolation=level, packages=False) as sandbox:
        assert (await sandbox.run(code)).value == "[False, True]"
        if level != "none":  # at "none", the code can read all files
            look = f"[os.path.isdir(p) and os.access(p, os.R_OK) and os.listdir(p) for p in {[site]!r}]"
            found = await sandbox.run(look)
            assert found.value in ("[False]", "[[]]") or found.error_type == "PermissionError"


# --- cancellation, event loops, process exit ------------------------------------------------------


@pytest.mark.parametrize("read", ["before", "after"])
@pytest.mark.parametrize("waits", [False, True], ids=["", "while it waits for a cancelled call"])
async def test_a_call_cancelled_when_its_answer_arrives_ends_nothing(
    sandbox: af.PythonSandbox, read: str, waits: bool
):
    """The next call waited for an answer that had been read already, and then killed the interpreter."""

    async def begun() -> tuple[asyncio.Task[af.SandboxResult], Any]:
        call = asyncio.create_task(sandbox.run("1"))
        await until(lambda: sandbox._watches)
        (watch,) = sandbox._watches
        return call, watch

    await sandbox.run("x = 5")
    call, watch = await begun()
    if waits:
        call.cancel()
        await asyncio.wait([call])
        call, watch = await begun()
    assert select.select([sandbox._replies.socket], [], [], GUARD)[0]
    # The event loop may have read the answer in the same iteration, before or after the cancellation.
    for act in (watch.read_reply, call.cancel) if read == "before" else (call.cancel, watch.read_reply):
        act()
    await errors.check(lambda: call, asyncio.CancelledError)
    result = await sandbox.run("x")
    assert (result.value, result.error) == ("5", None)


async def test_a_sandbox_is_usable_after_cancelled_calls(sandbox: af.PythonSandbox, never_killed: None):
    await sandbox.run("x = 1")
    for code in ("while True: pass", "import time; time.sleep(999)", "print('y' * 100000)\nwhile True: pass", "1"):
        call = asyncio.ensure_future(sandbox.run(code))
        await asyncio.sleep(0.02)
        call.cancel()
        await asyncio.wait([call])
        result = await sandbox.run("print(x)\nx")
        assert (result.stdout, result.value) == ("1\n", "1"), code


def test_a_sandbox_outlives_the_thread_that_started_it(level: str):
    """PR_SET_PDEATHSIG refers to the parent thread, so the thread that starts sandboxes lives as long as Python."""
    sandbox = af.PythonSandbox(isolation=level)
    thread = threading.Thread(target=lambda: asyncio.run(sandbox.start()))
    thread.start()
    thread.join()
    # The kernel sends the signal before it removes the thread, and a killed process answers no later call.
    blocking_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists())
    pid = sandbox.pid

    async def use() -> tuple[str | None, int | None]:
        async with sandbox:
            return (await sandbox.run("6 * 7")).value, sandbox.pid

    assert asyncio.run(use()) == ("42", pid)


def test_successive_event_loops(level: str):
    pool: af.Pool[af.PythonSandbox] | None = af.Pool(af.PythonSandbox, size=1, isolation=level)

    async def use() -> str | None:
        assert pool is not None
        async with pool.lease() as sandbox:
            return (await sandbox.run("import os\nos.getpid() * 0 + 1")).value

    assert [asyncio.run(use()) for _ in range(3)] == ["1", "1", "1"]
    assert pool.snapshot().dead == 0
    pool = None
    assert not zygotes()


SCRIPT = """
import asyncio, os, sys
from agentfly_kit.pool.pool import Pool
from agentfly_kit.sandboxes.python import PythonSandbox
pool = Pool(PythonSandbox, size=2, min_idle=2, isolation=sys.argv[1])
async def main():
    lease = await pool.acquire()
    await lease.sandbox.run("import subprocess; p = subprocess.Popen(['sleep', '1000'])", 300)
    call = asyncio.ensure_future(lease.sandbox.run("while True: pass", timeout=1000))
    while pool.snapshot().starting:
        await asyncio.sleep(0.01)
    print(" ".join(str(s.pid) for s in (slot.sandbox for slot in pool._state.slots.values())), flush=True)
    sys.stdin.read()  # until the test has looked
    if sys.argv[2] == "exit":
        sys.exit(0)
    await call
asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["exit", "kill", "interrupt"])
def test_no_process_outlives_its_host_process(level: str, end: str):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, level, end],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with process:
        roots = [int(pid) for pid in process.stdout.readline().split()]
        assert len(roots) == 2
        everything = set(roots) | {pid for root in roots for pid in below(root)}
        if end == "kill":
            process.kill()
        process.stdin.close()
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        process.wait(GUARD)
    blocking_until(lambda: not any(runs(pid) for pid in everything))
    blocking_until(lambda: no_groups(process.pid))
    assert not scratch(process.pid)


async def test_a_fork_of_the_host_process_does_not_own_its_sandboxes(sandbox: af.PythonSandbox):
    await sandbox.run("import os, signal\nopen('f', 'w').write('1')")
    pid = os.fork()
    if pid == 0:
        sandbox.kill()  # as its finalizers would
        os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)
    assert sandbox.alive
    assert (await sandbox.run("open('f').read()")).value == "'1'"


# --- isolation levels and control groups ----------------------------------------------------------


def test_levels_are_never_lowered_silently(monkeypatch: pytest.MonkeyPatch):
    async def named(level: str, why: str) -> None:
        async with af.Pool(af.PythonSandbox, isolation=level) as pool:
            await errors.check(
                pool.acquire, af.errors.IsolationError, re.compile(f"isolation='{level}' is not available: {why}")
            )

    async def best(level: str) -> None:
        async with af.Pool(af.PythonSandbox) as pool, pool.lease() as sandbox:
            assert sandbox.isolation == pool.isolation == pool.snapshot().isolation == level
            assert repr(sandbox) == f"<PythonSandbox {level}, 0 calls>"

    if not STRICT:
        assert af.sandbox_report().best == "strict"
        asyncio.run(best("strict"))
    missing = "bubblewrap is not installed: `apt-get install bubblewrap`"
    monkeypatch.setattr(isolation, "strict_unavailable_reason", lambda: missing)
    asyncio.run(named("strict", "bubblewrap is not installed"))
    if not LANDLOCK:
        assert af.sandbox_report().best == "landlock"
        asyncio.run(best("landlock"))
    monkeypatch.setattr(commands, "landlock_version", lambda: 0)
    asyncio.run(named("landlock", "this kernel has no Landlock"))
    report = af.sandbox_report()
    assert report.best == "none" and repr(report).count("no   bubblewrap is not installed") == 1
    asyncio.run(best("none"))


def test_root_without_control_groups_cannot_use_strict_with_a_process_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "strict_unavailable_reason", lambda: "")
    monkeypatch.setattr(isolation, "hierarchy", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    errors.check(
        lambda: isolation.resolve_level("strict", Limits()), af.errors.IsolationError, "does not apply to root"
    )
    assert isolation.resolve_level("strict", Limits(processes=None)) == "strict"
    assert isolation.limit_mechanisms("strict", Limits(), None)["processes"] == "not limited"


def test_control_groups_version_2(tmp_path: Path):
    """The cgroup files are in a temporary folder, because a machine has only one of the two versions."""
    mount = tmp_path / "unified"
    app = mount / "user.slice" / "app.slice"
    own = app / "session.scope"
    own.mkdir(parents=True)
    for folder, delegated in ((app, "cpu memory pids"), (own, "")):
        (folder / "cgroup.subtree_control").write_text(delegated)
        (folder / "cgroup.procs").write_text("")
    mounts = f"cgroup2 {mount} cgroup2 rw 0 0\n"
    found = find_hierarchy(mounts, "0::/user.slice/app.slice/session.scope\n")
    assert found == Hierarchy("v2", {"": app})
    group = Group.create(found, Limits(memory_mb=100, processes=8))
    folder = group.folders[""]
    assert folder.parent == app
    wanted = [str(100 * 2**20 + cgroups._OWN_MEMORY), "10"]
    assert [(folder / name).read_text() for name in ("memory.max", "pids.max")] == wanted
    for name, text in {
        "cpu.stat": "usage_usec 2500000\nuser_usec 1\n", "memory.events": "low 0\noom 3\noom_kill 2\n",
        "pids.events": "max 5\n", "cgroup.procs": "",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    assert (group.cpu_seconds(), group.limit_hits(), group.members()) == (2.5, (3, 2, 5), [])
    assert find_hierarchy(mounts, "0::/\n") is find_hierarchy("", "") is None


def test_control_groups_version_1(tmp_path: Path):
    text = ""
    for controllers in ("memory", "pids", "cpu,cpuacct"):
        (tmp_path / controllers / "docker").mkdir(parents=True)
        text += f"cgroup {tmp_path / controllers} cgroup rw,relatime,{controllers} 0 0\n"
    found = find_hierarchy(text, "4:memory:/docker\n8:pids:/gone\n2:cpu,cpuacct:/docker\n")
    assert found is not None and found.version == "v1"
    assert dict(found.roots) == {
        "memory": tmp_path / "memory/docker", "pids": tmp_path / "pids", "cpuacct": tmp_path / "cpu,cpuacct/docker",
    }  # fmt: skip
    group = Group.create(found, Limits(memory_mb=None, processes=3))
    assert not (group.folders["memory"] / "memory.limit_in_bytes").exists()
    assert (group.folders["pids"] / "pids.max").read_text() == "5"


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_late_interrupt_does_not_reach_the_next_call(how: str, never_killed: None) -> None:
    """The zygote delivers the interrupt after the call has answered and the next one has begun."""
    async with af.PythonSandbox(isolation="none") as sandbox:
        gate = eval((await sandbox.run("import os, time\nos.mkfifo('gate')\nos.path.abspath('gate')")).value or "")
        answers = sandbox._replies.socket
        first = await begun(sandbox, "print('begun', flush=True)\nopen('gate').read()")
        os.kill(sandbox.pid, signal.SIGSTOP)
        if how == "cancelled":
            first.cancel()
        else:
            time_out(sandbox)
        await asyncio.sleep(0)
        await asyncio.to_thread(Path(gate).write_text, "")
        await until(lambda: first.done() and (how == "timed out" or select.select([answers], [], [], 0)[0]))
        # The first call has answered, and its interrupt is pending.
        following = asyncio.create_task(sandbox.run("for _ in range(40): time.sleep(0.02)\n'whole'"))
        await asyncio.sleep(0.2)  # for the second call to begin, if the sandbox lets it
        os.kill(sandbox.pid, signal.SIGCONT)
        result = await following
        assert (result.value, result.error) == ("'whole'", None)


def test_a_level_below_strict_warns_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        isolation, "strict_unavailable_reason", lambda: f"no bubblewrap: {isolation.INSTALL_BUBBLEWRAP}"
    )
    isolation.warn_below_strict.cache_clear()
    level = isolation.best()

    async def start(level: str | None) -> None:
        async with (
            af.Pool(af.PythonSandbox, isolation=level) as pool,
            pool.lease(),
            af.PythonSandbox(isolation=level),
        ):
            pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", af.errors.IsolationWarning)
        asyncio.run(start(level))
        assert not caught
        for _ in range(2):
            asyncio.run(start(None))
    (warning,) = caught
    text = str(warning.message)
    assert f"isolation='{level}'" in text and "`apt-get install bubblewrap`" in text and "sandbox_report()" in text
    isolation.warn_below_strict.cache_clear()


async def test_each_cell_begins_with_the_output_of_the_call(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        for change in (
            "import os, sys\nos.close(1)",
            "os.dup2(os.open('log', os.O_WRONLY | os.O_CREAT), 1)",
            "os.close(2); os.close(1); os.close(0)",
            "sys.stdout.close(); sys.stderr = None",
            "import io\nsys.stdout = io.StringIO()",
        ):
            assert (await sandbox.run(change)).error is None
            result = await sandbox.run("print('out')\nprint('err', file=sys.stderr)")
            assert (result.stdout, result.stderr, result.error) == ("out\n", "err\n", None), change
        assert (await sandbox.run("os.closerange(0, 500)")).died
        assert (await sandbox.run("print('new')")).stdout == "new\n"


async def test_all_output_of_a_call_belongs_to_it(level: str):
    """Also if its pipe is larger than usual, and however small the pieces are in which it was written."""
    enlarge = "import fcntl, os, sys\n[fcntl.fcntl(file, 1031, 2 ** 20) for file in (1, 2)]"
    async with af.PythonSandbox(isolation=level, max_output=2**20) as sandbox:
        assert (await sandbox.run(enlarge)).error is None
        result = await sandbox.run("for file in (1, 2):\n    os.write(file, b'x' * 1_000_000)")
        assert (len(result.stdout), len(result.stderr)) == (1_000_000, 1_000_000)
        result = await sandbox.run("print('next')")
        assert (result.stdout, result.stderr) == ("next\n", "")
