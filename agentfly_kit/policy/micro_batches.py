"""Division of rows into micro-batches by their number of tokens."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def split_by_token_budget(lengths: Tensor, micro_tokens: int, launch_overhead: int = 0) -> list[Tensor]:
    """Group rows of similar length into micro-batches of at most `micro_tokens` padded tokens, longest rows first.

    Args:
        lengths: Number of tokens of each row, (B,).
        micro_tokens: Upper limit of the padded tokens per micro-batch; a longer row forms a micro-batch of its own.
        launch_overhead: Fixed cost of a forward pass, in tokens. If positive, the boundaries minimize padding plus
            overhead; 0 fills each micro-batch as far as possible.

    Returns:
        The row indices of each micro-batch.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = [max(n, 1) for n in lengths[order].tolist()]
    # Row after the longest micro-batch that begins at each row.
    limits = [min(len(sizes), a + max(1, micro_tokens // size)) for a, size in enumerate(sizes)]
    ends = limits if launch_overhead <= 0 else _cheapest_ends(sizes, limits, launch_overhead)
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(ends[cuts[-1]])
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def _cheapest_ends(sizes: list[int], limits: list[int], launch_overhead: int) -> list[int]:
    """Return the end of the micro-batch that begins at each row in the cheapest division, by dynamic programming."""
    cost = [0.0] * (len(sizes) + 1)  # least total cost of the rows from each row on
    ends = [0] * len(sizes)
    for a in range(len(sizes) - 1, -1, -1):
        choices = range(a + 1, limits[a] + 1)
        cost[a], ends[a] = min((launch_overhead + sizes[a] * (b - a) + cost[b], b) for b in choices)
    return ends
