"""XML format of Qwen3-Coder, one tag per parameter: `<tool_call><function=name><parameter=key>value</parameter>...`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import (
    TaggedFormat,
    compact_json,
    encoding_problem,
    find_schema,
    make_call,
    read_json,
    short_repr,
)
from agentfly_kit.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
# A closing tag ends a value only if another parameter or the end of the function follows.
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_SHAPE = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True)
class QwenXML(TaggedFormat):
    """Format with raw text values, parsed as JSON according to the tool's schema.

    A string parameter keeps its text, and so does an unknown parameter whose text is not valid JSON.
    """

    name = "qwen3_coder"
    native = True
    opening = re.compile(_OPEN)
    unclosed_error = f"the tool call was not closed: write {_SHAPE}"

    def read_calls(
        self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[ToolCall], int] | None:
        name, arguments, problem, at = _read_function(text, opened.end(), tools)
        close = text.find(_CLOSE, at)
        if close < 0:
            return None
        rest = text[at:close].strip()
        if not problem and rest != "</function>":
            problem = f"has text where a tag should be: {short_repr(rest)}" if rest else "does not close <function=...>"
        problem = problem or encoding_problem([name, arguments])
        raw = text[opened.end() : close].strip()
        return [make_call(f"call-{len(made)}", name, arguments, problem, _SHAPE, raw)], close + len(_CLOSE)

    def render_call(self, call: ToolCall) -> str:
        """Render the call with one tag per argument: strings unchanged, other values as JSON."""
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else compact_json(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"{_OPEN}\n<function={call.name}>\n{values}</function>\n{_CLOSE}"


def _read_function(text: str, start: int, tools: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any], str, int]:
    """Parse the name and the parameters of a function. Return (name, arguments, problem, end)."""
    function = _FUNCTION.match(text, start)
    if function is None:
        return "", {}, "does not begin with <function=name>", start
    name, at = function.group(1).strip(), function.end()
    properties = find_schema(tools, name)
    arguments: dict[str, Any] = {}
    problem = "" if name else "has no function name"
    while (opened := _PARAMETER.match(text, at)) is not None:
        key, end = opened.group(1), _VALUE_END.search(text, opened.end())
        if end is None:
            problem = problem or f"does not close <parameter={short_repr(key)[1:-1]}>"
            break
        raw = text[opened.end() : end.start()]
        raw = raw[raw.startswith("\n") : len(raw) - (raw.endswith("\n") and len(raw) > 1)]
        if key in arguments:
            problem = problem or f"gives {short_repr(key)} twice"
        arguments[key] = _value(raw, properties.get(key))
        at = end.end()
    return name, arguments, problem, at


def _value(raw: str, schema: Any) -> Any:
    known = isinstance(schema, dict)
    if known and schema.get("type") == "string":
        return raw
    value, end, problem = read_json(raw, 0)
    if problem or raw[end:].strip() or (isinstance(value, str) and not known) or encoding_problem(value):
        return raw
    return value
