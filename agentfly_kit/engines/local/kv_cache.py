"""Keys and values of many sequences at once, one slot a sequence, each at its own position.

Knows nothing of requests or sampling. The first `n` slots can be run as one batch without copying, so whoever decodes
keeps its rows there (`swap`). It stands in for a transformers cache: a model's attention calls `update` and gets back
everything that its queries may look at; the mask that goes with it is the engine's business.

Why rows come out bit for bit the same in any company, in float32 on a CPU: a matrix product over four or more rows
computes each row alone, attention reads one row at a time, and the keys beyond a row's end weigh exactly zero. Two
traps were measured: a product over one to three rows runs another kernel, and an elementwise function computes the
last few numbers of a tensor by another formula when their count is no multiple of the vector width. Batches of a
multiple of eight rows avoid both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Capacity in tokens is a multiple of this, and so is what one forward looks at."""
SLAB_TOKENS = 64
"""Tokens of a slab, for who reads slab by slab. A product over keys that lie without gaps takes, out of a cold cache, a
third to a half of the time that it takes over the first tokens of longer slots; one slab too many costs less than that.
"""


class KVCache:
    """`ids[i, :length[i]]` are the tokens whose keys and values slot i holds."""

    def __init__(self, count: int, capacity: int, layers: int = 1, *, slab: int | None = None) -> None:
        """layers: how many attention layers there will be, whose keys and values then lie in one block and move at
        once; more layers, or other shapes, only cost a move each.
        slab: how many tokens of all slots lie together, a multiple of 16; None puts all of a slot's tokens together.
        """
        if slab is not None and slab % _ALIGNMENT:
            raise ValueError(f"slab={slab}: give a multiple of {_ALIGNMENT}")
        self.count = count
        self._layers = layers
        self._alignment = slab or _ALIGNMENT
        self._slab = slab
        self.capacity = -(-capacity // self._alignment) * self._alignment
        self.ids: npt.NDArray[np.int64] = np.zeros((count, self.capacity), dtype=np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Blocks (slabs, 2 x layers, count, heads, tokens of a slab, head size) of layers with one shape; made at their
        # first update.
        self._blocks: list[Tensor] = []
        self._numpy_views: list[npt.NDArray[Any] | None] = []
        """The same memory for numpy, where it can read it."""
        self._layer_location: list[
            tuple[int, int]
        ] = []  # by layer: its block, and where in it the keys are; the values follow
        self._rows: Tensor | slice = slice(0, 0)
        self._positions: Tensor = torch.zeros(0)
        self._visible = 0
        self._initialized = 0
        """Tokens of every slot that hold numbers: what was run, or zeros. Behind them lies memory never touched."""
        self._write_index: Tensor | None = None
        self._contiguous_rows: slice | None = None

    @property
    def slab(self) -> int:
        """Tokens of a slot that lie together."""
        return self._slab or self.capacity

    # --- one forward ---

    def prepare(self, rows: Tensor | int, positions: Tensor) -> Tensor:
        """Say where the next forward writes, and get the mask that goes with it.

        rows: a count n (the first n slots, no copy) or indices (R,). positions: (R, C) int64.
        Returns (R, 1, C, S) bool, True where a query may look; S, a multiple of 16 or of a slab, covers all positions.
        """
        self._visible = min(self.capacity, -(-(int(positions.max()) + 1) // self._alignment) * self._alignment)
        if self._visible > self._initialized:
            for block in self._blocks:
                for i, tokens in self._slab_ranges(self._initialized, self._visible):
                    block[i, ..., tokens, :] = 0  # not whatever lies there: a masked NaN is still a NaN
            self._initialized = self._visible
        self._positions = positions
        self._rows = slice(0, rows) if isinstance(rows, int) else rows
        self._write_index = self._contiguous_rows = None
        if not isinstance(rows, int) and len(rows) and bool((rows.diff() == 1).all()):
            self._contiguous_rows = slice(int(rows[0]), int(rows[-1]) + 1)  # they lie side by side: no copy either
        span = torch.arange(self._visible, device=positions.device)
        return span[None, None, None, :] <= positions[:, None, :, None]

    @property
    def is_leading_rows(self) -> bool:
        """Whether the next forward is of the first rows."""
        return isinstance(self._rows, slice)

    def _slab_ranges(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """Those tokens of a slot by slab: which, and where in it."""
        if start >= stop:
            return []
        slab = self.slab
        return [
            (i, slice(max(start - i * slab, 0), min(stop - i * slab, slab)))
            for i in range(start // slab, -(-stop // slab))
        ]

    def append(self, states: Tensor, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """`update` of one token for each of the first rows, with one move for keys and values.

        states: (R, 2 x heads, head size), keys before values. Returns by slab (R x heads, tokens, head size) of both.
        """
        rows, heads, size = states.shape[0], states.shape[1] // 2, states.shape[2]
        while len(self._layer_location) <= layer:
            self._add_layer(states[:, :heads, None])
        at, (block, first) = self._positions, self._layer_location[layer]
        whole, slab = self._blocks[block], self.slab
        one = self.count * heads * slab  # of all slots, the keys or the values of a layer's slab
        if self._write_index is None or len(self._write_index) != rows * 2 * heads:
            # Where each row's token goes, in rows of one head size from the layer's first on: the same in all layers.
            places = (torch.arange(rows)[:, None, None] * heads + torch.arange(heads)) * slab
            kinds = torch.arange(2)[:, None] * one
            into = (at // slab * (len(whole[0]) * one) + at % slab)[:, :, None]
            self._write_index = (places + kinds + into).view(-1)
        whole.view(-1, size)[first * one :].index_copy_(0, self._write_index, states.reshape(-1, size))
        found = [
            whole[i, first : first + 2].view(2, -1, slab, size)[:, : rows * heads, tokens]
            for i, tokens in self._slab_ranges(0, self._visible)
        ]
        return [both[0] for both in found], [both[1] for both in found]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: (R, heads, C, head size) in, (R, heads, S, head size) out."""
        while len(self._layer_location) <= layer_idx:
            self._add_layer(key_states)
        block, first = self._layer_location[layer_idx]
        rows, positions = self._rows, self._positions
        index = torch.arange(rows.stop, device=positions.device) if isinstance(rows, slice) else rows
        found = []
        for kind, states in enumerate((key_states, value_states)):
            held = self._blocks[block][:, first + kind]
            # The indices stand apart, so that what they find comes first: (R, C, heads, head size).
            held[positions // self.slab, index[:, None], :, positions % self.slab] = states.transpose(1, 2)
            parts = [held[i, :, :, tokens] for i, tokens in self._slab_ranges(0, self._visible)]
            if isinstance(rows, slice):
                parts = [part[rows] for part in parts]
            elif self._contiguous_rows is not None:
                parts = [part[self._contiguous_rows] for part in parts]
            else:  # index_select copies whole rows; an index in brackets goes element by element, at 2.4 times the cost
                parts = [part.index_select(0, rows) for part in parts]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
        return found[0], found[1]

    def _add_layer(self, like: Tensor) -> None:
        shape = (self.count, like.shape[1], self.slab, like.shape[3])
        block, at = (self._layer_location[-1][0], self._layer_location[-1][1] + 2) if self._layer_location else (0, 0)
        if not self._layer_location or at >= len(self._blocks[block][0]) or self._blocks[block].shape[2:] != shape:
            block, at = len(self._blocks), 0
            kinds = 2 * max(1, self._layers - len(self._layer_location))
            self._blocks.append(like.new_empty(self.capacity // self.slab, kinds, *shape))
            self._numpy_views.append(_numpy_view(self._blocks[-1]))
            for i, tokens in self._slab_ranges(0, self._initialized):
                self._blocks[block][i, ..., tokens, :] = 0
        self._layer_location.append((block, at))

    # --- moving ---

    def longest_prefix(
        self, ids: npt.NDArray[np.int64], preferred: int | None, usable: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        """The usable slot that holds most of the beginning of `ids`, and how many tokens. `preferred` wins a tie."""
        width = min(len(ids), self.capacity)
        same = self.ids[:, :width] == ids[:width]
        common = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common = np.where(usable, np.minimum(common, self.length), 0)
        best = int(common.argmax())
        if preferred is not None and common[preferred] == common[best]:
            best = preferred
        return best, int(common[best])

    def copy(self, source: int, target: int, length: int) -> None:
        """Give the target slot the first `length` tokens of the source."""
        parts = self._slab_ranges(0, length)
        for block, plain in zip(self._blocks, self._numpy_views, strict=True):
            both: Any = block if plain is None else plain
            for i, tokens in parts:
                both[i, :, target, :, tokens] = both[i, :, source, :, tokens]
        self.ids[target, :length] = self.ids[source, :length]
        self.length[target] = length

    def swap(self, a: int, b: int) -> None:
        if a == b:
            return
        n = min(int(max(self.length[a], self.length[b])) + 1, self.capacity)
        parts = self._slab_ranges(0, n)
        for block, plain in zip(self._blocks, self._numpy_views, strict=True):
            for i, tokens in parts:
                if plain is not None:  # a move so small is mostly overhead, of which numpy has a fifth
                    one, other = plain[i, :, a, :, tokens], plain[i, :, b, :, tokens]
                    kept = one.copy()
                    one[:] = other
                    other[:] = kept
                    continue
                left, right = block[i, :, a, :, tokens], block[i, :, b, :, tokens]
                held = left.clone()
                left.copy_(right)
                right.copy_(held)
        row = self.ids[a, :n].copy()
        self.ids[a, :n] = self.ids[b, :n]
        self.ids[b, :n] = row
        self.length[a], self.length[b] = self.length[b], self.length[a]

    def grow(self, count: int, capacity: int) -> None:
        """Make room; what is held stays."""
        capacity = max(self.capacity, -(-capacity // self._alignment) * self._alignment)
        count = max(self.count, count)
        if (count, capacity) == (self.count, self.capacity):
            return
        ids = np.zeros((count, capacity), dtype=np.int64)
        ids[: self.count, : self.capacity] = self.ids
        length = np.zeros(count, dtype=np.int64)
        length[: self.count] = self.length
        slab = self._slab or capacity
        for at, old in enumerate(self._blocks):
            new = old.new_empty((capacity // slab, old.shape[1], count, old.shape[3], slab, old.shape[5]))
            for i, tokens in self._slab_ranges(0, self._initialized):
                new[i, :, : self.count, :, tokens] = old[i, ..., tokens, :]
                new[i, :, self.count :, :, tokens] = 0
            self._blocks[at], self._numpy_views[at] = new, _numpy_view(new)
        self.ids, self.length, self.count, self.capacity = ids, length, count, capacity


def _numpy_view(block: Tensor) -> npt.NDArray[Any] | None:
    return block.numpy() if block.device.type == "cpu" and block.dtype == torch.float32 else None
