"""What every format gives: a parsed text, and a call written back. Knows no format in particular."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class Format(Protocol):
    """How a tool call is written in text. Both methods are pure, and `parse` takes any text without raising."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> Parsed:
        """Take an action's text apart. Never raises."""
        ...

    def render_call(self, call: ToolCall) -> str:
        """The text of a call, for demonstrations; `parse` reads it back."""
        ...
