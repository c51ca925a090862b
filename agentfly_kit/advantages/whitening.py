"""Whitening: mean 0 and std 1 over all action tokens of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.advantages.inputs import Numbers, Std, as_bool_mask, as_floats, require_finite
from agentfly_kit.errors import check_choice


def whitened(x: Tensor, mask: Tensor, std: Std, eps: float, what: str) -> Tensor:
    """Whiten converted values; `what` names the caller in a warning."""
    check_choice("std", std, Std)
    if not bool(mask.any()):
        warnings.warn(
            f"{what}: no scored action token to whiten over; all advantages are 0", RuntimeWarning, stacklevel=3
        )
        return torch.zeros_like(x)
    kept = x[mask]
    if bool((kept == kept[0]).all()):
        return torch.zeros_like(x)  # as in a flat group: do not divide rounding errors by each other
    mean = kept.mean()
    scale = 1.0 if std is None else kept.std(unbiased=std == "sample") + eps
    return torch.where(mask, (torch.where(mask, x, 0.0) - mean) / scale, 0.0)


def whiten(advantages: Numbers, mask: Any, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Shift and scale to mean 0 and std 1 over all action tokens of the batch; 0 where masked.

    Whiten the whole minibatch in one call, because the result depends on its composition. std=None only shifts.

    Shapes:  advantages, mask (B, T) -> (B, T).
    Units:   standard deviations over action tokens.
    Raises:  ValueError if an advantage at an action token is not finite. Without action tokens: zeros and a warning. If
             all advantages are equal: exactly 0.
    Source:  as in most PPO code; studied in arXiv 2006.05990 ("per minibatch advantage normalization").
    """
    a = as_floats(advantages, "advantages")
    m = as_bool_mask(mask, a)
    return whitened(require_finite(a, m, "advantages", "at every action token"), m, std, eps, "whiten")
