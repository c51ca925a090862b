"""Advantages: values computed by hand, slow reference loops, and invariances of every estimator."""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentfly_kit import advantages as adv

nan, inf = math.nan, math.inf


def close(a: Tensor, b: Any, tol: float = 1e-6) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), atol=tol, rtol=tol)


# --- values computed by hand ---------------------------------------------------------------------


def test_equal_rewards_give_exactly_zero() -> None:
    """The float32 mean of equal rewards can differ slightly from the rewards. Division by an equally small std would
    make this difference large."""
    residues = 0
    for r in (0.1, 0.3, 0.7, 1.1):
        for n in range(2, 12):
            flat = torch.full((n,), r)
            residues += bool((flat - flat.sum() / n).any())
            for f in (adv.grpo, adv.dr_grpo, adv.rloo, adv.gpg, adv.maxrl, adv.grpo_passk):
                assert f(flat, [0] * n).tolist() == [0.0] * n
            assert adv.opo(flat, [0] * n, lengths=range(1, n + 1)).tolist() == [0.0] * n
    assert residues, "no mean was inexact, so the test shows nothing"


def test_golden_gae_steps_through_observations_between_actions() -> None:
    r, v, m = [0, 0, 0, 0, 0, 1], [0.2, 0.2, 0.9, 0.9, 0.5, 0.5], [1, 1, 0, 0, 1, 1]
    got = adv.gae([[0, *r, 0, 0]], [[nan, *v, nan, nan]], [[0, *m, 0, 0]], observations="step")[0]
    close(got[:, 1:7], [[0.70894, 0.74625, 0, 0, 0.475, 0.5]], 1e-5)


def test_gae_bootstraps_a_truncated_row() -> None:
    a, returns = adv.gae([[0.0, 0], [0, 0]], [[0.5, 0.5]] * 2, [[1, 1]] * 2, gamma=0.9, lam=1.0, bootstrap=[1.0, 0.0])
    close(returns, [[0.81, 0.9], [0, 0]])
    close(a, [[0.31, 0.4], [-0.5, -0.5]])
    # Tokens after the last action do not add to the discount of the bootstrap value.
    options: Any = {"gamma": 0.9, "lam": 1.0, "bootstrap": [1.0], "discount_observations": True}
    close(adv.gae([[0.0, 0, 0, 0]], [[0.5, 0.5, nan, nan]], [[1, 1, 0, 0]], **options)[1], [[0.81, 0.9, 0, 0]])
    # A row without scored action tokens needs no bootstrap value.
    assert adv.gae([[0.0], [nan]], [[0.0], [nan]], [[0], [1]], bootstrap=[nan, nan])[0].tolist() == [[0], [0]]


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    reward, mask = [[0.0, 1], [0, 0], [0, 3]], [[1, 1], [1, 1], [0, 1]]
    raw = adv.reinforce_plus_plus_baseline(reward, mask, groups=["a", "a", "b"], whiten=False)
    close(raw, [[0.5, 0.5], [-0.5, -0.5], [0, 0]])
    # A row without action tokens is not in the mean of its group.
    assert (
        adv.reinforce_plus_plus_baseline(reward, [[1, 1], [0, 0], [0, 1]], groups=[0, 0, 0], whiten=False)[0, 0] == -1
    )
    scale = statistics.stdev([0.5, 0.5, -0.5, -0.5, 0.0])
    close(adv.reinforce_plus_plus_baseline(reward, mask, groups=["a", "a", "b"]), raw / scale, 1e-5)


def test_unscored_rows_do_not_change_token_estimates_of_others() -> None:
    reward = torch.tensor([[0.0, 1], [nan, 0], [0, 0.25]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [0, 1]])
    kept = [0, 2]
    for f in (
        lambda r, m, g: adv.reinforce_plus_plus(r, m),
        lambda r, m, g: adv.reinforce_plus_plus_baseline(r, m, groups=g),
        lambda r, m, g: adv.gae(r, torch.full_like(r, 0.5), m)[0],
        lambda r, m, g: adv.gae(r, torch.full_like(r, 0.5), m)[1],
    ):
        got = f(reward, mask, [0, 0, 0])
        close(got[kept], f(reward[kept], mask[kept], [0, 0]))
        assert got[1].tolist() == [0, 0]


