"""Serialization between a pool's server and its clients. Values are sent as JSON, exceptions as type and message.

Unlike with pickle, a message cannot create arbitrary objects. Other than plain data, only dataclasses and named tuples
are decoded, and only if agentfly_kit.sandboxes, agentfly_kit.pool or the module of the sandbox class defines them.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ... import errors
from ...sandboxes.inside import values

VERSION = 2
PATH = f"/v{VERSION}"
_OWN = ("agentfly_kit.sandboxes.", "agentfly_kit.pool.")  # packages whose record classes a message may name


def encode(value: Any, handle: Callable[[Any], str | None] = lambda value: None) -> Any:
    """Convert a value to JSON-compatible data.

    Args:
        handle: Returns the lease id of a remote sandbox, or None for any other object.

    Raises:  TypeError for a value that cannot be serialized.
    """

    def other(value: Any) -> Any:
        named: Iterable[tuple[str, Any]]
        if (name := handle(value)) is not None:
            return {"$lease": name}
        if isinstance(value, tuple):
            named = zip(value._fields, value, strict=True)  # type: ignore[attr-defined]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        else:
            raise TypeError(
                f"a {type(value).__name__} cannot be sent; use plain data or a dataclass of the sandbox's own module"
            )
        fields = {name: values.encode(each, other) for name, each in named}
        return {"$record": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}

    return values.encode(value, other)


def decode(value: Any, module: str = "", handle: Callable[[str], Any] | None = None) -> Any:
    """Restore a value from the output of `encode`.

    Args:
        module: Module of the sandbox class. Its dataclasses and named tuples are decoded too.
        handle: Returns the sandbox that has the given lease id.

    Raises:  ValueError for data that `encode` does not produce.
    """

    def other(tagged: dict[str, Any]) -> Any:
        match tagged:
            case {"$lease": str(name)} if handle is not None:
                return handle(name)
            case {"$record": str(name), "fields": dict(given)}:
                fields = {key: values.decode(each, other) for key, each in given.items()}
                return _record(name, module)(**fields)
        raise ValueError(f"not an encoded value: {str(tagged)[:80]}")

    try:
        return values.decode(value, other)
    except (TypeError, ArithmeticError, ImportError) as error:  # such as a list as a key, or an out-of-range number
        raise ValueError(f"not an encoded value: {error}") from error


def _record(name: str, module: str) -> type:
    where, _, path = name.partition(":")
    if not (where.startswith(_OWN) or (module and where == module)):
        raise ValueError(f"objects from {where!r} are not accepted")
    found: Any = sys.modules.get(where) or (importlib.import_module(where) if where.startswith(_OWN) else None)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))):
        raise ValueError(f"{name} is not a dataclass or named tuple")
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
