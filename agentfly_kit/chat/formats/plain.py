"""Formats for models without a native one: ReAct, fenced code blocks, and tags around a query or action."""

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
    is_cut,
    json_type,
    read_json,
    schemas,
    short_repr,
    split_thinking,
)
from agentfly_kit.types import ToolCall

_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_INPUT = re.compile(r"\s*^[ \t]*Action Input[ \t]*:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer[ \t]*:", re.MULTILINE)
_OBSERVED = re.compile(r"^[ \t]*Observation[ \t]*:", re.MULTILINE)
_REACT_SHAPE = 'Action: name\nAction Input: {"argument": value}'


@dataclass(frozen=True)
class ReAct(Format):
    """ReAct format: lines with `Thought:`, `Action:`, `Action Input:` and `Final Answer:`.

    Text after `Observation:`, which the model invents, is ignored. For a tool with a single argument, the input may be
    plain text instead of JSON.
    """

    stop = ("Observation:",)

    @property
    def name(self) -> str:
        return "react"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. Never raises; malformed calls have `.error`."""
        first = _ACTION.search(text)
        tagged, text = split_thinking(text, first.start() if first else -1)
        end = len(text)
        for mark in (_OBSERVED, _FINAL):
            if (found := mark.search(text, 0, end)) and not _is_inside_input(text, found.start()):
                end = found.start()
        said, final = text[:end], _FINAL.match(text, end)
        calls: list[ToolCall] = []
        unclosed, at = False, 0
        thoughts: list[str] = []
        while (action := _ACTION.search(said, at)) is not None:
            thoughts.append(said[at : action.start()])
            given = _INPUT.match(said, action.end())
            if given is None and not said[action.end() :].strip():
                unclosed, at = True, len(said)
                break
            call, at = _react_call(said, action.group(1), given, action.end(), f"call-{len(calls)}", tools)
            if call is None:
                unclosed, at = True, len(said)
                break
            calls.append(call)
        thoughts.append(said[at:])
        rest = "\n".join(part.strip() for part in thoughts if part.strip())
        if rest.startswith("Thought:"):
            rest = rest.removeprefix("Thought:").strip()
            spoken = final is None and not calls and not unclosed
        else:
            spoken = final is None
        content = text[final.end() :] if final else rest if spoken else ""
        if final and (over := _OBSERVED.search(content)):
            content = content[: over.start()]
        thinking = tagged if spoken or not rest else rest if tagged is None else f"{tagged}\n{rest}".strip()
        complaint = f"the tool call was not closed: write {_REACT_SHAPE}" if unclosed else ""
        return Parsed(content.strip(), tuple(calls), thinking, unclosed, complaint)

    def render_call(self, call: ToolCall) -> str:
        """Render two lines: the name, and the arguments as JSON."""
        return f"Action: {call.name}\nAction Input: {compact_json(call.arguments)}"

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the ReAct instructions with the tool schemas."""
        return (
            f"You can use these tools:\n{schemas(tools)}\n\nThink, then either use a tool:\nThought: ...\n"
            f"Action: the tool's name\nAction Input: its arguments as a JSON object\n"
            "and wait for its Observation; or finish:\nThought: ...\nFinal Answer: the answer"
        )

    def observation(self, name: str, text: str) -> str:
        return f"Observation: {text}"


def _is_inside_input(text: str, at: int) -> bool:
    """Return True if position `at` is inside the JSON input of an action."""
    for given in _INPUT.finditer(text, 0, at):
        if given.end() < at and text[given.end() :].startswith("{"):
            _, end, problem = read_json(text, given.end())
            if not problem and end > at:
                return True
    return False


def _react_call(
    text: str, name: str, given: re.Match[str] | None, after: int, id: str, tools: Sequence[dict[str, Any]]
) -> tuple[ToolCall | None, int]:
    """Parse one call. Return the call, or None if its input is incomplete, and its end."""

    def failed(problem: str, end: int) -> tuple[ToolCall, int]:
        error = f"the tool call {problem}; write {_REACT_SHAPE}"
        return ToolCall(id, "" if encoding_problem(name) else name, {}, error=error, raw=text[after:end].strip()), end

    line = text.find("\n", after + 1)
    if given is None:
        return failed("has no Action Input line", len(text) if line < 0 else line)
    at = given.end()
    if not name:
        return failed("has no name after Action:", len(text))
    if text.startswith("{", at):
        value, end, problem = read_json(text, at)
        if problem:
            return (None, len(text)) if is_cut(text, at) else failed(problem, len(text))
        problem = "" if isinstance(value, dict) else f"has {json_type(value)} as input"
        if problem := problem or encoding_problem([name, value]):
            return failed(problem, end)
        return ToolCall(id, name, value, raw=text[at:end]), end
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    bare = text[at:end].strip()
    only = _only_parameter(tools, name)
    if not bare or only is None:
        return failed(f"input {short_repr(bare)} is no JSON object" if bare else "has an empty input", end)
    if problem := encoding_problem([name, bare]):
        return failed(problem, end)
    return ToolCall(id, name, {only: bare}, raw=bare), end


def _only_parameter(tools: Sequence[dict[str, Any]], name: str) -> str | None:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            keys = list((function.get("parameters") or {}).get("properties", {}))
            return str(keys[0]) if len(keys) == 1 else None
    return None


