"""What every format gives: a parsed text, and a call written back. Knows no format in particular."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentfly_kit.types import ToolCall


@dataclass(frozen=True)
class Parsed:
    """One action's text, taken apart. Nothing is executed, and nothing is invented."""

    content: str
    """What the model says to the reader: the text outside of calls and thinking, without outer blanks."""
    calls: tuple[ToolCall, ...] = ()
    """In the order written. One that cannot be read has `.error`, to be told to the model."""
    thinking: str | None = None
    """None if the model did not think; "" if it opened and closed the tags at once."""
    unclosed: bool = False
    """The text ends inside a tool call. Its beginning is neither a call nor content."""
    complaint: str = ""
    """With `unclosed`: what to tell the model."""


class Format(ABC):
    """How a tool call is written in text. Subclass it for a format of your own.

    name    by which it is chosen
    stop    texts after which an action of this format is over; an agent's sampling stops there
    native  whether chat templates show the tools in this format; if not, `instructions` are put into the prompt, and
            results are told as a user's message, by `observation`
    """

    stop: tuple[str, ...] = ()
    native: bool = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Take an action's text apart. Never raises. tools: schemas, where a format needs types to read arguments."""

    @abstractmethod
    def render_call(self, call: ToolCall) -> str:
        """The text of a call, for demonstrations; `parse` reads it back."""

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """What to tell a model whose chat template shows it no tools."""
        example = self.render_call(ToolCall("call-0", "<name>", {"<argument>": "<value>"}))
        return f"You can call these tools:\n{schemas(tools)}\n\nTo call one, write\n{example}\nand wait for its result."

    def observation(self, name: str, text: str) -> str:
        """A tool's result as a user's message, where the chat template knows no role for tools."""
        return f"<tool_response>\n{text}\n</tool_response>"


def schemas(tools: Sequence[dict[str, Any]]) -> str:
    """One line of JSON a tool."""
    return "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)


def split_thinking(text: str, opener: int) -> tuple[str | None, str]:
    """(thinking, the rest). Thinking comes first, in tags; `opener` is where the first call begins, or -1.

    A closing tag alone, before any call, ends thinking that the prompt opened. Thinking that is never closed is all.
    """
    if text.lstrip().startswith("<think>"):
        begin = text.index("<think>") + len("<think>")
        end = text.find("</think>", begin)
        return (text[begin:].strip(), "") if end < 0 else (text[begin:end].strip(), text[end + len("</think>") :])
    end = text.find("</think>")
    if end >= 0 and (opener < 0 or end < opener):
        return text[:end].removeprefix("<think>").strip(), text[end + len("</think>") :]
    return None, text


# --- JSON that a model wrote ---------------------------------------------------------------------


def read_json(text: str, start: int) -> tuple[Any, int, str]:
    """(value, where it ends, "") of the JSON value that begins at `start`, or (None, start, what is wrong)."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
        return value, end, ""
    except json.JSONDecodeError as error:
        return None, start, f"is not valid JSON ({error.msg}, character {error.pos - start})"
    except RecursionError:
        return None, start, "is nested too deeply"
    except ValueError as error:  # an integer of thousands of digits, NaN
        return None, start, f"is not valid JSON ({error})"


def is_cut(text: str, start: int) -> bool:
    """Whether the JSON value that begins at `start` could go on: the text ends inside a string or a bracket."""
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
    """(name, arguments, what is wrong). The name is kept where it could be read, for whoever looks at failed calls."""
    if not isinstance(body, dict):
        return "", {}, f"is {json_type(body)}, not an object"
    name = body.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, 'has no "name"' if name is None else '"name" is not a text'
    if wrong := encoding_problem(body):
        return "" if encoding_problem(name) else name, {}, wrong
    key = next((key for key in keys if key in body), None)
    if key is None:
        others = [key for key in body if key not in ("name", "id", "type")]
        # A tool without arguments is often called without the key; any other key was meant to be one.
        return name, {}, f'has no "{keys[0]}" (it has {", ".join(map(short_repr, others[:3]))})' if others else ""
    arguments = body[key]
    if not isinstance(arguments, dict):
        return name, {}, f'"{key}" is {json_type(arguments)}, not an object'
    return name, arguments, ""


def encoding_problem(value: Any) -> str:
    """What in it Python could read but nothing can tokenize, save or send on; "" if all is well."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair (\\ud800 to \\udfff alone)"
    except ValueError:  # 1e999
        return "holds a number too large for a float"
    return ""


def json_type(value: Any) -> str:
    """A JSON value's type, as a model may read it."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def short_repr(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def compact_json(value: Any) -> str:
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
