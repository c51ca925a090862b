"""Serialization between a pool's server and its clients. Values are sent as JSON, exceptions as type names.

No code is ever transferred: a record is decoded only if its class is a dataclass or named tuple from this package or
from the module of the pool's sandbox class.
"""

from __future__ import annotations

import base64
import builtins
import dataclasses
import datetime
import decimal
import importlib
import sys
import uuid
from collections.abc import Callable
from typing import Any

from ... import errors

VERSION = 2
PATH = f"/v{VERSION}"
_OWN = ("agentfly_kit.sandboxes.", "agentfly_kit.pool.")  # packages whose record classes a message may name

_FROM_STR: dict[type, Callable[[str], Any]] = {
    decimal.Decimal: decimal.Decimal,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
    datetime.datetime: datetime.datetime.fromisoformat,
    uuid.UUID: uuid.UUID,
}  # parse the output of str()


def encode(value: Any, handle: Callable[[Any], str | None] = lambda value: None) -> Any:
    """Convert a value to JSON-compatible data.

    Args:
        handle: Returns the lease id of a remote sandbox, or None for any other object.

    Raises:  TypeError for a value that cannot be serialized.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(each, handle) for each in value]
    if type(value) in _FROM_STR:
        return {"$written": [type(value).__name__, str(value)]}
    if isinstance(value, datetime.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: encode(each, handle) for name, each in zip(value._fields, value, strict=True)}
        return {"$record": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, tuple | set | frozenset):
        return {f"${type(value).__name__}": [encode(each, handle) for each in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(each, handle) for key, each in value.items()}
        return {"$dict": [[encode(key, handle), encode(each, handle)] for key, each in value.items()]}
    name = handle(value)
    if name is not None:
        return {"$lease": name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name), handle) for f in dataclasses.fields(value) if f.init}
        return {"$record": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    raise TypeError(
        f"a {type(value).__name__} cannot be sent; use plain data, bytes or a dataclass of the sandbox's module"
    )


def decode(value: Any, module: str = "", handle: Callable[[str], Any] | None = None) -> Any:
    """Restore a value from the output of `encode`.

    Args:
        module: Another module whose records are accepted, in addition to those of this package.
        handle: Returns the sandbox that has the given lease id.

    Raises:  ValueError for data that `encode` does not produce.
    """
    try:
        return _decode(value, module, handle)
    except (TypeError, ArithmeticError, ImportError) as error:  # such as a list as a key, or an out-of-range number
        raise ValueError(f"not an encoded value: {error}") from error


def _decode(value: Any, module: str, handle: Callable[[str], Any] | None) -> Any:
    if isinstance(value, list):
        return [_decode(each, module, handle) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: _decode(each, module, handle) for key, each in value.items()}
    inner = value[marks[0]]
    match marks:
        case ["$bytes"] if isinstance(inner, str):
            return base64.b64decode(inner, validate=True)
        case ["$tuple" | "$set" | "$frozenset"] if isinstance(inner, list):
            made = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[marks[0]]
            return made(_decode(each, module, handle) for each in inner)
        case ["$written"] if isinstance(inner, list) and len(inner) == 2 and isinstance(inner[1], str):
            readers = {type_.__name__: read for type_, read in _FROM_STR.items()}
            if inner[0] in readers:
                return readers[inner[0]](inner[1])
        case ["$timedelta"] if isinstance(inner, list) and all(isinstance(each, int) for each in inner):
            return datetime.timedelta(*inner[:3])
        case ["$dict"] if isinstance(inner, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
            return {_decode(key, module, handle): _decode(each, module, handle) for key, each in inner}
        case ["$lease"] if isinstance(inner, str) and handle is not None:
            return handle(inner)
        case ["$record"] if isinstance(inner, str) and isinstance(value.get("fields"), dict):
            fields = {name: _decode(each, module, handle) for name, each in value["fields"].items()}
            return _record(inner, module)(**fields)
    raise ValueError(f"not an encoded value: {str(value)[:80]}")


def _record(name: str, module: str) -> type:
    where, _, path = name.partition(":")
    if not (where.startswith(_OWN) or (module and where == module)):
        raise ValueError(f"records of {where} are not accepted")
    found: Any = sys.modules.get(where) or (importlib.import_module(where) if where.startswith(_OWN) else None)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise ValueError(f"{name} is not a record class")
    return found


def turn(value: object) -> int | str | None:
    """Convert a lease's `turn` to a value that can be sent. Types other than int, str and None become strings."""
    return value if value is None or isinstance(value, int | str) else str(value)


def encode_exception(error: BaseException) -> dict[str, str]:
    """Encode an exception as its type name and message. A type unknown to the other side becomes SandboxError."""
    name = type(error).__name__
    if _exception(name) is type(error):
        return {"type": name, "message": str(error)}
    return {"type": "SandboxError", "message": f"{name}: {error}"}


def decode_exception(encoded: Any) -> Exception:
    """Restore an exception encoded by `encode_exception`."""
    type_ = _exception(str(encoded.get("type"))) if isinstance(encoded, dict) else None
    if type_ is None:
        return errors.SandboxError(str(encoded))
    return type_(str(encoded.get("message", "")))


def _exception(name: str) -> type[Exception] | None:
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, errors.AgentFlyError):
        return ours
    common = getattr(builtins, name, None)
    if isinstance(common, type) and issubclass(common, Exception) and not issubclass(common, UnicodeError | Warning):
        return common
    return None
