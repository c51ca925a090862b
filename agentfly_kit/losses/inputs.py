"""Validation of the inputs of losses, and replacement of values where the mask is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError

# exp(20) = 5e8. A far larger float32 ratio is inf, and inf times the zero gradient of a clipped token is NaN. Tokens
# beyond the limit get no gradient, which matters only without a clip (negative advantage and a ratio of 5e8).
MAX_LOG_RATIO = 20.0


def check_choice(name: str, given: object, wanted: tuple[object, ...]) -> None:
    if given not in wanted:
        raise SettingsError(f"{name}={given!r}; wanted one of {', '.join(map(repr, wanted))}")


def check_nonnegative(name: str, given: float | None) -> None:
    if given is not None and not given >= 0:
        raise SettingsError(f"{name}={given!r}; wanted a number >= 0")


def upper_clip(clip: float, clip_high: float | None, dual_clip: float | None = None) -> float:
    """Return the upper clip: clip_high, or clip if that is None."""
    check_nonnegative("clip", clip)
    check_nonnegative("clip_high", clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise SettingsError(f"dual_clip={dual_clip!r}; wanted a number above 1, or None")
    return clip if clip_high is None else clip_high


def as_bool_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    if mask.shape != like.shape:
        raise AlignmentError(f"mask has shape {tuple(mask.shape)}, the tokens {tuple(like.shape)}; give equal shapes")
    return mask.to(device=like.device, dtype=torch.bool)


def masked(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return x at action tokens and 0 elsewhere, in float32 or wider. (B,) or (B, 1) is one number per row."""
    if x.ndim == 1 and mask.ndim == 2 and len(x) == len(mask):
        x = x.unsqueeze(1)
    if x.shape != mask.shape:
        if mask.ndim != 2 or x.shape != (mask.shape[0], 1):
            raise AlignmentError(f"{name} has shape {tuple(x.shape)}; wanted {tuple(mask.shape)}")
        x = x.expand(mask.shape)
    if not x.dtype.is_floating_point or x.dtype.itemsize < 4:
        x = x.to(torch.float32)
    return torch.where(mask, x, 0.0)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, m: Tensor) -> Tensor:
    d = masked(logprobs, m, "logprobs") - masked(old_logprobs, m, "old_logprobs")
    return d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mean(x: Tensor, m: Tensor) -> Tensor:
    return x.sum() / m.sum().clamp(min=1)
