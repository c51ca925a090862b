"""Evaluations: means, exclusions, seeds and comparison."""

import re
import types
from typing import Any

import errors
import pytest
from agents import Played, agent, call, chat, played, tasks

import agentfly_kit as af
from agentfly_kit.evaluation import summarise
from agentfly_kit.success import success_interval

MESSAGES = ({"role": "user", "content": "?"},)


def chains(rewards: dict[str, list[float | None]], metrics: list[dict[str, float]] | None = None) -> af.Rollout:
    return af.Rollout.from_trajectories(
        af.Trajectory(
            f"{name}/{i}",
            af.Task(name, MESSAGES),
            name,
            i,
            (),
            "answered",
            reward=r,
            metrics=metrics[i] if metrics else {},
        )
        for name, values in rewards.items()
        for i, r in enumerate(values)
    )


def test_means_are_over_tasks_and_exclude_unscored_chains() -> None:
    e = summarise(chains({"a": [1.0, 0.0], "b": [1.0, None], "c": [0.0, 0.0], "d": [None, None]}), 2)
    assert e.success == pytest.approx((0.5 + 1 + 0) / 3)
    assert (e.tasks, e.samples, e.unscored) == (3, 2, 3 / 8)
    assert e.reward == pytest.approx(2 / 5)
    assert (e.low, e.high) == success_interval([[True, False], [True], [False, False]])
    assert f"(95 % interval {e.low:.3f} to {e.high:.3f})" in repr(e) and [*e] == [*e.rollout]
    assert "success" in e._repr_html_()


def test_pass_at_k_excludes_tasks_with_fewer_chains_visibly() -> None:
    e = summarise(chains({"a": [1, 0, 0, 0, 0, 0], "b": [1, 1, 0, None, None, None], "c": [0] * 6}), 6)
    assert e.pass_at_k == pytest.approx({1: (1 / 6 + 2 / 3) / 3, 2: (1 / 3 + 1) / 3, 4: (4 / 6) / 2, 6: 1 / 2})
    assert (e.pass_at_k[1], e.tasks_at_k) == (pytest.approx(e.success), {1: 3, 2: 3, 4: 2, 6: 2})
    assert e.summary()["pass@4"] == e.pass_at_k[4]
    assert {k: v for k, v in e.summary().items() if k.startswith("tasks@")} == {"tasks@4": 2, "tasks@6": 2}
    assert "3 tasks x 6, pass@6 0.500 (of 2 tasks)" in repr(e)
    assert "3 unscored (no reward)" in repr(e)
    none = summarise(chains({"a": [1, None]}), 2)
    assert (none.pass_at_k, none.tasks_at_k) == ({1: 1.0}, {1: 1, 2: 0})


def test_other_metrics_are_means_over_the_chains_that_have_them() -> None:
    found = [{"found": 1.0, "bought": 3.0}, {"found": 0.0}, {"found": 9.0}]
    some = chains({"a": [1.0, 0.0, None]}, found)
    e = summarise(some, 3)
    assert e.metrics == {"found": 0.5, "bought": 3.0}
    assert "bought" in e._repr_html_() and "bought" not in e.summary()
    assert hash(e) == hash(summarise(some, 3))


async def test_seeds_differ_from_those_of_rollouts() -> None:
    engine = Played(["5"])
    a = agent(engine=engine, chat=chat())
    some = tasks(2)
    await af.evaluate(a, some, group_size=2)
    first = set(engine.seeds)
    engine.seeds.clear()
    await a.rollout(some, group_size=2)
    await a.rollout(some, group_size=2, purpose="train")
    assert len(first) == 4
    assert not first & set(engine.seeds)
    engine.seeds.clear()
    e = await af.evaluate(a, some, group_size=2, seeds=(0, 1, 2))
    assert len(set(engine.seeds)) == 12
    assert first < set(engine.seeds)
    assert (e.samples, len({t.id for t in e.rollout})) == (6, 12)


