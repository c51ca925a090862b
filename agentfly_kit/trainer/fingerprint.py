"""Fingerprints of training runs: settings, tasks, source code of tools and rewards, and starting weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.budget import Budget
from agentfly_kit.tools import function as functions
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.types import Task


def _as_json(value: Any) -> Any:
    """Convert a setting to JSON.

    A function is represented by its source and a fingerprint that includes its closure, a partial function also by its
    bound arguments.
    """
    if isinstance(value, functools.partial):
        filled = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in sorted(value.keywords.items()))]
        return {"function": _as_json(value.func), "with": filled}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, Budget):
        return dataclasses.asdict(value)
    if callable(value):
        function = value if hasattr(value, "__code__") else getattr(value, "function", type(value).__call__)
        source = functions.source_of(function)
        return {"source": source, "fingerprint": functions.fingerprint(function, source)}
    return value


# after_chain is not included, because it only observes.
_HOOKS = ("before_chain", "before_turn", "after_observation", "on_context_full", "group_reward")


def fingerprint(agent: Agent, tasks: Sequence[Task], config: TrainConfig, start: str) -> dict[str, Any]:
    """Compute the fingerprint of a training run. A run continues only if its fingerprint is unchanged.

    Args:
        agent: The agent: its settings, hooks, tools and rewards.
        tasks: Training tasks.
        config: Settings of the run.
        start: Fingerprint of the starting weights.

    Returns:
        The fingerprint as a JSON-serializable dict.
    """
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks:
        digest.update(repr((task.id, task.messages, sorted(task.fields.items(), key=lambda item: item[0]))).encode())
    hooks = {name: _as_json(hook) for name in _HOOKS if (hook := getattr(agent, name)) is not None}
    return {
        "config": {
            f.name: _as_json(value)
            for f in dataclasses.fields(config)
            # Leave out unset limits, to match runs recorded before these settings existed.
            if (value := getattr(config, f.name)) is not None or f.name not in ("budget", "group_budget", "max_lag")
        },
        "agent": {
            "system": agent.system,
            "max_turns": agent.max_turns,
            "max_tokens": agent.max_tokens,
            **({} if agent.max_tool_calls is None else {"max_tool_calls": agent.max_tool_calls}),
            "max_invalid_calls": agent.max_invalid_calls,
            "timeout": agent.timeout,
            "sampling": dataclasses.asdict(agent.sampling),
            "seed": agent.seed,
            "engine": type(agent.engine).__name__,
            **({} if agent.chat.history == "exact" else {"history": agent.chat.history}),
            **({"hooks": hooks} if hooks else {}),
            **({} if agent.success is None else {"success": _as_json(agent.success)}),
        },
        "tools": {t.name: {"source": t.source, "fingerprint": t.fingerprint} for t in agent.tools},
        "reward": {r.name: {"source": r.source, "fingerprint": r.fingerprint} for r in agent.reward},
        "tasks": {"count": len(tasks), "digest": digest.hexdigest()},
        "policy": start,
    }
