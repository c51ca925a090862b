"""Losses: logprobs and advantages in, one number a token out; `aggregate` makes one number of them.

Pure functions of tensors. They do not know the policy, the optimizer, or how a batch was split. Everything per token is
(B, T), or (T,) for one row, and is indexed by the predicted token. Every input is replaced where the mask is 0 *before*
any subtraction or exp, so that NaN or inf there (which records hold on purpose) reaches neither value nor gradient; the
result is 0 there. Half precision is computed and returned in float32.

The sign: a loss is minimised. The unit of a policy loss is the advantage's, of a KL nats a token. All policy losses are
called alike, f(logprobs, old_logprobs, advantages, mask, ...), where an advantage is (B, T), or (B,) for one a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError

How: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "rollout_mean"]
KLKind: TypeAlias = Literal["k1", "abs", "k2", "k3", "k3+"]

__all__ = [
    "adaptive_kl_coef",
    "aggregate",
    "approx_kl",
    "cispo",
    "clip_cov",
    "clip_fraction",
    "clipped",
    "dppo",
    "effective_sample_size",
    "gmpo",
    "gpg",
    "gspo",
    "importance_weights",
    "kl",
    "kl_cov",
    "kl_full",
    "ppo",
    "reinforce",
    "sapo",
    "value",
]

# exp(20) = 5e8. Far past it a float32 ratio is inf, and inf times the zero gradient of a clipped token is NaN. A token
# beyond the limit gets no gradient. Where no clip would have stopped it already (a negative advantage, a ratio of 5e8)
# that is the lesser harm.
_MAX_LOG_RATIO = 20.0


def _choose(name: str, given: object, wanted: tuple[object, ...]) -> None:
    if given not in wanted:
        raise SettingsError(f"{name}={given!r}; wanted one of {', '.join(map(repr, wanted))}")


def _nonnegative(name: str, given: float | None) -> None:
    if given is not None and not given >= 0:
        raise SettingsError(f"{name}={given!r}; wanted a number >= 0")


def _check_clip(clip: float, clip_high: float | None, dual_clip: float | None = None) -> float:
    """The upper clip: clip_high, or clip where that is None."""
    _nonnegative("clip", clip)
    _nonnegative("clip_high", clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise SettingsError(f"dual_clip={dual_clip!r}; wanted a number above 1, or None")
    return clip if clip_high is None else clip_high


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    if mask.shape != like.shape:
        raise AlignmentError(f"mask has shape {tuple(mask.shape)}, the tokens {tuple(like.shape)}; give equal shapes")
    return mask.to(device=like.device, dtype=torch.bool)


def _at(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """x at action tokens, 0 elsewhere, in float32 or wider. A (B,) or (B, 1) x is one number a row."""
    if x.ndim == 1 and mask.ndim == 2 and len(x) == len(mask):
        x = x.unsqueeze(1)
    if x.shape != mask.shape:
        if mask.ndim != 2 or x.shape != (mask.shape[0], 1):
            raise AlignmentError(f"{name} has shape {tuple(x.shape)}; wanted {tuple(mask.shape)}")
        x = x.expand(mask.shape)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 4:
        x = x.to(torch.float32)
    return torch.where(mask, x, 0.0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, m: Tensor) -> Tensor:
    d = _at(logprobs, m, "logprobs") - _at(old_logprobs, m, "old_logprobs")
    return d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


# --- one number a token --------------------------------------------------------------------------


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate: -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A).

    clip_high=None is `clip`; a larger one is DAPO's clip-higher. dual_clip=c (> 1) bounds the loss of a token with a
    negative advantage by c |A|: without it a ratio far above 1 there has no bound.

    Shapes:  (B, T) each; advantages also (B,), one a row -> (B, T).
    Units:   the advantage's.
    Raises:  SettingsError for a negative clip or a dual_clip that is not above 1.
    Source:  PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, 3.1; dual clip: arXiv 1912.09729, eq. 5.
    """
    high = _check_clip(clip, clip_high, dual_clip)
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, m))
    loss = torch.maximum(-ratio * a, -ratio.clamp(1 - clip, 1 + high) * a)
    if dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -dual_clip * a), loss)
    return torch.where(m, loss, 0.0)


