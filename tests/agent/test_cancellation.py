"""Cancellation at every await: no lease, task, thread or reservation remains, and later calls work."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import errors
import pytest
from agents import ForkingBox, Text, agent, calculator, call, fresh, put_call, put_forking, scripted, tasks
from cancelling import Whom, cancel_at, some, tasks_left, threads_busy
from test_engine_openai import Server
from test_engine_openai import chat as answered
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.samples import TurnRequest

TASKS = [af.Task(f"t{i}", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"}) for i in range(3)]


@af.reward
async def looks(final: str | None, box: ForkingBox) -> float:
    return float(bool(await box.run("looked")))


@af.reward(weight=0.5)
def blocks(final: str | None) -> float:
    return 1.0


def everything(pool: af.Pool[Any]) -> af.Agent:
    """Return an agent that awaits leases, threads, concurrent calls, forks, hooks, rewards and limits."""

    async def script(task: af.Task, turn: int) -> str:
        await asyncio.sleep(0)
        return [call("1") + put_call("2", "put_forking"), put_call("3", "put_forking"), "5"][turn]

    async def hook(chain: Any) -> int:
        await asyncio.sleep(0)
        return int(chain.key.fork == "" and chain.actions == 1 and chain.task.id == "t0")

    return scripted(
        script,
        tools=[calculator, put_forking],
        reward=[looks, blocks],
        pools=[pool],
        after_observation=hook,
        before_turn=lambda chain: asyncio.sleep(0),
        after_chain=lambda chain, trajectory: asyncio.sleep(0),
        max_concurrent_requests=2,
    )


async def nothing_left(where: str, pool: af.Pool[Any] | None = None, a: af.Agent | None = None) -> None:
    """Check that no task, busy thread, lease or concurrency slot remains."""
    await until(lambda: not (tasks_left() or threads_busy()))
    if pool is not None:
        s = pool.snapshot()
        assert (s.leased, s.waiting, s.starting, s.resetting) == (0, 0, 0, 0), f"{where}: {pool!r}"
    if a is not None:
        for slots in a._semaphores.values():
            assert slots._value == a.max_concurrent_requests, where


async def at_each(
    work: Callable[[], Awaitable[Any]], after: Callable[[str], Awaitable[Any]], whom: Whom, count: int | None
) -> None:
    total = (await cancel_at(0, work)).count
    await after("uncancelled")
    assert total > 0
    for k in some(total, count):
        steps = await cancel_at(k, work, whom)
        await after(f"at {k} of {total}, {steps.where}, {whom} cancelled")


each = pytest.mark.parametrize("count", [24, pytest.param(None, marks=pytest.mark.long)], ids=["some", "all"])
both = pytest.mark.parametrize("whom", ["waiter", "itself"])


@each
@both
async def test_rollout(whom: Whom, count: int | None) -> None:
    async with af.Pool(ForkingBox, size=2) as pool:
        a = everything(pool)
        runs: list[Any] = []

        def work() -> Awaitable[Any]:
            budgets = {"budget": af.Budget(tokens=10**6, tool_calls=10**6), "group_budget": af.Budget(seconds=3600)}
            runs[:] = [a.rollout(TASKS, group_size=1, max_concurrency=2, **budgets)]  # type: ignore[arg-type]
            return runs[0]

        async def after(where: str) -> None:
            await nothing_left(where, pool, a)
            assert runs[0]._run_usage.tokens_left == runs[0]._run_usage.budget.tokens - runs[0]._run_usage.tokens, (
                where
            )
            assert all(t.stop in ("answered", "error") for t in runs[0].partial), where

        await at_each(work, after, whom, count)
        assert [t.reward for t in await a.rollout(TASKS)] == [1.5] * 4


@each
@both
async def test_iteration_over_a_rollout(whom: Whom, count: int | None) -> None:
    async with af.Pool(ForkingBox, size=2) as pool:
        a = everything(pool)

        async def work() -> None:
            async for _ in a.rollout(TASKS[:2], max_concurrency=2):
                await asyncio.sleep(0)

        await at_each(work, lambda where: nothing_left(where, pool, a), whom, count and count // 2)


@each
@both
async def test_interactive_chain_and_fork(whom: Whom, count: int | None) -> None:
    """The chains are closed without knowing at which step they were cancelled."""
    async with af.Pool(ForkingBox, size=2) as pool:
        a = everything(pool).replace(after_observation=None)
        chains: list[Any] = []

        async def work() -> None:
            chain = a.chain(TASKS[1])
            chains.append(chain)
            await chain.step()
            twin = await chain.fork()
            chains.append(twin)
            await asyncio.gather(chain.step(), twin.step())
            await chain.step()
            await chain.finish()

        async def after(where: str) -> None:
            for chain in chains:
                await chain.close()
            chains.clear()
            await nothing_left(where, pool, a)

        await at_each(work, after, whom, count)


@each
@both
async def test_local_engine(whom: Whom, count: int | None) -> None:
    policy = fresh()
    engine = af.LocalEngine(policy, slots=8)
    a = agent(policy, engine=engine, sampling=af.Sampling(max_tokens=8))
    wanted = [t.ids.tolist() for t in await a.rollout(tasks(3))]
    ids = policy.chat.prompt(tasks(1)[0].messages, ())

    async def work() -> None:
        requests = [TurnRequest(TASKS[0], 0, f"s{i}") for i in range(3)]
        await asyncio.gather(
            *(engine.sample(ids, af.Sampling(max_tokens=4), i, request=r) for i, r in enumerate(requests))
        )
        await engine.distribution(ids, af.Sampling())
        for r in requests:
            engine.release(r.session)
        await a.rollout(tasks(3))

    async def after(where: str) -> None:
        await nothing_left(where)
        await until(lambda: not (engine._batch.table.active or engine._batch.waiting or engine._inbox))
        assert [t.ids.tolist() for t in await a.rollout(tasks(3))] == wanted, where

    await at_each(work, after, whom, count and count // 2)


@each
@both
async def test_server(whom: Whom, count: int | None) -> None:
    """Requests are cancelled while they run and between retries."""
    server = Server()
    busy = iter(range(10**9))

    def answer(path: str, body: Any) -> Any:
        return (429, {"error": "busy"}, {}) if next(busy) % 2 == 0 else answered("5")

    server.answer = answer
    engine = af.OpenAIEngine(server.url, "tiny", backoff=0.002, timeout=GUARD)
    a = agent(engine=engine, chat=engine.chat, sampling=af.Sampling(max_tokens=4))
    try:
        await at_each(lambda: a.rollout(TASKS[:2]), lambda where: nothing_left(where), whom, count and count // 2)
        assert [t.stop for t in await a.rollout(TASKS)] == ["answered"] * 3
        await engine.close()
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["returns", "raises", "interrupted"])
def test_event_loop_that_ends_during_a_rollout_leaves_nothing(how: str) -> None:
    pool = af.Pool(ForkingBox, size=2)
    policy = fresh()
    a = everything(pool)
    b = agent(policy, sampling=af.Sampling(max_tokens=40))
    wanted = [t.ids.tolist() for t in asyncio.run(b.rollout(tasks(3)))]

    @af.tool(name="put_forking", describe="optional")
    async def forever(text: Text, box: ForkingBox) -> None:
        await asyncio.Event().wait()

    stuck = a.replace(tools=[calculator, forever])

    async def main() -> None:
        running = [asyncio.ensure_future(x.rollout(t)) for x, t in ((stuck, TASKS), (b, tasks(16)))]
        await until(lambda: pool.snapshot().leased == 2)
        if how == "raises":
            raise ZeroDivisionError
        if how == "interrupted":
            signal.raise_signal(signal.SIGINT)
            await asyncio.gather(*running)

    if how == "returns":
        asyncio.run(main())
    else:
        errors.check(lambda: asyncio.run(main()), ZeroDivisionError if how == "raises" else KeyboardInterrupt)
    assert pool.snapshot().leased == 0
    assert [t.reward for t in asyncio.run(a.rollout(TASKS))] == [1.5] * 4
    assert [t.ids.tolist() for t in asyncio.run(b.rollout(tasks(3)))] == wanted
    asyncio.run(pool.close())


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["leased", "sampling", "sampled"])
def test_event_loop_that_is_closed_without_cancelling(when: str) -> None:
    """The tasks are garbage collected without being cancelled, although the engine has their requests or results."""
    pool = af.Pool(ForkingBox, size=2)
    a = everything(pool)
    b = agent(fresh(), sampling=af.Sampling(max_tokens=40), pools=[pool], before_turn=lease)
    loop, batch = asyncio.new_event_loop(), b.engine._batch
    for x, given in ((a, TASKS), (b, tasks(8)))[when != "leased" :]:
        loop.create_task(x.rollout(given))

    async def begun() -> None:  # in passes of the loop, before the engine has sampled in its thread
        while not (pool.snapshot().leased if when == "leased" else batch.sampled):
            await asyncio.sleep(0)

    loop.run_until_complete(begun())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # that is what this test does
    while when == "sampled" and batch.table.active:
        time.sleep(0.01)
    del task
    loop.close()
    assert [t.error for t in asyncio.run(b.rollout(tasks(3)))] == [None] * 3
    assert [t.reward for t in asyncio.run(a.rollout(TASKS))] == [1.5] * 4
    asyncio.run(pool.close())


async def lease(chain: Any) -> None:
    await chain.context.sandbox(ForkingBox)
