"""Aggregation of per-token losses to a scalar."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError
from agentfly_kit.losses.inputs import as_bool_mask, check_choice, masked

AggregateMode: TypeAlias = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "trajectory_mean"
]


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    how: AggregateMode = "token_mean",
    *,
    total: float | Tensor | None = None,
    denominator: float | None = None,
    trajectory_index: Iterable[Hashable] | Tensor | None = None,
    trajectory_tokens: Tensor | None = None,
    empty_rows: Literal["exclude", "count"] = "exclude",
    count: Literal["trajectories", "rows"] = "trajectories",
) -> Tensor:
    """Reduce per-token losses to a scalar. The mode determines the weight of each token.

    token_mean           sum / action tokens: long rows weigh more.            total: action tokens
    seq_mean_token_mean  mean over rows of each row's mean: rows weigh equal.  total: rows
    seq_mean_token_sum   mean over rows of each row's sum.                     total: rows
    fixed                sum / (rows x denominator), the denominator a         total: rows
                         configured number of tokens per row (Dr.GRPO).
    trajectory_mean      each trajectory's tokens over its own action tokens,  total: trajectories (rows,
                         then over the number of trajectories.                 for count="rows")

    `total` is that count over the whole minibatch, on all ranks: with it, the losses of micro-batches *add up* to that
    of the minibatch. None counts this call only. A trajectory whose rows are spread over micro-batches also needs
    `trajectory_tokens`, the action tokens of each row's whole trajectory. No denominator depends on padding.

    empty_rows: whether rows without action tokens count as rows: "exclude" (verl) or "count" (TRL, SkyRL).
    count="rows" divides trajectory_mean by the number of rows instead, as Agent Lightning's own code does.

    Shapes:  per_token, mask (B, T) or (T,); trajectory_index (B,) ids; trajectory_tokens (B,) -> ().
    Raises:  SettingsError for an option that does not fit `how`. Without action tokens: 0 and a RuntimeWarning.
    Source:  DAPO, arXiv 2503.14476, 3.3 (token mean); arXiv 2503.20783, 3.2 (fixed); Agent Lightning
             v1 (trajectory mean).
    """
    names = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "trajectory_mean")
    check_choice("how", how, names)
    check_choice("empty_rows", empty_rows, ("exclude", "count"))
    check_choice("count", count, ("trajectories", "rows"))
    if (how == "fixed") != (denominator is not None):
        raise SettingsError(f"how={how!r} with denominator={denominator!r}; only 'fixed' takes one, and requires it")
    if denominator is not None and not denominator > 0:
        raise SettingsError(f"denominator={denominator!r}; wanted a number of tokens per row, above 0")
    if (how == "trajectory_mean") != (trajectory_index is not None):
        raise SettingsError(
            f"how={how!r} with trajectory_index={trajectory_index!r}; only 'trajectory_mean' "
            "takes ids, and requires them"
        )
    if per_token.ndim == 1:
        per_token, mask = per_token.unsqueeze(0), mask.unsqueeze(0)
    m = as_bool_mask(mask, per_token)
    x = masked(per_token, m, "per_token")
    tokens = m.sum(1)
    row_sum = x.sum(1)

    rows = (tokens > 0).sum() if empty_rows == "exclude" else torch.tensor(len(m))
    if how == "token_mean":
        numerator, divisor = row_sum.sum(), tokens.sum()
    elif how == "seq_mean_token_mean":
        numerator, divisor = (row_sum / tokens.clamp(min=1)).sum(), rows
    elif how == "trajectory_mean":
        assert trajectory_index is not None
        index = _consecutive_index(trajectory_index, m)
        n = int(index.max()) + 1 if len(index) else 0
        whole = tokens.new_zeros(n).index_add(0, index, tokens)
        of_row = whole[index] if trajectory_tokens is None else trajectory_tokens.to(m.device)
        numerator = (row_sum / of_row.clamp(min=1)).sum()
        divisor = (whole > 0).sum() if empty_rows == "exclude" else torch.tensor(n)
        divisor = rows if count == "rows" else divisor
    else:
        numerator, divisor = row_sum.sum(), rows

    if total is not None:
        divisor = torch.as_tensor(total)
    elif not bool(m.any()):
        warnings.warn("aggregate: no action token in this batch; the loss is 0", RuntimeWarning, stacklevel=2)
    elif how != "token_mean" and not bool((tokens > 0).all()):
        fate = "left out of" if empty_rows == "exclude" else "counted in"
        warnings.warn(f"aggregate: rows without action tokens are {fate} the mean", RuntimeWarning, stacklevel=2)
    divisor = divisor.to(device=x.device, dtype=x.dtype) * (denominator or 1.0)
    return numerator / torch.where(divisor > 0, divisor, 1.0)


def _consecutive_index(ids: Iterable[Hashable] | Tensor, mask: Tensor) -> Tensor:
    seen: dict[Hashable, int] = {}
    listed = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(listed) != len(mask):
        raise AlignmentError(f"{len(listed)} trajectory ids for {len(mask)} rows; give one id for each row")
    return torch.tensor([seen.setdefault(i, len(seen)) for i in listed], dtype=torch.long, device=mask.device)
