"""Dynamic sampling: further tasks replace groups that a filter removed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_trainer import SMALL, learner, numbers, start

import agentfly_kit as af


def unlucky(group: af.Group) -> str | None:
    """Remove two of three tasks."""
    return "unlucky" if int(group.trajectories[0].task.id.split("-")[-1]) % 3 else None


REFILL = SMALL.replace(steps=2, filters=[unlucky], refill=8)


def kept(rollout: Any) -> list[str]:
    return [g.trajectories[0].task.id for g in rollout.groups if any(t.dropped is None for t in g.trajectories)]


async def test_tasks_are_sampled_until_enough_groups_remain() -> None:
    async for step in start(None, learner(), REFILL):
        tasks = [g.trajectories[0].task.id for g in step.rollout.groups]
        # Each task once per iteration, in a group of its own.
        assert len({t.group for t in step.rollout}) == len(set(tasks)) == len(tasks)
        assert len(kept(step.rollout)) == 3 < len(tasks)
        assert len({t.seed for t in step.rollout}) == len(step.rollout), "no two chains share their seeds"
        assert (step.record["dropped: unlucky"], step.stats.rows) == (4 * (len(tasks) - 3), 4 * 3)


async def test_refills_are_limited() -> None:
    def all_of_them(group: af.Group) -> str | None:
        return "none is good enough"

    with pytest.warns(UserWarning, match=r"step 1: nothing was left to train on \(20 none is good enough\)"):
        run = await start(None, learner(), SMALL.replace(steps=1, tasks_per_step=1, filters=[all_of_them], refill=4))
    assert run.records[0]["updates"] == 0
    few = REFILL.replace(steps=1, tasks_per_step=7)  # twelve tasks, of which four are kept: all are sampled
    async for step in start(None, learner(), few):
        assert (len(step.rollout.groups), len(kept(step.rollout))) == (12, 4)


async def test_refills_depend_only_on_the_iteration(tmp_path: Path) -> None:
    first = await start(tmp_path / "whole", learner(), REFILL)
    stopped = start(tmp_path / "parts", learner(), REFILL)
    async for _ in stopped:
        break
    again = await start(tmp_path / "parts", learner(), REFILL)
    assert (numbers(again), again.policy.fingerprint()) == (numbers(first), first.policy.fingerprint())


async def test_joined_rollouts_keep_the_chains_that_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(None, learner(), REFILL)
    sampler = run._sampler
    sample, purposes = sampler._run_rollout, []

    async def limited(agent: Any, tasks: Any, index: int, purpose: str) -> af.Rollout:
        purposes.append(purpose)
        found = await sample(agent, tasks, index, purpose)
        return dataclasses.replace(found, not_run={f"{purpose}-0:x/0": "group_turns"}, forks_refused=1)

    monkeypatch.setattr(sampler, "_run_rollout", limited)
    rollout = await sampler.sample(0)
    assert len(purposes) > 1
    assert rollout.forks_refused == len(purposes) == len(rollout.not_run)
