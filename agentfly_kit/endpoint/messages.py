"""Conversion between chat messages and the Messages API of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentfly_kit.endpoint.reply import Reply, RequestError, validating
from agentfly_kit.endpoint.request import (
    Request,
    Response,
    Sampler,
    function_call,
    function_tool,
    image_part,
    make_request,
    sse,
    usage,
)

# Parameters that request something other than sampling from the server.
_UNSUPPORTED = ("mcp_servers", "container")
# As in the other APIs, thinking in a history is not rendered again, because the continued row contains it.
_THINKING = ("thinking", "redacted_thinking")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_request(body: Mapping[str, Any]) -> Request:
    """Parse the body of a request to /v1/messages.

    Raises:
        RequestError: if a content block, a tool or a parameter is not supported or has the wrong type.
    """
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestError(f"{name!r} is not supported")
    messages: list[dict[str, Any]] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _text(system, "'system'")})
    for i, message in enumerate(body.get("messages") or ()):
        messages += _read_message(message.get("role"), message.get("content"), f"message {i}")
    tools = body.get("tools") or ()
    for tool in tools:
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"'tools': tools of the type {tool['type']!r} are not supported, only your own tools are"
            )
    given = [(tool.get("name"), tool.get("description"), tool.get("input_schema")) for tool in tools]
    own = [function_tool(*fields) for fields in given]
    return make_request(body, messages, own, "max_tokens", stop=body.get("stop_sequences"))


def _read_message(role: Any, content: Any, where: str) -> Iterator[dict[str, Any]]:
    """Convert a message. Yield a tool message for each tool result in it, in the order of the content blocks."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[Any] = []
    calls: list[Any] = []
    results = 0
    for block in content:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(function_call(block.get("id"), block.get("name"), json.dumps(block.get("input"))))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": texts}
                texts = []
            results += 1
            text = _text(block.get("content") or "", where)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind not in _THINKING:
            texts += _text([block], where)
    if texts or calls or not results:
        out = {"role": role, "content": texts}
        if calls:
            out["tool_calls"] = calls
        yield out


def _text(content: Any, where: str) -> Any:
    """Return a string, or text and images in the format of the Chat Completions API."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for block in content:
        if block.get("type") == "image" and (source := block.get("source") or {}).get("type") == "base64":
            parts.append(image_part(f"data:{source.get('media_type')};base64,{source.get('data')}"))
        elif block.get("type") == "text":
            parts.append({"type": "text", "text": block.get("text")})
        else:
            raise RequestError(
                f"{where}: content blocks must be text, thinking, an image with a base64 source, tool_use (of the "
                f"assistant) or tool_result (of the user), got the type {block.get('type')!r:.40}"
            )
    return parts


def response(request: Request, reply: Reply, answer_id: str) -> dict[str, Any]:
    """Return the response to a request as a message object."""
    content: list[dict[str, Any]] = []
    if reply.thinking is not None:
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text or not reply.calls:
        content.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        arguments = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    counts = usage([reply])
    stopped = reply.finish == "stop" and reply.stop_string is not None
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[reply.finish],
        "stop_sequence": reply.stop_string if stopped else None,
        "usage": {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"]},
    }


def events(answer: dict[str, Any]) -> Iterator[str]:
    """Yield a message object as server-sent events, with each content block in one delta."""

    def event(kind: str, **data: Any) -> str:
        return sse({"type": kind, **data}, kind)

    ends = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    begun = {
        **answer,
        "content": [],
        **dict.fromkeys(ends),
        "usage": {**answer["usage"], "output_tokens": 0},
    }
    yield event("message_start", message=begun)
    for i, block in enumerate(answer["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            empty = {**block, kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        yield event("content_block_start", index=i, content_block=empty)
        yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    yield event("message_delta", delta=ends, usage=answer["usage"])
    yield event("message_stop")


async def answer(body: Mapping[str, Any], sample: Sampler, answer_id: str) -> Response:
    """Answer a Messages API request."""
    with validating():
        request = read_request(body)
    (one,) = await sample(request)
    whole = response(request, one, answer_id)
    return events(whole) if request.stream else whole