def test_whiten() -> None:
    a, m = torch.tensor([[1.0, nan, 3.0], [inf, 5.0, 7.0]]), torch.tensor([[1, 0, 1], [0, 1, 1]])
    got = adv.whiten(a, m)
    close(got[m.bool()], (torch.tensor([1.0, 3, 5, 7]) - 4) / statistics.stdev([1, 3, 5, 7]), 1e-5)
    assert got[~m.bool()].tolist() == [0, 0]
    close(adv.whiten(a, m, std="population")[m.bool()], (torch.tensor([1.0, 3, 5, 7]) - 4) / math.sqrt(5), 1e-5)
    close(adv.whiten(a, m, std=None)[m.bool()], [-3.0, -1, 1, 3])
    assert adv.whiten([[0.1, 0.1, 0.1]], [[1, 1, 1]]).tolist() == [[0, 0, 0]]
    assert adv.whiten([[4.0]], [[1]]).tolist() == [[0.0]]
    with pytest.warns(RuntimeWarning, match="no scored action token"):
        assert adv.whiten([[nan, inf]], [[0, 0]]).tolist() == [[0, 0]]


def test_a_row_without_actions_is_zero_everywhere() -> None:
    reward, values, mask = [[nan, nan], [0.0, 1]], [[nan, inf], [0.5, 0.5]], [[0, 0], [1, 1]]
    for out in (*adv.gae(reward, values, mask), *adv.gae(reward, values, mask, turns=[[0, 0], [0, 0]])):
        assert out[0].tolist() == [0, 0]
    assert adv.reinforce_plus_plus(reward, mask)[0].tolist() == [0, 0]
    assert adv.reinforce_plus_plus_baseline(reward, mask, groups=[0, 0])[0].tolist() == [0, 0]
    assert adv.gae(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3))[0].shape == (0, 3)
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        assert adv.gae(nothing, nothing, nothing, turns=nothing.long())[0].shape == shape
    assert adv.grpo([], []).shape == (0,)


def test_golden_remax_and_opo() -> None:
    close(adv.remax([1, 0, None, 1], baselines=[0.25, 0.5, 0, nan]), [0.75, -0.5, 0, 0])
    # (1 * 10 + 0 * 30) / 40 = 0.25; the length of an unscored row is not read.
    close(adv.opo([1, 0, None], [0, 0, 0], lengths=[10, 30, nan]), [0.75, -0.25, 0])


def test_golden_passk() -> None:
    close(adv.grpo_passk([1, 3, 2], [0, 0, 0], std=None), [0.0, 1, 0])  # the whole group: the lead over the second
    close(adv.grpo_passk([1, 3, 2], [0, 0, 0], std="sample"), [0.0, 1, 0], 1e-5)
    close(adv.grpo_passk([1, 3, 2], [0, 0, 0], k=2, std=None), [0.0, 1.5, 0.5])  # pairs (3, 1), (3, 2) and (2, 1)
    close(adv.grpo_passk([1, 1, 0], [0, 0, 0], std=None), [0.0, 0, 0])  # one success is enough
    close(adv.grpo_passk([1, 1, None], [0, 1, 1], singleton="raw"), [1.0, 1, 0])


def test_golden_gdpo() -> None:
    # The first two trajectories have equal sums, but the two rewards have different standard deviations.
    r = [[1.0, 0], [0, 1], [0, 0], [1, 1], [1, 0]]
    a = adv.gdpo(r, [0] * 5, whiten=False)
    assert a[0] != pytest.approx(a[1].item())
    want = adv.grpo([x for x, _ in r], [0] * 5) + 2 * adv.grpo([y for _, y in r], [0] * 5)
    close(adv.gdpo(r, [0] * 5, weights=[1, 2], whiten=False), want)
    close(adv.gdpo(r, [0] * 5, weights=[1, 2]), (want - want.mean()) / want.std(), 1e-5)
    with_nan = adv.gdpo([*r, [nan, 5.0]], [0] * 6)
    close(with_nan[:5], adv.gdpo(r, [0] * 5))
    assert with_nan[5] == 0


def test_golden_trajectory_level() -> None:
    """One trajectory succeeds and has three rows; another fails and has one row."""
    r, g = [1, 1, 1, 0], ["task"] * 4
    got = adv.trajectory_level(r, g, trajectory_index=["a", "a", "a", "b"], estimator=adv.rloo)
    close(got, [1.0, 1, 1, -1])
    close(adv.trajectory_level([1, nan, nan, 0], g, trajectory_index=[0, 1, 1, 2], std=None), [0.5, 0, 0, -0.5])


