"""Fingerprints that identify training runs by settings, tasks, source code and initial weights."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfly_kit import seeds
from agentfly_kit._display import shorten
from agentfly_kit.engines.base import Engine
from agentfly_kit.policy.policy import Policy
from agentfly_kit.tasks import canonical_json
from agentfly_kit.tools.inspection import class_source, code_of, function_fingerprint

if TYPE_CHECKING:
    from agentfly_kit.trainer.sampling import RolloutSampler


def describe(value: Any) -> str:
    """Serialize a value to a string that is the same in every process.

    A function is represented by a hash of its code, and any other object without a JSON form by the name of its type.
    """
    try:
        return canonical_json(value)
    except TypeError:
        pass
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{key!r}: {describe(part)}' for key, part in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    return function_fingerprint(value) if hasattr(value, "__code__") else type(value).__qualname__


def _as_json(value: Any) -> Any:
    """Convert a setting to JSON values. Functions are represented by code, fingerprint and bound arguments."""
    if isinstance(value, functools.partial):
        filled = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in sorted(value.keywords.items()))]
        return {"function": _as_json(value.func), "with": filled}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not callable(value):  # a Branch or a Budget
        return {f.name: _as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(value):
        function = value if hasattr(value, "__code__") else getattr(value, "function", type(value).__call__)
        return {"source": code_of(function), "fingerprint": function_fingerprint(function)}
    return value


def _class(cls: type) -> dict[str, str]:
    source = class_source(cls)
    return {"source": source, "fingerprint": seeds.digest(source)}


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, type(None))
    return {name: value if isinstance(value, plain) else describe(value) for name, value in values.items()}


# Settings of the agent that are always recorded. Other settings are recorded only if they differ from their defaults,
# so that earlier runs can be continued after a new setting was added to the library.
_ALWAYS = ("system", "max_turns", "max_tokens", "max_tool_calls", "max_invalid_calls", "timeout", "sampling", "seed")
_HOOKS = ("before_chain", "before_turn", "after_observation", "on_context_full", "group_reward")
# Settings of the agent that are recorded in another form, and settings that do not affect training.
_OTHER = (
    "engine", "chat", "tools", "reward", "pools", "nudge", "max_nudges", *_HOOKS,
    "name", "max_concurrent_requests", "after_chain", "watch",
)  # fmt: skip


# Settings added since version 0.2. They are included only if they are set, so that runs of 0.2 can be continued.
_ADDED = ("sum_turn_rewards", "lr_warmup")


def fingerprint(
    sampler: RolloutSampler,
    start: str,
    teacher: Policy | Engine | None = None,
    reference: Policy | None = None,
) -> dict[str, Any]:
    """Return the fingerprint of a run as a dict of JSON values. `start` is the fingerprint of the initial weights."""
    agent, config, chat = sampler.agent, sampler.config, sampler.agent.chat
    return {
        "config": {
            f.name: _as_json(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.name not in _ADDED or getattr(config, f.name) != f.default
        },
        "agent": {
            **{
                f.name: _as_json(getattr(agent, f.name))
                for f in dataclasses.fields(agent)
                if f.name[0] != "_" and f.name not in _OTHER
                if f.name in _ALWAYS or getattr(agent, f.name) != f.default
            },
            "engine": type(agent.engine).__name__,
            "chat": {
                "history": chat.history,
                "format": {"class": _class(type(chat.format)), "name": chat.format.name}
                | _options(vars(chat.format)),
                "stop": chat.token_texts(chat.stop_ids),
                "template": seeds.digest(str(chat.tokenizer.chat_template)),
                "options": _options(chat.template.options),
                **({} if chat.reader is None else {"images": chat.reader.fingerprint}),
            },
            "hooks": {name: _as_json(getattr(agent, name)) for name in _HOOKS},
            **({} if agent.nudge is None else {"nudge": [agent.nudge, agent.max_nudges]}),
        },
        "tools": {
            t.name: {"source": t.written or code_of(t.function), "fingerprint": t.fingerprint} for t in agent.tools
        },
        "reward": {r.name: {"source": code_of(r.function), "fingerprint": r.fingerprint} for r in agent.reward},
        # Sizes and time limits of pools are omitted, because waiting longer does not change a chain.
        "pools": {
            f"{i} {pool.sandbox_type.__name__}": {
                "class": _class(pool.sandbox_type),
                "options": _options(getattr(pool, "options", {})),
            }
            for i, pool in enumerate(agent.pools)
        },
        "tasks": {"count": len(sampler.tasks), "digest": sampler.tasks_digest},
        "policy": start,
        **(
            {}
            if teacher is None
            else {
                "teacher": teacher.fingerprint()
                if isinstance(teacher, Policy)
                else str(getattr(teacher, "name", getattr(teacher, "model", "")))
            }
        ),
        **({} if reference is None else {"reference": reference.fingerprint()}),
    }


# Settings that change neither the chains nor the updates, so that a run continues with other values.
_OPERATIONAL = ("max_concurrency", "evaluate_every", "checkpoint_every", "keep", "save_rollouts")
# Settings that may change when iterations are added to a complete run.
_EXTENDABLE = ("steps", "lr", "lr_end")


def identity(fingerprint: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the part of a fingerprint that must be equal to continue a run, except config settings in `without`."""
    left_out = {*_OPERATIONAL, *without}
    config = {name: value for name, value in fingerprint.get("config", {}).items() if name not in left_out}
    return {**fingerprint, "config": config}


