"""Chat Completions API: functions that parse requests and create complete or streamed responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentfly_kit.endpoint.reply import Reply, RequestError, validating
from agentfly_kit.endpoint.request import (
    Request,
    Response,
    Sampler,
    chunk_events,
    function_call,
    head,
    make_request,
    usage,
)

_UNSUPPORTED = ("functions", "function_call", "audio", "modalities", "prediction")


def read_request(body: Mapping[str, Any]) -> Request:
    """Parse the body of a request to /v1/chat/completions.

    Raises:
        RequestError: if a parameter is not supported or has the wrong type.
    """
    for name in _UNSUPPORTED:
        if body.get(name) and body[name] != ["text"]:
            raise RequestError(f"{name!r} is not supported")
    if body.get("top_logprobs"):
        raise RequestError("'top_logprobs' is not supported; use 'logprobs', which reports the sampled tokens")
    given = body.get("messages") or [], body.get("tools")
    return make_request(body, *given, "max_completion_tokens", "max_tokens", stop=body.get("stop"), n=body.get("n"))


# --- answers ---------------------------------------------------------------------------------------


def completion(request: Request, replies: list[Reply], answer_id: str) -> dict[str, Any]:
    """Return the response to a request as a chat completion object."""
    choices = [
        {
            "index": i,
            "message": reply_message(reply),
            "finish_reason": reply.finish,
            "logprobs": logprobs,
        }
        for i, (reply, logprobs) in enumerate(_with_logprobs(request, replies))
    ]
    return {
        **head(f"chatcmpl-{answer_id}", "chat.completion", request.model),
        "choices": choices,
        "usage": usage(replies),
    }


def chunks(request: Request, replies: list[Reply], answer_id: str) -> Iterator[str]:
    """Return the response as server-sent events, with the whole text of a message in one event."""
    choices: list[dict[str, Any]] = []
    for i, (reply, logprobs) in enumerate(_with_logprobs(request, replies)):
        delta = reply_message(reply)
        calls = delta.pop("tool_calls", None)
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        choices += [
            {"index": i, "delta": delta, "finish_reason": None, "logprobs": logprobs},
            {"index": i, "delta": {}, "finish_reason": reply.finish},
        ]
    begin = head(f"chatcmpl-{answer_id}", "chat.completion.chunk", request.model)
    return chunk_events(request, begin, choices, replies)


def _with_logprobs(request: Request, replies: list[Reply]) -> Iterator[tuple[Reply, dict[str, Any] | None]]:
    for reply in replies:
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for text, logprob in reply.tokens
        ]
        yield reply, {"content": content} if request.body.get("logprobs") else None


def reply_message(reply: Reply) -> dict[str, Any]:
    """Convert a sampled action to an assistant message in the format of the Chat Completions API."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.calls and not reply.text:
        message["content"] = None
    if reply.thinking is not None:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [function_call(call.id, call.name, call.arguments) for call in reply.calls]
    return message


async def answer(body: Mapping[str, Any], sample: Sampler, answer_id: str) -> Response:
    """Answer a chat completion request."""
    with validating():
        request = read_request(body)
    return (chunks if request.stream else completion)(request, await sample(request), answer_id)
