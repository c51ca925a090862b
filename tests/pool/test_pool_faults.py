"""Faults during rollouts: sandboxes that are killed, calls that are cancelled, and Jupyter kernels that end.

Each test checks that no lease, process, control group, folder or open file is left.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import containers
import dice
import pytest
from cancelling import cancelled_lives, patient_sandboxes
from kernels import interrupted, kernel, run_cell, start_cell
from levels import LEVELS
from test_sandbox_python import below, groups, nothing_left, runs, scratch  # noqa: F401  (nothing_left is a fixture)
from waiting import GUARD, blocking_until, until

import agentfly_kit as af
from agentfly_kit.pool.records import PoolEvent

SOAK_SECONDS = float(os.environ.get("SOAK_MINUTES", "2")) * 60
SOAK_SEED = dice.seed()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_sandboxes(monkeypatch)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- killed sandboxes -----------------------------------------------------------------------------


def call(code: str) -> str:
    return '<tool_call>{"name":"python","arguments":' + json.dumps({"code": code}) + "}</tool_call>"


def script(task: Any, turn: int) -> str:
    n = task.fields["n"]
    return [call(f"x = [{n}]"), call("x.append(x[0] + 1)"), call("import time; time.sleep(0.01); sum(x)"), "done"][
        turn
    ]


SHARE = 0.3
MOMENTS = [(turn, when) for turn in range(3) for when in ("before", "during", "after")] + [(3, "before")]
"""When the sandbox of a chain is killed: turns 0 to 2 are its calls, turn 3 is the reward."""


async def killed_under_chains(level: str, chains: int, size: int, seed: int) -> tuple[int, int]:
    """Run a rollout in which the sandboxes of 30 % of the chains, chosen by the seed, and some idle ones are killed.

    Every chain whose sandbox died after its first use must be unscored and state why (without isolation: it must be
    scored 0), and every other chain must be complete, independently of the timing. Returns the number of sandboxes
    killed during chains, and of those killed while no chain held them.
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    doomed = {n: chance.choice(MOMENTS) for n in chance.sample(range(chains), round(SHARE * chains))}
    killed: set[int] = set()
    at_rest: set[int] = set()
    async with af.Pool(af.PythonSandbox, size=size, isolation=level, processes=None, acquire_timeout=GUARD) as pool:

        async def kill(n: int, sandbox: af.PythonSandbox) -> None:
            killed.add(n)
            os.kill(sandbox.pid, signal.SIGKILL)
            await until(lambda: not sandbox.alive)

        async def run(n: int, turn: int, code: str, sandbox: af.PythonSandbox) -> af.SandboxResult:
            when = doomed[n][1] if n in doomed and doomed[n][0] == turn else ""
            if when == "before":
                await kill(n, sandbox)
            running = asyncio.ensure_future(sandbox.run(code, timeout=GUARD))
            if when == "during":
                await asyncio.sleep(chance.random() * 0.01)
                await kill(n, sandbox)
            await asyncio.wait([running])
            if when == "after":
                await kill(n, sandbox)
            return running.result()

        @af.tool(timeout=GUARD)
        async def python(code: str, sandbox: af.PythonSandbox, n: af.FromTask[int], context: af.Context) -> str:
            """Run code.

            Args:
                code: the code
            """
            turn = context.state["calls"] = context.state.get("calls", -1) + 1
            return (await run(n, turn, code, sandbox)).text

        @af.reward
        async def remembered(n: int, sandbox: af.PythonSandbox) -> float:
            return float((await run(n, 3, "x", sandbox)).value == f"[{n}, {n + 1}]")

        def on_event(event: PoolEvent) -> None:
            """Kill some sandboxes before or during their reset."""
            slot = pool._state.slots.get(event.sandbox or 0)
            sandbox = None if slot is None else slot.sandbox
            if event.kind == "resetting" and sandbox is not None and sandbox.pid and chance.random() < SHARE / 10:
                at_rest.add(sandbox.pid)
                os.kill(sandbox.pid, signal.SIGKILL)

        pool.subscribe(on_event)
        tasks = af.tasks_from([{"id": f"n{n}", "question": f"{n}", "n": n} for n in range(chains)])
        agent = af.Agent(
            af.ScriptedEngine(script), chat=af.tiny.policy().chat, tools=[python], reward=remembered, max_turns=5,
            pools=[pool],
        )  # fmt: skip
        rollout = await agent.rollout(tasks, max_concurrency=chains)
        assert len(rollout.trajectories) == chains
        assert killed == set(doomed)
        for trajectory in rollout.trajectories:
            n = trajectory.task.fields["n"]
            reward, error = trajectory.reward, trajectory.error
            if doomed.get(n, (0, "before")) == (0, "before"):  # before its first use there is nothing to lose
                assert (reward, trajectory.stop, error) == (1.0, "answered", None), (n, doomed.get(n))
                assert trajectory.tool_calls[2].result.observation == str(2 * n + 1)
            elif level == "none":  # the code itself could have killed its sandbox
                assert (reward, error) == (0.0, None), (n, doomed[n])
            else:
                assert (reward, error.type) == (None, "SandboxError"), (n, doomed[n], error)
                assert "ended from outside" in error.message, (n, doomed[n], error)
        leases = [await pool.acquire(f"after {n}") for n in range(size)]
        for lease in leases:
            assert (await lease.sandbox.run("'x' in dir()", timeout=GUARD)).value == "False"
        s = pool.snapshot()
        assert (s.leased, s.waiting, s.idle) == (size, 0, 0)
        for lease in leases:
            await lease.release()
        return len(killed), len(at_rest)


