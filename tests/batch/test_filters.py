"""Filters: excluded trajectories count in no mean and are recorded with their reason."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import call, played, tasks
from test_trainer import SMALL, TASKS, learner, small

import agentfly_kit as af


async def rolled(rewards: list[list[float | None]]) -> af.Rollout:
    """Return chains with these rewards, one list per group; the third of each group is truncated."""
    rollout = await played(lambda task, turn: "1 2 3", max_turns=2).rollout(tasks(len(rewards)), len(rewards[0]))
    given = []
    for group, wanted in zip(rollout.groups, rewards, strict=True):
        for t, r in zip(group, wanted, strict=True):
            given.append(t.replace(reward=r, stop="max_turns" if t.chain == 2 else t.stop, error=None))
    return af.Rollout.from_trajectories(given)


async def test_equal_rewards_drops_whole_groups() -> None:
    rollout = await rolled([[0.0, 1.0, 2.0, 5.0], [1.0, 1.0, 1.0, None], [None, None, 3.0, None]])
    batch = af.collate(rollout, af.advantages.grpo, filters=[af.filters.equal_rewards])
    assert [t.id for t in batch.trajectories] == [t.id for t in rollout.groups[0]]
    assert {d.reason for d in batch.dropped if d.filtered} == {"equal rewards"}
    assert sum(d.filtered for d in batch.dropped) == 4
    whole = af.collate(rollout, af.advantages.grpo)
    assert torch.equal(batch.advantages[batch.mask], whole.advantages[:4][whole.mask[:4]])


async def test_filtered_chains_count_in_no_mean() -> None:
    rollout = await rolled([[0.0, 1.0, 100.0, 2.0]])
    batch = af.collate(rollout, af.advantages.dr_grpo, filters=[af.filters.overlong()])
    assert batch.advantages[:, -1].nan_to_num().shape == (3,)
    assert [float(a[m][0]) for a, m in zip(batch.advantages, batch.mask, strict=True)] == [-1.0, 0.0, 1.0]
    kept = af.collate(
        rollout, af.advantages.dr_grpo, truncated="mask"
    )  # the reward counts in the mean, the tokens are not trained
    assert [float(a[m][0]) for a, m in zip(kept.advantages, kept.mask, strict=True)] == [-25.75, -24.75, -23.75]
    # A tensor of advantages has one entry per given trajectory, also for filtered ones.
    again = af.collate(rollout, torch.arange(4.0), filters=[af.filters.overlong()])
    assert [float(a[m][0]) for a, m in zip(again.advantages, again.mask, strict=True)] == [0.0, 1.0, 3.0]


def tool_errors(trajectory: af.Trajectory) -> str | None:
    return "tool errors" if any(c.result and not c.result.ok for c in trajectory.tool_calls) else None


async def test_overlong_by_tokens_and_a_filter_of_ones_own() -> None:
    @af.tool(describe="optional")
    def breaks(expression: str) -> str:
        if expression == "0":
            raise af.ToolError("no")
        return expression

    expressions = {0: ["0", "1", "2"], 1: ["1", "1", "1"]}

    def script(task: Any, turn: int) -> str:
        return call(expressions[order[task.id]][turn], "breaks") if turn < 3 else "done"

    wanted = tasks(2)
    order = {t.id: i for i, t in enumerate(wanted)}
    rollout = await played(script, tools=[breaks], max_turns=4).rollout(wanted)
    one, two = rollout.trajectories
    assert af.filters.drop_reasons(rollout, [tool_errors]) == {one.id: "tool errors"}
    tokens = int(two.action_mask.sum())
    assert af.filters.drop_reasons(rollout, [af.filters.overlong(tokens)]) == {}
    assert set(af.filters.drop_reasons(rollout, [af.filters.overlong(tokens - 1)])) == {one.id, two.id}
    # The reason is that of the first filter that returns one.
    both = af.filters.drop_reasons(rollout, [tool_errors, af.filters.overlong(1)])
    assert both == {one.id: "tool errors", two.id: "overlong"}


# --- in training ---------------------------------------------------------------------------------


def short(trajectory: af.Trajectory) -> str | None:
    return "too short" if int(trajectory.action_mask.sum()) < 6 else None


async def test_a_run_records_the_reasons_of_dropped_chains(tmp_path: Path) -> None:
    @af.reward
    def even(trajectory: Any, final: str | None) -> float | None:
        return None if trajectory.chain == 3 and trajectory.task.id == TASKS[0].id else float(trajectory.chain % 2)

    policy = learner()
    config = SMALL.replace(steps=4, filters=[short, af.filters.equal_rewards], save_rollouts=True)
    run = af.train(small(policy, reward=even), policy, TASKS, config, run=tmp_path / "run")
    with pytest.warns(UserWarning, match="unscored|nothing was left") as warned:
        steps = [step async for step in run]
    assert all("unscored" in str(w.message) or "nothing was left" in str(w.message) for w in warned)
    assert "too short" in {reason for step in steps for t in step.rollout or () if (reason := t.dropped)}
    for step in steps:
        frame = step.rollout.to_frame()
        counts = frame["dropped"].value_counts().to_dict()
        assert step.record["dropped"] == sum(counts.values())
        assert {k[9:]: v for k, v in step.record.items() if k.startswith("dropped: ")} == counts
        if step.stats is not None:
            assert step.stats.dropped == counts
            assert step.stats.rows == len(step.rollout) - sum(counts.values())
        assert af.Run(tmp_path / "run").rollout(step.step) == step.rollout
        assert set(frame[frame["reward"].isna()]["dropped"]) <= {"unscored (no reward returned a number)"}


async def test_a_step_without_rows_makes_no_update_and_the_run_continues() -> None:
    @af.reward
    def same(final: str | None) -> float:
        return 1.0

    policy = learner()
    before = policy.fingerprint()
    run = af.train(
        small(policy, reward=same), policy, TASKS, SMALL.replace(steps=2, filters=[af.filters.equal_rewards])
    )
    with pytest.warns(UserWarning, match=r"step [12]: nothing was left to train on \(12 equal rewards\); no update"):
        steps = [step async for step in run]
    assert [s.stats for s in steps] == [None, None]
    assert [s.record["updates"] for s in steps] == [0, 0]
    assert [s.record["dropped: equal rewards"] for s in steps] == [12, 12]
    assert policy.fingerprint() == before
    assert not any(math.isnan(v) for s in steps for v in s.record.values())


async def test_filtered_rows_are_in_no_denominator() -> None:
    """A step with filtered rows equals a step on a rollout without them."""
    policy = learner()
    rollout = await small(policy).rollout(TASKS[:4], 4)
    kept = af.Rollout.from_trajectories(t for t in rollout if short(t) is None)
    assert 0 < len(kept) < len(rollout)
    results = []
    for batch in (af.collate(rollout, af.advantages.grpo, filters=[short]), af.collate(kept, af.advantages.grpo)):
        twin = policy.copy()
        stats = af.ppo_step(twin, af.adamw(twin), batch, af.PPOConfig(minibatch=4))
        results.append((twin.fingerprint(), stats.loss))
    assert results[0] == results[1]
