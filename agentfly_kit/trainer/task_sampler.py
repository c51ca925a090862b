"""In which order tasks come: passes over all of them, from easy to hard or shuffled. Knows no agent."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from agentfly_kit import seeds
from agentfly_kit.errors import SettingsError
from agentfly_kit.types import Task


class TaskSampler:
    """The tasks of each iteration. They depend on its index alone."""

    def __init__(
        self, tasks: Sequence[Task], size: int, seed: int, difficulty: str | Callable[[Task], float] | None
    ) -> None:
        self._tasks, self._size, self._seed = tasks, size, seed
        self._difficulties = _difficulties(tasks, difficulty)

    def sample(self, index: int) -> list[Task]:
        """The tasks of an iteration: passes over all tasks, each in its own order."""
        count, size = len(self._tasks), self._size
        out: list[Task] = []
        for position in range(index * size, (index + 1) * size):
            turn, place = divmod(position, count)
            if place == 0 or not out:
                generator = torch.Generator().manual_seed(seeds.derive(self._seed, "tasks", turn))
                order = torch.randperm(count, generator=generator).tolist()
                order.sort(key=self._difficulties.__getitem__)  # stable: the shuffle stays within a level
            out.append(self._tasks[order[place]])
        return out

    def refill(self, index: int, attempt: int, count: int, used: Sequence[Task]) -> list[Task]:
        """Up to `count` other tasks for an iteration, of the difficulties that it has. The same at every call."""
        known = {task.id for task in used}
        levels = {level for task, level in zip(self._tasks, self._difficulties, strict=True) if task.id in known}
        left = [i for i, t in enumerate(self._tasks) if t.id not in known and self._difficulties[i] in levels]
        generator = torch.Generator().manual_seed(seeds.derive(self._seed, "refill", index, attempt))
        order = torch.randperm(len(left), generator=generator)[:count].tolist()
        return [self._tasks[left[i]] for i in order]


def _difficulties(tasks: Sequence[Task], difficulty: str | Callable[[Task], float] | None) -> list[float]:
    """The difficulty of each task; 0 for all where none is asked for."""
    if difficulty is None:
        return [0.0] * len(tasks)
    out = []
    for task in tasks:
        if callable(difficulty):
            value: Any = difficulty(task)
        elif difficulty in task.fields:
            value = task.fields[difficulty]
        else:
            known = ", ".join(task.fields) or "none"
            raise SettingsError(f"difficulty={difficulty!r}: task {task.id!r} has no such field (its fields: {known})")
        if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            raise SettingsError(f"difficulty: task {task.id!r} has {value!r}; give a finite number")
        out.append(float(value))
    return out
