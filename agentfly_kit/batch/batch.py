"""Collation of trajectories into tensors, and the reasons for which trajectories are left out.

A trajectory contributes each of its rows: one, or several if it was compacted or its history was re-rendered. Column t
of row i of every (B, T) tensor refers to token t of `rows[i]`, predicted from the tokens before it. The mask is 0 on
padding.
"""

from __future__ import annotations

import bisect
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentfly_kit import _html
from agentfly_kit.batch.filters import Filter, drop_reasons
from agentfly_kit.batch.turn_data import sampled_turn_indices
from agentfly_kit.errors import AlignmentError, BatchError, EmptyBatch, SettingsError
from agentfly_kit.types import UNSCORED_STOPS, Row, Trajectory


@dataclass(frozen=True)
class Dropped:
    """Record of a trajectory, or one of its rows, that is excluded from every loss term and denominator.

    Attributes:
        trajectory: Id of the trajectory.
        reason: Why it was excluded.
        row: Index of the excluded row; None if all rows are excluded.
        filtered: Whether one of `filters` excluded it, rather than being unusable for training.
    """

    trajectory: str
    reason: str
    row: int | None = None
    filtered: bool = False


def drop_counts(dropped: Iterable[Dropped]) -> dict[str, int]:
    """Count the completely excluded trajectories by reason."""
    out: dict[str, int] = {}
    for item in dropped:
        if item.row is None:
            out[item.reason] = out.get(item.reason, 0) + 1
    return out


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows, padded on the right to T tokens. The rows of a trajectory are in the order in which they were made.

    Attributes:
        trajectories: The trajectory of each row.
        ids: (B, T) int64 token ids; 0 on padding.
        attention: (B, T) bool: True where there is a token.
        mask: (B, T) bool: True where this policy sampled the token.
        logprobs: (B, T) float32: logprobs recorded by the engine, in nats; NaN where the mask is 0.
        entropies: (B, T) float32: entropies recorded by the engine, at the sampling temperature, in nats; NaN where the
            mask is 0 or the engine recorded none.
        advantages: (B, T) float32: advantages; NaN where the mask is 0.
        token_rewards: (B, T) float32: each reward at the last action token it applies to, the trajectory's reward in
            its last row; 0 at other action tokens, NaN where the mask is 0.
        rewards: (B,) float32: reward of the trajectory, the same in all of its rows.
        groups: (B,) int64: index of the group.
        trajectory_index: (B,) int64: index of the trajectory in the batch.
        row_index: (B,) int64: index of the row in its trajectory.
        temperatures: (B,) float32: sampling temperatures.
        versions: (B, T) int64: policy version that sampled the token; -1 where the mask is 0.
        lengths: (B,) int64: number of tokens.
        truncated: (B,) bool: True for the last row of a trajectory that a limit cut off.
        returns: (B, T): targets of the value loss.
        values: (B, T): values before the update.
        kept_mass: (B, T): probability mass kept by top-p, top-k or min-p; NaN where the mask is 0. None if nothing was
            sampled under them.
        ref_logprobs: (B, T): logprobs under the reference policy, stored so that a KL in the reward and one in the loss
            share one forward pass.
        dropped: Trajectories and rows that were excluded, with reasons.
        num_given: Number of trajectories passed to `collate`, including dropped ones.
        flagged: Fractions of these trajectories that were unscored and that were truncated.
    """

    trajectories: tuple[Trajectory, ...] = field(repr=False)
    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    advantages: Tensor
    token_rewards: Tensor
    rewards: Tensor
    groups: Tensor
    trajectory_index: Tensor
    row_index: Tensor
    temperatures: Tensor
    versions: Tensor
    lengths: Tensor
    truncated: Tensor
    returns: Tensor | None = None
    values: Tensor | None = None
    kept_mass: Tensor | None = None
    ref_logprobs: Tensor | None = None
    dropped: tuple[Dropped, ...] = ()
    num_given: int = 0
    flagged: tuple[float, float] = (0.0, 0.0)

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the trajectories that the tensors were made from."""
        pairs = zip(self.trajectories, self.row_index.tolist(), strict=True)
        return tuple(t.rows[i] for t, i in pairs)

    @property
    def first_rows(self) -> Tensor:
        """Index of the first row of each of the R trajectories, (R,) int64, to count each trajectory once."""
        first: dict[int, int] = {}
        for i, trajectory in enumerate(self.trajectory_index.tolist()):
            first.setdefault(trajectory, i)
        return torch.tensor(list(first.values()), dtype=torch.int64)

    def check(self) -> None:
        """Check shapes, mask and values of all tensors.

        Batches from `collate` always pass. `ppo_step` calls this to detect errors in batches that were modified later.

        Raises:
            AlignmentError: If a tensor does not match the others in shape or holds invalid values; it names the first.
        """
        rows, shape = len(self), tuple(self.ids.shape)
        for name in dict.fromkeys((*_PER_ROW_FIELDS, *_PADDING_VALUES)):
            value = getattr(self, name)
            if value is None:
                continue
            wanted = (rows,) if name in _PER_ROW_FIELDS else (rows, shape[1])
            if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
                got = tuple(value.shape) if isinstance(value, Tensor) else f"{type(value).__name__}"
                raise AlignmentError(f"{name} has the shape {got}, and the batch is {shape}; wanted {wanted}")
        for name in ("mask", "attention"):
            value = getattr(self, name)
            if value.dtype != torch.bool:
                odd = value[(value != 0) & (value != 1)]
                what = f"holds {float(odd[0]):g}" if len(odd) else f"is {value.dtype}"
                raise AlignmentError(f"{name} {what}; give a bool tensor: True where the policy sampled the token")
        # Values that would make a loss wrong without an error.
        inside = torch.arange(shape[1])[None] < self.lengths[:, None]
        for what, wrong in (
            ("mask is 1 on padding", self.mask & ~inside),
            ("mask is 1 at position 0, which nothing predicts", self.mask & (torch.arange(shape[1]) == 0)),
            ("logprobs is not finite where the mask is 1", self.mask & ~torch.isfinite(self.logprobs)),
            ("logprobs is above 0 where the mask is 1", self.mask & (self.logprobs > 1e-3)),
            ("ids is negative", self.ids < 0),
        ):
            if bool(wrong.any()):
                raise AlignmentError(f"{what}, first at {wrong.nonzero()[0].tolist()}; collate makes none like it")
        for what, wrong in (
            ("rewards is not finite", ~torch.isfinite(self.rewards)),
            ("temperatures is not above 0", ~(self.temperatures > 0)),
        ):
            if bool(wrong.any()):
                raise AlignmentError(f"{what}, first in row {int(wrong.nonzero()[0])}")

    def replace(self, **changes: Any) -> Batch:
        """Return a copy of the batch with other tensors.

        Per-token tensors such as advantages are converted to float32 and set to NaN where the mask is 0.

        Args:
            changes: New values by field name.

        Returns:
            The new batch.

        Raises:
            AlignmentError: If a per-token tensor is not of shape (B, T).
        """
        mask = changes.get("mask", self.mask)
        for name, value in changes.items():
            if name in _PER_TOKEN_FIELDS and value is not None:
                if tuple(value.shape) != tuple(self.ids.shape):
                    raise AlignmentError(
                        f"{name} has the shape {tuple(value.shape)}, and the batch is {tuple(self.ids.shape)}"
                    )
                changes[name] = torch.where(mask, value.float(), torch.nan)
        return replace(self, **changes)

    def __repr__(self) -> str:
        left = f", {len(self.dropped)} left out" if self.dropped else ""
        return f"Batch({len(self)} rows, {self.ids.shape[1]} wide, {int(self.mask.sum())} action tokens{left})"

    def _repr_html_(self) -> str:
        numbers = {
            "rows": len(self),
            "width": self.ids.shape[1],
            "tokens": int(self.lengths.sum()),
            "action tokens": int(self.mask.sum()),
            "mean reward": float(self.rewards.mean()),
        }
        left = _html.table(("left out", "trajectories"), drop_counts(self.dropped).items())
        return _html.heading(self) + _html.table(tuple(numbers), [numbers.values()]) + (left if self.dropped else "")


