"""XML format of Qwen3-Coder, one tag per parameter: `<tool_call><function=name><parameter=key>value</parameter>...`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import (
    Format,
    Parsed,
    compact_json,
    encoding_problem,
    read_json,
    short_repr,
    split_thinking,
)
from agentfly_kit.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
# A closing tag ends a value only if another parameter or the end of the function follows.
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_SHAPE = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True)
class QwenXML(Format):
    """Format with raw text values, parsed as JSON unless the parameter is a string, or unknown and not valid JSON."""

    native = True

    @property
    def name(self) -> str:
        return "qwen3_coder"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. Never raises; malformed calls have `.error`."""
        thinking, text = split_thinking(text, text.find(_OPEN))
        content: list[str] = []
        calls: list[ToolCall] = []
        at, unclosed = 0, False
        while (begin := text.find(_OPEN, at)) >= 0:
            content.append(text[at:begin])
            call, at = _read(text, begin + len(_OPEN), f"call-{len(calls)}", tools)
            if call is None:
                unclosed, at = True, len(text)
                break
            calls.append(call)
        content.append(text[at:])
        complaint = f"the tool call was not closed: write {_SHAPE}" if unclosed else ""
        return Parsed("".join(content).strip(), tuple(calls), thinking, unclosed, complaint)

    def render_call(self, call: ToolCall) -> str:
        """Render the call with one tag per argument: strings unchanged, other values as JSON."""
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else compact_json(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"{_OPEN}\n<function={call.name}>\n{values}</function>\n{_CLOSE}"


def _read(text: str, start: int, id: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall | None, int]:
    """Parse the call after the tag that ends at `start`. Return the call, or None if it is not closed, and its end."""
    arguments: dict[str, Any] = {}
    name = problem = ""
    function = _FUNCTION.match(text, start)
    at = start
    if function is None:
        problem = "does not begin with <function=name>"
    else:
        name, at = function.group(1).strip(), function.end()
        problem = "" if name else "has no function name"
        while (key := _PARAMETER.match(text, at)) is not None:
            end = _VALUE_END.search(text, key.end())
            if end is None:
                problem = problem or f"does not close <parameter={short_repr(key.group(1))[1:-1]}>"
                break
            raw = text[key.end() : end.start()]
            raw = raw[raw.startswith("\n") : len(raw) - (raw.endswith("\n") and len(raw) > 1)]
            if key.group(1) in arguments:
                problem = problem or f"gives {short_repr(key.group(1))} twice"
            arguments[key.group(1)] = _value(raw, _schema(tools, name, key.group(1)))
            at = end.end()
    close = text.find(_CLOSE, at)
    if close < 0:
        return None, len(text)
    rest = text[at:close].strip()
    if not problem and rest != "</function>":
        problem = f"has text where a tag should be: {short_repr(rest)}" if rest else "does not close <function=...>"
    problem = problem or encoding_problem([name, arguments])
    raw_call = text[start:close].strip()
    end_of_call = close + len(_CLOSE)
    if problem:
        return ToolCall(id, name, {}, error=f"the tool call {problem}; write {_SHAPE}", raw=raw_call), end_of_call
    return ToolCall(id, name, arguments, raw=raw_call), end_of_call


def _value(raw: str, schema: dict[str, Any] | None) -> Any:
    if schema is not None and schema.get("type") == "string":
        return raw
    value, end, problem = read_json(raw, 0)
    if problem or raw[end:].strip() or (isinstance(value, str) and schema is None) or encoding_problem(value):
        return raw
    return value


def _schema(tools: Sequence[dict[str, Any]], name: str, key: str) -> dict[str, Any] | None:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            found = (function.get("parameters") or {}).get("properties", {}).get(key)
            return found if isinstance(found, dict) else None
    return None
