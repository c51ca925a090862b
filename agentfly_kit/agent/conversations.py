"""Match chat requests to the rows of a chain.

A harness sends the whole message history with each request. If the history repeats the messages of a row up to one of
its actions, the request continues from that action and the sampled token ids are kept. Otherwise, a new row starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentfly_kit._async import threads
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.errors import SettingsError
from agentfly_kit.types import Message, Task, images_of, normalize_messages, text_of

# Role, text, tool calls, and the id of the call that the message answers. Messages with equal keys are equal.
MessageKey: TypeAlias = tuple[Any, ...]


async def read_messages(
    agent: AgentSettings, task: Task, messages: Any, call_ids: Mapping[str, tuple[str, str]]
) -> tuple[Message, ...]:
    """Return `plain_messages`. Images are decoded in a thread.

    Raises:
        SettingsError: if a message is malformed, or the engine does not read its images.
    """
    contents = [m.get("content") for m in messages or () if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in parts):
        return plain_messages(messages, call_ids)
    plain = await threads.call(plain_messages, messages, call_ids)
    agent.check_images(task, plain)
    if len(images_of(plain)) > agent.engine.images:
        raise SettingsError(
            f"messages must have at most {agent.engine.images} images for {agent.engine!r}, got {len(images_of(plain))}"
        )
    return plain


def plain_messages(messages: Any, call_ids: Mapping[str, tuple[str, str]]) -> tuple[Message, ...]:
    """Normalize the messages of a chat request.

    The role "developer" becomes "system", text parts are joined, images in data URLs are decoded, arguments of tool
    calls are parsed, and unknown keys are dropped. `call_ids` maps each call id sent to the client to the id and name
    of the call in the chain.

    Raises:
        SettingsError: if a message is malformed, or if the last message is an assistant message.
    """
    out: list[Message] = []
    for i, given in enumerate(messages or ()):
        role = given.get("role") if isinstance(given, Mapping) else None
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise SettingsError(
                f"messages: message {i} must have the role system, user, assistant or tool, got {given!r:.80}"
            )
        if given.get("function_call"):
            raise SettingsError(f"messages: message {i} must use 'tool_calls' for its calls, got 'function_call'")
        content = given.get("content")
        kinds = [p.get("type") for p in content if isinstance(p, Mapping)] if isinstance(content, list) else []
        if any(kind not in ("text", "image_url") for kind in kinds):
            raise SettingsError(
                f"messages: message {i} (role {role!r}) must consist of text and image_url, got {content!r:.80}"
            )
        if isinstance(content, list) and not content:
            content = ""
        message: Message = {"role": "system" if role == "developer" else role}
        message["content"] = "" if content is None else content
        if role == "assistant" and given.get("tool_calls"):
            message["tool_calls"] = [_with_id(call, call_ids) for call in given["tool_calls"]]
        if role == "tool":
            sent = str(given.get("tool_call_id") or "")
            message["tool_call_id"], name = call_ids.get(sent, (sent, str(given.get("name") or "")))
            message["name"] = name
        out.append(message)
    return normalize_messages(out, "messages", SettingsError)


def _with_id(call: Any, call_ids: Mapping[str, tuple[str, str]]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call  # the call is malformed, so normalize_messages raises an error
    sent = str(call.get("id") or "")
    function = {"name": call["function"].get("name"), "arguments": call["function"].get("arguments") or "{}"}
    return {"id": call_ids.get(sent, (sent, ""))[0], "type": "function", "function": function}


def plain_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Reduce tool schemas to name, description and parameters.

    Raises:
        SettingsError: if an entry is not a function with a name.
    """
    out = []
    for i, given in enumerate(tools):
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise SettingsError(
                f"tools: entry {i} must be {{'type': 'function', 'function': {{'name': ..., ...}}}}, got {given!r:.80}"
            )
        description = function.get("description") or ""
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        function = {"name": function["name"], "description": description, "parameters": parameters}
        out.append({"type": "function", "function": function})
    return tuple(out)


def message_key(message: Message) -> MessageKey:
    """Return a key for comparing messages, including images. Thinking and surrounding whitespace are ignored."""
    calls = tuple(
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    content = text_of(message).strip(), *images_of([message])
    return message["role"], content, calls, message.get("tool_call_id", "")


@dataclass
class Segment:
    """Message keys of one turn. `end` is the number of token ids in the row up to the end of this turn."""

    keys: tuple[MessageKey, ...]
    end: int
    action: bool


@dataclass
class ConversationRow:
    """Message history of one row of a chain.

    Attributes:
        index: index of the row in the chain.
        tools: the tool schemas as JSON, which are the same in all requests that belong to this row.
        segments: prompt, actions and observations, in order. A row that branches off another row starts with the
            segments of that row.
    """

    index: int
    tools: str
    segments: list[Segment] = field(default_factory=list)

    def matched(self, keys: Sequence[MessageKey]) -> int:
        """Return the number of leading segments that match `keys`, up to and including the last matching action."""
        best = position = 0
        for i, segment in enumerate(self.segments):
            end = position + len(segment.keys)
            if tuple(keys[position:end]) != segment.keys:
                break
            position = end
            if segment.action:
                best = i + 1
        return best

    def length(self, segments: int) -> int:
        """Return the number of messages in the first `segments` segments."""
        return sum(len(segment.keys) for segment in self.segments[:segments])


@dataclass(frozen=True)
class Match:
    """Row that a request continues, with the number of segments and messages that the request repeats."""

    row: ConversationRow
    segments: int
    messages: int

    @property
    def at_leaf(self) -> bool:
        return self.segments == len(self.row.segments)

    @property
    def end(self) -> int:
        """Number of token ids of the row up to the matched action."""
        return self.row.segments[self.segments - 1].end


def find_match(
    rows: Sequence[ConversationRow], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> Match | None:
    """Return the longest match, or None if a new row must start. Among equally long matches, prefer the end of a row.

    A row does not match if an assistant message follows the matching messages, because the token ids of that message
    are unknown.
    """
    keys = [message_key(message) for message in messages]
    schemas = tools_key(tools)
    known = [(row, row.matched(keys)) for row in rows if row.tools == schemas]
    found = [Match(row, segments, row.length(segments)) for row, segments in known if segments]
    usable = [match for match in found if not any(m["role"] == "assistant" for m in messages[match.messages :])]
    return max(usable, key=lambda match: (match.messages, match.at_leaf), default=None)


def tools_key(tools: Sequence[dict[str, Any]]) -> str:
    """Return the schemas as JSON, with sorted keys so that equal schemas yield equal strings."""
    return json.dumps(tools, sort_keys=True)
