"""A run whose reward falls says so, with what was seen and what to try; one that learns, or has bad luck, does not."""

from __future__ import annotations

import math
import warnings
from typing import Any

import agents
import dice
import numpy as np
import pytest

import agentfly_kit as af
from agentfly_kit.trainer import reward_collapse
from agentfly_kit.trainer.reward_collapse import Fall
from agentfly_kit.types import Group, Trajectory, Turn

TASK = af.Task("t", ({"role": "user", "content": "?"},))
PROMPT = (Turn("prompt", "task", (1,), text="?"),)


def rollout(*rewards: float | None) -> af.Rollout:
    """A group of one for each."""
    return af.Rollout(
        tuple(
            Group(f"g{i}", (Trajectory(f"g{i}/0", TASK, f"g{i}", 0, PROMPT, "answered", reward=r),))
            for i, r in enumerate(rewards)
        ),
        1.0,
    )


def said(steps: list[list[float]], moved: float = math.nan) -> list[tuple[int, str]]:
    watch = Fall()
    found = [(i, watch.look(i, rollout(*rewards), moved)) for i, rewards in enumerate(steps, 1)]
    return [(i, text) for i, text in found if text is not None]


async def train(lr: float, group_size: int) -> Any:
    policy = agents.shipped().copy()
    agent = agents.agent(policy)
    config = af.TrainConfig(steps=2, group_size=group_size, lr=lr, lr_end=None, max_kl=None)
    return await af.train(agent, policy, af.load_tasks("calculator").train, config)


async def test_a_rate_that_is_far_too_high_is_told_once_and_the_usual_one_never() -> None:
    with pytest.warns(UserWarning, match="the mean reward has fallen") as told:
        run = await train(1e-2, 8)
    (warning,) = [str(w.message) for w in told if "has fallen" in str(w.message)]
    assert warning.startswith("step 2: the mean reward has fallen to 0") and " at step 2, from 0." in warning
    assert "Step 1 moved the policy by" in warning
    assert "Try a smaller lr than 0.01, target_kl=0.05" in warning
    assert run.records[-1]["reward"] < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = await train(3e-4, 4)
    assert run.records[-1]["reward"] > 0.5


def test_only_what_luck_cannot_do_is_a_fall() -> None:
    rng = np.random.default_rng(dice.seed())
    for groups in (1, 2, 4, 16):
        for _ in range(40):  # hard and easy tasks, few in between; as good as ever
            share = rng.uniform(0.1, 0.9)
            assert not said([list((rng.random(groups) < share).astype(float)) for _ in range(24)]), groups
            better = np.linspace(0.05, 0.95, 24)
            assert not said([list(rng.beta(4 * p, 4 * (1 - p), groups)) for p in better]), groups
    assert not said([[0.0] * 16] * 9), "what never earned anything has not fallen"
    assert not said([[1.0] * 16] * 9)
    assert not said([[0.0] * 15 + [1.0], *[[0.0] * 16] * 9]), "one lucky chain among 16"


def test_what_is_said_and_when() -> None:
    good, bad = [1.0] * 14 + [0.0] * 2, [0.0] * 16
    (first,) = said([good, good, bad, bad, bad], 2.5)
    assert first == (
        3,
        "the mean reward has fallen to 0 at step 3, from 0.875 at step 2; no chain earns more than another, so nothing "
        "is learned any more. Step 2 moved the policy by 2.5 nats a token",
    )
    again = said([good, bad, good, good, [0.0] * 15 + [1.0]])
    assert [i for i, _ in again] == [2, 5], "recovered, and fallen anew"
    assert "no chain earns" not in again[1][1]
    assert "nats" not in again[1][1]
    # Few groups that earned anything: one step without is luck, several are none.
    ((step, text),) = said([[1.0] * 9 + [0.0] * 7, *[bad] * 9])
    assert step == 3 and "fallen to 0 at steps 2 to 3, from 0.562 at step 1" in text
    # Rewards may lie anywhere, and steps may be small: then some stand together.
    ((step, text),) = said([[-1.0, -2.0]] * 8 + [[-3.0, -3.0]] * 12)
    assert step == 16 and "fallen to -3 at steps 9 to 16, from -1.5 at steps 1 to 8" in text


def test_a_step_that_is_made_again_and_chains_without_a_reward() -> None:
    watch = Fall()
    assert watch.look(1, rollout(*[1.0] * 16), 0.1) is None
    assert watch.look(2, rollout(*[None] * 16), 0.1) is None
    assert watch.look(3, rollout(*[0.0] * 16), 0.1) is not None
    assert watch.look(2, rollout(*[1.0] * 15, None), 0.1) is None
    assert [step for step, _ in watch._steps] == [1, 2]


def test_ranks() -> None:
    high, low = np.arange(16.0) + 100, np.arange(16.0)
    assert reward_collapse._ranks(high, low) == pytest.approx(128 / math.sqrt(16 * 16 * 33 / 12))
    assert reward_collapse._ranks(low, high) == -reward_collapse._ranks(high, low)
    assert reward_collapse._ranks(low, low) == 0 == reward_collapse._ranks(high * 0, low * 0)
    rng = np.random.default_rng(0)  # the standard deviation that ties leave is that of shuffled ranks
    pool = rng.integers(0, 3, 24).astype(float)
    shuffled = [reward_collapse._ranks(p[:10], p[10:]) for p in (rng.permutation(pool) for _ in range(4000))]
    assert np.std(shuffled) == pytest.approx(1, abs=0.05)