async def test_the_sampling_of_the_agent_can_be_replaced() -> None:
    engine = Played(["5"])
    a = agent(engine=engine, chat=chat(), sampling=af.Sampling(temperature=0.7))
    for options, temperature in (
        ({"greedy": True}, 0.0),
        ({}, 0.7),
        ({"sampling": af.Sampling(temperature=0.3)}, 0.3),
    ):
        e = await af.evaluate(a, tasks(1), **options)
        assert engine.samplings[-1].temperature == temperature
        assert e.greedy == (temperature == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "seeds must contain at least one seed"),
        ({"seeds": (1, 1)}, r"no duplicates, got \(1, 1\)"),
        ({"group_size": 0}, "at least 1"),
        ({"tasks": []}, "one task"),
        ({"agent": played(["5"], reward=None)}, "agent must have a reward to evaluate, got none"),
        (
            {"agent": played(["5"], reward=lambda final: 1 / 0)},
            r"none of 1 chains was scored: 1 unscored \(reward .*zero",
        ),
    ],
)
async def test_invalid_arguments(options: dict[str, Any], message: str) -> None:
    await errors.check(
        lambda: af.evaluate(**{"agent": played(["5"]), "tasks": tasks(1)} | options), ValueError, re.compile(message)
    )


async def test_a_changed_sampling_shares_the_handle_and_the_warnings_of_the_agent() -> None:
    space = vars(types.ModuleType("__main__"))
    source = "import agentfly_kit as af\n@af.reward\ndef good(final):\n    return {}\n"
    exec(source.format(1), space)
    a = played(["5"], reward=space["good"])
    exec(source.format(0), space)
    with pytest.warns(UserWarning, match="'good' was defined again"):
        await af.evaluate(a, tasks(3), greedy=True)
    assert len(a.last_run.partial) == 3
    assert (await af.evaluate(a, tasks(1), greedy=True)).success == 1


async def test_real_chains_are_counted() -> None:
    e = await af.evaluate(agent(), tasks(40))
    assert 0 < e.low < e.success < e.high < 0.8
    assert 1 <= e.turns <= 4 and e.tokens > 3
    better = await af.evaluate(played(lambda task, turn: call() if turn == 0 else task.fields["answer"]), tasks(40))
    assert (better.success, better.turns, better.calls, better.high) == (1.0, 2.0, 1.0, 1.0)
    diff = e.diff(better)
    assert len(diff.pairs) == 40 and len(diff.gained) == 40 * (1 - e.success)
    assert diff.p_value == pytest.approx(2 * 0.5 ** len(diff.gained))


async def test_a_budget_applies_to_each_seed() -> None:
    e = await af.evaluate(played(["5"]), tasks(4), seeds=(0, 1), max_concurrency=1, budget=af.Budget(turns=3))
    assert (len(e.rollout), list(e.rollout.not_run.values())) == (6, ["run_turns"] * 2)
    e = await af.evaluate(played([call("1+1"), "5"]), tasks(2), 2, max_concurrency=1, group_budget=af.Budget(turns=2))
    assert [len(group) for group in e.rollout.groups] == [1, 1]
    assert set(e.rollout.not_run.values()) == {"group_turns"}


async def test_the_reprs_count_the_tasks_of_each_split() -> None:
    rows = {
        "train": [{"question": f"{i}?", "answer": "1"} for i in range(3)],
        "test": [{"question": "x", "answer": ""}],
    }
    given = af.tasks_from(rows)
    a = agent(max_turns=1)
    run = a.rollout(given)
    assert "<rollout of 4 tasks (3 train, 1 test) x 1 has not run" in repr(run)
    assert "Rollout(4 tasks (3 train, 1 test), 4 chains" in repr(await run)
    assert "Rollout(4 tasks (3 train, 1 test), 4 chains" in repr((await af.evaluate(a, given)).rollout)
    assert "Rollout(3 tasks, 3 chains" in repr(await a.rollout(given.train))
