"""Trajectories to tensors: one alignment for everything, mask 0 on padding, and a reason for each one left out.

Knows no model and no loss. Row i, column t of every (B, T) tensor is token t of `trajectories[i]`, predicted from the
tokens before it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, BatchError, SettingsError
from agentfly_kit.types import UNSCORED, Trajectory


@dataclass(frozen=True)
class Dropped:
    """A trajectory that is in no loss term and no denominator, and why."""

    trajectory: str
    reason: str


@dataclass(frozen=True)
class Packed:
    """Rows laid end to end without padding. `starts` (B + 1,) marks where each begins."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    starts: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of B trajectories padded on the right to T tokens."""

    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """One a row."""
    ids: Tensor
    """(B, T) int64; 0 on padding."""
    attention: Tensor
    """(B, T) bool: which positions hold a token."""
    mask: Tensor
    """(B, T) bool: which tokens this policy sampled."""
    logprobs: Tensor
    """(B, T) float32: the engine's, in nats; NaN where the mask is 0."""
    entropies: Tensor
    """(B, T) float32: the engine's, at the sampling temperature; NaN where the mask is 0 or the engine gave none."""
    advantages: Tensor
    """(B, T) float32; NaN where the mask is 0."""
    token_rewards: Tensor
    """(B, T) float32: each reward on the last action token that it is for; NaN where the mask is 0."""
    rewards: Tensor
    """(B,) float32"""
    groups: Tensor
    """(B,) int64: rows of one group share a number."""
    rollouts: Tensor
    """(B,) int64: rows of one chain share a number."""
    temperatures: Tensor
    """(B,) float32"""
    versions: Tensor
    """(B, T) int64; -1 where the mask is 0."""
    lengths: Tensor
    """(B,) int64"""
    truncated: Tensor
    """(B,) bool: cut by a limit."""
    returns: Tensor | None = None
    """(B, T), for a value loss."""
    values: Tensor | None = None
    """(B, T), from before the update."""
    kept_mass: Tensor | None = None
    """(B, T): the probability that top-p, top-k or min-p kept; NaN where the mask is 0. None where nothing was cut."""
    ref_logprobs: Tensor | None = None
    """(B, T): a frozen policy's, so that a KL in the reward and one in the loss need one forward."""
    dropped: tuple[Dropped, ...] = ()
    asked: int = 0
    """Trajectories that were given, dropped ones included."""
    flagged: tuple[float, float] = (0.0, 0.0)
    """Shares of the given trajectories that were unscored, and truncated."""

    def __len__(self) -> int:
        return len(self.trajectories)

    def replace(self, **changes: Any) -> Batch:
        """The same rows with other tensors; (B, T) ones are checked for their shape."""
        for name, value in changes.items():
            if name in _PER_TOKEN and value is not None:
                if tuple(value.shape) != tuple(self.ids.shape):
                    raise AlignmentError(
                        f"{name} has the shape {tuple(value.shape)}, and the batch is {tuple(self.ids.shape)}"
                    )
                changes[name] = torch.where(self.mask, value.float(), torch.nan)
        return replace(self, **changes)

    def packed(self) -> Packed:
        """Rows end to end, in order: N = lengths.sum() tokens."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        positions = torch.arange(self.ids.shape[1])[None].expand_as(self.ids)
        return Packed(self.ids[self.attention], self.mask[self.attention], positions[self.attention], starts)

    def __repr__(self) -> str:
        left = f", {len(self.dropped)} left out" if self.dropped else ""
        return f"Batch({len(self)} rows, {self.ids.shape[1]} wide, {int(self.mask.sum())} action tokens{left})"

    def _repr_html_(self) -> str:
        reasons: dict[str, int] = {}
        for item in self.dropped:
            reasons[item.reason] = reasons.get(item.reason, 0) + 1
        rows = {
            "rows": len(self),
            "width": self.ids.shape[1],
            "tokens": int(self.lengths.sum()),
            "action tokens": int(self.mask.sum()),
            "mean reward": f"{float(self.rewards.mean()):.3f}",
        } | {f"left out: {reason}": count for reason, count in reasons.items()}
        cells = "".join(f"<tr><td>{k}</td><td style='text-align:right'>{v}</td></tr>" for k, v in rows.items())
        return f"<table><tbody>{cells}</tbody></table>"


_PER_TOKEN = ("advantages", "returns", "values", "token_rewards", "kept_mass", "ref_logprobs")
Truncated = Literal["score", "mask", "bootstrap", "penalty"]
Advantages = Callable[..., Tensor] | Tensor | Sequence[float] | None


def collate(
    rollout: Any,
    advantages: Advantages = None,
    *,
    truncated: Truncated = "score",
    penalty: float = 0.5,
    allow_truncated_sampling: bool = False,
) -> Batch:
    """Make a batch of a rollout, or of trajectories.

    advantages: a function (rewards (N,), groups (N,)) -> (N,) such as `advantages.grpo`, called on all N trajectories
        with NaN for the unscored; or a tensor (N,), or (B, T) on the rows that are kept; or None: all NaN, for later.
    truncated: "score" trains on chains that a limit cut; "mask" leaves their rows out, after the advantages were taken;
        "penalty" takes `penalty` from their reward first; "bootstrap" is "score" for an estimator that is then told the
        value of the state in which they were cut: `advantages.gae(bootstrap=)`, see `Policy.end_values`.
    allow_truncated_sampling: rows sampled under top-p, top-k or min-p are refused, because the ratio of the update
        would be wrong by the kept mass; True keeps that mass, for `ppo_step(correction=)`.
    Raises:  BatchError if no row is left, if an engine gave text only, or if rows cannot be trained as sampled.
    """
    given = _trajectories(rollout)
    if truncated not in get_args(Truncated):
        raise SettingsError(f"truncated={truncated!r}: give one of {', '.join(map(repr, get_args(Truncated)))}")
    if not given:
        raise BatchError("collate was given no trajectory; roll some tasks out first")
    if truncated == "penalty":
        given = [t.replace(reward=t.reward - penalty) if t.truncated and t.reward is not None else t for t in given]
    rows: list[Trajectory] = []
    dropped: list[Dropped] = []
    index: list[int] = []
    for i, trajectory in enumerate(given):
        reason = _unfit(trajectory, truncated, allow_truncated_sampling)
        if reason is None:
            rows.append(trajectory)
            index.append(i)
        else:
            dropped.append(Dropped(trajectory.id, reason))
    if not rows:
        reasons = sorted({d.reason for d in dropped})
        raise BatchError(f"none of {len(given)} trajectories can be trained on: {'; '.join(reasons)}")

    names: dict[str, int] = {}
    group_of = [names.setdefault(t.group, len(names)) for t in given]
    lengths = torch.tensor([len(t.ids) for t in rows])
    shape = (len(rows), int(lengths.max()))
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.full(shape, torch.nan)
    entropies = torch.full(shape, torch.nan)
    versions = torch.full(shape, -1, dtype=torch.int64)
    token_rewards = torch.full(shape, torch.nan)
    for i, t in enumerate(rows):
        n = len(t.ids)
        ids[i, :n] = torch.tensor(t.ids)
        mask[i, :n] = torch.tensor(t.action_mask)
        logprobs[i, :n] = torch.tensor(t.logprobs)
        entropies[i, :n] = torch.tensor(t.entropies)
        versions[i, :n] = torch.tensor(t.versions)
        token_rewards[i, :n] = _token_rewards(t)
    if bool(torch.isnan(logprobs[mask]).any()) or bool(mask[:, 0].any()):
        raise AlignmentError("a sampled token has no logprob, or stands at position 0; the record is damaged")
    batch = Batch(
        trajectories=tuple(rows),
        ids=ids,
        attention=torch.arange(shape[1])[None] < lengths[:, None],
        mask=mask,
        logprobs=logprobs,
        entropies=entropies,
        advantages=torch.full(shape, torch.nan),
        token_rewards=token_rewards,
        rewards=torch.tensor([float(t.reward) for t in rows if t.reward is not None]),
        groups=torch.tensor([group_of[i] for i in index]),
        rollouts=torch.arange(len(rows)),
        temperatures=torch.tensor([t.sampling.temperature for t in rows]),
        versions=versions,
        lengths=lengths,
        truncated=torch.tensor([t.truncated for t in rows]),
        kept_mass=_kept_mass(rows, mask),
        dropped=tuple(dropped),
        asked=len(given),
        flagged=(sum(t.reward is None for t in given) / len(given), sum(t.truncated for t in given) / len(given)),
    )
    if advantages is None:
        return batch
    return batch.replace(advantages=_spread(batch, advantages, given, group_of, index))


def _trajectories(rollout: Any) -> list[Trajectory]:
    found: Iterable[Any] = getattr(rollout, "trajectories", rollout)
    if isinstance(found, Trajectory):
        found = [found]
    if inspect.isawaitable(found):
        raise BatchError("collate was given something that has not run; await the rollout first")
    out = list(found)
    for item in out:
        if not isinstance(item, Trajectory):
            raise BatchError(f"collate takes a Rollout or trajectories, and got a {type(item).__name__}")
    return out


def _unfit(t: Trajectory, truncated: str, allow_truncated_sampling: bool) -> str | None:
    """Why a trajectory leaves the batch, or None. What would make the whole batch wrong raises instead."""
    if not t.exact:
        raise BatchError(
            f"trajectory {t.id!r} has no token ids: its engine gives text only, and cannot be trained from"
        )
    if t.reward is None:
        ended = t.stop if t.stop in UNSCORED else "no reward said a number"
        return f"unscored ({t.error.where if t.error else ended})"
    if not math.isfinite(t.reward):
        raise BatchError(f"trajectory {t.id!r} has the reward {t.reward}; give a finite number, or None for unscored")
    if not bool(t.action_mask.any()):
        return "no token was sampled by a policy"
    by_hand = not t.sampling.truncates and any(turn.sampled and turn.kept_mass is not None for turn in t.turns)
    if t.sampling.greedy or by_hand:
        raise BatchError(
            f"trajectory {t.id!r} was sampled greedily (temperature 0): its tokens have no probability to learn from; "
            "roll out with temperature > 0 for training"
        )
    if t.sampling.truncates and not allow_truncated_sampling:
        raise BatchError(
            f"trajectory {t.id!r} was sampled under top-p, top-k or min-p ({t.sampling}): the update's ratio would be "
            "wrong by the kept mass; sample from the whole distribution, or correct it and pass "
            "allow_truncated_sampling=True"
        )
    return "truncated" if truncated == "mask" and t.truncated else None


def _token_rewards(t: Trajectory) -> Tensor:
    """(T,): the trajectory's reward on its last action token, each turn's reward on the last one before its end."""
    mask = torch.tensor(t.action_mask)
    out = torch.where(mask, 0.0, torch.nan)
    positions = mask.nonzero()[:, 0]
    turn_of = torch.tensor(t.turn_index)
    for i, turn in enumerate(t.turns):
        if turn.reward is None:
            continue
        before = positions[turn_of[positions] <= i]
        if len(before) == 0:
            raise BatchError(
                f"trajectory {t.id!r}: turn {i} has a reward of {turn.reward:g} and no sampled token comes before its "
                "end, so nothing can be credited with it"
            )
        out[before[-1]] += turn.reward
    assert t.reward is not None
    out[positions[-1]] += t.reward
    return out


def _kept_mass(rows: list[Trajectory], mask: Tensor) -> Tensor | None:
    if not any(t.sampling.truncates for t in rows):
        return None
    out = torch.full(mask.shape, torch.nan)
    for i, t in enumerate(rows):
        mass: list[float] = []
        for turn in t.turns:
            n = len(turn.ids or ())
            if turn.sampled and t.sampling.truncates and turn.kept_mass is None:
                raise BatchError(
                    f"trajectory {t.id!r} was sampled under top-p, top-k or min-p, and its engine did not record what "
                    "mass was kept, so nothing can correct for it; sample from the whole distribution"
                )
            mass.extend(turn.kept_mass if turn.kept_mass is not None else [1.0] * n)
        out[i, : len(mass)] = torch.tensor(mass)
    return torch.where(mask, out, torch.nan)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of several, in order: their groups and rollouts stay apart, their rows are padded to one width.

    Values, returns, kept mass and reference logprobs are kept if every one has them.
    Raises:  BatchError if there is none.
    """
    if not batches:
        raise BatchError("join was given no batch")
    width = max(b.ids.shape[1] for b in batches)
    out: dict[str, Any] = {}
    for name, fill in _FILL.items():
        parts = [getattr(b, name) for b in batches]
        if all(p is not None for p in parts):
            parts = [
                p if p.ndim == 1 else torch.cat([p, p.new_full((len(p), width - p.shape[1]), fill)], 1) for p in parts
            ]
            out[name] = torch.cat(parts)
        else:
            out[name] = None
    for name in ("groups", "rollouts"):
        start, parts = 0, []
        for b in batches:
            part = getattr(b, name)
            parts.append(part + start)
            start += int(part.max()) + 1
        out[name] = torch.cat(parts)
    asked = sum(b.asked for b in batches)
    return Batch(
        trajectories=tuple(t for b in batches for t in b.trajectories),
        **out,
        dropped=tuple(d for b in batches for d in b.dropped),
        asked=asked,
        flagged=(
            sum(b.flagged[0] * b.asked for b in batches) / max(asked, 1),
            sum(b.flagged[1] * b.asked for b in batches) / max(asked, 1),
        ),
    )


# What stands on the padding of each tensor.
_FILL: dict[str, Any] = dict.fromkeys(
    ("ids", "attention", "mask", "rewards", "temperatures", "lengths", "truncated"), 0
)
_FILL |= {"versions": -1} | dict.fromkeys(("logprobs", "entropies", "values", "returns", *_PER_TOKEN), math.nan)


def _spread(batch: Batch, advantages: Any, given: list[Trajectory], group_of: list[int], index: list[int]) -> Tensor:
    if callable(advantages):
        rewards = torch.tensor([math.nan if t.reward is None else float(t.reward) for t in given])
        advantages = advantages(rewards, torch.tensor(group_of))
    values = torch.as_tensor(advantages, dtype=torch.float32)
    if tuple(values.shape) == tuple(batch.ids.shape):
        return values
    if tuple(values.shape) != (len(given),):
        raise AlignmentError(
            f"advantages have the shape {tuple(values.shape)}; give one a trajectory ({len(given)},), or one a token "
            f"{tuple(batch.ids.shape)} on the rows that are kept"
        )
    return values[index, None].expand(batch.ids.shape).clone()
