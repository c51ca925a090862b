"""Conversion and validation of the inputs of estimators: numbers, groups and masks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError


class Listable(Protocol):
    """NumPy array or pandas series, without importing either."""

    def tolist(self) -> Any: ...


Numbers: TypeAlias = Sequence[Any] | Listable | Tensor
Groups: TypeAlias = Iterable[Hashable] | Tensor
Std: TypeAlias = Literal["sample", "population"] | None
Singleton: TypeAlias = Literal["zero", "raw"]
Observations: TypeAlias = Literal["skip", "step"]


def _none_to_nan(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_none_to_nan(v) for v in x]
    return float("nan") if x is None else x


def as_floats(x: Any, name: str, like: Tensor | None = None) -> Tensor:
    """Convert to a detached tensor of float32 or wider, because sums in half precision lose whole rewards."""
    if isinstance(x, Tensor):
        out = x.detach()
    else:
        values = x.tolist() if hasattr(x, "tolist") else x  # numpy, pandas; object columns may hold None
        try:
            out = torch.tensor(_none_to_nan(values), dtype=torch.float64)
        except (TypeError, ValueError) as e:
            raise AlignmentError(
                f"{name} cannot become a tensor ({e}); give numbers, in rows of equal length"
            ) from None
        out = out.to(getattr(torch, str(getattr(x, "dtype", "")), torch.float32))
    if not out.dtype.is_floating_point or out.dtype.itemsize < 4:
        out = out.to(torch.float32)
    return out if like is None else out.to(device=like.device, dtype=torch.promote_types(out.dtype, like.dtype))


def as_bool_mask(mask: Any, like: Tensor, name: str = "mask") -> Tensor:
    m = mask.detach() if isinstance(mask, Tensor) else torch.as_tensor(mask)
    if m.shape != like.shape:
        raise AlignmentError(f"{name} has shape {tuple(m.shape)}, the rewards {tuple(like.shape)}; give equal shapes")
    return m.to(device=like.device, dtype=torch.bool)


def check_no_inf(x: Tensor, name: str) -> None:
    if bool(torch.isinf(x).any()):
        where = torch.isinf(x).nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is infinite; give a finite number, or NaN for unscored")


def require_finite(x: Tensor, where: Tensor, name: str, why: str) -> Tensor:
    """Return x, with 0 outside `where`. Raise ValueError with the first index inside that is not finite."""
    bad = where & ~torch.isfinite(x)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} is {x[tuple(place)].item()}; wanted a finite number {why}")
    return torch.where(where, x, 0.0)


def check_choice(name: str, given: object, wanted: tuple[object, ...]) -> None:
    if given not in wanted:
        raise SettingsError(f"{name}={given!r}; wanted one of {', '.join(map(repr, wanted))}")


def group_index(groups: Groups, n: int, device: torch.device) -> Tensor:
    """Number the groups 0, 1, 2, ... and return the number of each row, (N,). Ids may be any hashable objects."""
    if isinstance(groups, str):
        raise AlignmentError(f"groups={groups!r} is one string; give a list with a group id for each of {n} rows")
    if isinstance(groups, Tensor):
        groups = groups.tolist()
    seen: dict[Hashable, int] = {}
    index = [seen.setdefault(g, len(seen)) for g in groups]
    if len(index) != n:
        raise AlignmentError(f"{len(index)} group ids for {n} rewards; give one group id for each reward")
    return torch.tensor(index, dtype=torch.long, device=device)


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards with their groups. Methods return a statistic of the scored members of its group for each row."""

    reward: Tensor  # (N,), 0 where unscored
    scored: Tensor  # (N,) bool
    index: Tensor  # (N,)

    @classmethod
    def from_rewards(cls, rewards: Numbers, groups: Groups) -> GroupedRewards:
        r = as_floats(rewards, "rewards")
        if r.ndim != 1:
            raise AlignmentError(f"rewards has shape {tuple(r.shape)}; wanted (N,), one number per trajectory")
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

    def mean(self, x: Tensor) -> Tensor:
        return self.group_sum(x) / self.count.clamp(min=1)

    def _group_max(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, -torch.inf)
        top = x.new_full((self.num_groups,), -torch.inf).scatter_reduce(0, self.index, x, "amax")
        return top[self.index]

    @property
    def flat(self) -> Tensor:
        """True in groups whose scored rewards are all equal."""
        return self._group_max(self.reward) == -self._group_max(-self.reward)

    def minus_weighted_mean(self, weights: Tensor) -> Tensor:
        """Return reward minus the weighted mean of the group, and exactly 0 in flat groups.

        Otherwise three rewards of 0.1 would leave a residue of 1e-9, and dividing it by a std of the same size would
        turn rounding errors into an advantage. If all weights are 0, they are treated as equal.
        """
        none = self.group_sum(weights) <= 0
        w = torch.where(none, 1.0, weights)
        mean = self.group_sum(w * self.reward) / torch.where(self.scored, self.group_sum(w), 1.0)
        return torch.where(self.flat | ~self.scored, 0.0, self.reward - mean)

    def centred(self) -> Tensor:
        return self.minus_weighted_mean(torch.ones_like(self.reward))

    def std(self, kind: Std, eps: float) -> Tensor:
        """Return std + eps, or 1 for `kind=None`."""
        if kind is None:
            return torch.ones_like(self.reward)
        n = self.count - 1 if kind == "sample" else self.count
        variance = self.group_sum(self.centred().square()) / n.clamp(min=1)
        return torch.sqrt(variance) + eps

    def singleton(self, advantages: Tensor, rule: Singleton) -> Tensor:
        """Set the advantage of rows that are alone in their group: 0, or the reward itself."""
        return torch.where(self.count == 1, self.reward if rule == "raw" else 0.0, advantages)


