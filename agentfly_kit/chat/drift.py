"""Where a row would differ if its text were encoded again, and why. Knows no templates; a chat gives it what it needs.

Rows here are never encoded again, so drift harms nothing; it shows what a framework that keeps messages, and encodes
them when it trains, would have trained on instead.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["none", "template", "re-tokenisation", "other"]


@dataclass(frozen=True)
class Drift:
    """The first token at which a row and its text encoded again part."""

    cause: Cause
    """"template": the template writes the conversation with other letters. "re-tokenisation": the same letters, cut
    into other tokens. "other": the row's tokens are no text, or the template refuses the conversation."""
    index: int
    """Index of the first differing token in the row; the row's length if there is none."""
    tokens: int
    """Tokens of the row."""
    turn: str = ""
    """Which turn the token belongs to: its kind and index."""
    row_tokens: tuple[str, ...] = ()
    """Tokens of the row from there on, a few."""
    encoded_tokens: tuple[str, ...] = ()
    """Tokens of the text encoded again from there on, a few."""
    before: str = ""
    """The text just before, which both have."""
    why: str = ""

    def __bool__(self) -> bool:
        """True where there is drift."""
        return self.cause != "none"

    def __repr__(self) -> str:
        if not self:
            return f"Drift(none in {self.tokens} tokens)"
        return f"Drift({self.cause} at token {self.index} of {self.tokens}, {self.turn}: {self.why})"

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>no drift: {self.tokens} tokens, encoded again, are the same</p>"
        cell = "style='text-align:left'"

        def tokens(texts: Sequence[str]) -> str:
            first, *others = [f"<code>{html.escape(repr(t))}</code>" for t in texts] or ["(nothing)"]
            return " ".join([f"<b>&#9654; {first}</b>", *others])

        return (
            f"<p><b>{html.escape(self.cause)}</b> at token {self.index} of {self.tokens} ({html.escape(self.turn)}): "
            f"{html.escape(self.why)}</p><table><tbody>"
            f"<tr><td>before</td><td {cell}><code>{html.escape(repr(self.before))}</code></td></tr>"
            f"<tr><td>the row</td><td {cell}>{tokens(self.row_tokens)}</td></tr>"
            f"<tr><td>encoded again</td><td {cell}>{tokens(self.encoded_tokens)}</td></tr></tbody></table>"
        )


def compare(
    ids: Sequence[int],
    token_texts: Sequence[str],
    text: str,
    again: Sequence[int],
    again_token_texts: Sequence[str],
    again_text: str,
    turns: Sequence[tuple[str, int]],
) -> Drift:
    """Where `again` leaves `ids`. What it goes on with after the row's end is no drift: a row ends with an action.

    text, again_text: of all ids; turns: (name, number of tokens), in order.
    """
    index = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), min(len(ids), len(again)))
    if index == len(ids):
        return Drift("none", index, len(ids))
    same = next((i for i, (a, b) in enumerate(zip(text, again_text, strict=False)) if a != b), None)
    same = min(len(text), len(again_text)) if same is None else same
    begins = len("".join(token_texts[:index]))
    ends = max(
        begins + len(token_texts[index]),
        begins + (len(again_token_texts[index]) if index < len(again_token_texts) else 0),
    )
    row_tokens, encoded_tokens = tuple(token_texts[index : index + 6]), tuple(again_token_texts[index : index + 6])
    cause: Cause
    if "\ufffd" in text:
        # Letters cannot be counted where tokens are halves of letters.
        cause, why = "other", "the row holds bytes that are no text, so no text gives its tokens back"
    elif same >= min(ends, len(text)):
        cause = "re-tokenisation"
        why = f"the same letters are cut otherwise: {list(row_tokens[:3])} became {list(encoded_tokens[:3])}"
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
