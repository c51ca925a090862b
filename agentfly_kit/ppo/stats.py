"""Statistics summed over micro-batches, and a timer of the phases of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor


class RunningStats:
    """Sums over micro-batches, and the maximum of "ratio". They stay on the device until they are read."""

    NAMES = ("loss", "policy_loss", "value_loss", "kl_reference", "entropy", "tokens", "approx_kl", "clipped", "ratio")

    def __init__(self) -> None:
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the statistics of a micro-batch; those that it does not have count as 0."""
        first = next(iter(values.values()))
        zero = first.new_zeros((), dtype=torch.float64)
        self.merge(torch.stack([values[name].detach().double() if name in values else zero for name in self.NAMES]))

    def merge(self, values: Tensor) -> None:
        """Add the `values` of another instance."""
        mine = self.values.to(values.device)
        self.values = torch.cat([(mine + values)[:-1], torch.maximum(mine, values)[-1:]])

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.NAMES.index(name)])

    def per_token(self, name: str) -> float:
        """Return a statistic divided by the number of tokens; NaN without tokens."""
        return self[name] / self["tokens"] if self["tokens"] else math.nan


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
