"""Interpreters and sandboxes that end, by their own code, by a limit or by the machine, and what the next call sees."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import errors
import pytest
from levels import few
from patience import begun, time_out
from test_sandbox_python import IGNORES_INTERRUPTS, below, nothing_left, runs  # noqa: F401  (nothing_left is a fixture)
from waiting import GUARD, blocking_until, until

import agentfly_kit as af
from agentfly_kit.sandboxes.host import cgroups, isolation, process
from agentfly_kit.sandboxes.inside import processes


@pytest.fixture(params=few("strict", "none"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


WAITS_FOR_A_SIGNAL = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\n5"


@pytest.mark.parametrize("blocked", ["during the call", "between the calls", "not at all"])
async def test_an_interpreter_that_ends_after_its_answer_is_reported_by_the_next_call(level: str, blocked: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        await sandbox.run("open('kept', 'w').close()")
        (interpreter,) = [pid for pid in below(sandbox.pid or 0) if not below(pid)]
        call = asyncio.ensure_future(sandbox.run(WAITS_FOR_A_SIGNAL))
        if blocked == "during the call":
            await until(lambda: sandbox._watches)
            await asyncio.sleep(0)
            assert select.select([sandbox._replies.socket], [], [], GUARD)[0]
        else:
            assert (await call).value == "5"

        def has_ended() -> bool:
            # Python does not handle a signal that arrives just before a read until the read returns.
            with contextlib.suppress(ProcessLookupError):
                os.kill(interpreter, signal.SIGUSR1)
            return not runs(interpreter)

        if blocked == "not at all":
            await until(has_ended)
        else:
            blocking_until(has_ended)
        assert (await call).value == "5"
        result = await sandbox.run("6 * 7")
        assert (result.error, result.died, result.limit) == ("the interpreter exited with status 0", True, None)
        assert (await sandbox.run("import os; os.listdir()")).value == "['kept']"


@pytest.mark.parametrize("timer", ["ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"])
@pytest.mark.parametrize("handler", ["SIG_DFL", "lambda *_: 1 / 0"])
async def test_timers_end_with_their_call(level: str, timer: str, handler: str):
    name = {"ITIMER_REAL": "SIGALRM", "ITIMER_VIRTUAL": "SIGVTALRM", "ITIMER_PROF": "SIGPROF"}[timer]
    async with af.PythonSandbox(isolation=level) as sandbox:
        for interval in (0.0001, 0.02):
            handled = f"signal.signal(signal.{name}, {handler.replace('SIG', 'signal.SIG')})"
            await sandbox.run(f"import signal\n{handled}\nsignal.setitimer(signal.{timer}, {interval}, {interval})")
            for _ in range(2):
                result = await sandbox.run("sum(range(10 ** 6))")
                assert (result.value, result.error) == ("499999500000", None)


async def test_a_blocked_or_ignored_interrupt_stops_the_next_call_all_the_same(never_killed: None):
    async with af.PythonSandbox(isolation="none") as sandbox:
        await sandbox.run("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))")
        await sandbox.run("signal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 1")
        result = await sandbox.run("while True: pass", timeout=0.1)
        assert (result.timed_out, result.died) == (True, False)
        assert (await sandbox.run("x")).value == "1"


async def test_files_that_are_lost_with_the_sandbox_are_reported(level: str, monkeypatch: pytest.MonkeyPatch):
    """Simulate a zygote that does not confirm a kill, as after a fork bomb without a process namespace."""
    async with af.PythonSandbox(isolation=level) as sandbox:
        await sandbox.run("open('lost', 'w').close()")
        assert sandbox.pid is not None
        command = sandbox._command
        monkeypatch.setattr(sandbox, "_command", lambda op, *more: op == "kill" or command(op, *more))
        monkeypatch.setattr("agentfly_kit.sandboxes.call.CONTROL_SECONDS", 0.1)
        call = await begun(sandbox, IGNORES_INTERRUPTS)
        time_out(sandbox)
        result = await call
        monkeypatch.undo()
        assert (result.limit, result.died, result.files_lost) == ("time", True, True)
        assert result.text.endswith("[the sandbox was restarted: variables and files are lost]")
        assert (await sandbox.run("import os; os.listdir()")).value == "[]"


# --- the machine's memory ------------------------------------------------------------------------


@pytest.fixture
def small_parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit the parent of the sandboxes' control groups to 96 MB, to simulate a machine that runs out of memory."""
    hierarchy = isolation.hierarchy()
    if hierarchy is None:
        pytest.skip("no control group is writable here")
    roots = {controller: root / f"test-{os.getpid()}" for controller, root in hierarchy.roots.items()}
    for root in roots.values():
        root.mkdir()
    memory = roots.get("memory") or roots[""]
    if hierarchy.version == "v2":
        (memory / "cgroup.subtree_control").write_text("+memory +pids")
    name = "memory.limit_in_bytes" if hierarchy.version == "v1" else "memory.max"
    (memory / name).write_text(str(96 * 2**20))
    monkeypatch.setattr(isolation, "hierarchy", lambda: cgroups.Hierarchy(hierarchy.version, roots))
    yield
    monkeypatch.undo()
    for root in roots.values():
        root.rmdir()


