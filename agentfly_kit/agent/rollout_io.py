"""Reading and writing of rollouts as JSONL files: a header, followed by one trajectory per line.

Only fields that differ from their defaults are written. The text of each token id is written once, in the header.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from agentfly_kit.errors import RunError
from agentfly_kit.types import Failure, Sampling, Task, ToolCall, ToolResult, Trajectory, Turn

_FORMAT = "agentfly_kit.rollout"
# Highest format version. Version 2 is written if a trajectory has several rows, and otherwise version 1.
_VERSION = 2
# Records in a file, and the fields of each that are not written or that `_trajectory_to_json` adds.
_LEFT_OUT: dict[type, tuple[str, ...]] = {
    Trajectory: ("task", "sampling"),
    Turn: ("parent", "token_texts"),
    ToolCall: ("rerunner",),
    ToolResult: (),
    Failure: ("host",),
}


def _json_fallback(value: Any) -> Any:
    """Convert records, NumPy scalars and arrays. Raise TypeError for any other type."""
    if type(value) in _LEFT_OUT:
        return _record_to_json(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got a {type(value).__name__}, which JSON cannot represent")


def dump_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_json_fallback, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates can only be written as escapes
            text = json.dumps(value, separators=(",", ":"), default=_json_fallback, allow_nan=False)
        return text
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{where} cannot be saved as JSON: {error}; use strings, numbers, lists or dicts in tasks and metrics"
        ) from error


@functools.cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind))


def _record_to_json(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults. `json.dumps` converts the records in them."""
    kind: Any = type(record)
    values = (
        (name, getattr(record, name), default) for name, default in _defaults(kind) if name not in _LEFT_OUT[kind]
    )
    # Types are compared too, because 0 == False.
    out = {name: value for name, value, default in values if type(value) is not type(default) or value != default}
    if kind is Turn:
        out = {"place" if name == "label" else name: value for name, value in out.items()}
        if record.ids is not None and record.token_texts is None:
            out["pieces"] = None  # otherwise, `read` would use the texts of the same ids in other turns
    return out


def _trajectory_to_json(t: Trajectory) -> dict[str, Any]:
    # Write all settings of `sampling`, because the defaults may change.
    return _record_to_json(t) | {"task": vars(t.task), "chain": t.chain, "seed": t.seed, "sampling": vars(t.sampling)}


def _call_from_json(data: dict[str, Any]) -> ToolCall:
    result = data.pop("result", None)
    if result is not None:
        error = result.pop("error", None)
        result = ToolResult(**result, error=Failure(**error) if error else None)
    return ToolCall(**data, result=result)


def _trajectory_from_json(data: dict[str, Any], token_texts: dict[int, str]) -> Trajectory:
    task = data.pop("task")
    error = data.pop("error", None)
    turns: list[Turn] = []
    for raw in data.pop("turns"):
        for name in ("ids", "logprobs", "entropies", "kept_mass", "versions", "messages"):
            if raw.get(name) is not None:
                raw[name] = tuple(raw[name])
        if "alternatives" in raw:
            raw["alternatives"] = tuple(tuple(map(tuple, position)) for position in raw["alternatives"])
        raw["label"] = raw.pop("place", "")
        if raw["ids"] is not None and "pieces" not in raw:
            raw["token_texts"] = tuple(token_texts.get(i, f"[{i}]") for i in raw["ids"])
        raw.pop("pieces", None)
        calls = tuple(_call_from_json(call) for call in raw.pop("tool_calls", ()))
        turns.append(Turn(**raw, tool_calls=calls, parent=turns[-1] if turns else None))
    sampling = data.pop("sampling")
    return Trajectory(
        **data | {"tools": tuple(data.get("tools", ()))},
        task=Task(task["id"], tuple(task["messages"]), task["fields"]),
        turns=tuple(turns),
        error=Failure(**error) if error else None,
        sampling=Sampling(**sampling | {"stop": tuple(sampling["stop"])}),
    )


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Any]:
    """Open a temporary text file that replaces `path` when closed. On failure, raise RunError and keep the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}); an existing file is unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write(
    path: Path, trajectories: Sequence[Trajectory], seconds: float, not_run: Mapping[str, str], forks_refused: int
) -> None:
    token_texts: dict[int, str] = {}
    for t in trajectories:
        for turn in t.turns:
            if turn.ids is not None and turn.token_texts is not None:
                token_texts.update(zip(turn.ids, turn.token_texts, strict=True))
    version = _VERSION if any(turn.row for t in trajectories for turn in t.turns) else 1
    header = {"format": _FORMAT, "version": version, "seconds": seconds, "pieces": token_texts}
    if not_run:
        header["not_run"] = dict(not_run)
    if forks_refused:
        header["forks_refused"] = forks_refused
    with atomic_write(path) as file:
        file.write(dump_json(header, "the header") + "\n")
        for t in trajectories:
            file.write(dump_json(_trajectory_to_json(t), f"trajectory {t.id!r}") + "\n")


def read(path: Path) -> tuple[list[Trajectory], float, dict[str, str], int]:
    """Return the arguments of `Rollout.from_trajectories` for a saved rollout."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    number = 1
    try:
        header = json.loads(lines[0])
        if header.get("format") != _FORMAT:
            raise RunError(f"{path} must be a file written by Rollout.save")
        if header["version"] > _VERSION:
            raise RunError(f"{path} is from a newer version ({header['version']} > {_VERSION}); upgrade agentfly_kit")
        token_texts = {int(k): v for k, v in header["pieces"].items()}
        trajectories = []
        for line in lines[1:]:
            number += 1
            if line:
                trajectories.append(_trajectory_from_json(json.loads(line), token_texts))
        return trajectories, header["seconds"], dict(header.get("not_run", {})), header.get("forks_refused", 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path}:{number} is damaged: {type(error).__name__}: {error}") from error
