"""Time limits do not count the time in which the processes of a sandbox are stopped or wait for a CPU.

Every limit of sandboxed code that feeds a reward is a call of one class, `Call`: code, shell commands, queries, tests
of a grader, whole programs, answers checked by a package, and file tools. The environments code, competition, repo,
sql, math and reasoning_gym have no other clock. A reward that exceeds its own limit leaves its chain unscored.
"""

import asyncio
import os
import platform
import signal
import time
from typing import Any

import errors
import pytest
from levels import LEVELS
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit._async import limits
from agentfly_kit.envs.verifier import Verifier
from agentfly_kit.sandboxes import call as calls
from agentfly_kit.sandboxes.inside import processes
from agentfly_kit.sandboxes.inside.processes import descendants
from agentfly_kit.tools.calling import call_user_function


class Checker(Verifier):
    module = "json"


async def test_scores_are_finite_numbers_and_a_missing_package_is_not_the_models_fault() -> None:
    async with Checker() as box:
        codes = "score = 0.5", "score = float('nan')", "score = 1 / 0", "score = 'x'", "import os; os._exit(3)"
        assert [await box.score(code, None) for code in codes] == [0.5, 0, 0, 0, 0]
        await errors.check(
            lambda: box.score("import nowhere", None), af.errors.SandboxError, "No module named 'nowhere'"
        )


async def signal_all(box: Any, number: int) -> None:
    """Send a signal to all processes of a sandbox, and wait until it has its effect."""
    boxes = [box._work, box._tests] if isinstance(box, af.Grader) else [box]
    pids = [pid for each in boxes for pid in (each.pid, *descendants(each.pid))]
    for pid in pids:
        os.kill(pid, number)
    await until(lambda: all(stopped(pid) == (number == signal.SIGSTOP) for pid in pids))


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


async def by_tool(box: af.PythonSandbox) -> str:
    """Call a tool, with a limit of its own, that uses the sandbox."""

    async def compute() -> str:
        return (await box.run("6 * 7", timeout=GUARD)).text

    outcome = await call_user_function(compute, {}, timeout=0.6)
    return str(outcome.error or outcome.value)


GRADE = 2.0  # seconds; a grade consists of several calls, and the wall time of a short call counts


async def graded(box: af.Grader) -> float:
    return (await box.grade("def f(x):\n    return x + 1", ["assert f(1) == 2"], timeout=GRADE, total=GRADE)).share


@pytest.mark.parametrize(
    ("kind", "use", "right"),
    [
        (af.PythonSandbox, lambda box: box.run("6 * 7", timeout=0.5), "42"),
        (af.ShellSandbox, lambda box: box.run("echo 42", timeout=0.5), "42"),
        (af.SQLSandbox, lambda box: box.run("select 42", timeout=0.5), "42"),
        (af.PythonSandbox, by_tool, "42"),
        (af.Grader, graded, "1.0"),
        (af.Grader, lambda box: box.run("print(42)", timeout=0.5), "42"),
        (Checker, lambda box: box.score("score = len(data)", "x" * 42), "42.0"),
    ],
    ids=["python", "shell", "sql", "tool", "tests", "program", "verifier"],
)
async def test_a_right_answer_is_not_a_timeout_because_the_processes_were_stopped(
    kind: Any, use: Any, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfly_kit.envs.verifier._SECONDS", 0.5)
    box = kind()
    await box.start()
    try:
        await signal_all(box, signal.SIGSTOP)
        using, began = asyncio.ensure_future(use(box)), time.monotonic()
        await until(lambda: time.monotonic() > began + (1.5 * GRADE if use is graded else 1.0))
        assert not using.done()
        await signal_all(box, signal.SIGCONT)
        assert right in (lambda result: str(getattr(result, "text", result)))(await using)
    finally:
        box.kill()


@pytest.mark.parametrize("level", LEVELS)
async def test_code_that_stays_stopped_leaves_its_chain_unscored(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HELD_UP_SECONDS", "CONTROL_SECONDS"):
        monkeypatch.setattr(calls, name, 0.2)
    async with af.Pool(af.PythonSandbox, size=1, isolation=level) as pool, pool.lease() as box:
        await signal_all(box, signal.SIGSTOP)
        await errors.check(lambda: box.run("6 * 7", timeout=0.05), af.errors.SandboxError)


@pytest.mark.parametrize("level", LEVELS)
async def test_code_that_sleeps_or_computes_uses_up_its_time(level: str) -> None:
    async with af.Pool(af.PythonSandbox, size=1, isolation=level) as pool, pool.lease() as box:
        for code in (
            "import time; time.sleep(300)",
            "while True: pass",
            "import threading; threading.Event().wait()",
        ):
            result = await box.run(code, timeout=0.2)
            assert (result.limit, result.timed_out) == ("time", True)
            assert result.seconds >= 0.2


STOPPED = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
# The parent waits in an uninterruptible state (D) until the child ends. CLONE_VFORK | SIGCHLD.
CLONE = 56 if platform.machine() == "x86_64" else 220
FORK = f"ctypes.CDLL(None).syscall({CLONE}, 0x4011, 0, 0, 0, 0)"
FORKED = f"import ctypes, os, time\n{FORK} or (time.sleep(300), os._exit(0))"
RENAMED = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff\\xfe')\ntime.sleep(300)"


@pytest.mark.parametrize("code", [STOPPED, FORKED, RENAMED], ids=["stopped", "vfork", "renamed"])
@pytest.mark.parametrize("level", LEVELS)
async def test_code_cannot_avoid_its_time_limit(level: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a policy could leave a bad reward by stopping itself until its chain is unscored."""
    monkeypatch.setattr(calls, "_HELD_UP_SECONDS", 0.2)
    monkeypatch.setattr(calls, "_HELD_UP_FACTOR", 4)
    async with af.Pool(af.PythonSandbox, size=1, isolation=level) as pool, pool.lease() as box:
        result = await box.run(code, timeout=0.3)
        assert (result.limit, result.timed_out) == ("time", True)
        assert (await box.run("6 * 7")).text == "42"


async def test_concurrent_calls_extend_the_limit_of_their_tool_once() -> None:
    async with limits.time_limit(GUARD) as limit:
        (timer,) = limits._current.get()
        before = timer.at
        for start, end in ((1.0, 3.0), (1.0, 3.0), (2.0, 4.0)):
            limits.extend(start, end)
        assert timer.at == pytest.approx(before + 3.0)
        assert not limit.expired()


def test_activity_of_processes() -> None:
    seconds, states = processes.activity([os.getpid()])
    assert "R" in states  # this thread is running
    assert time.process_time() - 1 < seconds
    assert processes.activity([2**30]) == (0.0, "")
