"""Trajectories to tensors: one alignment for everything, mask 0 on padding, and a reason for each one left out.

Knows no model and no loss. A trajectory gives as many rows as it has: one, or several where it was folded. Row i,
column t of every (B, T) tensor is token t of `rows[i]`, predicted from the tokens before it.
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
    """A trajectory, or one of its rows, that is in no loss term and no denominator, and why.

    Attributes:
        trajectory
        reason
        row: None is all of them.
        filtered: By one of `filters`, and not because it could not be trained on.
    """

    trajectory: str
    reason: str
    row: int | None = None
    filtered: bool = False


def drop_counts(dropped: Iterable[Dropped]) -> dict[str, int]:
    """Reason -> trajectories of which nothing is left."""
    out: dict[str, int] = {}
    for item in dropped:
        if item.row is None:
            out[item.reason] = out.get(item.reason, 0) + 1
    return out


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows padded on the right to T tokens. Rows of a trajectory are in the order they were made.

    Attributes:
        trajectories: One a row: whose it is.
        ids: (B, T) int64; 0 on padding.
        attention: (B, T) bool: which positions hold a token.
        mask: (B, T) bool: which tokens this policy sampled.
        logprobs: (B, T) float32: the engine's, in nats; NaN where the mask is 0.
        entropies: (B, T) float32: the engine's, at the sampling temperature; NaN where the mask is 0 or the engine gave
            none.
        advantages: (B, T) float32; NaN where the mask is 0.
        token_rewards: (B, T) float32: each reward on the last action token that it is for, the trajectory's in its last
            row; NaN where the mask is 0.
        rewards: (B,) float32: the trajectory's, the same on all its rows.
        groups: (B,) int64: rows of one group share a number.
        trajectory_index: (B,) int64: rows of one chain share a number.
        row_index: (B,) int64: which of its trajectory's rows it is.
        temperatures: (B,) float32.
        versions: (B, T) int64; -1 where the mask is 0.
        lengths: (B,) int64.
        truncated: (B,) bool: a limit cut the chain in this row, which is its last.
        returns: (B, T), for a value loss.
        values: (B, T), from before the update.
        kept_mass: (B, T): the probability that top-p, top-k or min-p kept; NaN where the mask is 0. None where nothing
            was cut.
        ref_logprobs: (B, T): a frozen policy's, so that a KL in the reward and one in the loss need one forward.
        dropped
        num_given: Trajectories that were given, dropped ones included.
        flagged: Shares of the given trajectories that were unscored, and truncated.
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
        """The record of each row."""
        pairs = zip(self.trajectories, self.row_index.tolist(), strict=True)
        return tuple(t.rows[i] for t, i in pairs)

    @property
    def first_rows(self) -> Tensor:
        """(R,) int64: the first row of each of the R trajectories, for what is said once a trajectory."""
        first: dict[int, int] = {}
        for i, trajectory in enumerate(self.trajectory_index.tolist()):
            first.setdefault(trajectory, i)
        return torch.tensor(list(first.values()), dtype=torch.int64)

    def check(self) -> None:
        """Raises AlignmentError naming the first tensor that does not fit the others, or holds what nothing can use.

        `collate` makes no such batch; `ppo_step` asks for the sake of those that were changed by hand.
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
        """The same rows with other tensors; (B, T) ones are checked for their shape, and NaN where the mask is 0."""
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
    """Make a batch of a rollout, or of trajectories: a row of the batch for each of their rows.

    advantages: a function (rewards (N,), groups (N,)) -> (N,) such as `advantages.grpo`, called on all N trajectories
        with NaN for the unscored; or a tensor (N,), or (B, T) on the rows that are kept; or None: all NaN, for later.
        With per="trajectory" also (N, K), one for each sampled turn, as of `gigpo` and `arpo`: see `turn_data`.
    per: "trajectory" takes an advantage for each trajectory and gives it to all its rows; "row" (verl) shows the
        function every row as if it were its own trajectory: N is then the rows, each with its trajectory's reward.
    authors: whose tokens are trained, of those that this policy sampled; None is all. A turn's reward that another
        author earned is left out.
    truncated: "score" trains on chains that a limit cut; "mask" leaves their rows out, after the advantages were taken;
        "penalty" takes `penalty` from their reward first; "bootstrap" is "score" for an estimator that is then told the
        value of the state in which they were cut: `advantages.gae(bootstrap=)`, see `Policy.bootstrap_values`.
    allow_truncated_sampling: rows sampled under top-p, top-k or min-p are refused, because the ratio of the update
        would be wrong by the kept mass; True keeps that mass, for `ppo_step(correction=)`.
    filters: what else is left out, see `af.filters`: such a chain counts in no mean, as if it were unscored.
    Raises:  EmptyBatch if no row is left; BatchError if an engine gave text only, or if rows cannot be trained as
             sampled.
    """
    given = _as_trajectories(rollout)
    for name, value, kind in (("truncated", truncated, TruncationMode), ("per", per, AdvantagePer)):
        if value not in get_args(kind):
            raise SettingsError(f"{name}={value!r}: give one of {', '.join(map(repr, get_args(kind)))}")
    if not given:
        raise BatchError("collate was given no trajectory; roll some tasks out first")
    flagged = (sum(t.reward is None for t in given) / len(given), sum(t.truncated for t in given) / len(given))
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
    # Whose each row is: its place in `given`.
    index: list[int] = []
    # Where it stands among the rows that an estimator of rows is shown.
    entry: list[int] = []
    entries: list[int] = []
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

    of = [given[i] for i in index]
    last = [i + 1 == len(index) or index[i + 1] != index[i] for i in range(len(index))]
    numbers: dict[str, int] = {}
    group_of = [numbers.setdefault(t.group, len(numbers)) for t in given]
    lengths = torch.tensor([len(row) for row in rows])
    shape = (len(rows), int(lengths.max()))
    # Filled as arrays: a tensor's slice costs ten times as much, and here are six a row.
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
    """The names; () is everybody."""
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
    """Why a trajectory leaves the batch, or None. What would make the whole batch wrong raises instead."""
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
    """(T,) a row: the trajectory's reward on its last trained token, a turn's on the last sampled one before its end.

    That token is in the turn's own row, unless nothing was sampled there before it. If it is another author's, the
    reward is too, and left out.
    """
    assert t.reward is not None
    out = [np.where(mask, np.float32(0), np.float32(np.nan)) for mask in masks]
    if len(masks) == 1 and all(turn.reward is None for turn in t.turns):
        out[0][int(masks[0].nonzero()[0][-1])] = t.reward
        return out
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
    """One batch of several, in order: their groups and trajectories stay apart, their rows are padded to one width.

    Values, returns, kept mass and reference logprobs are kept if every one has them.
    Raises:  BatchError if there is none.
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
# What stands on the padding of each tensor.
_PADDING_VALUES: dict[str, Any] = dict.fromkeys(
    ("ids", "attention", "mask", "rewards", "temperatures", "lengths", "truncated", "row_index"), 0
)
_PADDING_VALUES |= {"versions": -1} | dict.fromkeys(
    ("logprobs", "entropies", "values", "returns", *_PER_TOKEN_FIELDS), math.nan
)


def _advantages_per_token(
    batch: Batch, advantages: Any, rewards: Tensor, groups: Tensor, where: list[int], per: AdvantagePer
) -> Tensor:
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
    """(N, K), one a sampled turn of each trajectory -> (B, T)."""
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