_PER_TOKEN_FIELDS = ("advantages", "returns", "values", "token_rewards", "kept_mass", "ref_logprobs")
TruncationMode = Literal["score", "mask", "bootstrap", "penalty"]
AdvantagePer = Literal["trajectory", "row"]
Advantages = Callable[..., Tensor] | Tensor | Sequence[float] | None


def collate(
    rollout: Any,
    advantages: Advantages = None,
    *,
    per: AdvantagePer = "trajectory",
    authors: str | Sequence[str] | None = None,
    truncated: TruncationMode = "score",
    penalty: float = 0.5,
    allow_truncated_sampling: bool = False,
    filters: Sequence[Filter] = (),
) -> Batch:
    """Collate a rollout, or trajectories, into a batch with one row for each of their rows.

    Args:
        rollout: A rollout, a trajectory, or an iterable of trajectories.
        advantages: A function (rewards (N,), groups (N,)) -> (N,), such as `advantages.grpo`, called on all N
            trajectories with NaN for unscored ones; or a tensor (N,), or (B, T) on the rows that are kept. With
            per="trajectory" also (N, K): one advantage per sampled turn, as computed by `gigpo` and `arpo`; see
            `turn_data`. None leaves all advantages NaN, to be set later.
        per: "trajectory" takes one advantage per trajectory and assigns it to all of its rows. "row" (verl) passes
            every row to the function as if it were a trajectory of its own: N is then the number of rows, each with the
            reward of its trajectory.
        authors: Authors whose tokens are trained, among the tokens that this policy sampled. None trains all of them. A
            turn reward earned by another author is left out.
        truncated: How to treat trajectories that a limit cut off. "score" trains on them. "mask" leaves their rows out
            after the advantages were computed. "penalty" first subtracts `penalty` from their reward. "bootstrap" is
            the same as "score", for estimators that receive the value of the state in which they were cut:
            `advantages.gae(bootstrap=)`, see `Policy.bootstrap_values`.
        penalty: Amount that truncated="penalty" subtracts, in units of reward.
        allow_truncated_sampling: Whether to accept rows sampled under top-p, top-k or min-p. By default they are
            rejected, because the probability ratio of the update would be off by the kept mass. True records that mass
            for `PPOConfig(correction=)`.
        filters: Further reasons to leave trajectories out, see `af.filters`. A filtered trajectory is treated as
            unscored and counts in no mean.

    Returns:
        The batch.

    Raises:
        EmptyBatch: If no row is left.
        BatchError: If an engine returned text without token ids, or trajectories cannot be trained on as they were
            sampled.
        AlignmentError: If the advantages have the wrong shape.
        SettingsError: If `truncated`, `per` or a filter is invalid.
    """
    given = _as_trajectories(rollout)
    for name, value, kind in (("truncated", truncated, TruncationMode), ("per", per, AdvantagePer)):
        if value not in get_args(kind):
            raise SettingsError(f"{name}={value!r}: give one of {', '.join(map(repr, get_args(kind)))}")
    if not given:
        raise BatchError("collate was given no trajectory; roll some tasks out first")
    flagged = (sum(t.reward is None for t in given) / len(given), sum(t.truncated for t in given) / len(given))
    # Filters see the original rewards. The penalty is subtracted before advantages are computed, and filtered
    # trajectories become unscored.
    filtered = drop_reasons(given, filters)
    if truncated == "penalty":
        given = [t.replace(reward=t.reward - penalty) if t.truncated and t.reward is not None else t for t in given]
    if filtered:
        given = [t.replace(reward=None) if t.id in filtered else t for t in given]
    names = _author_names(authors, given)
    rows: list[Row] = []
    masks: list[npt.NDArray[np.bool_]] = []
    token_reward: list[npt.NDArray[np.float32]] = []
    dropped: list[Dropped] = []
    # Index in `given` of the trajectory of each row.
    index: list[int] = []
    # For per="row": the index of each row in `entries`, the trajectories of all rows shown to the estimator. A
    # trajectory without sampled tokens has one entry.
    entry: list[int] = []
    entries: list[int] = []
    # Select the rows to train on and record why the others are left out.
    for i, t in enumerate(given):
        reason = _drop_reason(t, truncated, allow_truncated_sampling, names)
        trained = [row.sampled_by(*names) for row in t.rows]
        has = [j for j, mask in enumerate(trained) if bool(mask.any())]
        at = len(entries)
        entries += [i] * max(1, len(has))
        if reason is not None:
            known = filtered.get(t.id)
            dropped.append(Dropped(t.id, reason if known is None else known, filtered=known is not None))
            continue
        found = _token_rewards(t, trained)
        dropped += [Dropped(t.id, _not_sampled_message(names), j) for j in range(len(t.rows)) if j not in has]
        rows += [t.rows[j] for j in has]
        masks += [trained[j] for j in has]
        token_reward += [found[j] for j in has]
        index += [i] * len(has)
        entry += range(at, at + len(has))
    if not rows:
        raise EmptyBatch(
            f"none of {len(given)} trajectories can be trained on: {'; '.join(sorted({d.reason for d in dropped}))}",
            tuple(dropped),
        )

    # For each row: its trajectory, and whether it is the last row of that trajectory.
    of = [given[i] for i in index]
    last = [i + 1 == len(index) or index[i + 1] != index[i] for i in range(len(index))]
    numbers: dict[str, int] = {}
    group_of = [numbers.setdefault(t.group, len(numbers)) for t in given]
    lengths = torch.tensor([len(row) for row in rows])
    shape = (len(rows), int(lengths.max()))
    # Fill NumPy arrays: assigning to a slice of a tensor takes ten times as long, and there are six per row.
    table = {
        "ids": np.zeros(shape, dtype=np.int64),
        "mask": np.zeros(shape, dtype=np.bool_),
        "logprobs": np.full(shape, np.nan, dtype=np.float32),
        "entropies": np.full(shape, np.nan, dtype=np.float32),
        "versions": np.full(shape, -1, dtype=np.int64),
        "token_rewards": np.full(shape, np.nan, dtype=np.float32),
    }
    for i, row in enumerate(rows):
        n, here = len(row), masks[i]
        table["ids"][i, :n] = row.ids
        table["mask"][i, :n] = here
        table["logprobs"][i, :n] = np.where(here, row.logprobs, np.nan)
        table["entropies"][i, :n] = np.where(here, row.entropies, np.nan)
        table["versions"][i, :n] = np.where(here, row.versions, -1)
        table["token_rewards"][i, :n] = token_reward[i]
    ids, mask, logprobs, entropies, versions, token_rewards = map(torch.from_numpy, table.values())
    if bool(torch.isnan(logprobs[mask]).any()) or bool(mask[:, 0].any()):
        raise AlignmentError("a sampled token has no logprob, or stands at position 0; the record is damaged")
    batch = Batch(
        trajectories=tuple(of),
        ids=ids,
        attention=torch.arange(shape[1])[None] < lengths[:, None],
        mask=mask,
        logprobs=logprobs,
        entropies=entropies,
        advantages=torch.full(shape, torch.nan),
        token_rewards=token_rewards,
        rewards=torch.tensor([float(t.reward) for t in of if t.reward is not None]),
        groups=torch.tensor([group_of[i] for i in index]),
        trajectory_index=torch.unique_consecutive(torch.tensor(index), return_inverse=True)[1],
        row_index=torch.tensor([row.index for row in rows]),
        temperatures=torch.tensor([t.sampling.temperature for t in of]),
        versions=versions,
        lengths=lengths,
        truncated=torch.tensor([t.truncated and end for t, end in zip(of, last, strict=True)]),
        kept_mass=_kept_mass(of, rows, mask),
        dropped=tuple(dropped),
        num_given=len(given),
        flagged=flagged,
    )
    # The estimator sees all trajectories (or rows) that were passed, with NaN for unscored ones.
    if advantages is not None:
        seen, where = (list(range(len(given))), index) if per == "trajectory" else (entries, entry)
        rewards = torch.tensor([math.nan if (r := given[i].reward) is None else float(r) for i in seen])
        batch = batch.replace(
            advantages=_advantages_per_token(
                batch, advantages, rewards, torch.tensor([group_of[i] for i in seen]), where, per
            )
        )
    return batch


