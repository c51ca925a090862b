"""KV cache with one slot per sequence; each sequence is at its own position.

The first `n` slots can be run as one batch without copying, so the engine keeps its running rows there (`swap`). The
class can be passed to a model as a transformers cache: the attention layers call `update` and get back all keys and
values that their queries may attend to. The engine passes the attention mask, which `prepare` returns.

Decoding is batch-invariant in float32 on a CPU: the results for a row are bitwise identical for any batch composition.
A matrix product over four or more rows computes each row independently, attention processes one row at a time, and the
keys after a row's end have a weight of exactly zero. Measurements found two exceptions: a product over one to three
rows uses a different kernel, and an elementwise function computes the last elements of a tensor with a different
formula if their number is not a multiple of the vector width. Batches of a multiple of eight rows avoid both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The capacity of a slot and the number of visible tokens in a forward pass are multiples of this.
_ALIGNMENT = 16
# Tokens per slab, for callers that read slab by slab.
#
# With a cold processor cache, a product over contiguous keys takes a third to a half of the time of one over the first
# tokens of longer slots. Reading one slab too many costs less than that.
SLAB_TOKENS = 64


class KVCache:
    """Keys and values of many sequences; slot i holds those of the tokens `ids[i, :length[i]]`."""

    def __init__(self, count: int, capacity: int, layers: int = 1, *, slab: int | None = None) -> None:
        """Create a cache.

        Args:
            count: Number of slots.
            capacity: Tokens per slot.
            layers: Expected number of attention layers. Layers of the same shape are stored in one block and copied
                together; additional layers, or layers of other shapes, need a copy each.
            slab: Number of consecutive tokens stored contiguously for all slots, a multiple of 16; None stores all
                tokens of a slot contiguously.
        """
        if slab is not None and slab % _ALIGNMENT:
            raise ValueError(f"slab={slab} must be a multiple of {_ALIGNMENT}")
        self.count = count
        self._layers = layers
        self._alignment = slab or _ALIGNMENT
        self._slab = slab
        self.capacity = -(-capacity // self._alignment) * self._alignment
        self.ids: npt.NDArray[np.int64] = np.zeros((count, self.capacity), dtype=np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # One block (slabs, 2 x layers, count, heads, tokens of a slab, head size) per shape of layers, allocated at
        # the first update.
        self._blocks: list[Tensor] = []
        # Views of the same memory as numpy arrays, where numpy supports it.
        self._numpy_views: list[npt.NDArray[Any] | None] = []
        self._layer_location: list[
            tuple[int, int]
        ] = []  # by layer: its block, and the index of its keys there; the values follow
        self._rows: Tensor | slice = slice(0, 0)
        self._positions: Tensor = torch.zeros(0)
        self._visible = 0
        # Number of leading tokens of every slot that are initialized, with keys and values or with zeros.
        self._initialized = 0
        self._write_index: Tensor | None = None
        self._contiguous_rows: slice | None = None

    @property
    def slab(self) -> int:
        """Number of tokens of a slot that are stored contiguously."""
        return self._slab or self.capacity

    # --- forward pass ---

    def prepare(self, rows: Tensor | int, positions: Tensor) -> Tensor:
        """Set where the next forward pass writes.

        Args:
            rows: A number n for the first n slots, which need no copy, or slot indices (R,).
            positions: Position of each token, (R, C) int64.

        Returns:
            The attention mask, (R, 1, C, S) bool, True where a query may attend. S covers all positions and is a
            multiple of 16 or of the slab size.
        """
        self._visible = min(self.capacity, -(-(int(positions.max()) + 1) // self._alignment) * self._alignment)
        if self._visible > self._initialized:
            for block in self._blocks:
                for i, tokens in self._slab_ranges(self._initialized, self._visible):
                    block[i, ..., tokens, :] = 0  # uninitialized memory may contain NaN, which masking does not remove
            self._initialized = self._visible
        self._positions = positions
        self._rows = slice(0, rows) if isinstance(rows, int) else rows
        self._write_index = self._contiguous_rows = None
        if not isinstance(rows, int) and len(rows) and bool((rows.diff() == 1).all()):
            self._contiguous_rows = slice(int(rows[0]), int(rows[-1]) + 1)  # contiguous slots need no copy either
        span = torch.arange(self._visible, device=positions.device)
        return span[None, None, None, :] <= positions[:, None, :, None]

    @property
    def is_leading_rows(self) -> bool:
        """True if the next forward pass uses the leading slots."""
        return isinstance(self._rows, slice)

    def _slab_ranges(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """Split the token range of a slot by slab, into pairs of slab index and range within the slab."""
        if start >= stop:
            return []
        slab = self.slab
        return [
            (i, slice(max(start - i * slab, 0), min(stop - i * slab, slab)))
            for i in range(start // slab, -(-stop // slab))
        ]

    def append(self, states: Tensor, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Write one token for each of the leading rows, keys and values in a single copy.

        Args:
            states: Keys, then values: (R, 2 x heads, head size).
            layer: Index of the attention layer.

        Returns:
            The visible keys and values, each as a list with one tensor (R x heads, tokens, head size) per slab.
        """
        rows, heads, size = states.shape[0], states.shape[1] // 2, states.shape[2]
        while len(self._layer_location) <= layer:
            self._add_layer(states[:, :heads, None])
        at, (block, first) = self._positions, self._layer_location[layer]
        whole, slab = self._blocks[block], self.slab
        one = self.count * heads * slab  # rows of the keys (or values) of one layer's slab, for all slots
        if self._write_index is None or len(self._write_index) != rows * 2 * heads:
            # Destination of each row's token, in units of the head size from the layer's start; same for all layers.
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
        """Write (R, heads, C, head size) keys and values of a layer; return all visible ones, (R, heads, S, head size).

        This is the interface through which the attention layers of transformers use their cache.
        """
        while len(self._layer_location) <= layer_idx:
            self._add_layer(key_states)
        block, first = self._layer_location[layer_idx]
        rows, positions = self._rows, self._positions
        index = torch.arange(rows.stop, device=positions.device) if isinstance(rows, slice) else rows
        found = []
        for kind, states in enumerate((key_states, value_states)):
            held = self._blocks[block][:, first + kind]
            # The index tensors are not adjacent, so the indexed dimensions come first: (R, C, heads, head size).
            held[positions // self.slab, index[:, None], :, positions % self.slab] = states.transpose(1, 2)
            parts = [held[i, :, :, tokens] for i, tokens in self._slab_ranges(0, self._visible)]
            if isinstance(rows, slice):
                parts = [part[rows] for part in parts]
            elif self._contiguous_rows is not None:
                parts = [part[self._contiguous_rows] for part in parts]
            else:  # index_select copies whole rows; indexing by [] copies elements and takes 2.4 times as long
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

    # --- copying and resizing ---

    def longest_prefix(
        self, ids: npt.NDArray[np.int64], preferred: int | None, usable: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        """Return the usable slot with the longest common prefix with `ids`, and its length; ties go to `preferred`."""
        width = min(len(ids), self.capacity)
        same = self.ids[:, :width] == ids[:width]
        common = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common = np.where(usable, np.minimum(common, self.length), 0)
        best = int(common.argmax())
        if preferred is not None and common[preferred] == common[best]:
            best = preferred
        return best, int(common[best])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
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
                if plain is not None:  # for such small copies, numpy has a fifth of torch's overhead
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
        """Enlarge the cache to at least `count` slots of `capacity` tokens, keeping its contents."""
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
