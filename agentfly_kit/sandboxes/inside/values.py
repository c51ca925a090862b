"""Encoding of Python values as JSON, for messages between processes that do not trust each other.

A value of a type that JSON lacks becomes an object with one key, the tag, such as {"$date": "2024-01-31"}. Decoding
creates values of known types only and runs no code of the sender. The host uses this module too.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import uuid
from collections.abc import Callable
from typing import Any

# Tag -> (type, function from value to text, function from text to value). Subclasses precede their base classes.
TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "$datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "$date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "$time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "$decimal": (decimal.Decimal, str, decimal.Decimal),
    "$uuid": (uuid.UUID, str, uuid.UUID),
}
COLLECTIONS: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Convert a value to JSON-compatible data. `other` converts named tuples and values of all other types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # converts a member of an enum to its value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**53 else {"$int": hex(number)}  # Python limits the length of decimal numbers
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    for tag, (kind, write, _) in TEXTS.items():
        if isinstance(value, kind):
            return {tag: write(value)}
    if isinstance(value, list):
        return [encode(each, other) for each in list(value)]
    if isinstance(value, dict):
        items = list(value.items())
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return {key: encode(each, other) for key, each in items}
        return {"$dict": [[encode(key, other), encode(each, other)] for key, each in items]}
    for tag, kind in COLLECTIONS.items():
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            return {tag: [encode(each, other) for each in list(value)]}
    return other(value)


def decode(value: Any, other: Callable[[dict[str, Any]], Any]) -> Any:
    """Restore a value from the output of `encode`. `other` restores objects with an unknown tag.

    Raises:  ValueError, TypeError or ArithmeticError for data that `encode` does not produce.
    """
    if isinstance(value, list):
        return [decode(each, other) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), "")
    if not tag:
        return {key: decode(each, other) for key, each in value.items()}
    inner = value[tag]
    if len(value) == 1 and isinstance(inner, str):
        if tag in TEXTS:
            return TEXTS[tag][2](inner)
        if tag == "$int":
            return int(inner, 16)
        if tag == "$bytes":
            return base64.b64decode(inner, validate=True)
    if len(value) == 1 and isinstance(inner, list):
        if tag in COLLECTIONS:
            return COLLECTIONS[tag](decode(each, other) for each in inner)
        if tag == "$dict":
            return {hashable(decode(key, other)): decode(each, other) for key, each in inner}
        if tag == "$complex":
            return complex(*inner)
        if tag == "$timedelta":
            return datetime.timedelta(*inner)
    return other(value)


def hashable(key: Any) -> Any:
    return tuple(map(hashable, key)) if isinstance(key, list) else key
