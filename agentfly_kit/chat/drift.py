"""`Drift`, the first difference between a row's tokens and the tokens of its messages when tokenized again."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from agentfly_kit._display import Displayable, printable
from agentfly_kit.chat.template import common_prefix_length
from agentfly_kit.errors import ChatTemplateError
from agentfly_kit.trajectories import Row
from agentfly_kit.types import images_of

if TYPE_CHECKING:
    from agentfly_kit.chat.chat import Chat

Cause: TypeAlias = Literal["none", "template", "re-tokenisation", "other"]


@dataclass(frozen=True)
class Drift(Displayable):
    """First token at which a row differs from its re-encoded messages. `bool(drift)` is False if they are equal.

    Attributes:
        cause: "template" if the template renders different text, "re-tokenisation" if the same text is split into
            different tokens, "other" if the tokens do not decode to valid text or the template rejects the
            conversation, or "none" if there is no difference.
        index: Index of the first differing token in the row, or the length of the row if no token differs.
        tokens: Number of tokens of the row.
        turn: Kind and index of the turn that contains this token.
        row_tokens: Up to six tokens of the row, starting at `index`.
        encoded_tokens: Up to six tokens of the re-encoded text, starting at `index`.
        before: Common text just before the difference.
        why: Explanation of the cause.
    """

    cause: Cause
    index: int
    tokens: int
    turn: str = ""
    row_tokens: tuple[str, ...] = ()
    encoded_tokens: tuple[str, ...] = ()
    before: str = ""
    why: str = ""

    def __bool__(self) -> bool:
        return self.cause != "none"

    def __repr__(self) -> str:
        if not self:
            return f"Drift(none in {self.tokens} tokens)"
        return printable(f"Drift({self.cause} at token {self.index} of {self.tokens}, {self.turn}: {self.why})")


def find_drift(chat: Chat, row: Row) -> Drift:
    """Compare one row with its messages when tokenized again; see `Chat.drift`."""
    ids = row.ids.tolist()
    token_texts, text = chat.token_texts(ids), chat.text(ids)
    # Observations after the last action have no ids, because they were never sent to the engine.
    given = [turn for turn in row.turns if turn.ids]
    messages = [message for turn in given for message in turn.messages]
    try:
        shown = chat._prepare(list(chat._mark_images(messages)), row.tools)
        again_text = chat.template.render(*shown, generate=not (given and given[-1].kind in ("action", "forced")))
        if images := images_of(messages):
            again = chat.reader.encode(again_text, images, functools.partial(chat._encode_split, "", ()))
        else:
            again = chat.encode(again_text)
    except ChatTemplateError as error:
        return Drift("other", 0, len(ids), "prompt, turn 0", token_texts[:6], (), "", str(error))
    again_texts = chat.token_texts(again)
    index = common_prefix_length(ids, again)
    if index == len(ids):  # additional ids are not drift, because the row ends with an action
        return Drift("none", index, len(ids))
    begin = len("".join(token_texts[:index]))
    end = begin + max(len(token_texts[index]), len("".join(again_texts[index : index + 1])))
    row_tokens, encoded_tokens = token_texts[index : index + 6], again_texts[index : index + 6]
    cause: Cause
    if "\ufffd" in text:  # tokens contain incomplete characters, so character positions are undefined
        cause, why = "other", "the row holds bytes that are not valid UTF-8, so no text encodes to its tokens"
    elif common_prefix_length(text, again_text) >= min(end, len(text)):
        cause = "re-tokenisation"
        why = f"the same text is tokenized differently: {list(row_tokens[:3])} became {list(encoded_tokens[:3])}"
    else:
        cause = "template"
        why = f"{text[begin : begin + 24]!r} is written as {again_text[begin : begin + 24]!r}"
    ends = itertools.accumulate(len(turn.ids or ()) for turn in row.turns)
    number = next(i for i, end in enumerate(ends) if index < end)
    turn = f"{row.turns[number].kind}, turn {number}"
    before = "".join(token_texts[max(0, index - 8) : index])
    return Drift(cause, index, len(ids), turn, row_tokens, encoded_tokens, before, why)