def _as_trajectories(rollout: Any) -> list[Trajectory]:
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


def _author_names(authors: str | Sequence[str] | None, given: list[Trajectory]) -> tuple[str, ...]:
    """Normalize `authors=` to a tuple of names, where () stands for all authors.

    Raises:
        BatchError: If `authors` is empty, or one of them sampled nothing.
    """
    if authors is None:
        return ()
    names = (authors,) if isinstance(authors, str) else tuple(authors)
    there = sorted({turn.author for t in given for turn in t.turns if turn.sampled})
    if not names or (unknown := [name for name in names if name not in there]):
        what = f"authors={authors!r}" if not names else f"authors={authors!r}: {unknown[0]!r} sampled nothing here"
        raise BatchError(f"{what}; give some of those who did: {', '.join(map(repr, there)) or 'nobody'}")
    return names


def _not_sampled_message(names: tuple[str, ...]) -> str:
    return f"no token was sampled by {' or '.join(names) if names else 'a policy'}"


def _drop_reason(t: Trajectory, truncated: str, allow_truncated_sampling: bool, names: tuple[str, ...]) -> str | None:
    """Return why a trajectory is left out of the batch, or None if it is kept.

    Raises:
        BatchError: If it has no token ids or an infinite reward, or was sampled greedily or under truncation.
    """
    if not t.exact:
        raise BatchError(
            f"trajectory {t.id!r} has no token ids: its engine gives text only, and cannot be trained from"
        )
    if t.reward is None:
        ended = t.stop if t.stop in UNSCORED_STOPS else "no reward said a number"
        return f"unscored ({t.error.where if t.error else ended})"
    if not math.isfinite(t.reward):
        raise BatchError(f"trajectory {t.id!r} has the reward {t.reward}; give a finite number, or None for unscored")
    if not any(row.sampled_by(*names).any() for row in t.rows):
        return _not_sampled_message(names)
    # Only greedy or truncated sampling records a kept mass, so such a turn did not use the trajectory's settings.
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


