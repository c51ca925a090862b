"""`Batch`, which holds rows of trajectories as tensors and lists the excluded trajectories and rows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentfly_kit._display import Displayable
from agentfly_kit.errors import AlignmentError, check_shape
from agentfly_kit.trajectories import Row, Trajectory
from agentfly_kit.types import ImageSpan

# Fields of `Batch` with one value per row, shape (B,).
_ROW_FIELDS = ("rewards", "groups", "trajectory_index", "row_index", "temperatures", "lengths", "truncated")
# Fields of shape (B, T) that `Batch.replace` converts to float32 and sets to NaN where the mask is 0.
_MASKED_FIELDS = ("advantages", "returns", "values", "token_rewards", "kept_mass", "ref_logprobs")
# All fields of shape (B, T), with their padding values.
_PADDING: dict[str, Any] = {"ids": 0, "attention": False, "mask": False, "versions": -1, "row_keys": 0}
_PADDING |= dict.fromkeys(("logprobs", "entropies", *_MASKED_FIELDS), math.nan)


@dataclass(frozen=True, repr=False)
class Dropped(Displayable):
    """A trajectory or row that is excluded from the batch, and thus from all loss terms and denominators.

    Attributes:
        trajectory: Id of the trajectory.
        reason: Reason for the exclusion.
        row: Index of the excluded row; None if all rows are excluded.
        filtered: True if a filter excluded the trajectory; False if the trajectory or row cannot be trained on.
    """

    trajectory: str
    reason: str
    row: int | None = None
    filtered: bool = False


def drop_counts(dropped: Iterable[Dropped]) -> dict[str, int]:
    """Return the number of trajectories without any row in the batch, keyed by the reason for their exclusion."""
    return dict(Counter(item.reason for item in dropped if item.row is None))


@dataclass(frozen=True, eq=False)
class Batch(Displayable):
    """B rows, padded on the right to T tokens. The rows of each trajectory are in order of creation.

    Attributes:
        trajectories: The trajectory of each row.
        ids: (B, T) int64 token ids; 0 on padding.
        attention: (B, T) bool: True at tokens, False on padding.
        mask: (B, T) bool: True at the tokens to train on, which the policy sampled unless `imitation` is True.
        logprobs: (B, T) float32: logprobs recorded by the sampling engine, in nats; NaN where the mask is 0.
        entropies: (B, T) float32: entropies recorded by the sampling engine, in nats; NaN where none was recorded.
        advantages: (B, T) float32: advantages; NaN where the mask is 0.
        token_rewards: (B, T) float32: turn rewards, each at the last token of the turn that earned it, plus the
            trajectory reward at the last action token; 0 at other action tokens, NaN where the mask is 0.
        rewards: (B,) float32: reward of the trajectory, which is the same for all of its rows.
        groups: (B,) int64: index of the group.
        trajectory_index: (B,) int64: index of the trajectory in the batch.
        row_index: (B,) int64: index of the row within its trajectory.
        temperatures: (B,) float32: sampling temperatures.
        versions: (B, T) int64: policy version that sampled the token; -1 where the mask is 0.
        lengths: (B,) int64: number of tokens.
        truncated: (B,) bool: True for the last row of a trajectory that was cut off by a limit.
        returns: (B, T): targets of the value loss.
        values: (B, T): values that the value head predicted before the update.
        kept_mass: (B, T): probability mass kept by top-p, top-k, min-p or a constraint; None if no row was sampled
            under any of these.
        ref_logprobs: (B, T): logprobs under the reference policy.
        row_keys: (B, T) int64: keys that determine which rows share computation (`Row.keys`); None if no row has
            images, in which case the ids are the keys.
        dropped: Excluded trajectories and rows, with reasons.
        imitation: Whether the batch was created with `collate(imitate=)`. If so, the mask is True at imitated tokens,
            which need no logprobs, and `advantages` contains the weights of these tokens.
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
    row_keys: Tensor | None = None
    dropped: tuple[Dropped, ...] = ()
    imitation: bool = False

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of the trajectories, in the order of the batch."""
        return tuple(t.rows[i] for t, i in zip(self.trajectories, self.row_index.tolist(), strict=True))

    @cached_property
    def images(self) -> tuple[tuple[ImageSpan, ...], ...] | None:
        """Spans of images in each row; None if no row has images."""
        return None if self.row_keys is None else tuple(row.images for row in self.rows)

    @property
    def first_rows(self) -> Tensor:
        """Indices of the first row of each trajectory, int64, for statistics that count each trajectory once."""
        return torch.from_numpy(np.sort(np.unique(self.trajectory_index.numpy(), return_index=True)[1]))

    def check(self) -> None:
        """Check the shapes and values of all tensors.

        `ppo_step` calls this method, because batches may be modified after `collate`.

        Raises:
            AlignmentError: If a tensor has the wrong shape or contains invalid values. The message names the tensor.
        """
        shape = (len(self), self.ids.shape[1])
        for name in (*_ROW_FIELDS, *_PADDING):
            value = getattr(self, name)
            if value is not None:
                check_shape(name, value, shape[:1] if name in _ROW_FIELDS else shape)
        for name in ("mask", "attention"):
            if getattr(self, name).dtype != torch.bool:
                raise AlignmentError(f"{name} must be a bool tensor, got {getattr(self, name).dtype}")
        # Reject values that would silently make the loss wrong.
        column = torch.arange(shape[1])
        requirements = [
            ("mask must be False on padding", self.mask & (column >= self.lengths[:, None])),
            ("mask must be False at position 0, which is never predicted", self.mask & (column == 0)),
            ("ids must not be negative", self.ids < 0),
            ("temperatures must be above 0", ~(self.temperatures > 0)),
        ]
        if self.imitation:
            valid = torch.isfinite(self.advantages) & (self.advantages >= 0)
            requirements += [("weights (advantages) must be finite numbers of at least 0", self.mask & ~valid)]
        else:
            requirements += [
                ("logprobs must be finite where the mask is 1", self.mask & ~torch.isfinite(self.logprobs)),
                ("logprobs must not be above 0", self.mask & (self.logprobs > 1e-3)),
                ("rewards must be finite", ~torch.isfinite(self.rewards)),
            ]
        for requirement, violated in requirements:
            if bool(violated.any()):
                raise AlignmentError(f"{requirement}; the first violation is at {violated.nonzero()[0].tolist()}")

    def replace(self, **changes: Any) -> Batch:
        """Return a copy of the batch with some tensors replaced.

        Per-token tensors such as advantages are converted to float32 and set to NaN where the mask is 0.

        Args:
            changes: New values, keyed by field name.

        Raises:
            AlignmentError: If the shape of a per-token tensor is not (B, T).
        """
        mask = changes.get("mask", self.mask)
        for name, value in changes.items():
            if name in _MASKED_FIELDS and value is not None:
                check_shape(name, value, self.ids.shape)
                changes[name] = torch.where(mask, value.float(), torch.nan)
        return replace(self, **changes)

    def select(self, rows: Tensor) -> Batch:
        """Return a batch of the rows with the given indices, (n,) int64, in the order of the indices."""
        tensors = {name: getattr(self, name) for name in (*_ROW_FIELDS, *_PADDING)}
        chosen: dict[str, Any] = {name: x[rows] for name, x in tensors.items() if x is not None}
        return replace(self, trajectories=tuple(self.trajectories[i] for i in rows.tolist()), **chosen)

    def __repr__(self) -> str:
        left = f", {len(self.dropped)} left out" if self.dropped else ""
        return f"Batch({len(self)} rows, {self.ids.shape[1]} wide, {int(self.mask.sum())} action tokens{left})"


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches. Groups and trajectories stay distinct. Optional fields that any batch lacks are dropped."""
    width = max(b.ids.shape[1] for b in batches)
    out: dict[str, Any] = {}
    for name in (*_ROW_FIELDS, *_PADDING):
        parts = [getattr(b, name) for b in batches]
        if name == "row_keys" and any(part is not None for part in parts):
            parts = [b.ids if b.row_keys is None else b.row_keys for b in batches]
        if any(part is None for part in parts):
            continue
        if name in _PADDING:
            parts = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=_PADDING[name]) for p in parts]
        elif name in ("groups", "trajectory_index"):
            offsets = itertools.accumulate((int(p.max()) + 1 for p in parts), initial=0)
            parts = [p + offset for p, offset in zip(parts, offsets, strict=False)]
        out[name] = torch.cat(parts)
    return Batch(
        trajectories=tuple(t for b in batches for t in b.trajectories),
        **out,
        dropped=tuple(d for b in batches for d in b.dropped),
        imitation=batches[0].imitation,
    )