@dataclass(frozen=True)
class FencedCode(Format):
    """Format in which a fenced code block is a call of one tool. Blocks in other languages are content."""

    tool: str = "python"
    parameter: str = "code"
    languages: tuple[str, ...] = ("python", "py")

    @property
    def name(self) -> str:
        return "code"

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. A closing fence must be at the start of a line."""
        opening = re.compile(
            rf"^[ \t]*(`{{3,}})[ \t]*({'|'.join(map(re.escape, self.languages))})[ \t]*$", re.MULTILINE
        )
        first = opening.search(text)
        thinking, text = split_thinking(text, first.start() if first else -1)
        calls: list[ToolCall] = []
        content: list[str] = []
        at, unclosed = 0, False
        while (opened := opening.search(text, at)) is not None:
            content.append(text[at : opened.start()])
            closing = re.compile(rf"^[ \t]*{opened.group(1)}[ \t]*$", re.MULTILINE).search(text, opened.end())
            if closing is None:
                unclosed, at = True, len(text)
                break
            code = text[opened.end() + 1 : closing.start()].removesuffix("\n")
            problem = encoding_problem(code)
            error = f"the code {problem}" if problem else None
            arguments = {} if problem else {self.parameter: code}
            calls.append(ToolCall(f"call-{len(calls)}", self.tool, arguments, error=error, raw=code))
            at = closing.end()
        content.append(text[at:])
        complaint = "the block of code was not closed: end it with ```" if unclosed else ""
        return Parsed("".join(content).strip(), tuple(calls), thinking, unclosed, complaint)

    def render_call(self, call: ToolCall) -> str:
        """Render the code in a fence longer than any fence inside it."""
        code = str(call.arguments.get(self.parameter, ""))
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", code))])
        return f"{fence}{self.languages[0]}\n{code}\n{fence}"

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
        return f"You can run code. Write it in a block, and wait for its output:\n```{self.languages[0]}\n...\n```"

    def observation(self, name: str, text: str) -> str:
        return f"Output:\n{text}"


@dataclass(frozen=True)
class Tags(Format):
    """Format with tags: `<search>a query</search>` calls one tool with one string, and `<answer>` holds the answer.

    `<action>` is used likewise for environments. A JSON object with "name" and "arguments" inside the tag calls the
    tool of that name.

    Args:
        label
        tag
        tool
        parameter
        result_tag: Tag around results.
    """

    label: str
    tag: str
    tool: str
    parameter: str
    result_tag: str

    @property
    def name(self) -> str:
        return self.label

    @property
    def stop(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"</{self.tag}>", "</answer>")

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Parse the text of an action. The text inside <answer> is the content; everything after it is ignored."""
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        first = min((at for at in (text.find(opening), text.find("<answer>")) if at >= 0), default=-1)
        thinking, text = split_thinking(text, first)
        calls: list[ToolCall] = []
        content: list[str] = []
        answer: str | None = None
        at, unclosed = 0, False
        while True:
            begin, answered = text.find(opening, at), text.find("<answer>", at)
            if answered >= 0 and (begin < 0 or answered < begin):
                # Text before the answer is reasoning, not content.
                body = text[answered + len("<answer>") :]
                answer = body.partition("</answer>")[0].strip()
                at = len(text)
                break
            if begin < 0:
                break
            content.append(text[at:begin])
            end = text.find(closing, begin)
            if end < 0:
                unclosed, at = True, len(text)
                break
            calls.append(self._call(text[begin + len(opening) : end], f"call-{len(calls)}"))
            at = end + len(closing)
        content.append(text[at:])
        outside = "".join(content).strip()
        complaint = f"the tag was not closed: write {opening}...{closing}" if unclosed else ""
        return Parsed(outside if answer is None else answer, tuple(calls), thinking, unclosed, complaint)

    def _call(self, body: str, id: str) -> ToolCall:
        name, arguments = self.tool, {self.parameter: body.strip()}
        if body.lstrip().startswith("{"):
            value, end, problem = read_json(body, 0)
            whole = not problem and not body[end:].strip()
            if whole and isinstance(value, dict) and set(value) == {"name", "arguments"}:
                given, values = value["name"], value["arguments"]
                if isinstance(given, str) and given and isinstance(values, dict):
                    name, arguments = given, values
        problem = encoding_problem([name, arguments]) or ("" if body.strip() else "is empty")
        error = f"the call {problem}; write <{self.tag}>...</{self.tag}>" if problem else None
        return ToolCall(
            id, "" if encoding_problem(name) else name, {} if error else arguments, error=error, raw=body.strip()
        )

    def render_call(self, call: ToolCall) -> str:
        """Render a call of the default tool as plain text, and calls of other tools as JSON."""
        text = call.arguments.get(self.parameter)
        own = call.name == self.tool and set(call.arguments) == {self.parameter} and isinstance(text, str)
        shut = f"</{self.tag}>" in str(text)
        plain = own and not shut and str(text).strip() == text and text and not text.startswith("{")
        body = text if plain else compact_json({"name": call.name, "arguments": call.arguments}).replace("</", "<\\/")
        return f"<{self.tag}>{body}</{self.tag}>"

    def instructions(self, tools: Sequence[dict[str, Any]]) -> str:
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