class EpisodeRows:
    """Concatenation of the rows of each trajectory, in the given order: (B, T) to (R, n T) and back.

    Tokens in between (the padding of one row and the prompt of the next) are skipped like observations. Without
    `trajectory_index` every row is its own trajectory.
    """

    def __init__(self, trajectory_index: Groups | None, rows: int, device: torch.device) -> None:
        self.index = (
            torch.arange(rows, device=device)
            if trajectory_index is None
            else group_index(trajectory_index, rows, device)
        )
        seen: dict[int, int] = {}
        positions = []
        for trajectory in self.index.tolist():
            positions.append(seen.get(trajectory, 0))
            seen[trajectory] = positions[-1] + 1
        self.position = torch.tensor(positions, dtype=torch.long, device=device)
        self.num_trajectories, self.max_rows = len(seen), max(seen.values(), default=1)
        self.is_single_row = self.max_rows == 1

    def concat(self, x: Tensor) -> Tensor:
        """Concatenate rows; missing rows of a trajectory are 0 (False)."""
        if self.is_single_row:
            return x
        out = x.new_zeros(self.num_trajectories, self.max_rows, x.shape[1])
        out[self.index, self.position] = x
        return out.flatten(1)

    def split(self, x: Tensor) -> Tensor:
        return x if self.is_single_row else x.unflatten(1, (self.max_rows, -1))[self.index, self.position]

    @property
    def first_rows(self) -> Tensor:
        """Index of the first row of each trajectory, (R,)."""
        return (self.position == 0).nonzero()[:, 0]

    @property
    def last_rows(self) -> Tensor:
        """Index of the last row of each trajectory, (R,)."""
        last = dict(zip(self.index.tolist(), range(len(self.index)), strict=True))
        return torch.tensor([last[i] for i in range(self.num_trajectories)], dtype=torch.long, device=self.index.device)

    def any_in_trajectory(self, rows: Tensor) -> Tensor:
        """Return for each row whether any row of its trajectory is True, (B,)."""
        return torch.zeros_like(self.index).index_add(0, self.index, rows.long())[self.index] > 0


@dataclass(frozen=True)
class TokenRewards:
    """Token rewards with their mask. On unscored trajectories rewards are 0 and the mask is False."""

    reward: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    is_1d: bool  # given as (T,)
    rows: EpisodeRows

    @classmethod
    def from_arrays(cls, token_rewards: Numbers, mask: Any, trajectory_index: Groups | None = None) -> TokenRewards:
        r = as_floats(token_rewards, "token_rewards")
        if r.ndim not in (1, 2):
            raise AlignmentError(f"token_rewards has shape {tuple(r.shape)}; wanted (B, T), or (T,) for one row")
        m = as_bool_mask(mask, r)
        flat = r.ndim == 1
        if flat:
            r, m = r.unsqueeze(0), m.unsqueeze(0)
        r = torch.where(m, r, 0.0)
        check_no_inf(r, "token_rewards")
        rows = EpisodeRows(trajectory_index, len(r), r.device)
        scored = ~rows.any_in_trajectory(torch.isnan(r).any(1))[:, None]
        return cls(torch.where(scored, r, 0.0), m & scored, flat, rows)

    def align(self, x: Any, name: str) -> Tensor:
        given = as_floats(x, name, self.reward)
        if self.is_1d and given.ndim == 1:
            given = given.unsqueeze(0)
        if given.shape != self.reward.shape:
            raise AlignmentError(f"{name} has shape {tuple(given.shape)}; wanted {tuple(self.reward.shape)}")
        return given

    def out(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, 0.0)
        return x.squeeze(0) if self.is_1d else x
