"""Conversion of token ids recorded by other programs, such as custom loops, gateways or servers, to trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from agentfly_kit.errors import AlignmentError
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task, Turn, first_image

_CALL_KEYS = {"prompt_ids", "ids", "logprobs", "version", "author"}


def captured(
    calls: Iterable[Mapping[str, Any]],
    *,
    task: Task,
    group: str = "captured",
    chain: int = 0,
    reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Trajectory:
    """Create a trajectory from model calls that another program has recorded.

    A call continues the most recent row of token ids that is a prefix of the call's prompt. If there is none, the call
    starts a new row. The ids between two actions are observations with mask 0. No text is encoded or decoded.

    Args:
        calls: one dict per call, in order, with "prompt_ids" and "ids" (token ids of prompt and action), "logprobs" (in
            nats, one per id of the action), and optionally "version" (of the policy) and "author".
        task: the task.
        group: id of the group. All chains of a task belong to the same group.
        chain: index of the chain in its group.
        reward: the reward, or None if unscored.
        metrics: numbers to record for the chain, such as {"success": 1.0}.

    Raises:
        AlignmentError: if a call has a missing or unknown key, or the lengths of its values do not match.
    """
    rows: list[list[Turn]] = []
    for i, call in enumerate(calls):
        if not {"prompt_ids", "ids", "logprobs"} <= set(call) <= _CALL_KEYS:
            raise AlignmentError(
                f"call {i} must have 'prompt_ids', 'ids' and 'logprobs', and may have 'version' and 'author', "
                f"got {', '.join(sorted(call))}"
            )
        prompt = tuple(map(int, call["prompt_ids"]))
        action = _action(
            call["ids"], call["logprobs"], int(call.get("version", 0)), str(call.get("author", "policy"))
        )
        for row in reversed(rows):
            known = tuple(token for turn in row for token in turn.ids or ())
            if prompt[: len(known)] == known:
                if len(prompt) > len(known):
                    row.append(Turn(kind="observation", author="tool", ids=prompt[len(known) :]))
                row.append(action)
                break
        else:
            rows.append([Turn(kind="prompt", author="task", ids=prompt), action])
    return _trajectory(rows, task, group, chain, reward, metrics)


def from_tokens(
    ids: Sequence[int],
    mask: Sequence[bool | int],
    logprobs: Sequence[float],
    *,
    task: Task,
    group: str = "captured",
    chain: int = 0,
    reward: float | None = None,
    metrics: Mapping[str, float] | None = None,
    version: int = 0,
) -> Trajectory:
    """Return a trajectory with one row, from arrays recorded by a custom rollout loop.

    Args:
        ids: token ids of the whole row, shape (T,).
        mask: True at tokens that the policy sampled, shape (T,). The first token must belong to the prompt.
        logprobs: logprobs in nats, shape (T,). Values where the mask is False are ignored.
        task: the task.
        group: id of the group.
        chain: index of the chain in its group.
        reward: the reward, or None if unscored.
        metrics: numbers to record for the chain.
        version: version of the policy that sampled the tokens.

    Raises:
        AlignmentError: if the lengths differ, the first token is sampled, or no token is sampled.
    """
    if not len(ids) == len(mask) == len(logprobs) or mask[0] or not any(mask):
        raise AlignmentError(
            f"mask must have one entry per id ({len(ids)}) and logprob ({len(logprobs)}), begin with False and have at "
            f"least one True, got {len(mask)} entries"
        )
    turns: list[Turn] = []
    position = 0
    for sampled, run in groupby(map(bool, mask)):
        end = position + len(list(run))
        part = [int(i) for i in ids[position:end]]
        if sampled:
            turns.append(_action(part, logprobs[position:end], version, "policy"))
        else:
            kind: Any = "observation" if turns else "prompt"
            turns.append(Turn(kind=kind, author="tool" if turns else "task", ids=tuple(part)))
        position = end
    return _trajectory([turns], task, group, chain, reward, metrics)


def _action(ids: Sequence[int], logprobs: Sequence[float], version: int, author: str) -> Turn:
    if len(ids) != len(logprobs):
        raise AlignmentError(f"logprobs must have one entry per id ({len(ids)}), got {len(logprobs)}")
    return Turn(
        kind="action",
        author=author,
        ids=tuple(map(int, ids)),
        sampled=True,
        logprobs=tuple(map(float, logprobs)),
        versions=(version,) * len(ids),
        messages=({"role": "assistant", "content": ""},),
        stop="stop",
    )


def _trajectory(
    rows: Sequence[Sequence[Turn]],
    task: Task,
    group: str,
    chain: int,
    reward: float | None,
    metrics: Mapping[str, float] | None,
) -> Trajectory:
    if first := first_image(task.messages):
        raise AlignmentError(
            f"task {task.id!r}: {first} has an image, but af.captured and af.from_tokens read no images, because ids "
            "do not say where an image is"
        )
    turns: list[Turn] = []
    for index, row in enumerate(rows):
        for turn in row:
            turns.append(dataclasses.replace(turn, row=index, parent=turns[-1] if turns else None))
    return Trajectory(
        f"{group}/{chain}", task, group, chain, tuple(turns), "answered", reward, metrics=dict(metrics or {})
    )
