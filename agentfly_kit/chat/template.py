"""Analysis of chat templates, including a check that appended messages never change earlier text.

All properties are determined by rendering probe messages with marker strings, never by reading the source of the
template.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentfly_kit.errors import ChatTemplateError
from agentfly_kit.types import Message, Schemas

# Role of messages that follow an action: "tool" for tool results, "user" for user messages.
FollowingRole = Literal["tool", "user"]

_USER: Message = {"role": "user", "content": "?"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe0", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
# Variants of tool calls that templates accept: content "" or None, and arguments as an object or as JSON text.
_CALL_SHAPES: tuple[dict[str, Any], ...] = tuple(
    {"content": content, "json": as_json} for as_json in (False, True) for content in ("", None)
)
# Places where templates expect the thinking of an assistant message: one of its keys, or tags in its text.
_THINKING = ("reasoning_content", "thinking", "reasoning", "tags")


class Template:
    """Chat template of a tokenizer, with template variables (`options`) and a pattern for control tokens."""

    # `ImageReader.to_parts` if the chat reads images, otherwise None.
    to_parts: Callable[[str], Any] | None = None

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], controls: re.Pattern[str]) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options)
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._control = controls
        self._short_ids = False
        self._closings: dict[str, str] = {}
        self._violations: dict[FollowingRole, str] = {}
        self._visible: set[str] = set()
        # True if the content must be a list of parts, as for vision models.
        self.parts = False
        self.parts = self._wants_parts()
        self.answer_tail = self._answer_tail()
        # Entry of `_CALL_SHAPES` that the template accepts, or None if it does not accept tool calls.
        self.calls: dict[str, Any] | None = None
        self.calls = next(filter(self._takes_calls, _CALL_SHAPES), None)
        # Role with which tool results are rendered; "user" if the template has no role for them.
        self.tool_role: Literal["tool", "user"] = "user"
        with contextlib.suppress(ChatTemplateError):
            if "qztoolzq" in self.text_after_action([_tool_result("qztoolzq")]):
                self.tool_role = "tool"
        # Message key in which the template expects thinking, or "tags" if it expects tags in the content or does not
        # render thinking.
        self.thinking: str = next(filter(self._takes_thinking, _THINKING), "tags")

    # --- rendering ---

    def render(self, messages: Sequence[Message], tools: Schemas = (), *, generate: bool) -> str:
        """Render messages, with the generation prompt if `generate` is True. Errors are raised as ChatTemplateError."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [self._message(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self.options,
                )
            )
        except Exception as error:
            if not self._short_ids and any("tool_call_id" in m or "tool_calls" in m for m in messages):
                # Mistral templates require ids of nine letters or digits, so retry with shortened ids.
                self._short_ids = True
                try:
                    return self.render(messages, tools, generate=generate)
                except ChatTemplateError:
                    self._short_ids = False
                    raise
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ChatTemplateError(
                f"the chat template of {self.name} rejected messages with the roles ({roles}): {error}; "
                "remove the unsupported role, or set tokenizer.chat_template to another template"
            ) from error

    def _message(self, message: Message) -> Message:
        """Return a copy of a message in the form that the template expects."""
        out = dict(message)
        if isinstance(out.get("thinking"), str):
            out.setdefault("reasoning_content", out["thinking"])
        if self.to_parts is not None and isinstance(out.get("content"), str):
            out["content"] = self.to_parts(out["content"])
        if self.parts and isinstance(out.get("content"), str):
            out["content"] = [{"type": "text", "text": out["content"]}]
        if self._short_ids and "tool_call_id" in out:
            out["tool_call_id"] = _short_id(str(out["tool_call_id"]))
        if out.get("tool_calls"):
            out["tool_calls"] = [self._adapt_call(call) for call in out["tool_calls"]]
            if self.calls is not None and self.calls["content"] is None:
                out["content"] = None
        return out

    def _adapt_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.calls is not None and self.calls["json"]:
            function["arguments"] = json.dumps(function["arguments"])
        return {**call, "id": _short_id(call["id"]) if self._short_ids else call["id"], "function": function}

    def _probe(self, *messages: Message, tools: Schemas = (), generate: bool = False) -> str:
        """Render messages, or return "" if the template rejects them."""
        try:
            return self.render(messages, tools, generate=generate)
        except ChatTemplateError:
            return ""

    # --- accepted input ---

    def _wants_parts(self) -> bool:
        if "qzplainzq" in self._probe({"role": "user", "content": "qzplainzq"}):
            return False
        return "qzplainzq" in self._probe({"role": "user", "content": [{"type": "text", "text": "qzplainzq"}]})

    def _answer_tail(self) -> str:
        """Return the text that the template adds after an answer at the end of a conversation."""
        text = self.render([_USER, {"role": "assistant", "content": "qzanswerzq"}], generate=False)
        _, mark, tail = text.rpartition("qzanswerzq")
        if not mark:
            raise ChatTemplateError(
                f"the chat template of {self.name} does not render the text of assistant messages; "
                "set tokenizer.chat_template to another template"
            )
        return tail

    def _takes_calls(self, shape: dict[str, Any]) -> bool:
        self.calls = shape
        action = self._call_message([{"name": "qznamezq", "tool_call_id": "call-0"}], {"x": "qzcallzq"})
        text = self._probe(_USER, action)
        return "qzcallzq" in text and "qznamezq" in text and "{'" not in text  # not a Python repr of the call

    def _call_message(
        self, results: Sequence[Message], arguments: Mapping[str, Any], thought: str | None = None
    ) -> Message:
        """Return an assistant message with a matching call for each tool result, all with the same arguments."""
        calls = [
            {
                "id": result.get("tool_call_id", f"call-{i}"),
                "type": "function",
                "function": {"name": result.get("name") or "tool", "arguments": dict(arguments)},
            }
            for i, result in enumerate(results)
        ]
        return {**self._answer_message("", thought), "tool_calls": calls}

    def _answer_message(self, content: str, thought: str | None = None) -> Message:
        message: Message = {"role": "assistant", "content": content}
        if thought is None:
            return message
        if self.thinking == "tags":
            return {**message, "content": f"<think>\n{thought}\n</think>\n\n{content}"}
        return {**message, self.thinking: thought}

    def _takes_thinking(self, key: str) -> bool:
        self.thinking = key
        actions = [self._answer_message("qzanswerzq", "qzthinkzq")]
        if self.calls is not None and key != "tags":
            actions.append(self._call_message([_tool_result("")], {"x": "qzcallzq"}, "qzthinkzq"))
        return any("qzthinkzq" in self._probe(_USER, action) for action in actions)

    def takes_system(self) -> bool:
        """Return True if the template renders system messages."""
        return "qzplainzq" in self._probe({"role": "system", "content": "qzplainzq"}, _USER, generate=True)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """True if the template renders tool schemas."""
        return self._probe(_USER, tools=[_TOOL], generate=True) != self._probe(_USER, generate=True)

    def require_visible(
        self, messages: Sequence[Message], tools: Schemas, *, after_action: bool, answers: bool
    ) -> None:
        """Raise ChatTemplateError if a message is dropped, repeated or moved. Answers are exempt if answers=False."""
        # Replace contents and arguments with markers, so that the rendered text can be searched and the result cached.
        ids: dict[Any, str] = {}
        marked: list[Message] = []
        for i, message in enumerate(messages):
            calls = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"x": f"qzcall{i}zq"}}}
                for call in message.get("tool_calls") or ()
            ]
            for call in calls:
                call["id"] = ids.setdefault(call["id"], f"call-{len(ids)}")
            one = {"role": message["role"], "content": f"qzmessage{i}zq" if message["content"] else ""}
            one |= {"name": message["name"]} if "name" in message else {}
            if "tool_call_id" in message:
                one["tool_call_id"] = ids.setdefault(message["tool_call_id"], f"call-{len(ids)}")
            marked.append({**one, "tool_calls": calls} if calls else one)
        key = f"{after_action} {answers} {marked} {[tool.get('function', tool).get('name') for tool in tools]}"
        if key in self._visible:
            return
        # Each marker must occur exactly once, after the previous one.
        render = self.text_after_action if after_action else functools.partial(self.render, generate=True)
        text = render(marked, tools)
        last = -1
        for i, message in enumerate(marked):
            wrong, mark, role = "", f"qzmessage{i}zq", message["role"]
            if "tool_calls" in message and f"qzcall{i}zq" not in text:
                wrong = "drops the tool calls of"
            elif message["content"] and (role != "assistant" or answers):
                at, count = text.find(mark), text.count(mark)
                wrong = "drops" if not count else "repeats" if count > 1 else "moves" if at < last else ""
                last = at
            if wrong:
                raise ChatTemplateError(
                    f"the chat template of {self.name} {wrong} a message with the role {role!r}; put its text into a "
                    "user message, or set tokenizer.chat_template to another template"
                )
        self._visible.add(key)

    @functools.cached_property
    def takes_lone_results(self) -> bool:
        """True if the template renders tool results without a call, such as those of calls that could not be parsed."""
        return "qztoolzq" in self._probe(_USER, self._answer_message("?"), _tool_result("qztoolzq"))

    def pair_results(self, messages: Sequence[Message]) -> list[Message]:
        """Split messages with several calls, and convert results without a call to user messages, if necessary."""
        out: list[Message] = []
        calls: dict[Any, Any] = {}
        for message in messages:
            if message["role"] == "assistant":
                calls = {call["id"]: call for call in message.get("tool_calls") or ()}
                if len(calls) > 1 and not self.takes_two_calls:
                    message = {**message, "tool_calls": [next(iter(calls.values()))]}
            elif message["role"] == "tool" and calls and not self.takes_two_calls and out[-1]["role"] == "tool":
                called = [call for id, call in calls.items() if id == message.get("tool_call_id")]
                out += [{**self._answer_message(""), "tool_calls": called}] if called else []
            if message["role"] == "tool" and message.get("tool_call_id") not in calls and not self.takes_lone_results:
                message = {"role": "user", "content": message["content"]}
            out.append(message)
        return out

    # --- text after an action ---

    def text_after_action(self, following: Sequence[Message], tools: Schemas = ()) -> str:
        """Return the text from the end of an action to the start of the next one, including the messages `following`.

        The text starts with the template's end-of-turn text. Many templates look up the call that belongs to a tool
        result, so the rendered action contains matching calls, or plain text if the template does not accept calls.
        """
        mark = unused_marker("qzsaidzq", following)
        results = list(itertools.takewhile(lambda message: message.get("role") == "tool", following))
        actions: list[tuple[Message, str]] = []
        if results and self.calls is not None:
            for called in (results, results[:1]):  # some templates accept only one call per message
                action = self._call_message(called, {"x": mark})
                closing = self._call_closing(action, mark, tools)
                if closing is not None:
                    actions.append((action, closing))
        actions.append((self._answer_message(mark), ""))
        problem = ChatTemplateError(
            f"the chat template of {self.name} drops or changes an earlier assistant message when others follow it, "
            "so tokens cannot be appended exactly; use a template that keeps history unchanged"
        )
        for message, closing in actions:
            try:
                text = self.render([_USER, message, *following], tools, generate=True)
            except ChatTemplateError as error:
                problem = error
                continue
            tail = text.rpartition(mark)[2]
            if mark in text and tail.startswith(closing):
                return tail[len(closing) :]
        raise problem

    def _call_closing(self, action: Message, mark: str, tools: Schemas) -> str | None:
        """Return the text between a call's last argument and the end of the turn, or None if the call is rejected."""
        key = json.dumps([action, [t.get("function", {}).get("name") for t in tools]], default=str).replace(mark, "")
        if key not in self._closings:
            text = self._probe(_USER, action, tools=tools)
            tail = text.rpartition(mark)[2]
            if mark not in text:
                return None
            # Remove the end of the turn, either the text that also ends answers or a control token such as `<|call|>`.
            if self.answer_tail and tail.endswith(self.answer_tail):
                tail = tail[: -len(self.answer_tail)]
            elif found := list(self._control.finditer(tail)):
                last = found[-1]
                if not last.group().startswith("</") and not tail[last.end() :].strip():
                    tail = tail[: last.start()]
            self._closings[key] = tail
        return self._closings[key]

    # --- check that appending is exact ---

    def append_violation(self, kind: FollowingRole) -> str:
        """Return the reason why messages of this kind cannot be appended without changing earlier text, or "" if they
        can be.

        The check extends conversations step by step to up to four actions: with one and two tool results, with and
        without a system message and tool schemas, with and without thinking (if the generation prompt allows both), and
        with user messages between tool calls. The text rendered in each step must start with the text of the previous
        step and end with `text_after_action` of the added messages, so that the text sent to an engine equals the
        rendering of the whole conversation. The result is cached for each kind.
        """
        if kind not in self._violations:
            reasons = [self._find_violation(kind, mode) for mode in self.modes]
            if not reasons:
                prompt = self.render([_USER], generate=True)
                reasons = [
                    f"rendered assistant messages do not begin with the generation prompt {prompt[-40:]!r}, so the "
                    "sampled tokens would differ from the rendered history"
                ]
            self._violations[kind] = next(filter(None, reasons), "")
        return self._violations[kind]

    @functools.cached_property
    def modes(self) -> tuple[str | None, ...]:
        """Kinds of answers that the generation prompt allows: None without thinking, a marker with thinking."""
        prompt = self.render([_USER], generate=True)
        modes = (None, "qzthinkzq")
        return tuple(m for m in modes if self._probe(_USER, self._answer_message("qzanswerzq", m)).startswith(prompt))

    def thinking_kept(self) -> str:
        """Return how earlier thinking is treated: "kept", "kept until a user speaks", "dropped" or "unknown"."""
        if "qzthinkzq" not in self.modes:
            return "unknown"
        if not self._find_violation("user", "qzthinkzq"):
            return "kept"
        tool = self.tool_role == "tool" and not self._find_violation("tool", "qzthinkzq")
        return "kept until a user speaks" if tool else "dropped"

    def _find_violation(self, kind: FollowingRole, thought: str | None) -> str:
        if self.tool_role == "user":
            return self._grow_plans("uuu", thought)
        if kind == "tool":
            return self._grow_plans("1211" if self.takes_two_calls else "1111", thought)
        mixed = not self._find_violation("tool", thought)
        return self._grow_plans("uuu", thought) or (self._grow_plans("1u1u", thought) if mixed else "")

    @functools.cached_property
    def takes_two_calls(self) -> bool:
        """True if the template renders the results of two tool calls made in one message."""
        results = [_tool_result("qztold0zq", 0), _tool_result("qztold1zq", 1)]
        action = self._call_message(results, {"x": "qzsaidzq"}) if self.calls else self._answer_message("qzsaidzq")
        text = self._probe(_USER, action, *results, generate=True)
        return "qztold0zq" in text and "qztold1zq" in text

    def _grow_plans(self, plan: str, thought: str | None) -> str:
        """Return the first violation or "". `plan` lists the number of results after each action, or "u" for a user."""
        tools = [_TOOL] if self._probe(_USER, tools=[_TOOL], generate=True) else []
        system: list[Message] = [{"role": "system", "content": "?"}] if self.takes_system() else []
        return self._grow([_USER], [], plan, thought) or self._grow([*system, _USER], tools, plan, thought)

    def _grow(self, messages: list[Message], tools: Schemas, plan: str, thought: str | None) -> str:
        try:
            before = self.render(messages, tools, generate=True)
            for i, step in enumerate(plan):
                mark, thinking = f"qzact{i}zq", f"{thought}{i}" if thought else None
                if step == "u":
                    following: list[Message] = [{"role": "user", "content": f"qztold{i}zq"}]
                    message = self._answer_message(mark, thinking)
                else:
                    following = [_tool_result(f"qztold{i}n{n}zq", n) for n in range(int(step))]
                    # Thinking in tags belongs to the content, so the action must be plain text instead of a call.
                    plain = self.calls is None or (thinking and self.thinking == "tags")
                    message = (
                        self._answer_message(mark, thinking)
                        if plain
                        else self._call_message(following, {"x": mark}, thinking)
                    )
                messages += [message, *following]
                whole = self.render(messages, tools, generate=True)
                added = self.text_after_action(following, tools)
                if not whole.startswith(before):
                    return _rewrite_reason(before, whole, thought, i)
                if not whole.endswith(added):
                    return f"the text after an action is rendered differently later on: {added[:60]!r} changed"
                action = whole[len(before) : len(whole) - len(added)]
                if thinking and thinking not in action:
                    return "it drops the thinking of an assistant message when another message follows"
                if mark not in action or (step == "u" and not action.endswith(mark)):
                    return f"it renders an answer differently when another message follows: {action[-60:]!r}"
                before = whole
        except ChatTemplateError as error:
            return str(error)
        return ""

    # --- start and end of an action ---

    def stops(self) -> tuple[str, ...]:
        """Return the control token that ends answers and, if different, the one that ends calls.

        In a template without an end-of-turn token, the tag of the next role ends the action. Tokens that also occur
        inside an action, for example between thinking and answer, are excluded.
        """
        tails = [self.answer_tail]
        for following in ({"role": "user", "content": "?"}, _tool_result("?")):
            if following["role"] == "user" and self._control.match(self.answer_tail):
                continue
            try:
                tails.append(self.text_after_action([following]))
            except ChatTemplateError:
                continue
        inside = ""
        if "qzthinkzq" in self.modes:
            text = self._probe(_USER, self._answer_message("qzanswerzq", "qzthinkzq"))
            inside = text.partition("qzthinkzq")[2].partition("qzanswerzq")[0]
        found = (self._control.match(tail) for tail in tails)
        return tuple(dict.fromkeys(m.group() for m in found if m and m.group() not in inside))

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call as rendered by the template, without the stop token, or "" if calls are not supported."""
        if self.calls is None:
            return ""
        action = self._call_message([{"name": name, "tool_call_id": "call-0"}], arguments)
        text, prompt = self._probe(_USER, action), self.render([_USER], generate=True)
        text = text[common_prefix_length(prompt, text) :]
        return next(
            (text.removesuffix(end) for end in (self.answer_tail, *self.stops()) if end and text.endswith(end)), text
        )

    def whitespace_kept(self) -> bool:
        """Return True if whitespace around an answer is kept in rendered history."""
        return " qzanswerzq \n" in self._probe(_USER, self._answer_message(" qzanswerzq \n"))

    def opening(self) -> str:
        """Return the generation prompt, the text that the template adds before an action."""
        prompt, plain = self.render([_USER], generate=True), self.render([_USER], generate=False)
        same = common_prefix_length(prompt, plain)
        inside = [m.start() for m in self._control.finditer(prompt) if m.start() < same < m.end()]
        return prompt[inside[0] if inside else same :]


def _tool_result(text: str, n: int = 0) -> Message:
    return {"role": "tool", "name": f"probe{n}", "tool_call_id": f"call-{n}", "content": text}


def unused_marker(mark: str, messages: Sequence[Message]) -> str:
    """Return the marker, extended by letters until no message contains it."""
    held = repr(list(messages))
    while mark in held:
        mark += "q"
    return mark


def _short_id(id: str) -> str:
    """Convert an id to nine letters or digits. Valid ids are unchanged."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", id):
        return id
    if re.fullmatch(r"call-\d{1,5}", id):
        return f"call{int(id[5:]):05d}"
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def _rewrite_reason(before: str, whole: str, thought: str | None, step: int) -> str:
    at = common_prefix_length(before, whole)
    was, now = before[max(0, at - 20) : at + 30], whole[max(0, at - 20) : at + 30]
    gone = bool(thought) and any(f"{thought}{i}" in before and f"{thought}{i}" not in whole for i in range(step + 1))
    why = (
        "it drops the thinking of an earlier answer"
        if gone
        else "it renders history differently when messages follow"
    )
    return f"{why}: {was!r} became {now!r}"


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two strings or lists."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
