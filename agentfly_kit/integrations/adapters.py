"""Adapters for rewards written for TRL or the verifiers library (`reward`) and for TRL environments (`environment`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from agentfly_kit.engines.chat_messages import wire_parts
from agentfly_kit.errors import RewardError, SettingsError, TaskError
from agentfly_kit.rewards import Reward
from agentfly_kit.tools.calling import call_user_function
from agentfly_kit.tools.injection import FromPool
from agentfly_kit.tools.tool import tool
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message, Task, ToolResult, is_image

# Arguments that TRL's GRPOTrainer passes to rewards besides dataset columns. Each is a list with one item per chain.
_BATCH = ("prompts", "completions", "completion_ids", "environments")
# Arguments that the verifiers library passes to a reward function. `answer` and `info` are task fields.
_SINGLE = ("prompt", "completion", "answer", "info", "state", "task")


def reward(
    function: Callable[..., Any], *, weight: float = 1.0, name: str | None = None, environment: type | None = None
) -> Reward[..., Any]:
    """Convert a sync or async reward function written for TRL or the verifiers library to a reward of an agent.

    A TRL function has some of the parameters `prompts`, `completions` and task fields. It is called with lists of
    length 1 and returns a list with one number. Prompts and completions are lists of messages. If the function returns
    None, the chain is unscored, whereas TRL skips this reward.

    A verifiers function (before version 0.4) has some of the parameters `prompt`, `completion`, `answer`, `info`,
    `state`, `task` and task fields. It returns a number. `prompt` and `completion` are lists of messages. `answer` and
    `info` are task fields, by default "" and {}. `task` is the task field of that name, or the task's id. `state` is a
    dict with all these values.

    Args:
        function: the reward function.
        weight: weight of the reward in the sum of all rewards.
        name: name of the metric; by default the name of the function.
        environment: class returned by `environment`. Its instance is passed in the list `environments`.

    Raises:
        RewardError: if the function has neither signature, or requires an unsupported argument.
    """
    shown = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or isinstance(function, Reward):
        raise RewardError(f"function must be a reward function for TRL or the verifiers library, got {function!r}")
    parameters = inspect.signature(function).parameters
    if positional := [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise RewardError(f"{shown}: parameters must accept keyword arguments, got {', '.join(positional)}")
    if "trace" in parameters:
        raise RewardError(
            f"{shown} must be a reward of verifiers before 0.4, got one with a parameter `trace`; docs/migration.md "
            "describes how to call it"
        )
    batched = any(known in parameters for known in _BATCH)
    if not batched and not {"completion", "state"} & {*parameters}:
        raise RewardError(
            f"{shown} must have a parameter `completions` (TRL), or `completion` or `state` (verifiers), got "
            f"({', '.join(parameters)}); pass a reward of this package to Agent directly"
        )
    if "environments" in parameters and environment is None:
        raise RewardError(f"{shown} has a parameter `environments`; pass the class too: reward(f, environment=...)")
    given = (*_BATCH, "trainer_state", "log_extra", "log_metric") if batched else _SINGLE
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fields = [p for p in parameters.values() if p.name not in given and p.kind is not p.VAR_KEYWORD]

    def scored(trajectory: Trajectory, sandbox: Any = None, **_: Any) -> Any:
        prompt, completion = _split(trajectory, trl=batched)
        values = dict(trajectory.task.fields)
        if batched:
            ids = [int(i) for row in trajectory.rows for i in row.ids] if trajectory.rows[0].exact else []
            items = {"prompts": prompt, "completions": completion, "environments": sandbox}
            items["completion_ids"] = ids[len(trajectory.turns[0].ids or ()) :]
            extra = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
            values = {key: [value] for key, value in (values | items).items()} | extra
        else:
            own = {"prompt": prompt, "completion": completion, "answer": values.get("answer", "")}
            own |= {"info": values.get("info", {}), "task": values.get("task", trajectory.task.id)}
            values |= own | {"state": {**values, **own, "trajectory": trajectory}}
        value = function(**{key: part for key, part in values.items() if takes_all or key in parameters})
        return _awaited(value, batched, shown) if inspect.isawaitable(value) else _one(value, batched, shown)

    # Give `scored` a signature with the trajectory, the environment, and the task fields that the function requires.
    def parameter(name: str) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)

    signed: Any = scored
    names = ["trajectory", *(["sandbox"] if environment is not None else [])]
    names += [p.name for p in fields if p.default is p.empty]
    signed.__signature__ = inspect.Signature([parameter(name) for name in names])
    from_pool: Any = FromPool
    signed.__annotations__ = {} if environment is None else {"sandbox": from_pool[environment]}
    signed.__wrapped__ = function  # fingerprint the source of the given function
    signed.__name__ = signed.__qualname__ = shown
    return Reward(scored, weight=weight, name=name)


def _split(trajectory: Trajectory, *, trl: bool) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prompt, and all later messages, whose images are parts as in TRL or verifiers."""

    def part(given: Any) -> dict[str, Any]:
        return {"type": "image", "image": given.to_pil()} if trl and is_image(given) else wire_parts([given])[0]

    messages = [
        {
            key: [*map(part, value)] if key == "content" and isinstance(value, tuple) else value
            for key, value in m.items()
        }
        for m in trajectory.messages
    ]
    start = len(trajectory.turns[0].messages)
    return messages[:start], messages[start:]


