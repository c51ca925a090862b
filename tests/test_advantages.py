"""Advantages: hand-worked numbers, slow loops beside the fast ones, and invariances that hold for every estimator."""

from __future__ import annotations

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
from agentfly_kit.errors import AlignmentError, SettingsError

nan, inf = math.nan, math.inf


def close(a: Tensor, b: Any, tol: float = 1e-6) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), atol=tol, rtol=tol)


# --- worked by hand ------------------------------------------------------------------------------


def test_golden_group_of_four() -> None:
    r, g = [1, 0, 0, 1], [0, 0, 0, 0]
    close(adv.grpo(r, g), [0.8660, -0.8660, -0.8660, 0.8660], 1e-4)
    close(adv.grpo(r, g, std="population"), [1.0, -1, -1, 1], 1e-5)
    close(adv.grpo(r, g, std=None), [0.5, -0.5, -0.5, 0.5])
    close(adv.dr_grpo(r, g), [0.5, -0.5, -0.5, 0.5])
    close(adv.rloo(r, g), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_golden_group_of_one_has_two_camps() -> None:
    for f in (adv.grpo, adv.dr_grpo, adv.rloo):
        close(f([0.7, 1, 0], ["a", "b", "b"])[:1], [0.0])
        close(f([0.7, 1, 0], ["a", "b", "b"], singleton="raw")[:1], [0.7])


def test_equal_rewards_give_exactly_zero() -> None:
    for f in (adv.grpo, adv.dr_grpo, adv.rloo):
        # 0.1 three times has a mean that is not 0.1: without care the residue, divided by itself, is no longer small.
        assert f([0.1] * 3 + [1.0, 0.0], [0] * 3 + [1, 1])[:3].tolist() == [0.0] * 3


def test_unscored_rewards_are_left_out() -> None:
    for f in (adv.grpo, adv.dr_grpo, adv.rloo):
        got = f([1, None, 0, nan, None], ["a", "a", "a", "a", "b"])
        want = f([1, 0], ["a", "a"])
        close(got, [want[0].item(), 0, want[1].item(), 0, 0])
        assert f([None, None], [0, 0]).tolist() == [0, 0]


def test_golden_gae_over_turns() -> None:
    r, v, m = [0, 0, 1], [0.2, 0.5, 0.8], [1, 1, 1]
    a, returns = adv.gae(r, v, m, gamma=1.0, lam=0.95)
    close(a, [0.7655, 0.49, 0.2])
    close(returns, [0.9655, 0.99, 1.0])
    close(adv.gae(r, v, m, lam=1.0)[0], [0.8, 0.5, 0.2])
    # The same three turns, two tokens each, with observations between them: one step a turn.
    mask = [[0, 1, 1, 0, 1, 1, 0, 0, 1, 1]]
    turns = [[0, 1, 1, 0, 2, 2, 0, 0, 3, 3]]
    rewards = [[0, 0, 0, 0, 0, 0, 0, 0, 0.25, 0.75]]
    values = [[nan, 0.2, 9, nan, 0.5, 9, inf, nan, 0.8, 9]]
    a, returns = adv.gae(rewards, values, mask, turns=turns)
    close(a, [[0, 0.7655, 0.7655, 0, 0.49, 0.49, 0, 0, 0.2, 0.2]])
    close(returns, [[0, 0.9655, 0.9655, 0, 0.99, 0.99, 0, 0, 1, 1]])


def test_golden_gae_skips_observations_or_steps_through_them() -> None:
    r, v, m = [0, 0, 0, 0, 0, 1], [0.2, 0.2, 0.9, 0.9, 0.5, 0.5], [1, 1, 0, 0, 1, 1]
    close(adv.gae(r, v, m)[0], [0.71369, 0.75125, 0, 0, 0.475, 0.5], 1e-5)
    close(adv.gae(r, v, m, observations="step")[0], [0.70894, 0.74625, 0, 0, 0.475, 0.5], 1e-5)
    # Before the first action token and after the last one nothing is ever a step.
    wide = [[nan, *v, nan, nan]]
    close(
        adv.gae([[0, *r, 0, 0]], wide, [[0, *m, 0, 0]], observations="step")[0][:, 1:7],
        [[0.70894, 0.74625, 0, 0, 0.475, 0.5]],
        1e-5,
    )
    with pytest.raises(ValueError, match=r"values\[0, 2\] is nan.*between the first and last action token"):
        adv.gae(r, [0.2, 0.2, nan, 0.9, 0.5, 0.5], m, observations="step")


def test_golden_discount_over_observations() -> None:
    r, m = [0.0, 0, 0, 0, 1], [1, 0, 0, 1, 1]
    close(adv.reinforce_plus_plus(r, m, gamma=0.5, whiten=False), [0.25, 0, 0, 0.5, 1])
    close(adv.reinforce_plus_plus(r, m, gamma=0.5, whiten=False, discount_observations=True), [0.0625, 0, 0, 0.5, 1])
    zero = [0.0] * 5
    close(adv.gae(r, zero, m, gamma=0.5, lam=1.0)[0], [0.25, 0, 0, 0.5, 1])
    close(adv.gae(r, zero, m, gamma=0.5, lam=1.0, discount_observations=True)[0], [0.0625, 0, 0, 0.5, 1])
    # Padding after the last action token changes nothing, whatever the discount.
    close(
        adv.reinforce_plus_plus([*r, 0, 0], [*m, 0, 0], gamma=0.5, whiten=False, discount_observations=True)[:5],
        [0.0625, 0, 0, 0.5, 1],
    )


def test_gae_bootstraps_a_cut_row() -> None:
    a, returns = adv.gae([[0.0, 0], [0, 0]], [[0.5, 0.5]] * 2, [[1, 1]] * 2, gamma=0.9, lam=1.0, bootstrap=[1.0, 0.0])
    close(returns, [[0.81, 0.9], [0, 0]])
    close(a, [[0.31, 0.4], [-0.5, -0.5]])
    with pytest.raises(ValueError, match="bootstrap"):
        adv.gae([[0.0]], [[0.0]], [[1]], bootstrap=[nan])
    with pytest.raises(AlignmentError, match=r"bootstrap has shape \(3,\); wanted \(1,\)"):
        adv.gae([[0.0]], [[0.0]], [[1]], bootstrap=[1, 2, 3])


def test_first_turn_of_a_success_is_not_punished() -> None:
    """Returns that restart at a tool's answer give the first turn 0, which whitening makes negative."""
    reward, mask = [[0.0, 0, 0, 1], [0, 0, 0, 0]], [[1, 0, 1, 1], [1, 0, 1, 1]]
    a = adv.reinforce_plus_plus(reward, mask)
    assert a[0][[0, 2, 3]].min() > 0 > a[1][[0, 2, 3]].max()


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    reward, mask = [[0.0, 1], [0, 0], [0, 3]], [[1, 1], [1, 1], [0, 1]]
    raw = adv.reinforce_plus_plus_baseline(reward, mask, groups=["a", "a", "b"], whiten=False)
    close(raw, [[0.5, 0.5], [-0.5, -0.5], [0, 0]])
    scale = statistics.stdev([0.5, 0.5, -0.5, -0.5, 0.0])
    close(adv.reinforce_plus_plus_baseline(reward, mask, groups=["a", "a", "b"]), raw / scale, 1e-5)


def test_unscored_rows_stay_out_of_token_estimators() -> None:
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
    with pytest.raises(ValueError, match=r"advantages\[0, 1\] is nan"):
        adv.whiten([[0.0, nan]], [[1, 1]])


def test_a_row_without_actions_is_zero_everywhere() -> None:
    reward, values, mask = [[nan, nan], [0.0, 1]], [[nan, inf], [0.5, 0.5]], [[0, 0], [1, 1]]
    for out in (*adv.gae(reward, values, mask), *adv.gae(reward, values, mask, turns=[[0, 0], [0, 0]])):
        assert out[0].tolist() == [0, 0]
    assert adv.reinforce_plus_plus(reward, mask)[0].tolist() == [0, 0]
    assert adv.reinforce_plus_plus_baseline(reward, mask, groups=[0, 0])[0].tolist() == [0, 0]
    empty, _ = adv.gae(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3))
    assert empty.shape == (0, 3)
    assert adv.grpo([], []).shape == (0,)


