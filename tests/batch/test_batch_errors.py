"""Rollouts, shapes and filters that `collate` and `turn_data` reject."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import errors
import pytest
import torch
from agents import played, scripted, tasks
from test_batch import GOOD, row
from test_trainer import SMALL
from test_turn_data import TWO, turned

from agentfly_kit import filters
from agentfly_kit.batch.collate import collate
from agentfly_kit.batch.turn_data import turn_data
from agentfly_kit.errors import AlignmentError, BatchError, EmptyBatch, SettingsError
from agentfly_kit.types import Sampling, Turn

TEXT = dataclasses.replace(GOOD, turns=(Turn("action", "policy", None, text="x"),))


def odd(chain: Any) -> None:
    return None


def yes(trajectory: Any) -> Any:
    return True


async def demonstrations() -> Any:
    return collate(await scripted(["5"]).rollout(tasks(1)))


@errors.table(
    (lambda: collate([]), BatchError, "rollout must hold at least one trajectory"),
    (lambda: collate([3]), BatchError, "must be a Rollout or Trajectory objects, got int"),
    (lambda: collate(GOOD.replace(reward=None)), BatchError, "on: unscored (no reward returned a number)"),
    (lambda: collate(GOOD.replace(reward=math.inf)), BatchError, "got inf"),
    (lambda: collate(GOOD.replace(reward=math.nan)), BatchError, "reward of trajectory 'g/0' must be finite"),
    (lambda: collate(TEXT), BatchError, "its engine returned text only"),
    (lambda: collate(GOOD.replace(sampling=Sampling(temperature=0))), BatchError, "sampled greedily"),
    (lambda: collate(GOOD.replace(sampling=Sampling(top_p=0.9))), BatchError, "allow_truncated_sampling=True"),
    (lambda: collate(GOOD, truncated="drop"), SettingsError, "truncated must be one of 'score'"),
    (lambda: collate(GOOD, [1.0, 2.0]), AlignmentError, "advantages must have the shape (1,) (one per trajectory)"),
    (lambda: collate(row(("action", 2))), AlignmentError, "follow another token"),
    (demonstrations, EmptyBatch, "actions written by script, not sampled by a policy; to imitate them, use collate("),
    (lambda: collate(played(["5"]).rollout(tasks(1))), (BatchError, AttributeError), "await"),
    (lambda: collate(GOOD).replace(returns=torch.ones(1, 2)), AlignmentError, "the shape (1, 3), got (1, 2)"),
    (lambda: collate(row(*TWO), torch.ones(1, 1)), AlignmentError, "'g/0' has 2 sampled turns"),
    (lambda: collate(row(*TWO), torch.ones(3, 2)), AlignmentError, "(3, 2)"),
    (lambda: collate(row(*TWO), torch.ones(1, 2), per="row"), AlignmentError, "(1, 2)"),
    (lambda: turn_data(row(*TWO), rewards=[1.0, 2.0]), AlignmentError, "2 for 1 trajectories"),
    (lambda: turn_data(turned(row(*TWO), _0=2.0)), BatchError, "turn 0 has a reward of 2"),
    (lambda: collate(GOOD, filters=[odd]), SettingsError, "its parameters are ['chain']"),
    (lambda: collate(GOOD, filters=[yes]), SettingsError, "got True for Trajectory"),
    (lambda: SMALL.replace(filters=[odd]), SettingsError, "filter odd must be a function with the single parameter"),
    (lambda: SMALL.replace(filters=filters.equal_rewards), SettingsError, "filters must be a list of functions"),
    (lambda: filters.overlong(0), SettingsError, "tokens must be at least 1"),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)


def test_an_empty_batch_lists_what_was_dropped() -> None:
    with pytest.raises(EmptyBatch, match="none of 1 trajectories can be trained on: overlong") as caught:
        collate(GOOD, filters=[filters.overlong(1)])
    assert isinstance(caught.value, BatchError)
    assert len(caught.value.dropped) == 1
