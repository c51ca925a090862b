"""Detection of environment classes, and the arguments of their `reset` method.

A sandbox class is an environment if its `reset` takes a task or task fields. A pool leases an environment for one
episode, and the environment is reset for the task at the beginning.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from agentfly_kit import seeds
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.types import Task


def is_environment(sandbox_type: type) -> bool:
    """Return True if the class is an environment: its `reset` has a required parameter or accepts `**kwargs`."""
    return any(
        p.kind is p.VAR_KEYWORD or (p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
        for p in _reset_parameters(sandbox_type)
    )


def check_reset(sandbox_type: type) -> None:
    """Raise SettingsError if the class is an environment whose `reset` cannot be called with keyword arguments."""
    wrong = [p.name for p in _reset_parameters(sandbox_type) if p.kind is p.POSITIONAL_ONLY]
    if wrong and is_environment(sandbox_type):
        raise SettingsError(
            f"the parameters of {sandbox_type.__name__}.reset are passed by name, but {', '.join(wrong)} can only be "
            "passed by position; remove the '/'"
        )


def _reset_parameters(sandbox_type: type) -> list[inspect.Parameter]:
    """Return the parameters of `reset` after `self`, or [] if `reset` is not defined or has no signature."""
    method = getattr(sandbox_type, "reset", None)
    return _parameters_after_self(method) if callable(method) else []


@functools.lru_cache(maxsize=32)
def _parameters_after_self(method: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(method).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def environment_seed(task: Task) -> int:
    """Return the `seed` field of the task if it is an integer, otherwise a seed derived from the task id.

    All chains of a task get the same seed, because chains that are compared must start in the same state.
    """
    given = task.fields.get("seed")
    return (
        given if isinstance(given, int) and not isinstance(given, bool) else seeds.derive(0, "environment", task.id)
    )


def reset_arguments(sandbox_type: type, task: Task, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments for the `reset` method of an environment class, selected by parameter name.

    The parameter `task` receives the task, and `seed` the result of `environment_seed`. Any other parameter receives
    the field with the same name in `fields` (by default `task.fields`), and `**kwargs` receives all remaining fields.
    """
    fields = task.fields if fields is None else fields
    arguments: dict[str, Any] = {}
    for p in _reset_parameters(sandbox_type):
        if p.name == "task":
            arguments["task"] = task
        elif p.name == "seed":
            arguments["seed"] = environment_seed(task)
        elif p.kind is p.VAR_KEYWORD:
            arguments = {**fields, **arguments}
        elif p.name in fields:
            arguments[p.name] = fields[p.name]
        elif type(p.default).__hash__ is None:  # chains must not share a mutable default
            arguments[p.name] = copy.deepcopy(p.default)
        elif p.default is p.empty and p.kind is not p.VAR_POSITIONAL:
            raise TaskError(
                f"{sandbox_type.__name__}.reset requires the field {p.name!r}, which task {task.id!r} does not have "
                f"(its fields: {', '.join(fields) or 'none'}; also available: task, seed); rename the parameter or "
                "give it a default"
            )
    return arguments
