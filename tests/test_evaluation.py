"""Success with its interval: what is counted, what is left out, and seeds that are its own."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
from agents import Played, agent, call, chat, played, tasks

from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.errors import SettingsError
from agentfly_kit.evaluation import bootstrap, evaluate, summarise
from agentfly_kit.rewards import reward
from agentfly_kit.types import Sampling, Task, Trajectory

MESSAGES = ({"role": "user", "content": "?"},)


def chains(rewards: dict[str, list[float | None]], **more: Any) -> Rollout:
    return Rollout.from_trajectories(
        Trajectory(f"{name}/{i}", Task(name, MESSAGES), name, i, (), "answered", reward=r, **more)
        for name, values in rewards.items()
        for i, r in enumerate(values)
    )


def test_means_are_over_tasks_and_unscored_chains_are_left_out() -> None:
    e = summarise(chains({"a": [1.0, 0.0], "b": [1.0, None], "c": [0.0, 0.0], "d": [None, None]}), 2)
    assert e.success == pytest.approx((0.5 + 1 + 0) / 3)
    assert e.pass_at_k == pytest.approx(2 / 3)
    assert (e.tasks, e.samples) == (3, 2)
    assert e.unscored == 3 / 8
    assert e.reward == pytest.approx(2 / 5)
    assert e.low <= e.success <= e.high
    assert "Evaluation(success 0.500 [" in repr(e)
    assert "success" in e._repr_html_()


def test_success_is_the_metric_where_there_is_one() -> None:
    assert summarise(chains({"a": [0.0]}, metrics={"success": 1.0}), 1).success == 1


def test_what_else_was_measured_is_told_as_means_over_those_that_have_it() -> None:
    some = Rollout.from_trajectories(
        Trajectory(f"a/{i}", Task("a", MESSAGES), "a", i, (), "answered", reward=r, metrics=metrics)
        for i, (r, metrics) in enumerate(
            [(1.0, {"found": 1.0, "bought": 3.0}), (0.0, {"found": 0.0}), (None, {"found": 9.0})]
        )
    )
    e = summarise(some, 3)
    assert e.metrics == {"found": 0.5, "bought": 3.0}
    assert "bought" in e._repr_html_() and "bought" not in e.summary()
    assert hash(e) == hash(summarise(some, 3))


def test_nothing_scored_says_why() -> None:
    with pytest.raises(SettingsError, match=r"none of 2 chains was scored \(the agent has no reward\)"):
        summarise(chains({"a": [None, None]}), 1)


def test_the_interval_is_that_of_the_mean() -> None:
    rng = np.random.default_rng(0)
    values = (rng.random(400) < 0.3).astype(float)
    low, high = bootstrap(values.tolist())
    half = 1.96 * math.sqrt(values.mean() * (1 - values.mean()) / 400)
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)
    assert bootstrap([0.5] * 10) == (0.5, 0.5)
    assert bootstrap(values.tolist()) == (low, high)


async def test_it_has_seeds_of_its_own() -> None:
    engine = Played(["5"])
    a = agent(engine=engine, chat=chat())
    some = tasks(2)
    await evaluate(a, some, samples=2)
    mine = set(engine.seeds)
    engine.seeds.clear()
    await a.rollout(some, group_size=2)
    await a.rollout(some, group_size=2, purpose="train")
    assert len(mine) == 4
    assert not mine & set(engine.seeds)
    engine.seeds.clear()
    e = await evaluate(a, some, samples=2, seeds=(0, 1, 2))
    assert len(set(engine.seeds)) == 12
    assert mine < set(engine.seeds)
    assert e.samples == 6
    assert len({t.id for t in e.rollout}) == 12


async def test_greedy_and_sampled_are_apart() -> None:
    engine = Played(["5"])
    a = agent(engine=engine, chat=chat(), sampling=Sampling(temperature=0.7))
    e = await evaluate(a, tasks(1), greedy=True)
    assert e.greedy
    assert engine.samplings[-1].temperature == 0
    e = await evaluate(a, tasks(1))
    assert not e.greedy
    assert engine.samplings[-1].temperature == 0.7
    await evaluate(a, tasks(1), sampling=Sampling(temperature=0.3))
    assert engine.samplings[-1].temperature == 0.3


@pytest.mark.parametrize(
    ("options", "says"),
    [({"seeds": ()}, "seeds"), ({"samples": 0}, "at least 1"), ({"tasks": []}, "one task")],
)
async def test_bad_input(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        await evaluate(played(["5"]), **{"tasks": tasks(1)} | options)


async def test_after_an_interrupt_the_agent_knows_its_last_run() -> None:
    a = played(["5"])
    await evaluate(a, tasks(3), greedy=True)
    assert len(a.last_run.partial) == 3


async def test_a_tool_that_was_defined_again_is_said_once() -> None:
    space = vars(types.ModuleType("__main__"))
    source = "import agentfly_kit as af\n@af.reward\ndef good(final):\n    return {}\n"
    exec(source.format(1), space)
    a = played(["5"], reward=space["good"])
    exec(source.format(0), space)
    with pytest.warns(UserWarning, match="still has the 'good'"):
        await evaluate(a, tasks(1), greedy=True)
    assert (await evaluate(a, tasks(1), greedy=True)).success == 1


async def test_the_shipped_policy_is_as_good_as_it_is_said_to_be() -> None:
    e = await evaluate(agent(), tasks(40))
    assert 0 < e.success < 0.6
    assert 1 <= e.turns <= 4
    assert e.tokens > 3
    e = await evaluate(played(lambda task, turn: call("1+1") if turn == 0 else task.fields["answer"]), tasks(5))
    assert (e.success, e.turns, e.calls, e.pass_at_k) == (1.0, 2.0, 1.0, 1.0)


async def test_a_reward_without_success_counts_from_one_on() -> None:
    @reward
    def much(final: str | None) -> float:
        return 3.0

    assert (await evaluate(played(["5"], reward=much), tasks(2))).success == 1


async def test_a_budget_holds_for_each_seed_and_says_who_did_not_run() -> None:
    e = await evaluate(played(["5"]), tasks(4), seeds=(0, 1), max_concurrency=1, budget=Budget(turns=3))
    assert len(e.rollout) == 6
    assert set(e.rollout.not_run.values()) == {"run_turns"}
    assert len(e.rollout.not_run) == 2
    e = await evaluate(played([call("1+1"), "5"]), tasks(2), 2, max_concurrency=1, group_budget=Budget(turns=2))
    assert [len(group) for group in e.rollout.groups] == [1, 1]
    assert set(e.rollout.not_run.values()) == {"group_turns"}