def test_golden_gigpo() -> None:
    """Two trajectories reach state "s": one succeeds, the other fails."""
    rewards, groups = [1.0, 0.0], [0, 0]
    turns, states = [[0, 0, 1.0], [0, 0.0]], [["start", "s", "end"], ["start", "s"]]
    a = adv.gigpo(rewards, groups, turn_rewards=turns, states=states, gamma=0.5, std=None)
    # Returns are 0.25 and 0 from 'start', and 0.5 and 0 from 's'; one chain visits 'end'. The episode adds ±0.5.
    close(a, [[0.5 + 0.125, 0.5 + 0.25, 0.5], [-0.5 - 0.125, -0.5 - 0.25, 0]])
    a = adv.gigpo(rewards, groups, turn_rewards=turns, states=states, gamma=0.5, weight=0.0)
    close(a, [[0.7071] * 3, [-0.7071, -0.7071, 0]], 1e-4)
    # Without a reward at the end, the episodes have the total returns 1 and 0.
    a = adv.gigpo([0, 0], [0, 0], turn_rewards=[[1, 0], [0]], states=[["a", "b"], ["c"]])
    close(a, [[0.7071] * 2, [-0.7071, 0]], 1e-4)
    # Equal states in different groups are not compared, and an unscored trajectory is in no mean.
    a = adv.gigpo([1, 0, None], [0, 1, 0], turn_rewards=[[1], [0], [5]], states=[["s"]] * 3, singleton="raw")
    close(a, [[2.0], [0], [0]])
    close(adv.gigpo([1, 0], [0, 0], turn_rewards=[[1], [None]], states=[["s"]] * 2, singleton="raw"), [[2.0], [0]])
    assert adv.gigpo([], [], turn_rewards=[], states=[]).shape == (0, 0)


# A tree with three leaves, and a chain that was not forked.
TREE = [["r", "a"], ["r", "b", "c"], ["r", "b", "d"], ["x"]]


def test_golden_branch_weights() -> None:
    close(adv.branch_weights(TREE, [0] * 4), [1 / 4, 1 / 8, 1 / 8, 1 / 2])
    close(adv.branch_weights([["r", "a"], ["r", "a"]], [0, 1]), [1.0, 1.0])
    # Each leaf without turns is a branch of its own at the root.
    close(adv.branch_weights([["r", "a"], ["r", "b"], [], []], [0, 0, 0, 0]), [1 / 6, 1 / 6, 1 / 3, 1 / 3])


def test_golden_arpo() -> None:
    r, g = [1.0, 0, 1, 0], [0] * 4
    close(adv.arpo(r, g, turn_ids=TREE, std=None), [[0.5, 0.5, 0], [-0.5] * 3, [0.5] * 3, [-0.5, 0, 0]])
    hard = adv.arpo(r, g, turn_ids=TREE, attribution="hard", std=None)
    close(hard, [[1 / 6, 0.5, 0], [1 / 6, 0, -0.5], [1 / 6, 0, 0.5], [-0.5, 0, 0]])
    # The mean with the weights w is 1/4 + 1/8 = 0.375, and the advantage of each row is multiplied by 4 w.
    unbiased = adv.arpo(r, g, turn_ids=TREE, attribution="inverse_branching", std=None)
    close(unbiased, [[0.625, 0.625, 0], [-0.1875] * 3, [0.3125] * 3, [-0.75, 0, 0]])
    # An unscored leaf is in no mean, neither of the group nor of a shared turn.
    hard = adv.arpo([1, nan, 0, 0.5], g, turn_ids=TREE, attribution="hard", std=None)
    close(hard, [[0, 0.5, 0], [0, 0, 0], [0, -0.5, -0.5], [0, 0, 0]])


def test_golden_inverse_branching_without_a_leaf_and_with_a_std() -> None:
    # Without the second leaf the weights w are 2/7, 1/7, 4/7, the mean is 4/7, and the factor of a row is 3 w.
    got = adv.arpo([1, nan, 0, 0.5], [0] * 4, turn_ids=TREE, attribution="inverse_branching", std=None)
    close(got[:, 0], [18 / 49, 0, -12 / 49, -6 / 49])
    r, w = [1.0, 0, 1, 0], [1 / 4, 1 / 8, 1 / 8, 1 / 2]
    variance = sum(y * (x - 0.375) ** 2 for x, y in zip(r, w, strict=True))
    for std, grain in (("population", 1.0), ("sample", 1 - sum(y * y for y in w))):
        got = adv.arpo(r, [0] * 4, turn_ids=TREE, attribution="inverse_branching", std=std)  # type: ignore[arg-type]
        want = [4 * y * (x - 0.375) / math.sqrt(variance / grain) for x, y in zip(r, w, strict=True)]
        close(got[:, 0], want, 1e-5)


