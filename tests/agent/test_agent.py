"""Agents and rollouts: validation, order, failures, stopping, pausing, events, concurrency."""

import asyncio
import random
import types
from typing import Any

import dice
import errors
import pytest
from agents import Box, Played, Text, agent, call, chat, fresh, numbered, played, put_call, scripted, tasks
from cancelling import tasks_left
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.agent.progress import RolloutEvent

TASK = af.Task("t", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"})


async def test_trajectories_are_in_the_order_of_the_tasks() -> None:
    now = most = 0
    chance = random.Random(0)

    async def script(task: af.Task, turn: int) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await until(lambda: most >= 5)
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        now -= 1
        return "5"

    rollout = await scripted(script).rollout(numbered(9), group_size=3, max_concurrency=5)
    assert most == 5
    assert [(t.task.id, t.chain) for t in rollout] == [(f"t{i}", chain) for i in range(9) for chain in range(3)]
    assert [(g.task.id, len(g)) for g in rollout.groups] == [(f"t{i}", 3) for i in range(9)]
    assert len({t.id for t in rollout}) == 27


async def test_repeated_task_makes_two_groups_with_different_seeds() -> None:
    engine = Played(["5"])
    rollout = await agent(engine=engine, chat=chat()).rollout([TASK, TASK], group_size=2)
    assert [len(g) for g in rollout.groups] == [2, 2]
    assert (len({t.id for t in rollout}), len(set(engine.seeds))) == (4, 4)


async def test_rollout_starts_once_when_awaited() -> None:
    engine = Played(["5"])
    run = agent(engine=engine, chat=chat()).rollout(TASK)
    await asyncio.sleep(0.01)
    assert (engine.given, repr(run)) == ([], "<rollout of 1 task x 1 has not run: write `await` before it>")
    errors.check(lambda: run.groups, af.errors.NotAwaited, "write (await run).groups, or run.partial.groups")
    a, b = await asyncio.gather(run, run)
    assert a == b == await run
    assert (len(engine.given), repr(run)) == (1, "<rollout of 1 task x 1, 1 of 1 chains done, done>")


def test_asyncio_run_accepts_rollouts_evaluations_and_training_runs() -> None:
    policy, some = fresh(), tasks(16)
    a = agent(policy)
    run = a.rollout(some, 2)
    rollout = asyncio.run(run)
    assert len(rollout) == run.total == 32 and asyncio.run(run) is rollout
    assert asyncio.run(af.evaluate(a, some)).success > 0
    config = af.TrainConfig(steps=1, tasks_per_step=2, group_size=4)
    assert len(asyncio.run(af.train(a, policy, some, config)).records) == 1


def test_agent_is_immutable_and_can_be_replaced() -> None:
    a = scripted(["5"])
    errors.check(lambda: setattr(a, "max_turns", 9), AttributeError)
    b = a.replace(max_turns=9)
    assert (a.max_turns, b.max_turns) == (4, 9)
    assert "calculator" in repr(b) and "exact" in repr(b)


async def test_future_cancelled_inside_a_chain_does_not_cancel_the_rollout() -> None:
    async def script(task: af.Task, turn: int) -> str:
        if task.id == "t2":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return "5"

    rollout = await asyncio.wait_for(scripted(script).rollout(numbered(5)), GUARD)
    assert [t.stop for t in rollout] == ["answered", "answered", "error", "answered", "answered"]


# A task with a call whose argument, a set, the template cannot write as JSON.
ODD_CALL = {"function": {"name": "calculator", "arguments": {"expression": {1}}}}
ODD = af.Task("odd", ({"role": "assistant", "tool_calls": [ODD_CALL]}, {"role": "user", "content": "?"}), TASK.fields)


async def test_template_error_is_recorded_in_the_trajectory() -> None:
    run = scripted(["5"]).rollout([*numbered(3), ODD], group_size=2)
    events: list[RolloutEvent] = []
    run.subscribe(events.append)
    rollout = await run
    check_events(events)
    reported = [(e.phase, e.state, e.detail) for e in events if e.task == "odd"]
    assert reported == [("start", "waiting", ""), ("end", "failed", "error")] * 2
    assert [t.stop for t in rollout] == ["answered"] * 6 + ["error"] * 2
    refused = rollout.trajectories[-1]
    assert (refused.reward, refused.error.type) == (None, "ChatTemplateError")  # type: ignore[union-attr]
    assert len(rollout.to_frame("tokens")) > 0


async def staggered(task: af.Task, turn: int) -> str:
    await (asyncio.sleep(0) if int(task.id[1:]) < 4 else asyncio.Event().wait())
    return "5"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_stopping_and_cancelling_keep_the_finished_chains(cancelled: bool) -> None:
    a = scripted(staggered)
    run = a.rollout(numbered(9))
    waiting = asyncio.create_task(run)
    await until(lambda: len(run.partial) == 4)
    if cancelled:
        waiting.cancel()
        kept = "4 of 9 chains have finished and are kept in agent.last_run"
        await errors.check(lambda: waiting, asyncio.CancelledError, kept)
        assert run.snapshot().state == "interrupted"
    else:
        run.stop()
        assert await asyncio.wait_for(waiting, GUARD) == run.partial
    await until(lambda: not tasks_left())
    assert a.last_run is run and [t.task.id for t in run.partial] == ["t0", "t1", "t2", "t3"]


async def collect(run: af.RolloutHandle) -> list[Any]:
    return [t async for t in run]


@pytest.mark.parametrize("how", [asyncio.ensure_future, collect])
async def test_stop_before_the_start(how: Any) -> None:
    run = scripted(["5"]).rollout(numbered(3))
    run.stop()
    assert len(await asyncio.wait_for(how(run), GUARD)) == 0
    await until(lambda: not tasks_left())


async def test_repeated_cancellation_releases_all_leases() -> None:
    class Slow(Box):
        async def reset(self) -> None:
            await asyncio.sleep(0.05)

    @af.tool(describe="optional")
    async def put_slow(text: Text, box: Slow) -> None:
        await asyncio.Event().wait()

    async with af.Pool(Slow, size=4) as pool:
        run = scripted([put_call("x").replace("put", "put_slow")], tools=[put_slow], pools=[pool]).rollout(
            numbered(4)
        )
        waiting = asyncio.create_task(run)
        await until(lambda: pool.snapshot().leased == 4)
        for _ in range(6):
            waiting.cancel()
            await asyncio.sleep(0.005)
        await asyncio.wait([waiting], timeout=GUARD)
        assert waiting.cancelled()
        assert pool.snapshot().leased == 0
        await until(lambda: not tasks_left())


async def test_breaking_out_of_iteration_ends_the_rollout() -> None:
    run = scripted(staggered).rollout(numbered(9))
    async for _ in run:
        break
    await until(lambda: not tasks_left())
    assert len(run.partial) >= 1
    assert run.snapshot().state == "stopped"


async def test_iteration_yields_chains_as_they_finish() -> None:
    async def script(task: af.Task, turn: int) -> str:
        await until(lambda: len(run.partial) == 4 - int(task.id[1:]))
        return "5"

    run = scripted(script).rollout(numbered(5))
    assert [t.task.id for t in await collect(run)] == ["t4", "t3", "t2", "t1", "t0"]
    assert [t.task.id for t in run.partial] == ["t0", "t1", "t2", "t3", "t4"]


async def test_concurrent_and_repeated_iterations_yield_all_chains() -> None:
    run = scripted(["5"], latency=0.01).rollout(numbered(6), max_concurrency=2)
    one, two = await asyncio.wait_for(asyncio.gather(collect(run), collect(run)), GUARD)
    assert len(one) == len(two) == len(await asyncio.wait_for(collect(run), GUARD)) == 6


async def test_a_pause_before_the_first_request() -> None:
    engine = Played(["5"])
    run = agent(engine=engine, chat=chat()).rollout(numbered(6), max_concurrency=3)
    run.pause()
    going = asyncio.create_task(run)
    await until(lambda: run.snapshot().count("waiting") == 3)
    assert (engine.given, run.snapshot().state) == ([], "paused")
    run.resume()
    assert len(await going) == len(engine.given) == 6


async def test_events_of_each_chain_are_ordered_and_complete() -> None:
    run = played([call("2+3"), "5"]).rollout(numbered(4), group_size=2, max_concurrency=3)
    events: list[RolloutEvent] = []
    run.subscribe(events.append)
    await run
    check_events(events)
    for t in run.partial:
        assert [(e.kind, e.phase) for e in events if e.trajectory == t.id] == [
            ("chain", "start"), ("turn", "start"), ("turn", "end"), ("tool", "start"), ("tool", "end"),
            ("turn", "start"), ("turn", "end"), ("reward", "start"), ("reward", "end"), ("chain", "end"),
        ]  # fmt: skip
        last = [e for e in events if e.trajectory == t.id][-1]
        assert (last.state, last.detail, last.task) == ("done", "answered", t.task.id)


async def test_listener_that_stops_the_rollout_receives_all_end_events() -> None:
    run = scripted(staggered).rollout(numbered(6), max_concurrency=3)
    events: list[RolloutEvent] = []

    def stop(event: RolloutEvent) -> None:
        events.append(event)
        if (event.kind, event.phase, event.task) == ("turn", "start", "t4"):
            run.stop()

    run.subscribe(stop)
    await asyncio.wait_for(run, GUARD)
    check_events(events)
    ends = {e.trajectory: e.state for e in events if (e.kind, e.phase) == ("chain", "end")}
    assert ends.keys() == {e.trajectory for e in events} and "cancelled" in ends.values()


def check_events(events: list[RolloutEvent]) -> None:
    """Check that sequence numbers and times increase, and that the start and end events of each chain nest."""
    assert [e.sequence for e in events] == list(range(1, len(events) + 1))
    assert [e.time for e in events] == sorted(e.time for e in events)
    for name in {e.trajectory for e in events}:
        mine = [e for e in events if e.trajectory == name]
        assert [(e.kind, e.phase) for e in (mine[0], mine[-1])] == [("chain", "start"), ("chain", "end")]
        assert mine[-1].state in ("done", "failed", "cancelled")
        running: list[tuple[str, str]] = []
        for e in mine[1:-1]:
            key = (e.kind, e.call)
            assert not running or running[0][0] == e.kind  # only tool calls run concurrently
            if e.phase == "start":
                assert e.kind == "tool" or not running
                running.append(key)
                assert e.state == {"turn": "sampling", "tool": "tool", "reward": "scoring"}[e.kind]
            else:
                running.remove(key)
                assert e.state == ("tool" if running else "waiting")
        assert not running, (name, running)


async def test_every_start_event_has_an_end_event_despite_failures() -> None:
    seed = dice.seed()
    rng = random.Random(seed)

    async def doze(*more: type[BaseException]) -> None:
        await asyncio.sleep(rng.random() * 0.003)
        if rng.random() < 0.1:
            raise rng.choice([ValueError, TimeoutError, *more])("no")

    async def script(task: af.Task, turn: int) -> str:
        await doze() if rng.random() < 0.3 else await asyncio.sleep(0)
        return put_call("x") * rng.randrange(1, 4) if rng.random() < 0.7 else rng.choice(["5", "<tool_call>{"])

    @af.tool(name="put", timeout=0.002, describe="optional")
    async def bad_put(text: Text, box: Box) -> str:
        await doze(SystemExit)
        return await box.run(text)

    @af.reward
    async def bad_reward(final: str | None, box: Box) -> float:
        await doze(SystemExit)
        return 1.0

    kinds: set[tuple[str, str]] = set()
    async with af.Pool(Box, size=4) as pool:
        for i in range(24):
            a = scripted(script, tools=[bad_put], reward=bad_reward, pools=[pool], timeout=rng.choice([None, 0.01]))
            run = a.rollout(numbered(6), group_size=2, max_concurrency=5)
            events: list[RolloutEvent] = []
            run.subscribe(events.append)
            waiting = asyncio.create_task(run)
            if i % 3 == 0:
                await asyncio.sleep(rng.random() * 0.03)
                run.stop()
            await asyncio.wait([waiting], timeout=GUARD)
            assert waiting.done() and (waiting.cancelled() or waiting.exception() is None), f"seed {seed}, {i}"
            check_events(events)
            kinds |= {(e.kind, e.state) for e in events}
            ended = [e.trajectory for e in events if (e.kind, e.phase) == ("chain", "end") and e.state != "cancelled"]
            assert sorted(ended) == sorted(t.id for t in run.partial), f"seed {seed}, {i}"
    assert {("chain", "done"), ("chain", "failed"), ("tool", "tool"), ("reward", "scoring")} <= kinds


async def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    await scripted(["5"]).rollout(numbered(5), progress=True)
    assert "5/5" in capsys.readouterr().err


def cell(source: str, into: dict[str, Any]) -> None:
    exec(compile(source, "<cell>", "exec"), into)


async def test_redefined_tool_is_reported_once() -> None:
    module = types.ModuleType("__main__")
    space = vars(module)
    source = (
        "import agentfly_kit as af\n@af.tool\ndef shout(text: str) -> str:\n"
        "    '''Shout.\n\n    Args:\n        text: what.\n    '''\n    return text + {!r}\n"
    )
    cell(source.format("!"), space)
    old = played(['<tool_call>{"name":"shout","arguments":{"text":"a"}}</tool_call>', "5"], tools=[space["shout"]])
    await old.rollout(TASK)
    cell(source.format("?"), space)
    with pytest.warns(UserWarning, match="'shout' was defined again, but this agent still uses") as said:
        rollout = await old.rollout(TASK)
    assert len(said) == 1
    assert rollout.trajectories[0].tool_calls[0].result.observation == "a!"  # type: ignore[union-attr]
    await old.rollout(TASK)  # a second warning would fail this test
