"""Per-token policy losses, computed from probability ratios and advantages, and the loss of the value head."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import check_choice, check_value
from agentfly_kit.losses.inputs import as_bool_mask, masked, prepare

Bounds: TypeAlias = Literal["both", "upper"]
Divergence: TypeAlias = Literal["tv", "kl"]


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate loss -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A), where A is the advantage.

    `clip_high` defaults to `clip`; a larger value yields the clip-higher of DAPO. With dual_clip=c (> 1), the loss of a
    token with a negative advantage is at most c |A|. By default, the loss is unbounded.

    Shapes:  each (B rows, T tokens); advantages may be (B,), one per row -> (B, T).
    Units:   same as the advantage.
    Source:  PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, 3.1; dual clip: arXiv 1912.09729, eq. 5.
    """
    high = clip if clip_high is None else clip_high
    d, a, _ = prepare(logprobs, old_logprobs, advantages, mask)
    loss = _clipped_surrogate(torch.exp(d), a, clip, high)
    return loss if dual_clip is None else torch.where(a < 0, torch.minimum(loss, -dual_clip * a), loss)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)


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
    """Return a mask of the tokens at which the clip of `ppo` is active and the gradient is therefore 0.

    Shapes:  as in `ppo` -> (B, T) bool, False where the mask is 0.
    """
    high = clip if clip_high is None else clip_high
    d, a, _ = prepare(logprobs, old_logprobs, advantages, mask)
    ratio, high_if_negative = torch.exp(d), torch.inf if dual_clip is None else dual_clip
    return ((a > 0) & (ratio > 1 + high)) | ((a < 0) & ((ratio < 1 - clip) | (ratio > high_if_negative)))


