"""Calls that were cancelled or have timed out run on in their thread, and one thread runs the calls of one sandbox.

A call that runs on must not change what another chain sees. The members of this kind that were looked at: tools and
rewards of environments, wrapped Gymnasium environments, tools that use pooled objects (one or two), later calls of the
same chain, the constructor, `start`, `reset`, `fork`, `cleanup` and `close` of a sandbox, sync methods that a client
calls on a pool server, and coroutines that wait for a thread. PythonSandbox ends its own calls.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import GUARD, until

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "?"},))


class Counter:
    """Object with a call that lasts until the test opens the gate, and then sets `value`."""

    gate: threading.Event
    entered: threading.Event
    value = 0

    def slow(self) -> str:
        type(self).entered.set()
        assert type(self).gate.wait(GUARD)
        self.value = 999
        return "set"

    def reset(self) -> None:
        self.value = 0


class World(Counter):
    """Environment with the same call as a tool."""

    def reset(self, task: af.Task) -> None:  # type: ignore[override]
        self.value = 0

    @af.tool(timeout=0.05, describe="optional")
    def act(self, action: str) -> str:
        return self.slow() if action == "slow" else str(self.value)

    @af.tool(name="waits", timeout=0.05, describe="optional")
    async def waits_for_a_thread(self) -> str:
        return await asyncio.to_thread(self.slow)

    def reward(self) -> float:
        return float(self.value)


class GymLike(Counter):
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        self.value = 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.slow() if action == "slow" else str(self.value), 0.0, False, False, {}


WRAPPED = af.envs.from_env(GymLike)


class Second(Counter):
    pass


@af.tool(timeout=0.05, describe="optional")
def act(action: str, counter: af.FromPool[Counter]) -> str:
    return counter.slow() if action == "slow" else str(counter.value)


@af.tool(timeout=0.05, describe="optional")
def both(action: str, counter: af.FromPool[Counter], second: af.FromPool[Second]) -> str:
    second.value = -1
    return counter.slow() if action == "slow" else str(second.value)


@pytest.fixture(autouse=True)
def gate() -> Iterator[threading.Event]:
    for kind in (Counter, World, GymLike, Second):
        kind.gate, kind.entered = threading.Event(), threading.Event()
    yield Counter.gate
    for kind in (Counter, World, GymLike, Second):
        kind.gate.set()


def tool_of(kind: type, name: str) -> Any:
    return next(tool for tool in af.envs.tools(kind) if tool.name == name)


async def time_out(tool: Any, arguments: dict[str, Any], context: af.Context, kind: type[Counter]) -> None:
    """Call a tool until a call has exceeded its time limit after it had begun."""
    while not kind.entered.is_set():
        given_up = "cancelled" if tool.name == "waits" else "abandoned"
        observation = (await tool.invoke(arguments, context)).observation
        late = f"{tool.name} took longer than 0.05 s"  # on a busy machine, the call may not have begun
        assert observation in (f"{late} and was {given_up}.", f"{late}, because an earlier call is still running.")


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (World, lambda: tool_of(World, "act")),
        (World, lambda: tool_of(World, "waits")),
        (WRAPPED, lambda: tool_of(WRAPPED, "act")),
        (Counter, lambda: act),
        (Second, lambda: both),
    ],
    ids=["environment", "coroutine", "gymnasium", "pooled object", "two pooled objects"],
)
async def test_a_call_that_was_given_up_does_not_reach_another_chain(kind: Any, make: Any, how: str) -> None:
    tool: Any = make()
    limit, owner = tool.timeout, GymLike if kind is WRAPPED else kind if tool is not both else Counter
    arguments = {} if tool.name == "waits" else {"action": "slow"}
    pools: list[af.Pool[Any]] = [af.Pool(each, size=1) for each in dict.fromkeys((kind, *tool.sandbox_types))]
    try:
        async with af.Context(TASK, pools=pools) as context:
            if how == "cancelled":
                tool.timeout = None
                calling = asyncio.ensure_future(tool.invoke(arguments, context))
                await until(owner.entered.is_set)
                calling.cancel()
                await asyncio.wait([calling])
                assert calling.cancelled()
            else:
                tool.timeout = 0.05
                await time_out(tool, arguments, context, owner)
            first = await context.sandbox(kind)
        # The only instance has been replaced, without waiting for the call.
        async with af.Context(TASK, pools=pools) as context:
            assert await context.sandbox(kind) is not first
    finally:
        tool.timeout = limit
        owner.gate.set()  # before the event loop waits for its threads
        for pool in pools:
            await pool.close()


@pytest.mark.parametrize("tool", [act, both], ids=["one", "two"])
async def test_later_calls_of_a_chain_wait_for_a_call_that_was_given_up(tool: Any, gate: threading.Event) -> None:
    @af.tool(timeout=None, describe="optional")
    def read(second: af.FromPool[Second]) -> str:
        return str(second.value)

    @af.tool(timeout=None, describe="optional")
    def read_counter(counter: af.FromPool[Counter]) -> str:
        return str(counter.value)

    @af.tool(describe="optional")
    def free() -> str:
        return "free"

    pools = [af.Pool(Counter, size=1), af.Pool(Second, size=1)]
    async with pools[0], pools[1], af.Context(TASK, pools=pools) as context:
        await time_out(tool, {"action": "slow"}, context, Counter)
        later = [
            asyncio.ensure_future(each.invoke({}, context)) for each in (read_counter, read)[: 1 + (tool is both)]
        ]
        assert (await free.invoke({}, context)).observation == "free"  # calls without a sandbox do not wait
        gate.set()
        assert [(await call).observation for call in later] == ["999", "-1"][: len(later)]


async def test_a_hung_call_blocks_neither_its_chain_nor_its_pool(gate: threading.Event) -> None:
    class Hung(World):
        killed = False

        @property
        def done(self) -> bool:
            return False

        def kill(self) -> None:
            type(self).killed = True

    Hung.gate, Hung.entered = gate, threading.Event()
    tool = tool_of(Hung, "act")
    async with af.Pool(Hung, size=1) as pool, af.Context(TASK, pools=[pool]) as context:
        await time_out(tool, {"action": "slow"}, context, Hung)
        later = await tool.invoke({"action": "read"}, context)
        assert later.observation == "act took longer than 0.05 s, because an earlier call is still running."
        await context.close()
        assert Hung.killed


async def test_a_hung_close_gives_up(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    class Slow(Counter):
        def close(self) -> None:
            self.slow()

    Slow.gate, Slow.entered = gate, threading.Event()
    monkeypatch.setattr("agentfly_kit.pool.core._CLOSE_SECONDS", 1.0)
    pool = af.Pool(Slow, size=1)
    await (await pool.acquire()).release()
    await pool.close()
    await until(Slow.entered.is_set)


async def test_only_the_calls_of_a_sandbox_run_in_its_thread(gate: threading.Event) -> None:
    class Bound:
        def start(self) -> None:
            self.thread = threading.get_ident()

        def reset(self) -> None: ...

        def where(self) -> int:
            return threading.get_ident()

    class Other(Bound):
        pass

    @af.tool(describe="optional")
    def first(bound: af.FromPool[Bound], other: af.FromPool[Other]) -> str:
        return str(bound.thread == bound.where() != other.thread)

    @af.tool(describe="optional")
    def second(other: af.FromPool[Other]) -> str:
        return str(other.thread == other.where())

    @af.tool(describe="optional")
    def anywhere() -> str:
        barrier.wait(GUARD)
        return "met"

    @af.tool(describe="optional")
    async def nested(bound: af.FromPool[Bound]) -> str:
        results = await asyncio.gather(anywhere.try_(), anywhere.try_())
        await pools[1].close()
        return " ".join(result.observation for result in results)

    barrier = threading.Barrier(2)
    pools: list[af.Pool[Any]] = [af.Pool(Bound, size=1), af.Pool(Other, size=1)]
    async with pools[0], pools[1]:
        async with af.Context(TASK, pools=pools) as context:
            assert [(await tool.invoke({}, context)).observation for tool in (first, second)] == ["True", "True"]
        async with af.Context(TASK, pools=pools) as context:
            assert (await nested.invoke({}, context)).observation == "met met"


async def test_calls_of_a_sandbox_run_in_one_thread() -> None:
    class Database:
        """Environment whose connection belongs to the thread that created it."""

        def __init__(self) -> None:
            self.threads = [threading.get_ident()]
            self.connection = sqlite3.connect(":memory:")

        def _value(self) -> int:
            self.threads.append(threading.get_ident())
            return int(self.connection.execute("select x from t").fetchone()[0])

        def start(self) -> None:
            self.connection.execute("create table t (x)")
            self.connection.execute("insert into t values (0)")

        def reset(self, number: int) -> None:
            self.connection.execute("update t set x = ?", (number,))

        @af.tool(describe="optional")
        def read(self) -> str:
            return str(self._value())

        @property
        def done(self) -> bool:
            return self._value() < 0

        @property
        def state(self) -> int:
            return self._value()

        def reward(self, state: int) -> float:
            return float(state == self._value())

        def fork(self, into: Database) -> None:
            into.copied = self._value()  # type: ignore[attr-defined]

        def cleanup(self) -> None:
            self._value()

        def close(self) -> None:
            closed.append(len({*self.threads, threading.get_ident()}))
            self.connection.close()

    closed: list[int] = []
    tool, reward = tool_of(Database, "read"), af.envs.reward(Database)
    trajectory: Any = type("T", (), {"task": TASK, "final": None, "turns": ()})()
    assert reward is not None

    async def chain(number: int) -> tuple[str, Any]:
        task = af.Task(f"t{number}", TASK.messages, {"number": number})
        async with af.Context(task, pools=[pool]) as context:
            result = await tool.invoke({}, context)
            if number % 4 == 0:
                async with await context.fork("fork", queue=False) as fork:
                    assert (await fork.sandbox(Database)).copied == number  # type: ignore[attr-defined]
            return result.observation, (await reward.score(trajectory, context)).reward

    async with af.Pool(Database, size=6) as pool:
        results = await asyncio.gather(*(chain(number) for number in range(4)))
        assert await chain(4) == ("4", 1.0)  # an instance is used again
    assert results == [(str(number), 1.0) for number in range(4)] and set(closed) == {1}


async def test_slow_constructors_and_methods_of_sandboxes_do_not_block_the_event_loop(gate: threading.Event) -> None:
    class Slow:
        def __init__(self) -> None:
            wait("constructor")

        def start(self) -> None:
            wait("start")

        def reset(self) -> None:
            wait("reset")

        def close(self) -> None:
            wait("close")

    def wait(name: str) -> None:
        reached.append(name)
        assert steps[name].wait(GUARD)

    reached: list[str] = []
    steps = {name: threading.Event() for name in ("constructor", "start", "reset", "close")}
    pool = af.Pool(Slow, size=1)

    async def go_on(*names: str) -> None:
        for name in names:
            await until(lambda name=name: name in reached)  # the event loop runs meanwhile
            steps[name].set()

    lease, _ = await asyncio.gather(pool.acquire(), go_on("constructor", "start"))
    await asyncio.gather(lease.release(), go_on("reset"))
    await asyncio.gather(pool.close(), go_on("close"))
    assert reached == ["constructor", "start", "reset", "close"]
