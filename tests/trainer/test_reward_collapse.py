"""A run warns once if its mean reward stays below half of its best."""

import warnings
from pathlib import Path
from typing import Any

import agents
import pytest

import agentfly_kit as af
from agentfly_kit.trainer.step import detect_collapse


def records(rewards: list[float | None], std: float = 0.1) -> list[dict[str, float]]:
    return [{"step": i} | ({} if r is None else {"reward": r, "reward_std": std}) for i, r in enumerate(rewards, 1)]


def reports(recorded: list[dict[str, float]], groups: int = 16) -> dict[int, str]:
    """Return the reports by step."""
    found = {end: detect_collapse(recorded[:end], groups) for end in range(1, len(recorded) + 1)}
    return {step: text for step, text in found.items() if text is not None}


def test_the_third_low_step_is_reported_and_no_later_one() -> None:
    text = "the mean reward stayed below half of its best value for 3 steps: 0.2, from 0.9 at step 2"
    assert reports(records([0.8, 0.9, 0.3, 0.1, 0.2, 0.1, 0.9, 0.1, 0.1, 0.1])) == {5: text}
    assert reports(records([0.9, 0.1, 0.1, 0.6, 0.1, 0.1])) == {}, "3 consecutive steps"
    assert list(reports(records([0.9, 0.1, None, 0.1, 0.1]))) == [5], "a step without a scored trajectory is skipped"


@pytest.mark.parametrize(
    "rewards",
    [
        [-0.1, -0.9, -0.9, -0.9, -5.0],
        [0.0] * 9,
        [0.04, 0.0, 0.0, 0.0, 0.0],  # less than two standard errors, 0.05
        [0.03, -0.3, -0.3, -0.3, -0.3],
        [1.0] * 9,
        [0.1, 0.3, 0.5, 0.9],
    ],
)
def test_negative_rewards_rewards_near_zero_and_learning_are_not_reported(rewards: list[float | None]) -> None:
    assert reports(records(rewards)) == {}


def test_a_step_without_an_update_can_be_low_and_is_never_the_best() -> None:
    flat = [{"step": i, "reward": r} for i, r in enumerate([0.9, 0.0, 0.0, 0.0], 1)]
    assert reports(flat) == {}
    assert list(reports([*records([0.9]), *flat[1:]])) == [4]


async def train(lr: float, run: Path, steps: int) -> Any:
    policy = agents.shipped().copy()
    config = af.TrainConfig(steps=4, lr=lr, lr_end=None, max_kl=None)
    agent = agents.agent(policy, sampling=af.Sampling(max_tokens=32), max_turns=2)
    handle = af.train(agent, policy, af.load_tasks("calculator").train, config, run=run)
    async for step in handle:
        if step.step == steps:
            break
    return handle


async def test_a_collapse_is_reported_also_after_a_resume(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await train(1e-2, tmp_path, 3)
    with pytest.warns(UserWarning, match="the mean reward stayed") as caught:
        handle = await train(1e-2, tmp_path, 4)
    (warning,) = [str(w.message) for w in caught if "the mean reward" in str(w.message)]
    assert warning.startswith("step 4: the mean reward stayed below half of its best value for 3 steps: 0")
    assert " from 0." in warning and " at step 1. Try a smaller lr than 0.01 or a lower max_kl (now None)" in warning
    assert handle.records[-1]["reward"] < 0.1