@pytest.mark.parametrize("attribution", ["soft", "hard", "inverse_branching"])
def test_arpo_with_leaves_without_turns(attribution: Any) -> None:
    got = adv.arpo([1, nan, 0, nan], [0] * 4, turn_ids=[["a"], [], ["b"], []], attribution=attribution, std=None)
    close(got, [[0.5], [0], [-0.5], [0]])
    assert adv.arpo([nan, nan], [0, 0], turn_ids=[[], []], attribution=attribution).shape == (2, 0)


def test_without_forks_arpo_is_grpo() -> None:
    r, groups = torch.tensor([1.0, 0, 0.5, 2, 2, -1], dtype=torch.float64), list("aaabba")
    for std, attribution in itertools.product(("sample", "population", None), ("soft", "hard", "inverse_branching")):
        got = adv.arpo(r, groups, turn_ids=[[i] for i in range(6)], attribution=attribution, std=std)  # type: ignore[arg-type]
        close(got[:, 0], adv.grpo(r, groups, std=std))  # type: ignore[arg-type]


# --- exact expectations over a small policy ---------------------------------------------------------

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def expected_gradient(advantages: Callable[[Tensor], Tensor], outcome_rewards: list[float], n: int) -> Tensor:
    """Expectation over all groups of n of mean_i A_i grad log p_i, with respect to the logits of POLICY."""
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=n):
        a = advantages(torch.tensor([outcome_rewards[i] for i in group], dtype=torch.float64))
        score = torch.eye(3, dtype=torch.float64)[list(group)] - POLICY
        total += POLICY[list(group)].prod() * (a[:, None] * score).mean(0)
    return total


def gradient_of(f: Callable[[Tensor], Tensor]) -> Tensor:
    logits = POLICY.log().requires_grad_()
    (g,) = torch.autograd.grad(f(torch.softmax(logits, 0)), logits)
    return g


def test_rloo_is_unbiased_and_dr_grpo_is_smaller_by_one_nth() -> None:
    outcome = [0.0, 0.5, 1.0]
    want = gradient_of(lambda p: (p * torch.tensor(outcome, dtype=torch.float64)).sum())
    close(expected_gradient(lambda r: adv.rloo(r, [0] * 3), outcome, 3), want, 1e-12)
    close(expected_gradient(lambda r: adv.dr_grpo(r, [0] * 3), outcome, 3), want * 2 / 3, 1e-12)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_passk_is_the_gradient_of_the_best_of_k(k: int) -> None:
    outcome = [0.0, 0.5, 1.0]

    def best(p: Tensor) -> Tensor:
        below = torch.cumsum(p, 0)  # outcomes are in order of reward
        return sum(
            (x * (below[i] ** k - (below[i - 1] ** k if i else 0)) for i, x in enumerate(outcome)), torch.zeros(())
        )

    got = expected_gradient(lambda r: adv.grpo_passk(r, [0] * 4, k=k, std=None), outcome, 4)
    close(k * got, gradient_of(best), 1e-12)


def test_maxrl_is_the_gradient_of_truncated_log_success() -> None:
    for n in (2, 3, 5):
        got = expected_gradient(lambda r, n=n: adv.maxrl(r, [0] * n), [0.0, 0.0, 1.0], n)
        want = gradient_of(lambda p, n=n: -sum((1 - p[2]) ** (k + 1) / (k + 1) for k in range(n - 1)))
        close(got, want, 1e-12)


def test_forks_bias_the_mean_over_leaves() -> None:
    """Compute expectations over all groups of three chains with two turns, in which each chain whose first action is 0
    is forked into three leaves."""
    first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)  # by second action
    p, q = torch.softmax(first, 0), torch.softmax(second, 1)
    success = (p[:, None] * q * rewards).sum()
    true = torch.cat([g.flatten() for g in torch.autograd.grad(success, (first, second))])
    success, p, q = success.detach(), p.detach(), q.detach()
    chains = [(a, leaves) for a, n in ((0, 3), (1, 1)) for leaves in itertools.product((0, 1), repeat=n)]
    plain = weighted = 0.0
    expected = {name: torch.zeros(6, dtype=torch.float64) for name in ("soft", "hard", "inverse_branching")}
    for group in itertools.product(chains, repeat=3):
        probability = math.prod(float(p[a] * q[a, list(leaves)].prod()) for a, leaves in group)
        r = rewards[[b for _, leaves in group for b in leaves]]
        turn_ids = [[i, (i, j)] for i, (_, leaves) in enumerate(group) for j in range(len(leaves))]
        groups = [0] * len(r)
        plain += probability * float(r.mean())
        weighted += probability * float((adv.branch_weights(turn_ids, groups) * r).sum())
        # The gradient of the log probability of each turn of each leaf, in the six logits.
        score = torch.zeros(len(r), 2, 6, dtype=torch.float64)
        for k, (a, b) in enumerate((a, b) for a, leaves in group for b in leaves):
            score[k, 0, :2] = torch.eye(2)[a] - p
            score[k, 1, 2 + 2 * a : 4 + 2 * a] = torch.eye(2)[b] - q[a]
        for name, total in expected.items():
            advantages = adv.arpo(r, groups, turn_ids=turn_ids, attribution=name, std=None)  # type: ignore[arg-type]
            total += probability * (advantages[:, :, None] * score).mean(0).sum(0)
    assert float(success) == pytest.approx(0.6904, abs=1e-4)
    assert plain == pytest.approx(0.7557, abs=1e-4)
    assert weighted == pytest.approx(float(success), abs=1e-12)
    cosine = {name: float(torch.cosine_similarity(total, true, 0)) for name, total in expected.items()}
    wanted = {"soft": 0.9513, "hard": 0.9513, "inverse_branching": 0.9953}
    assert cosine == pytest.approx(wanted, abs=1e-4)


