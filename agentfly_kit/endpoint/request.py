"""Parsed requests, and the parts of requests and responses that the APIs have in common."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentfly_kit.endpoint.reply import Reply, ReplyOptions, RequestError

MODEL = "policy"
_MAX_CHOICES = 16
# Sampling parameters that are ignored, because training requires the settings of `Agent.sampling`.
_IGNORED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")


@dataclass(frozen=True)
class Request:
    """Parsed request for `n` replies. `warnings` contains a pair (name, warning) for each ignored parameter."""

    body: Mapping[str, Any]
    messages: Sequence[Any]
    tools: Sequence[Any]
    options: ReplyOptions
    n: int
    warnings: tuple[tuple[str, str], ...]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        return self.body.get("model") or MODEL


# Function that samples the replies to a request.
Sampler: TypeAlias = Callable[[Request], Awaitable[list[Reply]]]
# Response object, or its server-sent events.
Response: TypeAlias = dict[str, Any] | Iterator[str]


def make_request(
    body: Mapping[str, Any],
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    *limits: str,
    stop: str | Sequence[str] | None = None,
    n: Any = None,
    prompt: str | Sequence[int] | None = None,
) -> Request:
    """Return a request for messages and tools, or a prompt. `limits` lists the fields that may hold the token limit.

    Raises:
        RequestError: if `n` or the format of the reply is invalid.
    """
    n = n or 1
    if not isinstance(n, int) or not 1 <= n <= _MAX_CHOICES:
        raise RequestError(f"'n' must be an integer from 1 to {_MAX_CHOICES}, got {n!r}")
    return Request(
        body=body,
        messages=messages,
        tools=[] if body.get("tool_choice") in ("none", {"type": "none"}) else tools or [],
        options=ReplyOptions(
            prompt=prompt,
            author=_author(body),
            max_tokens=next((body[name] for name in limits if body.get(name) is not None), None),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            must_call=_must_call(body),
            schema=_schema(body),
        ),
        n=n,
        warnings=tuple(_ignored(body)),
    )


def _ignored(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _IGNORED:
        if body.get(name) is not None:
            yield name, f"the harness asked for {name}={body[name]!r}; Agent(sampling=) is used instead"
    if choice := _unknown_choice(body):
        yield "tool_choice", f"the harness asked for tool_choice={choice!r:.80}, which is not enforced"


def _unknown_choice(body: Mapping[str, Any]) -> Any:
    """Return the tool choice of a request if this library does not know it, else None."""
    choice = body.get("tool_choice")
    known = ("auto", "none", "any", "required", "function", "tool")
    return choice if isinstance(choice, Mapping) and choice.get("type") not in known else None


def _must_call(body: Mapping[str, Any]) -> str | None:
    """Return the name of the tool that the reply must call, "" for any tool, or None."""
    choice = body.get("tool_choice")
    if choice in ("required", {"type": "required"}):
        return ""
    if not isinstance(choice, Mapping):
        return None
    if choice.get("type") == "any":
        return ""
    if choice.get("type") not in ("function", "tool"):
        return None
    return str((choice.get("function") or choice).get("name"))


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    form = body.get("response_format")
    for name in ("text", "output_config"):  # fields of the Responses API and the Messages API
        if form is None and isinstance(body.get(name), Mapping):
            form = body[name].get("format")
    if not form or (kind := form.get("type")) in (None, "text"):
        return None
    schema = {"type": "object"} if kind == "json_object" else (form.get("json_schema") or form).get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"the format of the reply must be text, json_object or json_schema, got {form!r:.80}")
    return schema


def _author(body: Mapping[str, Any]) -> str | None:
    """Return the author given in the model name of a request, such as "writer" in "policy/writer", or None."""
    name, _, role = (body.get("model") or MODEL).partition("/")
    return role or None if name == MODEL else None


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool in the format of the Chat Completions API."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def function_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the format of the Chat Completions API, with its arguments as JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def image_part(url: Any) -> dict[str, Any]:
    """Return an image in the format of the Chat Completions API."""
    return {"type": "image_url", "image_url": {"url": url}}


def sse(data: Mapping[str, Any], name: str | None = None) -> str:
    """Format one server-sent event. `name` is the type of the event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


def head(id: str, kind: str, model: str) -> dict[str, Any]:
    """Return the first fields of a response of the APIs whose paths end in /completions."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def chunk_events(
    request: Request, head: Mapping[str, Any], choices: Iterable[dict[str, Any]], replies: list[Reply]
) -> Iterator[str]:
    """Yield one server-sent event for each choice, the token counts if they are requested, and an end marker."""
    for choice in choices:
        yield sse({**head, "choices": [choice]})
    options = request.body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield sse({**head, "choices": [], "usage": usage(replies)})
    yield "data: [DONE]\n\n"


def usage(replies: Iterable[Reply]) -> dict[str, int]:
    """Return the token counts of a response. If there are several choices, the prompt is counted once."""
    replies = list(replies)
    prompt = max((reply.prompt_tokens for reply in replies), default=0)
    completion = sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
