"""Formats for models without a native format: ReAct, fenced code blocks, and tags around a query or action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.chat.formats.base import (
    Format,
    Parsed,
    ReadCalls,
    TaggedFormat,
    compact_json,
    encoding_problem,
    find_schema,
    is_cut,
    make_call,
    read_json,
    schemas,
    short_repr,
    split_thinking,
)
from agentfly_kit.types import Schemas, ToolCall

_ACTION = re.compile(r"^[ \t]*+Action[ \t]*+:(.*)$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*+Action Input[ \t]*+:[ \t]*+", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*+Final Answer[ \t]*+:", re.MULTILINE)
_OBSERVED = re.compile(r"^[ \t]*+Observation[ \t]*+:", re.MULTILINE)
_BLANK_LINES = re.compile(r"\s*^", re.MULTILINE)
_REST_IS_BLANK = re.compile(r"\s*+\Z")
_REACT_SHAPE = 'Action: name\nAction Input: {"argument": value}'


@dataclass(frozen=True)
class ReAct(Format):
    """ReAct format: lines with `Thought:`, `Action:`, `Action Input:` and `Final Answer:`.

    Text after `Observation:` is ignored, because the model made it up. For a tool with a single parameter, the input
    may be plain text instead of JSON.
    """

    name = "react"
    stop = ("Observation:",)

    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        first = _ACTION.search(text)
        tagged, text = split_thinking(text, first.start() if first else -1)
        end = len(text)
        for mark in (_OBSERVED, _FINAL):
            if (found := mark.search(text, 0, end)) and not _is_inside_input(text, found.start()):
                end = found.start()
        given, final = text[:end], _FINAL.match(text, end)
        calls: list[ToolCall] = []
        complaint, at = "", 0
        thoughts: list[str] = []
        while (action := _ACTION.search(given, at)) is not None:
            thoughts.append(given[at : action.start()])
            call, at = _react_call(given, action, f"call-{len(calls)}", tools)
            if call is None:
                complaint = f"the tool call was not closed: write {_REACT_SHAPE}"
                break
            calls.append(call)
        thoughts.append(given[at:])
        rest = "\n".join(part.strip() for part in thoughts if part.strip())
        if rest.startswith("Thought:"):
            rest = rest.removeprefix("Thought:").strip()
            answers = final is None and not calls and not complaint
        else:
            answers = final is None
        content = text[final.end() :] if final else rest if answers else ""
        if final and (over := _OBSERVED.search(content)):
            content = content[: over.start()]
        thinking = tagged if answers or not rest else rest if tagged is None else f"{tagged}\n{rest}".strip()
        return Parsed(content.strip(), tuple(calls), thinking, complaint)

    def render_call(self, call: ToolCall) -> str:
        """Render the call as two lines: the name of the tool, and its arguments as JSON."""
        return f"Action: {call.name}\nAction Input: {compact_json(call.arguments)}"

    def instructions(self, tools: Schemas) -> str:
        """Return the ReAct instructions with the tool schemas."""
        return (
            f"You can use these tools:\n{schemas(tools)}\n\nThink, then either use a tool:\nThought: ...\n"
            f"Action: the tool's name\nAction Input: its arguments as a JSON object\n"
            "and wait for its Observation; or finish:\nThought: ...\nFinal Answer: the answer"
        )

    def observation(self, name: str, text: str) -> str:
        return f"Observation: {text}"


def _is_inside_input(text: str, at: int) -> bool:
    for given in _INPUT.finditer(text, 0, at):
        if text.startswith("{", given.end()):
            _, end, problem = read_json(text, given.end())
            if not problem and end > at:
                return True
    return False


def _react_call(text: str, action: re.Match[str], id: str, tools: Schemas) -> tuple[ToolCall | None, int]:
    """Parse the call that starts with an `Action:` line. Return the call (None if incomplete) and its end position."""
    name, blank = action.group(1).strip(" \t"), _BLANK_LINES.match(text, action.end())
    given = _INPUT.match(text, blank.end()) if blank else None
    at = given.end() if given else action.end()
    arguments: dict[str, Any] = {}
    line = text.find("\n", at if given else at + 1)
    end = len(text) if line < 0 else line
    if given is None:
        if _REST_IS_BLANK.match(text, at):
            return None, len(text)
        problem = "has no Action Input line"
    elif not name:
        problem, end = "has no tool name after Action:", len(text)
    elif text.startswith("{", at):
        value, after, problem = read_json(text, at)
        if problem:
            if is_cut(text, at):
                return None, len(text)
            end = len(text)
        else:
            arguments, end = value, after
    elif not (bare := text[at:end].strip()):
        problem = "has an empty Action Input"
    else:
        # The input of a tool with a single parameter may be plain text.
        parameters = list(find_schema(tools, name))
        problem = "" if len(parameters) == 1 else f"has an input that is not a JSON object: {short_repr(bare)}"
        arguments = {parameters[0]: bare} if not problem else {}
    problem = problem or encoding_problem([name, arguments])
    if problem:
        raw = text[action.end() : end].strip()
        return make_call(id, "" if encoding_problem(name) else name, {}, problem, _REACT_SHAPE, raw), end
    return ToolCall(id, name, arguments, raw=text[at:end].strip()), end


@dataclass(frozen=True)
class FencedCode(TaggedFormat):
    """Format in which a fenced code block is a call to a fixed tool. Blocks in other languages are content."""

    tool: str = "python"
    parameter: str = "code"
    languages: tuple[str, ...] = ("python", "py")

    name = "code"
    unclosed_error = "the code block was not closed: end it with ```"

    def __post_init__(self) -> None:
        languages = "|".join(map(re.escape, self.languages))
        opening = re.compile(rf"^[ \t]*+(`{{3,}}+)[ \t]*+(?:{languages})[ \t]*+$", re.MULTILINE)
        object.__setattr__(self, "opening", opening)

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        # The closing fence must be on a line of its own, like the opening fence.
        closing = re.compile(rf"^[ \t]*+{opened.group(1)}[ \t]*+$", re.MULTILINE).search(text, opened.end())
        if closing is None:
            return None
        code = text[opened.end() + 1 : closing.start()].removesuffix("\n")
        problem = encoding_problem(code)
        error = f"the code {problem}" if problem else None
        arguments = {} if problem else {self.parameter: code}
        return [ToolCall(f"call-{len(made)}", self.tool, arguments, error=error, raw=code)], closing.end()

    def render_call(self, call: ToolCall) -> str:
        """Render the code in a fence longer than any fence inside it."""
        code = str(call.arguments.get(self.parameter, ""))
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", code))])
        return f"{fence}{self.languages[0]}\n{code}\n{fence}"

    def instructions(self, tools: Schemas) -> str:
        return f"You can run code. Write it in a block, and wait for its output:\n```{self.languages[0]}\n...\n```"

    def observation(self, name: str, text: str) -> str:
        return f"Output:\n{text}"


@dataclass(frozen=True)
class Tags(TaggedFormat):
    """Format with calls as text in a tag, such as `<search>a query</search>`, and the answer in `<answer>`.

    The text is passed to the tool `tool`. If it is a JSON object with "name" and "arguments", the tool with that name
    is called instead.

    Args:
        name: Name of the format.
        tag: Name of the tag around calls.
        tool: Name of the tool that is called with plain text.
        parameter: Parameter of the tool that receives the text.
        result_tag: Name of the tag around results.
    """

    name: str
    tag: str
    tool: str
    parameter: str
    result_tag: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (f"</{self.tag}>", "</answer>"))
        object.__setattr__(self, "opening", re.compile(f"<{re.escape(self.tag)}>|<answer>"))
        object.__setattr__(self, "unclosed_error", f"the tag was not closed: write <{self.tag}>...</{self.tag}>")

    def _separate(self, text: str, tools: Schemas) -> tuple[str, list[ToolCall], str]:
        # The first <answer> outside a call is the content. Text before it is reasoning; text after it is ignored.
        tag = re.escape(self.tag)
        parts = re.compile(rf"<{tag}>.*?(?:</{tag}>|\Z)|<answer>(.*?)(?:</answer>|\Z)", re.DOTALL).finditer(text)
        answer = next((part for part in parts if part.group(1) is not None), None)
        if answer is None:
            return super()._separate(text, tools)
        _, calls, complaint = super()._separate(text[: answer.start()], tools)
        return answer.group(1), calls, complaint

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        closing = f"</{self.tag}>"
        end = text.find(closing, opened.end())
        if end < 0:
            return None
        body = text[opened.end() : end].strip()
        name, arguments = self.tool, {self.parameter: body}
        value, at, _ = read_json(body, 0) if body.startswith("{") else ({}, 0, "")
        if at == len(body) and isinstance(value, dict) and set(value) == {"name", "arguments"}:
            given, values = value["name"], value["arguments"]
            if isinstance(given, str) and given and isinstance(values, dict):
                name, arguments = given, values
        problem = encoding_problem([name, arguments]) or ("" if body else "is empty")
        error = f"the call {problem}; write <{self.tag}>...</{self.tag}>" if problem else None
        name = "" if encoding_problem(name) else name
        call = ToolCall(f"call-{len(made)}", name, {} if error else arguments, error=error, raw=body)
        return [call], end + len(closing)

    def render_call(self, call: ToolCall) -> str:
        """Render a call to `tool` as plain text if possible, and any other call as JSON."""
        text = call.arguments.get(self.parameter)
        own = call.name == self.tool and set(call.arguments) == {self.parameter} and isinstance(text, str)
        shut = f"</{self.tag}>" in str(text)
        plain = own and not shut and str(text).strip() == text and text and not text.startswith("{")
        body = text if plain else compact_json({"name": call.name, "arguments": call.arguments}).replace("</", "<\\/")
        return f"<{self.tag}>{body}</{self.tag}>"

    def instructions(self, tools: Schemas) -> str:
        many = [t.get("function", t).get("name") for t in tools] not in ([self.tool], [])
        other = f'<{self.tag}>{{"name": ..., "arguments": {{...}}}}</{self.tag}>' if many else ""
        listed = f"You can use these tools:\n{schemas(tools)}\n\nTo use one, write {other}" if many else "Write "
        own = "" if many else f"<{self.tag}>{self.parameter}</{self.tag}>"
        return (
            f"{listed}{own} and wait for <{self.result_tag}>...</{self.result_tag}>. "
            "When you know the answer, write <answer>...</answer>."
        )

    def observation(self, name: str, text: str) -> str:
        return f"<{self.result_tag}>{text}</{self.result_tag}>"
