"""Recognizing environments and preparing their `reset`.

A sandbox class is an environment if its `reset` takes a task. A pool lends an environment for one episode, which starts
by resetting it for the task.
"""

from __future__ import annotations

import inspect
from typing import Any

from agentfly_kit import seeds
from agentfly_kit.types import Task


def is_environment(sandbox_type: type) -> bool:
    """Return True if the `reset` of the class requires an argument, the task. A sandbox's `reset()` takes none."""
    needed = [p for p in _parameters(getattr(sandbox_type, "reset", None)) if p.default is p.empty]
    return any(p.kind is p.POSITIONAL_OR_KEYWORD for p in needed)


def _parameters(method: Any) -> list[inspect.Parameter]:
    """Return the parameters after `self`; none if the method has no signature."""
    if not callable(method):
        return []
    try:
        return list(inspect.signature(method).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def environment_seed(task: Task) -> int:
    """Return the task's field `seed` if it is an integer, or else a seed derived from the task's id.

    All chains of a task get the same seed, because chains of a group are compared and must start in the same state.
    """
    given = task.fields.get("seed")
    return given if isinstance(given, int) and not isinstance(given, bool) else seeds.derive(0, "environment", task.id)


def reset_arguments(environment: Any, task: Task) -> dict[str, Any]:
    """Return the arguments of `environment.reset`: the task, and the seed as `seed` or as the second parameter."""
    names = [p.name for p in _parameters(getattr(type(environment), "reset", None))]
    first, *rest = names
    seed = "seed" if "seed" in rest else rest[0] if rest else None
    return {first: task, **({} if seed is None else {seed: environment_seed(task)})}


def episode_is_done(environment: Any) -> bool:
    """Return the environment's `done`, which may be an attribute, a property or a method; False if it has none."""
    done = getattr(environment, "done", False)
    return bool(done() if callable(done) else done)
