"""Replies to requests of a harness, and exceptions raised by an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit.errors import AgentFlyError

# Error types of Anthropic's API, keyed by HTTP status.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


@dataclass(frozen=True)
class ReplyCall:
    """Tool call with its id, the name of the tool, and the arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyOptions:
    """Options of a request for a reply.

    Attributes:
        prompt: Text or token ids that replace the messages. A prompt that begins with all ids of the row of an earlier
            prompt continues this row. The reply to such a prompt is not parsed.
        author: Author recorded for the action; by default the agent's name.
        max_tokens: Maximum number of tokens; `Sampling.max_tokens` of the agent applies if it is smaller.
        stop: Additional stop strings.
        must_call: Name of the tool that the reply must call, "" for any tool, or None.
        schema: JSON schema of a reply that calls no tool, or None.
    """

    prompt: str | Sequence[int] | None = None
    author: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    must_call: str | None = None
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """Sampled action in the form that is sent to the client.

    Attributes:
        text: Text without thinking and tool calls.
        thinking: Thinking text, or None.
        calls: Tool calls.
        finish: Finish reason: "stop", "length" or "tool_calls".
        stop_string: The stop string that ended the action, or None.
        prompt_tokens, completion_tokens: Number of tokens; 0 with a text-only engine.
        tokens: Text and logprob of each sampled token.
        prompt_ids, ids: Token ids of the prompt and of the action.
    """

    text: str
    thinking: str | None = None
    calls: tuple[ReplyCall, ...] = ()
    finish: str = "stop"
    stop_string: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    ids: tuple[int, ...] = field(default=(), repr=False)


class RequestError(AgentFlyError):
    """Raised when a request is rejected. `status` is the HTTP status code, and `code` identifies the reason."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The body of the error response, which is valid in the APIs of OpenAI and of Anthropic."""
        return {
            "type": "error",
            "error": {
                "type": _ERROR_TYPES.get(self.status, "invalid_request_error"),
                "message": str(self),
                "code": self.code,
                "param": None,
            },
        }


@contextmanager
def validating() -> Iterator[None]:
    """Context manager that converts a TypeError or AttributeError, caused by an invalid request, to RequestError."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        raise RequestError(f"a value of the request has the wrong type: {error}", code="invalid_request") from error


class ChainEnded(RequestError):
    """Raised when a request cannot be answered because the chain has ended. `stop` is the stop reason of the chain."""

    def __init__(self, stop: str, detail: str = "") -> None:
        super().__init__(f"the chain has ended: {stop}{f' ({detail})' if detail else ''}", code=stop)
        self.stop = stop
