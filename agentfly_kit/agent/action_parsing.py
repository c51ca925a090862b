"""From the text of an action to the assistant message and its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly_kit.chat.chat import Chat
from agentfly_kit.chat.formats import Parsed
from agentfly_kit.types import Message, ToolCall


def parse_action(
    chat: Chat,
    tools: Sequence[dict[str, Any]],
    forced: Sequence[int],
    ids: Sequence[int] | None,
    text: str | None = None,
    stops: Sequence[str] = (),
) -> tuple[Message, tuple[ToolCall, ...]]:
    """Return the assistant message of an action and its calls.

    Args:
        chat: the chat format.
        tools: schemas of the tools.
        forced: token ids of the forced beginning of the action, which is parsed together with it.
        ids: token ids of the action, or None for an engine that returns text only.
        text: text of the action, used if `ids` is None.
        stops: stop strings, if one of them ended the action. The message is cut before the first; the ids are not.
    """
    # `chat.read` prepends the tag that the prompt leaves open; a text-only engine's prompt may end differently.
    read = chat.format.parse if ids is None else chat.read
    beginning = chat.text(forced)
    full_text = beginning + (text or "") if ids is None else chat.text((*forced, *ids))
    found = [(at, stop) for stop in stops if (at := full_text.find(stop, len(beginning))) >= 0]
    if found:
        at, stop = min(found)
        parsed = read(full_text[:at], tools)
        if parsed.unclosed:  # the stop string itself closes the call
            parsed = read(full_text[: at + len(stop)], tools)
    elif ids is None:
        parsed = read(full_text, tools)
    else:
        parsed = chat.parse((*forced, *ids), tools)
    return assistant_message(parsed)


def assistant_message(parsed: Parsed) -> tuple[Message, tuple[ToolCall, ...]]:
    """Return the message and the calls of a parsed action. An unclosed call becomes a call with an error."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.thinking is not None:
        message["thinking"] = parsed.thinking
    calls = parsed.calls
    if parsed.unclosed:
        # An unclosed call is never run. If the model ended its turn itself, it receives this error as the result; a
        # truncated turn ends the chain anyway.
        broken = ToolCall(f"call-{len(calls)}", "", {}, error=parsed.complaint or "the tool call was not closed")
        calls = (*calls, broken)
    if calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in calls
            if c.error is None
        ]
    return message, calls
