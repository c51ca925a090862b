"""Pure functions that sample one token per row from logits and given random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SampledTokens:
    """Sampled ids, logprobs and entropies of B rows, (B,). `kept_mass` is the probability kept by truncation, or None.

    `top_ids` and `top_logprobs`, of shape (B, alternatives), contain the most probable tokens in descending order.
    """

    ids: Tensor
    logprobs: Tensor
    entropies: Tensor
    kept_mass: Tensor | None
    top_ids: Tensor
    top_logprobs: Tensor


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    noise: Tensor,
    *,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed: Tensor | None = None,
    alternatives: int = 0,
) -> SampledTokens:
    """Sample one token per row by inverting the cumulative distribution; temperature 0 selects the most probable token.

    Tokens outside `allowed` are excluded before the other filters. Logprobs and entropies are those of the
    distribution after temperature and before truncation. For greedy rows, whose distribution is degenerate, both are
    computed at temperature 1.

    Shapes:  logits (B rows, V ids) float32; temperatures (B,); noise (B,) float64 in [0, 1); top_p, top_k, min_p (B,);
             allowed (B, V) bool.
    Units:   nats.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperatures), temperatures).float()[:, None]
    logp = torch.log_softmax(scaled, dim=-1)
    # Use softmax instead of logp.exp(), whose rounding may depend on the batch composition (see kv_cache.py).
    p = torch.softmax(scaled, dim=-1)
    entropies = -(p * logp).sum(-1)
    if not bool(entropies.isfinite().all()):  # logits of -inf give 0 * -inf = NaN
        entropies = -torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1)
    kept_mass = None
    if allowed is not None:
        # Renormalize before the other filters, because the probabilities of all allowed tokens may round to 0.
        every, scaled = scaled.logsumexp(-1), scaled.masked_fill(~allowed, -torch.inf)
        kept_mass = (scaled.logsumexp(-1) - every).exp().clamp(min=torch.finfo(torch.float32).tiny)
        p = torch.softmax(scaled, dim=-1)
    weights = p
    if top_p is not None or top_k is not None or min_p is not None:
        weights = truncate(p, top_p=top_p, top_k=top_k, min_p=min_p)
        kept_mass = weights.sum(-1) if kept_mass is None else weights.sum(-1) * kept_mass
    # Use float64; a float32 cumulative sum over a large vocabulary would round rare tokens to probability 0.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = noise.double()[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        ids = torch.where(greedy, scaled.argmax(-1), ids)
    top = logp.topk(alternatives)
    return SampledTokens(
        ids, logp.gather(-1, ids[:, None])[:, 0], entropies, kept_mass, top_ids=top.indices, top_logprobs=top.values
    )


def truncate(p: Tensor, *, top_p: Tensor | None, top_k: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Return `p`, (B, V), with 0 for tokens excluded by top-k, then top-p of the rest, then min-p. Not renormalized."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(p.shape[-1], device=p.device)[None]
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        left = torch.where(keep, ordered, torch.zeros_like(p))
        left = left / left.sum(-1, keepdim=True)
        # Compare the cumulative probability before each token, so that the token that reaches top_p is kept.
        keep &= ((left.cumsum(-1) - left) < top_p[:, None]) | (top_p[:, None] >= 1)
    if min_p is not None:
        keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(p).scatter(-1, order, torch.where(keep, ordered, torch.zeros_like(p)))