def reinforce(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
    """-A log p: the policy gradient itself, for one update on fresh samples.

    Shapes:  (B, T) each -> (B, T). old_logprobs is not read; it is there so that all policy losses are called alike.
    Source:  Williams (1992). Correct stale samples with `importance_weights` times the loss.
    """
    m = _mask(mask, logprobs)
    return torch.where(m, -_at(advantages, m, "advantages") * _at(logprobs, m, "logprobs"), 0.0)


def gpg(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss of Group Policy Gradient: that of `reinforce`. What is its own is in `advantages.gpg`.

    Shapes:  (B, T) each -> (B, T). old_logprobs is not read.
    Source:  GPG, arXiv 2504.02546.
    """
    return reinforce(logprobs, old_logprobs, advantages, mask)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> Tensor:
    """PPO's clip on the ratio of the whole row, the geometric mean of its tokens' ratios.

    In the GSPO-token form: each token has the row's ratio for a value and its own gradient, so that advantages may
    differ by token. With one advantage a row and "seq_mean_token_mean" it is GSPO exactly.

    Shapes:  (B, T) each -> (B, T).
    Source:  GSPO, arXiv 2507.18071, 4.1 and 4.3 (GSPO-token); the default clips are those of its experiments.
    """
    high = _check_clip(clip, clip_high)
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    d = _log_ratio(logprobs, old_logprobs, m)
    row = d.sum(-1, keepdim=True) / m.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(row.detach() + d - d.detach())
    return torch.where(m, torch.maximum(-ratio * a, -ratio.clamp(1 - clip, 1 + high) * a), 0.0)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.4,
    clip_high: float | None = None,
) -> Tensor:
    """Geometric mean of the row's ratios, each clipped on its own: to (e^-clip, e^clip_high), in log space.

    A quantity of the row: each action token carries the row's loss, so "seq_mean_token_mean" gives the published
    objective. The row's advantage is the mean of its tokens'.

    Shapes:  (B, T) each -> (B, T).
    Source:  GMPO, arXiv 2507.20673; its clip is (e^-0.4, e^0.4).
    """
    high = _check_clip(clip, clip_high)
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    d = _log_ratio(logprobs, old_logprobs, m)
    sign = a.sign()
    kept = sign * torch.minimum(sign * d, sign * d.clamp(-clip, high))
    n = m.sum(-1, keepdim=True).clamp(min=1)
    row = -torch.exp(kept.sum(-1, keepdim=True) / n) * a.sum(-1, keepdim=True) / n
    return torch.where(m, row, 0.0)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """A soft gate instead of a clip: -A (4 / tau) sigmoid(tau (ratio - 1)).

    Its slope in the ratio is 1 on policy and fades on both sides, faster for a larger tau; tau_negative is the tau of
    tokens with an advantage of 0 or less.

    Shapes:  (B, T) each -> (B, T).
    Raises:  SettingsError if a tau is not above 0.
    Source:  SAPO, arXiv 2511.20347.
    """
    if not (tau > 0 and tau_negative > 0):
        raise SettingsError(f"tau={tau!r}, tau_negative={tau_negative!r}; wanted numbers above 0")
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, m))
    t = torch.where(a > 0, torch.full_like(a, tau), tau_negative)
    return torch.where(m, -a * torch.sigmoid(t * (ratio - 1)) * 4 / t, 0.0)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    bounds: Literal["both", "upper"] = "both",
) -> Tensor:
    """-sg(clipped ratio) A log p: the ratio is only a weight, so that no token loses its gradient.

    bounds="both" (verl, SkyRL) clips the weight to (1 - clip, 1 + clip_high); "upper" (TRL) only caps it at
    1 + clip_high and does not read `clip`. TRL's `epsilon_high` is that cap itself: its 5 is clip_high=4 here.

    Shapes:  (B, T) each -> (B, T).
    Source:  MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. The paper sets no lower bound in its runs.
    """
    _choose("bounds", bounds, ("both", "upper"))
    high = _check_clip(clip, clip_high)
    m = _mask(mask, logprobs)
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, m)).detach()
    weight = ratio.clamp(1 - clip if bounds == "both" else None, 1 + high)
    return torch.where(m, -weight * _at(advantages, m, "advantages") * _at(logprobs, m, "logprobs"), 0.0)


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    divergence: Literal["tv", "kl"] = "tv",
) -> Tensor:
    """-M ratio A, where M drops a token whose update would push the two policies further apart than `clip`.

    The distance is that of "this token or another one": |p - q| for "tv", KL(Bernoulli(q) || Bernoulli(p)) for "kl",
    with q the probability under old_logprobs, which should be the sampler's own. Unlike a clip on the ratio it lets a
    rare token's ratio move far. A usual threshold for "kl" is 0.05.

    Shapes:  (B, T) each -> (B, T).
    Units:   clip: probability for "tv", nats for "kl".
    Source:  DPPO, arXiv 2602.04879, eq. 11 to 14.
    """
    _choose("divergence", divergence, ("tv", "kl"))
    high = _check_clip(clip, clip_high)
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, m))
    with torch.no_grad():
        log_p, log_q = _at(logprobs, m, "logprobs"), _at(old_logprobs, m, "old_logprobs")
        p, q = log_p.exp(), log_q.exp()
        if divergence == "tv":
            far = (p - q).abs()
        else:
            # 1 - p of a near-certain token is below float32's grain.
            other = torch.log1p(-q.clamp(max=1 - 1e-7)) - torch.log1p(-p.clamp(max=1 - 1e-7))
            far = q * (log_q - log_p) + (1 - q) * other
        dropped = ((a > 0) & (p > q) & (far > high)) | ((a < 0) & (p < q) & (far > clip))
    return torch.where(m & ~dropped, -ratio * a, 0.0)


def _covariance(logprobs: Tensor, advantages: Tensor, m: Tensor) -> Tensor:
    """(A - mean A)(log p - mean log p), the means over the action tokens of this call; -inf where masked."""
    lp, a = _at(logprobs, m, "logprobs").detach(), _at(advantages, m, "advantages")
    n = m.sum().clamp(min=1)
    return torch.where(m, (a - a.sum() / n) * (lp - lp.sum() / n), -torch.inf)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """`ppo`, with a random few of the tokens that drive entropy down taken out.

    Those with low < covariance of advantage and logprob < high whose clip does not bind; of them `share` of all action
    tokens are drawn, at least one if there is one. Means and draw are over this call: give the whole minibatch, and a
    new seed each time.

    Shapes:  (B, T) each -> (B, T).
    Source:  The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617 (Clip-Cov).
    """
    per_token = ppo(logprobs, old_logprobs, advantages, mask, clip, clip_high)
    m = _mask(mask, logprobs)
    cov = _covariance(logprobs, advantages, m)
    free = ~clipped(logprobs, old_logprobs, advantages, mask, clip, clip_high)
    candidates = ((cov > low) & (cov < high) & free).flatten().nonzero().flatten()
    if not len(candidates):
        return per_token
    n = max(int(share * int(m.sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    taken = torch.zeros_like(m).flatten().index_fill(0, candidates[order[:n]], True).view_as(m)
    return torch.where(taken, 0.0, per_token)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float = 2e-4,
    coef: float = 1.0,
) -> Tensor:
    """-ratio A, with coef |log ratio| added on the tokens of highest covariance of advantage and logprob.

    `share` of all action tokens, at least one. There is no clip. Means and choice are over this call.

    Shapes:  (B, T) each -> (B, T).
    Source:  arXiv 2505.22617 (KL-Cov); |log ratio| as the penalty is its code's choice.
    """
    m = _mask(mask, logprobs)
    d = _log_ratio(logprobs, old_logprobs, m)
    loss = torch.where(m, -torch.exp(d) * _at(advantages, m, "advantages"), 0.0)
    tokens = int(m.sum())
    if tokens == 0:
        return loss
    chosen = _covariance(logprobs, advantages, m).flatten().topk(max(int(share * tokens), 1)).indices
    held = torch.zeros_like(m).flatten().index_fill(0, chosen, True).view_as(m)
    return loss + torch.where(held, coef * d.abs(), 0.0)


def value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error to the return; with `clip` the larger of it and that of a value kept near the old one.

    Shapes:  (B, T) each -> (B, T). old_values may be None without `clip`.
    Units:   reward squared.
    Raises:  SettingsError for a negative clip.
    Source:  the clipped form is in the code of PPO (arXiv 1707.06347), not in its text; arXiv 2005.12729 looks into it.
    """
    _nonnegative("clip", clip)
    m = _mask(mask, values)
    v, target = _at(values, m, "values"), _at(returns, m, "returns")
    loss = (v - target).square()
    if clip is not None:
        if old_values is None:
            raise SettingsError(f"clip={clip!r} with old_values=None; give the values from before the update")
        old = _at(old_values, m, "old_values")
        loss = torch.maximum(loss, (old + (v - old).clamp(-clip, clip) - target).square())
    return torch.where(m, 0.5 * loss, 0.0)


def kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3", mask: Tensor | None = None) -> Tensor:
    """Estimate of KL(policy || reference) at each token sampled from the policy, from its two logprobs alone.

    With d = log p - log q:  k1 d,  abs |d|,  k2 d²/2,  k3 exp(-d) - 1 + d,  and k3+ the value of k3 with the gradient
    of k2. k1 and k3 are unbiased values; only k2 (and so k3+) has the gradient of the KL in expectation. k1's expected
    gradient is 0: in the reward it is right, in a loss it does nothing but noise.

    Shapes:  (B, T) each -> (B, T), 0 where masked.
    Units:   nats a token.
    Raises:  SettingsError for an unknown kind. UserWarning for k1 when logprobs carry a gradient.
    Source:  Schulman, "Approximating KL divergence" (2020): k1, k2, k3.
    """
    _choose("kind", kind, ("k1", "abs", "k2", "k3", "k3+"))
    m = _mask(mask, logprobs)
    d = _at(logprobs, m, "logprobs") - _at(ref_logprobs, m, "ref_logprobs")
    if kind == "k1":
        if d.requires_grad:
            warnings.warn(
                "kl(kind='k1') in a loss: the expected gradient of k1 is 0, so it adds noise and no pull to the "
                "reference; use kind='k2' or 'k3+', or put k1 in the reward (under torch.no_grad())",
                UserWarning,
                stacklevel=2,
            )
        return d
    if kind == "abs":
        return d.abs()
    k2 = 0.5 * d.square()
    if kind == "k2":
        return k2
    k3 = torch.exp((-d).clamp(max=_MAX_LOG_RATIO)) - 1 + d
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def kl_full(logits: Tensor, ref_logits: Tensor, mask: Tensor) -> Tensor:
    """Exact KL(policy || reference) of the two next-token distributions at each action token.

    A token that both forbid (logit -inf) adds nothing; one that only the reference forbids makes the KL infinite.

    Shapes:  logits, ref_logits (B, T, V), mask (B, T) -> (B, T).
    Units:   nats a token.
    """
    if logits.shape != ref_logits.shape or logits.shape[:-1] != mask.shape:
        raise AlignmentError(
            f"logits {tuple(logits.shape)}, ref_logits {tuple(ref_logits.shape)}, mask {tuple(mask.shape)}; "
            "wanted (B, T, V) twice and (B, T)"
        )
    m = mask.to(device=logits.device, dtype=torch.bool)
    # Only the rows that count are ever read: V is large, and poison elsewhere stays where it is.
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits[m].to(wide), -1)
    log_q = torch.log_softmax(ref_logits[m].to(wide), -1)
    possible = log_p > -torch.inf
    log_p = torch.where(possible, log_p, 0.0)  # 0 * -inf would be NaN
    log_q = torch.where(possible, log_q, 0.0)
    per_token = torch.where(possible, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    return torch.zeros_like(mask, dtype=wide, device=logits.device).masked_scatter(m, per_token)


def adaptive_kl_coef(coef: float, kl: float, *, target: float, steps: float, horizon: float = 10_000) -> float:
    """The next KL coefficient: up when the KL is above its target, down when below, slowly.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) steps / horizon). A fixed coefficient is simply not updated.

    Units:   kl and target in nats a token, steps and horizon in trajectories.
    Raises:  SettingsError unless target and horizon are above 0.
    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, 2.2.
    """
    if not (target > 0 and horizon > 0):
        raise SettingsError(f"target={target!r}, horizon={horizon!r}; wanted numbers above 0")
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * steps / horizon)


# --- one number of many tokens -------------------------------------------------------------------


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    how: How = "token_mean",
    *,
    total: float | Tensor | None = None,
    denominator: float | None = None,
    rollouts: Iterable[Hashable] | Tensor | None = None,
    rollout_tokens: Tensor | None = None,
    empty_rows: Literal["exclude", "count"] = "exclude",
    count: Literal["rollouts", "rows"] = "rollouts",
) -> Tensor:
    """One loss from per-token losses. What a mean is taken over decides whose tokens weigh how much.

    token_mean           sum / action tokens: long rows weigh more.            total: action tokens
    seq_mean_token_mean  mean over rows of each row's mean: rows weigh equal.  total: rows
    seq_mean_token_sum   mean over rows of each row's sum.                     total: rows
    fixed                sum / (rows x denominator), the denominator a         total: rows
                         configured number of tokens a row (Dr.GRPO).
    rollout_mean         each rollout's tokens over its own action tokens,     total: rollouts (rows, for
                         then over the number of rollouts.                     count="rows")

    `total` is that count over the whole minibatch, on all ranks: with it, micro-batches *add up* to the loss of the
    whole. None counts what is here. A rollout whose rows are spread over micro-batches also needs `rollout_tokens`, the
    action tokens of each row's whole rollout. No denominator depends on padding.

    empty_rows: is a row without action tokens a row? "exclude" (verl) no, "count" (TRL, SkyRL) yes.
    count="rows" divides rollout_mean by rows instead, as Agent Lightning's own code does.

    Shapes:  per_token, mask (B, T) or (T,); rollouts (B,) ids; rollout_tokens (B,) -> ().
    Raises:  SettingsError for an option that does not fit `how`. Nothing to average: 0 and a RuntimeWarning.
    Source:  DAPO, arXiv 2503.14476, 3.3 (token mean); arXiv 2503.20783, 3.2 (fixed); Agent Lightning v1 (rollout mean).
    """
    names = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "rollout_mean")
    _choose("how", how, names)
    _choose("empty_rows", empty_rows, ("exclude", "count"))
    _choose("count", count, ("rollouts", "rows"))
    if (how == "fixed") != (denominator is not None):
        raise SettingsError(f"how={how!r} with denominator={denominator!r}; 'fixed' needs one, and no other takes it")
    if denominator is not None and not denominator > 0:
        raise SettingsError(f"denominator={denominator!r}; wanted the tokens a row is divided by, above 0")
    if (how == "rollout_mean") != (rollouts is not None):
        raise SettingsError(
            f"how={how!r} with rollouts={rollouts!r}; 'rollout_mean' needs ids, and no other takes them"
        )
    if per_token.ndim == 1:
        per_token, mask = per_token.unsqueeze(0), mask.unsqueeze(0)
    m = _mask(mask, per_token)
    x = _at(per_token, m, "per_token")
    tokens = m.sum(1)
    row_sum = x.sum(1)

    rows = (tokens > 0).sum() if empty_rows == "exclude" else torch.tensor(len(m))
    if how == "token_mean":
        top, bottom = row_sum.sum(), tokens.sum()
    elif how == "seq_mean_token_mean":
        top, bottom = (row_sum / tokens.clamp(min=1)).sum(), rows
    elif how == "rollout_mean":
        assert rollouts is not None
        index = _index(rollouts, m)
        n = int(index.max()) + 1 if len(index) else 0
        whole = tokens.new_zeros(n).index_add(0, index, tokens)
        of_row = whole[index] if rollout_tokens is None else rollout_tokens.to(m.device)
        top = (row_sum / of_row.clamp(min=1)).sum()
        bottom = (whole > 0).sum() if empty_rows == "exclude" else torch.tensor(n)
        bottom = rows if count == "rows" else bottom
    else:
        top, bottom = row_sum.sum(), rows

    if total is not None:
        bottom = torch.as_tensor(total)
    elif not bool(m.any()):
        warnings.warn("aggregate: no action token in this batch; the loss is 0", RuntimeWarning, stacklevel=2)
    elif how != "token_mean" and not bool((tokens > 0).all()):
        fate = "left out of" if empty_rows == "exclude" else "counted in"
        warnings.warn(f"aggregate: rows without action tokens are {fate} the mean", RuntimeWarning, stacklevel=2)
    bottom = bottom.to(device=x.device, dtype=x.dtype) * (denominator or 1.0)
    return top / torch.where(bottom > 0, bottom, 1.0)