# --- inputs ---------------------------------------------------------------------------------------


def test_every_kind_of_input() -> None:
    want = adv.grpo([1, 0, 0, 1], [0, 0, 1, 1])
    for r in ([1.0, 0, 0, 1], (True, False, False, True), np.array([1, 0, 0, 1]), torch.tensor([1, 0, 0, 1])):
        for g in (
            ["x", "x", "y", "y"],
            [7, 7, -1, -1],
            torch.tensor([3, 3, 9, 9]),
            np.array([0, 0, 5, 5]),
            [("t", 1)] * 2 + [("t", 2)] * 2,
        ):
            close(adv.grpo(r, g), want)
    close(
        adv.grpo(pd.Series([1.0, 0, None, 0, 1]), pd.Series(list("aaabb")))[[0, 1, 3, 4]],
        want.tolist()[:2] + want.tolist()[2:],
    )
    close(adv.grpo(np.array([1, 0, None, 0, 1], dtype=object), [0, 0, 0, 1, 1])[[0, 1, 3, 4]], want)
    for dtype, out in (
        (torch.float64,) * 2,
        (torch.float32,) * 2,
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
    ):
        assert adv.grpo(torch.tensor([1, 0], dtype=dtype), [0, 0]).dtype == out
    assert adv.grpo(np.array([1.0, 0.0]), [0, 0]).dtype == torch.float64


# --- slow loops, written from the papers ------------------------------------------------------------


def slow_grpo(rewards: list[float], groups: list[Any], std: str | None, singleton: str, eps: float) -> list[float]:
    out = []
    for r, g in zip(rewards, groups, strict=True):
        mates = [x for x, h in zip(rewards, groups, strict=True) if h == g and not math.isnan(x)]
        if math.isnan(r):
            out.append(0.0)
        elif len(mates) == 1:
            out.append(r if singleton == "raw" else 0.0)
        elif len(set(mates)) == 1:
            out.append(0.0)
        else:
            spread = {"sample": statistics.stdev, "population": statistics.pstdev}[std](mates) + eps if std else 1.0
            out.append((r - statistics.fmean(mates)) / spread)
    return out


def slow_gae(steps: list[tuple[float, float]], gamma: float, lam: float, last: float) -> list[float]:
    """GAE (eq. 16) of the (reward, value) steps of one row, as a sum of discounted errors."""
    values = [v for _, v in steps] + [last]
    errors = [r + gamma * values[t + 1] - v for t, (r, v) in enumerate(steps)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(steps))) for t in range(len(steps))]


# Multiples of 1/4 are exact in float32, and so are their sums.
reward_values = st.one_of(st.just(nan), st.integers(-8, 8).map(lambda k: k / 4))
grouped = st.lists(st.tuples(reward_values, st.sampled_from("abc")), min_size=1, max_size=12)
singletons = st.sampled_from(["zero", "raw"])


@given(grouped, st.sampled_from(["sample", "population", None]), singletons, st.sampled_from([1e-6, 1e-4]))
@settings(max_examples=60, deadline=None)
def test_grpo_equals_its_loop(rows: Any, std: Any, singleton: Any, eps: float) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    want = slow_grpo(rewards, groups, std, singleton, eps)
    close(adv.grpo(torch.tensor(rewards, dtype=torch.float64), groups, std=std, singleton=singleton, eps=eps), want)
    if std is None:
        close(adv.dr_grpo(torch.tensor(rewards, dtype=torch.float64), groups, singleton=singleton), want)