# --- interrupts and closed event loops -----------------------------------------------------------


@pytest.mark.parametrize("where", ["a sandbox", "a pool", "a closed pool"])
def test_an_interrupt_while_sandboxes_are_killed_leaves_nothing(
    where: str, level: str, monkeypatch: pytest.MonkeyPatch
):
    """The second interrupt of a user arrives while the first is handled, and with it a process was left stopped.

    Also looked at: the ends of slots in `PoolCore._close` and of calls that were given up, which are tried again.
    """
    pool = af.Pool(af.PythonSandbox, size=2, min_idle=2, isolation=level)
    listed, interrupts = processes.descendants, iter([signal.SIGINT] * 2)

    def interrupted(root: int) -> list[int]:
        for number in interrupts:
            signal.raise_signal(number)
        return listed(root)

    async def main() -> None:
        lease = await pool.acquire()
        await until(lambda: pool.snapshot().idle == 1)
        monkeypatch.setattr(processes, "descendants", interrupted)
        if where == "a sandbox":
            lease.sandbox.kill()
        elif where == "a closed pool":
            pool._finalizer()
        else:
            pool._kill_slot(pool._state.slots[lease.id])

    with warnings.catch_warnings(action="ignore"):  # the lease is dropped
        errors.check(lambda: asyncio.run(main()), KeyboardInterrupt)
        gc.collect()
    assert pool.snapshot().leased == 0
    asyncio.run(pool.close())


def test_a_start_that_is_dropped_with_its_event_loop_leaves_nothing(level: str):
    """Also looked at: starts of containers, which share this code, and of vLLM, whose engine keeps the process."""
    loop, hold = asyncio.new_event_loop(), threading.Event()
    process.spawner.submit(hold.wait, GUARD)
    start = loop.create_task(af.PythonSandbox(isolation=level).start())
    loop.run_until_complete(asyncio.sleep(0))
    start._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this test does
    loop.close()
    del start, loop
    gc.collect()
    hold.set()
    process.spawner.submit(int).result(GUARD)


def test_a_call_that_is_dropped_with_its_event_loop_leaves_nothing(level: str):
    """The call is not cancelled; its sandbox ends when it is garbage-collected together with the loop."""
    loop = asyncio.new_event_loop()
    code = "import time\nprint('begun', flush=True)\ntime.sleep(1000)"
    call = loop.run_until_complete(begun(af.PythonSandbox(isolation=level), code))
    call._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this test does
    loop.close()
    del call, loop
    gc.collect()


