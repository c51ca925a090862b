"""Conversion of a tool's return value to the text that the model sees."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pydantic_core import to_jsonable_python

from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.types import ToolResult


def to_result(value: Any) -> ToolResult:
    """Convert a return value to a result: strings unchanged, None as "", everything else as compact JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, SandboxResult):
        return ToolResult(value.ok, value.text, truncated=value.truncated)
    return ToolResult(True, _to_text(value))


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the value of a string enum, not its name
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    plain = to_jsonable_python(value, inf_nan_mode="constants", bytes_mode="utf8", fallback=_json_fallback)
    # Dates, paths and enum members are single strings: shown without quotes, like a returned str.
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _json_fallback(value: Any) -> Any:
    """Convert arrays to lists, and other objects that define `__str__` or `__repr__` to strings."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    if not any("__str__" in vars(c) or "__repr__" in vars(c) for c in type(value).__mro__[:-1]):
        raise TypeError(
            f"a tool returned a {type(value).__qualname__}, which has no string representation; "
            "return a str, number or JSON value"
        )
    return str(value)


def fit_result(result: ToolResult, max_chars: int | None) -> ToolResult:
    """Shorten the observation to `max_chars`, and replace lone surrogates, which cannot be tokenized."""
    text = result.observation
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if max_chars is None or len(text) <= max_chars:
        return replace(result, observation=text)
    cut = f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"
    return replace(result, observation=cut, truncated=True)