def _token_rewards(t: Trajectory, masks: list[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.float32]]:
    """Return the token rewards of each row, (T,).

    The reward of the trajectory is assigned to its last trained token, the reward of a turn to the last token sampled
    before the end of the turn. That token is in the row of the turn, unless nothing was sampled in that row before. If
    another author sampled it, the reward belongs to that author and is left out.

    Raises:
        BatchError: If no token was sampled before the end of a turn with a reward.
    """
    assert t.reward is not None
    out = [np.where(mask, np.float32(0), np.float32(np.nan)) for mask in masks]
    if len(masks) == 1 and all(turn.reward is None for turn in t.turns):
        out[0][int(masks[0].nonzero()[0][-1])] = t.reward
        return out
    # List all sampled tokens in order, each with its row, column and turn. A turn reward goes to the last one whose
    # turn is not later.
    places: list[tuple[int, int]] = []
    turn_of: list[int] = []
    for j, row in enumerate(t.rows):
        at = row.action_mask.nonzero()[0]
        places += [(j, int(column)) for column in at]
        turn_of += row.turn_index[at].tolist()
    for i, turn in enumerate(t.turns):
        if turn.reward is None:
            continue
        before = bisect.bisect_right(turn_of, i)
        if before == 0:
            raise BatchError(
                f"trajectory {t.id!r}: turn {i} has a reward of {turn.reward:g} and no sampled token comes before its "
                "end, so nothing can be credited with it"
            )
        j, column = places[before - 1]
        if bool(masks[j][column]):
            out[j][column] += turn.reward
    j, column = next(place for place in reversed(places) if bool(masks[place[0]][place[1]]))
    out[j][column] += t.reward
    return out