# --- doors ---------------------------------------------------------------------------------------


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


def test_no_gradient_comes_out() -> None:
    values = torch.zeros(1, 2, requires_grad=True)
    assert not adv.gae([[0.0, 1]], values, [[1, 1]])[0].requires_grad
    assert not adv.grpo(torch.ones(2, requires_grad=True), [0, 0]).requires_grad


def test_inputs_are_not_changed() -> None:
    reward, values, mask = torch.tensor([[nan, 1.0]]), torch.tensor([[inf, 0.5]]), torch.tensor([[0, 1]])
    before = [x.clone() for x in (reward, values, mask)]
    adv.gae(reward, values, mask)
    adv.reinforce_plus_plus(reward, mask, whiten=False)
    for a, b in zip(before, (reward, values, mask), strict=True):
        assert a.equal(b) or (a.isnan() == b.isnan()).all()


def test_errors_say_what_was_given_and_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] is infinite; give a finite number, or NaN for unscored"):
        adv.grpo([0, inf], [0, 0])
    with pytest.raises(ValueError, match=r"token_rewards\[0, 0\] is infinite"):
        adv.reinforce_plus_plus([[-inf, 0]], [[1, 1]])
    with pytest.raises(ValueError, match=r"values\[0, 1\] is nan; wanted a finite number at every action token"):
        adv.gae([[0, 0.0]], [[0, nan]], [[1, 1]])
    with pytest.raises(ValueError, match=r"turns\[0\] comes back to turn 1 at token 2"):
        adv.gae([[0.0] * 3], [[0.0] * 3], [[1] * 3], turns=[[1, 2, 1]])
    with pytest.raises(SettingsError, match=r"std='unbiased'; wanted one of 'sample', 'population', None"):
        adv.grpo([0, 1], [0, 0], std="unbiased")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="a turn is one step: with turns=, leave"):
        adv.gae([[0.0]], [[0.0]], [[1]], turns=[[0]], observations="step")
    with pytest.raises(AlignmentError, match="3 group ids for 2 rewards"):
        adv.grpo([0, 1], [0, 0, 0])
    with pytest.raises(AlignmentError, match="is one string"):
        adv.grpo([0, 1], "ab")
    with pytest.raises(AlignmentError, match=r"rewards has shape \(2, 1\); wanted \(N,\)"):
        adv.grpo([[0], [1]], [0, 0])
    with pytest.raises(AlignmentError, match="rewards cannot become a tensor"):
        adv.grpo(["good", "bad"], [0, 0])
    with pytest.raises(AlignmentError, match=r"values has shape \(1, 1\); wanted \(1, 2\)"):
        adv.gae([[0, 0.0]], [[0.0]], [[1, 1]])
    with pytest.raises(AlignmentError, match=r"mask has shape \(2,\), the rewards \(1, 2\)"):
        adv.gae([[0, 0.0]], [[0.0, 0]], [1, 1])


