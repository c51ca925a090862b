"""Adapters to and from Gymnasium environments. Requires `pip install gymnasium`."""

from __future__ import annotations

import asyncio
import inspect
import json
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from agentfly_kit.envs import base
from agentfly_kit.errors import RewardError, SettingsError
from agentfly_kit.pool.pool import Pool
from agentfly_kit.tools.context import Context, SingleSandboxPool
from agentfly_kit.tools.tool import ToolSet, tool
from agentfly_kit.types import Task, ToolCall, ToolResult


def _module() -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise SettingsError('gymnasium is not installed; type: pip install "agentfly_kit[envs]"') from error
    return gymnasium


def from_gymnasium(
    make: str | Callable[[], Any],
    *,
    actions: dict[str, Any],
    show: Callable[[Any], str] = str,
    name: str = "act",
    **options: Any,
) -> type:
    """Wrap a Gymnasium environment as an environment class with one tool, `act(action)`.

    Each step's reward is a turn reward, and the chain's reward is their sum. The episode is reset with the task's seed
    and its field `options`. The environment cannot be forked.

    Args:
        make: a Gymnasium id such as "FrozenLake-v1", created with `options`, or a function that returns a new
            environment.
        actions: maps each string that the model may write to a Gymnasium action.
        show: converts an observation to the text that the model reads.
        name: name of the tool.
        **options: keyword arguments of `gymnasium.make`.

    Raises:  SettingsError if gymnasium is not installed or `actions` is empty.
    """
    gymnasium = _module()
    if not actions:
        raise SettingsError("actions must map at least one string to an action, got {}; pass actions={'left': 0, ...}")
    choices = ", ".join(map(repr, actions))
    build = make if callable(make) else lambda: gymnasium.make(make, **options)

    class Wrapped:
        def __init__(self) -> None:
            self.env = build()
            self.done = False
            self.total = 0.0
            self.terminated = self.truncated = False
            self.observation: Any = None

        def reset(self, task: Task, seed: int) -> str:
            self.observation, _ = self.env.reset(seed=seed % 2**31, options=task.fields.get("options"))
            self.done = self.terminated = self.truncated = False
            self.total = 0.0
            return show(self.observation)

        @tool(name=name)
        def act(self, action: str) -> ToolResult:
            """Take one step.

            Args:
                action: what to do.
            """
            if action not in actions:
                return ToolResult(False, f"there is no action {action!r}; there is {choices}")
            self.observation, gain, self.terminated, self.truncated, _ = self.env.step(actions[action])
            self.total += float(gain)
            self.done = self.terminated or self.truncated
            return ToolResult(True, show(self.observation), reward=float(gain))

        def reward(self) -> dict[str, float]:
            # Step rewards are already counted as turn rewards.
            return {"reward": 0.0, "total": self.total, "success": float(self.total > 0)}

        def close(self) -> None:
            self.env.close()

    label = make if isinstance(make, str) else getattr(make, "__name__", "Gymnasium")
    Wrapped.__name__ = Wrapped.__qualname__ = label.replace("-", "_")
    return Wrapped


def to_gymnasium(sandbox_type: type, task: Task) -> Any:
    """Wrap an environment class and one task as a `gymnasium.Env` with text actions and text observations.

    An action is a string: either a tool call as JSON, {"name": ..., "arguments": {...}}, or an answer, which ends the
    episode. The observation is the tool's output. Rewards are the tools' turn rewards plus, at the end, the
    environment's own reward. Methods and reward may be sync or coroutine functions.

    Raises:  SettingsError if gymnasium is not installed or the class is not an environment.
    """
    gymnasium = _module()
    base.check(sandbox_type)
    tools = ToolSet(base.tools(sandbox_type))
    reward = base.reward(sandbox_type)
    wanted = {*tools.sandbox_types, *(() if reward is None else reward.sandbox_types)} - {sandbox_type}

    class Env(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space = gymnasium.spaces.Text(4096, charset=string.printable)
        observation_space = gymnasium.spaces.Text(65536, min_length=0, charset=string.printable)

        def __init__(self) -> None:
            self.environment = sandbox_type()
            self.pools: list[Pool[Any]] = [Pool(kind, size=1) for kind in wanted]
            self.context: Context | None = None
            self.loop = _Loop()

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            begun = task if seed is None else replace(task, fields=task.fields | {"seed": seed})
            self._release()
            self.context = Context(begun, pools=[SingleSandboxPool(sandbox_type, self.environment), *self.pools])
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
            if callable(close := getattr(self.environment, "close", None)):
                closed = close()
                if inspect.isawaitable(closed):
                    self.loop.wait(closed)

    return Env()


def _call(action: str) -> ToolCall | None:
    try:
        read = json.loads(action)
        return ToolCall("call-0", str(read["name"]), dict(read.get("arguments") or {}))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class _Loop:
    """Event loop on a separate thread. Gymnasium is synchronous, and a notebook's main thread already runs a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def wait(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._loop.run_until_complete, awaited()).result()

    def __del__(self) -> None:
        self._loop.close()
