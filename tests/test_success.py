"""Success: the success rule of an agent, confidence intervals, and the paired test."""

import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import errors
import pytest
from agents import agent, fresh, played, tasks

import agentfly_kit as af
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.success import pass_at_k, sign_flip_test, success_interval
from agentfly_kit.trainer.fingerprint import fingerprint
from agentfly_kit.trainer.sampling import RolloutSampler

# --- the rule ------------------------------------------------------------------------------------


@af.reward
def shaped(final: str | None, answer: str) -> dict[str, float]:
    """A correct answer gets .9, another one .1."""
    right = float(final == answer)
    return {"reward": 0.1 + 0.8 * right, "exact": right}


def half_right(**settings: Any) -> Any:
    """Return an agent that answers every second task of `tasks` correctly."""
    right = {task.id: i % 2 == 0 for i, task in enumerate(tasks(4))}
    script = lambda task, turn: task.fields["answer"] if right[task.id] else "no"  # noqa: E731
    return played(script, **{"reward": shaped} | settings)


def long_answer(trajectory: af.Trajectory) -> bool:
    return trajectory.final != "no"


@pytest.mark.parametrize("rule", [0.9, "exact", long_answer], ids=["threshold", "metric", "function"])
async def test_every_display_follows_the_rule_of_the_agent(rule: Any, tmp_path: Path) -> None:
    solver = half_right(success=rule)
    rollout = await solver.rollout(tasks(4))
    assert [t.success for t in rollout] == rollout.to_frame()["success"].tolist() == [True, False, True, False]
    assert [t.metrics["success"] for t in rollout] == [1.0, 0.0, 1.0, 0.0]
    assert rollout.summary()["success"] == 0.5
    assert af.Rollout.load(rollout.save(tmp_path / "r.jsonl")) == rollout
    assert (await af.evaluate(solver, tasks(4))).success == 0.5
    plain = await half_right().rollout(tasks(4))
    assert [t.success for t in plain] == [False] * 4
    assert (await plain.rescore(shaped, success=rule)).summary()["success"] == 0.5
    w = pytest.importorskip("agentfly_kit.widgets")
    assert w.TrajectoryView(rollout)._about["counts"]["success"] == 2
    for form in (w.RewardForm(shaped, rollout, agent=solver), w.RewardForm(shaped, rollout, success=rule)):
        assert (await form.score()).summary()["success"] == 0.5
        form.close()


async def test_the_reward_of_a_group_is_included() -> None:
    add = lambda group: [0.5 if t.final != "no" else 0.0 for t in group]  # noqa: E731
    for rule in (1.4, "group_reward", lambda t: t.reward > 1):
        rollout = await half_right(success=rule, group_reward=lambda group: [2 * x for x in add(group)]).rollout(
            tasks(4)
        )
        assert [t.success for t in rollout] == [True, False, True, False], rule
    alone = await half_right(reward=None, success=0.5, group_reward=add).rollout(tasks(4))
    assert [t.success for t in alone] == [True, False, True, False]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("exakt", "success='exakt' must name a metric that the rewards return for every chain, got shaped, exact"),
        (lambda t: t.reward, "success must return True or False, got 0.9"),
        (lambda t: t.nothing, "'Trajectory' object has no attribute 'nothing'"),
    ],
)
async def test_a_rule_that_cannot_be_applied_leaves_the_chain_unscored(rule: Any, message: str) -> None:
    chain = half_right(success=rule).chain(tasks(1)[0])
    await chain.sample()
    found = await chain.finish()
    assert (found.reward, found.success, found.stop) == (None, None, "answered")
    assert found.error is not None and found.error.where == "success" and message in found.error.message
    assert chain.error == found.error


@pytest.mark.parametrize("rule", [math.nan, math.inf, True, "", [1.0], bool, half_right().rollout])
def test_a_rule_of_another_kind_is_rejected(rule: Any) -> None:
    if callable(rule) and not isinstance(rule, type):

        async def rule(trajectory: af.Trajectory) -> bool:
            return True

    errors.check(lambda: half_right(success=rule), af.errors.SettingsError, "success must be a finite number")


def test_the_rule_is_part_of_a_run_only_if_it_is_set() -> None:
    def found(**settings: Any) -> dict[str, Any]:
        sampler = RolloutSampler(
            agent(**settings), af.tiny.policy("calculator"), tasks(1), af.TrainConfig(steps=1), WorkerGroup(None)
        )
        return fingerprint(sampler, "start")["agent"]

    assert "success" not in found()
    assert len({repr(found(success=rule)) for rule in (None, 0.5, "exact", long_answer)}) == 4


