"""Losses: values against a slow loop, gradients against finite differences of that loop.

The loops receive only action tokens, without masks or padding. A second copy of the logprobs, `frozen`, is used where a
paper stops the gradient; the finite differences do not change it.
"""

import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import agentfly_kit as af

nan, inf = math.nan, math.inf
Rows = list[list[float]]


def close(a: Tensor, b: Any, tol: float = 1e-6) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), atol=tol, rtol=tol)


# --- values computed by hand ---------------------------------------------------------------------

E = math.exp


def test_golden_clipped() -> None:
    old = torch.zeros(1, 6)
    ratio = torch.tensor([[1.0, 1.5, 1.5, 0.5, 0.5, 4.0]])
    a = torch.tensor([[2.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
    one = torch.ones(1, 6)
    assert af.losses.clipped(ratio.log(), old, a, one).tolist() == [[False, True, False, False, True, False]]
    assert int(af.losses.clipped(ratio.log(), old, a, one, clip_high=9.0, dual_clip=1.2).sum()) == 3
    assert int(af.losses.clipped(ratio.log(), old, a, torch.tensor([[1, 1, 1, 1, 0, 0]])).sum()) == 1


def test_approx_kl() -> None:
    """The tokens were sampled from the old policy, so the estimator is ratio - 1 - log ratio."""
    lp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    close(af.losses.approx_kl(lp, ref, torch.ones(1, 2)), (E(0.5) - 1.5 + E(-1.0) - 1 + 1) / 2)


def test_golden_adaptive_kl_coef() -> None:
    assert af.losses.adaptive_kl_coef(0.1, 0.06, target=0.06, steps=100) == 0.1
    for kl, factor in ((1.0, 1.02), (0.0, 0.98), (0.055, 1.01)):
        assert af.losses.adaptive_kl_coef(0.1, kl, target=0.05, steps=1000) == pytest.approx(0.1 * factor)


# --- the slow loops -------------------------------------------------------------------------------


def tokenwise(f: Callable[[float, float, float, float], float]) -> Callable[[Rows, Rows, Rows, Rows], Rows]:
    """Return a function that applies f(logprob, frozen logprob, old logprob, advantage) to each token in a loop."""
    return lambda lp, frozen, old, a: [
        [f(*t) for t in zip(*row, strict=True)] for row in zip(lp, frozen, old, a, strict=True)
    ]


def slow_ppo(clip: float, high: float, dual: float) -> Any:
    def f(lp: float, _: float, old: float, a: float) -> float:
        ratio = E(lp - old)
        gain = min(ratio * a, min(max(ratio, 1 - clip), 1 + high) * a)
        return -max(gain, dual * a) if a < 0 else -gain

    return tokenwise(f)


def slow_value(clip: float) -> Any:
    def f(v: float, _: float, old: float, target: float) -> float:
        return 0.5 * max((v - target) ** 2, (old + min(max(v - old, -clip), clip) - target) ** 2)

    return tokenwise(f)


def rowwise(f: Callable[[list[float], list[float], list[float], list[float]], list[float]]) -> Any:
    """Return a function that applies f(logprobs, frozen logprobs, old logprobs, advantages) to each row in a loop."""
    return lambda lp, frozen, old, a: [f(*row) if row[0] else [] for row in zip(lp, frozen, old, a, strict=True)]


def slow_gspo(lp: list[float], frozen: list[float], old: list[float], advantages: list[float]) -> list[float]:
    s = sum(f - o for f, o in zip(frozen, old, strict=True)) / len(lp)
    ratios = [E(s + p - f) for p, f in zip(lp, frozen, strict=True)]
    return [-min(r * a, min(max(r, 0.9), 1.2) * a) for r, a in zip(ratios, advantages, strict=True)]


def slow_gmpo(lp: list[float], _: list[float], old: list[float], advantages: list[float]) -> list[float]:
    logs = []
    for p, o, a in zip(lp, old, advantages, strict=True):
        d = p - o
        logs.append(min(d, 0.4) if a > 0 else max(d, -0.4))
    return [-E(sum(logs) / len(lp)) * sum(advantages) / len(lp)] * len(lp)


def slow_sapo(lp: float, _: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + E(-tau * (E(lp - old) - 1)))


def slow_cispo(low: float, high: float) -> Any:
    return tokenwise(lambda lp, frozen, old, a: -min(max(E(frozen - old), low), high) * a * lp)


def slow_dppo(kind: str, low: float, high: float | None = None) -> Any:
    def f(lp: float, frozen: float, old: float, a: float) -> float:
        p, q = E(frozen), E(old)
        far = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        away = p > q if a > 0 else p < q
        limit = high if high is not None and a > 0 else low
        return 0.0 if away and far > limit else -E(lp - old) * a

    return tokenwise(f)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# name -> (the loss as f(logprobs, old_logprobs, advantages, mask), a slow loop that computes it). The first three
# arguments of a value loss are values, old values and returns. For a KL, the second is the reference and the third is
# not used.
LOSSES: dict[str, tuple[Loss, Any]] = {
    "ppo": (af.losses.ppo, slow_ppo(0.2, 0.2, inf)),
    "ppo clip_high": (lambda *x: af.losses.ppo(*x, 0.1, 0.3), slow_ppo(0.1, 0.3, inf)),
    "ppo dual_clip": (lambda *x: af.losses.ppo(*x, dual_clip=1.5), slow_ppo(0.2, 0.2, 1.5)),
    "reinforce": (af.losses.reinforce, tokenwise(lambda lp, _, old, a: -a * lp)),
    "gspo": (lambda *x: af.losses.gspo(*x, 0.1, 0.2), rowwise(slow_gspo)),
    "gmpo": (af.losses.gmpo, rowwise(slow_gmpo)),
    "sapo": (af.losses.sapo, tokenwise(slow_sapo)),
    "cispo": (lambda *x: af.losses.cispo(*x, 0.2, 0.3), slow_cispo(0.8, 1.3)),
    "cispo upper": (lambda *x: af.losses.cispo(*x, clip_high=0.3, bounds="upper"), slow_cispo(0.0, 1.3)),
    "dppo tv": (lambda *x: af.losses.dppo(*x, 0.1), slow_dppo("tv", 0.1)),
    "dppo uneven": (lambda *x: af.losses.dppo(*x, 0.01, 0.3), slow_dppo("tv", 0.01, 0.3)),
    "dppo kl": (lambda *x: af.losses.dppo(*x, 0.03, divergence="kl"), slow_dppo("kl", 0.03)),
    "value": (af.losses.value, tokenwise(lambda v, _, old, target: 0.5 * (v - target) ** 2)),
    "value clip": (lambda *x: af.losses.value(*x, clip=0.2), slow_value(0.2)),
    "kl k1": (lambda lp, ref, _, m: af.losses.kl(lp, ref, "k1", m), tokenwise(lambda p, _, q, a: p - q)),
    "kl abs": (lambda lp, ref, _, m: af.losses.kl(lp, ref, "abs", m), tokenwise(lambda p, _, q, a: abs(p - q))),
    "kl k2": (lambda lp, ref, _, m: af.losses.kl(lp, ref, "k2", m), tokenwise(lambda p, _, q, a: (p - q) ** 2 / 2)),
    "kl k3": (
        lambda lp, ref, _, m: af.losses.kl(lp, ref, "k3", m),
        tokenwise(lambda p, _, q, a: E(q - p) - 1 + p - q),
    ),
    "kl k3+": (
        lambda lp, ref, _, m: af.losses.kl(lp, ref, "k3+", m),
        tokenwise(lambda p, f, q, a: E(q - f) - 1 + f - q + ((p - q) ** 2 - (f - q) ** 2) / 2),
    ),
}
# Functions that return no loss per token; they have tests of their own.
OTHERS = {
    "adaptive_kl_coef", "aggregate", "approx_kl", "clipped", "importance_weights", "effective_sample_size",
}  # fmt: skip


def test_every_loss_is_in_the_table() -> None:
    assert {name.split()[0] for name in LOSSES} | OTHERS == set(af.losses.__all__)


def slow_aggregate(rows: Rows, how: str, trajectory_index: list[int], empty_rows: str, count: str) -> float:
    n_rows = len(rows) if empty_rows == "count" else sum(bool(r) for r in rows)
    if how == "token_mean":
        n = sum(map(len, rows))
        return sum(map(sum, rows)) / n if n else 0.0
    if how == "trajectory_mean":
        together: dict[int, list[float]] = {}
        for name, row in zip(trajectory_index, rows, strict=True):
            together.setdefault(name, []).extend(row)
        n = len(together) if empty_rows == "count" else sum(bool(r) for r in together.values())
        n = n_rows if count == "rows" else n
        return sum(sum(r) / len(r) for r in together.values() if r) / n if n else 0.0
    each = [sum(r) / len(r) if how == "seq_mean_token_mean" else sum(r) for r in rows if r]
    scale = 7.0 if how == "fixed" else 1.0
    return sum(each) / n_rows / scale if n_rows else 0.0


AGGREGATES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_mean count": {"empty_rows": "count"},
    "seq_mean_token_sum": {},
    "fixed": {"denominator": 7.0},
    "fixed count": {"denominator": 7.0, "empty_rows": "count"},
    "trajectory_mean": {"trajectory_index": [5, 2, 5]},
    "trajectory_mean rows": {"trajectory_index": ["b", "a", "b"], "count": "rows"},
}
MASKS = {
    "full": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
    "padded": [[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]],
    "empty row": [[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]],
    "one token": [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
}


def compact(x: Tensor, mask: Tensor) -> Rows:
    return [row[m.bool()].tolist() for row, m in zip(x, mask, strict=True)]


def batch(seed: int, mask: list[list[int]], poison: float = nan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, old logprobs and advantages, with ratios on all sides of every clip; `poison` where masked."""
    noise = random.Random(seed)
    m = torch.tensor(mask)
    old = torch.tensor([[noise.uniform(-3, -0.75) for _ in row] for row in mask], dtype=torch.float64)
    step = torch.tensor([[noise.choice([-0.7, -0.3, -0.05, 0.05, 0.3, 0.7]) for _ in row] for row in mask])
    a = torch.tensor([[noise.choice([-1.5, -0.5, 0.5, 1.5]) for _ in row] for row in mask], dtype=torch.float64)
    lp, old, a = (torch.where(m > 0, x.double(), poison) for x in (old + step, old, a))
    return lp, old, a, m


def options(name: str) -> tuple[Any, dict[str, Any]]:
    return name.split()[0], AGGREGATES[name]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ignore the warnings about empty rows and k1 in a loss, which have tests of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.filterwarnings("ignore", message="kl.kind='k1'", category=UserWarning)
        yield


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("quiet")
def test_values_and_gradients_equal_the_loop(loss: str, mask: list[list[int]]) -> None:
    fast, slow = LOSSES[loss]
    lp, old, a, m = batch(seed=len(loss) + sum(map(sum, mask)), mask=mask)
    lp.requires_grad_()
    per_token = fast(lp, old, a, m)
    assert per_token.shape == lp.shape
    assert bool((per_token[m == 0] == 0).all())
    rows = [compact(x.detach(), m) for x in (lp, lp, old, a)]
    for g, w in zip(compact(per_token.detach(), m), slow(*rows), strict=True):
        close(torch.tensor(g, dtype=torch.float64), w, 1e-10)
    for name in AGGREGATES:
        how, kw = options(name)
        rest = (how, kw.get("trajectory_index", []), kw.get("empty_rows", "exclude"), kw.get("count", "trajectories"))
        total = af.losses.aggregate(per_token, m, how, **kw)
        close(total.detach(), slow_aggregate(slow(*rows), *rest), 1e-10)
        (gradient,) = torch.autograd.grad(total, lp, retain_graph=True)
        assert bool((gradient[m == 0] == 0).all())
        for b, t in m.nonzero().tolist():
            ends, i = [], int(m[b, :t].sum())
            for h in (1e-5, -1e-5):
                moved = [list(row) for row in rows[0]]
                moved[b][i] += h
                ends.append(slow_aggregate(slow(moved, *rows[1:]), *rest))
            assert gradient[b, t].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7, rel=1e-6), (
                name,
                b,
                t,
            )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("quiet")
def test_values_at_masked_positions_are_never_read(loss: str, mask: list[list[int]]) -> None:
    seen = []
    for poison in (0.0, nan, inf, -inf, 1e30, -1e30):
        inputs = batch(3, mask, poison)
        inputs[0].requires_grad_()
        per_token = LOSSES[loss][0](*inputs)
        (gradient,) = torch.autograd.grad(af.losses.aggregate(per_token, inputs[3], "token_mean"), inputs[0])
        seen.append((per_token.detach(), gradient))
    for per_token, gradient in seen[1:]:
        assert per_token.equal(seen[0][0]) and gradient.equal(seen[0][1])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("quiet")
def test_extreme_ratios_stay_finite(loss: str) -> None:
    """A ratio of e^200 overflows; inf times the zero gradient of a clipped token would be NaN."""
    for sign in (-1.0, 1.0):
        lp = torch.tensor([[-300.0, -1.0, -300.0, -1.0]], requires_grad=True)
        old = torch.tensor([[-1.0, -300.0, -1.0, -300.0]])
        per_token = LOSSES[loss][0](lp, old, sign * torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4))
        (gradient,) = torch.autograd.grad(per_token.sum(), lp)
        assert bool(torch.isfinite(torch.cat([per_token, gradient])).all())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("quiet")
def test_half_precision_is_computed_in_float32(loss: str) -> None:
    lp, old, a, m = batch(1, MASKS["holes"])
    for dtype in (torch.float16, torch.bfloat16):
        x = [t.to(dtype) for t in (lp, old, a)]
        got = LOSSES[loss][0](*x, m)
        assert got.dtype == torch.float32
        close(got, LOSSES[loss][0](*(t.float() for t in x), m), 0)


# --- aggregation of empty rows and batches ---------------------------------------------------------


def test_a_batch_without_action_tokens_is_zero_with_a_warning() -> None:
    x, m = torch.full((2, 3), nan, requires_grad=True), torch.zeros(2, 3)
    for name in AGGREGATES:
        how, kw = options(name)
        kw = kw | ({"trajectory_index": [0, 1]} if "trajectory_index" in kw else {})
        with pytest.warns(RuntimeWarning, match="no action token in this batch; the loss is 0"):
            loss = af.losses.aggregate(x, m, how, **kw)
        assert loss.item() == 0
        (g,) = torch.autograd.grad(loss, x)
        assert bool((g == 0).all())


def test_empty_rows_warn_if_they_change_the_mean() -> None:
    x, m = torch.ones(2, 2), torch.tensor([[1, 1], [0, 0]])
    with pytest.warns(RuntimeWarning, match="rows without action tokens are left out of the mean"):
        af.losses.aggregate(x, m, "seq_mean_token_mean")
    with pytest.warns(RuntimeWarning, match="rows without action tokens are counted in the mean"):
        af.losses.aggregate(x, m, "seq_mean_token_mean", empty_rows="count")
    af.losses.aggregate(x, m, "token_mean")


def test_one_advantage_per_row_applies_to_all_its_tokens() -> None:
    lp, old, _, m = batch(0, MASKS["holes"])
    row = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    close(af.losses.ppo(lp, old, row, m), af.losses.ppo(lp, old, row[:, None].expand(3, 4), m))


# --- importance weights ---------------------------------------------------------------------------


def test_golden_importance_weights() -> None:
    ratio = torch.tensor([[0.5, 3.0, 1.0], [1.0, 2.0, nan]])
    lp, m = ratio.log(), torch.tensor([[1, 1, 1], [1, 1, 0]])
    sampler = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, inf]])
    close(af.losses.importance_weights(lp, sampler, m), [[0.5, 2, 1], [1, 2, 0]])
    close(af.losses.importance_weights(lp, sampler, m, beyond="mask"), [[0.5, 0, 1], [1, 2, 0]])
    close(af.losses.importance_weights(lp, sampler, m, floor=0.8), [[0.8, 2, 1], [1, 2, 0]])
    close(af.losses.importance_weights(lp, sampler, m, floor=0.8, beyond="mask"), [[0, 0, 1], [1, 2, 0]])
    sequence = af.losses.importance_weights(lp, sampler, m, level="sequence", cap=1.8)
    close(sequence, [[1.5] * 3, [1.8, 1.8, 0]])
    close(
        af.losses.importance_weights(lp, sampler, m, level="sequence", cap=1.8, beyond="mask"), [[1.5] * 3, [0, 0, 0]]
    )
    close(af.losses.effective_sample_size(sequence, m, level="sequence"), 3.3**2 / (2 * (1.5**2 + 1.8**2)))
    close(af.losses.effective_sample_size(sequence, m), 8.1**2 / (5 * (3 * 1.5**2 + 2 * 1.8**2)))


def test_importance_weights_stay_finite_and_carry_no_gradient() -> None:
    lp = torch.tensor([[-1.0, -300.0, nan]], requires_grad=True)
    for level in ("token", "sequence"):
        w = af.losses.importance_weights(
            lp, torch.tensor([[-300.0, -1.0, nan]]), torch.tensor([[1, 1, 0]]), level=level
        )  # type: ignore[arg-type]
        assert not w.requires_grad and bool(torch.isfinite(w).all())
    assert af.losses.importance_weights(lp, lp, torch.tensor([[1, 1, 0]])).tolist() == [[1, 1, 0]]


# --- KL -------------------------------------------------------------------------------------------


def test_only_k2_and_k3_plus_have_the_gradient_of_the_kl() -> None:
    """Expectations are computed exactly over a vocabulary of three."""
    ref = torch.log_softmax(torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64), 0)
    logits = torch.tensor([1.0, 0.1, -0.5], dtype=torch.float64, requires_grad=True)
    lp = torch.log_softmax(logits, 0)
    exact = (lp.exp() * (lp - ref)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    p = lp.exp().detach()
    with pytest.warns(UserWarning, match=r"expected gradient of k1 is 0.*use kind='k2' or 'k3\+'"):
        k1 = af.losses.kl(lp, ref, "k1")
    for kind in ("k2", "k3", "k3+", "k1"):
        per_token = k1 if kind == "k1" else af.losses.kl(lp, ref, kind)  # type: ignore[arg-type]
        (got,) = torch.autograd.grad((p * per_token).sum(), logits, retain_graph=True)
        if kind == "k1":
            close(got, [0.0, 0, 0], 1e-12)
        elif kind == "k3":
            assert not torch.allclose(got, want, atol=1e-3)
        else:
            close(got, want, 1e-12)
        if kind != "k2":
            close((p * per_token).sum().detach(), exact.detach(), 1e-12)  # the value is unbiased
