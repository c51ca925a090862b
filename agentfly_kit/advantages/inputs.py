"""Conversion and validation of the inputs of estimators, and statistics over groups and batches."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, check_choice, check_shape

# List, NumPy array, pandas series or tensor; None means NaN
Numbers: TypeAlias = Iterable[Any] | Tensor
Groups: TypeAlias = Iterable[Hashable] | Tensor
Std: TypeAlias = Literal["sample", "population", None]
Singleton: TypeAlias = Literal["zero", "raw"]
Observations: TypeAlias = Literal["skip", "step"]


def as_floats(x: Any, like: Tensor | None = None) -> Tensor:
    """Convert numbers to a detached float32 or float64 tensor, because half-precision sums lose small rewards."""
    if isinstance(x, Tensor):
        out = x.detach()
    else:
        out = torch.from_numpy(np.array(x, dtype=np.float64))
        if getattr(x, "dtype", None) != np.float64:
            out = out.to(torch.float32)
    if not out.dtype.is_floating_point or out.dtype.itemsize < 4:
        out = out.to(torch.float32)
    return out if like is None else out.to(device=like.device, dtype=torch.promote_types(out.dtype, like.dtype))


def as_bool_mask(mask: Any, like: Tensor) -> Tensor:
    m: Tensor = torch.as_tensor(mask)
    check_shape("mask", m, like.shape)
    return m.to(device=like.device, dtype=torch.bool)


def require_finite(x: Tensor, where: Tensor, name: str, why: str) -> Tensor:
    """Return x with 0 where `where` is False. Raise ValueError if another element is not finite."""
    bad = where & ~torch.isfinite(x)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} must be a finite number {why}, got {x[tuple(place)].item()}")
    return torch.where(where, x, 0.0)


def check_no_inf(x: Tensor, name: str) -> None:
    require_finite(x, ~torch.isnan(x), name, "or NaN for unscored")


def group_index(groups: Groups, n: int, device: torch.device) -> Tensor:
    """Return the group index of each row, (n,) int64. Group ids may be any hashable objects."""
    ids = groups.tolist() if isinstance(groups, Tensor) else groups
    seen: dict[Hashable, int] = {}
    index = [seen.setdefault(g, len(seen)) for g in ids]
    if len(index) != n:
        raise AlignmentError(f"groups must have one id per reward, got {len(index)} ids for {n} rewards")
    return torch.tensor(index, dtype=torch.long, device=device)


@dataclass(frozen=True)
class GroupedRewards:
    """Reward and group of each row. Methods return one value per row, computed from the scored rows of its group."""

    reward: Tensor  # (N,), 0 where unscored
    scored: Tensor  # (N,) bool
    index: Tensor  # (N,): index of the group

    @classmethod
    def from_rewards(cls, rewards: Numbers, groups: Groups) -> GroupedRewards:
        r = as_floats(rewards)
        if r.ndim != 1:
            raise AlignmentError(f"rewards must have the shape (N,), one per trajectory, got {tuple(r.shape)}")
        check_no_inf(r, "rewards")
        scored = ~torch.isnan(r)
        return cls(torch.where(scored, r, 0.0), scored, group_index(groups, len(r), r.device))

    @property
    def num_groups(self) -> int:
        return int(self.index.max()) + 1 if self.index.numel() else 0

    def group_sum(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, 0.0)
        return x.new_zeros(self.num_groups).index_add(0, self.index, x)[self.index]

    @property
    def count(self) -> Tensor:
        return self.group_sum(self.scored.to(self.reward.dtype))

    def _group_max(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, -torch.inf)
        top = x.new_full((self.num_groups,), -torch.inf).scatter_reduce(0, self.index, x, "amax")
        return top[self.index]

    @property
    def flat(self) -> Tensor:
        """Mask, (N,), that is True for rows in groups whose scored rewards are all equal."""
        return self._group_max(self.reward) == -self._group_max(-self.reward)

    def minus_weighted_mean(self, weights: Tensor) -> Tensor:
        """Subtract the weighted mean reward of its group from each reward. If all weights are 0, they count as equal.

        If all rewards of a group are equal, the result is exactly 0, because a later division by their std would
        amplify rounding errors.
        """
        none = self.group_sum(weights) <= 0
        w = torch.where(none, 1.0, weights)
        mean = self.group_sum(w * self.reward) / torch.where(self.scored, self.group_sum(w), 1.0)
        return torch.where(self.flat | ~self.scored, 0.0, self.reward - mean)

    def centred(self) -> Tensor:
        return self.minus_weighted_mean(torch.ones_like(self.reward))

    def grpo(self, std: Std, singleton: Singleton, eps: float) -> Tensor:
        return self.singleton(self.centred() / self.std(std, eps), singleton)

    def std(self, kind: Std, eps: float) -> Tensor:
        """Return the standard deviation of the rewards in each row's group plus eps, or 1 if `kind` is None."""
        check_choice("std", kind, Std)
        if kind is None:
            return torch.ones_like(self.reward)
        n = self.count - 1 if kind == "sample" else self.count
        return torch.sqrt(self.group_sum(self.centred().square()) / n.clamp(min=1)) + eps

    def singleton(self, advantages: Tensor, rule: Singleton) -> Tensor:
        """Set the advantage of a group's only scored row to 0, or to its reward if rule="raw"."""
        check_choice("singleton", rule, Singleton)
        return torch.where(self.count == 1, self.reward if rule == "raw" else 0.0, advantages)


