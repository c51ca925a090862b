"""Trajectories from recorded token ids. Two cases use the values of Agent Lightning's own tests."""

from typing import Any

import numpy as np
from agents import agent, tasks

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "?"},))


def recorded(*calls: tuple[list[int], list[int]], **more: Any) -> list[dict[str, Any]]:
    return [{"prompt_ids": prompt, "ids": ids, "logprobs": [-0.5] * len(ids), **more} for prompt, ids in calls]


def test_a_call_whose_prompt_extends_a_row_continues_it() -> None:
    t = af.captured(recorded(([1], [101]), ([1, 101, 201], [301])), task=TASK, reward=1.0)
    assert [row.ids.tolist() for row in t.rows] == [[1, 101, 201, 301]]
    assert t.action_mask.tolist() == [False, True, False, True]
    apart = af.captured(recorded(([1], [2]), ([9], [10])), task=TASK)
    assert [row.ids.tolist() for row in apart.rows] == [[1, 2], [9, 10]]


def test_interleaved_conversations_keep_their_rows() -> None:
    t = af.captured(recorded(([1], [2]), ([5], [6]), ([1, 2, 3], [4]), ([5, 6], [7])), task=TASK)
    assert [row.ids.tolist() for row in t.rows] == [[1, 2, 3, 4], [5, 6, 7]]
    assert [row.action_mask.tolist() for row in t.rows] == [[False, True, False, True], [False, True, True]]


async def test_arrays_of_a_rollout_give_the_same_batch() -> None:
    rollout = await agent().rollout(tasks(4), 4)
    again = af.Rollout.from_trajectories(
        af.from_tokens(t.ids, t.action_mask, t.logprobs, task=t.task, group=t.group, chain=t.chain, reward=t.reward)
        for t in rollout
    )
    values = [float(i) for i in range(len(rollout))]
    first, second = (af.collate(list(r), values) for r in (rollout, again))
    for name in ("ids", "mask", "advantages"):
        np.testing.assert_array_equal(np.asarray(getattr(first, name)), np.asarray(getattr(second, name)), name)
