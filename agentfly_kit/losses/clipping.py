"""Diagnostics of the clip of `ppo`."""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly_kit.losses.inputs import as_bool_mask, log_ratio, masked, mean, upper_clip


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
    """Return True where the clip of `ppo` binds, given the sign of the advantage. These tokens have zero gradient.

    Shapes:  as `ppo` -> (B, T) bool.
    """
    high = upper_clip(clip, clip_high, dual_clip)
    m = as_bool_mask(mask, logprobs)
    a = masked(advantages, m, "advantages")
    ratio = torch.exp(log_ratio(logprobs, old_logprobs, m))
    # Masked advantages are 0, so the clip never binds there.
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
    """Fraction of action tokens where the clip of `ppo` binds (see `clipped`).

    Shapes:  as `ppo` -> ().
    """
    binds = clipped(logprobs, old_logprobs, advantages, mask, clip, clip_high, dual_clip)
    return mean(binds.to(torch.float32), as_bool_mask(mask, logprobs))
