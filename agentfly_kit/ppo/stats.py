"""Statistics summed over micro-batches, and a timer of the phases of a step."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor


class RunningStats:
    """Statistics accumulated over micro-batches: sums, and the maximum for "ratio".

    Values stay tensors until they are read, to avoid synchronizing with the GPU.
    """

    NAMES = ("loss", "policy_loss", "value_loss", "kl_reference", "entropy", "tokens", "approx_kl", "clipped")

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._known: dict[str, float] | None = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a value to a statistic."""
        self._parts.setdefault(name, []).append(value)
        self._known = None

    def max(self, name: str, value: Tensor) -> None:
        """Add a value to a statistic of which the maximum is taken ("ratio")."""
        self.add(name, value)

    def merge(self, other: RunningStats) -> None:
        """Add the statistics of another instance."""
        for name in (*self.NAMES, "ratio"):
            self.add(name, torch.tensor(other[name], dtype=torch.float64))

    def _read(self) -> dict[str, float]:
        if self._known is None:
            self._known = {}
            for name, parts in self._parts.items():
                numbers = torch.stack([p.double() for p in parts])
                self._known[name] = float(numbers.max() if name == "ratio" else numbers.sum())
        return self._known

    def __getitem__(self, name: str) -> float:
        return self._read().get(name, 0.0)

    def per_token(self, name: str) -> float:
        """Return a statistic divided by the number of tokens; NaN without tokens."""
        return self[name] / self["tokens"] if self["tokens"] else math.nan

    def tensor(self, cancelled: bool) -> Tensor:
        """Return the sums in the order of `NAMES`, followed by the flag `cancelled`, for a reduction over processes."""
        return torch.tensor([*(self[name] for name in self.NAMES), float(cancelled)], dtype=torch.float64)

    def set(self, values: Tensor, ratio: float) -> None:
        """Replace all statistics: sums in the order of `NAMES`, and the maximum "ratio"."""
        self._parts = {}
        for name, value in zip((*self.NAMES, "ratio"), (*values.tolist(), ratio), strict=True):
            self.add(name, torch.tensor(value, dtype=torch.float64))


class PhaseTimer:
    """Wall-clock seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.seconds = {"old": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Attribute the time since the previous lap to a phase."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now
