"""Outcome-level estimators, which compute one advantage per trajectory, usually relative to its group mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from math import comb
from typing import Any, Literal

import torch
from torch import Tensor

from agentfly_kit.advantages.inputs import (
    EpisodeRows,
    GroupedRewards,
    Groups,
    Numbers,
    Singleton,
    Std,
    as_floats,
    check_no_inf,
    group_index,
    require_finite,
    whitened,
)
from agentfly_kit.errors import AlignmentError, check_shape


def grpo(
    rewards: Numbers, groups: Groups, *, std: Std = "sample", singleton: Singleton = "zero", eps: float = 1e-6
) -> Tensor:
    """Normalize each reward with the mean and std of its group: (reward - mean) / (std + eps).

    With std=None, there is no division. The advantage of a trajectory that is alone in its group is 0 or, with
    singleton="raw", its reward; DeepSeekMath specifies neither this case nor the kind of std. If all rewards of a group
    are equal, their advantages are exactly 0.

    Shapes:  rewards (N trajectories,), groups (N,) ints or strings -> (N,).
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError if a reward is infinite. A NaN reward is excluded from the mean, and its advantage is 0.
    Source:  DeepSeekMath, arXiv 2402.03300, 4.1.2.
    """
    return GroupedRewards.from_rewards(rewards, groups).grpo(std, singleton, eps)


def dr_grpo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Subtract the mean reward of the group. Dividing by the std would favor very easy and very hard tasks.

    Dr.GRPO combines this estimator with the loss aggregation "fixed" (see `af.losses.aggregate`).

    Shapes:  rewards (N trajectories,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN means unscored.
    Source:  Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2.
    """
    return grpo(rewards, groups, std=None, singleton=singleton)


