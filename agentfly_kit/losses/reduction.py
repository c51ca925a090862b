"""One number of many tokens: whose tokens weigh how much."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import AlignmentError, SettingsError
from agentfly_kit.losses.inputs import boolean, choose, masked

How: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "rollout_mean"]


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
    choose("how", how, names)
    choose("empty_rows", empty_rows, ("exclude", "count"))
    choose("count", count, ("rollouts", "rows"))
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
    m = boolean(mask, per_token)
    x = masked(per_token, m, "per_token")
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