async def test_the_call_after_a_cancelled_one_that_was_killed_says_that_variables_are_lost(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        call = await begun(sandbox, IGNORES_INTERRUPTS)
        call.cancel()
        await asyncio.wait([call])
        result = await sandbox.run("1")
        assert (result.died, result.error) == (True, "a cancelled call was killed, because it did not stop")
        assert (await sandbox.run("1")).value == "1"


HOG = "x = bytearray(150 * 2 ** 20)"


@pytest.mark.usefixtures("small_parent")
async def test_a_kill_for_the_machines_memory_is_the_hosts_failure(level: str):
    async with af.PythonSandbox(isolation=level) as sandbox:
        await errors.check(
            lambda: sandbox.run(HOG), af.errors.SandboxError, "the machine ran out of memory and killed a process"
        )
    async with af.ShellSandbox(
        isolation=level
    ) as shell:  # here a child process is killed, and the interpreter answers
        await errors.check(
            lambda: shell.run(f"python -c '{HOG}'"), af.errors.SandboxError, "the machine ran out of memory"
        )


@pytest.mark.parametrize("machine_kills", [0, 1])
async def test_without_control_groups_the_machines_counter_decides(
    machine_kills: int, monkeypatch: pytest.MonkeyPatch
):
    """The sender of a SIGKILL is unknown. It is taken to be the code unless the machine killed a process meanwhile."""
    monkeypatch.setattr(isolation, "hierarchy", lambda: None)
    kills = 5
    monkeypatch.setattr(cgroups, "_fields", lambda file: {"oom_kill": kills} if file == Path("/proc/vmstat") else {})
    async with af.PythonSandbox(isolation="none", processes=None) as sandbox:
        await sandbox.run("import os")
        kills += machine_kills
        if machine_kills:
            await errors.check(
                lambda: sandbox.run("os.kill(os.getpid(), 9)"),
                af.errors.SandboxError,
                "the machine ran out of memory",
            )
        else:
            assert (
                await sandbox.run("os.kill(os.getpid(), 9)")
            ).error == "the interpreter was terminated by signal 9"


# --- isolation="none" ----------------------------------------------------------------------------

ENDED = "the code terminated the sandbox"


@pytest.mark.parametrize("later", [False, True])
async def test_without_isolation_code_that_kills_its_sandbox_is_scored(later: bool, tmp_path: Path):
    """If the chain were unscored, a policy could escape a bad reward by killing its zygote, during or between calls."""
    async with af.PythonSandbox(isolation="none") as sandbox:
        await sandbox.run("import os, subprocess\nopen('lost', 'w').close()")
        wait = f"until [ -e {tmp_path}/go ]; do sleep 0.01; done; " if later else ""
        kill = f"subprocess.Popen(['sh', '-c', f'{wait}kill -9 {{os.getppid()}}'])"
        result = await sandbox.run(f"{kill}\n" + ("" if later else "import time; time.sleep(1000)"))
        if later:
            assert result.ok
            (tmp_path / "go").touch()
            await until(lambda: not sandbox.alive)
            result = await sandbox.run("os.listdir()")
        assert (result.error, result.died, result.files_lost) == (ENDED, True, True)
        assert (await sandbox.run("import os; os.listdir()")).value == "[]"


async def test_every_kind_of_sandbox_reports_its_lost_files():
    async with (
        af.ShellSandbox(isolation="none") as shell,
        af.SQLSandbox(isolation="none", script="CREATE TABLE t (x)") as sql,
        af.FileSandbox(isolation="none", files={"a": "1"}) as files,
    ):
        await shell.run("A=1")
        await sql.run("INSERT INTO t VALUES (1)")
        await files.write("b", "2")
        for sandbox in (shell, sql, files):
            os.kill(sandbox.pid, signal.SIGKILL)
        await until(lambda: not (shell.alive or sql.alive or files.alive))
        assert (await shell.run("echo $A")).text.endswith("shell variables and all files are lost]")
        assert "restored to its initial state" in (await sql.run("SELECT * FROM t")).text
        assert (await sql.run("SELECT * FROM t")).rows == ()
        await errors.check(lambda: files.read("b"), Exception, "restarted with its initial files")
        assert await files.list() == ("a",)
