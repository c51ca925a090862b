"""`collate`, which selects rows of trajectories and converts them to the aligned tensors of a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentfly_kit.batch.batch import Batch, Dropped
from agentfly_kit.batch.filters import Filter, drop_reasons
from agentfly_kit.batch.turn_data import as_trajectories, credited_turn, sampled_turn_indices
from agentfly_kit.errors import (
    AlignmentError,
    BatchError,
    EmptyBatch,
    SettingsError,
    check_choice,
    checks_keywords,
)
from agentfly_kit.trajectories import UNSCORED_STOPS, Row, Trajectory

TruncationMode = Literal["score", "mask", "bootstrap", "penalty"]
AdvantagePer = Literal["trajectory", "row"]
Advantages = Callable[..., Tensor] | Tensor | Sequence[float] | None


@dataclass
class _TrainedRow:
    trajectory: Trajectory
    row: Row
    mask: npt.NDArray[np.bool_]  # True at trained tokens
    token_rewards: npt.NDArray[np.float32]
    trajectory_index: int
    is_last: bool  # whether no later row of its trajectory is in the batch
    unit: int  # index of the row's reward in the input of the estimator


@checks_keywords
def collate(
    rollout: Any,
    advantages: Advantages = None,
    *,
    per: AdvantagePer = "trajectory",
    authors: str | Sequence[str] | None = None,
    imitate: bool | str | Sequence[str] = False,
    truncated: TruncationMode = "score",
    penalty: float = 0.5,
    allow_truncated_sampling: bool = False,
    filters: Sequence[Filter] = (),
) -> Batch:
    """Convert a rollout or trajectories to a batch of padded tensors, with one batch row per trajectory row.

    Args:
        rollout: A rollout, a trajectory, or an iterable of trajectories.
        advantages: A function of (rewards, groups), such as `advantages.grpo`, or a tensor. The function receives the
            rewards and groups of all N trajectories as tensors of shape (N,), with NaN for missing rewards, and returns
            N advantages. A tensor has the shape (N,), or (B, T) for the B kept rows. With per="trajectory", the tensor
            or the result of the function may have the shape (N, K), with one advantage per sampled turn, as in `gigpo`;
            see `turn_data`. None sets all advantages to NaN.
        per: "trajectory" assigns the advantage of a trajectory to all of its rows. "row", as in verl, passes every row
            to the function as a separate trajectory with the same reward; N is then the number of rows.
        authors: Authors whose sampled tokens are trained on. None trains on all sampled tokens. Turn rewards earned by
            other authors are ignored.
        imitate: Authors whose actions are imitated, whether sampled or not; True means all authors. The mask is then 1
            at the tokens of these actions, and `advantages` are weights of at least 0, by default 1. Weights of shape
            (N, K) are not supported, because imitated turns need not be sampled. Trajectories without a reward are
            included unless they ended with an error. Trajectories with weight 0 are dropped. For rejection sampling,
            pass advantages=lambda r, g: (r > 0).float(). Train on the batch with `imitation_step`.
        truncated: Treatment of trajectories that were cut off by a limit. "score" trains on these trajectories. "mask"
            excludes their rows after the advantages have been computed. "penalty" subtracts `penalty` from their
            rewards before the advantages are computed. "bootstrap" has the same effect as "score" and is for estimators
            that receive the value of the state at the cut, such as `advantages.gae(bootstrap=)`; see
            `Policy.bootstrap_values`.
        penalty: Amount subtracted with truncated="penalty", in units of reward.
        allow_truncated_sampling: Whether to accept rows sampled under top-p, top-k, min-p or a constraint. By default,
            such rows are rejected, because their probability ratios would be wrong by a factor equal to the kept
            probability mass. If True, the kept mass is stored for `PPOConfig(correction=)`.
        filters: Filters that exclude further trajectories; see `af.filters`. An excluded trajectory is treated as
            unscored and does not contribute to any mean.

    Returns:
        The batch.

    Raises:
        EmptyBatch: If no row remains.
        BatchError: If a trajectory cannot be used because its engine returned text without token ids or because of
            the way it was sampled, or if its turns have rewards but `advantages` is a function that returns one
            advantage per trajectory.
        AlignmentError: If the advantages have the wrong shape, or a weight is negative or not finite.
        SettingsError: If `truncated`, `per` or a filter is invalid.
    """
    check_choice("truncated", truncated, TruncationMode)
    check_choice("per", per, AdvantagePer)
    imitates = imitate if isinstance(imitate, bool) else imitate is not None
    if imitates and authors is not None:
        raise SettingsError(f"authors must be None with imitate={imitate!r}; pass the authors to imitate as imitate=")
    if isinstance(advantages, str):
        raise SettingsError(
            f"advantages must be a function such as af.advantages.grpo, or one number per {per}, got {advantages!r}"
        )
    given = as_trajectories(rollout)
    if not given:
        raise BatchError("rollout must hold at least one trajectory, got none")

    # Filters receive the original rewards; filtered trajectories become unscored.
    filtered = drop_reasons(given, filters)
    if truncated == "penalty":
        given = [t.replace(reward=t.reward - penalty) if t.truncated and t.reward is not None else t for t in given]
    given = [t.replace(reward=None) if t.id in filtered else t for t in given]

    # The estimator receives one reward per unit. A unit is a trajectory or, with per="row", a row with tokens to train
    # on; a trajectory without such tokens is one unit.
    wanted = authors if imitate is False else None if imitate is True else imitate
    names = _author_names(wanted, given, imitates)
    rows: list[_TrainedRow] = []
    dropped: list[Dropped] = []
    units: list[Trajectory] = []
    num_kept = 0
    for t in given:
        if not t.exact:
            raise BatchError(
                f"trajectory {t.id!r} must have token ids to be trained on, but its engine returned text only"
            )
        masks = [row.written_by(*names) if imitates else row.sampled_by(*names) for row in t.rows]
        if imitates:
            reason = filtered.get(t.id) or _not_imitable_reason(t, masks, truncated)
        else:
            reason = _unusable_reason(t, names, truncated, allow_truncated_sampling)
        trained = [j for j, mask in enumerate(masks) if mask.any()]
        first_unit = len(units)
        units += [t] * (max(1, len(trained)) if per == "row" else 1)
        if reason is not None:
            dropped.append(Dropped(t.id, filtered.get(t.id, reason), filtered=t.id in filtered))
            continue
        rewards = _token_rewards(t, masks)
        dropped += [Dropped(t.id, _not_sampled(names), j) for j in range(len(t.rows)) if j not in trained]
        for k, j in enumerate(trained):
            unit = first_unit + k if per == "row" else first_unit
            rows.append(_TrainedRow(t, t.rows[j], masks[j], rewards[j], num_kept, j == trained[-1], unit))
        num_kept += 1
    if not rows:
        reasons = "; ".join(sorted({d.reason for d in dropped}))
        remedy = "; to imitate these actions, use collate(imitate=True)" if "actions written by" in reasons else ""
        raise EmptyBatch(f"none of {len(given)} trajectories can be trained on: {reasons}{remedy}", tuple(dropped))

    # Pad the rows on the right with NumPy, because assigning to slices of tensors takes ten times as long.
    lengths = torch.tensor([len(r.row) for r in rows])
    shape = (len(rows), int(lengths.max()))
    ids = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    versions = np.full(shape, -1, dtype=np.int64)
    row_keys = np.zeros(shape, dtype=np.int64) if any(r.row.images for r in rows) else None
    logprobs, entropies, kept_mass, per_token = (np.full(shape, np.nan, dtype=np.float32) for _ in range(4))
    for i, r in enumerate(rows):
        n = len(r.row)
        ids[i, :n] = r.row.ids
        mask[i, :n] = r.mask
        if row_keys is not None:
            row_keys[i, :n] = r.row.keys
        versions[i, :n] = r.row.versions
        logprobs[i, :n] = r.row.logprobs
        entropies[i, :n] = r.row.entropies
        kept_mass[i, :n] = r.row.kept_mass
        per_token[i, :n] = r.token_rewards
    # Rows contain the values of all sampled tokens. Remove the values of tokens that are not trained on.
    versions[~mask] = -1
    logprobs[~mask] = entropies[~mask] = np.nan
    kept_mass = np.where(mask, np.nan_to_num(kept_mass, nan=1.0), np.nan)

    groups = {group: i for i, group in enumerate(dict.fromkeys(t.group for t in given))}
    batch = Batch(
        trajectories=tuple(r.trajectory for r in rows),
        ids=torch.from_numpy(ids),
        attention=torch.arange(shape[1]) < lengths[:, None],
        mask=torch.from_numpy(mask),
        logprobs=torch.from_numpy(logprobs),
        entropies=torch.from_numpy(entropies),
        advantages=torch.full(shape, torch.nan),
        token_rewards=torch.from_numpy(per_token),
        rewards=_rewards([r.trajectory for r in rows]),
        groups=torch.tensor([groups[r.trajectory.group] for r in rows]),
        trajectory_index=torch.tensor([r.trajectory_index for r in rows]),
        row_index=torch.tensor([r.row.index for r in rows]),
        temperatures=torch.tensor([1.0 if imitates else r.trajectory.sampling.temperature for r in rows]),
        versions=torch.from_numpy(versions),
        lengths=lengths,
        truncated=torch.tensor([r.trajectory.truncated and r.is_last for r in rows]),
        kept_mass=torch.from_numpy(kept_mass)
        if not imitates and any(_is_truncated(r.trajectory) for r in rows)
        else None,
        row_keys=None if row_keys is None else torch.from_numpy(row_keys),
        dropped=tuple(dropped),
        imitation=imitates,
    )
    if advantages is None:
        return batch.replace(advantages=torch.ones(shape)) if imitates else batch
    if callable(advantages):
        advantages = advantages(_rewards(units), torch.tensor([groups[t.group] for t in units]))
        if not imitates and torch.as_tensor(advantages).ndim == 1:
            refuse_turn_rewards(units)
    values = torch.as_tensor(advantages, dtype=torch.float32)
    batch = batch.replace(advantages=_advantages_per_token(batch, values, [r.unit for r in rows], len(units), per))
    return _without_zero_weights(batch) if imitates else batch


def refuse_turn_rewards(trajectories: Iterable[Trajectory]) -> None:
    """Raise BatchError if a turn has a nonzero reward, because an outcome estimator would ignore the reward."""
    for t in trajectories:
        for i, turn in enumerate(t.turns):
            if turn.reward:
                raise BatchError(
                    f"turn {i} of {t.id!r} has the reward {turn.reward:g}, which has no effect on advantages that "
                    "compare the rewards of whole chains; add the rewards of turns to those of the chains with "
                    "TrainConfig(sum_turn_rewards=True) or rollout.sum_turn_rewards(), or use 'gigpo', 'gae' or "
                    "'reinforce_plus_plus'"
                )


def _without_zero_weights(batch: Batch) -> Batch:
    """Check the weights of an imitation batch and drop rows in which all weights are 0."""
    batch.check()
    kept = (batch.advantages.nan_to_num() > 0).any(1)
    dropped = tuple(
        Dropped(t.id, "weight 0", row)
        for t, row, keep in zip(batch.trajectories, batch.row_index.tolist(), kept.tolist(), strict=True)
        if not keep
    )
    if not bool(kept.any()):
        raise EmptyBatch("weights must be above 0 for at least one trajectory, got only 0", dropped)
    return batch.select(kept.nonzero()[:, 0]).replace(dropped=(*batch.dropped, *dropped))


def _rewards(trajectories: list[Trajectory]) -> Tensor:
    return torch.tensor([math.nan if t.reward is None else float(t.reward) for t in trajectories])


def _author_names(
    authors: str | Sequence[str] | None, trajectories: list[Trajectory], imitate: bool
) -> tuple[str, ...]:
    if authors is None:
        return ()
    names = (authors,) if isinstance(authors, str) else tuple(authors)
    turns = [turn for t in trajectories for turn in t.turns]
    writing = {turn.author for turn in turns if (turn.kind in ("action", "forced") if imitate else turn.sampled)}
    if not names or not writing.issuperset(names):
        known = ", ".join(map(repr, sorted(writing))) or "there are none"
        what = (
            "imitate must be True or names of authors of actions"
            if imitate
            else "authors must be names of authors whose tokens were sampled"
        )
        raise BatchError(f"{what} ({known}), got {authors!r}")
    return names


def _not_sampled(names: tuple[str, ...]) -> str:
    return f"no token was sampled by {' or '.join(names) or 'a policy'}"


def _not_imitable_reason(t: Trajectory, masks: list[npt.NDArray[np.bool_]], truncated: TruncationMode) -> str | None:
    """Return the reason for excluding a trajectory from an imitation batch, or None to keep the trajectory."""
    if t.stop == "error":
        return f"unscored ({t.error.where if t.error else t.stop})"
    if not any(mask.any() for mask in masks):
        return "no action was written by the imitated authors"
    return "truncated" if truncated == "mask" and t.truncated else None


def _unusable_reason(
    t: Trajectory, names: tuple[str, ...], truncated: TruncationMode, allow_truncated_sampling: bool
) -> str | None:
    """Return the reason for excluding a trajectory from the batch, or None to keep the trajectory."""
    if t.reward is None:
        ended = t.stop if t.stop in UNSCORED_STOPS else "no reward returned a number"
        return f"unscored ({t.error.where if t.error else ended})"
    if not any(row.sampled_by(*names).any() for row in t.rows):
        writers = {turn.author for turn in t.turns if turn.kind in ("action", "forced")}
        if writers and not names:
            return f"actions written by {' and '.join(sorted(writers))}, not sampled by a policy"
        return _not_sampled(names)
    # A kept probability mass without top-p, top-k or min-p means that the engine sampled greedily.
    sampled = [turn for turn in t.turns if turn.sampled]
    kept = [turn for turn in sampled if turn.kept_mass is not None and not turn.constrained]
    if t.sampling.greedy or (not t.sampling.truncates and kept):
        raise BatchError(f"trajectory {t.id!r} must not be sampled greedily for training; use a temperature above 0")
    if _is_truncated(t):
        cut = f"trajectory {t.id!r} was sampled under top-p, top-k, min-p or a constraint ({t.sampling})"
        if not allow_truncated_sampling:
            raise BatchError(
                f"{cut}; sample from the whole distribution, or pass allow_truncated_sampling=True and set "
                "PPOConfig(correction=)"
            )
        if t.sampling.truncates and any(turn.kept_mass is None for turn in sampled):
            raise BatchError(
                f"{cut}, but its engine did not record the kept mass; sample from the whole distribution"
            )
    return "truncated" if truncated == "mask" and t.truncated else None


def _is_truncated(t: Trajectory) -> bool:
    """Return True if top-p, top-k, min-p or a constraint excluded some tokens from sampling."""
    return t.sampling.truncates or any(turn.constrained for turn in t.turns)


def _token_rewards(t: Trajectory, masks: list[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.float32]]:
    """Return the token rewards of each row, (T,), with 0 at tokens without a reward and NaN where the mask is 0.

    The reward of a turn is assigned to the last token of the turn that earned it (`credited_turn`), and is ignored if
    that token is not trained on. The reward of the trajectory is assigned to the last token that is trained on.
    """
    out = [np.where(mask, np.float32(0), np.float32(np.nan)) for mask in masks]
    # Find the row and the column of the last token of each turn.
    last_token = [
        (j, end - 1)
        for j, row in enumerate(t.rows)
        for end in itertools.accumulate(len(x.ids or ()) for x in row.turns)
    ]
    for i, turn in enumerate(t.turns):
        if turn.reward is not None:
            j, column = last_token[credited_turn(t, i)]
            out[j][column] += turn.reward  # NaN stays NaN where the mask is 0
    j = max(j for j, mask in enumerate(masks) if mask.any())
    out[j][masks[j].nonzero()[0][-1]] += math.nan if t.reward is None else t.reward
    return out


def _advantages_per_token(
    batch: Batch, values: Tensor, units: list[int], num_units: int, per: AdvantagePer
) -> Tensor:
    """Expand advantages per trajectory, row or turn to tokens, (B, T). `units` maps rows to indices of `values`."""
    if values.shape == batch.ids.shape:
        return values
    if values.ndim == 2 and len(values) == num_units and per == "trajectory" and not batch.imitation:
        return _turn_advantages_per_token(batch, values, units)
    if tuple(values.shape) != (num_units,):
        # Do not offer the shape (N, K) for imitation, because imitated turns need not be sampled.
        per_turn = f", ({num_units}, K) (one per sampled turn, only with per='trajectory')"
        raise AlignmentError(
            f"{'weights (advantages)' if batch.imitation else 'advantages'} must have the shape ({num_units},) (one "
            f"per {per}){'' if batch.imitation else per_turn} or {tuple(batch.ids.shape)} (one per token of the kept "
            f"rows), got {tuple(values.shape)}"
        )
    return values[units, None].expand(batch.ids.shape)


def _turn_advantages_per_token(batch: Batch, values: Tensor, units: list[int]) -> Tensor:
    out = torch.zeros(batch.ids.shape)
    for i, (t, row, unit) in enumerate(zip(batch.trajectories, batch.rows, units, strict=True)):
        turns = sampled_turn_indices(t)
        if len(turns) > values.shape[1]:
            raise AlignmentError(
                f"advantages must have one column per sampled turn, got {tuple(values.shape)}, but trajectory {t.id!r} "
                f"has {len(turns)} sampled turns; see `turn_data`"
            )
        # Find the column of `values` for each token. Unsampled tokens are masked and get an arbitrary column.
        columns = np.searchsorted(turns, row.turn_index, side="right") - 1
        out[i, : len(row)] = values[unit][torch.from_numpy(columns)]
    return out
