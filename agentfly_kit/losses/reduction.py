"""Aggregation of per-token losses into a scalar."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentfly_kit.errors import SettingsError, check_choice, check_shape
from agentfly_kit.losses.inputs import as_bool_mask, masked

AggregateMode: TypeAlias = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "trajectory_mean"
]
EmptyRows: TypeAlias = Literal["exclude", "count"]
Count: TypeAlias = Literal["trajectories", "rows"]


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    how: AggregateMode = "token_mean",
    *,
    denominator: float | None = None,
    trajectory_index: Sequence[int | str] | Tensor | None = None,
    empty_rows: EmptyRows = "exclude",
    count: Count = "trajectories",
) -> Tensor:
    """Reduce per-token losses to a scalar with one of these modes:

    token_mean           sum / number of action tokens; long rows have more weight.
    seq_mean_token_mean  mean over rows of each row's mean; all rows have equal weight.
    seq_mean_token_sum   mean over rows of each row's sum.
    fixed                sum / (rows x denominator), where denominator is a fixed number of tokens per row (Dr.GRPO).
    trajectory_mean      mean over trajectories of each trajectory's mean over action tokens.

    Padding does not affect the result. The result is linear in the losses, so its gradient is the weight of each token.
    To split a minibatch into micro-batches, compute the weights for the whole minibatch, then sum weight * loss.

    With empty_rows="count" (TRL, SkyRL), the number of rows includes rows without action tokens, which "exclude" (verl)
    omits. With trajectory_mean, count="rows" divides by the number of rows, not of trajectories (Agent Lightning).

    Shapes:  per_token, mask (B rows, T tokens) or (T,); trajectory_index (B,) ints or strings -> ().
    Raises:  SettingsError if an option is incompatible with `how`. Warns and returns 0 if there are no action tokens.
    Source:  DAPO, arXiv 2503.14476, 3.3 (token mean); arXiv 2503.20783, 3.2 (fixed); Agent Lightning
             v1 (trajectory mean).
    """
    check_choice("how", how, AggregateMode)
    check_choice("empty_rows", empty_rows, EmptyRows)
    check_choice("count", count, Count)
    if (how == "fixed") != (denominator is not None):
        raise SettingsError(f"denominator must be given if and only if how='fixed', got {denominator!r} with {how!r}")
    if (how == "trajectory_mean") != (trajectory_index is not None):
        raise SettingsError(f"trajectory_index must be given if and only if how='trajectory_mean', got how={how!r}")
    per_token, mask = torch.atleast_2d(per_token), torch.atleast_2d(mask)
    m = as_bool_mask(mask, per_token)
    row_sum, tokens = masked(per_token, m, "per_token").sum(1), m.sum(1)

    # The default is a mean over rows. Each mode changes the numerator, the divisor, or both.
    divisor = (tokens > 0).sum() if empty_rows == "exclude" else torch.tensor(len(m))
    numerator = row_sum.sum()
    if how == "token_mean":
        divisor = tokens.sum()
    elif how == "seq_mean_token_mean":
        numerator = (row_sum / tokens.clamp(min=1)).sum()
    elif how == "trajectory_mean":
        # Divide the loss of each token by the number of tokens in its trajectory, which may have several rows.
        ids = trajectory_index.cpu() if isinstance(trajectory_index, Tensor) else trajectory_index
        trajectories, inverse = np.unique(np.asarray(ids), return_inverse=True)
        index = torch.from_numpy(inverse).to(m.device)
        check_shape("trajectory_index", index, tokens.shape)
        of_trajectory = tokens.new_zeros(len(trajectories)).index_add(0, index, tokens)
        numerator = (row_sum / of_trajectory[index].clamp(min=1)).sum()
        if count == "trajectories":
            divisor = (of_trajectory > 0).sum() if empty_rows == "exclude" else torch.tensor(len(trajectories))

    if not bool(m.any()):
        warnings.warn("aggregate: no action token in this batch; the loss is 0", RuntimeWarning, stacklevel=2)
    elif how != "token_mean" and not bool((tokens > 0).all()):
        fate = "left out of" if empty_rows == "exclude" else "counted in"
        warnings.warn(f"aggregate: rows without action tokens are {fate} the mean", RuntimeWarning, stacklevel=2)
    divisor = divisor.to(device=row_sum.device, dtype=row_sum.dtype) * (denominator or 1.0)
    return numerator / torch.where(divisor > 0, divisor, 1.0)
