"""What a step adds up over micro-batches, and where its time went. Knows no loss."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor


class RunningStats:
    """Sums over micro-batches. They stay tensors until they are read, so that a GPU is not waited for."""

    NAMES = ("loss", "policy_loss", "value_loss", "kl_reference", "entropy", "tokens", "approx_kl", "clipped")

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._known: dict[str, float] | None = {}

    def add(self, name: str, value: Tensor) -> None:
        self._parts.setdefault(name, []).append(value)
        self._known = None

    def max(self, name: str, value: Tensor) -> None:
        self.add(name, value)

    def merge(self, other: RunningStats) -> None:
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
        """A token."""
        return self[name] / self["tokens"] if self["tokens"] else math.nan

    def tensor(self, cancelled: bool) -> Tensor:
        return torch.tensor([*(self[name] for name in self.NAMES), float(cancelled)], dtype=torch.float64)

    def set(self, values: Tensor, ratio: float) -> None:
        self._parts = {}
        for name, value in zip((*self.NAMES, "ratio"), (*values.tolist(), ratio), strict=True):
            self.add(name, torch.tensor(value, dtype=torch.float64))


class PhaseTimer:
    def __init__(self) -> None:
        self.seconds = {"old": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now
