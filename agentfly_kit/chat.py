"""Messages to token ids and back, by the tokenizer's own chat template; history is never encoded twice.

Knows no models, no engines and no tools beyond their schemas. A prompt is rendered once. Everything later is appended:
`bridge` gives the ids between the last sampled token and the next thing to sample, and `parse` reads an action without
touching its ids.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit import formats
from agentfly_kit.errors import ChatTemplateError
from agentfly_kit.types import Message

# Stands for an assistant's text in a rendered conversation. Plain letters: no template trims or escapes them.
_MARK = "qzanswerzq"
_KEEP = 1024
"""Encoded texts that are remembered: the chains of a group all begin with the same prompt."""


class Chat:
    """A tokenizer with its chat template, and the format in which this model writes tool calls.

    Raises:  ChatTemplateError if there is no template, or if it does not keep an assistant's text.
    """

    def __init__(self, tokenizer: Any, *, format: str | formats.Format = "hermes") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "set tokenizer.chat_template, or load the tokenizer of an instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.format = formats.get(format) if isinstance(format, str) else format
        self._pieces: dict[int, str] = {}
        self._encoded: dict[str, tuple[int, ...]] = {}
        self.stop_ids: tuple[int, ...] = self._stop_ids()
        """Ids that end an assistant's turn: the template's own end of turn, and the tokenizer's eos."""

    # --- text and ids ---

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text as it stands: special tokens in it are read, none is added."""
        known = self._encoded.get(text)
        if known is None:
            known = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(self._encoded) >= _KEEP:
                self._encoded.clear()
            self._encoded[text] = known
        return known

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. A view: it is never encoded again."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each id alone; bytes that are no text by themselves appear as <0xE2>."""
        return tuple(self._pieces.get(i) or self._piece(i) for i in ids)

    def _piece(self, token: int) -> str:
        text = self.text([token])
        if "�" in text or not text:
            raw = self.tokenizer.convert_ids_to_tokens(token)
            text = raw if isinstance(raw, str) else f"[{token}]"
        self._pieces[token] = text
        return text

    # --- messages to ids ---

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generate: bool) -> str:
        """The template's text. Raises ChatTemplateError with the template's own complaint."""
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tools=list(tools) or None, add_generation_prompt=generate, tokenize=False
            )
        except Exception as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ChatTemplateError(
                f"the chat template of {self._name} refused messages with the roles ({roles}): {error}; "
                "leave out the role that it does not know, or give the tokenizer another chat_template"
            ) from error
        return str(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of the opening messages and tool schemas, ending where the assistant begins to write."""
        return self._encode_around(messages, lambda plain: self.render(plain, tools, generate=True))

    def bridge(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, after: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Ids to append after an action so that `messages` (tool results, a user) are told and the assistant goes on.

        after: the action's ids. If they end with the stop token that the template writes, it is not written again; an
            action that was cut gets it here, where it has mask 0.
        Raises:  ChatTemplateError if the template rewrites the assistant's text when something follows it.
        """
        base: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        ids = self._encode_around(
            messages, lambda plain: self._after_mark(self.render([*base, *plain], tools, generate=True))
        )
        if after and ids and after[-1] == ids[0] and ids[0] in self.stop_ids:
            ids = ids[1:]
        return ids

    def _encode_around(self, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> tuple[int, ...]:
        """Encode a rendered text so that no message can write a control token: a tool's output that says <|im_end|>
        is letters. Only messages that hold such a text are treated apart; all others keep the plain encoding."""
        special = [t for t in self.tokenizer.all_special_tokens if t]
        apart: dict[str, str] = {}
        plain = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and any(token in content for token in special):
                mark = f"qzplain{len(apart)}zq"
                apart[mark] = content
                message = {**message, "content": mark}
            plain.append(message)
        text = render(plain)
        if not apart:
            return self.encode(text)
        ids: list[int] = []
        for part in re.split("(" + "|".join(apart) + ")", text):
            if part in apart:
                ids.extend(
                    self.tokenizer(apart[part], add_special_tokens=False, split_special_tokens=True)["input_ids"]
                )
            else:
                ids.extend(self.encode(part))
        return tuple(ids)

    def _after_mark(self, text: str) -> str:
        at = text.rfind(_MARK)
        if at < 0:
            raise ChatTemplateError(
                f"the chat template of {self._name} drops or changes an earlier assistant message when others follow "
                "it, so tokens cannot be appended exactly; use a template that keeps history"
            )
        return text[at + len(_MARK) :]

    def _stop_ids(self) -> tuple[int, ...]:
        base: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        tail = self.encode(self._after_mark(self.render(base, generate=False)))
        special = set(self.tokenizer.all_special_ids) | set(getattr(self.tokenizer, "added_tokens_decoder", {}))
        stops = [tail[0]] if tail and tail[0] in special else []
        eos = self.tokenizer.eos_token_id
        if eos is not None and eos not in stops:
            stops.append(eos)
        if not stops:
            raise ChatTemplateError(
                f"{self._name}: neither its template nor its tokenizer says which token ends a turn; set "
                "tokenizer.eos_token"
            )
        return tuple(stops)

    @property
    def _name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__)

    # --- ids to messages ---

    def parse(self, ids: Sequence[int]) -> formats.Parsed:
        """What an action says: answer, thinking, tool calls. The ids stay as they are."""
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.format.parse(self.text(ids))

    def __repr__(self) -> str:
        stops = ", ".join(repr(p) for p in self.pieces(self.stop_ids))
        return f"Chat({len(self.tokenizer)} tokens, format {self.format.name!r}, stops at {stops})"


@dataclass(frozen=True)
class ChatReport:
    """What a chat template promises. `exact` is whether chains can be grown by appending alone."""

    name: str
    exact: bool
    stop: str
    """The token that ends an assistant's turn."""
    generation_prompt: str
    tools: bool
    """Whether tool schemas appear in the prompt."""
    boundary: str
    """The text between an assistant's last token and a tool result's first."""
    thinking: str
    """"kept", "dropped" or "unknown": what happens to earlier thinking if history is rendered again."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(k)}</td><td style='text-align:left'><code>{html.escape(repr(v))}</code></td></tr>"
            for k, v in vars(self).items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


def check(tokenizer: Any) -> ChatReport:
    """What this chat template promises; raises ChatTemplateError that names what it cannot."""
    chat = tokenizer if isinstance(tokenizer, Chat) else Chat(tokenizer)
    user: Message = {"role": "user", "content": "?"}
    said: Message = {"role": "assistant", "content": _MARK}
    tool: Message = {"role": "tool", "name": "probe", "tool_call_id": "call-0", "content": "qztoolzq"}
    schema = {
        "type": "function",
        "function": {
            "name": "qzprobezq",
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    opened = chat.render([user], generate=True)
    closed = chat.render([user, said], generate=False)
    if not closed.startswith(opened):
        raise ChatTemplateError(
            f"{chat._name}: the prompt for the assistant ({opened[-40:]!r}) is not how its finished message begins, so "
            "what is sampled would not be what is trained; use a template whose generation prompt is a prefix"
        )
    grown = chat.render([user, said, tool], generate=True)
    if chat._after_mark(grown) is None or not grown.startswith(closed[: closed.rfind(_MARK) + len(_MARK)]):
        raise ChatTemplateError(f"{chat._name}: adding a tool result changes what came before it")
    thought = chat.render(
        [user, {"role": "assistant", "content": f"<think>qzthinkzq</think>{_MARK}"}, user], generate=True
    )
    tail = chat._after_mark(grown)
    return ChatReport(
        name=chat._name,
        exact=True,
        stop=chat.pieces(chat.stop_ids)[0],
        generation_prompt=opened[len(chat.render([user], generate=False)) :],
        tools="qzprobezq" in chat.render([user], [schema], generate=True),
        boundary=tail[: tail.find("qztoolzq")] if "qztoolzq" in tail else "",
        thinking="kept" if "qzthinkzq" in thought else "dropped",
    )
