"""Formats with JSON calls outside of tags: Llama 3 (at the start of the text) and Mistral (after [TOOL_CALLS])."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import (
    Format,
    Parsed,
    check_call,
    compact_json,
    encoding_problem,
    is_cut,
    json_type,
    read_json,
    short_repr,
    split_thinking,
)
from agentfly_kit.types import ToolCall

_LLAMA = re.compile(r'\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type)"\s*:)')
_LLAMA_NEXT = re.compile(r'\s*;?\s*(?=\{\s*"(?:name|type)"\s*:)')
_LLAMA_SHAPE = '{"name": ..., "parameters": {...}}'
_LLAMA_TAG = "<|python_tag|>"

_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_MISTRAL_SHAPE = '[TOOL_CALLS][{"name": ..., "arguments": {...}}]'


@dataclass(frozen=True)
class Llama3(Format):
    """Format of Llama 3, in which the whole action is a call: `{"name": ..., "parameters": {...}}`.

    Several calls follow each other, optionally separated by semicolons. JSON that does not start with "name" or "type"
    is an answer.
    """

    native = True

    @property
    def name(self) -> str:
        return "llama3"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. Never raises; malformed calls have `.error`."""
        found = _LLAMA.match(text)
        thinking, text = (None, text) if found else split_thinking(text, -1)
        calls: list[ToolCall] = []
        arguments: dict[str, Any]
        at = 0
        found = _LLAMA.match(text)
        while found is not None:
            begin = found.end()
            body, end, problem = read_json(text, begin)
            if problem:
                if is_cut(text, begin):
                    complaint = f"the tool call was not closed: write {_LLAMA_SHAPE}"
                    return Parsed("", tuple(calls), thinking, True, complaint)
                name, arguments, end = "", {}, len(text)
            else:
                name, arguments, problem = check_call(body, ("parameters", "arguments"))
            error = f"the tool call {problem}; write {_LLAMA_SHAPE}" if problem else None
            calls.append(ToolCall(f"call-{len(calls)}", name, arguments, error=error, raw=text[begin:end]))
            at = end
            found = _LLAMA_NEXT.match(text, at)
        if not calls and text.lstrip().startswith(_LLAMA_TAG):
            # Marked as a call, but not a valid one.
            raw = text.lstrip()[len(_LLAMA_TAG) :].strip()
            if not raw or (raw.startswith("{") and is_cut(raw, 0)):
                return Parsed("", (), thinking, True, f"the tool call was not closed: write {_LLAMA_SHAPE}")
            error = f"the tool call is no JSON object with a name; write {_LLAMA_SHAPE}"
            return Parsed("", (ToolCall("call-0", "", {}, error=error, raw=raw),), thinking)
        return Parsed(text[at:].strip(), tuple(calls), thinking)

    def render_call(self, call: ToolCall) -> str:
        """Render the call like the template of Llama, but without whitespace."""
        return compact_json({"name": call.name, "parameters": call.arguments})


@dataclass(frozen=True)
class Mistral(Format):
    """Format of Mistral: `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{...}` per call in newer models.

    Call ids of nine letters or digits are kept, because the template requires them later.
    """

    native = True

    @property
    def name(self) -> str:
        return "mistral"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. Never raises; malformed calls have `.error`."""
        thinking, text = split_thinking(text, text.find(_MISTRAL))
        calls: list[ToolCall] = []
        content: list[str] = []
        at = 0
        while (begin := text.find(_MISTRAL, at)) >= 0:
            content.append(text[at:begin])
            at = begin + len(_MISTRAL)
            named = _MISTRAL_NAME.match(text, at)
            start = named.end() if named else at
            body, end, problem = read_json(text, start)
            following = text.find(_MISTRAL, start)
            segment = text[start : len(text) if following < 0 else following].strip()
            unfinished = following < 0 and (not segment or (segment[0] in "[{" and is_cut(segment, 0)))
            if problem and (unfinished or (following < 0 and not named and _is_name(segment))):
                complaint = f"the tool call was not closed: write {_MISTRAL_SHAPE}"
                return Parsed("".join(content).strip(), tuple(calls), thinking, True, complaint)
            if problem:
                bodies: list[Any] = []
                at = len(text) if following < 0 else following
            elif named:
                bodies, at = [{"name": named.group(1), "arguments": body, "id": named.group(2)}], end
            elif isinstance(body, list):
                bodies, at = body, end
                problem = "" if body else "is an empty list"
            else:
                bodies, at = [body], end
                problem = "" if isinstance(body, dict) else f"is {json_type(body)}, not a list of calls"
            if problem:
                error = f"the tool call {problem}; write {_MISTRAL_SHAPE}"
                calls.append(ToolCall(f"call-{len(calls)}", "", {}, error=error, raw=segment))
                continue
            for one in bodies:
                calls.append(self._call(one, len(calls), {c.id for c in calls}))
        content.append(text[at:])
        return Parsed("".join(content).strip(), tuple(calls), thinking)

    @staticmethod
    def _call(body: Any, index: int, taken: set[str]) -> ToolCall:
        name, arguments, problem = check_call(body)
        id = body.get("id") if isinstance(body, dict) else None
        if not (isinstance(id, str) and re.fullmatch(r"[A-Za-z0-9]{9}", id) and id not in taken):
            id = f"call-{index}"
        raw = "" if encoding_problem(body) else compact_json(body)
        error = f"the tool call {problem}; write {_MISTRAL_SHAPE}" if problem else None
        return ToolCall(id, name, arguments, error=error, raw=raw or short_repr(str(name)))

    def render_call(self, call: ToolCall) -> str:
        """Render a list of this one call, with its id if that is a valid Mistral id."""
        body: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
        if re.fullmatch(r"[A-Za-z0-9]{9}", call.id):
            body["id"] = call.id
        return f"{_MISTRAL}[{compact_json(body)}]"


def _is_name(text: str) -> bool:
    """Return True if the text is a prefix of `name[ARGS]{`, that is, of a truncated call."""
    return re.fullmatch(r"[^\s\[\]{}\"]+(?:\[[A-Z_]*\]?)?", text) is not None
