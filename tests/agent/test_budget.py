"""Limits of single chains, shared budgets, and limits on concurrency."""

import asyncio
import random
from typing import Any

import dice
import pytest
from agents import (
    Box,
    ForkingBox,
    agent,
    call,
    chat,
    numbered,
    pass_time,
    played,
    put,
    put_call,
    put_forking,
    scripted,
)
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.batch.turn_data import executed_calls


def spent(rollout: af.Rollout) -> dict[str, int]:
    return {
        "tokens": sum(len(t.ids or ()) for x in rollout for t in x.turns if t.kind == "action"),
        "turns": sum(len(x.actions) for x in rollout),
        "tool_calls": sum(c.result.ran for x in rollout for c in x.tool_calls if c.result),
    }


async def test_calls_beyond_max_tool_calls_are_not_run_and_end_the_chain() -> None:
    script = [call("1+1"), call("1+2") + call("1+3") + call("1+4"), "5"]
    (t,) = await played(script, max_tool_calls=3).rollout(numbered(1))
    assert (t.stop, t.truncated, t.reward) == ("chain_tool_calls", True, 0.0)
    assert [c.result.observation for c in t.tool_calls if c.result] == [
        "2", "3", "4", "calculator was not run: there are no tool calls left (chain_tool_calls)",
    ]  # fmt: skip
    assert executed_calls(t) == 3
    assert t.turns[-1].ids == ()  # the last turn has no ids, because no action follows


async def test_chain_can_answer_after_its_last_allowed_call() -> None:
    script = [call("1+1"), call("1", "nobody") + "<tool_call>{", call("2+3"), "5"]
    (t,) = await played(script, max_tool_calls=2).rollout(numbered(1))  # invalid calls do not count
    assert (t.stop, t.reward, executed_calls(t)) == ("answered", 1.0, 2)


async def test_max_tool_calls_applies_to_interactive_chains() -> None:
    chain = played([call("1+1"), call("1+1"), "5"], max_tool_calls=1).chain(numbered(1)[0])
    await chain.step()
    await chain.step()
    assert chain.stop == "chain_tool_calls"
    chain.rewind(to=2)
    chain.force("5")
    assert (await chain.finish()).stop == "answered"


@pytest.mark.parametrize(
    ("budget", "stops", "not_run"),
    [
        ({"turns": 5}, ["answered", "answered", "run_turns"], ["t3", "t4"]),
        ({"turns": 4}, ["answered", "answered"], ["t2", "t3", "t4"]),
        ({"tool_calls": 2}, ["answered", "answered"], ["t2", "t3", "t4"]),
        ({"turns": 100, "tool_calls": 100, "tokens": 10**6, "seconds": 3600}, ["answered"] * 5, []),
    ],
)
async def test_shared_budget_truncates_deterministically_without_concurrency(
    budget: dict[str, Any], stops: list[str], not_run: list[str]
) -> None:
    run = played([call("2+3"), "5"]).rollout(numbered(5), max_concurrency=1, budget=af.Budget(**budget))
    rollout = await run
    assert [(t.stop, t.truncated) for t in rollout] == [(stop, stop.startswith("run_")) for stop in stops]
    assert list(rollout.not_run.items()) == [(f"rollout-0:{name}/0", f"run_{next(iter(budget))}") for name in not_run]
    assert all(t.reward is not None for t in rollout)
    if not_run:
        text = f"{len(not_run)} not run"
        assert text in repr(rollout) and f"{len(rollout)} of 5 chains done, {text}" in repr(run)
        assert rollout.summary()["not_run"] == len(not_run)


async def test_not_run_chains_are_saved(tmp_path: Any) -> None:
    rollout = await played(["5"]).rollout(numbered(3), max_concurrency=1, budget=af.Budget(turns=1))
    again = af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))
    rescored = await rollout.rescore(None)
    assert again == rollout and rescored.not_run == again.not_run
    assert again.not_run == dict.fromkeys(["rollout-0:t1/0", "rollout-0:t2/0"], "run_turns")


async def test_each_group_has_its_own_budget() -> None:
    rollout = await played([call("2+3"), "5"]).rollout(
        numbered(3), group_size=4, max_concurrency=2, group_budget=af.Budget(turns=5)
    )
    assert [sum(len(t.actions) for t in group) for group in rollout.groups] == [5, 5, 5]
    assert {t.stop for t in rollout} == {"answered", "group_turns"}
    assert list(rollout.not_run.values()) == ["group_turns"] * (12 - len(rollout))


async def test_shared_budget_refuses_only_the_excess_calls() -> None:
    rollout = await played([call("1+1") * 3, "5"]).rollout(
        numbered(3), max_concurrency=1, budget=af.Budget(tool_calls=4)
    )
    assert [t.stop for t in rollout] == ["answered", "run_tool_calls"]
    assert spent(rollout)["tool_calls"] == 4


async def test_last_action_receives_the_remaining_tokens() -> None:
    long = "What is it? " * 20 + "…"  # truncated at the limit of its turn

    def script(task: af.Task, turn: int) -> str:
        return "5" if task.id == "t0" else long

    first = len(chat().encode("5")) + 1
    rollout = await played(script).rollout(numbered(3), max_concurrency=1, budget=af.Budget(tokens=first + 7))
    assert [(t.stop, len(t.turns[-1].ids or ())) for t in rollout] == [("answered", first), ("run_tokens", 7)]
    assert rollout.not_run == {"rollout-0:t2/0": "run_tokens"}
    rollout = await played(script).rollout(numbered(2), max_concurrency=1, budget=af.Budget(tokens=first + 64))
    assert [t.stop for t in rollout] == ["answered", "turn_tokens"]  # the limit of the turn is not above the budget


