"""Hermes, as Qwen writes it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, `<think>...</think>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from agentfly_kit.formats.base import Parsed
from agentfly_kit.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<tool_call>|<think>|</think>")
_BLANK = re.compile(r"\s*")
_SHAPE = '{"name": ..., "arguments": {...}}'


@dataclass(frozen=True)
class Hermes:
    """The format that `chat` templates of Qwen and Hermes models ask for."""

    @property
    def name(self) -> str:
        return "hermes"

    def parse(self, text: str) -> Parsed:
        """Take an action's text apart. Any text is taken; a call that cannot be read says why in `.error`."""
        content: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        thought = unclosed = False
        at = 0
        while (tag := _TAG.search(text, at)) is not None:
            before, kind = text[at : tag.start()], tag.group()
            at = tag.end()
            if kind == "</think>":
                # Some templates open the tag in the prompt, so an action may begin inside it: all so far was thought.
                if not thought:
                    thinking, content, calls, thought = [text[: tag.start()]], [], [], True
                else:
                    content.append(before)
                continue
            content.append(before)
            if kind == "<think>":
                thought = True
                end = text.find("</think>", at)
                # Cut while thinking: whatever it thought of calling, it did not call.
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
        """The call in compact JSON between its tags."""
        body = {"name": call.name, "arguments": call.arguments}
        return f"{OPEN}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}{CLOSE}"


def _read(text: str, start: int, id: str) -> tuple[ToolCall | None, int]:
    """The call whose tag ends at `start`, and where the text goes on. None where it is never closed."""
    first = _BLANK.match(text, start).end()  # type: ignore[union-attr]  # matches everywhere
    try:
        body, end = _DECODER.raw_decode(text, first)
        problem = ""
    except json.JSONDecodeError as error:
        body, end, problem = None, first, f"is not valid JSON ({error.msg}, character {error.pos - first})"
    except RecursionError:
        body, end, problem = None, first, "is nested too deeply"
    except ValueError as error:  # an integer of thousands of digits, NaN
        body, end, problem = None, first, f"is not valid JSON ({error})"
    # Looked for after the JSON, so that a closing tag quoted inside an argument ends nothing.
    close = text.find(CLOSE, end)
    if close < 0:
        return None, len(text)
    raw = text[start:close].strip()
    if not problem and text[end:close].strip():
        problem = f"has text after the JSON object: {_short(text[end:close].strip())}"
    name = ""
    arguments: dict[str, Any] = {}
    if not problem:
        name, arguments, problem = _check(body)
    error_text = f"the tool call {problem}; write {OPEN}{_SHAPE}{CLOSE}" if problem else None
    return ToolCall(id, name, arguments, error=error_text, raw=raw), close + len(CLOSE)


def _check(body: Any) -> tuple[str, dict[str, Any], str]:
    """(name, arguments, what is wrong). The name is kept where it could be read, for whoever looks at failed calls."""
    if not isinstance(body, dict):
        return "", {}, f"is {_kind(body)}, not an object"
    name = body.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'has no "name"' if name is None else '"name" is not a text'
    if wrong := _unsayable(body):
        return "" if _unsayable(name) else name, {}, wrong
    if "arguments" not in body:
        others = [key for key in body if key not in ("name", "id", "type")]
        # A tool without arguments is often called without the key; any other key was meant to be one.
        return name, {}, f'has no "arguments" (it has {", ".join(map(_short, others[:3]))})' if others else ""
    arguments = body["arguments"]
    if not isinstance(arguments, dict):
        return name, {}, f'"arguments" is {_kind(arguments)}, not an object'
    return name, arguments, ""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _unsayable(value: Any) -> str:
    """What in it Python could read but nothing can tokenize, save or send on; "" if all is well."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair (\\ud800 to \\udfff alone)"
    except ValueError:  # 1e999
        return "holds a number too large for a float"
    return ""


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
