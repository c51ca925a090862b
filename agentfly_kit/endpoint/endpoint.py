"""`Endpoint`, through which a harness sends requests to the policy, in process or over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentfly_kit._display import Displayable
from agentfly_kit.endpoint import completions, responses
from agentfly_kit.endpoint.reply import Reply, RequestError
from agentfly_kit.endpoint.server import KEY_PREFIX, Server
from agentfly_kit.errors import AgentFlyError, SettingsError

# Placeholder base URL for the in-process client, to which no connection is opened.
_IN_PROCESS = "http://agentfly.invalid"


@dataclass
class Usage:
    """Number of requests and tokens of one chain, for use by the harness."""

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
    """OpenAI-compatible endpoint of one chain, which a harness receives as the parameter `endpoint`.

    Every request is answered by the policy, and the action is recorded in the chain. If a request names the model
    "policy/writer", the author of the action is "writer". The sampling settings are those of the agent; with
    `max_tokens` or `stop`, a request can only shorten its action.

    Attributes:
        api_key: key that identifies the chain in HTTP requests.
        usage: number of requests and tokens so far.
        model: model name to use in requests.
    """

    model = completions.MODEL

    def __init__(self, reply: Callable[..., Awaitable[Reply]], name: str, warn: Callable[[str, str], None]) -> None:
        self.api_key = KEY_PREFIX + secrets.token_hex(16)
        self.usage = Usage()
        self._reply = reply
        self._name = name
        self._warn = warn
        self._loop = asyncio.get_running_loop()
        self._server: Server | None = None
        self._closed = False
        self._answers = 0
        self._earlier: dict[str, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Endpoint({self._name!r}, {self.usage.requests} requests{state})"

    # --- clients ---

    @property
    def base_url(self) -> str:
        """URL for HTTP clients. The first access starts a server on the loopback interface."""
        if self._closed:
            raise SettingsError("the endpoint is closed, because its chain has ended")
        if self._server is None:
            self._server = Server.of_loop(self._loop)
            self._server.add(self.api_key, self.handle)
        return f"{self._server.url}/{self.api_key}/v1"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for a command-line agent. Pass them as `env=os.environ | endpoint.env`."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "OPENAI_API_KEY": self.api_key}

    @cached_property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` client whose requests are answered in this process, without a network connection.

        Raises:
            SettingsError: if the package `openai` is not installed.
        """
        return _openai().AsyncOpenAI(
            api_key=self.api_key, base_url=f"{_IN_PROCESS}/v1", http_client=self.http_client, max_retries=0
        )

    @cached_property
    def http_client(self) -> Any:
        """Async HTTP client used by `client`, for frameworks that accept an HTTP client."""
        openai = _openai()
        major = int(str(openai.__version__).partition(".")[0])
        httpx = importlib.import_module("httpx2" if major >= 3 else "httpx")

        class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
            async def handle_async_request(transport, request: Any) -> Any:
                answer = await self.handle(request.method, request.url.path, await request.aread())
                headers = {"content-type": answer.content_type}
                return httpx.Response(answer.status, headers=headers, content=answer.body, request=request)

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

    async def handle(self, method: str, path: str, body: bytes) -> Answer:
        """Answer an HTTP request. Invalid requests get a JSON error with a status code that clients do not retry."""
        try:
            if path.endswith("/models") and method == "GET":
                model = {"id": self.model, "object": "model", "created": 0, "owned_by": "agentfly_kit"}
                return _json_answer({"object": "list", "data": [model]})
            if method != "POST":
                raise RequestError(f"{method} {path} is not supported", status=404)
            return _to_answer(await self._on_loop(self._answer(path, _read_json(body))))
        except RequestError as error:
            return error_answer(str(error), error.status, error.code)
        except (AgentFlyError, RecursionError) as error:  # the messages or tools are invalid or too deeply nested
            return error_answer(str(error), 400, "invalid_request")

    async def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | Iterator[str]:
        if self._closed:
            raise RequestError("the chain with this key has ended", status=404, code="unknown_key")
        self._answers += 1
        answer_id = f"{self.api_key[-8:]}{self._answers}"
        if path.endswith("/chat/completions"):
            answer, counts = await completions.answer(body, self._reply, answer_id, self._warn)
        elif path.endswith("/responses"):
            answer, counts = await responses.answer(body, self._reply, answer_id, self._warn, self._earlier)
        else:
            raise RequestError(f"{path} is not supported; use /chat/completions or /responses", status=404)
        self.usage.requests += 1
        self.usage.prompt_tokens += counts["prompt_tokens"]
        self.usage.completion_tokens += counts["completion_tokens"]
        return answer

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


def error_answer(message: str, status: int, code: str | None = None) -> Answer:
    """Return an error response in the format of the OpenAI API."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return _json_answer({"error": error}, status)


def _json_answer(data: Mapping[str, Any], status: int = 200) -> Answer:
    return Answer(status, "application/json", json.dumps(data).encode())


def _to_answer(answer: dict[str, Any] | Iterator[str]) -> Answer:
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
