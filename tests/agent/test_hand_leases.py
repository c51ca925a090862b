"""A chain that waits on a person keeps no sandbox from those who work; it goes on in another, in the same state."""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from typing import Any

import dice
import pytest
from agents import scripted

import agentfly_kit as af
from agentfly_kit.errors import PoolTimeout, SandboxError, SettingsError
from agentfly_kit.pool.pool import Pool
from agentfly_kit.sandboxes import PythonSandbox
from agentfly_kit.types import Task

QUESTION = ({"role": "user", "content": "Fill the box."},)


class Box:
    """Every call says all that it holds."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def run(self, text: str) -> str:
        await asyncio.sleep(0.001)
        self.log.append(text)
        return ",".join(self.log)

    async def reset(self) -> None:
        await asyncio.sleep(0.001)
        self.log.clear()

    async def close(self) -> None: ...


class Photographed(Box):
    async def snapshot(self) -> list[str]:
        await asyncio.sleep(0.001)
        return list(self.log)

    def restore(self, snapshot: list[str]) -> None:
        self.log = list(snapshot)


class Replaced(Box):
    """Has no reset."""

    reset = None  # type: ignore[assignment]


class Firm(Box):
    replayable = False


@af.tool
async def put(text: str, box: Box) -> str:
    """Put a text into the box.

    Args:
        text: the text.
    """
    return await box.run(text)


@af.reward
async def held(box: Box) -> dict[str, Any]:
    return {"reward": float(len(box.log)), "log": ",".join(box.log)}


def say(text: str) -> str:
    return f'<tool_call>{{"name":"put","arguments":{{"text":"{text}"}}}}</tool_call>'


def agent(pool: Any, script: Any = None, **more: Any) -> af.Agent:
    more = {"tools": [put], "reward": held, "max_turns": 9} | more
    return scripted(script or [say("a"), say("b"), "done"], pools=[pool], **more)


def task(name: str = "t") -> Task:
    return Task(name, QUESTION)


def last(chain: Any) -> str:
    result = chain.turn.tool_calls[0].result
    assert result is not None
    return str(result.observation)


BACK = (
    r"the pool took back the \w+ of the chain .* while it waited and others needed it; the chain goes on in another, "
)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Box, "in which 1 call was run again"),
        (Replaced, "in which 1 call was run again"),
        (Photographed, "in the state that was saved"),
    ],
)
async def test_a_rollout_takes_what_a_resting_chain_holds_and_the_chain_goes_on(kind: type[Box], how: str) -> None:
    async with Pool(kind, size=1, acquire_timeout=10) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        assert last(chain) == "a"
        (info,) = pool.snapshot().leases
        assert (info.owner, info.hand, info.rests) == (chain.id, True, True)
        assert "1 leased (1 by hand)" in repr(pool)
        kinds: list[str] = []
        pool.subscribe(lambda event: kinds.append(event.kind))
        rollout = await agent(pool).rollout([task("x"), task("y")])  # says nothing: it has lost nothing
        assert [t.reward for t in rollout] == [2, 2]
        assert kinds.count("taken back") == 1
        assert pool.snapshot().leased == 0
        assert "holds no sandbox" in repr(chain.context)
        with pytest.warns(UserWarning, match=BACK + how):
            await chain.step()
        assert last(chain) == "a,b"
        await chain.step()
        trajectory = await chain.finish()
        assert (trajectory.reward, trajectory.stop) == (2, "answered")
        assert pool.snapshot().leased == 0


async def test_two_persons_on_one_sandbox_step_in_turns() -> None:
    async with Pool(Box, size=1, acquire_timeout=10) as pool:
        one, two = (agent(pool).chain(task(name)) for name in ("one", "two"))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for expected in ("a", "a,b"):
                for chain in (one, two):
                    await chain.step()
                    assert last(chain) == expected
            for chain in (one, two):
                await chain.step()
                assert (await chain.finish()).reward == 2
        assert len(said) >= 3
        assert all("took back the Box" in str(w.message) for w in said)


async def test_nothing_is_taken_while_it_works_or_while_others_can_be_served() -> None:
    async with Pool(Box, size=2, acquire_timeout=10) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        await agent(pool).rollout([task(f"x{i}") for i in range(4)], max_concurrency=1)  # there is another
        await chain.step()
        assert last(chain) == "a,b"

    slow = asyncio.Event()

    @af.tool(name="put")
    async def slow_put(text: str, box: Box) -> str:
        """Put.

        Args:
            text: any.
        """
        await slow.wait()
        return await box.run(text)

    async with Pool(Box, size=1) as pool:
        chain = agent(pool, tools=[slow_put]).chain(task())
        stepping = asyncio.create_task(chain.step())
        while pool.snapshot().leased == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(PoolTimeout, match=r"held by chain-0:t/0"):
            await pool.acquire("other", timeout=0.05)
        waiting = asyncio.create_task(pool.acquire("other", timeout=10))
        await asyncio.sleep(0.01)
        slow.set()
        await stepping
        lease = await waiting  # the moment that the step ends
        assert pool.snapshot().leases[0].owner == "other"
        await lease.release()
        await chain.close()


async def test_a_kind_whose_calls_must_not_be_repeated_keeps_its_leases() -> None:
    async with Pool(Firm, size=1) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        assert not pool.snapshot().leases[0].hand
        with pytest.raises(PoolTimeout):
            await pool.acquire("other", timeout=0.05)
        await chain.close()


async def steal(pool: Pool[Any]) -> None:
    await (await pool.acquire("thief", timeout=10)).release()


async def test_what_cannot_be_brought_back_is_refused_by_name_and_the_chain_is_not_lost() -> None:
    count = 0

    @af.tool(name="put")
    async def counted(text: str, box: Box) -> str:
        """Put.

        Args:
            text: any.
        """
        nonlocal count
        count += 1
        return f"{count}: {await box.run(text)}"

    async with Pool(Box, size=1) as pool:
        chain = agent(pool, tools=[counted]).chain(task())
        await chain.step()
        await steal(pool)
        await chain.sample()
        turns = chain.turns
        for _ in range(2):
            with pytest.raises(
                SandboxError,
                match=r"took back the Box of the chain .* cannot be brought back \(call 1, of put, gave something else",
            ):
                await chain.act()
        assert chain.turns == turns and chain.stop is None
        assert pool.snapshot().leased == 0
        with pytest.raises(SandboxError, match="cannot be brought back"):
            await chain.fork()
        with pytest.raises(SettingsError, match="it holds Box, which would not go back with it"):
            chain.rewind(to=0)
        chain.observe("by hand")  # what needs no sandbox goes on
        await chain.sample()
        with pytest.raises(SandboxError, match="cannot be brought back"):
            await chain.finish()  # the reward looks into the box
        await chain.close()


async def test_a_snapshot_that_fails_says_so() -> None:
    class Blurred(Photographed):
        async def snapshot(self) -> list[str]:
            raise OSError("no film")

    async with Pool(Blurred, size=1) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        await steal(pool)
        with pytest.raises(SandboxError, match=r"cannot be brought back \(no film\)"):
            await chain.step()
        await chain.close()


async def test_a_fork_of_a_chain_whose_sandbox_went() -> None:
    class Forked(Box):
        async def fork(self, into: Forked) -> None:
            into.log = list(self.log)

    async with Pool(Forked, size=2) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        holders = [await pool.acquire("thief", timeout=10) for _ in range(2)]
        for holder in holders:
            await holder.release()
        with pytest.warns(UserWarning, match=BACK):
            twin = await chain.fork()
        await twin.step()
        assert last(twin) == "a,b"
        await chain.step()
        assert last(chain) == "a,b"
        assert {lease.hand for lease in pool.snapshot().leases} == {True}
        await twin.close()
        await chain.close()


async def test_calls_that_a_person_answered_and_calls_of_others_are_not_run_again() -> None:
    script = [say("a"), say("never") + '<tool_call>{"name":"calculator","arguments":{"expression":"1+1"}}</tool_call>']

    @af.tool
    def calculator(expression: str) -> str:
        """Count.

        Args:
            expression: any.
        """
        ran.append(expression)
        return "2"

    ran: list[str] = []
    async with Pool(Box, size=1) as pool:
        chain = agent(pool, [*script, script[1], say("b")], tools=[put, calculator]).chain(task())
        await chain.step()
        await chain.sample()
        chain.observe("answered by a person")
        await chain.step()
        assert ran == ["1+1"]
        await steal(pool)
        with pytest.warns(UserWarning, match="2 calls were run again"):
            await chain.step()
        assert last(chain) == "a,never,b"
        assert ran == ["1+1"]
        await chain.close()


async def test_the_real_sandbox_comes_back_with_its_variables() -> None:
    @af.tool
    async def python(code: str, sandbox: PythonSandbox) -> str:
        """Run Python.

        Args:
            code: Python.
        """
        return (await sandbox.run(code)).stdout

    def run(code: str) -> str:
        return f'<tool_call>{{"name":"python","arguments":{{"code":"{code}"}}}}</tool_call>'

    async with Pool(PythonSandbox, size=1) as pool:
        script = [run("x = 20"), run("print(x + 22)"), "42"]
        chain = scripted(script, tools=[python], reward=None, pools=[pool]).chain(task())
        await chain.step()
        await steal(pool)
        with pytest.warns(UserWarning, match="in the state that was saved"):
            await chain.step()
        assert last(chain).strip() == "42"
        await chain.close()

        script = [run("import time; print(time.time())"), run("print(1)")]
        chain = scripted(script, tools=[python], reward=None, pools=[pool]).chain(task())
        await chain.step()
        await steal(pool)
        with pytest.raises(SandboxError, match="call 1 of 1 gave something else when it was replayed"):
            await chain.step()
        await chain.close()


async def test_a_chain_that_runs_to_its_end_by_itself_is_not_at_rest() -> None:
    async with Pool(Box, size=1, acquire_timeout=10) as pool:
        one, two = (agent(pool).chain(task(name)) for name in ("one", "two"))
        done = await asyncio.gather(one.run(), two.run())  # would warn, which is an error here
        assert [t.reward for t in done] == [2, 2]


async def test_a_chain_nobody_wants_any_more_gives_all_back() -> None:
    async with Pool(Box, size=1) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        await steal(pool)
        await chain.close()
        await chain.close()
        await steal(pool)
        assert pool.snapshot().leased == 0


async def test_a_pool_that_is_closed_meanwhile() -> None:
    pool = Pool(Photographed, size=1)
    chain = agent(pool).chain(task())
    await chain.step()
    await steal(pool)
    await pool.close()
    with pytest.raises(Exception, match="closed"):
        await chain.step()
    await chain.close()


@pytest.mark.filterwarnings("ignore:the pool took back")
@pytest.mark.parametrize("kind", [Box, Photographed, Replaced])
async def test_many_persons_and_rollouts_on_a_small_pool(kind: type[Box]) -> None:
    """Everybody gets what they would have got alone, also when steps are cancelled on their way."""
    seed = dice.seed()
    rng = random.Random(seed)
    script = [say("a"), say("b") + say("c"), say("d"), "done"]
    async with Pool(kind, size=2, acquire_timeout=30) as pool:

        async def person(name: str) -> None:
            chain = agent(pool, script).chain(task(name))
            while chain.stop is None:
                await asyncio.sleep(rng.random() * 0.01)
                turns = len(chain.turns)
                stepping = asyncio.create_task(chain.act() if chain._pending_calls() else chain.sample())
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.004)
                    stepping.cancel()
                await asyncio.wait([stepping])
                if stepping.cancelled():
                    assert len(chain.turns) == turns
                    # A call that was cut may have been in the box, or not: this chain cannot be compared any more.
                    if chain._pending_calls():
                        await chain.close()
                        return
                else:
                    stepping.result()
            assert (await chain.finish()).reward == 4, name

        async def runs(number: int) -> None:
            rollout = await agent(pool, script).rollout([task(f"r{number}-{i}") for i in range(4)])
            assert [t.reward for t in rollout] == [4] * 4

        done = await asyncio.wait_for(
            asyncio.gather(*(person(f"p{i}") for i in range(12)), *(runs(i) for i in range(3)), return_exceptions=True),
            60,
        )
        assert done == [None] * 15, f"seed {seed}: {done}"
        assert (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0)


# --- leases that end under their holders ---------------------------------------------------------


class Watched(Box):
    gone = False

    async def close(self) -> None:
        self.gone = True


async def wait_for_the_end(box: Watched, slow: bool) -> str:
    while slow and not box.gone:
        await asyncio.sleep(0.005)
    return "done"


@af.tool
async def hold(box: Watched, slow: af.FromTask[bool]) -> str:
    """Work for long."""
    return await wait_for_the_end(box, slow)


@af.tool
async def hold_by_context(context: af.Context, slow: af.FromTask[bool]) -> str:
    """Work for long."""
    return await wait_for_the_end(await context.sandbox(Watched), slow)


@af.reward
def fine(final: str | None) -> float:
    return 1.0


@pytest.mark.parametrize("tool", [hold, hold_by_context])
@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_chain_whose_lease_ends_is_unscored_and_its_siblings_are_whole(tool: Any, by_hand: bool):
    pool = Pool(Watched, size=4, max_lease=3600.0 if by_hand else 2.0)
    call = f'<tool_call>\n{{"name": "{tool.name}", "arguments": {{}}}}\n</tool_call>'
    agent = scripted([call, "end"], tools=[tool], reward=fine, pools=[pool], max_turns=3)
    tasks = [Task("slow", QUESTION, {"slow": True}), Task("quick", QUESTION, {"slow": False})]
    rolling = asyncio.ensure_future(agent.rollout(tasks, group_size=4))
    while by_hand and not rolling.done():
        for lease in pool.snapshot().leases:
            if "slow" in lease.owner:
                pool.recycle(lease.sandbox, close=True)
        await asyncio.sleep(0.01)
    for trajectory in (await rolling).trajectories:
        if trajectory.task.id == "quick":
            assert trajectory.error is None and trajectory.stop == "answered"
            continue
        assert trajectory.error is not None and (trajectory.stop, trajectory.reward) == ("error", None)
        assert trajectory.error.type == "LeaseRevoked"
        assert ("closed by hand" if by_hand else "held for 2 s") in trajectory.error.message
    assert pool.snapshot().leased == 0
    await pool.close()


async def test_a_python_call_ends_with_its_lease():
    pool = Pool(PythonSandbox, size=1, max_lease=1.0)
    lease = await pool.acquire()
    with contextlib.suppress(SandboxError):
        result = await lease.sandbox.run("import time\ntime.sleep(1000)", timeout=1000.0)
        assert result.died
    assert lease.revoked and not lease.sandbox.alive
    with pytest.raises(SandboxError, match="closed"):
        await lease.sandbox.run("1")
    async with pool.lease() as sandbox:
        assert (await sandbox.run("1")).value == "1"
    await pool.close()


async def test_a_chain_stepped_by_hand_that_rests_for_too_long_goes_on_in_another():
    pool = Pool(Photographed, size=1, max_lease=0.2)
    agent = scripted(["a", "b"], tools=[put], reward=fine, pools=[pool], max_turns=4)
    chain = agent.chain(Task("t", QUESTION))
    chain.force(say("x"))
    await chain.act()
    while pool.snapshot().leased:
        await asyncio.sleep(0.01)
    chain.force(say("y"))
    with pytest.warns(UserWarning, match="while it waited and it was held for .* s; the chain goes on in another"):
        await chain.act()
    assert [c.result.observation for c in chain.snapshot().tool_calls if c.result] == ["x", "x,y"]
    await chain.close()
    await pool.close()


async def test_what_a_cell_took_from_the_context_is_not_taken_away_from_it() -> None:
    async with Pool(Box, size=1, acquire_timeout=10) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        box = await chain.context.sandbox(Box)
        await box.run("by hand")  # which running the chain's calls again would not bring back
        await chain.step()
        assert last(chain) == "a,by hand,b"
        with pytest.raises(PoolTimeout):
            await pool.acquire(owner="another", timeout=0.05)
        assert (await chain.context.sandbox(Box)) is box
        assert box.log == ["a", "by hand", "b"]
        await chain.close()
        assert pool.snapshot().leased == 0


async def test_using_in_a_cell_keeps_it_for_that_long() -> None:
    async with Pool(Box, size=1, acquire_timeout=10) as pool:
        chain = agent(pool).chain(task())
        await chain.step()
        async with chain.context.using(Box) as box:
            with pytest.raises(PoolTimeout):
                await pool.acquire(owner="another", timeout=0.05)
            assert box.log == ["a"]
        lease = await pool.acquire(owner="another", timeout=10)
        await pool.release(lease)
        with pytest.warns(UserWarning, match=BACK):
            await chain.step()
        assert last(chain) == "a,b"
        await chain.close()
