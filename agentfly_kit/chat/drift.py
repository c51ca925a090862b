"""Drift: the first difference between a row and its messages rendered and encoded again, and its cause.

Rows are never encoded again, so drift does no harm in this package. It shows which tokens a framework would train on
instead if it stored messages and encoded them again for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentfly_kit._display import Displayable
from agentfly_kit.chat.template import common_prefix_length

Cause = Literal["none", "template", "re-tokenisation", "other"]


@dataclass(frozen=True)
class Drift(Displayable):
    """First token at which a row differs from its re-encoded text.

    Attributes:
        cause: "template": the template renders different text. "re-tokenisation": the same text is split into other
            tokens. "other": the tokens do not decode to valid text, or the template rejects the conversation. "none":
            no drift.
        index: Index of the first differing token in the row; the length of the row if there is none.
        tokens: Number of tokens of the row.
        turn: Kind and index of the turn of that token.
        row_tokens: Up to six tokens of the row from there on.
        encoded_tokens: Up to six tokens of the re-encoded text from there on.
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
        """True if there is drift."""
        return self.cause != "none"

    def __repr__(self) -> str:
        if not self:
            return f"Drift(none in {self.tokens} tokens)"
        return f"Drift({self.cause} at token {self.index} of {self.tokens}, {self.turn}: {self.why})"


def compare(
    ids: Sequence[int],
    token_texts: Sequence[str],
    text: str,
    again: Sequence[int],
    again_token_texts: Sequence[str],
    again_text: str,
    turns: Sequence[tuple[str, int]],
) -> Drift:
    """Find the first difference between the ids of a row and of its re-encoded text.

    Ids after the end of the row do not count as drift, because a row ends with an action.

    Args:
        ids: ids of the row.
        token_texts: text of each id.
        text: text of all ids.
        again: ids of the re-encoded text.
        again_token_texts: text of each of these ids.
        again_text: the re-encoded text.
        turns: (name, number of tokens) of each turn, in order.
    """
    index = common_prefix_length(ids, again)
    if index == len(ids):
        return Drift("none", index, len(ids))
    same = common_prefix_length(text, again_text)
    begins = len("".join(token_texts[:index]))
    ends = max(
        begins + len(token_texts[index]),
        begins + (len(again_token_texts[index]) if index < len(again_token_texts) else 0),
    )
    row_tokens, encoded_tokens = tuple(token_texts[index : index + 6]), tuple(again_token_texts[index : index + 6])
    cause: Cause
    if "\ufffd" in text:
        # Character positions are undefined if tokens hold parts of characters.
        cause, why = "other", "the row holds bytes that are not valid UTF-8, so no text encodes to its tokens"
    elif same >= min(ends, len(text)):
        cause = "re-tokenisation"
        why = f"the same text is tokenized differently: {list(row_tokens[:3])} became {list(encoded_tokens[:3])}"
    else:
        cause = "template"
        why = f"{text[begins : begins + 24]!r} is written as {again_text[begins : begins + 24]!r}"
    return Drift(
        cause,
        index,
        len(ids),
        _turn(index, turns),
        row_tokens,
        encoded_tokens,
        "".join(token_texts[max(0, index - 8) : index]),
        why,
    )


def _turn(index: int, turns: Sequence[tuple[str, int]]) -> str:
    for i, (name, count) in enumerate(turns):
        if index < count:
            return f"{name}, turn {i}"
        index -= count
    return ""
