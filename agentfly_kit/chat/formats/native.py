"""Formats of models that write tool calls as JSON: Hermes, Llama 3, Mistral, DeepSeek and gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfly_kit.chat.formats.base import (
    Format,
    Parsed,
    ReadCalls,
    TaggedFormat,
    check_call,
    compact_json,
    encoding_problem,
    is_cut,
    json_type,
    make_call,
    read_json,
    short_repr,
    split_thinking,
)
from agentfly_kit.types import Schemas, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HERMES_TAG = re.compile(r"<tool_call>|<think>|</think>")
_HERMES_SHAPE = f'{_OPEN}{{"name": ..., "arguments": {{...}}}}{_CLOSE}'

_LLAMA = re.compile(r'\s*+(?:<\|python_tag\|>\s*+)?(?=\{\s*+"(?:name|type)"\s*+:)')
_LLAMA_NEXT = re.compile(r'\s*+(?:;\s*+)?(?=\{\s*+"(?:name|type)"\s*+:)')
_LLAMA_SHAPE = '{"name": ..., "parameters": {...}}'
_LLAMA_TAG = "<|python_tag|>"

_MISTRAL = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_NAME = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+([A-Za-z0-9]++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
# Matches a prefix of `name[ARGS]`, for calls that were truncated before their arguments.
_MISTRAL_NAME_PREFIX = re.compile(r"[^\s\[\]{}\"]++(?:\[[A-Z_]*+\]?)?")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_DEEPSEEK = re.compile("<｜tool▁calls▁begin｜>(?:\\s*+<｜tool▁call▁begin｜>)?|<｜tool▁call▁begin｜>")
_DEEPSEEK_NAME = re.compile(r"\s*+([^\s<]++)\s*+<｜tool▁sep｜>")
_DEEPSEEK_FENCED_NAME = re.compile(r"\s*+function<｜tool▁sep｜>\s*+([^\s<]++)\s*+```(?:json)?+")
_DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>"
_DEEPSEEK_END = re.compile("\\s*+<｜tool▁calls▁end｜>")
_GPT_OSS_END = re.compile(r"<\|(?:start|end|call|return)\|>")
_GPT_OSS_TO = re.compile(r"(?<![^\s>])to=(?:functions\.)?([^\s<]++)")
_GPT_OSS_SHAPE = " to=functions.name<|channel|>commentary json<|message|>{...}"

_MISTRAL_SHAPE = '[TOOL_CALLS][{"name": ..., "arguments": {...}}]'


@dataclass(frozen=True)
class Hermes(Format):
    """Format of Qwen and Hermes models, in which each call is a JSON object in `<tool_call>` tags."""

    name = "hermes"
    native = True

    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        content: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        thought, complaint = False, ""
        at = 0
        while (tag := _HERMES_TAG.search(text, at)) is not None:
            before, kind = text[at : tag.start()], tag.group()
            at = tag.end()
            if kind == "</think>" and not thought:
                # `<think>` was part of the prompt, so all text before `</think>` is thinking.
                thinking, content, calls, thought = [text[: tag.start()]], [], [], True
                continue
            content.append(before)
            if kind == "<think>":
                thought = True
                end = text.find("</think>", at)
                # Truncated thinking extends to the end of the text, so calls inside it are not parsed.
                thinking.append(text[at:] if end < 0 else text[at:end])
                at = len(text) if end < 0 else end + len("</think>")
            elif kind == _OPEN:
                call, at = self._read(text, at, f"call-{len(calls)}")
                if call is None:
                    complaint = f"the tool call was not closed: write {_HERMES_SHAPE}"
                    break
                calls.append(call)
        content.append(text[at:])
        thoughts = "\n".join(part.strip() for part in thinking) if thought else None
        return Parsed("".join(content).strip(), tuple(calls), thoughts, complaint)

    @staticmethod
    def _read(text: str, start: int, id: str) -> tuple[ToolCall | None, int]:
        """Parse the call after a tag that ends at `start`. Return the call (None if unclosed) and its end position."""
        body, end, problem = read_json(text, start)
        # Search after the JSON value, so that a closing tag inside a string argument is ignored.
        close = text.find(_CLOSE, end)
        if close < 0:
            return None, len(text)
        if not problem and (rest := text[end:close].strip()):
            problem = f"has text after the JSON object: {short_repr(rest)}"
        name, arguments, problem = ("", {}, problem) if problem else check_call(body)
        call = make_call(id, name, arguments, problem, _HERMES_SHAPE, text[start:close].strip())
        return call, close + len(_CLOSE)

    def render_call(self, call: ToolCall) -> str:
        return f"{_OPEN}{compact_json({'name': call.name, 'arguments': call.arguments})}{_CLOSE}"


@dataclass(frozen=True)
class Llama3(Format):
    """Format of Llama 3, in which a call is a JSON object without tags: `{"name": ..., "parameters": {...}}`.

    An action may contain several calls, optionally separated by semicolons. JSON whose first key is neither "name" nor
    "type" is an answer. So is JSON after other text: the template asks for a reply that is a call, and it renders a
    message with a call without its text, so text before a call could not be part of the conversation.
    """

    name = "llama3"
    native = True

    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        unclosed = f"the tool call was not closed: write {_LLAMA_SHAPE}"
        thinking, text = (None, text) if _LLAMA.match(text) else split_thinking(text, -1)
        calls: list[ToolCall] = []
        at = 0
        found = _LLAMA.match(text)
        while found is not None:
            begin = found.end()
            body, at, problem = read_json(text, begin)
            if problem and is_cut(text, begin):
                return Parsed("", tuple(calls), thinking, unclosed)
            if problem:
                call, at = make_call(f"call-{len(calls)}", "", {}, problem, _LLAMA_SHAPE, text[begin:]), len(text)
            else:
                name, arguments, problem = check_call(body, ("parameters", "arguments"))
                call = make_call(f"call-{len(calls)}", name, arguments, problem, _LLAMA_SHAPE, text[begin:at])
            calls.append(call)
            found = _LLAMA_NEXT.match(text, at)
        if not calls and text.lstrip().startswith(_LLAMA_TAG):
            # The tag `<|python_tag|>` announces a call, but no valid call follows.
            raw = text.lstrip()[len(_LLAMA_TAG) :].strip()
            if not raw or (raw.startswith("{") and is_cut(raw, 0)):
                return Parsed("", (), thinking, unclosed)
            call = make_call("call-0", "", {}, "is not a JSON object with a name", _LLAMA_SHAPE, raw)
            return Parsed("", (call,), thinking)
        return Parsed(text[at:].strip(), tuple(calls), thinking)

    def render_call(self, call: ToolCall) -> str:
        """Render the call as Llama's template does, but without whitespace."""
        return compact_json({"name": call.name, "parameters": call.arguments})


