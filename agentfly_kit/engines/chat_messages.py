"""Conversion of messages and tool calls to and from the format of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from agentfly_kit.types import Message, ToolCall, images_of


def wire_messages(messages: Sequence[Message], thinking_field: str) -> list[dict[str, Any]]:
    """Convert messages to the OpenAI format, in which the arguments of tool calls are JSON strings.

    Thinking is sent in `thinking_field`, because some servers reject conversations with tool calls but no thinking.

    The API requires that a tool result follows its call. The result of a call that could not be parsed has no
    matching call and is sent as a user message. Images of tool results are sent in a user message after the results.
    """
    out: list[dict[str, Any]] = []
    open_calls: set[str] = set()
    shown: list[dict[str, Any]] = []
    for message in (*messages, None):
        if shown and (message is None or message["role"] != "tool"):
            out.append({"role": "user", "content": shown})
            shown = []
        if message is None:
            break
        sent = {k: v for k, v in message.items() if k in ("role", "content", "name", "tool_call_id")}
        if message["role"] == "assistant" and message.get("thinking"):
            sent[thinking_field] = message["thinking"]
        calls = message.get("tool_calls") or ()
        if calls:
            sent["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
        if calls or sent["role"] == "assistant":
            open_calls = {call["id"] for call in calls}
        if images := images_of([message]):
            sent["content"] = wire_parts(message["content"])
        if sent["role"] == "tool":
            if images:
                shown += wire_parts([f"Images returned by {message.get('name') or 'the tool'}:", *images])
                sent["content"] = "\n".join(part for part in message["content"] if isinstance(part, str))
            if sent.get("tool_call_id") not in open_calls:
                sent = {"role": "user", "content": sent["content"]}
        out.append(sent)
    return out


def wire_parts(parts: Iterable[Any]) -> list[dict[str, Any]]:
    """Return texts and images as parts of a message in the format of the Chat Completions API."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.data_url}}
        for part in parts
    ]


def parse_tool_call(call: dict[str, Any], index: int) -> ToolCall:
    """Convert a tool call of a response. If its arguments are not a JSON object, the result has an `error`."""
    name, given = str(call["function"]["name"]), call["function"].get("arguments")
    key = str(call.get("id") or f"call-{index}")
    raw = given if isinstance(given, str) else json.dumps(given)
    try:
        arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    except (ValueError, RecursionError) as error:
        return ToolCall(key, name, {}, error=f"the arguments are not valid JSON ({error})", raw=raw)
    if not isinstance(arguments, dict):
        return ToolCall(key, name, {}, error="the arguments are not a JSON object", raw=raw)
    return ToolCall(key, name, arguments, raw=raw)
