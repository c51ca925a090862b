"""Loss of the value head."""

from __future__ import annotations

import torch
from torch import Tensor

from agentfly_kit.errors import SettingsError
from agentfly_kit.losses.inputs import as_bool_mask, check_nonnegative, masked


def value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None) -> Tensor:
    """Half the squared error to the return. With `clip`, the maximum of it and the error of the clipped value.

    The clipped value is limited to old_values ± clip.

    Shapes:  (B, T) each -> (B, T). old_values may be None without `clip`.
    Units:   reward squared.
    Raises:  SettingsError for a negative clip.
    Source:  the clipped form is in the code of PPO (arXiv 1707.06347), not in its text; studied in arXiv 2005.12729.
    """
    check_nonnegative("clip", clip)
    m = as_bool_mask(mask, values)
    v, target = masked(values, m, "values"), masked(returns, m, "returns")
    loss = (v - target).square()
    if clip is not None:
        if old_values is None:
            raise SettingsError(f"clip={clip!r} with old_values=None; give the values from before the update")
        old = masked(old_values, m, "old_values")
        loss = torch.maximum(loss, (old + (v - old).clamp(-clip, clip) - target).square())
    return torch.where(m, 0.5 * loss, 0.0)
