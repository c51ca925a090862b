"""`TextChat`, the chat for engines that return only text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly_kit.chat import formats
from agentfly_kit.chat.chat import Chat
from agentfly_kit.errors import ChatTemplateError


class TextChat(Chat):
    """Chat without a tokenizer, which parses tool calls in text and rejects all operations on token ids."""

    def __init__(self, format: str | formats.Format = "hermes") -> None:
        self.tokenizer = None
        self.format = formats.get(format)
        self.stop_ids = ()

    def _render(self, *_: Any, **__: Any) -> Any:
        raise ChatTemplateError(
            "this chat has no tokenizer, because its engine returns only text; tokenization is not supported"
        )

    encode = render = prompt = observation_ids = token_texts = _render

    def text(self, ids: Sequence[int]) -> str:
        return "" if len(ids) == 0 else str(self._render())

    def __repr__(self) -> str:
        return f"TextChat(no tokenizer, format {self.format.name!r})"
