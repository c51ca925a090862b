"""Order of the training tasks: repeated passes over all tasks, shuffled or from easy to hard."""

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
    """Selects the tasks of each iteration, as a deterministic function of its index.

    Args:
        tasks: All tasks.
        size: Number of tasks per iteration.
        seed: Seed of the order.
        difficulty: Name of a task field, or a function of a task, that gives its difficulty; None shuffles all tasks.

    Raises:
        SettingsError: If a task has no difficulty, or one that is not a finite number.
    """

    def __init__(
        self, tasks: Sequence[Task], size: int, seed: int, difficulty: str | Callable[[Task], float] | None
    ) -> None:
        self._tasks, self._size, self._seed = tasks, size, seed
        self._difficulties = _difficulties(tasks, difficulty)

    def sample(self, index: int) -> list[Task]:
        """Return the tasks of an iteration. Each pass over all tasks has its own order."""
        count, size = len(self._tasks), self._size
        out: list[Task] = []
        for position in range(index * size, (index + 1) * size):
            turn, place = divmod(position, count)
            if place == 0 or not out:
                generator = torch.Generator().manual_seed(seeds.derive(self._seed, "tasks", turn))
                order = torch.randperm(count, generator=generator).tolist()
                order.sort(key=self._difficulties.__getitem__)  # stable: tasks of equal difficulty stay shuffled
            out.append(self._tasks[order[place]])
        return out

    def refill(self, index: int, attempt: int, count: int, used: Sequence[Task]) -> list[Task]:
        """Return further tasks for an iteration, of the same difficulties. Repeated calls return the same tasks.

        Args:
            index: Index of the iteration.
            attempt: Number of the refill in the iteration, starting at 1.
            count: Maximum number of tasks.
            used: Tasks that the iteration already has.

        Returns:
            Up to `count` tasks that are not in `used`.
        """
        known = {task.id for task in used}
        levels = {level for task, level in zip(self._tasks, self._difficulties, strict=True) if task.id in known}
        left = [i for i, t in enumerate(self._tasks) if t.id not in known and self._difficulties[i] in levels]
        generator = torch.Generator().manual_seed(seeds.derive(self._seed, "refill", index, attempt))
        order = torch.randperm(len(left), generator=generator)[:count].tolist()
        return [self._tasks[left[i]] for i in order]


def _difficulties(tasks: Sequence[Task], difficulty: str | Callable[[Task], float] | None) -> list[float]:
    """Return the difficulty of each task; 0 for all tasks if `difficulty` is None."""
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
            raise SettingsError(
                f"difficulty must be a field of every task, got {difficulty!r}, which task {task.id!r} lacks "
                f"(its fields: {known})"
            )
        if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            raise SettingsError(f"difficulty must be a finite number, got {value!r} for task {task.id!r}")
        out.append(float(value))
    return out
