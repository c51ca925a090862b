"""What each running request has sampled so far, as columns: a lane a request, a few array operations a step.

Knows no model and no slots. A lane is taken when a request gets its first token and given back when its sample is read;
lists would grow by a Python object a token and signal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentfly_kit import seeds
from agentfly_kit.types import Sampling

_AHEAD = 16
"""Tokens whose noise a lane has at hand: it costs the same two dozen array operations for one token as for these."""


class Tape:
    """`ids[lane, :count[lane]]` is what was sampled; `logprobs`, `entropies`, `kept` and `versions` go with it."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.count: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.limit: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.temperature: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.top_p: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.top_k: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.min_p: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self.stops: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)  # whether a text may end it
        self.ids: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.entropies: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.kept: npt.NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        self.versions: npt.NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        self._noise: npt.NDArray[np.float64] = np.zeros((0, _AHEAD), dtype=np.float64)

    def open(self, sampling: Sampling, seed: int, limit: int) -> int:
        """A lane for a request that will sample at most `limit` tokens."""
        if not self._free:
            self._widen(max(16, 2 * len(self.count)), self.ids.shape[1])
        lane = self._free.pop()
        self.count[lane], self.limit[lane], self.seed[lane] = 0, limit, seed
        self.temperature[lane] = sampling.temperature
        self.top_p[lane], self.top_k[lane], self.min_p[lane] = sampling.top_p, sampling.top_k, sampling.min_p
        self.stops[lane] = bool(sampling.stop)
        return lane

    def close(self, lane: int) -> None:
        self._free.append(lane)

    def last(self, lanes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The newest token of each lane."""
        newest: npt.NDArray[np.int64] = self.ids[lanes, self.count[lanes] - 1]
        return newest

    def noise(self, lanes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The noise of each lane's next token, (B,) in [0, 1): `seeds.uniforms` of its seed and how many it has."""
        at = self.count[lanes] % _AHEAD
        due = lanes[at == 0]
        if len(due):
            counters = (self.count[due][:, None] + np.arange(_AHEAD)).astype(np.uint64)
            found = seeds.uniforms(np.repeat(self.seed[due], _AHEAD), counters.reshape(-1))
            self._noise[due] = found.reshape(-1, _AHEAD)
        drawn: npt.NDArray[np.float64] = self._noise[lanes, at]
        return drawn

    def write(
        self,
        lanes: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        entropies: npt.NDArray[np.float32],
        kept: npt.NDArray[np.float32] | None,
        version: int,
    ) -> npt.NDArray[np.bool_]:
        """One more token a lane; True where that was the last one it may have."""
        at = self.count[lanes]
        if int(at.max()) >= self.ids.shape[1]:
            self._widen(len(self.count), max(32, 2 * self.ids.shape[1]))
        self.ids[lanes, at] = ids
        self.logprobs[lanes, at] = logprobs
        self.entropies[lanes, at] = entropies
        self.versions[lanes, at] = version
        if kept is not None:
            self.kept[lanes, at] = kept
        self.count[lanes] = at + 1
        full: npt.NDArray[np.bool_] = at + 1 >= self.limit[lanes]
        return full

    def _widen(self, lanes: int, width: int) -> None:
        held = len(self.count)
        for name in ("count", "limit", "seed", "temperature", "top_p", "top_k", "min_p", "stops"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(lanes - held, dtype=old.dtype)]))
        self._noise = np.concatenate([self._noise, np.zeros((lanes - held, _AHEAD))])
        for name in ("ids", "logprobs", "entropies", "kept", "versions"):
            old = getattr(self, name)
            new = np.zeros((lanes, width), dtype=old.dtype)
            new[:held, : old.shape[1]] = old
            setattr(self, name, new)
        self._free.extend(range(lanes - 1, held - 1, -1))