async def test_sandboxes_killed_during_a_rollout(level: str):
    killed, _ = await killed_under_chains(level, chains=32, size=6, seed=0)
    assert killed == 10


@pytest.mark.soak
async def test_sandboxes_killed_during_repeated_rollouts_of_512_chains(level: str):
    end = time.monotonic() + SOAK_SECONDS / len(LEVELS)
    rounds = itertools.count(SOAK_SEED)
    while True:
        print(await killed_under_chains(level, chains=512, size=32, seed=next(rounds)))
        if time.monotonic() > end:
            return


# --- cancelled calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1, pytest.param(40, marks=pytest.mark.soak)])
async def test_cancelled_at_any_await_leaves_nothing(level: str, share: int):
    count = share * (240 if level == "strict" else 40)

    def opened(chance: random.Random) -> af.Pool[af.PythonSandbox]:
        return af.Pool(af.PythonSandbox, size=3, min_idle=chance.randrange(2), isolation=level, acquire_timeout=GUARD)

    assert await cancelled_lives(opened, random.Random(dice.seed()), count) >= count


@pytest.mark.soak
def test_cancelled_300_times_in_containers(tmp_path: Path):
    """There are fewer cancellations than at the other levels, because starting a container takes half a second."""
    if containers.trouble():
        pytest.skip(containers.trouble())
    print(f"seed {SOAK_SEED}")
    engine = containers.Podman(tmp_path)
    place = af.Container(containers.IMAGE, engine=engine.url)

    def opened(chance: random.Random) -> af.Pool[af.PythonSandbox]:
        return af.Pool(af.PythonSandbox, size=3, min_idle=chance.randrange(2), isolation=place, acquire_timeout=GUARD)

    try:
        print(asyncio.run(cancelled_lives(opened, random.Random(SOAK_SEED), 300, late=1.0)))
        blocking_until(lambda: not engine.names())
    finally:
        engine.stop()


# --- kernels --------------------------------------------------------------------------------------

CELL = """
import asyncio, os
from agentfly_kit.pool.pool import Pool
from agentfly_kit.sandboxes.python import PythonSandbox
async with PythonSandbox(isolation={level!r}):  # opens files that a process keeps
    await asyncio.to_thread(int)
files = len(os.listdir("/proc/self/fd"))
pool = Pool(PythonSandbox, size=2, min_idle=2, isolation={level!r}, acquire_timeout=600)
lease = await pool.acquire("cell")
while pool.snapshot().starting:
    await asyncio.sleep(0.01)
print(*(s.pid for s in (slot.sandbox for slot in pool._state.slots.values())), flush=True)
"""
LONG = """
async with pool.lease("second") as sandbox:
    print("in", flush=True)
    await sandbox.run("import subprocess; subprocess.run(['sleep', '3600'])", timeout=3600)
"""
WAITS = """
second = await pool.acquire("second")
async def announce():
    while not pool.snapshot().waiting:
        await asyncio.sleep(0.01)
    print("in", flush=True)
announcing = asyncio.create_task(announce())
await pool.acquire("third")
"""
LEFT = """
await lease.release()
await second.release()
s = pool.snapshot()
print("leased", s.leased, "waiting", s.waiting)
await pool.close()
while len(os.listdir("/proc/self/fd")) > files:  # files of an ending call are closed soon
    await asyncio.sleep(0.05)
"""


def number_of(manager: Any) -> int:
    return int(manager.provisioner.process.pid)


def end_kernel(manager: Any, client: Any, end: str) -> None:
    """Restart or kill the kernel, and wait for the next one, which Jupyter starts."""
    if end == "kill":
        os.kill(number_of(manager), signal.SIGKILL)
    manager.restart_kernel(now=end == "kill")
    client.wait_for_ready(timeout=GUARD)


@pytest.mark.real
@pytest.mark.parametrize("end", ["interrupt", "restart", "kill"])
def test_a_kernel_that_is_interrupted_restarted_or_killed(level: str, end: str):
    """The kernel ends during a call, or is interrupted during a call and during a wait for a lease. The same cells can
    be run again afterwards."""
    with kernel() as (manager, client):
        pid = number_of(manager)
        roots = [int(text) for text in run_cell(client, CELL.format(level=level)).split()]
        assert len(roots) == 2
        number = start_cell(client, LONG)
        blocking_until(lambda: any("sleep" in command(child) for root in roots for child in below(root)))
        everything = roots + [child for root in roots for child in below(root)]
        if end == "interrupt":
            interrupted(manager, client, number)
            interrupted(manager, client, start_cell(client, WAITS))
            assert run_cell(client, LEFT) == "leased 0 waiting 0\n"
        else:
            end_kernel(manager, client, end)
        blocking_until(lambda: not any(runs(each) for each in everything))
        if end != "interrupt":
            assert len(run_cell(client, CELL.format(level=level)).split()) == 2
        assert (groups(pid), scratch(pid)) == ([], set()), "a control group or a folder was left"
        run_cell(client, "await pool.close()")


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
