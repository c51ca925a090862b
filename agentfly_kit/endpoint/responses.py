"""Conversion between chat messages and the Responses API, which some frameworks use by default."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentfly_kit.endpoint.completions import reply_message
from agentfly_kit.endpoint.reply import Reply, RequestError, validating
from agentfly_kit.endpoint.request import (
    MODEL,
    Response,
    Sampler,
    function_call,
    function_tool,
    image_part,
    make_request,
    sse,
    usage,
)

_TEXT_PARTS = ("input_text", "output_text", "text")


def read_messages(body: Mapping[str, Any], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert a request to messages: its instructions, which replace earlier ones, `earlier` messages, and its input.

    Raises:
        RequestError: if an item is not a message, a function call or a function call output.
    """
    messages: list[dict[str, Any]] = []
    given = body.get("instructions")
    if given is not None:
        earlier = [message for i, message in enumerate(earlier) if i or message["role"] != "system"]
        messages.append({"role": "system", "content": given})
    messages += earlier
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("'input' must be a string or a non-empty list")
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            content = _text(item.get("content"), i)
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call = function_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            # In this API, the text and the tool calls of an action are separate items; a chat message contains both.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            last = messages[-1]
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        elif kind == "function_call_output":
            content = _text(item.get("output"), i)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":
            raise RequestError(f"'input': item {i} has the type {kind!r}, which is not supported")
    return messages


def _text(content: Any, index: int) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        is_image = part.get("type") == "input_image" and part.get("image_url") is not None  # not a file id
        if not is_image and part.get("type") not in _TEXT_PARTS:
            raise RequestError(
                f"'input': item {index} has the part {part!r:.40}; only text and images with 'image_url' are supported"
            )
    return [
        image_part(part["image_url"]) if part["type"] == "input_image" else {"type": "text", "text": part.get("text")}
        for part in content
    ]


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a request in the format of the Chat Completions API.

    Raises:
        RequestError: if a tool is not a function, for example the built-in web search of a hosted model.
    """
    tools = body.get("tools") or ()
    for tool in tools:
        if tool.get("type") != "function":
            raise RequestError(f"'tools': only functions are supported, got {tool!r:.80}")
    return [function_tool(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in tools]


def response(reply: Reply, answer_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to a request as a response object."""
    counts = usage([reply])
    cut = reply.finish == "length"
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body.get("model") or MODEL,
        "output": _items(reply, answer_id),
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _items(reply: Reply, answer_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answer_id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    items += [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in reply.calls
    ]
    return items


def events(answer: dict[str, Any]) -> Iterator[str]:
    """Yield a response object as server-sent events."""
    number = 0

    def event(kind: str, **data: Any) -> str:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number - 1, **data}, kind)

    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(answer["output"]):
        at = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            empty = {**part, "text": ""}
            begun_item = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=i, item=begun_item)
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part=empty)
            text = part["text"]
            yield event("response.output_text.delta", **at, delta=text, logprobs=[])
            yield event("response.output_text.done", **at, text=text, logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        else:
            begun_item = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=i, item=begun_item)
            name, arguments = item["name"], item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event("response.function_call_arguments.done", **at, arguments=arguments, name=name)
        yield event("response.output_item.done", output_index=i, item=item)
    yield event("response.incomplete" if answer["status"] == "incomplete" else "response.completed", response=answer)


async def answer(
    body: Mapping[str, Any], sample: Sampler, answer_id: str, earlier: dict[str, list[dict[str, Any]]]
) -> Response:
    """Answer a Responses API request.

    `earlier` maps the id of each earlier response to the conversation up to it, for `previous_response_id`.
    """
    previous = body.get("previous_response_id")
    with validating():
        if previous is not None and previous not in earlier:
            raise RequestError(
                f"'previous_response_id' must be the id of a response of this chain, got {previous!r:.80}"
            )
        messages = read_messages(body, earlier.get(str(previous), []))
        request = make_request(body, messages, read_tools(body), "max_output_tokens")
    (one,) = await sample(request)
    whole = response(one, answer_id, body)
    earlier[whole["id"]] = [*messages, reply_message(one)]
    return events(whole) if request.stream else whole
