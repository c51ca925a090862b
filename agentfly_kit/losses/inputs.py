"""Validation of the inputs of losses, and replacement of values where the mask is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly_kit.errors import check_shape

# Maximum absolute value of log ratios. Larger values are clamped, because an infinite ratio times the zero gradient of
# a clipped token would be NaN. Clamped ratios have no gradient. For PPO, the missing gradient matters only if the
# advantage is negative and the ratio exceeds exp(20) = 5e8, because such tokens are not clipped.
MAX_LOG_RATIO = 20.0


def as_bool_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    check_shape("mask", mask, like.shape)
    return mask.to(device=like.device, dtype=torch.bool)


def masked(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return x as float32 or float64, with 0 where the mask is 0. Expand x if it has one value per row."""
    if mask.ndim == 2 and tuple(x.shape) in ((len(mask),), (len(mask), 1)):
        x = x.reshape(-1, 1).expand(mask.shape)
    check_shape(name, x, mask.shape)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 4:
        x = x.to(torch.float32)
    return torch.where(mask, x, 0.0)


def prepare(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return clamped log ratios (logprobs - old_logprobs) and advantages, both 0 where the mask is 0, and the mask."""
    m = as_bool_mask(mask, logprobs)
    d = masked(logprobs, m, "logprobs") - masked(old_logprobs, m, "old_logprobs")
    return d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), masked(advantages, m, "advantages"), m
