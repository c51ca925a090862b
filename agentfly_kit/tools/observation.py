"""Conversion of a tool's return value to the text that the model sees."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from numbers import Real
from typing import Any

from pydantic_core import to_jsonable_python

from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.types import ToolResult


def to_result(value: Any) -> ToolResult:
    """Convert a return value to a result: strings unchanged, None as "", everything else as compact JSON."""
    if isinstance(value, SandboxResult):
        return ToolResult(value.ok, value.text, truncated=value.truncated)
    if not isinstance(value, ToolResult):
        return ToolResult(True, _to_text(value))
    if not isinstance(value.observation, str):
        raise TypeError(f"the observation of a ToolResult must be a string, got {value.observation!r}")
    if value.reward is not None and not (isinstance(value.reward, Real) and math.isfinite(value.reward)):
        raise TypeError(f"the reward of a ToolResult must be a finite number or None, got {value.reward!r}")
    return value


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
    """Convert arrays to lists and other objects to strings, but not if the string would contain a memory address."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    text = str(value)
    if re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", text, re.DOTALL):
        raise TypeError(
            f"a tool returned a {type(value).__qualname__}, which has no string representation; "
            "return a str, number or JSON value"
        )
    return text


def fit_result(result: ToolResult, max_chars: int | None) -> ToolResult:
    """Shorten the observation to `max_chars`, and replace lone surrogates, which cannot be tokenized."""
    text = result.observation
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if max_chars is None or len(text) <= max_chars:
        return replace(result, observation=text)
    cut = f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters]"
    return replace(result, observation=cut, truncated=True)