@dataclass(frozen=True)
class Mistral(TaggedFormat):
    """Format of Mistral: `[TOOL_CALLS]` and a list of calls; in newer models, `[TOOL_CALLS]name[ARGS]{...}` per call.

    Call ids of nine letters or digits are kept, because the template accepts only such ids.
    """

    name = "mistral"
    native = True
    opening = _MISTRAL
    unclosed_error = f"the tool call was not closed: write {_MISTRAL_SHAPE}"

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        named = _MISTRAL_NAME.match(text, opened.end())
        start = named.end() if named else opened.end()
        body, end, problem = read_json(text, start)
        following = _MISTRAL.search(text, start)
        segment = text[start : following.start() if following else len(text)].strip()
        if problem:
            # If this is the last call, its JSON or its name may have been truncated.
            cut = not segment or (segment[0] in "[{" and is_cut(segment, 0))
            if following is None and (cut or (not named and _MISTRAL_NAME_PREFIX.fullmatch(segment))):
                return None
            end = following.start() if following else len(text)
        elif named:
            body = [{"name": named.group(1), "arguments": body, "id": named.group(2)}]
        elif isinstance(body, dict):
            body = [body]
        elif not isinstance(body, list):
            problem = f"must be a list of calls, got {json_type(body)}"
        elif not body:
            problem = "is an empty list"
        if problem:
            return [make_call(f"call-{len(made)}", "", {}, problem, _MISTRAL_SHAPE, segment)], end
        return [self._call(one, len(made) + i) for i, one in enumerate(body)], end

    @staticmethod
    def _call(body: Any, index: int) -> ToolCall:
        name, arguments, problem = check_call(body)
        id = body.get("id") if isinstance(body, dict) else None
        if not (isinstance(id, str) and _MISTRAL_ID.fullmatch(id)):
            id = f"call-{index}"
        raw = "" if encoding_problem(body) else compact_json(body)
        return make_call(id, name, arguments, problem, _MISTRAL_SHAPE, raw or short_repr(str(name)))

    def _separate(self, text: str, tools: Schemas) -> tuple[str, list[ToolCall], str]:
        content, calls, complaint = super()._separate(text, tools)
        seen: set[str] = set()
        for index, call in enumerate(calls):
            if call.id in seen:  # the model repeated an id
                calls[index] = replace(call, id=f"call-{index}")
            seen.add(call.id)
        return content, calls, complaint

    def render_call(self, call: ToolCall) -> str:
        """Render a list that contains only this call. The id is included if it has nine letters or digits."""
        body: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
        if _MISTRAL_ID.fullmatch(call.id):
            body["id"] = call.id
        return f"[TOOL_CALLS][{compact_json(body)}]"


