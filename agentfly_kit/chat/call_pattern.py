"""Pattern that a model uses to write the arguments of a tool call, for constrained sampling."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agentfly_kit.types import ToolCall

if TYPE_CHECKING:
    from agentfly_kit.chat.chat import Chat

# Placeholder for the name of a tool and the name of its parameter.
_NAME = "qznamezq"


def find_pattern(chat: Chat, name: str) -> tuple[str, str] | None:
    """Return the texts around the arguments of a call; see `Chat.call_pattern`."""
    cache = vars(chat)
    if "_call_pattern" not in cache:
        cache["_call_pattern"] = _pattern(chat)
    before, after = cache["_call_pattern"] or (None, "")
    return None if before is None else (before.replace(_NAME, name), after)


def _pattern(chat: Chat) -> tuple[str, str] | None:
    if chat._in_template_format and chat.template.calls is not None:
        text = chat.template.written_call(_NAME, {_NAME: 1})
    else:
        text = chat.format.render_call(ToolCall("call-0", _NAME, {_NAME: 1}))
    before, *after = re.split(rf'\{{\s*"{_NAME}"\s*:\s*1\s*\}}', text)
    if len(after) != 1:
        return None
    parsed = chat.format.parse(f'{before}{{"{_NAME}": 2}}{after[0]}')
    calls = [(call.name, call.arguments, call.error) for call in parsed.calls]
    return (before, after[0]) if calls == [(_NAME, {_NAME: 2}, None)] and not parsed.content else None
