"""Read and write rollouts as JSONL files, which consist of a header and one trajectory per line.

Only fields that differ from their defaults are written. The text of each token id is written once, in the header, and
each image once, in the folder `rollout_images` beside the file.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from agentfly_kit.errors import RunError
from agentfly_kit.samples import Sampling
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Failure, ImageSpan, Task, ToolCall, ToolResult, Turn

_FORMAT = "agentfly_kit.rollout"
# Highest format version. Version 4 is written if there are images, version 3 if tasks contain other values that JSON
# cannot represent, version 2 if a trajectory has several rows, and otherwise version 1.
_VERSION = 4
_IMAGES = "rollout_images"
# Key of the type name in a JSON object for a value that JSON cannot represent; the object's other key is "value".
_TYPE = "$type"
# Functions that convert a value to JSON and back, keyed by the name of its type.
_CODECS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (list, tuple),
    "set": (lambda values: sorted(values, key=repr), set),
    "frozenset": (lambda values: sorted(values, key=repr), frozenset),
    "dict": (lambda values: list(map(list, values.items())), dict),  # dicts with keys that are not strings
    "float": (str, float),  # NaN and infinities
    "bytes": (bytes.hex, bytes.fromhex),
    "date": (str, datetime.date.fromisoformat),
    "datetime": (str, datetime.datetime.fromisoformat),
    "time": (str, datetime.time.fromisoformat),
    "timedelta": (lambda d: [d.days, d.seconds, d.microseconds], lambda parts: datetime.timedelta(*parts)),
    "Decimal": (str, Decimal),
    "UUID": (str, UUID),
    "Path": (str, Path),
    "Timestamp": (str, lambda text: importlib.import_module("pandas").Timestamp(text)),
}
_SCALARS = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, bytes, Decimal, UUID)
_NAMES = {kind: kind.__name__ for kind in (tuple, set, frozenset, *_SCALARS)} | {type(Path()): "Path"}
# Record types in a file, each with the fields that are not written or that `_trajectory_to_json` adds.
_LEFT_OUT: dict[type, tuple[str, ...]] = {
    Trajectory: ("task", "sampling"),
    Turn: ("parent", "token_texts"),
    ToolCall: ("rerunner",),
    ToolResult: (),
    Failure: ("host",),
}


def _json_fallback(images: dict[str, Any], value: Any) -> Any:
    """Convert records, tasks, images, NumPy scalars and arrays. Raise TypeError for any other type.

    Images are added to `images`, keyed by digest.
    """
    if type(value).__module__ == "agentfly_kit.images":
        images[value.digest] = value
        return {_TYPE: "Image", "value": [value.digest, *value.size]}
    if type(value) in _LEFT_OUT:
        return _record_to_json(value)
    if isinstance(value, Task):
        return _encode(vars(value) | {"messages": list(value.messages)})
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got a {type(value).__name__}, which JSON cannot represent")


def _encode(value: Any) -> Any:
    """Convert the parts of a value that JSON cannot represent to JSON objects that `_decode` can restore."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TYPE not in value:
            return {key: _encode(part) for key, part in value.items()}
        name = "dict"
    elif isinstance(value, float):
        name = "" if math.isfinite(value) else "float"
    elif hasattr(value, "tolist"):
        return _encode(value.tolist())
    else:
        name = "Timestamp" if hasattr(value, "to_pydatetime") else _NAMES.get(type(value), "")
    if name:
        return {_TYPE: name, "value": _encode(_CODECS[name][0](value))}
    return [_encode(part) for part in value] if isinstance(value, list | tuple) else value


def _decode(value: Any, folder: Path) -> Any:
    """Restore a value that was converted by `_encode`. The files of images are in `folder`."""
    if isinstance(value, list):
        return [_decode(part, folder) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {key: _decode(part, folder) for key, part in value.items()}
    if parts.get(_TYPE) == "Image":
        from agentfly_kit.images import Image

        return Image.stored(folder, *parts["value"])
    return _CODECS[parts[_TYPE]][1](parts["value"]) if _TYPE in parts else parts


def dump_json(value: Any, where: str, images: dict[str, Any] | None = None) -> str:
    """Return a value as JSON. Images in the value are added to `images`, keyed by digest."""
    fallback = functools.partial(_json_fallback, {} if images is None else images)
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=fallback, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates can be written only as escape sequences
            text = json.dumps(value, separators=(",", ":"), default=fallback, allow_nan=False)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{where} cannot be saved as JSON: {error}; use strings, numbers, dates, paths, lists, sets or dicts "
            "in tasks, and numbers in metrics"
        ) from error