@dataclass(frozen=True)
class DeepSeek(TaggedFormat):
    """Format of DeepSeek: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...`.

    Args:
        name: Name of the format.
        fenced: True for V3 and R1, which write `function` before the separator, and the name and a fenced block of JSON
            after it. False for V3.1 and later models.
    """

    name: str
    fenced: bool

    native = True
    opening = _DEEPSEEK

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "unclosed_error", f"the tool call was not closed: write {self._write('name', '{...}')}"
        )

    def read_calls(self, text: str, opened: re.Match[str], made: Sequence[ToolCall], tools: Schemas) -> ReadCalls:
        named = (_DEEPSEEK_FENCED_NAME if self.fenced else _DEEPSEEK_NAME).match(text, opened.end())
        start = named.end() if named else opened.end()
        body, end, problem = (
            read_json(text, start) if named else (None, start, "does not begin with a name and a separator")
        )
        # Search after the JSON value, so that a closing tag inside a string argument is ignored.
        close = text.find(_DEEPSEEK_CLOSE, end)
        if close < 0:
            return None
        rest = text[end:close].strip()
        if not problem and rest != "```" * self.fenced:
            problem = f"has text after the JSON object: {short_repr(rest)}"
        name = named.group(1) if named else ""
        name, arguments, wrong = check_call({"name": name, "arguments": body})
        shape, raw = self._write("name", "{...}"), text[opened.end() : close].strip()
        call = make_call(f"call-{len(made)}", name, arguments, problem or wrong, shape, raw)
        last = _DEEPSEEK_END.match(text, close + len(_DEEPSEEK_CLOSE))
        return [call], last.end() if last else close + len(_DEEPSEEK_CLOSE)

    def render_call(self, call: ToolCall) -> str:
        return self._write(call.name, compact_json(call.arguments))

    def _write(self, name: str, arguments: str) -> str:
        inner = (
            f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            if self.fenced
            else f"{name}<｜tool▁sep｜>{arguments}"
        )
        return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}{_DEEPSEEK_CLOSE}<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class GptOss(Format):
    """Format of gpt-oss, in which an action consists of messages of the form `header<|message|>text`.

    A header with a recipient marks a tool call. Text in the "analysis" channel is thinking; any other text is content.
    """

    name = "gpt_oss"
    native = True

    def parse(self, text: str, tools: Schemas = ()) -> Parsed:
        content: list[str] = []
        thinking: list[str] = []
        calls: list[ToolCall] = []
        complaint = ""
        for message in _GPT_OSS_END.split(text):
            header, mark, body = message.partition("<|message|>")
            to = _GPT_OSS_TO.search(header)
            if to and (not mark or (read_json(body, 0)[2] and is_cut(body, 0))):
                complaint = f"the tool call was not closed: write {_GPT_OSS_SHAPE}"
                break
            if to:
                arguments, end, problem = read_json(body, 0)
                if not problem and (rest := body[end:].strip()):
                    problem = f"has text after the JSON object: {short_repr(rest)}"
                name, arguments, wrong = check_call({"name": to.group(1), "arguments": arguments})
                problem = problem or wrong
                calls.append(make_call(f"call-{len(calls)}", name, arguments, problem, _GPT_OSS_SHAPE, body.strip()))
            elif mark:
                (thinking if "<|channel|>analysis" in header else content).append(body.strip())
            elif "<|channel|>" not in message:  # text without a header; a lone "assistant" is an incomplete header
                content.append(message.removeprefix("assistant").strip())
        thoughts = "\n".join(thinking) if thinking else None
        return Parsed("\n".join(filter(None, content)), tuple(calls), thoughts, complaint)

    def render_call(self, call: ToolCall) -> str:
        """Render the call as the chat template does, but without whitespace in the JSON."""
        return f" to=functions.{call.name}<|channel|>commentary json<|message|>{compact_json(call.arguments)}<|call|>"
