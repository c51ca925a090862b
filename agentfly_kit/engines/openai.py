"""Sampling on a server that speaks OpenAI's HTTP interface: exact tokens where it gives them, text alone elsewhere.

Knows no chains and runs no tools. With text alone the request's messages and tool schemas are sent, and calls come back
as the server took them apart. With exact tokens ids go out and come back, as with an engine in this process.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from agentfly_kit.chat import formats
from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.errors import ChatTemplateError, EngineError
from agentfly_kit.types import Message, Sample, Sampling, ToolCall, TurnRequest

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_RETRY_WAIT = 30.0
"""Seconds: what a server asks for in Retry-After counts up to this."""
_SERVE_COMMAND = (
    "python -m vllm.entrypoints.openai.api_server --model <folder> --logprobs-mode processed_logprobs "
    "--generation-config vllm"
)


class OpenAIEngine(Engine):
    """`OpenAIEngine("http://127.0.0.1:8000/v1", "name")`: chat completions, text and tool calls, nothing to train on.

    `await engine.probe()` asks the server for more. If it gives token ids and logprobs (vLLM does), the engine declares
    tokens="exact" from then on, is given ids by the chains of agents built afterwards, and its rollouts can be trained
    on. `tokens="exact"` says at once that it must, and the first sample then makes sure of it.

    stop_ids: ids that end a turn; needed for exact tokens: `policy.chat.stop_ids`.
    timeout: seconds for one attempt. retries: further attempts after 429, 5xx, a timeout or a lost connection, at
        doubling intervals; then the chain gets an EngineError.
    max_length: tokens of context, where the server does not say.
    extra_body: what else to send with each request.
    Not reproducible: the server's company decides, and seeds are not sent.
    """

    reproducible = False

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        tokens: Literal["exact", "none"] = "none",
        stop_ids: Sequence[int] | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 0.5,
        max_length: int | None = None,
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        address = urlsplit(base_url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise EngineError(f"base_url={base_url!r}: give an address such as 'http://127.0.0.1:8000/v1'")
        if tokens not in ("exact", "none"):
            raise EngineError(f"tokens={tokens!r}: give 'exact' or 'none'")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.stop_ids = tuple(stop_ids or ())
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.sampled = 0
        """Tokens sampled since it was made, where the server says."""
        self._key = api_key
        self._exact = tokens == "exact"
        self._probed = False
        self._logprobs_tempered = False
        """Whether the server's logprobs are those after temperature."""
        self._extra = dict(extra_body or {})
        self._length = max_length
        self._version = 0
        self._failed_updates = 0
        """Updates that ended no one knows how; 0 again after one that succeeded."""
        # A client belongs to the event loop in which it was made.
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    # --- what it declares ---

    @property
    def tokens(self) -> Literal["exact", "none"]:  # type: ignore[override]
        return "exact" if self._exact else "none"

    @property
    def logprobs(self) -> Literal["yes", "no"]:  # type: ignore[override]
        return "yes" if self._exact else "no"

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_length(self) -> int:
        return self._length or 1 << 30

    def __repr__(self) -> str:
        what = "exact tokens" if self._exact else "text only"
        return f"OpenAIEngine({self.model!r} at {self.base_url}, {what}, not reproducible)"

    @property
    def chat(self) -> Chat:
        """For an agent on a server that gives only text: `af.Agent(engine, chat=engine.chat)`. It has no tokenizer.

        Raises:  EngineError with exact tokens, which need the model's own.
        """
        if self._exact:
            raise EngineError("exact tokens need the model's own chat: policy.chat, or af.Chat(tokenizer)")
        return TextChat()

    async def probe(self) -> OpenAIEngine:
        """Ask the server what it gives, and declare that. Returns the engine.

        Raises:  EngineError if the server cannot be reached or refuses the key; a server that gives only text is none.
        """
        if self._length is None:
            listed = await self._request_or_none("GET", "/models")
            for entry in (listed or {}).get("data", []):
                if entry.get("id") == self.model and entry.get("max_model_len"):
                    self._length = int(entry["max_model_len"])
        warm = await self._logprobs_after_temperature()
        self._exact = self._probed = warm is not None
        self._logprobs_tempered = bool(warm)
        return self

    async def _verify_exact(self) -> None:
        """Before the first exact sample, once for all chains that wait for it."""
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._probed:
                return
            await self.probe()
            if not self._exact:
                self._exact = True  # as it was declared: the chains that wait here have ids
                raise EngineError(
                    f"{self.base_url} gives no token ids with logprobs, so tokens='exact' cannot be had; "
                    f"leave it out, or serve with {_SERVE_COMMAND}"
                )

    async def _logprobs_after_temperature(self) -> bool | None:
        """None if the server gives no ids or no logprobs. Halving the logits halves what lies between two tokens."""
        given = [await self._probe_once(temperature) for temperature in (1.0, 2.0)]
        if any(one is None for one in given):
            return None
        plain, halved = (one or {} for one in given)
        shared = sorted(set(plain) & set(halved), key=lambda token: plain[token])
        if len(shared) < 2 or abs(plain[shared[-1]] - plain[shared[0]]) < 1e-3:
            return False  # cannot be told apart: only temperature 1 is then safe
        between = plain[shared[-1]] - plain[shared[0]]
        return math.isclose(halved[shared[-1]] - halved[shared[0]], between / 2, rel_tol=0.05)

    async def _probe_once(self, temperature: float) -> dict[str, float] | None:
        prompt = list(self.stop_ids[:1]) or [0]
        body = self._completion(prompt, Sampling(temperature=temperature, max_tokens=1)) | {"logprobs": 5}
        answer = await self._request_or_none("POST", "/completions", body)
        try:
            choice = (answer or {})["choices"][0]
            if not isinstance(choice["token_ids"], list) or not choice["logprobs"]["token_logprobs"]:
                return None
            return dict(choice["logprobs"]["top_logprobs"][0])
        except (KeyError, IndexError, TypeError):
            return None

    async def _request_or_none(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The answer, or None if the server knows no such request."""
        try:
            return await self._request(method, path, body)
        except _Refused as error:
            if error.status in (401, 403):
                raise
            return None

    # --- sampling ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        began = time.perf_counter()
        if self._exact:
            return await self._sample_ids(ids, sampling, began)
        if request is None or not request.messages:
            raise EngineError("an engine that gives text only is asked with messages; use an Agent, or tokens='exact'")
        return await self._sample_text(request, sampling, began)

    async def _sample_ids(self, ids: Sequence[int], sampling: Sampling, began: float) -> Sample:
        if not self.stop_ids:
            raise EngineError("exact tokens need stop_ids=, the ids that end a turn, such as policy.chat.stop_ids")
        if not self._probed:
            await self._verify_exact()
        failed_updates = self._failed_updates
        if failed_updates:
            raise EngineError(
                "an update of this server's weights ended amid its work, so nobody knows which it has; "
                "await engine.update(policy) sends them again"
            )
        if sampling.truncates:
            raise EngineError(
                f"{sampling}: a server does not say how much probability truncation left out, so the record would be "
                "wrong; sample from the whole distribution, or evaluate with tokens='none'"
            )
        if not self._logprobs_tempered and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"temperature={sampling.temperature}: this server gives logprobs from before temperature; sample at 1, "
                f"or serve with {_SERVE_COMMAND}"
            )
        limit = min(sampling.max_tokens, self.max_length - len(ids))
        answer = await self._request("POST", "/completions", self._completion(ids, sampling, limit))
        if self._failed_updates != failed_updates:
            raise EngineError("an update of the weights failed amid its work while the request ran, which is void")
        try:
            choice = answer["choices"][0]
            out = tuple(int(i) for i in choice["token_ids"])
            logprobs = tuple(float(lp) for lp in choice["logprobs"]["token_logprobs"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self.base_url} left out token ids or logprobs: {_shortened(answer)}") from error
        self.sampled += len(out)
        by_text = isinstance(choice.get("stop_reason"), str)
        stop: Any = {"stop": "string" if by_text else "stop", "abort": "abort"}.get(choice["finish_reason"], "length")
        return Sample(
            ids=out,
            logprobs=logprobs,
            entropies=None,  # a server gives a few of the most probable tokens, and entropy needs all
            stop=stop,
            versions=(self._version,) * len(out),
            seconds=time.perf_counter() - began,
        )

    def _completion(self, ids: Sequence[int], sampling: Sampling, limit: int | None = None) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": [int(i) for i in ids],
            "max_tokens": limit or sampling.max_tokens,
            "temperature": sampling.temperature,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            "stop": list(sampling.stop),
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": bool(self.stop_ids),
            "skip_special_tokens": False,
            **self._extra,
        }

    async def _sample_text(self, request: TurnRequest, sampling: Sampling, began: float) -> Sample:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _wire_messages(request.messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.min_p:
            body["min_p"] = sampling.min_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        try:
            answer = await self._request("POST", "/chat/completions", body | self._extra)
        except _Refused as error:
            if error.status != 400 or "tool" not in str(error):
                raise
            raise EngineError(
                f"{error}. A vLLM server takes tool calls apart if it has --enable-auto-tool-choice and "
                "--tool-call-parser hermes (or another); with OpenAIEngine(extra_body={'tool_choice': 'none'}) it "
                "leaves them in the text, where they are read here"
            ) from error
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            calls = tuple(_parse_tool_call(call, i) for i, call in enumerate(message.get("tool_calls") or ()))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.base_url} gave no chat completion: {_shortened(answer)}") from error
        used = answer.get("usage") or {}
        self.sampled += int(used.get("completion_tokens") or 0)
        return Sample(
            ids=None,
            logprobs=None,
            entropies=None,
            stop="length" if choice.get("finish_reason") == "length" else "stop",
            versions=None,
            text=text,
            calls=calls or None,
            seconds=time.perf_counter() - began,
        )

    # --- weights ---

    async def update(self, policy: Any) -> None:
        """Put a policy's weights into a vLLM server on this machine, which must have been started for it.

        Raises:  EngineError with the command that starts such a server. If it ended amid its work, cancelled say, the
            engine refuses to sample until an update has succeeded.
        """
        from agentfly_kit.engines.vllm.weight_transfer import BufferNotOpened, Delivery

        if not self._exact:
            raise EngineError("a server that gives only text cannot be trained through; see engine.probe()")
        root = self.base_url.removesuffix("/v1")

        async def call(method: str, *args: Any) -> list[str | None]:
            body = {"method": method, "args": args, "timeout": 600}
            try:
                answers: list[str | None] = (await self._request("POST", f"{root}/collective_rpc", body))["results"]
            except _Refused:
                delivery.has_sent = False  # by the server, which asked no worker
                raise
            return answers

        try:
            # In one chunk: a request whose answer was lost is sent again, and that must do no harm.
            async with Delivery(policy, "shm", sys.maxsize) as delivery:
                try:
                    await self._request("POST", f"{root}/pause?mode=keep&clear_cache=false")
                except asyncio.CancelledError:
                    await self._request("POST", f"{root}/resume")  # the pause may have begun
                    raise
                try:
                    await delivery.send(call)
                    await self._request("POST", f"{root}/reset_prefix_cache?reset_running_requests=true")
                    self._version, self._failed_updates = delivery.version, 0
                except BaseException:
                    self._failed_updates += delivery.has_sent
                    raise
                finally:
                    await self._request("POST", f"{root}/resume")
        except BufferNotOpened as error:
            raise EngineError(
                f"the server's worker cannot open the weights ({error}); it must run on this machine, as this user"
            ) from error
        except _Refused as error:
            raise EngineError(
                f"the weights of this server cannot be changed ({error}); start it on this machine with "
                f"VLLM_SERVER_DEV_MODE=1 {_SERVE_COMMAND} "
                "--worker-extension-cls agentfly_kit.engines.vllm.worker.WorkerExtension"
            ) from error

    # --- the wire ---

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            import httpx

            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            client = httpx.AsyncClient(timeout=httpx.Timeout(self.timeout), limits=limits, headers=headers)
            self._clients[loop] = client
        return client

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request with its retries. Cancelling it closes the connection.

        Raises:  _Refused for an answer that trying again would not change; EngineError when the attempts are used up.
        """
        import httpx

        client = self._client()
        url = path if "://" in path else self.base_url + path
        last = ""
        for attempt in range(self.retries + 1):
            wait = self.backoff * 2**attempt * random.uniform(0.75, 1.25)
            try:
                async with asyncio.timeout(self.timeout):
                    response = await client.request(method, url, json=body)
            except (httpx.TransportError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.status_code < 300:
                    try:
                        answer = response.json() if response.content else {}
                    except ValueError as error:
                        raise EngineError(
                            f"{url} answered with something that is no JSON: {response.text[:200]!r}"
                        ) from error
                    return answer if isinstance(answer, dict) else {"answer": answer}
                last = f"{response.status_code} {_error_text(response)}"
                if response.status_code not in _RETRIED_STATUSES:
                    raise _Refused(f"{url} refused: {last}", response.status_code)
                wait = max(wait, _retry_after_seconds(response.headers.get("retry-after")))
            if attempt < self.retries:
                await asyncio.sleep(min(wait, _MAX_RETRY_WAIT))
        raise EngineError(
            f"{url} failed {self.retries + 1} times, the last time with {last}; is the server up? "
            "retries=, backoff= and timeout= say how long to try"
        )

    async def close(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


class TextChat(Chat):
    """A chat without a tokenizer: reads the calls in a text, and refuses everything that needs tokens."""

    def __init__(self, format: str | formats.Format = "hermes") -> None:
        self.tokenizer = None
        self.format = formats.get(format)
        self.stop_ids = ()

    def _render(self, *_: Any, **__: Any) -> Any:
        raise ChatTemplateError("this chat has no tokenizer, for its engine gives text only; no token can be made here")

    encode = render = prompt = observation_ids = token_texts = _render

    def text(self, ids: Sequence[int]) -> str:
        return "" if len(ids) == 0 else str(self._render())

    def __repr__(self) -> str:
        return f"TextChat(no tokenizer, format {self.format.name!r})"


class _Refused(EngineError):
    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the wire wants them: arguments are JSON text, and a result follows the call that it is for.

    The result of a call that nobody could read has no such call, and is told as the user's words.
    """
    out: list[dict[str, Any]] = []
    open_calls: set[str] = set()
    for message in messages:
        told = {k: v for k, v in message.items() if k in ("role", "content", "name", "tool_calls", "tool_call_id")}
        if told.get("tool_calls"):
            told["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in told["tool_calls"]
            ]
            open_calls = {call["id"] for call in told["tool_calls"]}
        else:
            told.pop("tool_calls", None)
        if told["role"] == "assistant" and "tool_calls" not in told:
            open_calls = set()
        if told["role"] == "tool" and told.get("tool_call_id") not in open_calls:
            told = {"role": "user", "content": told["content"]}
        out.append(told)
    return out


def _parse_tool_call(call: dict[str, Any], index: int) -> ToolCall:
    """A call as the server took it apart; arguments that are no JSON object are told to the model."""
    name, said = str(call["function"]["name"]), call["function"].get("arguments")
    key = str(call.get("id") or f"call-{index}")
    raw = said if isinstance(said, str) else json.dumps(said)
    try:
        arguments = json.loads(said) if isinstance(said, str) and said.strip() else said or {}
    except ValueError as error:
        return ToolCall(key, name, {}, error=f"the arguments are not valid JSON ({error})", raw=raw)
    if not isinstance(arguments, dict):
        return ToolCall(key, name, {}, error="the arguments are not a JSON object", raw=raw)
    return ToolCall(key, name, arguments, raw=raw)


def _shortened(answer: Any) -> str:
    text = json.dumps(answer)
    return text if len(text) <= 300 else text[:297] + "..."


def _error_text(response: Any) -> str:
    """The server's own words."""
    try:
        said = response.json()
        error = said.get("error", said)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return str(response.text)[:300]


def _retry_after_seconds(retry_after: str | None) -> float:
    """Seconds that the server asks to wait; dates are not worth a parser here."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0
