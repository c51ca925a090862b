"""Arrays with the tokens that the running requests have sampled so far, one row per request.

A request is assigned a row at its first token and releases it when its sample is read. Each decode step needs only a
few array operations; Python lists would need one object per token and per recorded quantity.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentfly_kit import seeds
from agentfly_kit.types import Sampling

# Number of tokens for which noise is computed in advance; one token would need as many array operations.
_NOISE_BLOCK = 16


class SampleBuffers:
    """Sampled tokens by row: `ids[row, :count[row]]`, and likewise logprobs, entropies, kept_mass and versions."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.count: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.limit: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.temperature: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.top_p: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.top_k: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.min_p: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.stops: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # True if the request has stop strings
        self.ids: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.entropies: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.kept_mass: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.versions: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self._noise: npt.NDArray[np.float64] = np.zeros((0, _NOISE_BLOCK), dtype=np.float64)

    def allocate(self, sampling: Sampling, seed: int, limit: int) -> int:
        """Return a row for a request that samples at most `limit` tokens."""
        if not self._free:
            self._grow(max(16, 2 * len(self.count)), self.ids.shape[1])
        row = self._free.pop()
        self.count[row], self.limit[row], self.seed[row] = 0, limit, seed
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.top_k[row], self.min_p[row] = sampling.top_p, sampling.top_k, sampling.min_p
        self.stops[row] = bool(sampling.stop)
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    def last_ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the last sampled id of each row."""
        newest: npt.NDArray[np.int64] = self.ids[rows, self.count[rows] - 1]
        return newest

    def noise(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the noise for each row's next token, (B,) in [0, 1): `seeds.uniforms` of its seed and token count."""
        at = self.count[rows] % _NOISE_BLOCK
        due = rows[at == 0]
        if len(due):
            counters = (self.count[due][:, None] + np.arange(_NOISE_BLOCK)).astype(np.uint64)
            found = seeds.uniforms(np.repeat(self.seed[due], _NOISE_BLOCK), counters.reshape(-1))
            self._noise[due] = found.reshape(-1, _NOISE_BLOCK)
        drawn: npt.NDArray[np.float64] = self._noise[rows, at]
        return drawn

    def write(
        self,
        rows: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        entropies: npt.NDArray[np.float32],
        kept_mass: npt.NDArray[np.float32] | None,
        version: int,
    ) -> npt.NDArray[np.bool_]:
        """Append one token to each row; return True for the rows that have reached their limit."""
        at = self.count[rows]
        if int(at.max()) >= self.ids.shape[1]:
            self._grow(len(self.count), max(32, 2 * self.ids.shape[1]))
        self.ids[rows, at] = ids
        self.logprobs[rows, at] = logprobs
        self.entropies[rows, at] = entropies
        self.versions[rows, at] = version
        if kept_mass is not None:
            self.kept_mass[rows, at] = kept_mass
        self.count[rows] = at + 1
        full: npt.NDArray[np.bool_] = at + 1 >= self.limit[rows]
        return full

    def _grow(self, rows: int, width: int) -> None:
        held = len(self.count)
        for name in ("count", "limit", "seed", "temperature", "top_p", "top_k", "min_p", "stops"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(rows - held, dtype=old.dtype)]))
        self._noise = np.concatenate([self._noise, np.zeros((rows - held, _NOISE_BLOCK))])
        for name in ("ids", "logprobs", "entropies", "kept_mass", "versions"):
            old = getattr(self, name)
            new = np.zeros((rows, width), dtype=old.dtype)
            new[:held, : old.shape[1]] = old
            setattr(self, name, new)
        self._free.extend(range(rows - 1, held - 1, -1))
