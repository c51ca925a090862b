"""Base classes of tool-call formats, and shared parsing helpers.

Parsing must take linear time for any text, because the text is written by models. In regular expressions, quantifiers
for whitespace and names are therefore possessive (`++`), and no opening tag triggers a search to the end of the text.
"""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from agentfly_kit._display import shorten
from agentfly_kit.types import Schemas, ToolCall

# The calls and the end position of the last one, or None if the text ends before a call is closed.
ReadCalls: TypeAlias = tuple[list[ToolCall], int] | None


@dataclass(frozen=True)
class Parsed:
    """Parsed text of one action.

    Attributes:
        content: Text outside calls and thinking, without surrounding whitespace.
        calls: Calls in order of appearance. A malformed call has `.error`, which is shown to the model.
        thinking: Text inside thinking tags; None if there are no tags, "" if they are empty.
        complaint: Error message for the model if the text ends inside a tool call, otherwise "". The unfinished call
            is included in neither `calls` nor `content`.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str | None = None
    complaint: str = ""

    @property
    def unclosed(self) -> bool:
        """True if the text ends inside a tool call."""
        return bool(self.complaint)


class Format(ABC):
    """Base class for text formats of tool calls. Subclass it to define a custom format.

    Attributes:
        name: name by which the format is selected and displayed.
        stop: strings at which sampling stops, because they end an action in this format.
        native: True if chat templates render tools in this format. Otherwise `instructions` are added to the prompt,
            and `observation` renders results as user messages.
    """

    name: str
    stop: tuple[str, ...] = ()
    native: bool = False

    @abstractmethod
    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        """Parse the text of an action. This method never raises; malformed calls have `.error`.

        Args:
            text: text of the action.
            tools: tool schemas, for formats that need the types of arguments to parse them.
        """

    @abstractmethod
    def render_call(self, call: ToolCall) -> str:
        """Render a call in this format, for example in instructions. `parse` is the inverse operation."""

    def instructions(self, tools: Schemas) -> str:
        """Return the instructions for a model whose chat template does not render tools."""
        example = self.render_call(ToolCall("call-0", "<name>", {"<argument>": "<value>"}))
        return (
            f"You can call these tools:\n{schemas(tools)}\n\nTo call one, write\n{example}\nand wait for its result."
        )

    def observation(self, name: str, text: str) -> str:
        """Render a tool result as a user message, for chat templates without a tool role."""
        return f"<tool_response>\n{text}\n</tool_response>"


class TaggedFormat(Format):
    """Base class for formats in which an opening tag starts a call anywhere after the thinking.

    Attributes:
        opening: pattern of the opening tag.
        unclosed_error: error message for a call that is not closed.
        thinking_tags: opening and closing tags around the thinking.
    """

    opening: re.Pattern[str]
    unclosed_error: str
    thinking_tags = ("<think>", "</think>")

    @abstractmethod
    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        """Parse the calls that start at an opening tag. `made` contains the calls before the tag."""

    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        first = self.opening.search(text)
        thinking, text = split_thinking(text, first.start() if first else -1, *self.thinking_tags)
        content, calls, complaint = self._separate(text, tools)
        return Parsed(content.strip(), tuple(calls), thinking, complaint)

    def _separate(self, text: str, tools: Schemas) -> tuple[str, list[ToolCall], str]:
        """Return the content around the calls, the calls, and the error message for an unclosed call or ""."""
        content: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        while (opened := self.opening.search(text, at)) is not None:
            content.append(text[at : opened.start()])
            found = self.read_calls(text, opened, calls, tools)
            if found is None:
                return "".join(content), calls, self.unclosed_error
            calls += found[0]
            at = found[1]
        return "".join(content) + text[at:], calls, ""


def make_call(id: str, name: str, arguments: dict[str, Any], problem: str, shape: str, raw: str) -> ToolCall:
    """Create a ToolCall. If there is a `problem`, the call has no arguments, and its error shows the right `shape`."""
    if problem:
        return ToolCall(id, name, {}, error=f"the tool call {problem}; write {shape}", raw=raw)
    return ToolCall(id, name, arguments, raw=raw)


def find_schema(tools: Schemas, name: str) -> dict[str, Any]:
    """Return the parameter schemas of the tool `name`, keyed by parameter; {} if there is no such tool."""
    functions = (tool.get("function", tool) for tool in tools)
    found: dict[str, Any] = next((f for f in functions if f.get("name") == name), {})
    properties: dict[str, Any] = (found.get("parameters") or {}).get("properties", {})
    return properties


def schemas(tools: Schemas) -> str:
    """Return the schemas as JSON, one line per tool."""
    return "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)


def split_thinking(
    text: str, opener: int, opening: str = "<think>", closing: str = "</think>"
) -> tuple[str | None, str]:
    """Return the thinking at the start of an action (None if there are no tags) and the rest of the text.

    A closing tag without an opening tag ends thinking that was opened by the prompt, but only if the tag precedes the
    first tool call, which begins at index `opener` (-1 if there is no call). Unclosed thinking extends to the end.
    """
    if text.lstrip().startswith(opening):
        thinking, _, rest = text.lstrip().removeprefix(opening).partition(closing)
        return thinking.strip(), rest
    end = text.find(closing)
    if end >= 0 and (opener < 0 or end < opener):
        return text[:end].strip(), text[end + len(closing) :]
    return None, text


# --- parsing JSON --------------------------------------------------------------------------------


def read_json(text: str, start: int) -> tuple[Any, int, str]:
    """Parse the JSON value at `start`. Return (value, end, ""), or (None, start, problem)."""
    while start < len(text) and text[start].isspace():
        start += 1
    # Parse increasingly long parts, because creating a JSONDecodeError counts all lines before its position.
    size = 1024
    while True:
        part, is_rest = text[start : start + size], start + size >= len(text)
        size *= 4
        try:
            value, end = _DECODER.raw_decode(part)
            if is_rest or end < len(part) - 16:
                return value, start + end, ""
        except json.JSONDecodeError as error:
            cut = "Unterminated" in error.msg or error.pos > len(part) - 16
            if is_rest or not cut:
                return None, start, f"is not valid JSON at character {error.pos}"
        except RecursionError:
            return None, start, "is nested too deeply"
        except ValueError as error:  # NaN, or an integer with too many digits, whose message contains "digits"
            if is_rest or "digits" not in str(error):
                return None, start, f"is not valid JSON ({error})"


def is_cut(text: str, start: int) -> bool:
    """Return True if the JSON value at `start` is incomplete because the text ends inside a string, array or object."""
    depth, quoted, escaped = 0, False, False
    for char in text[start:]:
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = char == "\\", char != '"'
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
            if depth <= 0:
                return False
    return True


def check_call(body: Any, keys: Sequence[str] = ("arguments",)) -> tuple[str, dict[str, Any], str]:
    """Validate the JSON value of a call. Return (name, arguments, problem), where an invalid name is replaced by ""."""
    if not isinstance(body, dict):
        return "", {}, f"must be an object, got {json_type(body)}"
    name = body.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'has no "name"' if name is None else 'must have a non-empty string as "name"'
    if wrong := encoding_problem(body):
        return "" if encoding_problem(name) else name, {}, wrong
    key = next((key for key in keys if key in body), None)
    if key is None:
        others = [key for key in body if key not in ("name", "id", "type")]
        # Calls without arguments often omit the key `keys[0]`. Report any other key, as it may be a misspelling.
        return name, {}, f'has no "{keys[0]}" (it has {", ".join(map(short_repr, others[:3]))})' if others else ""
    arguments = body[key]
    if not isinstance(arguments, dict):
        return name, {}, f'must have an object as "{key}", got {json_type(arguments)}'
    return name, arguments, ""


def encoding_problem(value: Any) -> str:
    """Return the reason why a parsed value cannot be tokenized, saved or sent, or "" if it can."""
    try:
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        return "is nested too deeply"
    except UnicodeEncodeError:
        return "contains an unpaired surrogate (\\ud800 to \\udfff)"
    except ValueError:  # for example 1e999, which was parsed as infinity
        return "contains a number that is too large"
    # Where a call is encoded again, the stack is deeper. A fixed number of levels does not depend on it.
    depths = itertools.accumulate(
        1 if bracket in b"[{" else -1 for bracket in re.sub(rb'"(?:[^"\\]|\\.)*+"|[^][{}"]++', b"", encoded)
    )
    return "is nested too deeply" if max(depths, default=0) > 200 else ""


def json_type(value: Any) -> str:
    """Return the name of a JSON value's type for messages to the model."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def short_repr(text: str) -> str:
    return repr(shorten(text, 40))


def compact_json(value: Any) -> str:
    """Serialize to JSON without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
