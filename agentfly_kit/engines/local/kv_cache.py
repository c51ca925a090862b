"""KV cache with one slot per sequence. Sequences may have different lengths.

A batch that consists of the leading slots needs no copies, so the engine moves running sequences there with `swap`.
Attention layers of transformers call `update`, which returns all keys and values; `prepare` returns the causal mask.

Decoding is batch-invariant in float32 on a CPU: the results for a row are bitwise identical for any batch composition.
A matrix product computes each row independently, attention processes one row at a time, and the keys after a row's end
have a weight of exactly zero. Measurements revealed these exceptions:

- MKL uses different kernels for different numbers of rows, unless MKL_CBWR requests strict reproducibility, which the
  import of agentfly_kit does. `is_batch_invariant` checks it.
- An elementwise function uses a different formula for the last elements of a tensor if the size is not a multiple of
  the vector width. Batches of a multiple of eight rows avoid this.
- Torch uses its own kernel for products of fewer than 400 multiplications. At least 64 keys avoid this.
- A product sums over many keys in several parts. Up to 192 keys form one part; for more keys, the parts depend on the
  number of keys and on the processor. Torch's fused attention multiplies blocks of 512 keys, so `padded` avoids a last
  block of 193 to 511 keys. `weighted_sum` multiplies blocks of at most 192 keys, so `aligned` is sufficient for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# Torch's fused attention processes this number of keys at once.
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


@functools.cache
def is_batch_invariant(threads: int) -> bool:
    """Return True if products, attention and normalizations round each row independently of the other rows.

    The result may be False on a processor that was not tested, if MKL_CBWR is set to another value, or if the process
    multiplied matrices before it imported agentfly_kit.

    Args:
        threads: Torch's number of threads, which affects its choice of kernels. Results are cached for each number.
    """
    generator = torch.Generator().manual_seed(0)
    for width, outputs in ((64, 192), (128, 128), (384, 64)):
        weight, x = (torch.randn(n, width, generator=generator) for n in (outputs, 256))
        expected = F.linear(x, weight)
        if any(not torch.equal(F.linear(x[:rows], weight), expected[:rows]) for rows in (8, 16, 24, 40, 64, 128)):
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
        if not torch.equal(found[0], found[1]) or not torch.equal(found[0], found[2]):
            return False
        if not _decode_attention_is_invariant(queries[0], cached[0], keys):
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


class KVCache:
    """Keys and values of many sequences. Slot i contains those of the tokens `ids[i, :length[i]]`.

    If the longest sequence has n tokens, attention reads `round_up(n)` keys. `round_up` is `padded` or `aligned`.
    """

    def __init__(self, count: int, capacity: int, round_up: Callable[[int], int] = padded) -> None:
        self.count = count
        self._round_up = round_up
        self.capacity = round_up(capacity)
        self.ids: npt.NDArray[np.int64] = np.zeros((count, self.capacity), dtype=np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Number of leading tokens of each slot that were prefilled. Decoding rounds keys differently.
        self.prefilled: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        # Keys and values of each layer, (2, count, heads, capacity, head size), allocated in its first `update`.
        self._layers: list[Tensor] = []
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
            round_up: As in the constructor, for this forward pass only.

        Returns:
            The mask, (R, 1, C, S keys) bool. S covers all positions.
        """
        self._visible = min(self.capacity, (round_up or self._round_up)(int(positions.max()) + 1))
        if self._visible > self._initialized:
            for held in self._layers:
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
        span = torch.arange(self._visible, device=positions.device)
        return span[None, None, None, :] <= positions[:, None, :, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values of a layer, and return those of all visible tokens. Called by attention layers.

        Shapes:  key_states, value_states (R rows, heads, C tokens, head size) -> (R, heads, S tokens, head size).
        """
        heads, size = key_states.shape[1], key_states.shape[3]
        if value_states.shape != key_states.shape:  # multi-head latent attention
            raise ValueError(
                f"the KV cache needs keys and values of one size, got {size} and {value_states.shape[3]}"
            )
        while len(self._layers) <= layer_idx:
            self._layers.append(key_states.new_empty(2, self.count, heads, self.capacity, size))
            self._layers[-1][..., : self._initialized, :] = 0
        if heads not in self._write_index:
            at = self._positions
            rows = self._rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=at.device)
            vectors = rows[:, None] * heads + torch.arange(heads, device=at.device)
            self._write_index[heads] = (vectors[:, :, None] * self.capacity + at[:, None]).view(-1)
        found = []
        for held, states in zip(self._layers[layer_idx], (key_states, value_states), strict=True):
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

    # --- copying and resizing ---

    def longest_prefix(
        self, ids: npt.NDArray[np.int64], preferred: int | None, usable: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        """Return the usable slot with the longest prefix of `ids` (in a tie, `preferred`), and the prefix length."""
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
        for held in self._layers:
            held[:, target, :, :length] = held[:, source, :, :length]
        self.ids[target, :length] = self.ids[source, :length]
        self.length[target] = length
        self.prefilled[target] = min(length, self.prefilled[source])

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots."""
        n = min(int(max(self.length[a], self.length[b])) + 1, self.capacity)
        for held in self._layers:
            before = held[:, a, :, :n].clone()
            held[:, a, :, :n] = held[:, b, :, :n]
            held[:, b, :, :n] = before
        self.ids[[a, b], :n] = self.ids[[b, a], :n]
        for counts in (self.length, self.prefilled):
            counts[[a, b]] = counts[[b, a]]

    def grow(self, count: int, capacity: int) -> None:
        """Enlarge the cache to at least `count` slots of `capacity` tokens, keeping its contents."""
        capacity = max(self.capacity, self._round_up(capacity))
        count = max(self.count, count)
        if (count, capacity) == (self.count, self.capacity):
            return
        more = ((0, count - self.count), (0, capacity - self.capacity))
        self.ids, self.length = np.pad(self.ids, more), np.pad(self.length, more[0])
        self.prefilled = np.pad(self.prefilled, more[0])
        used = slice(0, self._initialized)
        for at, old in enumerate(self._layers):
            new = old.new_empty(2, count, old.shape[2], capacity, old.shape[4])
            new[:, : self.count, :, used] = old[:, :, :, used]
            new[:, self.count :, :, used] = 0
            self._layers[at] = new
        self.count, self.capacity = count, capacity
