"""An engine that samples with vLLM. vLLM's AsyncLLM runs on a separate thread, and its engine core in child processes.

Prompts are passed as token ids, and samples are returned as ids with logprobs. The weights of a `Policy` are loaded
without a restart. vLLM is imported only when the engine starts.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine, check_scorer
from agentfly_kit.engines.local import grammar
from agentfly_kit.engines.vllm.host import EXTRA_COLUMNS, Host, load_config
from agentfly_kit.engines.vllm.weight_transfer import TRANSFER_CONFIG, architecture, check_architecture
from agentfly_kit.errors import EngineError, check_value
from agentfly_kit.policy.loading import read_json
from agentfly_kit.policy.policy import Policy
from agentfly_kit.samples import Constraint, Sample, Sampling, TurnRequest
from agentfly_kit.types import ImageSpan

# vLLM raises temperatures below the minimum, so recorded logprobs would be wrong, and rejects those above the maximum.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
# Maximum number of tokens that `distribution` returns, and of images per request.
_MAX_TOP, _MAX_IMAGES = 256, 16


class VLLMEngine(Engine):
    """Sample with vLLM, for models of any size.

    vLLM starts on first use or with `await engine.start()`. vLLM stops with `await engine.close()`, when the engine is
    garbage-collected, and when this process ends or is killed. Methods may be called from any event loop.

    Logprobs are those after temperature and before truncation, entropies are exact, and the probability mass kept by
    top-p, top-k, min-p or a constraint is recorded. All three are computed by a modified sampler in vLLM's worker. The
    engine is not reproducible, because rounding depends on the batch composition, and seeds are not used because they
    crash vLLM on a CPU. Images are read by vision models; see docs/images.md.

    Args:
        model: Folder in the transformers layout (as written by `Policy.save`), hub name, or Policy. The weights of a
            Policy are first saved to a temporary folder.
        stop_ids: Ids that end a turn; by default those of the chat template.
        alternatives: Number of most probable tokens to record at each position in `Turn.alternatives`; 0 to record
            none.
        engine_args: Arguments of vLLM's AsyncEngineArgs. By default, this engine uses the dtype of the checkpoint (vLLM
            would convert float32 to 16 bits), prefix caching and at most 256 concurrent sequences, and disables usage
            statistics. On a CPU, this engine also disables compilation, sets the block size to 32 tokens, and allocates
            a KV cache for 256 sequences of up to 4,096 tokens, but of at most 4 GiB.
    """

    tokens = "exact"
    logprobs = "yes"
    reproducible = False

    def __init__(
        self,
        model: str | Path | Policy,
        *,
        stop_ids: Sequence[int] | None = None,
        alternatives: int = 0,
        **engine_args: Any,
    ) -> None:
        check_value("alternatives", alternatives, "int", f"of at least 0 and at most {_MAX_TOP}")
        self.alternatives = alternatives
        # Policy or path shown in messages and in the record of a run; `model` may be a temporary folder.
        self.name = repr(model) if isinstance(model, Policy) else repr(str(model))
        if not isinstance(model, Policy) and (Path(model) / "adapter_config.json").exists():
            model = Policy.load(model)
        self._chat: Chat | None = model.chat if isinstance(model, Policy) else None
        if isinstance(model, Policy):
            self.image_obstacle = model.image_obstacle
            folder = tempfile.mkdtemp(prefix="agentfly-model-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            whole = model.merged() if model.has_adapter else model
            Policy(whole.model, whole.chat, version=model.version).save(folder)
            model = folder
        self.model = str(model)
        fixed = {"logprobs_mode", "worker_extension_cls", "generation_config", "mm_processor_kwargs"}
        if given := sorted(fixed.intersection(engine_args)):
            raise EngineError(f"engine_args must not set {', '.join(given)}, which would change the logprobs")
        self._engine_args = engine_args
        self._config = load_config(self.model)
        # Config of the language model, which may be only a part of the model.
        self._text_config = self._config.get_text_config()
        self._stop_ids = tuple(stop_ids) if stop_ids is not None else None
        self._reader_error = ""
        self._initial_version = int(read_json(Path(self.model) / "policy.json").get("version", 0))
        self._version = self._initial_version
        self._host: Host | None = None
        self._closed = False
        self._finalizer: Any = None
        self._lock = threading.RLock()
        self._request_numbers = itertools.count()
        # Number of tokens sampled so far.
        self.sampled = 0

    def __reduce__(self) -> Any:
        raise TypeError(
            "a VLLMEngine cannot be sent to another process; use the engine of serve_vllm(policy) instead"
        )

    # --- capabilities ---

    @property
    def version(self) -> int:
        host = self._host
        return host.version if host is not None else self._version

    @property
    def max_length(self) -> int:
        given = self._engine_args.get("max_model_len")
        return int(given or getattr(self._text_config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Number of tokens in the model's vocabulary."""
        return int(self._text_config.vocab_size)

    @property
    def chat(self) -> Chat:
        """Chat of the policy or of the model in a folder, for `af.Agent(engine, chat=engine.chat)`."""
        if self._chat is None:
            from transformers import AutoTokenizer, GenerationConfig

            tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
            try:
                generation_config = GenerationConfig.from_pretrained(self.model)
            except OSError:  # the model has no generation config
                generation_config = None
            saved = read_json(Path(self.model) / "policy.json")
            make = functools.partial(Chat.from_saved, saved, tokenizer, generation_config)
            self._chat = self._make_image_chat(make, tokenizer) or make()
        return self._chat

    def _make_image_chat(self, make: Any, tokenizer: Any) -> Chat | None:
        """Return a chat with an image processor, or None if the model has none that is supported."""
        if not hasattr(self._config, "vision_config"):
            return None
        from agentfly_kit.chat.images import load_processor

        # Without an image processor, text can still be sampled. Errors of the tokenizer are raised in any case, when
        # the chat is made without a processor.
        try:
            return cast(Chat, make(processor=load_processor(self.model, tokenizer, self._config)))
        except Exception as error:
            self._reader_error = f"{type(error).__name__}: {error}"
            return None

    @property
    def images(self) -> int:  # type: ignore[override]
        """Maximum number of images per request; 0 if the model reads none."""
        return 0 if self.image_obstacle else _MAX_IMAGES

    @functools.cached_property
    def image_obstacle(self) -> str:  # type: ignore[override]
        if not hasattr(self._config, "vision_config"):
            return "the model has no vision tower"
        if self.chat.reader is not None:
            return ""
        return f"the model has no supported image processor ({self._reader_error})"

    @functools.cached_property
    def _logit_bias(self) -> dict[int, float] | None:
        """Bias that excludes the placeholders of images from sampling, as a policy does."""
        if self.chat.reader is None:
            return None
        token = self.chat.reader.token_id
        return dict.fromkeys((token, getattr(self._config, "image_token_id", token)), -math.inf)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; by default those of the chat template."""
        if self._stop_ids is None:
            self._stop_ids = self.chat.stop_ids
        return self._stop_ids

    @property
    def log(self) -> Path | None:
        """Path of the log of vLLM and its processes; None if vLLM is not running."""
        return self._host.log if self._host is not None else None

    def __repr__(self) -> str:
        host = self._host
        state = "closed" if self._closed else "not started" if host is None else host.state
        return f"VLLMEngine({self.name}, version {self.version}, {state}, not reproducible)"

    # --- start and shutdown ---

    async def start(self) -> None:
        """Start vLLM before the first sample, or restart a closed engine. This takes up to a minute.

        Raises:
            EngineError: If vLLM does not start; the message contains the end of its log and possible remedies.
        """
        with self._lock:
            self._closed = False
        await self._ready()

    async def _ready(self) -> Host:
        with self._lock:
            if self._closed:
                raise EngineError(
                    f"this VLLMEngine was closed; await engine.start() loads {self.name} with its initial weights"
                )
            if self._host is None:
                self._version = self._initial_version
                self._host = Host(self._settings(), self._initial_version)
                self._finalizer = weakref.finalize(self, Host.stop, self._host)
            host = self._host
        try:
            await host.wait()
        except asyncio.CancelledError:
            # If no caller is waiting for the start any more, stop vLLM in the background.
            if host.abandoned:
                self._drop(host)
                # This thread is not a daemon, so that the process waits for it.
                stopping = threading.Thread(target=host.stop, name="agentfly-vllm-stop")
                stopping.start()
            raise
        except EngineError:
            self._drop(host)
            raise
        return host

    def _drop(self, host: Host) -> None:
        with self._lock:
            if self._host is host:
                self._version = host.version
                self._host = None
                if self._finalizer is not None:
                    self._finalizer.detach()

    async def close(self) -> None:
        """Stop vLLM and its processes; running requests fail with an EngineError. Idempotent."""
        with self._lock:
            host, self._closed = self._host, True
            if host is not None:
                self._drop(host)
        if host is not None:
            # Shield the shutdown, because an interrupt must not leave processes behind.
            await asyncio.shield(asyncio.to_thread(host.stop))

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of AsyncEngineArgs: this package's defaults, overridden by the user's arguments."""
        import torch

        dtype = getattr(self._config, "dtype", None) or getattr(self._config, "torch_dtype", None) or "float32"
        settings: dict[str, Any] = {
            "model": self.model,
            "dtype": str(dtype).removeprefix("torch."),
            "enable_prefix_caching": True,
            "max_num_seqs": 256,
            "disable_log_stats": True,
            "max_logprobs": _MAX_TOP + EXTRA_COLUMNS,
            "weight_transfer_config": TRANSFER_CONFIG,
            "structured_outputs_config": {"backend": "guidance"},  # reads the grammars of `Grammars`
        }
        if not torch.cuda.is_available():
            sequences = self._engine_args.get("max_num_seqs", settings["max_num_seqs"])
            settings |= {
                "enforce_eager": True,
                "block_size": 32,
                "kv_cache_memory_bytes": _kv_bytes(self._text_config, sequences * min(self.max_length, 4096)),
            }
        return {
            **settings,
            **self._engine_args,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # ignore the checkpoint's default sampling settings
            "worker_extension_cls": "agentfly_kit.engines.vllm.worker.WorkerExtension",
        }

    # --- sampling ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        began = time.perf_counter()
        self._check(ids, sampling)
        host = await self._ready()
        constraint = None if request is None else request.constraint
        limited = sampling.truncates or constraint is not None
        if limited and not host.exact:
            raise EngineError(
                f"actions must be sampled from all tokens, got {sampling} and {constraint}, because this vLLM does not "
                "report the removed probability mass; use vLLM 0.32"
            )
        limit = min(sampling.max_tokens, self.max_length - len(ids))
        extra = EXTRA_COLUMNS + self.alternatives if host.exact else 0
        options = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop) or None,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": True,  # the stop ids include the EOS token if it ends a turn
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
            "max_tokens": limit,
            "logprobs": extra,
            "logit_bias": self._logit_bias,
            "structured_outputs": constraint and self._grammars.to_lark(constraint),
        }
        if self.alternatives and not host.exact:
            raise EngineError("this version of vLLM cannot record alternatives; use vLLM 0.32, or alternatives=0")
        version = host.version
        got = await self._generate(host, ids, options, () if request is None else request.images)
        _check_columns(got, 1 + extra)
        return self._read(got, limited, host.exact, version, began)

    def constraint_obstacle(self) -> str:
        if self.chat.tokenizer.eos_token_id in self.stop_ids:
            return grammar.obstacle(self.chat)
        return f"vLLM ends a constrained action with the EOS token, which must be one of stop_ids {self.stop_ids}"

    def check_constraint(self, constraint: Constraint) -> None:
        self._grammars.matchers(constraint)

    @functools.cached_property
    def _grammars(self) -> grammar.Grammars:
        return grammar.Grammars(self.chat, self.vocab_size)

    async def _generate(
        self, host: Host, ids: Sequence[int], options: dict[str, Any], images: Sequence[ImageSpan]
    ) -> Any:
        """Run a request and return its only output. Check that vLLM processed the same ids and pixels as the policy."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if images:
            from agentfly_kit.engines.vllm.images import make_prompt

            reader = self.chat.reader
            if obstacle := self.image_obstacle or await host.image_obstacle(reader):
                raise EngineError(f"the ids must contain text only, because {self!r} reads no images: {obstacle}")
            prompt = make_prompt(ids, images, reader)
        found = await host.generate(f"{next(self._request_numbers)}", prompt, options)
        if images and list(found.prompt_token_ids) != list(ids):
            raise EngineError(
                f"vLLM must give the images the placeholders of the prompt, which has {len(ids)} ids, got other ids "
                f"({len(found.prompt_token_ids)}); use LocalEngine for this model"
            )
        (got,) = found.outputs
        return got

    def _read(self, got: Any, limited: bool, exact: bool, version: int, began: float) -> Sample:
        ids = tuple(got.token_ids)
        flat = got.logprobs
        at = list(flat.start_indices) if flat is not None else []
        self.sampled += len(ids)
        reason = got.finish_reason
        stop = "string" if reason == "stop" and isinstance(got.stop_reason, str) else reason
        if stop not in ("stop", "length", "string", "abort"):
            raise EngineError(f"vLLM ended a request with the unknown reason {reason!r}; see its log")
        return Sample(
            ids=ids,
            logprobs=tuple(flat.logprobs[i] for i in at),
            entropies=tuple(flat.logprobs[i + 1] for i in at) if exact else None,
            stop=cast(Any, stop),
            versions=self._versions(got, len(ids), version),
            kept_mass=tuple(min(1.0, flat.logprobs[i + 2]) for i in at) if exact and limited else None,
            alternatives=tuple(self._top(flat, i) for i in at) if self.alternatives else None,
            seconds=time.perf_counter() - began,
        )

    def _top(self, flat: Any, start: int) -> tuple[tuple[int, float], ...]:
        """Return the recorded alternatives, as (id, logprob), of the position whose columns begin at `start`."""
        first = start + 1 + EXTRA_COLUMNS
        columns = slice(first, first + self.alternatives)
        return tuple(zip(flat.token_ids[columns], flat.logprobs[columns], strict=True))

    @staticmethod
    def _versions(got: Any, count: int, version: int) -> tuple[int, ...]:
        """Return the policy version of each token, which is `version` if vLLM does not report versions."""
        out = [version] * count
        for span in getattr(got, "weight_versions", None) or ():
            if span.version.isdigit():
                count = span.end - span.start
                out[span.start : span.end] = [int(span.version)] * count
        return tuple(out)

    def _check(self, ids: Sequence[int], sampling: Sampling) -> None:
        self._check_ids(ids)
        if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"temperature must be 0, or from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE} for vLLM, got "
                f"{sampling.temperature}"
            )

    async def distribution(
        self, ids: Sequence[int], sampling: Sampling, *, top: int = 20, images: Sequence[ImageSpan] = ()
    ) -> tuple[list[int], list[float], float]:
        self._check(ids, sampling)
        host = await self._ready()
        if not host.exact:
            raise EngineError("this version of vLLM does not report entropies; use LocalEngine for distribution()")
        top = min(max(1, top), _MAX_TOP, self.vocab_size - EXTRA_COLUMNS)
        options = {
            "temperature": sampling.temperature or 1.0,
            "max_tokens": 1,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": EXTRA_COLUMNS + top,
            "logit_bias": self._logit_bias,
        }
        got = await self._generate(host, ids, options, images)
        first = 1 + EXTRA_COLUMNS
        _check_columns(got, first + top)
        flat, columns = got.logprobs, slice(first, first + top)
        return list(flat.token_ids[columns]), list(flat.logprobs[columns]), flat.logprobs[1]

    # --- scoring of given tokens, for distillation ---

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the logprob in nats, at temperature 1, of each id after the first, given the ids before it.

        Raises:
            EngineError: If vLLM fails, or the ids exceed the context length.
        """
        *before, last = (int(i) for i in ids)
        self._check(before, Sampling())
        host = await self._ready()
        # vLLM always samples a token, so leave the last id out of the prompt and request its logprob there.
        options = {"max_tokens": 1, "detokenize": False, "prompt_logprobs": 0, "logprob_token_ids": [last]}
        if any(token in before for token in self._logit_bias or ()):
            raise EngineError("the ids to score must contain text only, got placeholders of images")
        got = await host.generate(f"{next(self._request_numbers)}", {"prompt_token_ids": before}, options)
        _check_columns(got.outputs[0], 2)
        return (*got.prompt_logprobs.logprobs, got.outputs[0].logprobs.logprobs[1])

    async def check_teacher(self, chat: Chat, length: int) -> None:
        check_scorer(self.chat, self.max_length, chat, length)

    # --- weights ---

    async def update(self, policy: Any) -> None:
        """Load the policy's weights into vLLM. Running requests are paused and continue with the new weights.

        The weights, with any adapter merged and without the value head, are first gathered in a file: in shared memory
        or, if there is too little of it, in the folder for temporary files. `policy.lock` is held only during this
        step. Caches computed with the old weights are discarded.

        If the call is cancelled before vLLM receives the weights, nothing changes. If the call is cancelled later, the
        update continues in the background, and `version` changes when the update is complete.

        If vLLM fails during an update, its weights are undefined, and the engine does not sample until an update
        succeeds.

        Raises:
            EngineError: If vLLM fails, or the policy has a different architecture. If the architecture differs, the
                engine keeps its weights.
        """
        check_architecture(f"this engine, which serves {self.name},", architecture(self._config), policy)
        host = await self._ready()
        await host.load(policy)


def _check_columns(got: Any, columns: int) -> None:
    """Raise EngineError unless vLLM returned this number of logprobs for each token of the output."""
    found = 0 if got.logprobs is None else len(got.logprobs.logprobs)
    if found != columns * len(got.token_ids):
        raise EngineError(
            f"vLLM must return {columns} logprobs per token, got {found} for {len(got.token_ids)} tokens; use one "
            "engine for sampling and another for scoring, or a supported version"
        )


def _kv_bytes(config: Any, tokens: int) -> int:
    """Return the bytes needed for the keys and values of `tokens` tokens, limited to the range from 64 MiB to 4 GiB."""
    query_heads = getattr(config, "num_attention_heads", 0)
    heads = getattr(config, "num_key_value_heads", 0) or query_heads or 8
    size = getattr(config, "head_dim", 0) or config.hidden_size // query_heads
    token = 2 * int(config.num_hidden_layers) * int(heads) * int(size) * 4
    return min(max(tokens * token, 64 << 20), 4 << 30)