def reinforce(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE loss -A log p for a single update on fresh samples, where A is the advantage. GPG uses the same loss.

    Shapes:  each (B rows, T tokens) -> (B, T). old_logprobs is unused and exists for a uniform signature.
    Source:  Williams (1992). For stale samples, multiply the loss by `importance_weights`.
    """
    m = as_bool_mask(mask, logprobs)
    return -masked(advantages, m, "advantages") * masked(logprobs, m, "logprobs")


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
) -> Tensor:
    """Clipped surrogate loss with one ratio per row, which is the geometric mean of the ratios of the row's tokens.

    In this form, called GSPO-token, every token uses the value of the row's ratio but the gradient of its own logprob.
    Therefore, advantages may differ between tokens. With one advantage per row and the aggregation
    "seq_mean_token_mean", the loss equals that of GSPO.

    Shapes:  each (B rows, T tokens) -> (B, T).
    Source:  GSPO, arXiv 2507.18071, eq. 13 and 14 (GSPO-token); the default clips are from the paper's experiments.
    """
    high = clip if clip_high is None else clip_high
    d, a, m = prepare(logprobs, old_logprobs, advantages, mask)
    row = d.sum(-1, keepdim=True) / m.sum(-1, keepdim=True).clamp(min=1)
    return _clipped_surrogate(torch.exp(row.detach() + d - d.detach()), a, clip, high)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.4,
    clip_high: float | None = None,
) -> Tensor:
    """GMPO loss, -A times the geometric mean of the ratios of a row, each clipped to (e^-clip, e^clip_high).

    A is the mean advantage of the row's tokens. All action tokens of a row have the same loss, so the aggregation
    "seq_mean_token_mean" yields the published objective.

    Shapes:  each (B rows, T tokens) -> (B, T).
    Source:  GMPO, arXiv 2507.20673, which clips to (e^-0.4, e^0.4).
    """
    high = clip if clip_high is None else clip_high
    d, a, m = prepare(logprobs, old_logprobs, advantages, mask)
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
    """SAPO loss -A (4 / tau) sigmoid(tau (ratio - 1)) with a smooth gate instead of a clip, where A is the advantage.

    The derivative of the gate is 1 at ratio 1 and decays on both sides. tau_negative replaces tau where A <= 0.

    Shapes:  each (B rows, T tokens) -> (B, T).
    Raises:  SettingsError if tau or tau_negative is not above 0.
    Source:  SAPO, arXiv 2511.20347.
    """
    for name, value in (("tau", tau), ("tau_negative", tau_negative)):
        check_value(name, value, "float", "above 0")
    d, a, _ = prepare(logprobs, old_logprobs, advantages, mask)
    t = torch.where(a > 0, torch.full_like(a, tau), tau_negative)
    return -a * torch.sigmoid(t * (torch.exp(d) - 1)) * 4 / t


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    bounds: Bounds = "both",
) -> Tensor:
    """CISPO loss -stop_gradient(clipped ratio) A log p, where A is the advantage. Clipped tokens keep a gradient.

    bounds="both" (verl, SkyRL) clips the ratio to (1 - clip, 1 + clip_high); "upper" (TRL) only limits the ratio
    to 1 + clip_high and ignores `clip`. TRL's `epsilon_high` is the limit itself, so epsilon_high=5 equals clip_high=4.

    Shapes:  each (B rows, T tokens) -> (B, T).
    Source:  MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. The paper sets no lower bound in its runs.
    """
    check_choice("bounds", bounds, Bounds)
    high = clip if clip_high is None else clip_high
    d, a, m = prepare(logprobs, old_logprobs, advantages, mask)
    weight = torch.exp(d).detach().clamp(1 - clip if bounds == "both" else None, 1 + high)
    return -weight * a * masked(logprobs, m, "logprobs")


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    clip_high: float | None = None,
    *,
    divergence: Divergence = "tv",
) -> Tensor:
    """DPPO loss -ratio * advantage, or 0 where the policies differ by more than `clip` and would move further apart.

    The difference is measured between a token's probability p under the current policy and q = exp(old_logprobs),
    where old_logprobs should be those of the sampler. With divergence="tv", the difference is |p - q|. With "kl", the
    difference is KL(Bernoulli(q) || Bernoulli(p)), for which `clip` is usually 0.05. If `clip_high` is given, it
    replaces `clip` for tokens with a positive advantage. Unlike clipping of the ratio, DPPO permits large ratios of
    rare tokens. verl also limits the ratio, by default to 3; the paper found that such limits make training less stable
    (section 5.4).

    Shapes:  each (B rows, T tokens) -> (B, T).
    Units:   clip: probability for "tv", nats for "kl".
    Source:  DPPO, arXiv 2602.04879, eq. 12 to 14.
    """
    check_choice("divergence", divergence, Divergence)
    high = clip if clip_high is None else clip_high
    d, a, m = prepare(logprobs, old_logprobs, advantages, mask)
    with torch.no_grad():
        log_p, log_q = masked(logprobs, m, "logprobs"), masked(old_logprobs, m, "old_logprobs")
        p, q = log_p.exp(), log_q.exp()
        if divergence == "tv":
            far = (p - q).abs()
        else:
            # For nearly certain tokens, 1 - p rounds to 0 in float32, and log(1 - p) would be -inf.
            other = torch.log1p(-q.clamp(max=1 - 1e-7)) - torch.log1p(-p.clamp(max=1 - 1e-7))
            far = q * (log_q - log_p) + (1 - q) * other
        dropped = ((a > 0) & (p > q) & (far > high)) | ((a < 0) & (p < q) & (far > clip))
    return torch.where(dropped, 0.0, -torch.exp(d) * a)


def value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None) -> Tensor:
    """Value loss, half the squared difference between values and returns.

    With `clip`, the result is the maximum of this loss and the loss of the values clamped to old_values ± clip.

    Shapes:  each (B rows, T tokens) -> (B, T). old_values may be None without `clip`.
    Units:   reward squared.
    Source:  The clipped form is in the code of PPO (arXiv 1707.06347), not in the paper; see also arXiv 2005.12729.
    """
    m = as_bool_mask(mask, values)
    v, target = masked(values, m, "values"), masked(returns, m, "returns")
    loss = (v - target).square()
    if clip is not None:
        old = masked(old_values, m, "old_values")
        loss = torch.maximum(loss, (old + (v - old).clamp(-clip, clip) - target).square())
    return 0.5 * loss
