"""`from_env`: adapter for the environments of Gymnasium, TextArena and OpenEnv."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from agentfly_kit.errors import SandboxError, SettingsError, check_instance
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Task, ToolResult


def from_env(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any] | Mapping[str, Any] = str,
    show: Callable[[Any], str] = str,
    name: str = "act",
) -> type:
    """Convert an environment of another library to an environment class with one tool, `act(action)`.

    One of three protocols is detected from what `reset` and `step` return. Both methods may be sync or async.

    - Gymnasium: `reset` returns (observation, info), `step` returns (observation, reward, terminated, truncated, info).
      In Gym before 0.26, `reset` returns an observation and `step` (observation, reward, done, info).
    - TextArena with one player: `get_observation()` returns (player, text), `step` returns (done, info), and `close()`
      returns the rewards. If a text starts with the previous text, only the new part is shown to the model.
    - OpenEnv: `reset` and `step` return an object with `observation`, `reward` and `done`.

    `seed` (the task's seed), `options` (a task field) and `num_players=1` are passed to `reset` if it accepts them. The
    reward of each step is a turn reward, and the metric `total` is the sum of these rewards. To train with an
    outcome-based estimator such as "grpo", set `TrainConfig(sum_turn_rewards=True)`. By default, a chain succeeds if
    this sum is positive; `af.envs.agent(..., success=)` sets another rule. The environment cannot be forked.

    Args:
        make: a class or function without arguments that returns a new environment.
        action: function that converts the text written by the model to an action, or a mapping from texts to actions
            such as {"left": 0, "down": 1}. If the function raises ValueError, its message is shown to the model.
        show: function that converts an observation to the text shown to the model.
        name: name of the tool.

    Raises:  SettingsError if `make` is a class without `reset` or `step`. If `make` is a
        function, the environment that it returns is checked when it is created. If a step returns anything else, such
        as the rewards of several environments or agents, the chain ends with a SandboxError and is not scored.
    """
    check_instance("make", make, Callable, "a class or a function that returns an environment")
    if isinstance(make, type):
        _require_methods(make, make.__name__)

    class Wrapped:
        def __init__(self) -> None:
            self.env = make()
            _require_methods(self.env, type(self.env).__name__)
            self.done = False
            self.total = 0.0
            self.observation: Any = None
            self._seen = ""

        def reset(self, task: Task, seed: int) -> Any:
            self.done, self.total, self._seen = False, 0.0, ""
            given = {"seed": seed % 2**31, "options": task.fields.get("options"), "num_players": 1}
            parameters = inspect.signature(self.env.reset).parameters
            accepted = {*parameters} | (
                {"seed"} if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set()
            )
            return _then(self.env.reset(**{n: v for n, v in given.items() if n in accepted}), self._text)

        @tool(name=name)
        def act(self, action: str) -> Any:
            """Take one step in the environment.

            Args:
                action: the action to take.
            """
            if isinstance(actions, Mapping) and action not in actions:
                return ToolResult(
                    False, f"unknown action {action!r}; the actions are {', '.join(map(repr, actions))}"
                )
            try:
                converted = actions[action] if isinstance(actions, Mapping) else actions(action)
            except ValueError as error:
                return ToolResult(False, str(error))
            return _then(self.env.step(converted), self._stepped)

        def _text(self, result: Any) -> str:
            """Extract the observation from the result of `reset` or `step`, and convert it to text."""
            if callable(look := getattr(self.env, "get_observation", None)):
                self.observation = look()[1]
                text = show(self.observation)
                seen, self._seen = self._seen, text
                return text.removeprefix(seen).lstrip("\n") if seen else text
            # The last value of a tuple is `info`. `reset` of Gym before 0.26 returns only an observation.
            pair = isinstance(result, tuple) and len(result) > 1 and isinstance(result[-1], Mapping | None)
            self.observation = result[0] if pair else getattr(result, "observation", result)
            return show(self.observation)

        def _stepped(self, result: Any) -> ToolResult:
            plays = hasattr(self.env, "get_observation")
            values: Any = None
            if hasattr(result, "observation"):
                values = getattr(result, "reward", {}), getattr(result, "done", {})
            elif isinstance(result, tuple) and plays and len(result) == 2:
                values = 0.0, result[0]
            elif isinstance(result, tuple) and len(result) in (4, 5) and isinstance(result[-1], Mapping | None):
                values = result[1:-1]
            try:
                gain, *ends = map(_number, values)
            except (TypeError, ValueError):
                # This is not an error of the model, so the chain must not be scored.
                raise SandboxError(
                    f"{type(self.env).__name__}.step must return a result as in Gymnasium, TextArena or OpenEnv, with "
                    f"one finite reward, got {result!r:.80}"
                ) from None
            self.done = any(ends)
            text = self._text(result)
            if self.done and plays:
                rewards = self.env.close()
                gain = float(((rewards[0] if isinstance(rewards, tuple) else rewards) or {}).get(0, 0.0))
            self.total += gain
            return ToolResult(True, text, reward=gain)

        def reward(self) -> dict[str, float]:
            # The step rewards already count as turn rewards, so the final reward is 0.
            return {"reward": 0.0, "total": self.total, "success": float(self.total > 0)}

        def close(self) -> Any:
            close = getattr(self.env, "close", None)
            return close() if callable(close) and not hasattr(self.env, "get_observation") else None

    actions = action  # `action` is also the name of the tool's parameter
    Wrapped.__name__ = Wrapped.__qualname__ = getattr(make, "__name__", "Environment").strip("<>")
    # The source of these objects identifies the class in the fingerprint of a run.
    Wrapped._wraps = (make, show, tuple(action.items()) if isinstance(action, Mapping) else action)  # type: ignore[attr-defined]
    return Wrapped


def _require_methods(environment: Any, name: str) -> None:
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise SettingsError(
                f"{name} must have a method {method}, as environments of Gymnasium, TextArena and OpenEnv do"
            )


def _number(value: Any) -> float:
    """Convert a reward or flag to a number. Raise TypeError or ValueError for NaN, arrays and collections."""
    if getattr(value, "shape", ()) or not math.isfinite(number := float(0.0 if value is None else value)):
        raise ValueError
    return number


def _then(value: Any, finish: Callable[[Any], Any]) -> Any:
    """Return `finish(value)`, or, if `value` is awaitable, a coroutine that awaits it and then calls `finish`."""
    if not inspect.isawaitable(value):
        return finish(value)

    async def awaited() -> Any:
        return finish(await value)

    return awaited()