def _kept_mass(of: list[Trajectory], rows: list[Row], mask: Tensor) -> Tensor | None:
    """Return the kept probability mass of each sampled token, (B, T), or None if nothing was sampled under truncation.

    Raises:
        BatchError: If an engine did not record it.
    """
    if not any(t.sampling.truncates for t in of):
        return None
    out = torch.full(mask.shape, torch.nan)
    for i, (t, row) in enumerate(zip(of, rows, strict=True)):
        mass: list[float] = []
        for turn in row.turns:
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
    """Concatenate batches in order. Their groups and trajectories stay distinct; rows are padded to a common width.

    Args:
        batches: Batches to join. Values, returns, kept mass and reference logprobs are kept if all batches have them.

    Returns:
        The joint batch.

    Raises:
        BatchError: If there are no batches.
    """
    if not batches:
        raise BatchError("join was given no batch")
    width = max(b.ids.shape[1] for b in batches)
    out: dict[str, Any] = {}
    for name, fill in _PADDING_VALUES.items():
        parts = [getattr(b, name) for b in batches]
        if all(p is not None for p in parts):
            parts = [
                p if p.ndim == 1 else torch.cat([p, p.new_full((len(p), width - p.shape[1]), fill)], 1) for p in parts
            ]
            out[name] = torch.cat(parts)
        else:
            out[name] = None
    for name in ("groups", "trajectory_index"):
        start, parts = 0, []
        for b in batches:
            part = getattr(b, name)
            parts.append(part + start)
            start += int(part.max()) + 1
        out[name] = torch.cat(parts)
    num_given = sum(b.num_given for b in batches)
    return Batch(
        trajectories=tuple(t for b in batches for t in b.trajectories),
        **out,
        dropped=tuple(d for b in batches for d in b.dropped),
        num_given=num_given,
        flagged=(
            sum(b.flagged[0] * b.num_given for b in batches) / max(num_given, 1),
            sum(b.flagged[1] * b.num_given for b in batches) / max(num_given, 1),
        ),
    )


