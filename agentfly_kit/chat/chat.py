"""Messages to token ids and back, by the tokenizer's own chat template; history is never encoded twice.

Knows no models, no engines and no tools beyond their schemas. A prompt is rendered once. Everything later is appended:
`observation_ids` gives the ids between the last sampled token and the next thing to sample, and `parse` reads an action
without
touching its ids. That appending gives what the template would write for the whole conversation is proved for each
template before it is relied on (`template.py`), or refused by name.
"""

from __future__ import annotations

import functools
import html
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from agentfly_kit.chat import drift as drifting
from agentfly_kit.chat import formats
from agentfly_kit.chat.drift import Drift
from agentfly_kit.chat.template import FollowingRole, Template
from agentfly_kit.errors import ChatTemplateError, SettingsError
from agentfly_kit.types import Message, Row, Trajectory

__all__ = ["Chat", "ChatReport", "Drift", "check"]

History: TypeAlias = Literal["exact", "append", "rerender"]

_CACHE_SIZE = 1024
"""Encoded texts that are remembered: the chains of a group all begin with the same prompt."""


class Chat:
    """A tokenizer with its chat template, and the format in which this model writes tool calls.

    format: its name, a `formats.Format`, or "auto": the one that reads back a call as the template writes it, else
        hermes.
    history: what happens where the template would write history otherwise once more follows (without earlier thinking,
        most often). "exact" refuses it by name. "append" appends as is: the model is given a history that its template
        would not have written. "rerender" gives it what the template writes: the whole history, rendered anew, begins
        another row (`trajectory.rows`), in which what was sampled before stands with mask 0. All three train exactly
        what was sampled, after exactly what it was sampled from.
    stop: further texts, each one token, that end an action: what a generation config adds to the tokenizer's own.
    options: variables for the template, such as {"enable_thinking": False}.
    Raises:  ChatTemplateError if there is no template, or if it does not write what an assistant said.
    """

    _open_tag = ""
    """The thinking tag in which the template's prompt ends, if it does."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: str | formats.Format = "auto",
        history: History = "exact",
        stop: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "set tokenizer.chat_template, or load the tokenizer of an instruction-tuned model"
            )
        if history not in get_args(History):
            raise SettingsError(f'history={history!r}: give "exact", "append" or "rerender"')
        self.tokenizer = tokenizer
        self.history = history
        # A control token: a special one, or an added one that this template writes. Text from outside never makes one.
        added = {str(t) for t in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        texts = {t for t in added if t.strip() and t in str(source)} | {t for t in tokenizer.all_special_tokens if t}
        self._controls = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
        self.template = Template(tokenizer, options or {}, sorted(texts))
        self.detected_format = (
            formats.detect_format(self.template.written_call) if self.template.calls is not None else None
        )
        """The format that reads back a call as this template writes it; None if no format does."""
        if format == "auto":
            self.format = self.detected_format or formats.get("hermes")
        else:
            self.format = formats.get(format)
        self._calls_unreadable = self.format.native and self.template.calls is not None and self.detected_format is None
        opening = self.template.opening()
        self._open_tag = "<think>" if opening.rfind("<think>") > opening.rfind("</think>") else ""
        self._shows_tools: dict[int, bool] = {}
        self._token_text_cache: dict[int, str] = {}
        self._encode_cache: dict[str, tuple[int, ...]] = {}
        self._text_cache: dict[tuple[int, ...], str] = {}
        self._render_cache: dict[str, tuple[int, ...]] = {}
        self.stop_ids: tuple[int, ...] = self._stop_ids(stop)
        """Ids that end an action: the template's own ends of turn, the tokenizer's eos, and `stop`."""

    # --- text and ids ---

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text as it stands: special tokens in it are read, none is added."""
        known = self._encode_cache.get(text)
        if known is None:
            if not text.isascii():
                self._check_encodable(text)
            known = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(self._encode_cache) >= _CACHE_SIZE:
                self._encode_cache.clear()
            self._encode_cache[text] = known
        return known

    @staticmethod
    def _check_encodable(text: str) -> None:
        """A tokenizer's own word for it is a bare TypeError."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = ascii(text[max(0, error.start - 20) : error.start + 20])
            raise SettingsError(
                f"a message holds half of a surrogate pair, near {near}, and no tokenizer encodes it; give "
                "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            ) from None

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. A view: it is never encoded again."""
        key = tuple(ids)  # the chains of a group say the same things
        known = self._text_cache.get(key)
        if known is not None:
            return known
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:  # the same, at half the cost
            text = str(backend.decode(list(ids), skip_special_tokens=False))
        else:
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if len(self._text_cache) >= _CACHE_SIZE:
            self._text_cache.clear()
        self._text_cache[key] = text
        return text

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each id alone; bytes that are no text by themselves appear as <0xE2>."""
        found = tuple(map(self._token_text_cache.get, ids))
        if None in found:
            found = tuple(self._token_text_cache.get(i) or self._token_text(i) for i in ids)
        return cast("tuple[str, ...]", found)

    def _token_text(self, token: int) -> str:
        text = self.text([token])
        if "�" in text or not text:
            raw = self.tokenizer.convert_ids_to_tokens(token)
            text = raw if isinstance(raw, str) else f"[{token}]"
        self._token_text_cache[token] = text
        return text

    # --- messages to ids ---

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generate: bool) -> str:
        """The template's text. Raises ChatTemplateError with the template's own complaint."""
        return self.template.render(self._adapt_messages(messages), tools, generate=generate)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of the opening messages and tool schemas, ending where the assistant begins to write.

        Where the template shows no tools, or shows them in another format than this chat's, the format's own
        instructions open the system message.
        Raises:  ChatTemplateError if there are tools, and their results cannot be appended exactly.
        """
        if tools:
            self._require_append("tool")
            if self._calls_unreadable and self._visible_tools(tools):
                warnings.warn(
                    f"no format reads the calls that the chat template of {self.template.name} teaches: as "
                    f"{self.format.name} they are taken for answers; give format= your own formats.Format",
                    stacklevel=3,
                )
        adapted = self._adapt_messages(messages)
        if tools and not self._visible_tools(tools):
            adapted = self._with_instructions(adapted, tools)
        shown = self._visible_tools(tools)
        render = functools.partial(self.template.render, tools=shown, generate=True)
        return self._cached("prompt", adapted, shown, lambda: self._encode_safely(adapted, render))

    def observation_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, after: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Ids to append after an action so that `messages` (tool results, a user) are told and the assistant goes on.

        after: the action's ids. If they end with the end of turn that the template writes, it is not written again; an
            action that was cut, or ended with another token, gets it here, where it has mask 0.
        Raises:  ChatTemplateError if the template writes history otherwise once such messages follow, and this chat
            was not told to append as is.
        """
        if not messages:
            raise SettingsError("observation_ids was given no messages; give what is told before the assistant goes on")
        kinds: dict[FollowingRole, None] = {"tool" if m.get("role") == "tool" else "user": None for m in messages}
        for kind in kinds:
            self._require_append(kind)
        adapted, shown = self._adapt_messages(messages), self._visible_tools(tools)
        render = functools.partial(self.template.text_after_action, tools=shown)
        ids = self._cached("observation", adapted, shown, lambda: self._encode_safely(adapted, render))
        for count in range(min(len(after), len(ids), 4), 0, -1):
            if ids[count - 1] in self.stop_ids and tuple(after[-count:]) == ids[:count]:
                return ids[count:]
        return ids

    def append_violation(self, following: FollowingRole) -> str:
        """ "" if a conversation grows by appending alone when "tool" results or "user" messages follow, or why not."""
        kind = "user" if following == "tool" and self._results_as_user else following
        return self.template.append_violation(kind)

    def needs_rerender(self, messages: Sequence[Message]) -> bool:
        """Whether the history is to be rendered anew before `messages` are told: only under history="rerender", and
        only where the template does not prove that they can be appended."""
        if self.history != "rerender":
            return False
        kinds: set[FollowingRole] = {"tool" if m.get("role") == "tool" else "user" for m in messages}
        return any(self.append_violation(kind) for kind in kinds)

    def _require_append(self, following: FollowingRole) -> None:
        if self.history != "exact":
            return
        if reason := self.append_violation(following):
            what = "tool results" if following == "tool" else "a user's message after an answer"
            raise ChatTemplateError(
                f"the chat template of {self.template.name} cannot take {what} by appending: {reason}. Choose "
                'Chat(tokenizer, history="append"), which appends as is and never renders again, history="rerender", '
                "which begins a row of its own with the history as the template writes it, or set "
                "tokenizer.chat_template to one that keeps history"
            )

    @property
    def _results_as_user(self) -> bool:
        """Whether tool results are told as a user's message."""
        return not self.format.native or self.template.tool_role == "user"

    def _adapt_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as this template and format take them: tool results that follow one another may be one user's."""
        if not self._results_as_user:
            return list(messages)
        adapted: list[Message] = []
        merging = False
        for message in messages:
            if message.get("role") != "tool":
                adapted.append(message)
                merging = False
                continue
            text = self.format.observation(str(message.get("name") or ""), str(message.get("content") or ""))
            if merging:
                adapted[-1] = {**adapted[-1], "content": f"{adapted[-1]['content']}\n{text}"}
            else:
                adapted.append({"role": "user", "content": text})
            merging = True
        return adapted

    def _visible_tools(self, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The schemas that the template is given: none where it would not show them, or in another format."""
        if not tools or not self.format.native:
            return ()
        key = hash(tuple(str(t.get("function", t).get("name")) for t in tools))
        if key not in self._shows_tools:
            self._shows_tools[key] = self.template.shows(tools)
        return tools if self._shows_tools[key] else ()

    def _with_instructions(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        """The messages with the format's instructions in the system message, or in the first one."""
        text = self.format.instructions(tools)
        out = list(messages)
        if out and out[0].get("role") != "system" and self.template.takes_system():
            return [{"role": "system", "content": text}, *out]
        first = out[0]
        content = first.get("content")
        joined: Any = f"{content}\n\n{text}" if first.get("role") == "system" else f"{text}\n\n{content}"
        if not isinstance(content, str):
            joined = [{"type": "text", "text": text + "\n\n"}, *(content or [])]
        return [{**first, "content": joined}, *out[1:]]

    def _cached(
        self, what: str, messages: Sequence[Message], shown: Any, make: Callable[[], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """What `make` gives. The chains of a group tell the same things, and a template takes long to render."""
        key = f"{what} {list(messages)!r} {shown!r}"
        known = self._render_cache.get(key)
        if known is None:
            known = make()
            if len(self._render_cache) >= _CACHE_SIZE:
                self._render_cache.clear()
            self._render_cache[key] = known
        return known

    def _encode_safely(self, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> tuple[int, ...]:
        """Encode a rendered text so that what tools and users say cannot write a control token: <|im_end|> in a tool's
        output is letters. All other text is encoded as the tokenizer encodes it."""
        controls: dict[str, str] = {}
        said = repr(list(messages))

        def replace_control(match: re.Match[str]) -> str:
            mark = f"qzcontrol{len(controls)}zq"
            while mark in said:
                mark += "q"
            controls[mark] = match.group()
            return mark

        plain: list[Message] = []
        for message in messages:
            if message.get("role") in ("user", "tool"):
                content = message.get("content")
                if isinstance(content, str):
                    message = {**message, "content": self._controls.sub(replace_control, content)}
                elif isinstance(content, list):
                    parts = [
                        {**p, "text": self._controls.sub(replace_control, p["text"])}
                        if isinstance(p, dict) and isinstance(p.get("text"), str)
                        else p
                        for p in content
                    ]
                    message = {**message, "content": parts}
            plain.append(message)
        text = render(plain)
        if not controls:
            return self.encode(text)
        # Each control text is cut after its first letter, and the halves are encoded with what stands beside them.
        # The later halves are encoded behind a control token: some tokenizers put a blank before a text's first word.
        anchor = self.token_texts(self.stop_ids[:1])[0]
        ids: list[int] = []
        rest = ""
        for part in re.split("(" + "|".join(sorted(map(re.escape, controls), key=len, reverse=True)) + ")", text):
            if part in controls:
                ids.extend(self._encode_after(anchor if ids else "", rest + controls[part][:1]))
                rest = controls[part][1:]
            else:
                rest += part
        return (*ids, *self._encode_after(anchor if ids else "", rest))

    def _encode_after(self, anchor: str, text: str) -> tuple[int, ...]:
        """Ids of a text that does not stand at the beginning."""
        return self.encode(anchor + text)[len(self.encode(anchor)) :] if anchor else self.encode(text)

    def _stop_ids(self, more: Sequence[str]) -> tuple[int, ...]:
        stops: list[int] = []
        for text in (*self.template.stops(), *((more,) if isinstance(more, str) else more)):
            ids = self.encode(text)
            if len(ids) != 1:
                raise SettingsError(
                    f"stop={text!r} is {len(ids)} tokens of {self.template.name}; give texts of one token"
                )
            stops.append(ids[0])
        if (eos := self.tokenizer.eos_token_id) is not None:
            stops.append(int(eos))
        if not stops:
            raise ChatTemplateError(
                f"{self.template.name}: neither its template nor its tokenizer says which token ends a turn; set "
                "tokenizer.eos_token"
            )
        return tuple(dict.fromkeys(stops))

    # --- ids to messages ---

    def parse(self, ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> formats.Parsed:
        """What an action says: answer, thinking, tool calls. The ids stay as they are.

        Where the prompt ends inside a thinking tag, the action begins there: if it is cut before the tag is closed, all
        of it was thought, and nothing in it is a call.
        """
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.read(self.text(ids), tools)

    def read(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> formats.Parsed:
        """What an action's text says, without the token that ended it."""
        return self.format.parse(self._open_tag + text, tools)

    # --- what encoding again would give ---

    def drift(self, trajectory: Trajectory | Row) -> Drift:
        """Where the row would differ if its messages were rendered and encoded again, and why.

        Raises:  AlignmentError for a trajectory of several rows; give one of them: `trajectory.rows[0]`.
        """
        row = trajectory if isinstance(trajectory, Row) else trajectory._only_row("turns")
        turns = [(turn.kind, len(turn.ids or ())) for turn in row.turns]
        if not row.exact:
            raise SettingsError("this trajectory has no token ids: its engine gives text only")
        ids = row.ids.tolist()
        token_texts, text = self.token_texts(ids), self.text(ids)
        # What no action followed has no ids, and is not in the row.
        given = [turn for turn in row.turns if turn.ids]
        messages = [message for turn in given for message in turn.messages]
        last = given[-1] if given else None
        generate = last is not None and last.kind not in ("action", "forced")
        adapted = self._adapt_messages(messages)
        if row.tools and not self._visible_tools(row.tools):
            adapted = self._with_instructions(adapted, row.tools)
        try:
            again_text = self.template.render(adapted, self._visible_tools(row.tools), generate=generate)
        except ChatTemplateError as error:
            return Drift("other", 0, len(ids), "prompt, turn 0", token_texts[:6], (), "", str(error))
        again = self.encode(again_text)
        return drifting.compare(ids, token_texts, text, again, self.token_texts(again), again_text, turns)

    def __repr__(self) -> str:
        stops = ", ".join(repr(p) for p in self.token_texts(self.stop_ids))
        kept = "" if self.history == "exact" else f", history {self.history!r}"
        return f"Chat({len(self.tokenizer)} tokens, format {self.format.name!r}{kept}, stops at {stops})"


@dataclass(frozen=True)
class ChatReport:
    """What a chat template promises. `exact` is whether chains can be grown by appending alone, whatever follows."""

    name: str
    exact: bool
    tool_results: str
    """"exact", or why tool results cannot be appended."""
    user_messages: str
    """"exact", or why a user's message after an answer cannot be appended."""
    tool_role: str
    """The role in which tool results are told."""
    tools: bool
    """Whether the template shows tool schemas; if not, the format's instructions are put into the prompt."""
    format: str
    """The format that reads back a call as the template writes it; "" if none does."""
    stop: str
    """The token that ends an answer."""
    stops: tuple[str, ...]
    """All tokens that end an action."""
    generation_prompt: str
    """What is written before the assistant's first token; some templates open, or close, thinking here."""
    boundary: str
    """The text between an action's last letter and a tool result's first."""
    thinking: str
    """Earlier thinking when history is rendered: "kept", "kept until a user speaks", "dropped" or "unknown"."""
    whitespace: str
    """Outer blanks of an answer when history is rendered: "kept" or "trimmed". A row keeps them as sampled."""

    def __repr__(self) -> str:
        said = (
            "exact"
            if self.exact
            else "; ".join(
                f"{what}: {why}" for what, why in (("tool", self.tool_results), ("user", self.user_messages))
            )
        )
        return f"ChatReport({self.name!r}, {said})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(k.replace('_', ' '))}</td>"
            f"<td style='text-align:left'><code>{html.escape(v if isinstance(v, str) and '<' not in v else repr(v))}"
            "</code></td></tr>"
            for k, v in vars(self).items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "qzprobezq", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


def check(tokenizer: Any, **settings: Any) -> ChatReport:
    """What a tokenizer's chat template promises, as a table in a cell. Takes a `Chat` too. settings: those of `Chat`.

    Raises:  ChatTemplateError only where no `Chat` can be made at all.
    """
    chat = tokenizer if isinstance(tokenizer, Chat) else Chat(tokenizer, **settings)
    template = chat.template
    tool, user = chat.append_violation("tool"), chat.append_violation("user")
    adapted = chat._adapt_messages([{"role": "tool", "name": "probe", "tool_call_id": "call-0", "content": "qztoolzq"}])
    try:
        boundary = template.text_after_action(adapted).partition("qztoolzq")[0]
    except ChatTemplateError:
        boundary = ""
    return ChatReport(
        name=template.name,
        exact=not tool and not user,
        tool_results=tool or "exact",
        user_messages=user or "exact",
        tool_role="user" if chat._results_as_user else "tool",
        tools=template.shows([_PROBE]),
        format=chat.detected_format.name if chat.detected_format else "",
        stop=chat.token_texts(chat.stop_ids)[0],
        stops=chat.token_texts(chat.stop_ids),
        generation_prompt=template.opening(),
        boundary=boundary,
        thinking=template.thinking_kept(),
        whitespace="kept" if template.whitespace_kept() else "trimmed",
    )
