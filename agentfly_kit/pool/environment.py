"""What makes a class an environment: its `reset` takes a task. One is lent for an episode, and begun with the task.

Knows no pool, no tool and no chain: those who lend and those who lease ask here what they have before them.
"""

from __future__ import annotations

import inspect
from typing import Any

from agentfly_kit import seeds
from agentfly_kit.types import Task


def is_environment(sandbox_type: type) -> bool:
    """Whether `kind.reset` needs an argument, its task. A sandbox's `reset()` needs none."""
    needed = [p for p in _parameters(getattr(sandbox_type, "reset", None)) if p.default is p.empty]
    return any(p.kind is p.POSITIONAL_OR_KEYWORD for p in needed)


def _parameters(method: Any) -> list[inspect.Parameter]:
    """Those behind `self`."""
    if not callable(method):
        return []
    try:
        return list(inspect.signature(method).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def environment_seed(task: Task) -> int:
    """The task's own field `seed`, else one derived from its id.

    It is the same for every chain of a task: chains of a group are compared with each other, so they begin alike. What
    shall differ between chains is drawn from `context.seed`.
    """
    given = task.fields.get("seed")
    return given if isinstance(given, int) and not isinstance(given, bool) else seeds.derive(0, "environment", task.id)


def reset_arguments(environment: Any, task: Task) -> dict[str, Any]:
    """What its `reset` is given, by name: the task, and the seed where there is a second parameter or one named so."""
    names = [p.name for p in _parameters(getattr(type(environment), "reset", None))]
    first, *rest = names
    seed = "seed" if "seed" in rest else rest[0] if rest else None
    return {first: task, **({} if seed is None else {seed: environment_seed(task)})}


def episode_is_done(environment: Any) -> bool:
    """Its `done`, an attribute, a property or a method; False where it has none."""
    done = getattr(environment, "done", False)
    return bool(done() if callable(done) else done)
