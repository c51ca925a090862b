"""Importance weights for tokens sampled from another distribution than that of the trainer."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import SettingsError, check_choice
from agentfly_kit.losses.inputs import MAX_LOG_RATIO, as_bool_mask, masked

WeightLevel: TypeAlias = Literal["token", "sequence"]
BeyondBounds: TypeAlias = Literal["truncate", "mask"]


@torch.no_grad()
def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: WeightLevel = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    beyond: BeyondBounds = "truncate",
) -> Tensor:
    """Truncated importance weights: probability under the trainer over that under the sampler, limited to [floor, cap].

    level="token" weights each token by its own ratio; "sequence" weights all tokens of a row by the product of their
    ratios (unbiased before truncation, but with far higher variance). beyond="truncate" clamps weights outside the
    bounds; "mask" sets them to 0, which drops the token or the whole row.

    Shapes:  (B, T) each -> (B, T), 0 where masked, no gradient. Multiply the per-token loss by it.
    Raises:  SettingsError unless 0 <= floor <= cap.
    Source:  Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), for truncation
             by token; Liu et al., "When speed kills stability" (2025), for sequences and masking.
    """
    check_choice("level", level, WeightLevel)
    check_choice("beyond", beyond, BeyondBounds)
    if not 0 <= floor <= cap:
        raise SettingsError(f"floor and cap must satisfy 0 <= floor <= cap, got {floor!r} and {cap!r}")
    m = as_bool_mask(mask, logprobs)
    d = masked(logprobs, m, "logprobs") - masked(sampler_logprobs, m, "sampler_logprobs")
    if level == "sequence":
        d = d.sum(-1, keepdim=True).expand_as(d)
    w = torch.exp(d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    w = w.clamp(floor, cap) if beyond == "truncate" else torch.where((w >= floor) & (w <= cap), w, 0.0)
    return torch.where(m, w, 0.0)


@torch.no_grad()
def effective_sample_size(weights: Tensor, mask: Tensor, *, level: WeightLevel = "token") -> Tensor:
    """Effective sample size as a fraction of the sample: (sum w)^2 / (n sum w^2), 1 for equal weights.

    Shapes:  weights, mask (B, T) -> (). level="sequence" counts rows by the weight shared by all tokens of a row.
    Units:   fraction of action tokens, or of rows with action tokens; 0 if all weights are 0.
    Source:  Kish (1965).
    """
    check_choice("level", level, WeightLevel)
    m = as_bool_mask(mask, weights)
    w = masked(weights, m, "weights")
    if level == "sequence":
        w, m = w.amax(-1), m.any(-1)
    bottom = m.sum() * w.square().sum()
    return torch.where(bottom > 0, w.sum().square() / torch.where(bottom > 0, bottom, 1.0), 0.0)