async def test_rewards_that_vary_without_a_success_name_the_setting() -> None:
    rollout = await half_right().rollout(tasks(4))
    assert rollout.summary()["success"] == 0 and rollout.summary()["reward_max"] == pytest.approx(0.9)
    for text in (repr(rollout), rollout._repr_html_()):
        assert "success 0.000 (rewards reach 0.9, success needs 1: set Agent(success=))" in text
    for other in (
        await half_right(success=0.95).rollout(tasks(4)),  # success is set explicitly
        await half_right().rollout(tasks(1)),  # a single reward does not vary
        await half_right(reward=lambda final: float(final != "no")).rollout(tasks(4)),
    ):
        assert other.success_hint is None and "reward_max" not in other.summary()


async def test_training_warns_once_that_no_chain_can_succeed() -> None:
    @af.reward
    def length(trajectory: af.Trajectory) -> float:
        return len(trajectory.ids) / 1000

    policy = fresh()
    solver = agent(policy, reward=length)
    with pytest.warns(UserWarning, match=r"set Agent\(success=\)") as caught:
        await af.train(solver, policy, tasks(2), af.TrainConfig(steps=6, tasks_per_step=2, group_size=2))
    (found,) = [str(w.message) for w in caught if "Agent(success=)" in str(w.message)]
    assert found.startswith("no chain of the first 5 steps counts as a success: rewards reach 0.")


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "samples", "interval"),
    # Exact binomial intervals. With no or only successes, the closed form is 1 - (alpha / 2) ** (1 / n).
    [(8, 8, (0.025 ** (1 / 8), 1.0)), (0, 2, (0.0, 1 - 0.025**0.5)), (3, 20, (0.0321, 0.3789)), (1, 1, (0.025, 1.0))],
)
def test_an_interval_of_independent_tasks_is_exact(
    successes: int, samples: int, interval: tuple[float, float]
) -> None:
    outcomes = [[i < successes] for i in range(samples)]
    assert success_interval(outcomes) == pytest.approx(interval, abs=1e-4)


def test_more_samples_of_a_task_narrow_the_interval_only_if_they_vary() -> None:
    def width(outcomes: list[list[bool]]) -> float:
        low, high = success_interval(outcomes)
        return high - low

    one = [[i < 10] for i in range(20)]
    assert width([task * 8 for task in one]) == pytest.approx(width(one))
    assert width([[True, False] * 4] * 20) < 0.5 * width(one)
    assert success_interval([[True] * 8]) == pytest.approx((0.025, 1.0))


@pytest.mark.parametrize("p", [0.02, 0.5, 0.98])
@pytest.mark.parametrize(("count", "spread"), [(1, None), (8, None), (8, 2.0), (8, 0.0)])
def test_coverage(p: float, count: int, spread: float | None) -> None:
    """`spread` is the concentration of the tasks' success rates: None for equal rates, 0 for rates of 0 and 1."""
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    covered = []
    for _ in range(150):
        rates = [p] * 25
        if spread is not None:
            rates = [rng.betavariate(p * spread, (1 - p) * spread) if spread else rng.random() < p for _ in rates]
        low, high = success_interval([[rng.random() < rate for _ in range(count)] for rate in rates])
        covered.append(low <= p <= high)
    assert statistics.mean(covered) >= 0.92


def test_the_sign_flip_test_enumerates_all_signs() -> None:
    # McNemar's test for 9 gained and 2 lost tasks: twice the binomial tail.
    assert sign_flip_test([1] * 9 + [-1] * 2 + [0] * 50) == pytest.approx(2 * (1 + 11 + 55) / 2**11)
    differences = [3, -1, 4, 0, 2]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip_test(differences) == pytest.approx(sum(s >= 8 for s in sums) / 32)
    assert sign_flip_test([]) == sign_flip_test([0, 0]) == sign_flip_test([1, -1]) == 1.0
    assert 0 < sign_flip_test([1] * 1200 + [-1] * 800) < 1e-15


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    for samples, successes, k in ((5, 2, 1), (5, 2, 3), (5, 0, 2), (4, 4, 2), (6, 1, 6)):
        subsets = list(itertools.combinations([i < successes for i in range(samples)], k))
        assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
