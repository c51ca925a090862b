"""Chat Completions API: functions that parse requests and create complete or streamed responses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly_kit.endpoint.reply import Reply, RequestError, validating

MODEL = "policy"
_MAX_CHOICES = 16
# Sampling parameters that are ignored, because training requires the settings of `Agent.sampling`.
_IGNORED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
_UNSUPPORTED = ("functions", "function_call", "audio", "modalities", "prediction")


@dataclass(frozen=True)
class Request:
    """Parsed chat completion request. `warnings` contains a pair (name, warning) for each ignored parameter."""

    messages: list[Any]
    tools: list[Any]
    author: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    model: str = MODEL
    warnings: tuple[tuple[str, str], ...] = ()


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
    n = body.get("n") or 1
    if not isinstance(n, int) or not 1 <= n <= _MAX_CHOICES:
        raise RequestError(f"'n' must be an integer from 1 to {_MAX_CHOICES}, got {n!r}")
    choice = body.get("tool_choice")
    options = body.get("stream_options") or {}
    return Request(
        messages=body.get("messages") or [],
        tools=[] if choice == "none" else body.get("tools") or [],
        author=read_author(body),
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=(stop,) if isinstance(stop := body.get("stop") or (), str) else tuple(stop),
        n=n,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        model=body.get("model") or MODEL,
        warnings=tuple(ignored(body)),
    )


def ignored(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a pair (name, warning) for each parameter of the request that is ignored."""
    for name in _IGNORED:
        if body.get(name) is not None:
            yield name, f"the harness asked for {name}={body[name]!r}; Agent(sampling=) decides instead"
    if body.get("tool_choice") not in (None, "auto", "none"):
        yield "tool_choice", f"the harness asked for tool_choice={body['tool_choice']!r}, which is treated as 'auto'"
    text = body.get("text")
    form = body.get("response_format") or (text.get("format") if isinstance(text, Mapping) else None)
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        yield "response_format", f"the harness asked for the format {form.get('type')!r}, which is not enforced"


def read_author(body: Mapping[str, Any]) -> str | None:
    """Return the author given in the model name of a request, such as "writer" in "policy/writer", or None."""
    name, _, role = (body.get("model") or MODEL).partition("/")
    return role or None if name == MODEL else None


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    return next((body[name] for name in names if body.get(name) is not None), None)


# --- answers ---------------------------------------------------------------------------------------


def completion(request: Request, replies: list[Reply], answer_id: str) -> dict[str, Any]:
    """Return the response to a request as a chat completion object."""
    return {
        **_head(answer_id, "chat.completion", request.model),
        "choices": [
            {
                "index": i,
                "message": reply_message(reply),
                "finish_reason": reply.finish,
                "logprobs": _logprobs(reply) if request.logprobs else None,
            }
            for i, reply in enumerate(replies)
        ],
        "usage": usage(replies),
    }


def chunks(request: Request, replies: list[Reply], answer_id: str) -> Iterator[str]:
    """Yield the response as server-sent events, with the whole text of a message in one event."""

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return sse({**_head(answer_id, "chat.completion.chunk", request.model), "choices": choices, **more})

    for i, reply in enumerate(replies):
        delta = reply_message(reply)
        calls = delta.pop("tool_calls", None)
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        logprobs = _logprobs(reply) if request.logprobs else None
        yield event([{"index": i, "delta": delta, "finish_reason": None, "logprobs": logprobs}])
        yield event([{"index": i, "delta": {}, "finish_reason": reply.finish}])
    if request.include_usage:
        yield event([], usage=usage(replies))
    yield "data: [DONE]\n\n"


def sse(data: Mapping[str, Any], name: str | None = None) -> str:
    """Format one server-sent event. `name` is the type of the event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def usage(replies: Iterable[Reply]) -> dict[str, int]:
    """Return the token counts of a response. If there are several choices, the prompt is counted once."""
    replies = list(replies)
    prompt = max((reply.prompt_tokens for reply in replies), default=0)
    completion = sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(answer_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


def reply_message(reply: Reply) -> dict[str, Any]:
    """Convert a sampled action to an assistant message in the format of the Chat Completions API."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.thinking is not None:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def _logprobs(reply: Reply) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, logprob in reply.tokens
        ]
    }


async def answer(
    body: Mapping[str, Any], reply: Callable[..., Any], answer_id: str, warn: Callable[[str, str], None]
) -> tuple[dict[str, Any] | Iterator[str], dict[str, int]]:
    """Answer a chat completion request. Return a response object or an iterator over events, and the token counts."""
    with validating():
        request = read_request(body)
    for key, text in request.warnings:
        warn(key, text)
    settings = {"author": request.author, "max_tokens": request.max_tokens, "stop": request.stop}
    replies = [await reply(request.messages, request.tools, **settings) for _ in range(request.n)]
    write = chunks if request.stream else completion
    return write(request, replies, answer_id), usage(replies)