# --- slow loops, written from the papers' words, beside the fast ones -----------------------------


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


def slow_rloo(rewards: list[float], groups: list[Any], singleton: str) -> list[float]:
    out = []
    for i, r in enumerate(rewards):
        others = [x for j, x in enumerate(rewards) if j != i and groups[j] == groups[i] and not math.isnan(x)]
        if math.isnan(r):
            out.append(0.0)
        else:
            out.append(r - statistics.fmean(others) if others else (r if singleton == "raw" else 0.0))
    return out


def slow_gae(steps: list[tuple[float, float]], gamma: float, lam: float, last: float) -> list[float]:
    """Over (reward, value) of one row's steps, as the sum of discounted errors that eq. 16 is."""
    values = [v for _, v in steps] + [last]
    errors = [r + gamma * values[t + 1] - v for t, (r, v) in enumerate(steps)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(steps))) for t in range(len(steps))]


# float32-exact quarters: a group of equal rewards is then equal, and means are exact.
reward_values = st.one_of(st.just(nan), st.integers(-8, 8).map(lambda k: k / 4))
grouped = st.lists(st.tuples(reward_values, st.sampled_from("abc")), min_size=1, max_size=12)
singletons = st.sampled_from(["zero", "raw"])


@given(grouped, st.sampled_from(["sample", "population", None]), singletons, st.sampled_from([1e-6, 1e-4]))
@settings(deadline=None)
def test_grpo_is_its_loop(rows: Any, std: Any, singleton: Any, eps: float) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    want = slow_grpo(rewards, groups, std, singleton, eps)
    close(adv.grpo(torch.tensor(rewards, dtype=torch.float64), groups, std=std, singleton=singleton, eps=eps), want)
    if std is None:
        close(adv.dr_grpo(torch.tensor(rewards, dtype=torch.float64), groups, singleton=singleton), want)


