"""Rollouts, shapes and filters that `collate` and `turn_data` reject."""

import dataclasses
from typing import Any

import errors
import pytest
import torch
from agents import played, scripted, tasks
from test_batch import GOOD, row
from test_trainer import SMALL
from test_turn_data import TWO, turned

import agentfly_kit as af

TEXT = dataclasses.replace(GOOD, turns=(af.Turn("action", "policy", None, text="x"),))


def odd(chain: Any) -> None:
    return None


def yes(trajectory: Any) -> Any:
    return True


async def demonstrations() -> Any:
    return af.collate(await scripted(["5"]).rollout(tasks(1)))


test_errors = errors.rejected(
    (lambda: af.collate([]), af.errors.BatchError, "rollout must hold at least one trajectory"),
    (lambda: af.collate([3]), af.errors.BatchError, "must be a Rollout or Trajectory objects, got int"),
    (
        lambda: af.collate(GOOD.replace(reward=None)),
        af.errors.BatchError,
        "on: unscored (no reward returned a number)",
    ),
    (lambda: af.collate(TEXT), af.errors.BatchError, "its engine returned text only"),
    (lambda: af.collate(GOOD.replace(sampling=af.Sampling(temperature=0))), af.errors.BatchError, "sampled greedily"),
    (
        lambda: af.collate(GOOD.replace(sampling=af.Sampling(top_p=0.9))),
        af.errors.BatchError,
        "allow_truncated_sampling=True",
    ),
    (lambda: af.collate(GOOD, truncated="drop"), af.errors.SettingsError, "truncated must be one of 'score'"),
    (
        lambda: af.collate(GOOD, [1.0, 2.0]),
        af.errors.AlignmentError,
        "advantages must have the shape (1,) (one per trajectory)",
    ),
    (
        demonstrations,
        af.errors.EmptyBatch,
        "actions written by script, not sampled by a policy; to imitate these actions, use collate(",
    ),
    (lambda: af.collate(played(["5"]).rollout(tasks(1))), (af.errors.BatchError, AttributeError), "await"),
    (
        lambda: af.collate(GOOD).replace(returns=torch.ones(1, 2)),
        af.errors.AlignmentError,
        "the shape (1, 3), got (1, 2)",
    ),
    (lambda: af.collate(row(*TWO), torch.ones(1, 1)), af.errors.AlignmentError, "'g/0' has 2 sampled turns"),
    (lambda: af.collate(row(*TWO), torch.ones(3, 2)), af.errors.AlignmentError, "(3, 2)"),
    (lambda: af.collate(row(*TWO), torch.ones(1, 2), per="row"), af.errors.AlignmentError, "(1, 2)"),
    (lambda: af.turn_data(turned(row(*TWO), _0=2.0)), af.errors.BatchError, "turn 0 has a reward of 2"),
    (lambda: af.collate(GOOD, filters=[odd]), af.errors.SettingsError, "got the parameters ['chain']"),
    (lambda: af.collate(GOOD, filters=[yes]), af.errors.SettingsError, "got True for Trajectory"),
    (
        lambda: SMALL.replace(filters=[odd]),
        af.errors.SettingsError,
        "filters: odd must be a function with the single parameter",
    ),
    (
        lambda: SMALL.replace(filters=af.filters.equal_rewards),
        af.errors.SettingsError,
        "filters must be a list of functions",
    ),
)


def test_an_empty_batch_lists_what_was_dropped() -> None:
    with pytest.raises(af.errors.EmptyBatch, match="none of 1 trajectories can be trained on: overlong") as caught:
        af.collate(GOOD, filters=[af.filters.overlong(1)])
    assert isinstance(caught.value, af.errors.BatchError)
    assert len(caught.value.dropped) == 1
