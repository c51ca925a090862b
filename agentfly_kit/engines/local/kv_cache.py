"""KV cache with one slot per sequence. Sequences may have different lengths.

A batch that consists of the leading slots needs no copies, so the engine moves running sequences there with `swap`.
Attention layers of transformers call `update`, which returns all keys and values; `prepare` returns the causal mask.
Convolutions and linear attention instead replace the state of a slot, which then cannot be reset to an earlier token.

Decoding is batch-invariant in float32 on a CPU: the results for a row are bitwise identical for any batch composition.
A matrix product computes each row independently, attention processes one row at a time, and the keys after a row's end
have a weight of exactly zero. Measurements revealed these exceptions:

- MKL uses different kernels for different numbers of rows, unless MKL_CBWR requests strict reproducibility. Importing
  agentfly_kit sets this variable, and `is_batch_invariant` checks the effect.
- An elementwise function uses a different formula for the last elements of a tensor if the size is not a multiple of
  the vector width. Batch sizes that are multiples of eight avoid this difference.
- oneDNN uses another kernel for a single row.
- Torch uses its own kernel for products of fewer than 400 multiplications. Using at least 64 keys avoids that kernel.
- A product sums over many keys in several parts. Up to 192 keys form one part; for more keys, the parts depend on the
  number of keys and on the processor. Torch's fused attention multiplies blocks of 512 keys, so `padded` avoids a last
  block of 193 to 511 keys. `weighted_sum` multiplies blocks of at most 192 keys, so `aligned` is sufficient for it.
"""

from __future__ import annotations

import functools
import platform
from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# A function that multiplies rows, (..., inputs) -> (..., outputs).
Product: TypeAlias = Callable[[Tensor], Tensor]

# Number of keys that Torch's fused attention processes at once.
_FUSED_BLOCK = 512
# Number of keys over which a product sums in one pass on all processors that were measured.
_KEY_BLOCK = 192


def aligned(tokens: int) -> int:
    """Round up a number of keys such that the result of `weighted_sum` does not depend on the additional keys."""
    step = 16 if tokens <= _KEY_BLOCK else 64
    return max(64, -(-tokens // step) * step)


def padded(tokens: int) -> int:
    """Round up a number of keys such that torch's fused attention on a CPU does not depend on the additional keys."""
    last = aligned(tokens) % _FUSED_BLOCK
    return aligned(tokens) + (_FUSED_BLOCK - last if last > _KEY_BLOCK else 0)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return `weights @ values`, rounded in the same way for any number of trailing zeros in the weights.

    Shapes:  weights (B, Q queries, S keys), values (B, S, d) -> (B, Q, d).
    """
    total = torch.bmm(weights[..., :_KEY_BLOCK], values[:, :_KEY_BLOCK])
    for start in range(_KEY_BLOCK, values.shape[1], _KEY_BLOCK):
        block = slice(start, start + _KEY_BLOCK)
        total.baddbmm_(weights[..., block], values[:, block])
    return total


def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return a function that computes `F.linear` with oneDNN and a copy of a weight in oneDNN's layout.

    For 8 rows and weights outside the processor's cache, it takes about half as long as `F.linear`, which is used if
    this build of torch has no oneDNN, and on processors that are not x86, where this was not tested.
    """
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return functools.partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)  # the layout is fast for any number of rows
    return lambda x: cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""))


@functools.cache
def is_batch_invariant(threads: int, packed: bool = False) -> bool:
    """Return True if products, attention and normalizations round each row independently of the other rows.

    The result may be False on a processor that was not tested, if MKL_CBWR is set to another value, or if the process
    multiplied matrices before it imported agentfly_kit.

    Args:
        threads: Torch's number of threads, which affects its choice of kernels. Results are cached for each number.
        packed: Whether products with oneDNN's layout are tested too.
    """
    generator = torch.Generator().manual_seed(0)
    for width, outputs in ((64, 192), (128, 128), (384, 64), (2048, 64)):
        weight, x = (torch.randn(n, width, generator=generator) for n in (outputs, 256))
        products: list[Product] = [functools.partial(F.linear, weight=weight)] + packed * [packed_product(weight)]
        for product in products:
            if any(not torch.equal(product(x[:rows]), product(x)[:rows]) for rows in (8, 16, 24, 40, 64, 128)):
                return False
    for keys in (100, 180, 300, 700):
        queries, cached = (
            torch.randn(1, 2, 16, 32, generator=generator),
            torch.randn(1, 2, 2048, 32, generator=generator),
        )
        found = [
            F.scaled_dot_product_attention(
                queries,
                cached[:, :, :size],
                cached[:, :, :size],
                attn_mask=(torch.arange(size) < keys).expand(16, -1),
            )
            for size in (padded(keys), 1024, 2048)
        ]
        same = torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        if not (same and _decode_attention_is_invariant(queries[0], cached[0], keys)):
            return False
    # Normalizations must not depend on the number of rows.
    x = torch.randn(64, 192, generator=generator)
    return all(
        torch.equal(function(x[:rows]), function(x)[:rows])
        for function in (functools.partial(F.rms_norm, normalized_shape=(192,)), functools.partial(F.softmax, dim=-1))
        for rows in (8, 16, 24, 40)
    )


