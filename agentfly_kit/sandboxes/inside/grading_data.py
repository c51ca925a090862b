"""Data exchanged between a Grader's two interpreters, that of the submission and that of the tests.

This file runs after base.py in the same namespace, in each of the two. The host relays requests and answers between
them as JSON, which contains only data or references to objects in the submission's process. Therefore no code of the
submission, such as its `==`, ever runs in the process of the tests.
"""

from __future__ import annotations

import base64
import json
import linecache
import traceback
from collections.abc import Callable
from typing import Any

LONGEST = 2**22  # maximum characters of one request or answer


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON. `keep` encodes any object that is not data, or raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, list):
        return [pack(each, keep) for each in list(value)]
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(each, keep)] for key, each in list(value.items())]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(each, keep) for each in list(value)]}
    return keep(value)


def unpack(value: Any, found: Callable[[Any], Any]) -> Any:
    """Decode a value encoded by `pack`. `found` returns the object for a reference that `keep` produced."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [unpack(each, found) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no data")
    ((tag, inner),) = value.items()
    if tag == "int":
        return int(inner, 16)
    if tag == "float":
        return float.fromhex(inner)
    if tag == "complex":
        return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
    if tag == "bytes":
        return base64.b64decode(inner)
    if tag == "dict":
        return {unpack(key, found): unpack(each, found) for key, each in inner}
    if tag in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](unpack(each, found) for each in inner)
    if tag == "object":
        return found(inner)
    raise ValueError("no data")


def dump_json(message: Any) -> str:
    text = json.dumps(message)
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters of data; at most {LONGEST} cross at once")
    return text


def format_traceback(error: BaseException, text: str, own: str) -> str:
    """Format a traceback, starting at the first frame of the given source text."""
    linecache.cache[own] = (len(text), None, text.splitlines(keepends=True), own)
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != own:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip("\n")[-4000:]