@functools.cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(kind))


def _record_to_json(record: Any) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults. Nested records are converted by `json.dumps`."""
    kind: Any = type(record)
    out = {}
    for name, default in _defaults(kind):
        if name not in _LEFT_OUT[kind]:
            value = getattr(record, name)
            # Types are compared too, because 0 == False.
            if type(value) is not type(default) or value != default:
                out[name] = value
    if kind is Turn:
        out = {"place" if name == "label" else name: value for name, value in out.items()}
        if record.ids is not None and record.token_texts is None:
            # Without this key, `read` would use the texts of the same ids in other turns.
            out["pieces"] = None
    return out


def _trajectory_to_json(t: Trajectory) -> dict[str, Any]:
    # Write all settings in `sampling`, because the defaults may change.
    return _record_to_json(t) | {"task": t.task, "chain": t.chain, "seed": t.seed, "sampling": vars(t.sampling)}


def _call_from_json(data: dict[str, Any], folder: Path) -> ToolCall:
    result = data.pop("result", None)
    if result is not None:
        error = result.pop("error", None)
        result["images"] = tuple(_decode(result.get("images", []), folder))
        result = ToolResult(**result, error=Failure(**error) if error else None)
    return ToolCall(**data, result=result)


def _trajectory_from_json(data: dict[str, Any], token_texts: dict[int, str], folder: Path) -> Trajectory:
    task = data.pop("task")
    error = data.pop("error", None)
    turns: list[Turn] = []
    for raw in data.pop("turns"):
        for name in ("ids", "logprobs", "entropies", "kept_mass", "versions", "messages"):
            if raw.get(name) is not None:
                raw[name] = tuple(raw[name])
        for message in raw.get("messages", ()):
            if isinstance(message["content"], list):
                message["content"] = tuple(_decode(message["content"], folder))
        raw["images"] = tuple(ImageSpan(*_decode(span, folder)) for span in raw.get("images", ()))
        if "alternatives" in raw:
            raw["alternatives"] = tuple(tuple(map(tuple, position)) for position in raw["alternatives"])
        raw["label"] = raw.pop("place", "")
        if raw["ids"] is not None and "pieces" not in raw:
            raw["token_texts"] = tuple(token_texts.get(i, f"[{i}]") for i in raw["ids"])
        raw.pop("pieces", None)
        calls = tuple(_call_from_json(call, folder) for call in raw.pop("tool_calls", ()))
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
    """Open a temporary text file that replaces `path` at the end. On failure, raise RunError and keep the old file."""
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
    images: dict[str, Any] = {}
    lines = [f"{dump_json(_trajectory_to_json(t), f'trajectory {t.id!r}', images)}\n" for t in trajectories]
    version = 2 if any(turn.row for t in trajectories for turn in t.turns) else 1
    if any(f'"{_TYPE}":' in line for line in lines):
        version = _VERSION if images else 3
    header = {"format": _FORMAT, "version": version, "seconds": seconds, "pieces": token_texts}
    if not_run:
        header["not_run"] = dict(not_run)
    if forks_refused:
        header["forks_refused"] = forks_refused
    with atomic_write(path) as file:
        file.write(dump_json(header, "the header") + "\n")
        file.writelines(lines)
        for image in images.values():
            image.store(path.parent / _IMAGES)


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
        trajectories, folder = [], path.parent.absolute() / _IMAGES
        for line in lines[1:]:
            number += 1
            if line:
                data = json.loads(line)
                if header["version"] >= 3:
                    data["task"] = _decode(data["task"], folder)
                trajectories.append(_trajectory_from_json(data, token_texts, folder))
        return trajectories, header["seconds"], dict(header.get("not_run", {})), header.get("forks_refused", 0)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RunError(f"{path}:{number} is damaged: {type(error).__name__}: {error}") from error
