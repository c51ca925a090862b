"""Hermes format, as in Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `<think>...</think>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import Format, Parsed, check_call, compact_json, read_json, short_repr
from agentfly_kit.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<tool_call>|<think>|</think>")
_SHAPE = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True)
class Hermes(Format):
    """Format requested by the chat templates of Qwen and Hermes models."""

    native = True

    @property
    def name(self) -> str:
        return "hermes"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. Never raises; malformed calls have `.error`."""
        content: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        thought = unclosed = False
        at = 0
        while (tag := _TAG.search(text, at)) is not None:
            before, kind = text[at : tag.start()], tag.group()
            at = tag.end()
            if kind == "</think>":
                # The prompt may end with an open tag, so all text so far was thinking.
                if not thought:
                    thinking, content, calls, thought = [text[: tag.start()]], [], [], True
                else:
                    content.append(before)
                continue
            content.append(before)
            if kind == "<think>":
                thought = True
                end = text.find("</think>", at)
                # If truncated while thinking, calls inside the thinking do not count.
                thinking.append(text[at:] if end < 0 else text[at:end])
                at = len(text) if end < 0 else end + len("</think>")
                continue
            call, end = _read(text, at, f"call-{len(calls)}")
            if call is None:
                unclosed, at = True, len(text)
                break
            calls.append(call)
            at = end
        content.append(text[at:])
        return Parsed(
            content="".join(content).strip(),
            calls=tuple(calls),
            thinking="\n".join(part.strip() for part in thinking) if thought else None,
            unclosed=unclosed,
            complaint=f"the tool call was not closed: write {OPEN}{_SHAPE}{CLOSE}" if unclosed else "",
        )

    def render_call(self, call: ToolCall) -> str:
        """Render the call as compact JSON between tags."""
        body = {"name": call.name, "arguments": call.arguments}
        return f"{OPEN}{compact_json(body)}{CLOSE}"


def _read(text: str, start: int, id: str) -> tuple[ToolCall | None, int]:
    """Parse the call after the tag that ends at `start`. Return the call, or None if it is not closed, and its end."""
    body, end, problem = read_json(text, start)
    # Searched after the JSON, so that a closing tag inside a string argument is ignored.
    close = text.find(CLOSE, end)
    if close < 0:
        return None, len(text)
    raw = text[start:close].strip()
    if not problem and text[end:close].strip():
        problem = f"has text after the JSON object: {short_repr(text[end:close].strip())}"
    name = ""
    arguments: dict[str, Any] = {}
    if not problem:
        name, arguments, problem = check_call(body)
    error_text = f"the tool call {problem}; write {OPEN}{_SHAPE}{CLOSE}" if problem else None
    return ToolCall(id, name, arguments, error=error_text, raw=raw), close + len(CLOSE)
