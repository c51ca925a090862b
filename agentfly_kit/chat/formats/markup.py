"""Formats of models that write tool calls in their own markup instead of JSON: Qwen3-Coder, GLM-4, Gemma 4, LFM2."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import (
    ReadCalls,
    TaggedFormat,
    check_call,
    compact_json,
    encoding_problem,
    find_schema,
    make_call,
    read_json,
    short_repr,
)
from agentfly_kit.types import Schemas, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}

_GEMMA_QUOTE = '<|"|>'
_GEMMA_MARK = re.compile(r'<\|"\|>|<tool_call\|>')
_GEMMA_NAME = re.compile(r"\s*+call:([^\s{}]++)\s*+")
# A word is a key if a colon follows, and otherwise a number or a constant.
_GEMMA_WORD = re.compile(r"(\w[\w.-]*+)(\s*+:)?")
_GEMMA_SHAPE = '<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>'

# A constant or a string. A quote ends a string only before a separator, because some templates do not escape quotes.
_LFM2_LITERAL = re.compile(
    r"\b(True|False|None)\b"
    r"|'((?:[^'\\]++|\\.|'(?!\s*+[,:)\]}]))*+)(?:'|\Z)"
    r'|"((?:[^"\\]++|\\.|"(?!\s*+[,:)\]}]))*+)(?:"|\Z)',
    re.DOTALL,
)
_LFM2_NAME = re.compile(r"\s*+([\w.-]++)\s*+\(\s*+")
_LFM2_KEY = re.compile(r"(\w++)\s*+=")
_LFM2_COMMA = re.compile(r"\s*+,\s*+|\s*+(?=[)\]])")
_LFM2_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_LFM2_SHAPE = "<|tool_call_start|>[name(key='text')]<|tool_call_end|>"


@dataclass(frozen=True)
class QwenXML(TaggedFormat):
    """Format with one tag per parameter: `<tool_call><function=name><parameter=key>value</parameter>...`.

    Values of string parameters are used unchanged. Other values are parsed as JSON if possible.
    """

    name = "qwen3_coder"
    native = True
    opening = re.compile(_OPEN)
    shape = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
    unclosed_error = f"the tool call was not closed: write {shape}"
    function_tag, parameter_tag = "<function=name>", "<parameter={}>"
    function = re.compile(r"\s*+<function=([^<>\n]*+)>")
    function_end = "</function>"
    parameter = re.compile(r"\s*+<parameter=([^<>\n]*+)>")
    # A value ends at a closing tag that is followed by another parameter or the end of the function.
    value_end = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))")
    # The template adds a line break before and after each value.
    padding = "\n"

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        name, arguments, problem, at = self._read_function(text, opened.end(), tools)
        close = text.find(_CLOSE, at)
        if close < 0:
            return None
        rest = text[at:close].strip()
        if not problem and rest != self.function_end:
            problem = (
                f"has text where a tag is expected: {short_repr(rest)}" if rest else "does not close <function=...>"
            )
        problem = problem or encoding_problem([name, arguments])
        raw = text[opened.end() : close].strip()
        return [make_call(f"call-{len(made)}", name, arguments, problem, self.shape, raw)], close + len(_CLOSE)

    def _read_function(self, text: str, start: int, tools: Schemas) -> tuple[str, dict[str, Any], str, int]:
        """Parse a function name and its parameters. Return (name, arguments, problem, end position)."""
        function = self.function.match(text, start)
        if function is None:
            return "", {}, f"does not begin with {self.function_tag}", start
        name, at = function.group(1).strip(), function.end()
        properties = find_schema(tools, name)
        arguments: dict[str, Any] = {}
        problem = "" if name else "has an empty function name"
        while (opened := self.parameter.match(text, at)) is not None:
            key = opened.group(1)
            closed = opened.end() <= _last_match(self.value_end, text)
            end = self.value_end.search(text, opened.end()) if closed else None
            if end is None:
                problem = problem or f"does not close {self.parameter_tag.format(short_repr(key)[1:-1])}"
                break
            raw = text[opened.end() : end.start()]
            if pad := self.padding:
                raw = raw[raw.startswith(pad) : len(raw) - (raw.endswith(pad) and len(raw) > 1)]
            if key in arguments:
                problem = problem or f"sets {short_repr(key)} twice"
            arguments[key] = _typed_value(raw, properties.get(key))
            at = end.end()
        return name, arguments, problem, at

    def render_call(self, call: ToolCall) -> str:
        """Render the call with one tag per argument. Strings are inserted as they are, other values as JSON."""
        values = "".join(f"<parameter={k}>\n{_value_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
        return f"{_OPEN}\n<function={call.name}>\n{values}</function>\n{_CLOSE}"


@dataclass(frozen=True)
class GLM4(QwenXML):
    """Format of GLM-4: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>`; values as in QwenXML."""

    name = "glm4"
    shape = "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
    unclosed_error = f"the tool call was not closed: write {shape}"
    function_tag, parameter_tag = "the name of a tool", "<arg_key>{}</arg_key>"
    function = re.compile(r"\s*+([^\s<>{}]++)\s*+")
    function_end = ""
    parameter = re.compile(r"\s*+<arg_key>([^<>\n]*+)</arg_key>\s*+<arg_value>")
    value_end = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))")
    padding = ""

    def render_call(self, call: ToolCall) -> str:
        """Render the call with two tags per argument. Strings are inserted as they are, other values as JSON."""
        values = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_value_text(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"{_OPEN}{call.name}\n{''.join(values)}{_CLOSE}"


@functools.lru_cache(maxsize=1)
def _last_match(pattern: re.Pattern[str], text: str) -> int:
    """Return the start of the pattern's last match, or -1 if there is none.

    Callers do not search beyond this position, because repeated searches to the end would take quadratic time.
    """
    return max((found.start() for found in pattern.finditer(text)), default=-1)


def _typed_value(raw: str, schema: Any) -> Any:
    known = isinstance(schema, dict)
    if known and schema.get("type") == "string":
        return raw
    if known:  # some templates write True, False and None
        raw = _CONSTANTS.get(raw, raw)
    value, end, problem = read_json(raw, 0)
    if problem or raw[end:].strip() or (isinstance(value, str) and not known) or encoding_problem(value):
        return raw
    return value


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else compact_json(value)


@dataclass(frozen=True)
class Gemma4(TaggedFormat):
    """Format of Gemma 4: `<|tool_call>call:name{...}<tool_call|>`. Strings are quoted by `<|"|>`; keys are unquoted."""

    name = "gemma4"
    native = True
    opening = re.compile(r"<\|tool_call>")
    thinking_tags = ("<|channel>thought", "<channel|>")
    unclosed_error = f"the tool call was not closed: write {_GEMMA_SHAPE}"

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        name = _GEMMA_NAME.match(text, opened.end())
        at = begin = name.end() if name else opened.end()
        parts: list[str] = []  # text outside and inside strings, alternating
        while (mark := _GEMMA_MARK.search(text, at)) is not None:
            inside = len(parts) % 2 == 1
            if mark.group() == _GEMMA_QUOTE:
                parts.append(text[begin : mark.start()])
                begin = mark.end()
            elif not inside:
                break
            at = mark.end()
        if mark is None:
            return None
        parts.append(text[begin : mark.start()])
        body = "".join(json.dumps(part) if i % 2 else _quote_keys(part) for i, part in enumerate(parts))
        arguments, end, problem = read_json(body, 0)
        if not name:
            problem = "does not begin with call:name"
        elif not problem and body[end:].strip():
            problem = f"has text after the arguments: {short_repr(body[end:].strip())}"
        tool, arguments, wrong = check_call({"name": name.group(1) if name else "?", "arguments": arguments})
        raw = text[opened.end() : mark.start()]
        return [make_call(f"call-{len(made)}", tool, arguments, problem or wrong, _GEMMA_SHAPE, raw)], mark.end()

    def render_call(self, call: ToolCall) -> str:
        return f"<|tool_call>call:{call.name}{_gemma_value(call.arguments)}<tool_call|>"


