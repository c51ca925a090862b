"""Adapters between environment classes and the environments of Gymnasium, TextArena and OpenEnv."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import string
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from agentfly_kit._async.threads import Worker
from agentfly_kit.envs import base
from agentfly_kit.errors import RewardError, SandboxError, SettingsError
from agentfly_kit.pool import calls
from agentfly_kit.pool.pool import Pool
from agentfly_kit.tools.context import Context
from agentfly_kit.tools.tool import ToolSet, tool
from agentfly_kit.types import Task, ToolCall, ToolResult


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
    reward of each step is a turn reward, and the metric `total` is the sum of these rewards. To train with
    an estimator of outcomes such as "grpo", set `TrainConfig(sum_turn_rewards=True)`. By default, a chain with a
    positive sum succeeds; `af.envs.agent(..., success=)` sets another rule. The environment cannot be forked.

    Args:
        make: a class or function without arguments that returns a new environment.
        action: function that converts the text written by the model to an action, or a mapping from texts to actions
            such as {"left": 0, "down": 1}. If the function raises ValueError, its message is shown to the model.
        show: function that converts an observation to the text shown to the model.
        name: name of the tool.

    Raises:  SettingsError if `make` is a class without `reset` or `step`, or `action` is empty. If `make` is a
        function, the environment that it returns is checked when it is created. If a step returns anything else, such
        as the rewards of several environments or agents, the chain ends with a SandboxError and is not scored.
    """
    if not callable(make):
        raise SettingsError(f"make must be a class or a function that returns an environment, got {make!r}")
    if isinstance(make, type):
        _require_methods(make, make.__name__)
    if isinstance(action, Mapping) and not action:
        raise SettingsError("action must map at least one text to an action, got {}")

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
                return ToolResult(False, f"there is no action {action!r}; there is {', '.join(map(repr, actions))}")
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
            # The last of several values is `info`. `reset` of Gym before 0.26 returns only an observation.
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
                # The model is not to blame, so the chain must not be scored.
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


def to_gymnasium(sandbox_type: type, task: Task) -> Any:
    """Wrap an environment class and one task as a `gymnasium.Env` with text actions and text observations.

    An action is a string: either a tool call as JSON, {"name": ..., "arguments": {...}}, or an answer, which ends the
    episode. The observation is the tool's output. Rewards are the tools' turn rewards plus, at the end, the
    environment's own reward. Methods and reward may be sync or coroutine functions.

    Raises:  SettingsError if gymnasium is not installed or the class is not an environment.
    """
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise SettingsError('gymnasium is not installed; type: pip install "agentfly_kit[envs]"') from error
    base.check(sandbox_type)
    tools = ToolSet(base.tools(sandbox_type))
    reward = base.reward(sandbox_type)
    wanted = {*tools.sandbox_types, *(() if reward is None else reward.sandbox_types)} - {sandbox_type}

    class Env(gymnasium.Env):  # type: ignore[misc, name-defined, unused-ignore]
        action_space = gymnasium.spaces.Text(4096, charset=string.printable)
        observation_space = gymnasium.spaces.Text(65536, min_length=0, charset=string.printable)

        def __init__(self) -> None:
            self.loop = _Loop()
            self._create()
            self.pools: list[Pool[Any]] = [Pool(kind, size=1) for kind in wanted]
            self.context: Context | None = None

        def _create(self) -> None:
            self.worker = Worker()
            self.environment = self.loop.wait(calls.create(self.worker, sandbox_type, sandbox_type))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            begun = task if seed is None else replace(task, fields=task.fields | {"seed": seed})
            self._release()
            if self.worker.discarded:  # a call that was given up may still change the environment
                calls.end(SimpleNamespace(worker=self.worker, sandbox=self.environment))
                self._create()
            own: Any = _SingleSandboxPool(sandbox_type, self.environment, self.worker)
            self.context = Context(begun, pools=[own, *self.pools])
            self.loop.wait(self.context.sandbox(sandbox_type))
            opening = self.context.reset_results.get(sandbox_type)
            text = opening if isinstance(opening, str) else "\n".join(str(m["content"]) for m in opening or ())
            asked = "\n".join(str(m["content"]) for m in task.messages)
            return "\n\n".join(part for part in (asked, text) if part), {"task": task.id}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if self.context is None:
                raise SettingsError("call reset() before step()")
            call = _call(action)
            if call is None:
                return "", self._score(action), True, False, {"final": action}
            result = self.loop.wait(tools.call(call, self.context))
            gain = result.reward or 0.0
            over = bool(result.env_done or result.done)
            if over:
                gain += self._score(None)
            return result.observation, gain, over, False, {"ok": result.ok}

        def _score(self, final: str | None) -> float:
            if reward is None:
                return 0.0
            assert self.context is not None
            ended: Any = SimpleNamespace(task=self.context.task, final=final, turns=())
            score = self.loop.wait(reward.score(ended, self.context))
            if score.reward is None:
                raise RewardError(f"the episode could not be scored: {score.error}")
            return float(score.reward)

        def _release(self) -> None:
            if self.context is not None:
                self.loop.wait(self.context.close())

        def close(self) -> None:
            self._release()
            for pool in self.pools:
                self.loop.wait(pool.close())
            if self.worker.busy:
                calls.end(SimpleNamespace(worker=self.worker, sandbox=self.environment))
            else:
                self.loop.wait(calls.call(self.worker, getattr(self.environment, "close", None)))

    return Env()


def _call(action: str) -> ToolCall | None:
    try:
        read = json.loads(action)
        return ToolCall("call-0", str(read["name"]), dict(read.get("arguments") or {}))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class _Loop:
    """Event loop on a separate thread, for synchronous callers whose own thread runs a loop, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def wait(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._loop.run_until_complete, awaited()).result()

    def __del__(self) -> None:
        self._loop.close()


class _SingleSandboxPool:
    """Pool that leases an existing sandbox any number of times. The caller must close the sandbox."""

    revoked = ""

    def __init__(self, sandbox_type: type, sandbox: Any, worker: Worker) -> None:
        self.sandbox_type = sandbox_type
        self.sandbox = sandbox
        self.worker = worker
        self.turn: object = None

    async def acquire(self, owner: str, *, run: str, queue: bool = True) -> _SingleSandboxPool:
        return self

    async def release(self, lease: Any, *, reusable: bool = True) -> None: ...