def _one(value: Any, batched: bool, name: str) -> Any:
    if not batched or value is None:
        return value
    values = list(value) if isinstance(value, Iterable) else []
    if len(values) != 1:
        raise RewardError(f"{name} must return a list with one number per completion, got {value!r:.200}")
    return values[0]


async def _awaited(value: Any, batched: bool, name: str) -> Any:
    return _one(await value, batched, name)


def _ignore(*args: Any, **options: Any) -> None:
    """Do nothing. This replaces the functions `log_extra` and `log_metric` of TRL."""


def environment(environment_class: type) -> type:
    """Convert an environment class written for TRL's `environment_factory` to a class for `af.envs.agent`.

    All public methods except `reset` and `get_reward` become tools. As in TRL, an observation is `str` of the returned
    value, or of {"error": ...} after an exception. `reset` is called with the task fields, and with the task's messages
    as `prompt`. The result of `reset` is added as a message after the prompt, whereas TRL appends it to the last
    message. If `get_reward` is defined, its result is the reward. The chain ends when the attribute `done`, if present,
    is true.

    Args:
        environment_class: the class. Constructor arguments are set with `af.envs.agent(..., options={...})`.

    Returns:
        A subclass of `environment_class`.

    Raises:
        SettingsError: if the class has no `reset`.
        ToolSchemaError: if a parameter of a method has no type or description.
    """
    if not isinstance(environment_class, type):
        raise SettingsError(
            f"environment_class must be a class, got {environment_class!r}; its arguments are "
            "af.envs.agent(..., options={...})"
        )
    name = environment_class.__name__
    methods = dict(inspect.getmembers(environment_class, inspect.isfunction))
    if "reset" not in methods:
        raise SettingsError(f"{name} must have a method `reset`, got {', '.join(methods)}")
    shown = {n: method for n, method in methods.items() if n not in ("reset", "get_reward") and n[0] != "_"}
    parameters = list(inspect.signature(methods["reset"]).parameters.values())[1:]

    def arguments(task: Task) -> dict[str, Any]:
        given = {"prompt": [dict(message) for message in task.messages], **task.fields}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return given
        for p in parameters:
            if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in given:
                have = ", ".join(task.fields) or "none"
                raise TaskError(
                    f"{name}.reset requires the field {p.name!r}, which {task.id!r} lacks (it has: {have})"
                )
        return {p.name: given[p.name] for p in parameters if p.name in given}

    def reset(self: Any, task: Task) -> Any:
        return methods["reset"](self, **arguments(task))

    def check_task(self: Any, task: Task) -> None:
        arguments(task)

    members: dict[str, Any] = {n: tool(name=n)(_as_observation(method)) for n, method in shown.items()}
    members |= {"reset": reset, "check_task": check_task, "__doc__": environment_class.__doc__}
    reset.__wrapped__ = methods["reset"]  # type: ignore[attr-defined]  # fingerprint the source of the class
    reset.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "task")]
    )
    members["__module__"], members["__qualname__"] = environment_class.__module__, environment_class.__qualname__
    return type(name, (environment_class,), members)


def _as_observation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it returns the same observation text as in TRL."""

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> ToolResult:
        outcome = await call_user_function(functools.partial(method, *args), options)
        if isinstance(outcome.error, Exception):
            return ToolResult(False, str({"error": str(outcome.error)}))
        if outcome.error is not None:
            raise outcome.error
        return ToolResult(True, str(outcome.value))

    return call
