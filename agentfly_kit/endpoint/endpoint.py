"""`Endpoint`, through which a harness sends requests to the policy, in process or over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

from agentfly_kit._display import Displayable
from agentfly_kit.endpoint import completions, messages, responses, text_completions
from agentfly_kit.endpoint.reply import Reply, RequestError, validating
from agentfly_kit.endpoint.request import MODEL, Request, Response, usage
from agentfly_kit.endpoint.server import KEY_PREFIX, Server
from agentfly_kit.errors import AgentFlyError, SettingsError

if TYPE_CHECKING:
    from agentfly_kit.endpoint.sandbox_server import SandboxServer

# Placeholder base URL for the in-process client; no connection is made to it.
_IN_PROCESS = "http://agentfly.invalid"
# A client that sends this many refused requests in a row would continue until a time limit.
_MAX_REFUSED = 100


@dataclass
class Usage:
    """Numbers of requests and tokens of one chain, for use by the harness."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Answer:
    """HTTP response of an endpoint."""

    status: int
    content_type: str
    body: bytes


class Endpoint(Displayable):
    """Endpoint of one chain with the APIs of OpenAI and Anthropic; a harness gets it as its parameter `endpoint`.

    Every request is answered by the policy, and the action is recorded in the chain. If a request names the model
    "policy/writer", the author of the action is "writer". The sampling settings are those of the agent; with
    `max_tokens` or `stop`, a request can only shorten its action.

    Attributes:
        api_key: key that identifies the chain in HTTP requests.
        usage: number of requests and tokens so far.
        model: model name to use in requests.
    """

    model = MODEL

    def __init__(
        self,
        reply: Callable[..., Awaitable[Reply]],
        count_tokens: Callable[[Sequence[Any], Sequence[Any]], Awaitable[int]],
        name: str,
        warn: Callable[[str, str], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.api_key = KEY_PREFIX + secrets.token_hex(16)
        self.usage = Usage()
        self._reply = reply
        self._count_tokens = count_tokens
        self._name = name
        self._warn, self._give_up = warn, give_up
        self._loop = asyncio.get_running_loop()
        self._server: Server | None = None
        self._closed = False
        self._answers, self._refused = 0, 0
        self._earlier: dict[str, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        return f"Endpoint({self._name!r}, {self.usage.requests} requests{', closed' if self._closed else ''})"

    # --- clients ---

    @property
    def base_url(self) -> str:
        """URL for HTTP clients. The first access starts a server on the loopback interface."""
        self._check_open()
        if self._server is None:
            self._server = Server.of_loop(self._loop)
            self._server.add(self.api_key, self.handle)
        return f"{self._server.url}/{self.api_key}/v1"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for a command-line agent. Pass them as `env=os.environ | endpoint.env`."""
        return self.variables(self.base_url)

    def variables(self, url: str) -> dict[str, str]:
        """Return the environment variables for an agent that reaches this endpoint at a URL other than `base_url`."""
        key = self.api_key
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # Anthropic's clients append /v1/messages
            "ANTHROPIC_API_KEY": key,
        }

    def for_sandbox(self) -> SandboxServer:
        """Return a server that answers requests from one sandbox, for `ShellSandbox.run_agent`."""
        from agentfly_kit.endpoint.sandbox_server import SandboxServer

        self._check_open()
        return SandboxServer(self)

    @cached_property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` client whose requests are answered in this process, without a network connection.

        Raises:
            SettingsError: if the package `openai` is not installed.
        """
        return _openai().AsyncOpenAI(
            api_key=self.api_key,
            base_url=f"{_IN_PROCESS}/v1",
            http_client=self.http_client,
            max_retries=0,
        )

    @cached_property
    def http_client(self) -> Any:
        """Async HTTP client used by `client`, for frameworks that accept an HTTP client."""
        # openai 2 uses httpx; later versions and anthropic use httpx2.
        old = any(found.version.startswith("2.") for found in distributions(name="openai"))
        httpx = importlib.import_module("httpx" if old else "httpx2")

        class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
            async def handle_async_request(transport, request: Any) -> Any:
                answer = await self.handle(request.method, request.url.path, await request.aread())
                return httpx.Response(
                    answer.status,
                    headers={"content-type": answer.content_type},
                    content=answer.body,
                    request=request,
                )

        return httpx.AsyncClient(transport=Transport(), base_url=f"{_IN_PROCESS}/v1")

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **body: Any
    ) -> dict[str, Any]:
        """Send a chat completion request and return the response as a dict. The package `openai` is not required.

        Args:
            messages: the conversation, as in the OpenAI API.
            tools: schemas of the tools.
            **body: further fields of the request, such as model="policy/writer" or max_tokens=64.

        Raises:
            RequestError: if the request is rejected or the chain has ended.
        """
        whole = {"messages": list(messages), "tools": list(tools), **body}
        if whole.get("stream"):
            raise RequestError("'stream' must be False for endpoint.chat")
        got = await self._on_loop(self._answer("/v1/chat/completions", whole))
        assert isinstance(got, dict)
        return got

    # --- requests ---

    def _check_open(self) -> None:
        if self._closed:
            raise SettingsError("the endpoint is closed, because its chain has ended")

    async def handle(self, method: str, path: str, body: bytes) -> Answer:
        """Answer an HTTP request. Invalid requests get a JSON error with a status code that clients do not retry."""
        try:
            if path.endswith("/models") and method == "GET":
                return _json_answer(_MODELS)
            if method != "POST":
                raise RequestError(f"{method} {path} is not supported", status=404)
            return _to_answer(await self._on_loop(self._answer(path, _read_json(body))))
        except (AgentFlyError, RecursionError) as error:  # the messages or tools may be too deeply nested
            refusal = error if isinstance(error, RequestError) else RequestError(str(error), code="invalid_request")
            self._refused += refusal.status != 404  # agents may probe routes that do not exist
            if self._refused == _MAX_REFUSED:
                reason = f"{_MAX_REFUSED} requests in a row were refused, the last because {refusal}"
                self._loop.call_soon_threadsafe(self._give_up, reason)
            return _json_answer(refusal.body, refusal.status)

    async def _answer(self, path: str, body: Mapping[str, Any]) -> Response:
        if self._closed:
            raise RequestError("the chain with this key has ended", status=404, code="unknown_key")
        self._answers += 1
        answer_id = f"{self.api_key[-8:]}{self._answers}"
        if path.endswith("/chat/completions"):
            return await completions.answer(body, self._sample, answer_id)
        if path.endswith("/completions"):
            return await text_completions.answer(body, self._sample, answer_id)
        if path.endswith("/responses"):
            return await responses.answer(body, self._sample, answer_id, self._earlier)
        if path.endswith("/messages"):
            return await messages.answer(body, self._sample, answer_id)
        if path.endswith("/messages/count_tokens"):
            with validating():
                request = messages.read_request(body)
            return {"input_tokens": await self._count_tokens(request.messages, request.tools)}
        raise RequestError(
            f"{path} is not supported; use /chat/completions, /completions, /responses or /messages", status=404
        )

    async def _sample(self, request: Request) -> list[Reply]:
        for key, text in request.warnings:
            self._warn(key, text)
        replies = [await self._reply(request.messages, request.tools, request.options) for _ in range(request.n)]
        counts, self._refused = usage(replies), 0
        self.usage.requests += 1
        self.usage.prompt_tokens += counts["prompt_tokens"]
        self.usage.completion_tokens += counts["completion_tokens"]
        return replies

    async def _on_loop(self, work: Any) -> Any:
        """Await `work` in the event loop of the chain, even if the caller uses a loop in another thread."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def close(self) -> None:
        """Reject all further requests. The server is stopped if no other endpoint uses it."""
        self._closed = True
        if self._server is not None:
            await self._server.remove(self.api_key)
            self._server = None


# Response that lists the models, in a form that is valid in the APIs of OpenAI and Anthropic.
_MODELS = {
    "object": "list",
    "data": [
        {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "agentfly_kit",
            "type": "model",
            "display_name": MODEL,
            "created_at": "1970-01-01T00:00:00Z",
        }
    ],
    "first_id": MODEL,
    "last_id": MODEL,
    "has_more": False,
}


def _json_answer(data: Mapping[str, Any], status: int = 200) -> Answer:
    return Answer(status, "application/json", json.dumps(data).encode())


def _to_answer(answer: Response) -> Answer:
    if isinstance(answer, dict):
        return _json_answer(answer)
    return Answer(200, "text/event-stream", "".join(answer).encode())


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"the body must be a JSON object, got {type(data).__name__}")
    return data


def _openai() -> Any:
    try:
        return importlib.import_module("openai")
    except ImportError:
        raise SettingsError(
            "endpoint.client requires the package openai: pip install 'agentfly_kit[agents]'; "
            "endpoint.chat(messages) and endpoint.base_url need no client"
        ) from None
