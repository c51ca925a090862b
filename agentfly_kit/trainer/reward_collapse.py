"""Whether what a run earns has fallen: a policy that was moved too far earns little, and often nothing ever again.

How far an update moved it does not tell: a step that moves it by 9 nats a token may learn or destroy. What the chains
after it earn does. Knows no policy and no loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentfly_kit.agent.rollout import Rollout

_GROUPS = 16
"""A task's chains earn alike, so groups are counted, and fewer than these are not compared."""
_SURE = 4.0
"""Standard deviations of the rank sum. By luck alone one comparison in thirty thousand goes beyond."""


@dataclass(frozen=True)
class _Earned:
    """What a few steps in a row earned together: a mean for each group."""

    first: int
    last: int
    means: npt.NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.means.mean())

    def __str__(self) -> str:
        where = f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.mean:.3g} at {where}"


class Fall:
    """Told of each step, it says once when the reward has fallen, and again when it has recovered and fallen anew.

    Fallen is: less than halfway from the lowest reward of all to the best mean so far, and (Mann and Whitney's test of
    the groups' means) not by luck of the tasks. Both means are of the fewest steps in a row that have 16 groups; the
    later one is of more, as long as each is below that half: what one step leaves open, the next ones tell.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, npt.NDArray[np.float64]]] = []
        self._moved: dict[int, float] = {}
        self._lowest = math.inf
        self._best: _Earned | None = None
        self._told = False

    def look(self, step: int, rollout: Rollout, moved: float) -> str | None:
        """moved: nats a token by which the step's update moved the policy; NaN if it is not known."""
        scored = [[t.reward for t in group.trajectories if t.reward is not None] for group in rollout.groups]
        scored = [rewards for rewards in scored if rewards]
        while self._steps and self._steps[-1][0] >= step:  # a step that is made again
            self._steps.pop()
        self._moved[step] = moved
        self._lowest = min((self._lowest, *(min(rewards) for rewards in scored)))
        self._steps.append((step, np.array([np.mean(rewards) for rewards in scored], np.float64)))
        now = self._window(len(self._steps))
        if now is None:
            return None
        before = self._window(next(i for i, (number, _) in enumerate(self._steps) if number == now.first))
        if before is not None and (self._best is None or before.mean >= self._best.mean):
            self._best = before
        best = self._best
        if best is None or now.mean >= (half := (best.mean + self._lowest) / 2):
            self._told = False
            return None
        low = [(number, means) for number, means in self._steps if best.last < number < now.first]
        while low and not (len(low[-1][1]) and low[-1][1].mean() >= half):
            number, means = low.pop()
            now = _Earned(number, now.last, np.concatenate([means, now.means]))
        if self._told or _ranks(best.means, now.means) <= _SURE:
            return None
        self._told = True
        return self._words(best, now)

    def _window(self, end: int) -> _Earned | None:
        """The fewest steps before the `end`-th that have enough groups, or None."""
        count = 0
        for begin in range(end - 1, -1, -1):
            count += len(self._steps[begin][1])
            if count >= _GROUPS:
                part = self._steps[begin:end]
                return _Earned(part[0][0], part[-1][0], np.concatenate([means for _, means in part]))
        return None

    def _words(self, best: _Earned, now: _Earned) -> str:
        said = f"the mean reward has fallen to {now}, from {best}"
        if now.means.max() == self._lowest:
            said += "; no chain earns more than another, so nothing is learned any more"
        moved = {s: kl for s, kl in self._moved.items() if best.first <= s < now.last and math.isfinite(kl)}
        if moved:
            most = max(moved, key=lambda s: moved[s])
            said += f". Step {most} moved the policy by {moved[most]:.3g} nats a token"
        return said


def _ranks(high: npt.NDArray[np.float64], low: npt.NDArray[np.float64]) -> float:
    """By how many standard deviations the ranks of `high` are above those of `low`; ties share theirs."""
    values, at, counts = np.unique(np.concatenate([high, low]), return_inverse=True, return_counts=True)
    if len(values) == 1:
        return 0.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[at]
    a, b, n = len(high), len(low), len(at)
    above = float(ranks[:a].sum()) - a * (a + 1) / 2 - a * b / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    return above / math.sqrt(a * b / 12 * (n + 1 - ties / (n * (n - 1))))