_PER_ROW_FIELDS = ("rewards", "groups", "trajectory_index", "row_index", "temperatures", "lengths", "truncated")
# Padding value of each tensor.
_PADDING_VALUES: dict[str, Any] = dict.fromkeys(
    ("ids", "attention", "mask", "rewards", "temperatures", "lengths", "truncated", "row_index"), 0
)
_PADDING_VALUES |= {"versions": -1} | dict.fromkeys(
    ("logprobs", "entropies", "values", "returns", *_PER_TOKEN_FIELDS), math.nan
)


def _advantages_per_token(
    batch: Batch, advantages: Any, rewards: Tensor, groups: Tensor, where: list[int], per: AdvantagePer
) -> Tensor:
    """Compute or expand advantages to (B, T). `where` has the index in `rewards` of each row of the batch.

    Raises:
        AlignmentError: If the advantages have none of the accepted shapes.
    """
    if callable(advantages):
        advantages = advantages(rewards, groups)
    values = torch.as_tensor(advantages, dtype=torch.float32)
    if tuple(values.shape) == tuple(batch.ids.shape):
        return values
    if values.ndim == 2 and len(values) == len(rewards) and per == "trajectory":
        return _turn_advantages_per_token(batch, values, where)
    if tuple(values.shape) != tuple(rewards.shape):
        raise AlignmentError(
            f"advantages have the shape {tuple(values.shape)}; give one a trajectory ({len(rewards)},) (with "
            "per='row': a row that was sampled in), one a sampled turn of each trajectory "
            f"({len(rewards)}, K), or one a token {tuple(batch.ids.shape)} on the rows that are kept"
        )
    return values[where, None].expand(batch.ids.shape).clone()


def _turn_advantages_per_token(batch: Batch, values: Tensor, where: list[int]) -> Tensor:
    """Expand advantages per sampled turn of each trajectory, (N, K), to tokens, (B, T)."""
    out = torch.zeros(batch.ids.shape)
    for i, (t, row) in enumerate(zip(batch.trajectories, batch.rows, strict=True)):
        turns = sampled_turn_indices(t)
        if len(turns) > values.shape[1]:
            raise AlignmentError(
                f"advantages have the shape {tuple(values.shape)}, and trajectory {t.id!r} sampled in {len(turns)} "
                "turns; give a column for each, as `turn_data` counts them"
            )
        column = torch.zeros(len(t.turns), dtype=torch.int64)
        column[list(turns)] = torch.arange(len(turns))
        out[i, : len(row)] = values[where[i]][column[torch.as_tensor(row.turn_index.copy())]]
    return out