@given(grouped, singletons)
@settings(deadline=None)
def test_rloo_is_its_loop(rows: Any, singleton: Any) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    close(
        adv.rloo(torch.tensor(rewards, dtype=torch.float64), groups, singleton=singleton),
        slow_rloo(rewards, groups, singleton),
    )


# --- rows of actions, with observations put in anywhere -------------------------------------------

POISON = [nan, inf, -inf, 1e30, -1e30]


class Rows:
    """Some rows of action tokens and, of the same rows, a version with poisoned observation tokens put in."""

    def __init__(self, rows: list[list[tuple[float, float, bool]]], groups: list[str], seed: int):
        self.groups, self.noise = groups, random.Random(seed)
        self.plain = self.build(rows, insert=False)
        self.spread = self.build(rows, insert=True)

    def build(self, rows: Any, insert: bool) -> dict[str, Tensor]:
        """One tensor a name, (B, T): reward, value, mask, turn and `weight` (any per-token statistic)."""
        out = []
        for row in rows:
            tokens, turn = [], 0
            for reward, value, new_turn in row:
                turn += new_turn
                tokens.append((reward, value, 1, turn, abs(value) + 0.1))
                while insert and self.noise.random() < 0.4:
                    tokens.append((self.poison(), self.poison(), 0, self.noise.randrange(-3, 9), self.poison()))
            while insert and self.noise.random() < 0.5:
                tokens.insert(0, (self.poison(), self.poison(), 0, 0, self.poison()))
            out.append(tokens)
        width = max(map(len, out)) + (2 if insert else 0)
        for tokens in out:
            pad = (self.poison(), self.poison(), 0, -1, self.poison()) if insert else (0.0, 0.0, 0, 0, 0.0)
            tokens.extend([pad] * (width - len(tokens)))
        names = ("reward", "value", "mask", "turn", "weight")
        table = torch.tensor(out, dtype=torch.float64).reshape(len(rows), width, len(names))
        return {
            name: table[..., i].long() if name in ("mask", "turn") else table[..., i] for i, name in enumerate(names)
        }

    def poison(self) -> float:
        return self.noise.choice(POISON)


action = st.tuples(st.integers(-8, 8).map(lambda k: k / 4), st.integers(-8, 8).map(lambda k: k / 8), st.booleans())


@st.composite
def rows(draw: Any) -> Rows:
    n = draw(st.integers(1, 5))
    table = draw(st.lists(st.lists(action, min_size=1, max_size=5), min_size=n, max_size=n))
    return Rows(table, draw(st.lists(st.sampled_from("ab"), min_size=n, max_size=n)), draw(st.integers(0, 2**32)))


