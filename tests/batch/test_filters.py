"""Filters: excluded trajectories count in no mean and are recorded with their reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agents import call, played, tasks
from test_trainer import SMALL

from agentfly_kit import advantages, filters
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.batch.collate import collate
from agentfly_kit.errors import BatchError, EmptyBatch, SettingsError, ToolError
from agentfly_kit.tools.tool import tool


async def rolled(rewards: list[list[float | None]]) -> Rollout:
    """Chains with these rewards, a group a list; the third of each is cut by a limit."""
    a = played(lambda task, turn: "1 2 3", max_turns=2)
    rollout = await a.rollout(tasks(len(rewards)), len(rewards[0]))
    given = []
    for group, wanted in zip(rollout.groups, rewards, strict=True):
        for t, r in zip(group, wanted, strict=True):
            stop = "max_turns" if t.chain == 2 else t.stop
            given.append(t.replace(reward=r, stop=stop, error=None))
    return Rollout.from_trajectories(given)


async def test_equal_rewards_drops_whole_groups() -> None:
    rollout = await rolled([[0.0, 1.0, 2.0, 5.0], [1.0, 1.0, 1.0, None], [None, None, 3.0, None]])
    batch = collate(rollout, advantages.grpo, filters=[filters.equal_rewards])
    assert [t.id for t in batch.trajectories] == [t.id for t in rollout.groups[0]]
    assert {d.reason for d in batch.dropped if d.filtered} == {"equal rewards"}
    assert sum(d.filtered for d in batch.dropped) == 4
    assert batch.num_given == 12
    assert batch.flagged[0] == pytest.approx(4 / 12), "filtered is not unscored"
    whole = collate(rollout, advantages.grpo)
    assert torch.equal(batch.advantages[batch.mask], whole.advantages[:4][whole.mask[:4]])


async def test_filtered_chains_count_in_no_mean() -> None:
    rollout = await rolled([[0.0, 1.0, 100.0, 2.0]])
    batch = collate(rollout, advantages.dr_grpo, filters=[filters.overlong()])
    assert batch.advantages[:, -1].nan_to_num().shape == (3,)
    first = [float(a[m][0]) for a, m in zip(batch.advantages, batch.mask, strict=True)]
    assert first == [-1.0, 0.0, 1.0]
    kept = collate(rollout, advantages.dr_grpo, truncated="mask")  # the other way: only its tokens leave
    assert [float(a[m][0]) for a, m in zip(kept.advantages, kept.mask, strict=True)] == [-25.75, -24.75, -23.75]
    # A tensor of advantages still has a number for each that was given.
    again = collate(rollout, torch.arange(4.0), filters=[filters.overlong()])
    assert [float(a[m][0]) for a, m in zip(again.advantages, again.mask, strict=True)] == [0.0, 1.0, 3.0]


async def test_overlong_by_tokens_and_tool_errors() -> None:
    @tool
    def breaks(expression: str) -> str:
        """Break on 0.

        Args:
            expression: a text.
        """
        if expression == "0":
            raise ToolError("no")
        return expression

    script = {0: ["0", "1", "2"], 1: ["1", "1", "1"]}

    def said(task: Any, turn: int) -> str:
        expressions = script[order[task.id]]
        return call(expressions[turn], "breaks") if turn < 3 else "done"

    wanted = tasks(2)
    order = {t.id: i for i, t in enumerate(wanted)}
    rollout = await played(said, tools=[breaks], max_turns=4).rollout(wanted)
    one, two = rollout.trajectories
    assert filters.drop_reasons(rollout, [filters.tool_errors()]) == {one.id: "tool errors"}
    assert filters.drop_reasons(rollout, [filters.tool_errors(0.5)]) == {}
    tokens = int(two.action_mask.sum())
    assert filters.drop_reasons(rollout, [filters.overlong(tokens)]) == {}
    assert set(filters.drop_reasons(rollout, [filters.overlong(tokens - 1)])) == {one.id, two.id}
    # The first filter that says something is the one that is named.
    both = filters.drop_reasons(rollout, [filters.tool_errors(), filters.overlong(1)])
    assert both == {one.id: "tool errors", two.id: "overlong"}


async def test_invalid_filters_are_rejected() -> None:
    rollout = await rolled([[0.0, 1.0]])

    def odd(chain: Any) -> None:
        return None

    def yes(trajectory: Any) -> Any:
        return True

    with pytest.raises(
        SettingsError, match=r"filter odd must be a function of one `group`.*its parameters are \['chain'\]"
    ):
        collate(rollout, filters=[odd])
    with pytest.raises(SettingsError, match=r"filter yes must return a reason.* got True for Trajectory"):
        collate(rollout, filters=[yes])
    with pytest.raises(SettingsError, match="filter odd"):
        SMALL.replace(filters=[odd])
    with pytest.raises(SettingsError, match="give a list of functions"):
        SMALL.replace(filters=filters.equal_rewards)
    with pytest.raises(SettingsError, match="tokens must be at least 1"):
        filters.overlong(0)
    with pytest.raises(SettingsError, match="share must be"):
        filters.tool_errors(1.0)
    with pytest.raises(EmptyBatch, match="none of 2 trajectories can be trained on: overlong") as caught:
        collate(rollout, filters=[filters.overlong(1)])
    assert isinstance(caught.value, BatchError)
    assert len(caught.value.dropped) == 2