def _index(ids: Iterable[Hashable] | Tensor, mask: Tensor) -> Tensor:
    seen: dict[Hashable, int] = {}
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(listed) != len(mask):
        raise AlignmentError(f"{len(listed)} rollout ids for {len(mask)} rows; give one id for each row")
    return torch.tensor([seen.setdefault(i, len(seen)) for i in listed], dtype=torch.long, device=mask.device)


# --- when sampler and trainer differ --------------------------------------------------------------


@torch.no_grad()
def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    beyond: Literal["truncate", "mask"] = "truncate",
) -> Tensor:
    """Truncated importance sampling: trainer's over sampler's probability, kept in (floor, cap). A weight for the loss.

    level="token" weighs each token by its own ratio; "sequence" each token of a row by the row's ratio, the product of
    its tokens' (unbiased before truncation, and far more spread). beyond="truncate" puts a weight outside on the bound,
    "mask" puts it to 0, which drops the token or the whole row.

    Shapes:  (B, T) each -> (B, T), 0 where masked, no gradient. Multiply the per-token loss by it.
    Raises:  SettingsError unless 0 <= floor <= cap.
    Source:  Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), for truncation
             by token; Liu et al., "When speed kills stability" (2025), for sequences and masking.
    """
    _choose("level", level, ("token", "sequence"))
    _choose("beyond", beyond, ("truncate", "mask"))
    if not 0 <= floor <= cap:
        raise SettingsError(f"floor={floor!r}, cap={cap!r}; wanted 0 <= floor <= cap")
    m = _mask(mask, logprobs)
    d = _at(logprobs, m, "logprobs") - _at(sampler_logprobs, m, "sampler_logprobs")
    if level == "sequence":
        d = d.sum(-1, keepdim=True).expand_as(d)
    w = torch.exp(d.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    w = w.clamp(floor, cap) if beyond == "truncate" else torch.where((w >= floor) & (w <= cap), w, 0.0)
    return torch.where(m, w, 0.0)


@torch.no_grad()
def effective_sample_size(weights: Tensor, mask: Tensor, *, level: Literal["token", "sequence"] = "token") -> Tensor:
    """Share of the sample that is left after weighing: (sum w)^2 / (n sum w^2), 1 for equal weights.

    Shapes:  weights, mask (B, T) -> (). level="sequence" counts rows, by the weight that all tokens of a row share.
    Units:   share of action tokens, or of rows that have one; 0 when nothing is left.
    Source:  Kish (1965).
    """
    _choose("level", level, ("token", "sequence"))
    m = _mask(mask, weights)
    w = _at(weights, m, "weights")
    if level == "sequence":
        w, m = w.amax(-1), m.any(-1)
    bottom = m.sum() * w.square().sum()
    return torch.where(bottom > 0, w.sum().square() / torch.where(bottom > 0, bottom, 1.0), 0.0)


# --- what to look at -----------------------------------------------------------------------------


def _mean(x: Tensor, m: Tensor) -> Tensor:
    return x.sum() / m.sum().clamp(min=1)


@torch.no_grad()
def approx_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean over action tokens of (ratio - 1) - log ratio: k3 of KL(old || new), for tokens sampled from the old policy.

    Shapes:  (B, T) each -> (). Never negative.
    Units:   nats a token.
    Source:  Schulman, "Approximating KL divergence" (2020).
    """
    m = _mask(mask, logprobs)
    return _mean(kl(old_logprobs, logprobs, "k3", m), m)


@torch.no_grad()
def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Where the clip of `ppo` binds, given the advantage's sign: those action tokens get no gradient.

    Shapes:  as `ppo` -> (B, T) bool.
    """
    high = _check_clip(clip, clip_high, dual_clip)
    m = _mask(mask, logprobs)
    a = _at(advantages, m, "advantages")
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs, m))
    # An advantage is 0 where masked, so nothing binds there.
    binds = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - clip))
    if dual_clip is not None:
        binds |= (a < 0) & (ratio > dual_clip)
    return binds


@torch.no_grad()
def clip_fraction(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Share of action tokens where the clip of `ppo` binds (see `clipped`).

    Shapes:  as `ppo` -> ().
    """
    binds = clipped(logprobs, old_logprobs, advantages, mask, clip, clip_high, dual_clip)
    return _mean(binds.to(torch.float32), _mask(mask, logprobs))
