"""Prefix sharing: rows with a common prefix are packed into a tree, so that each shared token is computed once.

The model processes a tree as one sequence, with tokens in depth-first order, position ids counted within each row, and
an attention mask that lets each token attend only to itself and its ancestors. Hidden states and gradients equal those
of separately computed rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Maximum number of tokens per tree. The size of the attention mask is quadratic in this number.
_MAX_TREE_TOKENS = 4096


@dataclass(frozen=True)
class PrefixTree:
    """Rows with common prefixes. `rows` contains row indices in lexicographic order of their keys."""

    rows: tuple[int, ...]
    shared: tuple[int, ...]  # length of the prefix that each row shares with the previous one
    width: int  # number of distinct tokens


def build_prefix_trees(keys: Tensor, lengths: list[int], *, scale: float, max_tokens: int) -> list[PrefixTree]:
    """Group the rows `keys[i, :lengths[i]]` into prefix trees of at most `max_tokens` tokens if this reduces the cost.

    The keys are token ids or, at placeholders of images, hashes of the images; see `Row.keys`.

    A tree of W tokens costs W + W² / scale, and a single row, whose mask is causal, W + W² / (2 scale). `scale` is the
    number of keys at which attention costs as much as the rest of the model.
    """
    if not lengths:
        return []
    count = np.array(lengths)
    columns = np.arange(keys.shape[1])
    # Pad with 0, so that a row is sorted before the rows that begin with it.
    padded = np.where(columns < count[:, None], keys.cpu().numpy() + 1, 0)
    texts = [row.tobytes() for row in padded.astype(">i8")]  # big-endian bytes sort like keys
    order = sorted(range(len(texts)), key=texts.__getitem__)
    # After sorting, the previous row shares at least as long a prefix with a row as any earlier row.
    differs = padded[order[1:]] != padded[order[:-1]]
    common_lengths = np.where(differs.any(1), differs.argmax(1), count[order[1:]])
    max_tokens = min(max_tokens, _MAX_TREE_TOKENS)
    trees: list[PrefixTree] = []
    for i, common in zip(order, [0, *common_lengths.tolist()], strict=True):
        n = lengths[i]
        if common:
            tree = trees[-1]
            width = tree.width + n - common
            quadratic = width**2 - tree.width**2 / (2 if len(tree.rows) == 1 else 1) - n**2 / 2
            if width <= max_tokens and quadratic / scale <= common:
                trees[-1] = PrefixTree((*tree.rows, i), (*tree.shared, common), width)
                continue
        trees.append(PrefixTree((i,), (0,), n))
    return trees


@dataclass(frozen=True)
class PackedTrees:
    """P prefix trees, padded on the right to W tokens, with a map from tokens of B rows to tokens of the trees."""

    ids: Tensor  # (P, W)
    positions: Tensor  # (P, W): position of each token within its rows
    token_index: Tensor  # (B, T): index of each row's tokens in `ids.flatten()`
    subtree_ends: Tensor  # (P, W): column after the last descendant of each token
    source: Tensor  # (P, W): index of each token in the flattened rows; 0 on padding

    @classmethod
    def build(cls, trees: list[PrefixTree], ids: Tensor, lengths: list[int]) -> PackedTrees:
        """Pack trees that together contain every row of `ids`, shape (B, T), exactly once."""
        width = max(tree.width for tree in trees)
        shape = (len(trees), width)
        source = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        subtree_ends = np.tile(np.arange(1, width + 1), (shape[0], 1))  # padding attends to itself
        token_index = np.zeros(tuple(ids.shape), dtype=np.int64)
        columns = ids.shape[1]
        for p, tree in enumerate(trees):
            count, before = 0, -1
            for row, common in zip(tree.rows, tree.shared, strict=True):
                n = lengths[row]
                if common:
                    token_index[row, :common] = token_index[before, :common]
                if before >= 0:  # tokens of the previous row after the branching point have no further descendants
                    subtree_ends[p, token_index[before, common : lengths[before]] - p * width] = count
                new = n - common
                token_index[row, common:n] = np.arange(p * width + count, p * width + count + new)
                source[p, count : count + new] = np.arange(row * columns + common, row * columns + n)
                positions[p, count : count + new] = np.arange(common, n)
                count, before = count + new, row
            subtree_ends[p, token_index[before, : lengths[before]] - p * width] = count
        found = [torch.from_numpy(x).to(ids.device) for x in (positions, token_index, subtree_ends, source)]
        return cls(ids.flatten()[found[-1]], *found)

    def mask(self) -> Tensor:
        """Return the attention mask, (P, 1, W, W) bool: each token attends to itself and its ancestors.

        In depth-first order, the ancestors of a token are the earlier tokens whose subtrees end after it.
        """
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        return ((at[None, None, :] <= at[None, :, None]) & (at[None, :, None] < self.subtree_ends[:, None, :]))[
            :, None
        ]


def split_by_token_budget(lengths: Tensor, micro_tokens: int, launch_overhead: int = 0) -> list[Tensor]:
    """Split rows into micro-batches of at most `micro_tokens` padded tokens, longest rows first. Return row indices.

    A row longer than `micro_tokens` forms a micro-batch of its own. `launch_overhead` is the fixed cost of a forward
    pass in units of the cost of one token. If it is positive, the split minimizes padding plus overhead; if it is 0,
    each micro-batch is filled as far as possible.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = [max(n, 1) for n in lengths[order].tolist()]
    # For each row, the end of the largest micro-batch that begins with this row.
    limits = [min(len(sizes), a + max(1, micro_tokens // size)) for a, size in enumerate(sizes)]
    ends = limits if launch_overhead <= 0 else _cheapest_ends(sizes, limits, launch_overhead)
    cuts = [0]
    while cuts[-1] < len(sizes):
        cuts.append(ends[cuts[-1]])
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def _cheapest_ends(sizes: list[int], limits: list[int], launch_overhead: int) -> list[int]:
    """Find the cheapest split by dynamic programming. Return the end of the micro-batch that starts at each row."""
    cost = [0.0] * (len(sizes) + 1)  # cost[i]: minimum total cost of the rows from i on
    ends = [0] * len(sizes)
    for a in range(len(sizes) - 1, -1, -1):
        choices = range(a + 1, limits[a] + 1)
        cost[a], ends[a] = min((launch_overhead + sizes[a] * (b - a) + cost[b], b) for b in choices)
    return ends
