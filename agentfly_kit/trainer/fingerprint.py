"""Fingerprints that identify training runs by settings, tasks, source code, and initial weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfly_kit import seeds
from agentfly_kit.engines.base import Engine
from agentfly_kit.policy.policy import Policy
from agentfly_kit.tasks import canonical_json
from agentfly_kit.tools import function as functions

if TYPE_CHECKING:
    from agentfly_kit.trainer.rollouts import RolloutSampler


def describe(value: Any) -> str:
    """Serialize a value to text that is the same in every process.

    A function is represented by its source code, and any other object without a JSON form by the name of its type.
    """
    try:
        return canonical_json(value)
    except TypeError:
        pass
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key!r}: {describe(part)}' for key, part in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    return functions.fingerprint(value) if hasattr(value, "__code__") else type(value).__qualname__


def _as_json(value: Any) -> Any:
    """Convert a setting to JSON values. A function becomes its source code, its fingerprint and any bound arguments."""
    if isinstance(value, functools.partial):
        filled = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in sorted(value.keywords.items()))]
        return {"function": _as_json(value.func), "with": filled}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not callable(value):  # a Branch or a Budget
        return {f.name: _as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(value):
        function = value if hasattr(value, "__code__") else getattr(value, "function", type(value).__call__)
        return {"source": functions.source_of(function), "fingerprint": functions.fingerprint(function)}
    return value


def _class(cls: type) -> dict[str, str]:
    source = functions.class_source(cls)
    return {"source": source, "fingerprint": seeds.digest(source)}


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, type(None))
    return {name: value if isinstance(value, plain) else describe(value) for name, value in values.items()}


# Hooks that are part of a fingerprint. `after_chain` and `watch` are omitted, because they do not affect training.
_HOOKS = ("before_chain", "before_turn", "after_observation", "on_context_full", "group_reward")


# Settings that 0.2 lacked. They are recorded only if they are set, so that runs of 0.2 can be continued.
_ADDED = ("sum_turn_rewards",)


def fingerprint(sampler: RolloutSampler, start: str, teacher: Policy | Engine | None = None) -> dict[str, Any]:
    """Return the fingerprint of a run as a dict of JSON values. `start` is the fingerprint of the initial weights."""
    agent, config, chat = sampler.agent, sampler.config, sampler.agent.chat
    return {
        "config": {
            f.name: _as_json(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.name not in _ADDED or getattr(config, f.name) != f.default
        },
        "agent": {
            "system": agent.system,
            "max_turns": agent.max_turns,
            "max_tokens": agent.max_tokens,
            "max_tool_calls": agent.max_tool_calls,
            "max_invalid_calls": agent.max_invalid_calls,
            "timeout": agent.timeout,
            "sampling": dataclasses.asdict(agent.sampling),
            "seed": agent.seed,
            "engine": type(agent.engine).__name__,
            "chat": {
                "history": chat.history,
                "format": {"class": _class(type(chat.format)), "name": chat.format.name} | _options(vars(chat.format)),
                "stop": chat.token_texts(chat.stop_ids),
                "template": seeds.digest(str(chat.tokenizer.chat_template)),
                "options": _options(chat.template.options),
            },
            "hooks": {name: _as_json(getattr(agent, name)) for name in _HOOKS},
            **({} if agent.success is None else {"success": _as_json(agent.success)}),
            **({} if agent.nudge is None else {"nudge": [agent.nudge, agent.max_nudges]}),
            **({"show_exceptions": True} if agent.show_exceptions else {}),
            **({} if agent.harness is None else {"harness": _as_json(agent.harness.function)}),
        },
        "tools": {t.name: {"source": t.source, "fingerprint": t.fingerprint} for t in agent.tools},
        "reward": {r.name: {"source": r.source, "fingerprint": r.fingerprint} for r in agent.reward},
        # Sizes and time limits of the pools are omitted, because chains that wait longer are the same chains.
        "pools": {
            f"{i} {pool.sandbox_type.__name__}": {
                "class": _class(pool.sandbox_type),
                "options": _options(getattr(pool, "options", {})),
            }
            for i, pool in enumerate(agent.pools)
        },
        "tasks": {"count": len(sampler.tasks), "digest": sampler.tasks_digest},
        "policy": start,
        **({} if teacher is None else {"teacher": _teacher(teacher)}),
    }


def _teacher(teacher: Policy | Engine) -> str:
    if isinstance(teacher, Policy):
        return teacher.fingerprint()
    return str(getattr(teacher, "name", getattr(teacher, "model", "")))