def adds_iterations(known: Mapping[str, Any], wanted: Mapping[str, Any], done: int) -> bool:
    """Return True if `wanted` differs from a run with `done` recorded steps only by more iterations and their lr."""
    same = identity(known, without=_EXTENDABLE) == identity(wanted, without=_EXTENDABLE)
    return same and wanted["config"]["steps"] > known["config"]["steps"] == done


def without_code(fingerprint: Any) -> Any:
    """Return a fingerprint without the code of functions and classes, because version 0.2 also hashed comments."""
    if isinstance(fingerprint, list):
        return [without_code(item) for item in fingerprint]
    if isinstance(fingerprint, dict):
        return {
            name: without_code(value) for name, value in fingerprint.items() if name not in ("source", "fingerprint")
        }
    return fingerprint


def differences(known: Any, wanted: Any, path: str = "") -> list[str]:
    """Describe each setting that differs between two fingerprints, with both values."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        out = []
        for key in sorted({*known, *wanted}):
            where = f"{path}.{key}" if path else key
            if key == "fingerprint" and known.get("source") != wanted.get("source"):
                continue  # shown by the difference in the source
            if key not in known:
                out.append(f"  {where}: not in the folder's run, now {_shortened(wanted[key])}")
            elif key not in wanted:
                out.append(f"  {where}: was {_shortened(known[key])}, now missing")
            elif known[key] != wanted[key]:
                out.extend(differences(known[key], wanted[key], where))
        return out
    if isinstance(known, str) and isinstance(wanted, str) and ("\n" in known or "\n" in wanted):
        changed = [
            f"    {line}"
            for line in difflib.unified_diff(known.splitlines(), wanted.splitlines(), "then", "now", lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        return [f"  {path} changed:", *changed[:20]]
    return [f"  {path}: was {_shortened(known)}, now {_shortened(wanted)}"]


def _shortened(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False), 80)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten the settings of a fingerprint to a dict with keys such as "lr" and "agent.seed"."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        name = key if prefix in ("", "config.") else prefix + key
        if isinstance(value, Mapping) and "fingerprint" in value:
            out[name] = value["fingerprint"][:8]
        elif isinstance(value, Mapping) and value:
            out |= flat_settings(value, f"{name}.")
        else:
            out[name] = json.dumps(value) if isinstance(value, list | dict) else value
    return out