def _decode_attention_is_invariant(queries: Tensor, cached: Tensor, keys: int) -> bool:
    """Return True if attention with `weighted_sum` over `keys` keys depends on neither other rows nor further keys.

    Shapes:  queries (R rows, Q queries, d), cached (R, S keys, d).
    """

    def attention(rows: int, size: int) -> Tensor:
        hidden = torch.where(torch.arange(size) < keys, 0.0, -torch.inf).expand(rows, queries.shape[1], -1)
        scores = torch.baddbmm(hidden, queries[:rows], cached[:rows, :size].transpose(1, 2), alpha=0.2)
        return weighted_sum(scores.softmax(-1), cached[:rows, :size])

    expected = attention(len(queries), cached.shape[1])
    return all(
        torch.equal(attention(rows, aligned(keys + more)), expected[:rows])
        for rows in range(1, len(queries) + 1)
        for more in (0, 64, 400)
    )


class _LayerStates:
    """States of one layer with a convolution or linear attention, for the selected rows. Layers may modify states."""

    record_past = False

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}


class KVCache:
    """Keys and values of many sequences. Slot i contains those of the tokens `row_keys[i, :length[i]]`.

    The row keys are token ids or, at placeholders of images, hashes of the images; see `Row.keys`.

    If the longest sequence has n tokens, attention reads `round_up(n)` keys. `round_up` is `padded` or `aligned`.
    """

    def __init__(self, count: int, capacity: int, round_up: Callable[[int], int] = padded) -> None:
        self.count = count
        self._round_up = round_up
        self.capacity = round_up(capacity)
        self.row_keys: npt.NDArray[np.int64] = np.zeros((count, self.capacity), dtype=np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Number of leading tokens of each slot that were prefilled. Decoding rounds keys differently.
        self.prefilled: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Keys (0) and values (1) by layer, (count, heads, capacity, head size), allocated by the first `update`.
        self._held: dict[tuple[int, int], Tensor] = {}
        # Recurrent states by layer, attribute of `_LayerStates` and index, (count, ...).
        self._states: dict[tuple[int, str, int], Tensor] = {}
        # Recurrent states of the selected rows.
        self.layers: defaultdict[int, _LayerStates] = defaultdict(_LayerStates)
        self._rows: Tensor | slice = slice(0, 0)
        self._positions: Tensor = torch.zeros(0)
        self._visible = 0
        # Number of leading positions of each slot whose memory is initialized, with keys and values or with zeros.
        self._initialized = 0
        # Maps a layer's number of heads to the positions of new vectors in its flattened keys or values.
        self._write_index: dict[int, Tensor] = {}

    # --- forward pass ---

    def prepare(self, rows: Tensor | int, positions: Tensor, round_up: Callable[[int], int] | None = None) -> Tensor:
        """Select the positions of C tokens in each of R slots for the next forward pass, and return the causal mask.

        Args:
            rows: R for the first R slots, or the indices of the slots, (R,). Contiguous slots are used without copying.
            positions: Position of each token in its slot, (R, C).
            round_up: Replaces the constructor's `round_up` for this forward pass only.

        Returns:
            The mask, (R, 1, C, S keys) bool. S covers all positions.
        """
        self._visible = min(self.capacity, (round_up or self._round_up)(int(positions.max()) + 1))
        if self._visible > self._initialized:
            for held in self._held.values():
                # Uninitialized memory may contain NaN, which masking does not remove.
                held[..., self._initialized : self._visible, :] = 0
            self._initialized = self._visible
        if isinstance(rows, int):
            self._rows = slice(0, rows)
        elif len(rows) and bool((rows.diff() == 1).all()):
            self._rows = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            self._rows = rows
        self._positions, self._write_index = positions, {}
        self.layers.clear()
        for (layer, kind, index), held in self._states.items():
            states = held[self._rows]
            begins = (positions[:, 0] == 0).view(-1, *[1] * (states.dim() - 1))
            getattr(self.layers[layer], kind)[index] = states.masked_fill(begins, 0)
        span = torch.arange(self._visible, device=positions.device)
        return span[None, None, None, :] <= positions[:, None, :, None]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return those of all visible tokens; called by attention layers.

        Shapes:  key_states, value_states (R rows, heads, C tokens, head size) -> (R, heads, S tokens, head size). With
                 multi-head latent attention, the head size of values differs from that of keys.
        """
        heads = key_states.shape[1]
        if heads not in self._write_index:
            at, rows = self._positions, self._rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=at.device)
            vectors = rows[:, None] * heads + torch.arange(heads, device=at.device)
            self._write_index[heads] = (vectors[:, :, None] * self.capacity + at[:, None]).view(-1)
        found = []
        for part, states in enumerate((key_states, value_states)):
            size = states.shape[3]
            if (layer_idx, part) not in self._held:
                self._held[layer_idx, part] = states.new_empty(self.count, heads, self.capacity, size)
                self._held[layer_idx, part][..., : self._initialized, :] = 0
            held = self._held[layer_idx, part]
            held.view(-1, size).index_copy_(0, self._write_index[heads], states.reshape(-1, size))
            visible = held[:, :, : self._visible]
            # index_select copies whole rows. Indexing with a tensor copies each element and takes 2.4 times as long.
            found.append(
                visible[self._rows] if isinstance(self._rows, slice) else visible.index_select(0, self._rows)
            )
        return found[0], found[1]

    def get_seq_length(self, *_: object) -> int:
        """Return 0. Models do not use the length, because the engine passes all positions explicitly."""
        return 0

    # --- recurrent states ---

    @property
    def is_recurrent(self) -> bool:
        """True if slots contain recurrent states, which belong to all tokens of a slot and to no shorter prefix."""
        return bool(self._states)

    def has_previous_state(self, *_: object, **__: object) -> bool:
        """Return False before the first forward pass. The states of rows added later start as zeros."""
        return self.is_recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, (R rows, d, C tokens), or None before the first forward pass."""
        return self.layers[layer_idx].conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of linear attention in each of R rows, (R, ...), or None before the first forward pass."""
        return self.layers[layer_idx].recurrent_states.get(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False, because no layer keeps states of earlier tokens."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        *,
        conv_kernel_size: int,
        **_: object,
    ) -> Tensor:
        """Append the inputs of a convolution to the last ones, and return all of them; called by layers.

        Shapes:  conv_states (R rows, d, C tokens) -> (R, d, conv_kernel_size + C).
        """
        held = self.layers[layer_idx].conv_states
        before = held.get(state_idx, conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size))
        inputs = torch.cat([before, conv_states], -1)
        held[state_idx] = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        **_: object,
    ) -> Tensor:
        """Replace the state of linear attention in each of R rows, (R, ...), and return it; called by layers."""
        self.layers[layer_idx].recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def store_states(self) -> None:
        """Store the recurrent states of the selected rows after a forward pass."""
        for layer, states in self.layers.items():
            for kind, parts in vars(states).items():
                for index, new in parts.items():
                    if (layer, kind, index) not in self._states:
                        self._states[layer, kind, index] = new.new_zeros(self.count, *new.shape[1:])
                    self._states[layer, kind, index][self._rows] = new

    # --- copying and resizing ---

    def longest_prefix(
        self,
        row_keys: npt.NDArray[np.int64],
        preferred: int | None,
        usable: npt.NDArray[np.bool_],
    ) -> tuple[int, int]:
        """Return the usable slot with the longest prefix of a row (in a tie, `preferred`), and the prefix length."""
        width = min(len(row_keys), self.capacity)
        same = self.row_keys[:, :width] == row_keys[:width]
        common = np.where(same.all(axis=1), width, same.argmin(axis=1))
        common = np.where(usable, np.minimum(common, self.length), 0)
        best = int(common.argmax())
        if preferred is not None and common[preferred] == common[best]:
            best = preferred
        return best, int(common[best])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        for held in self._held.values():
            held[target, :, :length] = held[source, :, :length]
        for states in self._states.values():
            states[target] = states[source]
        self.row_keys[target, :length] = self.row_keys[source, :length]
        self.length[target] = length
        self.prefilled[target] = min(length, self.prefilled[source])

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots."""
        n = min(int(max(self.length[a], self.length[b])) + 1, self.capacity)
        for held in self._held.values():
            before = held[a, :, :n].clone()
            held[a, :, :n] = held[b, :, :n]
            held[b, :, :n] = before
        for states in self._states.values():
            states[[a, b]] = states[[b, a]]
        self.row_keys[[a, b], :n] = self.row_keys[[b, a], :n]
        for counts in (self.length, self.prefilled):
            counts[[a, b]] = counts[[b, a]]

    def grow(self, count: int, capacity: int) -> None:
        """Enlarge the cache to at least `count` slots of `capacity` tokens, keeping its contents."""
        capacity = max(self.capacity, self._round_up(capacity))
        count = max(self.count, count)
        if (count, capacity) == (self.count, self.capacity):
            return
        more = ((0, count - self.count), (0, capacity - self.capacity))
        self.row_keys, self.length = np.pad(self.row_keys, more), np.pad(self.length, more[0])
        self.prefilled = np.pad(self.prefilled, more[0])
        used = slice(0, self._initialized)
        for part, old in self._held.items():
            new = old.new_empty(count, old.shape[1], capacity, old.shape[3])
            new[: self.count, :, used] = old[:, :, used]
            new[self.count :, :, used] = 0
            self._held[part] = new
        for key, states in self._states.items():
            self._states[key] = torch.cat([states, states.new_zeros(count - self.count, *states.shape[1:])])
        self.count, self.capacity = count, capacity