Estimator = Callable[[dict[str, Tensor], list[str]], Tensor]


def of_rows(f: Callable[..., Tensor]) -> Estimator:
    """An outcome estimator as a token estimator: a row's reward in, its advantage on each action token out."""

    def on_tokens(x: dict[str, Tensor], groups: list[str]) -> Tensor:
        rewards = torch.where(x["mask"] > 0, x["reward"], 0.0).sum(1)
        return torch.where(x["mask"] > 0, f(rewards, groups, x).unsqueeze(1), 0.0)

    return on_tokens


# Every public estimator, and every switch that changes how it walks over tokens. "step" is left out on purpose: reading
# observations is what it is for.
ESTIMATORS: dict[str, list[Estimator]] = {
    "grpo": [
        of_rows(lambda r, g, x: adv.grpo(r, g)),
        of_rows(lambda r, g, x: adv.grpo(r, g, std="population", singleton="raw")),
    ],
    "dr_grpo": [of_rows(lambda r, g, x: adv.dr_grpo(r, g))],
    "rloo": [of_rows(lambda r, g, x: adv.rloo(r, g))],
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
        lambda x, g: adv.reinforce_plus_plus_baseline(x["reward"], x["mask"], groups=g, whiten=False, singleton="raw"),
    ],
    "whiten": [lambda x, g: adv.whiten(x["value"], x["mask"])],
}
EVERY = [pytest.param(f, id=f"{name}-{i}") for name, fs in ESTIMATORS.items() for i, f in enumerate(fs)]


def test_every_estimator_is_held_to_the_invariances() -> None:
    assert sorted(ESTIMATORS) == sorted(adv.__all__)


@pytest.mark.parametrize("estimator", EVERY)
@given(rows())
@settings(max_examples=40, deadline=None)
def test_inserting_observations_changes_no_action(estimator: Estimator, rows: Rows) -> None:
    plain, spread = estimator(rows.plain, rows.groups), estimator(rows.spread, rows.groups)
    assert bool((spread[rows.spread["mask"] == 0] == 0).all())
    close(spread[rows.spread["mask"] > 0], plain[rows.plain["mask"] > 0])


@pytest.mark.parametrize("estimator", EVERY)
@given(rows())
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_does_not_matter(estimator: Estimator, rows: Rows) -> None:
    order = list(range(len(rows.groups)))
    rows.noise.shuffle(order)
    shuffled = estimator({k: v[order] for k, v in rows.spread.items()}, [rows.groups[i] for i in order])
    close(shuffled, estimator(rows.spread, rows.groups)[order])


@given(rows(), st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gae_is_its_loop(rows: Rows, gamma: float, lam: float, by_turn: bool) -> None:
    x = rows.spread
    last = torch.linspace(-1, 1, len(rows.groups), dtype=torch.float64)
    turns = x["turn"] if by_turn else None
    a, returns = adv.gae(x["reward"], x["value"], x["mask"], gamma=gamma, lam=lam, turns=turns, bootstrap=last)
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
@settings(max_examples=40, deadline=None)
def test_reinforce_plus_plus_is_its_loop(rows: Rows, gamma: float) -> None:
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


@given(rows())
@settings(max_examples=40, deadline=None)
def test_gae_at_lambda_one_telescopes_and_at_zero_is_the_error(rows: Rows) -> None:
    x = rows.plain
    to_come = adv.reinforce_plus_plus(x["reward"], x["mask"], gamma=0.9, whiten=False)
    a, returns = adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, lam=1.0)
    close(returns, to_come)
    close(a, to_come - x["value"])
    one_step, _ = adv.gae(x["reward"], x["value"], x["mask"], gamma=0.9, lam=0.0)
    for b in range(len(rows.groups)):
        n = int(x["mask"][b].sum())
        after = [*x["value"][b, 1:n].tolist(), 0.0]
        close(one_step[b, :n], [x["reward"][b, t].item() + 0.9 * after[t] - x["value"][b, t].item() for t in range(n)])