class EpisodeRows:
    """Concatenates the rows of each trajectory into one long row, (B, T) -> (R, n T), and splits long rows again.

    The B rows of T tokens belong to R trajectories of at most n rows. Without `trajectory_index`, every row is a
    separate trajectory. The attribute `last_rows`, (R,), contains the index of each trajectory's last row.
    """

    def __init__(self, trajectory_index: Groups | None, rows: int, device: torch.device) -> None:
        self.index = group_index(range(rows) if trajectory_index is None else trajectory_index, rows, device)
        trajectories = self.index.tolist()
        counters: dict[int, Iterator[int]] = defaultdict(itertools.count)
        positions = [next(counters[i]) for i in trajectories]  # index of each row within its trajectory
        last_rows = {i: row for row, i in enumerate(trajectories)}
        self._position = torch.tensor(positions, dtype=torch.long, device=device)
        self._max_rows = max(positions, default=0) + 1
        self.last_rows = torch.tensor(list(last_rows.values()), dtype=torch.long, device=device)

    def concat(self, x: Tensor) -> Tensor:
        """Concatenate the rows of each trajectory. Trajectories with fewer rows are padded with 0 (False)."""
        out = x.new_zeros(len(self.last_rows), self._max_rows, x.shape[1])
        out[self.index, self._position] = x
        return out.flatten(1)

    def split(self, x: Tensor) -> Tensor:
        """Split the long row of each trajectory into its original rows. Inverse of `concat`."""
        rows: Tensor = x.unflatten(1, (self._max_rows, x.shape[1] // self._max_rows))
        return rows[self.index, self._position]

    def any_in_trajectory(self, rows: Tensor) -> Tensor:
        """Return a mask, (B,), of all rows of trajectories that have at least one row in the mask `rows`, (B,)."""
        return torch.zeros_like(self.index).index_add(0, self.index, rows.long())[self.index] > 0


@dataclass(frozen=True)
class TokenRewards:
    """Token rewards and the mask of action tokens. Unscored trajectories have rewards of 0 and no action tokens."""

    reward: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    is_1d: bool  # True if the rewards were given as (T,)
    rows: EpisodeRows

    @classmethod
    def from_arrays(cls, token_rewards: Numbers, mask: Any, trajectory_index: Groups | None = None) -> TokenRewards:
        r = as_floats(token_rewards)
        m = as_bool_mask(mask, r)
        lost = ~m & ~torch.isnan(r) & (r != 0)
        if bool(lost.any()):
            at = lost.nonzero()[0].tolist()
            raise ValueError(
                f"token_rewards{at} must be 0 or NaN, because the mask is 0 at this token, got "
                f"{r[tuple(at)].item():g}; assign the reward to the action token that earned it"
            )
        is_1d = r.ndim == 1
        r, m = torch.atleast_2d(r), torch.atleast_2d(m)
        r = torch.where(m, r, 0.0)
        check_no_inf(r, "token_rewards")
        rows = EpisodeRows(trajectory_index, len(r), r.device)
        scored = ~rows.any_in_trajectory(torch.isnan(r).any(1))[:, None]
        return cls(torch.where(scored, r, 0.0), m & scored, is_1d, rows)

    def align(self, x: Any, name: str) -> Tensor:
        """Convert per-token values to a float tensor. Raise AlignmentError if its shape differs from the rewards'."""
        given: Tensor = torch.atleast_2d(as_floats(x, self.reward))
        check_shape(name, given, self.reward.shape)
        return given

    def out(self, x: Tensor) -> Tensor:
        """Return x in the shape of the given rewards, with 0 where the mask is False."""
        x = torch.where(self.mask, x, 0.0)
        return x.squeeze(0) if self.is_1d else x


def whitened(x: Tensor, mask: Tensor, std: Std, eps: float, what: str) -> Tensor:
    """Normalize x to mean 0 and std 1 where the mask is True, and set it to 0 elsewhere. Warnings begin with `what`."""
    check_choice("std", std, Std)
    if not bool(mask.any()):
        warnings.warn(
            f"{what}: no scored action token to whiten over; all advantages are 0", RuntimeWarning, stacklevel=3
        )
        return torch.zeros_like(x)
    kept = x[mask]
    if bool((kept == kept[0]).all()):
        # All values are equal, so do not divide rounding errors by each other.
        return torch.zeros_like(x)
    mean = kept.mean()
    scale = 1.0 if std is None else kept.std(unbiased=std == "sample") + eps
    return torch.where(mask, (torch.where(mask, x, 0.0) - mean) / scale, 0.0)
