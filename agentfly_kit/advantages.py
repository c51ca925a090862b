"""Advantages: rewards (and values) in, one number a trajectory or a token out.

Pure functions: no model, no config object, no gradient. They do not know what a trajectory, a tool or a tokenizer is,
and not what the loss does with the result. Lists, arrays and tensors of any float type are taken; half precision is
computed and returned in float32.

What all of them keep to: a reward that is NaN (or None in a list) is unscored, is left out of every mean and gets
advantage 0; an infinite one raises. Whatever stands where the mask is 0 is never read, so that inserting observation
tokens anywhere changes no action's advantage. Axis letters: N trajectories (or rows), K rewards, B rows, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError


class Listable(Protocol):
    """A numpy array or a pandas series, without importing either."""

    def tolist(self) -> Any: ...


Numbers: TypeAlias = Sequence[Any] | Listable | Tensor
Groups: TypeAlias = Iterable[Hashable] | Tensor
Std: TypeAlias = Literal["sample", "population"] | None
Singleton: TypeAlias = Literal["zero", "raw"]
Observations: TypeAlias = Literal["skip", "step"]

__all__ = [
    "arpo",
    "branch_weights",
    "dr_grpo",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rollout_level",
    "whiten",
]


# --- what comes in -------------------------------------------------------------------------------


def _none_to_nan(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_none_to_nan(v) for v in x]
    return float("nan") if x is None else x


def _tensor(x: Any, name: str, like: Tensor | None = None) -> Tensor:
    """A detached float tensor, float32 or wider: sums in half precision lose whole rewards."""
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


def _bool(mask: Any, like: Tensor, name: str = "mask") -> Tensor:
    m = mask.detach() if isinstance(mask, Tensor) else torch.as_tensor(mask)
    if m.shape != like.shape:
        raise AlignmentError(f"{name} has shape {tuple(m.shape)}, the rewards {tuple(like.shape)}; give equal shapes")
    return m.to(device=like.device, dtype=torch.bool)


def _no_inf(x: Tensor, name: str) -> None:
    if bool(torch.isinf(x).any()):
        where = torch.isinf(x).nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is infinite; give a finite number, or NaN for unscored")


def _choose(name: str, given: object, wanted: tuple[object, ...]) -> None:
    if given not in wanted:
        raise SettingsError(f"{name}={given!r}; wanted one of {', '.join(map(repr, wanted))}")


def _group_index(groups: Groups, n: int, device: torch.device) -> Tensor:
    """(N,) group of each row as 0, 1, 2, ...; ids may be ints, strings or anything hashable."""
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
class _Grouped:
    """Rewards with their groups; every method gives each row a number of its own group's scored members."""

    reward: Tensor  # (N,), 0 where unscored
    scored: Tensor  # (N,) bool
    index: Tensor  # (N,)

    @classmethod
    def of(cls, rewards: Numbers, groups: Groups) -> _Grouped:
        r = _tensor(rewards, "rewards")
        if r.ndim != 1:
            raise AlignmentError(f"rewards has shape {tuple(r.shape)}; wanted (N,), one number a trajectory")
        _no_inf(r, "rewards")
        scored = ~torch.isnan(r)
        return cls(torch.where(scored, r, 0.0), scored, _group_index(groups, len(r), r.device))

    @property
    def slots(self) -> int:
        return int(self.index.max()) + 1 if self.index.numel() else 0

    def total(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, 0.0)
        return x.new_zeros(self.slots).index_add(0, self.index, x)[self.index]

    @property
    def count(self) -> Tensor:
        return self.total(self.scored.to(self.reward.dtype))

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.count.clamp(min=1)

    def _largest(self, x: Tensor) -> Tensor:
        x = torch.where(self.scored, x, -torch.inf)
        top = x.new_full((self.slots,), -torch.inf).scatter_reduce(0, self.index, x, "amax")
        return top[self.index]

    @property
    def flat(self) -> Tensor:
        """Where the scored rewards of a group are all equal."""
        return self._largest(self.reward) == -self._largest(-self.reward)

    def against(self, weights: Tensor) -> Tensor:
        """Reward minus the group's weighted mean; exactly 0 where a group is flat.

        Without that rule three rewards of 0.1 leave a residue of 1e-9, and dividing it by a std of the same size makes
        an advantage out of rounding. Weights that are all 0 count as equal.
        """
        none = self.total(weights) <= 0
        w = torch.where(none, 1.0, weights)
        mean = self.total(w * self.reward) / torch.where(self.scored, self.total(w), 1.0)
        return torch.where(self.flat | ~self.scored, 0.0, self.reward - mean)

    def centred(self) -> Tensor:
        return self.against(torch.ones_like(self.reward))

    def std(self, kind: Std, eps: float) -> Tensor:
        """Std + eps; 1 for `kind=None`."""
        if kind is None:
            return torch.ones_like(self.reward)
        n = self.count - 1 if kind == "sample" else self.count
        variance = self.total(self.centred().square()) / n.clamp(min=1)
        return torch.sqrt(variance) + eps

    def singleton(self, advantages: Tensor, rule: Singleton) -> Tensor:
        """The advantage of a row alone in its group: 0, or its own reward."""
        return torch.where(self.count == 1, self.reward if rule == "raw" else 0.0, advantages)