def _quote_keys(text: str) -> str:
    """Convert the parts of a Gemma call outside strings to JSON: quote keys and replace Python constants."""

    def word(found: re.Match[str]) -> str:
        return f'"{found.group(1)}":' if found.group(2) else _CONSTANTS.get(found.group(), found.group())

    return _GEMMA_WORD.sub(word, text)


def _gemma_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}" if isinstance(value, str) else compact_json(value)


@dataclass(frozen=True)
class LFM2(TaggedFormat):
    """Format of LFM2: `<|tool_call_start|>[...]<|tool_call_end|>` around a list of calls in Python syntax."""

    name = "lfm2"
    native = True
    opening = re.compile(r"<\|tool_call_start\|>")
    unclosed_error = f"the tool call was not closed: write {_LFM2_SHAPE}"

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        closing = "<|tool_call_end|>"
        close = text.find(closing, opened.end())
        if close < 0:
            return None
        raw = text[opened.end() : close].strip()
        body = _LFM2_LITERAL.sub(_json_literal, raw)
        calls: list[ToolCall] = []
        at, problem = 1, "" if body.startswith("[") else "is not a list"
        while not problem and not (body.startswith("]", at) and at == len(body) - 1 and calls):
            begin = at
            name, arguments, problem, at = _read_python_call(body, at)
            problem = problem or encoding_problem([name, arguments])
            id = f"call-{len(made) + len(calls)}"
            calls.append(make_call(id, name, arguments, problem, _LFM2_SHAPE, body[begin:at] or raw))
        if not calls:
            calls = [make_call(f"call-{len(made)}", "", {}, problem, _LFM2_SHAPE, raw)]
        return calls, close + len(closing)

    def render_call(self, call: ToolCall) -> str:
        """Render the call in Python syntax, but with JSON values, which `read_calls` also accepts."""
        arguments = ", ".join(f"{key}={compact_json(value)}" for key, value in call.arguments.items())
        return f"<|tool_call_start|>[{call.name}({arguments})]<|tool_call_end|>"