@pytest.mark.parametrize("kind", ["budget", "group_budget"])
async def test_budgets_are_never_exceeded(kind: str) -> None:
    """Use a real engine, whose actions differ in length, at several concurrencies."""
    seed = dice.seed()
    rng = random.Random(seed)
    a = agent(max_turns=3)
    whole = spent(await a.rollout(numbered(4), group_size=3))
    seen: set[str] = set()
    for _ in range(6):
        what = rng.choice(["tokens", "turns", "tool_calls"])
        # Less than the use of all chains, or of an average group, so that it is reached.
        limit = rng.randrange(1, max(2, whole[what] // (1 if kind == "budget" else len(numbered(4)))))
        many = rng.choice([1, 2, 5, 64])
        events: list[Any] = []
        run = a.rollout(numbered(4), group_size=3, max_concurrency=many, **{kind: af.Budget(**{what: limit})})  # type: ignore[arg-type]
        run.subscribe(events.append)
        rollout = await asyncio.wait_for(run, GUARD)
        parts = [rollout] if kind == "budget" else [af.Rollout((g,)) for g in rollout.groups]
        assert all(spent(part)[what] <= limit for part in parts), f"seed {seed}"
        assert len(rollout) + len(rollout.not_run) == 12
        cut = {t.stop for t in rollout if t.truncated} | set(rollout.not_run.values())
        seen |= cut
        if kind == "budget" and limit < whole[what]:
            assert f"run_{what}" in cut, f"seed {seed}"
        assert not [e for e in events if e.kind == "turn" and e.trajectory in rollout.not_run]
    assert any(stop.startswith(kind.removesuffix("budget").removesuffix("_") or "run") for stop in seen)


async def test_seconds_budget_cancels_running_chains_and_starts_no_more() -> None:
    async def script(task: af.Task, turn: int) -> str:
        if task.id == "t2":
            await until(lambda: len(run.partial) == 1)
            pass_time(2 * GUARD)
        await (asyncio.sleep(0) if task.id == "t0" else asyncio.Event().wait())
        return "5"

    run = scripted(script, timeout=3 * GUARD).rollout(numbered(5), max_concurrency=2, budget=af.Budget(seconds=GUARD))
    rollout = await run
    assert [t.stop for t in rollout] == ["answered", "run_seconds", "run_seconds"]
    assert list(rollout.not_run.values()) == ["run_seconds"] * 2


async def test_the_time_of_a_group_starts_with_its_first_chain() -> None:
    async def script(task: af.Task, turn: int) -> str:
        pass_time({"t0": 2000, "t1": 2000, "t2": 4000}[task.id])
        await (asyncio.Event().wait() if task.id == "t2" else asyncio.sleep(0))
        return "5"

    rollout = await scripted(script).rollout(numbered(3), max_concurrency=1, group_budget=af.Budget(seconds=3600))
    assert [t.stop for t in rollout] == ["answered", "answered", "group_seconds"]


async def test_forks_share_the_group_budget_and_unstarted_forks_release_sandboxes() -> None:
    script = [put_call("x", "put_forking"), "5"]
    async with af.Pool(ForkingBox, size=8) as pool:
        a = played(
            script, tools=[put_forking], pools=[pool], after_observation=lambda c: 3 if c.key.fork == "" else 0
        )
        rollout = await a.rollout(numbered(1), max_concurrency=1, group_budget=af.Budget(turns=3))
        assert [t.stop for t in rollout] == ["answered", "answered"]
        assert list(rollout.not_run) == ["rollout-0:t0/0.2", "rollout-0:t0/0.3"]
        assert pool.snapshot().leased == 0


async def test_failed_action_does_not_count_against_the_budget() -> None:
    def script(task: af.Task, turn: int) -> Any:
        return ZeroDivisionError("no") if task.id == "t0" else "5"

    rollout = await played(script).rollout(numbered(3), max_concurrency=1, budget=af.Budget(turns=2))
    assert [t.stop for t in rollout] == ["error", "answered", "answered"]


class Counter:
    """Counter of concurrent calls, which wait until `wanted` of them run."""

    def __init__(self, wanted: int) -> None:
        self.now, self.most, self.wanted = 0, 0, wanted

    async def count(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await until(lambda: self.most >= self.wanted)
        await asyncio.sleep(0)
        self.now -= 1


@pytest.mark.parametrize("two_rollouts", [False, True])
async def test_concurrent_requests_are_limited_over_all_rollouts_of_an_agent(two_rollouts: bool) -> None:
    asked = Counter(5)

    async def script(task: af.Task, turn: int) -> str:
        await asked.count()
        return call("1") if turn == 0 else "5"

    a = scripted(script, max_concurrent_requests=5)
    if two_rollouts:
        await asyncio.gather(a.rollout(numbered(10)), af.evaluate(a, numbered(10)))
    else:
        await a.rollout(numbered(16))
    assert asked.most == 5
    asked.most, asked.wanted = 0, 6
    await a.replace(max_concurrent_requests=None).rollout(numbered(12))  # ends only if the limit is exceeded


async def test_a_request_limit_and_a_small_pool_do_not_deadlock() -> None:
    script = [put_call("x")] * 3 + ["5"]
    async with af.Pool(Box, size=2) as pool:
        a = scripted(script, tools=[put], pools=[pool], max_turns=5, max_concurrent_requests=1)
        rollout = await asyncio.wait_for(a.rollout(numbered(8)), GUARD)
    assert [t.stop for t in rollout] == ["answered"] * 8


def test_the_request_limit_works_in_several_event_loops() -> None:
    a = scripted(["5"], max_concurrent_requests=2)

    async def go() -> int:
        return len(await a.rollout(numbered(6)))

    assert [asyncio.run(go()), asyncio.run(go())] == [6, 6]