# --- one advantage a trajectory ------------------------------------------------------------------


def grpo(
    rewards: Numbers, groups: Groups, *, std: Std = "sample", singleton: Singleton = "zero", eps: float = 1e-6
) -> Tensor:
    """Advantage of each trajectory against its own group: (r - mean) / (std + eps).

    Shapes:  rewards (N,), groups (N,) ints or strings -> (N,).
    Units:   reward in; group standard deviations out (reward, with std=None).
    Raises:  ValueError if a reward is infinite. NaN is unscored: left out, advantage 0.
    Source:  DeepSeekMath, arXiv 2402.03300, 4.1.2. It does not say which std: see `std`. Nor what a group of one gets:
             see `singleton`. A group whose rewards are all equal gives exactly 0.
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    return g.singleton(g.centred() / g.std(std, eps), singleton)


def dr_grpo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Reward minus group mean, not divided by a std, so that easy and hard tasks keep their own weight.

    Shapes:  rewards (N,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN is unscored.
    Source:  Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2. Its other half is the aggregation "fixed".
    """
    return grpo(rewards, groups, std=None, singleton=singleton)


def rloo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Reward minus the mean reward of the *other* trajectories of its group.

    Shapes:  rewards (N,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN is unscored.
    Source:  Back to Basics, arXiv 2402.14740. A trajectory alone in its group has no others: see `singleton`.
    """
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1), which keeps a flat group at exactly 0.
    return g.singleton(g.centred() * g.count / (g.count - 1).clamp(min=1), singleton)


def remax(rewards: Numbers, groups: Groups | None = None, *, baselines: Numbers) -> Tensor:
    """Reward minus the reward of the greedy answer to the same task.

    Shapes:  rewards (N,), baselines (N,) -> (N,). groups is not read; it is there so that all are called alike.
    Units:   reward.
    Raises:  ValueError if a reward or a baseline is infinite. NaN in either is unscored.
    Source:  ReMax, arXiv 2310.10505.
    """
    r = _tensor(rewards, "rewards")
    b = _tensor(baselines, "baselines", r)
    if r.shape != b.shape or r.ndim != 1:
        raise AlignmentError(f"rewards {tuple(r.shape)}, baselines {tuple(b.shape)}; wanted (N,) twice")
    _no_inf(r, "rewards")
    _no_inf(b, "baselines")
    return torch.nan_to_num(r - b, nan=0.0)


def opo(rewards: Numbers, groups: Groups, *, lengths: Numbers, singleton: Singleton = "zero") -> Tensor:
    """Reward minus the length-weighted mean reward of the group.

    It is the baseline of least variance if the squared size of a trajectory's gradient grows with its length.

    Shapes:  rewards (N,), groups (N,), lengths (N,) in *action* tokens -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite, or a length of a scored trajectory is negative or not finite.
    Source:  OPO, arXiv 2505.23585, its practical baseline.
    """
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    n = _tensor(lengths, "lengths", g.reward)
    if n.shape != g.reward.shape:
        raise AlignmentError(f"lengths has shape {tuple(n.shape)}; wanted {tuple(g.reward.shape)}")
    n = _finite(torch.where(n < 0, torch.nan, n), g.scored, "lengths", "of action tokens, 0 or more")
    return g.singleton(g.against(n), singleton)


def gpg(
    rewards: Numbers,
    groups: Groups,
    *,
    std: Std = None,
    singleton: Singleton = "zero",
    rescale: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Reward minus group mean, scaled up by the share of trajectories that carry no gradient.

    A group whose rewards are all equal adds nothing to the sum but stays in the denominator; rescale=True multiplies by
    scored trajectories / those in groups that are not flat. verl's code counts non-zero *rewards* there instead, which
    agrees with this only by accident.

    Shapes:  rewards (N,), groups (N,) -> (N,).
    Units:   reward, times at least 1.
    Raises:  ValueError if a reward is infinite. NaN is unscored.
    Source:  GPG, arXiv 2504.02546, "accurate gradient estimation"; its F_norm is `std`, by default none.
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    a = g.singleton(g.centred() / g.std(std, eps), singleton)
    live = (g.scored & ~g.flat).sum()
    return a * g.scored.sum() / live if rescale and int(live) else a


def grpo_passk(
    rewards: Numbers,
    groups: Groups,
    *,
    k: int | None = None,
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """What a trajectory adds to the *best* reward among k.

    The mean, over the k-subsets of its group that contain it, of the best with it minus the best without it. k=None is
    the whole group: then only the best trajectory gets anything, its lead over the second (verl). Averaged over
    trajectories and times k it is, with std=None, an unbiased gradient of the expected best of k. A group with fewer
    than k scored trajectories uses all it has.

    Shapes:  rewards (N,), groups (N,) -> (N,), never negative.
    Units:   group standard deviations (reward, with std=None).
    Raises:  SettingsError for k < 2; k = 1 is `grpo`. ValueError if a reward is infinite. NaN is unscored.
    Source:  k = group: arXiv 2503.19595; any k: PKPO, arXiv 2505.15201 (leave one out of each subset).
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    if k is not None and k < 2:
        raise SettingsError(f"k={k!r}; wanted 2 or more, or None for the whole group (k=1 is grpo)")
    g = _Grouped.of(rewards, groups)
    out = torch.zeros_like(g.reward)
    for slot in range(g.slots):
        rows = ((g.index == slot) & g.scored).nonzero().flatten()
        n = len(rows)
        if n < 2:
            continue
        size = n if k is None else min(k, n)
        rows = rows[torch.argsort(g.reward[rows], stable=True)]
        best = g.reward[rows].tolist()
        # In a subset where the sorted i-th is best, the sorted j-th is second in C(j, size - 2) ways.
        ways = [comb(j, size - 2) / comb(n - 1, size - 1) for j in range(n)]
        lead = [sum(ways[j] * (best[i] - best[j]) for j in range(i)) for i in range(n)]
        out[rows] = torch.tensor(lead, dtype=out.dtype, device=out.device)
    return g.singleton(out / g.std(std, eps), singleton)


def gdpo(
    rewards: Numbers,
    groups: Groups,
    *,
    weights: Sequence[float] | None = None,
    whiten: bool = True,
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Several rewards, each normalised in its group before they are added, so that none drowns another.

    The sum is then whitened over all scored trajectories of the call (whiten=True), so that its size does not grow with
    the number of rewards.

    Shapes:  rewards (N, K), groups (N,), weights (K,), default 1 each -> (N,).
    Units:   standard deviations.
    Raises:  ValueError if a reward is infinite. A trajectory with a NaN among its rewards is unscored altogether.
    Source:  GDPO, arXiv 2601.05242. verl's code whitens over tokens, so that long rows count more; this counts rows.
    """
    _choose("std", std, ("sample", "population", None))
    r = _tensor(rewards, "rewards")
    if r.ndim != 2:
        raise AlignmentError(f"rewards has shape {tuple(r.shape)}; wanted (N, K), one column a reward")
    w = [1.0] * r.shape[1] if weights is None else list(weights)
    if len(w) != r.shape[1]:
        raise AlignmentError(f"{len(w)} weights for {r.shape[1]} rewards; give one weight for each")
    scored = ~torch.isnan(r).any(1)
    out = torch.zeros(len(r), dtype=r.dtype, device=r.device)
    for j, weight in enumerate(w):
        column = torch.where(scored, r[:, j], torch.nan)
        out = out + weight * grpo(column, groups, std=std, singleton=singleton, eps=eps)
    return _whiten(out, scored, std, eps, "gdpo") if whiten and len(out) else out


def maxrl(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """(r - mean) / mean of the group: the gradient of log success instead of success, so that hard tasks weigh more.

    For rewards 0 and 1 and a group of n, its mean over rows is an unbiased gradient of log p cut off after n - 1 terms,
    sum_{k<n-1} (1 - p)^k grad p.

    Shapes:  rewards (N,), groups (N,) -> (N,). A group of zeros gives zeros.
    Units:   group means.
    Raises:  ValueError if a reward is infinite or negative: it stands for a chance of success. NaN is unscored.
    Source:  MaxRL, arXiv 2602.02710, Algorithm 1.
    """
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    if bool((g.reward < 0).any()):
        at = int((g.reward < 0).nonzero()[0])
        raise ValueError(f"rewards[{at}] is {g.reward[at].item()}; maxrl wants rewards of 0 or more, success as 1")
    mean = g.mean(g.reward)
    return g.singleton(torch.where(mean > 0, g.centred() / torch.where(mean > 0, mean, 1.0), 0.0), singleton)


def rollout_level(
    rewards: Numbers,
    groups: Groups,
    *,
    rollouts: Groups,
    estimator: Callable[..., Tensor] = grpo,
    **options: Any,
) -> Tensor:
    """One advantage a *rollout*, handed to all of its rows.

    Estimated by row, a rollout of many rows pulls its group's mean towards its own reward: with rewards 1 and 0 in
    three rows and one, row level gives 0.5, 0.5, 0.5, -1.5 where rollout level gives ±0.7071.

    Shapes:  rewards, groups, rollouts (N,), one entry a row -> (N,).
    Units:   the estimator's; options are handed on to it.
    Raises:  ValueError if the rows of one rollout differ in group or in reward.
    Source:  Agent Lightning v1, its rollout-level advantage.
    """
    r = _tensor(rewards, "rewards")
    ids = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    group = _group_index(groups, len(r), r.device)
    index = _group_index(rollouts, len(r), r.device)
    first: dict[int, int] = {}
    for row, rollout in enumerate(index.tolist()):
        head = first.setdefault(rollout, row)
        same = bool(r[row] == r[head]) or bool(r[row].isnan() and r[head].isnan())
        if not same or group[row] != group[head]:
            raise ValueError(
                f"rows {head} and {row} are of one rollout, with rewards {r[head].item():g} and {r[row].item():g}, "
                f"groups {ids[head]!r} and {ids[row]!r}; give all rows of a rollout its one reward and group"
            )
    heads = list(first.values())
    return estimator(r[heads], group[heads], **options)[index]


# --- one advantage a turn ------------------------------------------------------------------------


def _ragged(rows: list[list[float]], like: Tensor) -> Tensor:
    """(N, K), 0 after the end of each row."""
    width = max(map(len, rows), default=0)
    return torch.tensor([r + [0.0] * (width - len(r)) for r in rows], dtype=like.dtype, device=like.device).reshape(
        len(rows), width
    )


def gigpo(
    rewards: Numbers,
    groups: Groups,
    *,
    turn_rewards: Sequence[Sequence[float | None]],
    states: Sequence[Sequence[Hashable]],
    weight: float = 1.0,
    gamma: float = 0.95,
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """GRPO over trajectories plus `weight` times GRPO over the turns that started in the same state.

    A turn's own number is the discounted reward from it on; it is compared with the turns, of all trajectories of the
    group, whose state (anything hashable: an observation, a page) is equal.

    Shapes:  rewards (N,), groups (N,); turn_rewards, states: N lists, one entry a turn -> (N, K), K the most turns, 0
             after a trajectory's last. turn_rewards holds the outcome too, on the turn that earned it.
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError if a reward is infinite. A trajectory with a NaN reward, or one on a turn, is unscored.
    Source:  GiGPO, arXiv 2505.10978, 4; std=None is its F_norm = 1.
    """
    r = _tensor(rewards, "rewards")
    if not len(r) == len(turn_rewards) == len(states):
        raise AlignmentError(f"{len(r)} rewards, {len(turn_rewards)} rows of turn_rewards, {len(states)} of states")
    index = _group_index(groups, len(r), r.device).tolist()
    per_turn: list[list[float]] = []
    for i, (given, at) in enumerate(zip(turn_rewards, states, strict=True)):
        row = _tensor(given, f"turn_rewards[{i}]").tolist()
        if len(row) != len(at):
            raise AlignmentError(f"trajectory {i}: {len(row)} turn rewards, {len(at)} states; give one each a turn")
        to_come = 0.0
        per_turn.append([to_come := x + gamma * to_come for x in reversed(row)][::-1])
    sums = torch.tensor([sum(x) for x in per_turn], dtype=r.dtype, device=r.device)  # NaN or inf if a turn has it
    _no_inf(sums, "turn_rewards")
    r = torch.where(torch.isnan(sums), torch.nan, r)
    episode = grpo(r, index, std=std, singleton=singleton, eps=eps)
    scored = (~torch.isnan(r)).tolist()
    flat = [x if scored[i] else float("nan") for i, row in enumerate(per_turn) for x in row]
    keys = [(index[i], state) for i, row in enumerate(states) for state in row]
    step = grpo(torch.tensor(flat, dtype=r.dtype, device=r.device), keys, std=std, singleton=singleton, eps=eps)
    pieces = step.split([len(row) for row in per_turn]) if len(flat) else [step] * len(per_turn)
    return _ragged([(episode[i] + weight * x if scored[i] else x).tolist() for i, x in enumerate(pieces)], r)


def branch_weights(leaves: Sequence[Sequence[Hashable]], groups: Groups) -> Tensor:
    """Weight of each leaf of a group's tree of turns: the product of 1 / branches along its path.

    The weights of a group sum to 1. A weighted mean over leaves is then unbiased where a plain one is not: a chain that
    was forked often has many leaves and outvotes the others. (Unbiased as long as the number of branches at a turn is
    settled before they are sampled; topping a group up with fresh chains afterwards breaks it at the root.)

    Shapes:  leaves: N paths of turn ids from the first turn to the last, equal ids within a group being the same turn;
             groups (N,) -> (N,) float64.
    Raises:  ValueError if two leaves of a group have one path, or a turn has two parents.
    """
    index = _group_index(groups, len(leaves), torch.device("cpu")).tolist()
    children: dict[Hashable, set[Hashable]] = {}
    parent: dict[Hashable, Hashable] = {}
    ends: set[Hashable] = set()
    for g, path in zip(index, leaves, strict=True):
        if not path:
            raise ValueError("a leaf has an empty path; give the ids of its turns")
        if (g, path[-1]) in ends:
            raise ValueError(f"two leaves end in turn {path[-1]!r}; give each leaf once")
        ends.add((g, path[-1]))
        for above, turn in zip((None, *path), path, strict=False):
            if parent.setdefault((g, turn), (g, above)) != (g, above):
                raise ValueError(f"turn {turn!r} has two parents in one group; give every turn its own id")
            children.setdefault((g, above), set()).add(turn)
    weights = []
    for g, path in zip(index, leaves, strict=True):
        w = 1.0
        for above in (None, *path[:-1]):
            w /= len(children[(g, above)])
        weights.append(w)
    return torch.tensor(weights, dtype=torch.float64)


def arpo(
    rewards: Numbers,
    groups: Groups,
    *,
    leaves: Sequence[Sequence[Hashable]],
    attribution: Literal["soft", "hard", "inverse_branching"] = "soft",
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Advantages of the turns of forked chains: one row a leaf, shared turns repeated in every row that has them.

    soft: GRPO over the leaves, the same on all turns of a row. hard: a turn shared by several leaves gets the mean of
    their advantages, the others their own; with a token mean or sum and inside the clip it has the gradient of soft.
    inverse_branching: mean and std are weighted by `branch_weights`, and a row's advantage is multiplied by its weight
    times the group's leaves, so that forking does not move what is estimated. Without forks all three are `grpo`.

    Shapes:  rewards, groups (N,), one entry a leaf; leaves as in `branch_weights` -> (N, K), K the longest path.
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError if a reward is infinite, or for `leaves` that are not a tree. NaN is unscored.
    Source:  ARPO, arXiv 2507.19849, 3.2 and Appendix C.2; inverse_branching is this kit's.
    """
    _choose("attribution", attribution, ("soft", "hard", "inverse_branching"))
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    g = _Grouped.of(rewards, groups)
    if len(leaves) != len(g.reward):
        raise AlignmentError(f"{len(leaves)} leaves for {len(g.reward)} rewards; give one path for each reward")
    weights = branch_weights(leaves, groups).to(g.reward)
    if attribution == "inverse_branching":
        w = torch.where(g.scored, weights, 0.0)
        w = w / g.total(w).clamp(min=torch.finfo(w.dtype).tiny)
        a = g.against(w)
        if std is not None:
            # Of equal weights 1/n the correction leaves (n - 1) / n, as it must.
            grain = 1 - g.total(w.square()) if std == "sample" else torch.ones_like(w)
            variance = g.total(w * a.square()) / torch.where(grain > 0, grain, 1.0)
            a = a / (torch.sqrt(variance) + eps)
        a = g.singleton(g.count * w * a, singleton)
    else:
        a = g.singleton(g.centred() / g.std(std, eps), singleton)
    if attribution != "hard":
        return _ragged([[x] * len(path) for x, path in zip(a.tolist(), leaves, strict=True)], a)
    through: dict[Hashable, list[float]] = {}
    rows = list(zip(a.tolist(), g.scored.tolist(), g.index.tolist(), leaves, strict=True))
    for x, scored, group, path in rows:
        for turn in path if scored else ():
            through.setdefault((group, turn), []).append(x)
    mean = {turn: sum(xs) / len(xs) for turn, xs in through.items()}
    return _ragged([[mean[(grp, t)] if scored else 0.0 for t in path] for _, scored, grp, path in rows], a)


# --- one advantage a token -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """Token rewards with their mask: rewards are 0 and the mask is False on rows that are not scored."""

    reward: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    flat: bool  # given as (T,)

    @classmethod
    def of(cls, token_rewards: Numbers, mask: Any) -> _Tokens:
        r = _tensor(token_rewards, "token_rewards")
        if r.ndim not in (1, 2):
            raise AlignmentError(f"token_rewards has shape {tuple(r.shape)}; wanted (B, T), or (T,) for one row")
        m = _bool(mask, r)
        flat = r.ndim == 1
        if flat:
            r, m = r.unsqueeze(0), m.unsqueeze(0)
        r = torch.where(m, r, 0.0)
        _no_inf(r, "token_rewards")
        scored = ~torch.isnan(r).any(1, keepdim=True)
        return cls(torch.where(scored, r, 0.0), m & scored, flat)

    def align(self, x: Any, name: str) -> Tensor:
        given = _tensor(x, name, self.reward)
        if self.flat and given.ndim == 1:
            given = given.unsqueeze(0)
        if given.shape != self.reward.shape:
            raise AlignmentError(f"{name} has shape {tuple(given.shape)}; wanted {tuple(self.reward.shape)}")
        return given

    def out(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, 0.0)
        return x.squeeze(0) if self.flat else x


def _finite(x: Tensor, where: Tensor, name: str, why: str) -> Tensor:
    """x, 0 where it is not needed; an error names the first place that is needed and not finite."""
    bad = where & ~torch.isfinite(x)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(f"{name}{place} is {x[tuple(place)].item()}; wanted a finite number {why}")
    return torch.where(where, x, 0.0)


def _backward(reward: Tensor, value: Tensor, steps: Tensor, discount: Tensor, lam: float, last: Tensor) -> Tensor:
    """The GAE recursion over the positions where `steps` is true; all others are stepped over.

    discount (B, T) is applied between a step and the step after it; last (B,) is the value after the last step.
    """
    adv = torch.zeros_like(reward)
    next_value, carry = last, torch.zeros_like(last)
    for t in range(reward.shape[1] - 1, -1, -1):
        d = discount[:, t]
        a = reward[:, t] + d * next_value - value[:, t] + d * lam * carry
        adv[:, t] = a
        carry = torch.where(steps[:, t], a, carry)
        next_value = torch.where(steps[:, t], value[:, t], next_value)
    return torch.where(steps, adv, 0.0)


def _discounts(steps: Tensor, gamma: float, over_gaps: bool, like: Tensor) -> Tensor:
    """gamma, or gamma ** (distance to the next step) when observation tokens are discounted too."""
    if not over_gaps or gamma == 1.0:
        return torch.full_like(like, gamma)
    out = torch.full_like(like, gamma)
    gap = torch.ones_like(like[:, 0])  # after the last step: one step to the end
    for t in range(like.shape[1] - 1, -1, -1):
        out[:, t] = gamma**gap
        gap = torch.where(steps[:, t], 1.0, gap + 1.0)
    # Positions after the last step must not lengthen its gap: they are padding, or nothing is sampled after them.
    after_last = steps.flip(1).cumsum(1).flip(1) == 1
    return torch.where(after_last, gamma, out)


def gae(
    token_rewards: Numbers,
    values: Numbers,
    mask: Any,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    turns: Any = None,
    bootstrap: Numbers | None = None,
    observations: Observations = "skip",
    discount_observations: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; raw (advantages, returns), 0 where masked, not whitened.

    A step is an action token or, with `turns`, a whole turn: its reward is the sum of its token rewards, its value is
    the one at its first action token, and all its action tokens get its advantage and return.

    observations="skip" (verl) steps over tokens with mask 0: the value after the last token of an action is the value
    of the next *action* token. "step" (TRL PPO, torchtune) makes an ordinary time step, discounted and read by the
    critic, of every token between a row's first and last action token: values must then be finite there too.
    discount_observations=True (slime) keeps skipping, but discounts by the distance in tokens.

    Shapes:  token_rewards, values, mask (B, T) or (T,); turns (B, T) ids, read at action tokens; bootstrap (B,), the
             value of the state in which a row was cut, 0 for a row that ended by itself.
    Units:   reward.
    Raises:  ValueError for an infinite reward, a value that is needed and not finite, a turn id that comes back after
             another. A row with a NaN reward at an action token is unscored: all 0.
    Source:  arXiv 1506.02438, eq. 16; turns: the same recursion with a turn for a step.
    """
    _choose("observations", observations, ("skip", "step"))
    tok = _Tokens.of(token_rewards, mask)
    v = tok.align(values, "values")
    r = tok.reward.to(v.dtype)
    last = torch.zeros_like(v[:, 0]) if v.shape[1] else v.new_zeros(v.shape[0])
    if bootstrap is not None:
        b = _tensor(bootstrap, "bootstrap", v).reshape(-1)
        if b.shape != last.shape:
            raise AlignmentError(f"bootstrap has shape {tuple(b.shape)}; wanted ({len(last)},), one value a row")
        last = _finite(b, tok.mask.any(1), "bootstrap", "(0 for a row that was not cut)")

    if turns is not None:
        if observations == "step" or discount_observations:
            raise SettingsError(
                "a turn is one step: with turns=, leave observations='skip', discount_observations=False"
            )
        return _turn_gae(tok, r, v, turns, gamma, lam, last)

    steps = tok.mask
    if observations == "step":
        # Between the first and the last action token. What comes after is padding or was never acted upon.
        steps = (tok.mask.cumsum(1) > 0) & (tok.mask.flip(1).cumsum(1).flip(1) > 0)
    why = "at every action token" if observations == "skip" else "between the first and last action token"
    v = _finite(v, steps, "values", why)
    adv = _backward(r, v, steps, _discounts(steps, gamma, discount_observations, v), lam, last)
    return tok.out(adv), tok.out(adv + v)


def _turn_gae(
    tok: _Tokens, r: Tensor, v: Tensor, turns: Any, gamma: float, lam: float, last: Tensor
) -> tuple[Tensor, Tensor]:
    ids = turns.detach() if isinstance(turns, Tensor) else torch.as_tensor(turns)
    ids = ids.unsqueeze(0) if tok.flat and ids.ndim == 1 else ids
    if ids.shape != r.shape:
        raise AlignmentError(f"turns has shape {tuple(ids.shape)}; wanted {tuple(r.shape)}")
    ids = ids.to(r.device)
    # A turn starts at an action token whose turn is not that of the action token before it.
    place = torch.where(tok.mask, torch.arange(r.shape[1], device=r.device), -1)
    before = torch.cat([torch.full_like(place[:, :1], -1), place[:, :-1]], 1).cummax(1).values
    start = tok.mask & ((before < 0) | (ids != ids.gather(1, before.clamp(min=0))))
    row, at = start.nonzero(as_tuple=True)
    seen: set[tuple[int, int]] = set()
    for b, t, turn in zip(row.tolist(), at.tolist(), ids[row, at].tolist(), strict=True):
        if (b, turn) in seen:
            raise ValueError(f"turns[{b}] comes back to turn {turn} at token {t}; number turns in order")
        seen.add((b, turn))
    slot = (start.cumsum(1) - 1).clamp(min=0)
    width = int(slot.max()) + 1 if slot.numel() else 0
    v = _finite(v, start, "values", "at the first action token of every turn")
    empty = r.new_zeros(r.shape[0], width)
    by_turn_r = empty.scatter_add(1, slot, r)
    by_turn_v = empty.scatter_add(1, slot, v)  # one value a turn: v is 0 off the starts
    exists = empty.scatter_add(1, slot, start.to(r.dtype)) > 0
    adv = _backward(by_turn_r, by_turn_v, exists, torch.full_like(empty, gamma), lam, last)
    return tok.out(adv.gather(1, slot)), tok.out((adv + by_turn_v).gather(1, slot))


def _whiten(x: Tensor, mask: Tensor, std: Std, eps: float, what: str) -> Tensor:
    n = mask.sum()
    if int(n) == 0:
        warnings.warn(
            f"{what}: no scored action token to whiten over; all advantages are 0", RuntimeWarning, stacklevel=3
        )
        return torch.zeros_like(x)
    kept = x[mask]
    if bool((kept == kept[0]).all()):
        return torch.zeros_like(x)  # as in a flat group: do not divide rounding by rounding
    mean = kept.mean()
    scale = 1.0 if std is None else kept.std(unbiased=std == "sample") + eps
    return torch.where(mask, (torch.where(mask, x, 0.0) - mean) / scale, 0.0)


def whiten(advantages: Numbers, mask: Any, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Shift and scale to mean 0 and std 1 over all action tokens of the batch; 0 where masked.

    Whiten the whole minibatch at once: the result depends on what is in it. std=None only shifts.

    Shapes:  advantages, mask (B, T) -> (B, T).
    Units:   standard deviations over action tokens.
    Raises:  ValueError if an advantage at an action token is not finite. No action token at all: zeros and a warning.
             Equal advantages everywhere: exactly 0.
    Source:  as in most PPO code; studied in arXiv 2006.05990 ("per minibatch advantage normalization").
    """
    _choose("std", std, ("sample", "population", None))
    a = _tensor(advantages, "advantages")
    m = _bool(mask, a)
    return _whiten(_finite(a, m, "advantages", "at every action token"), m, std, eps, "whiten")


def reinforce_plus_plus(
    token_rewards: Numbers,
    mask: Any,
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    discount_observations: bool = False,
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Discounted reward still to come at each action token, whitened over the batch.

    The return is carried *through* observation tokens: a frame that restarts it there punishes the first turn of a
    rollout that succeeded in its second. whiten=False gives the bare reward to come.

    Shapes:  token_rewards, mask (B, T) or (T,) -> the same.
    Units:   reward, or standard deviations over action tokens when whitened.
    Raises:  ValueError if a reward at an action token is infinite. A row with a NaN one is unscored: left out of the
             mean and std, all 0.
    Source:  REINFORCE++, arXiv 2501.03262; its KL penalty belongs in token_rewards.
    """
    _choose("std", std, ("sample", "population", None))
    tok = _Tokens.of(token_rewards, mask)
    zero = torch.zeros_like(tok.reward)
    discount = _discounts(tok.mask, gamma, discount_observations, zero)
    to_come = _backward(tok.reward, zero, tok.mask, discount, 1.0, zero[:, :1].sum(1))
    return tok.out(_whiten(to_come, tok.mask, std, eps, "reinforce_plus_plus") if whiten else to_come)


def reinforce_plus_plus_baseline(
    token_rewards: Numbers,
    mask: Any,
    *,
    groups: Groups,
    whiten: bool = True,
    singleton: Singleton = "zero",
    std: Std = "sample",
    eps: float = 1e-6,
) -> Tensor:
    """Reward of the row minus the mean of its group, on every action token, whitened over the batch.

    Shapes:  token_rewards, mask (B, T), groups (B,) -> (B, T).
    Units:   as in `reinforce_plus_plus`.
    Raises:  ValueError if a reward at an action token is infinite. A row with a NaN one is unscored.
    Source:  REINFORCE++, arXiv 2501.03262, the variant with a group baseline and global normalisation.
    """
    _choose("std", std, ("sample", "population", None))
    _choose("singleton", singleton, ("zero", "raw"))
    tok = _Tokens.of(token_rewards, mask)
    # A row without any scored action token has no say in its group's mean.
    row = torch.where(tok.mask.any(1), tok.reward.sum(1), torch.nan)
    per_token = grpo(row, groups, std=None, singleton=singleton).unsqueeze(1).expand_as(tok.reward)
    return tok.out(_whiten(per_token, tok.mask, std, eps, "reinforce_plus_plus_baseline") if whiten else per_token)


def optimal_token_baseline(
    token_rewards: Numbers,
    mask: Any,
    *,
    groups: Groups,
    logprobs: Numbers,
    sum_squared_probs: Numbers,
    singleton: Singleton = "zero",
) -> Tensor:
    """Reward to come minus a baseline of its own for each token position.

    The baseline is the group's mean reward to come at that position, each row weighted by the gradient it has gathered
    so far: the running sum over action tokens of |e_token - p|^2 = 1 - 2 p(token) + sum p^2, the squared length of the
    gradient of the token's logprob in its logits. Positions count action tokens. Where only one row of a group is that
    long, `singleton`: 0, or the bare reward to come (verl).

    Shapes:  token_rewards, mask, logprobs, sum_squared_probs (B, T), groups (B,) -> (B, T).
    Units:   reward.
    Raises:  ValueError for an infinite reward, or a logprob or sum that is not finite at an action token. A row with a
             NaN reward there is unscored.
    Source:  Optimal Token Baseline, arXiv 2602.07078, with its logit-gradient proxy.
    """
    _choose("singleton", singleton, ("zero", "raw"))
    tok = _Tokens.of(token_rewards, mask)
    lp = _finite(tok.align(logprobs, "logprobs"), tok.mask, "logprobs", "at every action token")
    squares = tok.align(sum_squared_probs, "sum_squared_probs")
    squares = _finite(squares, tok.mask, "sum_squared_probs", "at every action token")
    energy = torch.where(tok.mask, 1 - 2 * lp.exp() + squares, 0.0).clamp(min=0).cumsum(1)
    zero = torch.zeros_like(energy)
    to_come = _backward(tok.reward.to(energy.dtype), zero, tok.mask, zero + 1, 1.0, zero.sum(1))
    row, at = tok.mask.nonzero(as_tuple=True)
    position = tok.mask.cumsum(1)[row, at]
    group = _group_index(groups, len(energy), energy.device)[row]
    # One group for each (group, position), so that everything said of groups holds for positions.
    key = torch.unique(torch.stack([group, position], 1), dim=0, return_inverse=True)[1]
    g = _Grouped(to_come[row, at], torch.ones_like(row, dtype=torch.bool), key)
    out = zero.clone()
    out[row, at] = g.singleton(g.against(energy[row, at]), singleton)
    return tok.out(out)