@given(grouped, st.lists(st.integers(0, 9), min_size=12, max_size=12))
@settings(max_examples=60, deadline=None)
def test_opo_gpg_and_maxrl_equal_their_loops(rows: Any, lengths: list[int]) -> None:
    rewards, groups = [abs(r) for r, _ in rows], [g for _, g in rows]
    scored = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    mates = {i: [j for j in scored if groups[j] == groups[i]] for i in scored}
    live = [i for i in scored if len({rewards[j] for j in mates[i]}) > 1]
    opo, gpg, maxrl = ([0.0] * len(rows) for _ in range(3))
    for i in live:
        weight = {j: lengths[j] if any(lengths[m] for m in mates[i]) else 1 for j in mates[i]}
        opo[i] = rewards[i] - sum(weight[j] * rewards[j] for j in mates[i]) / sum(weight.values())
        mean = statistics.fmean(rewards[j] for j in mates[i])
        gpg[i] = (rewards[i] - mean) * len(scored) / len(live)
        maxrl[i] = (rewards[i] - mean) / mean
    r = torch.tensor(rewards, dtype=torch.float64)
    close(adv.opo(r, groups, lengths=lengths[: len(rows)]), opo)
    close(adv.gpg(r, groups), gpg)
    close(adv.maxrl(r, groups), maxrl)


# --- rows of actions, with and without observations -----------------------------------------------

POISON = [nan, inf, -inf, 1e30, -1e30]


class Rows:
    """Rows of action tokens, and the same rows with inserted observation tokens that hold arbitrary values."""

    def __init__(self, rows: list[list[tuple[float, float, bool]]], groups: list[str], seed: int):
        self.groups, self.noise = groups, random.Random(seed)
        self.plain = self.build(rows, insert=False)
        self.spread = self.build(rows, insert=True)

    def build(self, rows: Any, insert: bool) -> dict[str, Tensor]:
        """Return (B, T) tensors: reward, value, mask, turn and `weight` (any per-token statistic)."""
        out = []
        for row in rows:
            tokens, turn = [], 0
            for reward, value, new_turn in row:
                turn += new_turn
                tokens.append((reward, value, 1, turn, abs(value) + 0.1))
                while insert and self.noise.random() < 0.4:
                    tokens.append((self.no_reward(), self.poison(), 0, self.noise.randrange(-3, 9), self.poison()))
            while insert and self.noise.random() < 0.5:
                tokens.insert(0, (self.no_reward(), self.poison(), 0, 0, self.poison()))
            out.append(tokens)
        width = max(map(len, out)) + (2 if insert else 0)
        for tokens in out:
            pad = (self.no_reward(), self.poison(), 0, -1, self.poison()) if insert else (0.0, 0.0, 0, 0, 0.0)
            tokens.extend([pad] * (width - len(tokens)))
        names = ("reward", "value", "mask", "turn", "weight")
        table = torch.tensor(out, dtype=torch.float64).reshape(len(rows), width, len(names))
        return {
            name: table[..., i].long() if name in ("mask", "turn") else table[..., i] for i, name in enumerate(names)
        }

    def poison(self) -> float:
        return self.noise.choice(POISON)

    def no_reward(self) -> float:
        """Return a value that a record may contain at a masked token."""
        return self.noise.choice([nan, 0.0])


action = st.tuples(st.integers(-8, 8).map(lambda k: k / 4), st.integers(-8, 8).map(lambda k: k / 8), st.booleans())


@st.composite
def rows(draw: Any) -> Rows:
    n = draw(st.integers(1, 5))
    table = draw(st.lists(st.lists(action, min_size=1, max_size=5), min_size=n, max_size=n))
    return Rows(table, draw(st.lists(st.sampled_from("ab"), min_size=n, max_size=n)), draw(st.integers(0, 2**32)))


Estimator = Callable[[dict[str, Tensor], list[str]], Tensor]


def of_rows(f: Callable[..., Tensor]) -> Estimator:
    """Turn an outcome estimator into a token estimator that assigns the advantage to all action tokens of the row."""

    def on_tokens(x: dict[str, Tensor], groups: list[str]) -> Tensor:
        rewards = torch.where(x["mask"] > 0, x["reward"], 0.0).sum(1)
        return torch.where(x["mask"] > 0, f(rewards, groups, x).unsqueeze(1), 0.0)

    return on_tokens


