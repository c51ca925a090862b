"""Turn-level estimators, which compare turns that start in the same state, or forked chains with common turns."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.advantages.inputs import (
    GroupedRewards,
    Groups,
    Numbers,
    Singleton,
    Std,
    as_floats,
    check_no_inf,
    group_index,
)
from agentfly_kit.advantages.outcomes import grpo
from agentfly_kit.errors import AlignmentError, check_choice

Attribution: TypeAlias = Literal["soft", "hard", "inverse_branching"]


def _pad_ragged(rows: list[list[float]], like: Tensor) -> Tensor:
    """Convert N lists to a tensor, (N, K), where K is the length of the longest list. Pad shorter lists with 0."""
    width = max(map(len, rows), default=0)
    padded = [row + [0.0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=like.dtype, device=like.device).reshape(len(rows), width)


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
    """Apply GRPO to trajectories, and add `weight` times GRPO over the turns that started in the same state.

    The return of a trajectory is the sum of its turn rewards, or its reward if it has no turns. The return of a turn is
    the discounted reward from that turn on. It is compared with the returns of all turns of the group that started in
    an equal state, which may be any hashable object, such as an observation.

    Shapes:  rewards (N trajectories,), groups (N,), turn_rewards and states (N lists with one entry per turn) -> (N, K)
             for at most K turns, padded with 0. turn_rewards must include the reward of the trajectory, at the turn
             that earned it.
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError if a reward is infinite. A trajectory with a NaN reward or turn reward is unscored.
    Source:  GiGPO, arXiv 2505.10978; std=None is its F_norm = 1.
    """
    r = as_floats(rewards)
    index = group_index(groups, len(r), r.device).tolist()
    totals: list[float] = []
    per_turn: list[list[float]] = []
    for i, (given, at) in enumerate(zip(turn_rewards, states, strict=True)):
        row = as_floats(given).tolist()
        if len(row) != len(at):
            raise AlignmentError(f"trajectory {i} must have a state per turn reward, got {len(at)} for {len(row)}")
        to_come = 0.0
        totals.append(math.fsum(row) if row else float(r[i]))
        per_turn.append([to_come := x + gamma * to_come for x in reversed(row)][::-1])
    sums = torch.tensor([sum(x) for x in per_turn], dtype=r.dtype, device=r.device)  # to detect NaN and inf
    check_no_inf(sums, "turn_rewards")
    check_no_inf(r, "rewards")
    r = torch.where(torch.isnan(sums + r), torch.nan, torch.tensor(totals, dtype=r.dtype, device=r.device))
    episode = grpo(r, index, std=std, singleton=singleton, eps=eps)
    scored = (~torch.isnan(r)).tolist()
    flat = [x if scored[i] else float("nan") for i, row in enumerate(per_turn) for x in row]
    keys = [(index[i], state) for i, row in enumerate(states) for state in row]
    step = grpo(torch.tensor(flat, dtype=r.dtype, device=r.device), keys, std=std, singleton=singleton, eps=eps)
    pieces = step.split([len(row) for row in per_turn]) if len(flat) else [step] * len(per_turn)
    return _pad_ragged([(episode[i] + weight * x if scored[i] else x).tolist() for i, x in enumerate(pieces)], r)


def branch_weights(turn_ids: Sequence[Sequence[Hashable]], groups: Groups) -> Tensor:
    """Return the weight of each leaf in a tree of turns: the product of 1 / (number of branches) along its path.

    A leaf is the last turn of a chain. The weights of a group sum to 1. In the unweighted mean, a chain that was forked
    often counts too much. The weighted mean is unbiased if the number of branches at each turn is fixed before the
    branches are sampled; adding new chains to a group afterwards violates this condition at the root.

    Shapes:  turn_ids: N paths from the first turn to the last, where equal ids within a group denote the same turn, and
             an empty path is a separate branch at the root; groups (N,) -> (N,) float64.
    Raises:  ValueError if two leaves of a group have the same path, or if a turn has two parents.
    """
    index = group_index(groups, len(turn_ids), torch.device("cpu")).tolist()
    children: dict[Hashable, set[Hashable]] = {}
    parent: dict[Hashable, Hashable] = {}
    ends: set[Hashable] = set()
    paths = [tuple(path) or (object(),) for path in turn_ids]
    for g, path in zip(index, paths, strict=True):
        if (g, path[-1]) in ends:
            raise ValueError(f"turn_ids must contain each leaf once, but two leaves end in turn {path[-1]!r}")
        ends.add((g, path[-1]))
        for above, turn in zip((None, *path), path, strict=False):
            if parent.setdefault((g, turn), (g, above)) != (g, above):
                raise ValueError(
                    f"turn_ids must be unique within a group, but the id {turn!r} follows two different turns"
                )
            children.setdefault((g, above), set()).add(turn)
    branches = [[len(children[(g, a)]) for a in (None, *path[:-1])] for g, path in zip(index, paths, strict=True)]
    return torch.tensor([1 / math.prod(counts) for counts in branches], dtype=torch.float64)


def arpo(
    rewards: Numbers,
    groups: Groups,
    *,
    turn_ids: Sequence[Sequence[Hashable]],
    attribution: Attribution = "soft",
    std: Std = "sample",
    singleton: Singleton = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Compute advantages per turn for forked chains, which form a tree. Each row contains the turns of one chain.

    "soft" assigns the GRPO advantage of a chain to all of its turns. "hard" assigns to each turn the mean advantage of
    the chains that contain it; a token-mean or token-sum loss then has the same gradient if it clips no ratio. Both are
    biased towards chains that were forked often. "inverse_branching" weights the mean and std by `branch_weights` and
    multiplies the advantage of a chain by its weight times the number of chains in the group, which removes nearly all
    of this bias; see "Forked chains" in docs/conventions.md. Without forks, all three equal `grpo`.

    Shapes:  rewards, groups (N chains,); turn_ids as in `branch_weights` -> (N, K), where K is the depth of the tree.
    Units:   group standard deviations (reward, with std=None).
    Raises:  ValueError if a reward is infinite, or if `turn_ids` do not form a tree. NaN means unscored.
    Source:  ARPO, arXiv 2507.19849, 3.2; inverse_branching is specific to this package.
    """
    check_choice("attribution", attribution, Attribution)
    check_choice("std", std, Std)
    g = GroupedRewards.from_rewards(rewards, groups)
    weights = branch_weights(turn_ids, groups).to(g.reward)
    if attribution == "inverse_branching":
        w = torch.where(g.scored, weights, 0.0)
        w = w / g.group_sum(w).clamp(min=torch.finfo(w.dtype).tiny)
        a = g.minus_weighted_mean(w)
        if std is not None:
            # Apply Bessel's correction to the weighted variance. For n equal weights, the factor is (n - 1) / n.
            grain = 1 - g.group_sum(w.square()) if std == "sample" else torch.ones_like(w)
            variance = g.group_sum(w * a.square()) / torch.where(grain > 0, grain, 1.0)
            a = a / (torch.sqrt(variance) + eps)
        a = g.singleton(g.count * w * a, singleton)
    else:
        a = g.grpo(std, singleton, eps)
    if attribution != "hard":
        return _pad_ragged([[x] * len(path) for x, path in zip(a.tolist(), turn_ids, strict=True)], a)
    through: dict[Hashable, list[float]] = {}
    rows = list(zip(a.tolist(), g.scored.tolist(), g.index.tolist(), turn_ids, strict=True))
    for x, scored, group, path in rows:
        for turn in path if scored else ():
            through.setdefault((group, turn), []).append(x)
    mean = {turn: sum(xs) / len(xs) for turn, xs in through.items()}
    return _pad_ragged([[mean[(grp, t)] if scored else 0.0 for t in path] for _, scored, grp, path in rows], a)