def _json_literal(found: re.Match[str]) -> str:
    """Convert a matched Python constant or string to JSON."""
    if found.group(1):
        return _CONSTANTS[found.group(1)]
    text = found.group(2) if found.group(2) is not None else found.group(3)
    if found.group().startswith('"'):
        _, end, problem = read_json(found.group(), 0)
        if not problem and end == len(found.group()):
            return found.group()
    return json.dumps(re.sub(r"\\(.)", lambda m: _LFM2_ESCAPES.get(m.group(1), m.group()), text, flags=re.DOTALL))


def _read_python_call(text: str, start: int) -> tuple[str, dict[str, Any], str, int]:
    """Parse a call with JSON values, and the comma after it. Return (name, arguments, problem, end position)."""
    found = _LFM2_NAME.match(text, start)
    if found is None:
        return "", {}, f"has no name(...) at {short_repr(text[start : start + 40])}", start
    name, at = found.group(1), found.end()
    arguments: dict[str, Any] = {}
    while not text.startswith(")", at):
        key = _LFM2_KEY.match(text, at)
        if key is None:
            return name, {}, f"has no key=value at {short_repr(text[at : at + 40])}", at
        value, at, problem = read_json(text, key.end())
        comma = _LFM2_COMMA.match(text, at)
        if problem or comma is None:
            return name, {}, problem or f"has no comma at {short_repr(text[at : at + 40])}", at
        arguments[key.group(1)] = value
        at = comma.end()
    comma = _LFM2_COMMA.match(text, at + 1)
    return name, arguments, "" if comma else "has no comma between two calls", comma.end() if comma else at