def of_turns(f: Callable[..., Tensor]) -> Estimator:
    """Turn f(row rewards, groups, turn rewards, turn ids) -> (N, K) into a token estimator."""

    def on_tokens(x: dict[str, Tensor], groups: list[str]) -> Tensor:
        sums: list[dict[int, float]] = []
        for b in range(len(groups)):
            row: dict[int, float] = {}
            for t in x["mask"][b].nonzero().flatten().tolist():
                row[int(x["turn"][b, t])] = row.get(int(x["turn"][b, t]), 0.0) + x["reward"][b, t].item()
            sums.append(row)
        rewards = torch.tensor([sum(row.values()) for row in sums], dtype=torch.float64)
        a = f(rewards, groups, [list(row.values()) for row in sums], [list(row) for row in sums])
        out = torch.zeros_like(x["value"])
        for b, t in x["mask"].nonzero().tolist():
            out[b, t] = a[b, list(sums[b]).index(int(x["turn"][b, t]))]
        return out

    return on_tokens


def forked(turns: list[list[int]]) -> list[list[Any]]:
    """Paths of a tree in which all rows share the first turn, "root"."""
    return [["root", *((b, t) for t in row)] for b, row in enumerate(turns)]


def token_baseline(singleton: Any) -> Estimator:
    def estimate(x: dict[str, Tensor], groups: list[str]) -> Tensor:
        lp, squares = -x["weight"], x["weight"] / 2
        return adv.optimal_token_baseline(
            x["reward"], x["mask"], groups=groups, logprobs=lp, sum_squared_probs=squares, singleton=singleton
        )

    return estimate


# Every public estimator with every option that changes how tokens are traversed. observations="step" is left out, as it
# reads observations by design.
ESTIMATORS: dict[str, list[Estimator]] = {
    "grpo": [
        of_rows(lambda r, g, x: adv.grpo(r, g)),
        of_rows(lambda r, g, x: adv.grpo(r, g, std="population", singleton="raw")),
    ],
    "dr_grpo": [of_rows(lambda r, g, x: adv.dr_grpo(r, g))],
    "rloo": [of_rows(lambda r, g, x: adv.rloo(r, g))],
    "remax": [of_rows(lambda r, g, x: adv.remax(r, baselines=r / 2 + 0.1))],
    "opo": [of_rows(lambda r, g, x: adv.opo(r, g, lengths=x["mask"].sum(1)))],
    "gpg": [of_rows(lambda r, g, x: adv.gpg(r, g)), of_rows(lambda r, g, x: adv.gpg(r, g, std="sample"))],
    "grpo_passk": [of_rows(lambda r, g, x: adv.grpo_passk(r, g)), of_rows(lambda r, g, x: adv.grpo_passk(r, g, k=2))],
    "gdpo": [of_rows(lambda r, g, x: adv.gdpo(torch.stack([r, r.square()], 1), g))],
    "maxrl": [of_rows(lambda r, g, x: adv.maxrl(r.abs(), g))],
    "trajectory_level": [
        of_rows(lambda r, g, x: adv.trajectory_level(r, g, trajectory_index=list(zip(g, r.tolist(), strict=True))))
    ],
    "gigpo": [of_turns(lambda r, g, turns, ids: adv.gigpo(r, g, turn_rewards=turns, states=ids))],
    "branch_weights": [of_turns(lambda r, g, _, ids: adv.branch_weights(forked(ids), g).unsqueeze(1).expand(-1, 9))],
    "arpo": [
        of_turns(lambda r, g, _, ids, a=a: adv.arpo(r, g, turn_ids=forked(ids), attribution=a)[:, 1:])
        for a in ("soft", "hard", "inverse_branching")
    ],
    "optimal_token_baseline": [token_baseline("zero"), token_baseline("raw")],
    "gae": [
        lambda x, g: adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, lam=0.8)[0],
        lambda x, g: adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, lam=0.8)[1],
        lambda x, g: adv.gae(x["reward"], x["value"], x["mask"], bootstrap=torch.ones(len(g)))[0],
        lambda x, g: adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, turns=x["turn"])[0],
        lambda x, g: adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, turns=x["turn"])[1],
    ],
    "reinforce_plus_plus": [
        lambda x, g: adv.reinforce_plus_plus(x["reward"], x["mask"], gamma=0.9),
        lambda x, g: adv.reinforce_plus_plus(x["reward"], x["mask"], gamma=0.9, whiten=False),
    ],
    "reinforce_plus_plus_baseline": [
        lambda x, g: adv.reinforce_plus_plus_baseline(x["reward"], x["mask"], groups=g),
        lambda x, g: adv.reinforce_plus_plus_baseline(
            x["reward"], x["mask"], groups=g, whiten=False, singleton="raw"
        ),
    ],
    "whiten": [lambda x, g: adv.whiten(x["value"], x["mask"])],
    "distillation": [lambda x, g: adv.distillation(x["value"], x["weight"], x["mask"])],
}
EVERY = [pytest.param(f, id=f"{name}-{i}") for name, fs in ESTIMATORS.items() for i, f in enumerate(fs)]


