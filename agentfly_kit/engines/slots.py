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

_STEP = 16
"""Capacity in tokens is a multiple of this, and so is what one forward looks at."""


class Slots:
    """`ids[i, :length[i]]` are the tokens whose keys and values slot i holds."""

    def __init__(self, count: int, capacity: int, layers: int = 1) -> None:
        """layers: how many attention layers there will be, whose keys and values then lie in one block and move at
        once; more layers, or other shapes, only cost a move each."""
        self.count = count
        self._layers = layers
        self.capacity = -(-capacity // _STEP) * _STEP
        self.ids: npt.NDArray[np.int64] = np.zeros((count, self.capacity), dtype=np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Blocks (2 x layers, count, heads, capacity, head size) of layers with one shape; made at their first update.
        self._blocks: list[Tensor] = []
        self._plain: list[npt.NDArray[Any] | None] = []
        """The same memory for numpy, where it can read it."""
        self._place: list[tuple[int, int]] = []  # by layer: its block, and where in it the keys are; the values follow
        self._keys: list[Tensor] = []  # by layer: views (count, heads, capacity, head size)
        self._values: list[Tensor] = []
        self._rows: Tensor | slice = slice(0, 0)
        self._positions: Tensor = torch.zeros(0)
        self._seen = 0
        self._clean = 0
        """Tokens of every slot that hold numbers: what was run, or zeros. Behind them lies memory never touched."""
        self._written: Tensor | None = None
        self._run: slice | None = None

    # --- one forward ---

    def aim(self, rows: Tensor | int, positions: Tensor) -> Tensor:
        """Say where the next forward writes, and get the mask that goes with it.

        rows: a count n (the first n slots, no copy) or indices (R,). positions: (R, C) int64.
        Returns (R, 1, C, S) bool, True where a query may look; S is a multiple of 16 that covers all positions.
        """
        self._seen = min(self.capacity, -(-(int(positions.max()) + 1) // _STEP) * _STEP)
        if self._seen > self._clean:
            for block in self._blocks:
                block[..., self._clean : self._seen, :] = 0  # not whatever lies there: a masked NaN is still a NaN
            self._clean = self._seen
        self._positions = positions
        self._rows = slice(0, rows) if isinstance(rows, int) else rows
        self._written = self._run = None
        if not isinstance(rows, int) and len(rows) and bool((rows.diff() == 1).all()):
            self._run = slice(int(rows[0]), int(rows[-1]) + 1)  # they lie side by side: no copy either
        span = torch.arange(self._seen, device=positions.device)
        return span[None, None, None, :] <= positions[:, None, :, None]

    @property
    def front(self) -> bool:
        """Whether the next forward is of the first rows."""
        return isinstance(self._rows, slice)

    def append(self, states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """`update` of one token for each of the first rows, with one move for keys and values.

        states: (R, 2 x heads, head size), keys before values. Returns (R x heads, S, head size) of both.
        """
        heads, size = states.shape[1] // 2, states.shape[2]
        while len(self._keys) <= layer:
            self._add_layer(states[:, :heads, None])
        block, at = self._place[layer]
        both = self._blocks[block][at : at + 2]
        if self._written is None or len(self._written) != states.shape[0] * states.shape[1]:
            # Where each row's token goes in a block's rows of one head size: the same place in every layer.
            rows = torch.arange(states.shape[0])[:, None, None] * heads + torch.arange(heads)
            kinds = torch.arange(2)[:, None] * (self.count * heads)
            self._written = ((rows + kinds) * self.capacity + self._positions[:, :, None]).view(-1)
        both.view(-1, size).index_copy_(0, self._written, states.reshape(-1, size))
        flat = both.view(2, -1, self.capacity, size)[:, : states.shape[0] * heads, : self._seen]
        return flat[0], flat[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: (R, heads, C, head size) in, (R, heads, S, head size) out."""
        while len(self._keys) <= layer_idx:
            self._add_layer(key_states)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, seen = self._rows, self._seen
        if isinstance(rows, slice):
            index = torch.arange(rows.stop, device=keys.device)
            keys[index, :, self._positions[:, 0]] = key_states[:, :, 0]
            values[index, :, self._positions[:, 0]] = value_states[:, :, 0]
        else:
            keys[rows[:, None], :, self._positions] = key_states.transpose(1, 2)
            values[rows[:, None], :, self._positions] = value_states.transpose(1, 2)
            if self._run is not None:
                return keys[self._run, :, :seen], values[self._run, :, :seen]
        if isinstance(rows, slice):
            return keys[rows, :, :seen], values[rows, :, :seen]
        # index_select copies whole rows; an index in brackets goes element by element, at 2.4 times the cost.
        return keys[:, :, :seen].index_select(0, rows), values[:, :, :seen].index_select(0, rows)

    def _add_layer(self, like: Tensor) -> None:
        shape = (self.count, like.shape[1], self.capacity, like.shape[3])
        block, at = (self._place[-1][0], self._place[-1][1] + 2) if self._place else (0, 0)
        if not self._place or at >= len(self._blocks[block]) or self._blocks[block].shape[1:] != shape:
            block, at = len(self._blocks), 0
            self._blocks.append(like.new_empty(2 * max(1, self._layers - len(self._keys)), *shape))
            self._plain.append(_plain(self._blocks[-1]))
            self._blocks[block][..., : self._clean, :] = 0
        self._place.append((block, at))
        self._keys.append(self._blocks[block][at])
        self._values.append(self._blocks[block][at + 1])

    # --- moving ---

    def longest_prefix(
        self, ids: npt.NDArray[np.int64], favourite: int | None, usable: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        """The usable slot that holds most of the beginning of `ids`, and how many tokens. `favourite` wins a tie."""
        width = min(len(ids), self.capacity)
        same = self.ids[:, :width] == ids[:width]
        common = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common = np.where(usable, np.minimum(common, self.length), 0)
        best = int(common.argmax())
        if favourite is not None and common[favourite] == common[best]:
            best = favourite
        return best, int(common[best])

    def copy(self, source: int, target: int, length: int) -> None:
        """Give the target slot the first `length` tokens of the source."""
        for block, plain in zip(self._blocks, self._plain, strict=True):
            both: Any = block if plain is None else plain
            both[:, target, :, :length] = both[:, source, :, :length]
        self.ids[target, :length] = self.ids[source, :length]
        self.length[target] = length

    def swap(self, a: int, b: int) -> None:
        if a == b:
            return
        n = int(max(self.length[a], self.length[b])) + 1
        for block, plain in zip(self._blocks, self._plain, strict=True):
            if plain is not None:  # a move so small is mostly overhead, of which numpy has a fifth
                kept = plain[:, a, :, :n].copy()
                plain[:, a, :, :n] = plain[:, b, :, :n]
                plain[:, b, :, :n] = kept
                continue
            one, other = block[:, a, :, :n], block[:, b, :, :n]
            held = one.clone()
            one.copy_(other)
            other.copy_(held)
        row = self.ids[a, :n].copy()
        self.ids[a, :n] = self.ids[b, :n]
        self.ids[b, :n] = row
        self.length[a], self.length[b] = self.length[b], self.length[a]

    def grow(self, count: int, capacity: int) -> None:
        """Make room; what is held stays."""
        capacity = max(self.capacity, -(-capacity // _STEP) * _STEP)
        count = max(self.count, count)
        if (count, capacity) == (self.count, self.capacity):
            return
        ids = np.zeros((count, capacity), dtype=np.int64)
        ids[: self.count, : self.capacity] = self.ids
        length = np.zeros(count, dtype=np.int64)
        length[: self.count] = self.length
        for i, old in enumerate(self._blocks):
            new = old.new_empty((len(old), count, old.shape[2], capacity, old.shape[4]))
            new[:, : self.count, :, : self._clean] = old[..., : self._clean, :]
            new[:, self.count :, :, : self._clean] = 0
            self._blocks[i], self._plain[i] = new, _plain(new)
        self._keys = [self._blocks[block][at] for block, at in self._place]
        self._values = [self._blocks[block][at + 1] for block, at in self._place]
        self.ids, self.length, self.count, self.capacity = ids, length, count, capacity


def _plain(block: Tensor) -> npt.NDArray[Any] | None:
    return block.numpy() if block.device.type == "cpu" and block.dtype == torch.float32 else None
