"""Rows that begin alike, as trees: the tokens that they have in common stand once, and are run once.

The chains of a group have one prompt, and often whole turns in common, and so have forks. What a causal model computes
at a token depends on nothing but the tokens up to it, so a forward of the tree gives what one of the rows would, and
the gradients of a shared token's rows meet in it by themselves. A model runs a tree as one sequence: the tokens in the
order of a walk, each at its own position in its rows, and a mask that lets it see its ancestors alone.

Knows ids and lengths; no model, no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MAX_TREE_TOKENS = 4096
"""Tokens of a tree: its mask has the square of that."""


@dataclass(frozen=True)
class PrefixTree:
    """Rows in the order of their ids, and how many tokens each has in common with the one before it."""

    rows: tuple[int, ...]
    shared: tuple[int, ...]
    width: int
    """Distinct tokens."""


def build_prefix_trees(ids: Tensor, lengths: list[int], *, scale: float, max_tokens: int) -> list[PrefixTree]:
    """The rows as trees of at most `max_tokens` tokens, where a tree costs less than its rows do alone.

    Shapes:  ids (B, T), of each row the first `lengths[i]` count.
    scale: in how many keys attention costs a token what the rest of the model costs it. A tree of W tokens is W + W² /
        scale; a row alone has a causal kernel, which leaves out half of the square.
    """
    a = ids.cpu().numpy()
    texts = [a[i, :n].astype(">i8").tobytes() for i, n in enumerate(lengths)]
    max_tokens = min(max_tokens, _MAX_TREE_TOKENS)
    out: list[PrefixTree] = []
    rows: list[int] = []
    shared: list[int] = []
    width = 0
    for i in sorted(range(len(lengths)), key=texts.__getitem__):
        n = lengths[i]
        common = _common_prefix(a[rows[-1], : lengths[rows[-1]]], a[i, :n]) if rows else 0
        wider = width + n - common
        square = (wider**2 - (width**2 / (2 if len(rows) == 1 else 1)) - n**2 / 2) / scale
        if common and wider <= max_tokens and square <= common:
            rows.append(i)
            shared.append(common)
            width = wider
            continue
        if rows:
            out.append(PrefixTree(tuple(rows), tuple(shared), width))
        rows, shared, width = [i], [0], n
    if rows:
        out.append(PrefixTree(tuple(rows), tuple(shared), width))
    return out


def _common_prefix(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    n = min(len(a), len(b))
    other = np.flatnonzero(a[:n] != b[:n])
    return int(other[0]) if len(other) else n


@dataclass(frozen=True)
class PackedTrees:
    """P trees padded on the right to W tokens, and where each token of the B rows stands in them."""

    ids: Tensor
    """(P, W) int64"""
    positions: Tensor
    """(P, W) int64: of each token in its rows."""
    token_index: Tensor
    """(B, T) int64: each row's tokens in `ids.flatten()`."""
    subtree_ends: Tensor
    """(P, W) int64: the column behind a token's last descendant."""

    @classmethod
    def build(cls, trees: list[PrefixTree], ids: Tensor, lengths: list[int]) -> PackedTrees:
        """ids (B, T), of which `trees` name every row once."""
        width = max(tree.width for tree in trees)
        shape = (len(trees), width)
        source = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        subtree_ends = np.tile(np.arange(1, width + 1), (shape[0], 1))  # padding sees itself
        token_index = np.zeros(tuple(ids.shape), dtype=np.int64)
        columns = ids.shape[1]
        for p, tree in enumerate(trees):
            count, before = 0, -1
            for row, common in zip(tree.rows, tree.shared, strict=True):
                n = lengths[row]
                if common:
                    token_index[row, :common] = token_index[before, :common]
                if before >= 0:  # what the last row had beyond this branch has all its descendants
                    subtree_ends[p, token_index[before, common : lengths[before]] - p * width] = count
                new = n - common
                token_index[row, common:n] = np.arange(p * width + count, p * width + count + new)
                source[p, count : count + new] = np.arange(row * columns + common, row * columns + n)
                positions[p, count : count + new] = np.arange(common, n)
                count, before = count + new, row
            subtree_ends[p, token_index[before, : lengths[before]] - p * width] = count
        flat = ids.flatten()[torch.from_numpy(source).flatten().to(ids.device)].view(shape)
        return cls(flat, *(torch.from_numpy(x).to(ids.device) for x in (positions, token_index, subtree_ends)))

    def mask(self) -> Tensor:
        """(P, 1, W, W) bool: a token sees itself and its ancestors, which in a walk are those whose descendants end
        behind it."""
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        return ((at[None, None, :] <= at[None, :, None]) & (at[None, :, None] < self.subtree_ends[:, None, :]))[:, None]
