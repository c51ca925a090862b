"""An engine that samples on a server with an OpenAI-compatible HTTP API.

In text mode, the engine sends the request's messages and tool schemas, and the server parses the tool calls. In exact
mode, token ids are sent and returned, as with an engine in this process; the server must support this.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from agentfly_kit._display import shorten
from agentfly_kit.chat.chat import Chat
from agentfly_kit.chat.text_chat import TextChat
from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.chat_messages import parse_tool_call, wire_messages
from agentfly_kit.engines.http import SERVE_COMMAND, Refused, RetryingClient
from agentfly_kit.errors import EngineError, SettingsError, check_choice, check_count, check_value
from agentfly_kit.samples import Sample, Sampling, TurnRequest

# Settings that sample from the unmodified distribution.
_NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


class OpenAIEngine(Engine):
    """Sample on an OpenAI-compatible server, such as `OpenAIEngine("http://127.0.0.1:8000/v1", "name")`.

    By default the engine uses chat completions: it returns text and tool calls, which cannot be trained on. If
    `await engine.probe()` finds that the server returns token ids and logprobs (vLLM does), the engine switches to
    tokens="exact": agents created after that send ids, and their rollouts can be used for training. With
    `tokens="exact"` the engine starts in this mode, and the first sample verifies that the server supports it.

    The engine is not reproducible: results depend on the server's batch composition, and no seeds are sent.

    `update` loads the weights of a policy into a vLLM server that was started by `serve_vllm` or with the command in
    the error message of `update`. A server that is restarted loads its initial weights. The engine detects a restart
    that interrupted a request, and does not sample until the next update.

    Args:
        base_url: Address of the API, including "/v1".
        model: Name of the model on the server.
        api_key: Key sent as a bearer token.
        tokens: "none" for text, "exact" for token ids with logprobs.
        stop_ids: Ids that end a turn, such as `policy.chat.stop_ids`; required for exact tokens.
        timeout: Time limit per attempt in seconds.
        retries: Number of retries after a temporary error: a status such as 429 or 503, a timeout or a lost connection.
            If all retries fail, EngineError is raised.
        backoff: Wait before the first retry in seconds; the wait doubles with each further retry.
        max_length: Context length in tokens, if the server does not report it.
        extra_body: Additional fields of each request. In text mode, a field that is None is not sent. In text mode, the
            server also chooses options that are neither in `Sampling` nor here, and top_k and min_p if these are 0. A
            vLLM server reads such options from the model's generation_config.json; to sample from the whole
            distribution, pass {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}.
        weights: Way in which `update` sends weights: "shm" through a file in shared memory to a server on this machine,
            "http" over a socket that this process opens for the duration of an update, or "auto" for "shm" if the
            server's address is a loopback address and "http" otherwise. The weights are not encrypted. For "http", the
            server connects to the address of the interface through which this machine reaches the server. If the server
            must connect to another address, pass that address, for example "http://10.0.0.5:7000".
        images: Maximum number of images per request in text mode, which are sent as data URLs; 0 if the model reads
            only text. Images returned by tools follow their results in a user message, because the API requires results
            to be text.

    Raises:
        EngineError, SettingsError: If a setting is invalid.
    """

    reproducible = False
    remote = True

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
        weights: str = "auto",
        images: int = 16,
    ) -> None:
        address = urlsplit(base_url if isinstance(base_url, str) else "")
        if address.scheme not in ("http", "https") or not address.netloc:
            raise EngineError(f"base_url must be an address such as 'http://127.0.0.1:8000/v1', got {base_url!r}")
        check_choice("tokens", tokens, Literal["exact", "none"])
        if weights not in ("auto", "shm", "http") and not (
            weights.startswith("http://") and urlsplit(weights).netloc
        ):
            raise EngineError(
                f"weights must be 'auto', 'shm', 'http' or an address such as 'http://10.0.0.5:7000', got {weights!r}"
            )
        check_value("timeout", timeout, limit="above 0")
        check_count("retries", retries, 0)
        check_count("images", images, 0)
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.stop_ids = tuple(stop_ids or ())
        self.http = RetryingClient(self.base_url, api_key, timeout, retries, backoff)
        # Number of tokens sampled by this engine; in text mode, only those that the server reports.
        self.sampled = 0
        self._exact = tokens == "exact"
        self._probed = False
        # True if the server returns logprobs after temperature scaling.
        self._logprobs_tempered = False
        self._extra = dict(extra_body or {})
        # Name of the message field in which the server sends and expects thinking.
        self._thinking_field = "reasoning_content"
        self._length = max_length
        self.weights = weights
        self._images = images
        # Dtype of the served model, known after the first update.
        self.dtype: str | None = None
        self._version = 0
        # Reason why the server does not have the weights of the last update; empty if it has them.
        self._update_failure = ""
        # Number of failed updates. The result of a request during which an update fails is discarded.
        self._failed_updates = 0
        # Label of the last update's weights, which the server stores until it is restarted.
        self._label = ""
        # Value of `http.disconnections` when the label was last verified.
        self._verified = 0
        # A lock can only be used in the event loop in which it was created.
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_locks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _locks=weakref.WeakKeyDictionary())

    # --- capabilities ---

    @property
    def tokens(self) -> Literal["exact", "none"]:  # type: ignore[override]
        """The value "exact" if samples contain the sampled ids, else "none"."""
        return "exact" if self._exact else "none"

    @property
    def logprobs(self) -> Literal["yes", "no"]:  # type: ignore[override]
        """The value "yes" if samples have logprobs, as in exact mode, else "no"."""
        return "yes" if self._exact else "no"

    @property
    def images(self) -> int:  # type: ignore[override]
        """Maximum number of images per request; 0 in exact mode, because its requests contain only ids."""
        return 0 if self._exact else self._images

    @property
    def image_obstacle(self) -> str:  # type: ignore[override]
        exact = "in exact mode, prompts are token ids, and /v1/completions accepts no images with them"
        return exact if self._exact else "" if self._images else "it was created with images=0"

    entropies = "no"  # an entropy needs all logprobs, and the server returns only the highest

    @property
    def max_length(self) -> int:
        return self._length or super().max_length

    @property
    def version(self) -> int:
        """Version of the weights of the last update; 0 before the first."""
        return self._version

    def __repr__(self) -> str:
        what = "exact tokens" if self._exact else "text only"
        return f"OpenAIEngine({self.model!r} at {self.base_url}, {what}, not reproducible)"

    @property
    def chat(self) -> Chat:
        """A chat without a tokenizer, for agents in text mode: `af.Agent(engine, chat=engine.chat)`.

        Raises:
            EngineError: In exact mode, because agents then need a chat with the tokenizer of the model.
        """
        if self._exact:
            raise EngineError("exact tokens require the model's own chat; use policy.chat or af.Chat(tokenizer)")
        return TextChat()

    async def probe(self) -> OpenAIEngine:
        """Query the server's capabilities and set `tokens`, `logprobs` and `max_length` accordingly.

        A server that returns only text is not an error.

        Returns:
            This engine.

        Raises:
            EngineError: If the server cannot be reached or rejects the API key.
        """
        await self._read_length()
        warm = await self._logprobs_after_temperature()
        self._exact = self._probed = warm is not None
        self._logprobs_tempered = bool(warm)
        return self

    async def _read_length(self) -> None:
        if self._length is None:
            listed = await self._request_or_empty("GET", "/models")
            for entry in listed.get("data", []):
                if entry.get("id") == self.model and entry.get("max_model_len"):
                    self._length = int(entry["max_model_len"])

    async def _verify_exact(self) -> None:
        """Probe the server before the first exact sample; concurrent callers wait for the same probe."""
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._probed:
                return
            await self.probe()
            if not self._exact:
                self._exact = True  # keep the declared mode, because the waiting chains send ids
                raise EngineError(
                    f"{self.base_url} returns no token ids with logprobs, which tokens='exact' requires; "
                    f"omit tokens=, or serve with {SERVE_COMMAND}"
                )

    async def _logprobs_after_temperature(self) -> bool | None:
        """Return True if temperature scaling affects the server's logprobs; None without ids or logprobs.

        Temperature 2 halves the logits, and therefore the difference between the logprobs of any two tokens.
        """
        plain, halved = await self._probe_once(1.0), await self._probe_once(2.0)
        if plain is None or halved is None:
            return None
        shared = sorted(set(plain) & set(halved), key=plain.__getitem__)
        between = plain[shared[-1]] - plain[shared[0]] if shared else 0.0
        if between < 1e-3:
            # This prompt is not conclusive; False restricts sampling to temperatures 0 and 1.
            return False
        return math.isclose(halved[shared[-1]] - halved[shared[0]], between / 2, rel_tol=0.05)

    async def _probe_once(self, temperature: float) -> dict[str, float] | None:
        prompt = list(self.stop_ids[:1]) or [0]
        body = self._completion(prompt, Sampling(temperature=temperature, max_tokens=1)) | {"logprobs": 5}
        answer = await self._request_or_empty("POST", "/completions", body)
        try:
            choice = answer["choices"][0]
            if not isinstance(choice["token_ids"], list) or not choice["logprobs"]["token_logprobs"]:
                return None
            return dict(choice["logprobs"]["top_logprobs"][0])
        except (KeyError, IndexError, TypeError):
            return None

    async def _request_or_empty(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the response, or {} if the server rejects it. A rejected API key raises Refused."""
        try:
            return await self.http.request(method, path, body)
        except Refused as error:
            if error.status in (401, 403):
                raise
            return {}

    # --- sampling ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        began = time.perf_counter()
        if self._exact:
            return await self._sample_ids(ids, sampling, began)
        if request is None or not request.messages:
            raise EngineError(
                "an engine without exact tokens needs a request with messages; use an Agent, or tokens='exact'"
            )
        return await self._sample_text(request, sampling, began)

    def constraint_obstacle(self) -> str:
        return "the server reports no kept mass; use tokens='none', or LocalEngine" if self._exact else ""

    async def _sample_ids(self, ids: Sequence[int], sampling: Sampling, began: float) -> Sample:
        if not self.stop_ids:
            raise EngineError("exact tokens require stop_ids=, the ids that end a turn, such as policy.chat.stop_ids")
        if not self._probed:
            await self._verify_exact()
        self._check_weights()
        if sampling.truncates:
            raise EngineError(
                f"{sampling} must not truncate, because the server does not report the removed probability mass; "
                "sample without truncation, or use tokens='none'"
            )
        if changed := {k: v for k, v in self._extra.items() if v != _NEUTRAL.get(k, v)}:
            raise EngineError(f"extra_body must not change the distribution of exact tokens, got {changed!r}")
        if not self._logprobs_tempered and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"temperature must be 1 for a server with logprobs before temperature scaling, got "
                f"{sampling.temperature}; or serve with {SERVE_COMMAND}"
            )
        self._check_ids(ids)
        limit = min(sampling.max_tokens, self.max_length - len(ids))
        version, failed_updates = self._version, self._failed_updates
        answer = await self.http.request("POST", "/completions", self._completion(ids, sampling, limit))
        if self._failed_updates != failed_updates:
            raise EngineError(
                "an update of the weights failed while the request ran, so its result was discarded; sample again"
            )
        if self.http.disconnections > self._verified and self._label:
            await self._check_label()
        try:
            choice = answer["choices"][0]
            out = tuple(int(i) for i in choice["token_ids"])
            logprobs = tuple(float(lp) for lp in choice["logprobs"]["token_logprobs"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._unusable("no token ids or no logprobs", answer) from error
        self.sampled += len(out)
        by_text = isinstance(choice.get("stop_reason"), str)
        stop: Any = {"stop": "string" if by_text else "stop", "abort": "abort"}.get(choice["finish_reason"], "length")
        return Sample(
            ids=out,
            logprobs=logprobs,
            entropies=None,
            stop=stop,
            versions=(version,) * len(out),
            seconds=time.perf_counter() - began,
        )

    def _completion(self, ids: Sequence[int], sampling: Sampling, limit: int | None = None) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": [int(i) for i in ids],
            "max_tokens": limit or sampling.max_tokens,
            "temperature": sampling.temperature,
            "logprobs": 1,
            # Without these settings, the server uses the model's generation_config.json, and the logprobs are wrong.
            **_NEUTRAL,
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
            "messages": wire_messages(request.messages, self._thinking_field),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if request.constraint is not None:
            body |= json.loads(request.constraint.body)
        # Servers may reject options that the API lacks, so send such options only if they are set.
        options = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": sampling.stop}
        body |= {name: value for name, value in options.items() if value != getattr(Sampling(), name)}
        sent = {name: value for name, value in (body | self._extra).items() if value is not None}
        try:
            answer = await self.http.request("POST", "/chat/completions", sent)
        except Refused as error:
            if error.status != 400 or "tool" not in str(error):
                raise
            raise EngineError(
                f"{error}. A vLLM server parses tool calls if it was started with --enable-auto-tool-choice and "
                "--tool-call-parser hermes (or another parser); with OpenAIEngine(extra_body={'tool_choice': 'none'}) "
                "the server leaves the calls in the text, and this engine parses them"
            ) from error
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            calls = tuple(parse_tool_call(call, i) for i, call in enumerate(message.get("tool_calls") or ()))
            fields = [name for name in ("reasoning_content", "reasoning") if isinstance(message.get(name), str)]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise self._unusable("no chat completion", answer) from error
        if fields:
            self._thinking_field = fields[0]
        self.sampled += int((answer.get("usage") or {}).get("completion_tokens") or 0)
        return Sample(
            ids=None,
            logprobs=None,
            entropies=None,
            stop="length" if choice.get("finish_reason") == "length" else "stop",
            versions=None,
            text=text,
            calls=calls or None,
            thinking=message[fields[0]] if fields else None,
            seconds=time.perf_counter() - began,
        )

    # --- scoring of given tokens, for distillation ---

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprob in nats, at temperature 1, of each id after the first, given the ids before it.

        The server must support `prompt_logprobs` and `logprob_token_ids`, as vLLM 0.32 does.

        Raises:
            EngineError: If the server fails or does not return these logprobs, or if the ids exceed the context length.
        """
        *before, last = (int(i) for i in ids)
        # vLLM always samples a token, so leave the last id out of the prompt and request its logprob there.
        body = self._completion(before, Sampling(max_tokens=1)) | {"prompt_logprobs": 0, "logprob_token_ids": [last]}
        answer = await self.http.request("POST", "/completions", body)
        try:
            choice = answer["choices"][0]
            given = zip(choice["prompt_logprobs"], before, strict=True)
            scored = [float(by_id[str(i)]["logprob"]) for by_id, i in itertools.islice(given, 1, None)]
            scored.append(float(choice["logprobs"]["top_logprobs"][0][f"token_id:{last}"]))
            if not math.isfinite(sum(scored)):
                raise ValueError("a logprob is not finite")
            return tuple(scored)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._unusable("no logprobs of the given ids", answer) from error

    async def check_teacher(self, chat: Chat, length: int) -> None:
        await self._read_length()
        if self.max_length < length:
            raise SettingsError(
                f"teacher must have a context of at least the engine's {length} tokens, got {self.max_length}"
            )
        ids = list(range(len(chat.tokenizer)))
        root, body = self.base_url.removesuffix("/v1"), {"model": self.model, "tokens": ids}
        answer = await self._request_or_empty("POST", f"{root}/detokenize", body)
        if answer.get("prompt") != chat.tokenizer.decode(ids):
            raise SettingsError(
                f"teacher must have the vocabulary of the policy, whose token ids it scores, but /detokenize of "
                f"{self!r} does not decode the {len(ids)} ids of the policy's tokenizer to the same text"
            )

    # --- weights ---

    async def update(self, policy: Any) -> None:
        """Load a policy's weights into the vLLM server. Running requests wait and continue with the new weights.

        After a failed or cancelled update the engine does not sample until an update succeeds.

        Raises:
            EngineError: If the server cannot load the weights; the message contains the remedy.
        """
        from agentfly_kit.engines.vllm.remote import update_servers

        if error := (await update_servers(policy, [self]))[0]:
            raise error

    def _check_weights(self) -> None:
        if self._update_failure:
            raise EngineError(
                f"the weights of the server at {self.base_url} are undefined ({self._update_failure}); call await "
                "engine.update(policy) to send them again"
            )

    async def _check_label(self) -> None:
        """Raise EngineError if the server was restarted since the last update."""
        seen = self.http.disconnections
        found = await self.http.request("GET", self.base_url.removesuffix("/v1") + "/weight_info")
        if found.get("weight_version") != self._label:
            self._update_failure = "the server was restarted"
        self._check_weights()
        self._verified = max(self._verified, seen)

    def _unusable(self, what: str, answer: Any) -> EngineError:
        return EngineError(f"{self.base_url} returned {what}: {shorten(json.dumps(answer), 300)}")

    async def close(self) -> None:
        """Close the connections that belong to the running event loop."""
        await self.http.close()