def rloo(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Subtract the mean reward of the *other* trajectories in the group from each reward.

    The advantage of a trajectory that is alone in its group is 0 or, with singleton="raw", its reward.

    Shapes:  rewards (N trajectories,), groups (N,) -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite. NaN means unscored.
    Source:  Back to Basics, arXiv 2402.14740.
    """
    g = GroupedRewards.from_rewards(rewards, groups)
    # For n rewards, r - (sum - r) / (n - 1) = (r - mean) n / (n - 1), which is exactly 0 if all rewards are equal.
    return g.singleton(g.centred() * g.count / (g.count - 1).clamp(min=1), singleton)


def remax(rewards: Numbers, groups: Groups | None = None, *, baselines: Numbers) -> Tensor:
    """Subtract the reward of a greedy answer to the same task, given in `baselines`.

    Shapes:  rewards (N trajectories,), baselines (N,) -> (N,). groups is ignored: all estimators accept it.
    Units:   reward.
    Raises:  ValueError if a reward or a baseline is infinite. NaN in either means unscored.
    Source:  ReMax, arXiv 2310.10505.
    """
    r = as_floats(rewards)
    b = as_floats(baselines, r)
    check_shape("baselines", b, r.shape)
    check_no_inf(r, "rewards")
    check_no_inf(b, "baselines")
    return torch.nan_to_num(r - b, nan=0.0)


def opo(rewards: Numbers, groups: Groups, *, lengths: Numbers, singleton: Singleton = "zero") -> Tensor:
    """Subtract the length-weighted mean reward of the group.

    This baseline minimizes the variance of the gradient if the squared gradient norm of a trajectory is proportional to
    its length.

    Shapes:  rewards (N trajectories,), groups (N,), lengths (N,) in *action* tokens -> (N,).
    Units:   reward.
    Raises:  ValueError if a reward is infinite, or if the length of a scored trajectory is negative or not finite.
    Source:  OPO, arXiv 2505.23585 (the practical baseline).
    """
    g = GroupedRewards.from_rewards(rewards, groups)
    n = as_floats(lengths, g.reward)
    check_shape("lengths", n, g.reward.shape)
    n = require_finite(torch.where(n < 0, torch.nan, n), g.scored, "lengths", "of action tokens, 0 or more")
    return g.singleton(g.minus_weighted_mean(n), singleton)


def gpg(
    rewards: Numbers,
    groups: Groups,
    *,
    std: Std = None,
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Subtract the group mean and scale up to compensate for groups without gradient. Use with the loss `reinforce`.

    A group whose rewards are all equal has no gradient, but its tokens count in the denominator of the loss. The factor
    is the number of scored trajectories divided by the number of trajectories in groups with unequal rewards; verl
    divides by the number of nonzero *rewards* instead.

    Shapes:  rewards (N trajectories,), groups (N,) -> (N,).
    Units:   reward, times a factor of at least 1.
    Raises:  ValueError if a reward is infinite. NaN means unscored.
    Source:  GPG, arXiv 2504.02546, "accurate gradient estimation"; `std` is its F_norm, and std=None is F_norm = 1.
    """
    g = GroupedRewards.from_rewards(rewards, groups)
    a = g.grpo(std, singleton, eps)
    live = (g.scored & ~g.flat).sum()
    return a * g.scored.sum() / live if int(live) else a


def grpo_passk(
    rewards: Numbers,
    groups: Groups,
    *,
    k: int | None = None,
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Compute the contribution of each trajectory to the *best* reward among k trajectories of its group.

    The contribution is the amount by which the best reward of a k-subset drops without the trajectory, averaged over
    all k-subsets that contain it. With k=None, as in verl, or k above the group size, the whole group is used. With
    std=None, k times the mean policy gradient is an unbiased estimate of the gradient of the expected best reward of k
    samples.

    Shapes:  rewards (N trajectories,), groups (N,) -> (N,), never negative.
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError for k < 2 (use `grpo`), or if a reward is infinite. NaN means unscored.
    Source:  arXiv 2503.19595 for the whole group; PKPO, arXiv 2505.15201 (leave one out of each subset), for any k.
    """
    g = GroupedRewards.from_rewards(rewards, groups)
    out = torch.zeros_like(g.reward)
    for slot in range(g.num_groups):
        rows = ((g.index == slot) & g.scored).nonzero().flatten()
        n = len(rows)
        if n < 2:
            continue
        size = n if k is None else min(k, n)
        rows = rows[torch.argsort(g.reward[rows], stable=True)]
        best = g.reward[rows].tolist()
        # Rewards are sorted. Among the subsets with best element i, the second-best is j in C(j, size - 2) of them.
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
    """Compute a weighted sum of several rewards, each normalized within its group so that none dominates.

    With whiten=True, the sum is then whitened over all scored trajectories of the call, so that its scale does not grow
    with the number of rewards.

    Shapes:  rewards (N trajectories, K rewards), groups (N,), weights (K,), 1 by default -> (N,).
    Units:   standard deviations.
    Raises:  ValueError if a reward is infinite. A trajectory with a NaN among its rewards is unscored.
    Source:  GDPO, arXiv 2601.05242. verl's code whitens over tokens instead, so that long rows count more.
    """
    r = as_floats(rewards)
    if r.ndim != 2:
        raise AlignmentError(f"rewards must have the shape (N, K), one column per reward, got {tuple(r.shape)}")
    w = [1.0] * r.shape[1] if weights is None else list(weights)
    if len(w) != r.shape[1]:
        raise AlignmentError(f"weights must have one entry per reward, got {len(w)} for {r.shape[1]} rewards")
    scored = ~torch.isnan(r).any(1)
    out = torch.zeros(len(r), dtype=r.dtype, device=r.device)
    for j, weight in enumerate(w):
        column = torch.where(scored, r[:, j], torch.nan)
        out = out + weight * grpo(column, groups, std=std, singleton=singleton, eps=eps)
    return whitened(out, scored, std, eps, "gdpo") if whiten and len(out) else out


def maxrl(rewards: Numbers, groups: Groups, *, singleton: Singleton = "zero") -> Tensor:
    """Subtract the group mean and divide by it, to maximize the log of the success rate.

    For rewards of 0 and 1 with success probability p, the policy gradient averaged over a group of n trajectories is an
    unbiased estimate of sum_{k<n-1} (1 - p)^k grad p, the first n - 1 terms of the series of grad log p.

    Shapes:  rewards (N trajectories,), groups (N,) -> (N,), 0 if all rewards of the group are 0.
    Units:   group means.
    Raises:  ValueError if a reward is infinite or negative. NaN means unscored.
    Source:  MaxRL, arXiv 2602.02710, Algorithm 1.
    """
    g = GroupedRewards.from_rewards(rewards, groups)
    if bool((g.reward < 0).any()):
        at = int((g.reward < 0).nonzero()[0])
        raise ValueError(f"rewards[{at}] must be at least 0, got {g.reward[at].item()}")
    mean = g.group_sum(g.reward) / g.count.clamp(min=1)
    return g.singleton(torch.where(mean > 0, g.centred() / torch.where(mean > 0, mean, 1.0), 0.0), singleton)


RowCredit = Literal["broadcast", "last", "uniform", "geometric"]


def row_credit(trajectory_index: Groups, how: RowCredit, *, discount: float = 0.9) -> Tensor:
    """Return factors by which the advantage of a trajectory is multiplied in each row. Rows must be in sampling order.

    The factor is 1 for "broadcast", 1 / (number of rows) for "uniform", and discount ** (number of later rows) for
    "geometric". With "last", it is 1 in the last row and 0 in all others.

    Shapes:  trajectory_index (B rows,) -> (B,).
    """
    ids: list[Hashable] = trajectory_index.tolist() if isinstance(trajectory_index, Tensor) else [*trajectory_index]
    rows, seen = Counter(ids), Counter[Hashable]()
    out = []
    for trajectory in ids:
        seen[trajectory] += 1
        later = rows[trajectory] - seen[trajectory]
        factors = {"broadcast": 1.0, "last": float(later == 0), "uniform": 1 / rows[trajectory]}
        out.append(discount**later if how == "geometric" else factors[how])
    return torch.tensor(out)


def trajectory_level(
    rewards: Numbers,
    groups: Groups,
    *,
    trajectory_index: Groups,
    estimator: Callable[..., Tensor] = grpo,
    **options: Any,
) -> Tensor:
    """Call an estimator with one reward per *trajectory* and assign each advantage to all rows of its trajectory.

    If rows were counted separately, trajectories with many rows would dominate their group. `options` are passed to the
    estimator.

    Shapes:  rewards, groups, trajectory_index (N,), one entry per row -> (N,).
    Units:   the units of the estimator.
    Raises:  ValueError if the rows of one trajectory differ in group or in reward.
    Source:  Agent Lightning v1 (rollout-level advantage).
    """
    r = as_floats(rewards)
    group = group_index(groups, len(r), r.device)
    rows = EpisodeRows(trajectory_index, len(r), r.device)
    last = rows.last_rows[rows.index]  # last row of each row's trajectory
    same_reward = (r == r[last]) | (r.isnan() & r[last].isnan())
    if bool((wrong := ~same_reward | (group != group[last])).any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"the rows of a trajectory must have the same reward and group, got {r[i].item():g} and "
            f"{r[last[i]].item():g} in groups {int(group[i])} and {int(group[last[i]])} for rows {i} and {int(last[i])}"
        )
    return estimator(r[rows.last_rows], group[rows.last_rows], **options)[rows.index]