def test_every_estimator_is_in_the_table() -> None:
    assert sorted([*ESTIMATORS, "row_credit"]) == sorted(adv.__all__)


@pytest.mark.parametrize("estimator", EVERY)
@given(rows())
@settings(max_examples=15, deadline=None)
def test_inserted_observations_do_not_change_advantages(estimator: Estimator, rows: Rows) -> None:
    plain, spread = estimator(rows.plain, rows.groups), estimator(rows.spread, rows.groups)
    assert bool((spread[rows.spread["mask"] == 0] == 0).all())
    close(spread[rows.spread["mask"] > 0], plain[rows.plain["mask"] > 0])


@given(rows(), st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_gae_equals_its_loop(rows: Rows, gamma: float, lam: float, by_turn: bool) -> None:
    x = rows.spread
    last = torch.linspace(-1, 1, len(rows.groups), dtype=torch.float64)
    options = {"gamma": gamma, "lam": lam, "turns": x["turn"] if by_turn else None, "bootstrap": last}
    a, returns = adv.gae(x["reward"], x["value"], x["mask"], **options)
    for b in range(len(rows.groups)):
        at = x["mask"][b].nonzero().flatten().tolist()
        turn_of = [int(x["turn"][b, t]) for t in at] if by_turn else at
        steps: dict[int, tuple[float, float]] = {}
        for t, turn in zip(at, turn_of, strict=True):
            reward, value = steps.get(turn, (0.0, x["value"][b, t].item()))
            steps[turn] = (reward + x["reward"][b, t].item(), value)
        want = dict(zip(steps, slow_gae(list(steps.values()), gamma, lam, last[b].item()), strict=True))
        close(a[b, at], [want[turn] for turn in turn_of])
        close(returns[b, at], [want[turn] + steps[turn][1] for turn in turn_of])


@given(rows(), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_reinforce_plus_plus_equals_its_loop(rows: Rows, gamma: float) -> None:
    x = rows.spread
    for over_gaps in (False, True):
        got = adv.reinforce_plus_plus(
            x["reward"], x["mask"], gamma=gamma, whiten=False, discount_observations=over_gaps
        )
        for b in range(len(rows.groups)):
            at = x["mask"][b].nonzero().flatten().tolist()
            far = at if over_gaps else range(len(at))
            rewards = [x["reward"][b, t].item() for t in at]
            want = [sum(gamma ** (far[k] - far[i]) * rewards[k] for k in range(i, len(at))) for i in range(len(at))]
            close(got[b, at], want)


@given(rows(), singletons)
@settings(max_examples=25, deadline=None)
def test_optimal_token_baseline_equals_its_loop(rows: Rows, singleton: Any) -> None:
    x = rows.spread
    got = token_baseline(singleton)(x, rows.groups)
    at = [x["mask"][b].nonzero().flatten().tolist() for b in range(len(rows.groups))]
    to_come = [[sum(x["reward"][b, t].item() for t in row[i:]) for i in range(len(row))] for b, row in enumerate(at)]
    energy = []
    for b, row in enumerate(at):
        w = [max(0.0, 1 - 2 * math.exp(-x["weight"][b, t].item()) + x["weight"][b, t].item() / 2) for t in row]
        energy.append(list(itertools.accumulate(w)))
    for b, row in enumerate(at):
        for i, t in enumerate(row):
            mates = [c for c, other in enumerate(at) if rows.groups[c] == rows.groups[b] and len(other) > i]
            weight = {c: energy[c][i] if any(energy[m][i] > 0 for m in mates) else 1.0 for c in mates}
            baseline = sum(weight[c] * to_come[c][i] for c in mates) / sum(weight.values())
            alone = to_come[b][i] if singleton == "raw" else 0.0
            assert got[b, t].item() == pytest.approx(alone if len(mates) == 1 else to_come[b][i] - baseline, abs=1e-9)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("broadcast", [1, 1, 1, 1]),
        ("last", [0, 1, 0, 1]),
        ("uniform", [1 / 3, 1, 1 / 3, 1 / 3]),
        ("geometric", [0.25, 1, 0.5, 1]),
    ],
)
def test_the_credit_of_a_chain_is_distributed_over_its_rows(how: Any, wanted: list[float]) -> None:
    for rows in (["a", "b", "a", "a"], torch.tensor([0, 1, 0, 0])):
        assert adv.row_credit(rows, how, discount=0.5).tolist() == pytest.approx(wanted)
