"""From logits to one token a row. Pure: no model, no state; the noise is an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SampledTokens:
    """(B,) each. `kept_mass` is None when no row truncates."""

    ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    kept_mass: Tensor | None


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    noise: Tensor,
    *,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> SampledTokens:
    """Sample by inverting the cumulative distribution; temperature 0 takes the most probable token.

    Shapes:  logits (B, V) float32; temperatures, noise (B,), noise in [0, 1) float64; top_p, top_k, min_p (B,) or None.
    Units:   nats. Logprobs and entropies are those after temperature and before truncation (at temperature 1 for a
             greedy row, whose own distribution has no logprobs to speak of).
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperatures), temperatures).float()[:, None]
    logp = torch.log_softmax(scaled, dim=-1)
    # softmax, not logp.exp(): an elementwise function may round a row differently in another company (see kv_cache.py).
    p = torch.softmax(scaled, dim=-1)
    entropies = -(p * logp).sum(-1)
    if not bool(entropies.isfinite().all()):  # a logit of -inf: 0 * -inf
        entropies = -torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1)
    weights, kept_mass = p, None
    if top_p is not None or top_k is not None or min_p is not None:
        weights = truncate(p, top_p=top_p, top_k=top_k, min_p=min_p)
        kept_mass = weights.sum(-1)
    # float64: in float32 the cumulative sum of a large vocabulary would skip its rare tokens.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = noise.double()[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        ids = torch.where(greedy, logits.argmax(-1), ids)
    return SampledTokens(ids, logp.gather(-1, ids[:, None])[:, 0], entropies, kept_mass)


def truncate(p: Tensor, *, top_p: Tensor | None, top_k: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Zero what top-k, then top-p of what is left, then min-p leave out. (B, V) -> (B, V), not normalised."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(p.shape[-1], device=p.device)[None]
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        left = torch.where(keep, ordered, torch.zeros_like(p))
        left = left / left.sum(-1, keepdim=True)
        # The token that reaches top_p stays: what counts is the mass before it.
        keep &= ((left.cumsum(-1) - left) < top_p[:, None]) | (top_p[:, None] >= 1)
    if min_p is not None:
        keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(p).scatter(-1, order, torch.where(keep, ordered, torch.zeros_like(p)))
