"""Extension of vLLM's workers. It updates weights in place, computes exact logprobs, and ends orphaned processes.

vLLM adds `WorkerExtension` to the base classes of its worker class and calls the methods by name. The main process also
imports this module, so vLLM is imported only inside functions. Verified with vLLM 0.32 (CPU). `agentfly_prepare`
reports which features a version of vLLM supports, and the engine disables the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Any

from agentfly_kit.engines.vllm.buffers import TensorSlice, fetch_chunk, open_buffer
from agentfly_kit.engines.vllm.weight_transfer import ChunkReader, architecture

# Number of columns that `exact_sampler` inserts between the logprob of the sampled token and the top logprobs.
EXTRA_COLUMNS = 2


class WorkerExtension:
    """Methods that are added to vLLM's worker class and called through `collective_rpc`. `self` is the worker."""

    model_runner: Any
    vllm_config: Any
    _agentfly_receiver: _WeightReceiver | None = None

    def agentfly_prepare(self, parent_pid: int) -> bool:
        """Kill this process when its parent exits, and return True if the exact sampler could be installed."""
        exit_with(parent_pid, os.getppid(), os.getpid())
        return exact_sampler(self.model_runner)

    def agentfly_describe(self) -> dict[str, Any]:
        """Return the `architecture` settings and the dtype of the served model."""
        config = self.vllm_config.model_config
        return architecture(config.hf_config) | {"dtype": str(config.dtype).removeprefix("torch.")}

    def agentfly_receive(
        self, handle: dict[str, Any], slices: list[TensorSlice], number: int, last: bool
    ) -> str | None:
        """Load one chunk of new weights, identified by their transformers names.

        Args:
            handle: Handle of the buffer, the same for all chunks of a delivery. For HTTP, it contains a "url".
            slices: Contents of the buffer.
            number: Index of the chunk. 0 starts a new delivery and aborts an unfinished one.
            last: True for the last chunk of the delivery.

        Returns:
            None when the chunk has been loaded, or the reason why the buffer could not be opened; in the latter case
            the weights have not changed.

        Raises:
            ValueError: If a chunk is out of order, or if parameters, which the message names, are missing after the
                last chunk. The weights are then undefined until a delivery has been completed.
        """
        if number == 0:
            self.agentfly_abort()
            try:
                buffer = open_buffer(handle)
                if "url" in handle:
                    fetch_chunk(handle["url"], slices, buffer)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            self._agentfly_receiver = _WeightReceiver(self.model_runner.get_model(), self.vllm_config, buffer)
        if self._agentfly_receiver is None:
            raise ValueError(f"chunk {number} of new weights arrived without chunk 0; send all chunks again")
        try:
            if number and "url" in handle:
                fetch_chunk(handle["url"], slices, self._agentfly_receiver.buffer)
            self._agentfly_receiver.receive(slices, number, last)
        except BaseException:
            self.agentfly_abort()
            raise
        if last:
            self._agentfly_receiver = None
        return None

    def agentfly_abort(self) -> None:
        """Abort an unfinished delivery and close its buffer."""
        receiver, self._agentfly_receiver = self._agentfly_receiver, None
        if receiver is not None:
            receiver.abort()


class _WeightReceiver:
    """Receiver of the chunks of one delivery of weights, which vLLM loads in a single layerwise reload."""

    def __init__(self, model: Any, config: Any, buffer: Any) -> None:
        self._model, self._config, self.buffer = model, config, buffer
        self._unpacking = ChunkReader()
        self._next = 0
        self._wanted = {name for name, _ in model.named_parameters()}
        # Names of the loaded parameters; None if the model does not report them.
        self._loaded: set[str] | None = set()

    def receive(self, slices: list[TensorSlice], number: int, last: bool) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if number != self._next:
            raise ValueError(
                f"chunk {number} of new weights is out of order, expected {self._next}; send all chunks again"
            )
        self._next += 1
        with torch.no_grad(), set_current_vllm_config(self._config):
            if number == 0:
                # On a CPU, vLLM repacks matrices after loading, so weights loaded without this call have no effect.
                initialize_layerwise_reload(self._model)
            whole = list(self._unpacking.read(slices, self.buffer))
            loaded = self._model.load_weights(iter(whole)) if whole else set()
            self._loaded = None if self._loaded is None or loaded is None else self._loaded | set(loaded)
            if last:
                self._finish()
        if last:
            unseen = self._wanted - self._loaded if self._loaded is not None else set()
            lacks = sorted({*self._unpacking.unfinished, *unseen})
            if lacks:
                raise ValueError(f"the new weights lack {', '.join(lacks[:5])}{' ...' if len(lacks) > 5 else ''}")

    def _finish(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._config.model_config)
        # A tied output matrix also has a repacked copy, which the reload does not update.
        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def abort(self) -> None:
        """Restore vLLM's layers so that a new delivery can start; until it completes, the weights are undefined."""
        import torch
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self._config), contextlib.suppress(Exception):
            self._finish()


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


def exact_sampler(runner: Any) -> bool:
    """Modify the runner's sampler to report exact logprobs and entropies.

    vLLM returns logprobs either before temperature or after truncation, and no entropies. With this sampler, a request
    with `logprobs=2 + k` returns for each token its logprob after temperature and before truncation, the entropy of
    that distribution, the probability mass kept by truncation, and the k highest logprobs.

    Returns:
        True, or False if the sampler has an unexpected type and was left unchanged.
    """
    try:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.sample.sampler import Sampler
    except ImportError:
        return False
    sampler = getattr(runner, "sampler", None)
    if type(sampler) is not Sampler or hasattr(runner, "rejection_sampler"):
        return False
    import torch

    class ExactSampler(Sampler):  # type: ignore[misc]
        extra: Any = None

        def sample(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if sampling_metadata.max_num_logprobs is None:
                return super().sample(logits, sampling_metadata, *args, **kwargs)
            scaled = logits
            if sampling_metadata.temperature is not None:
                temperature = sampling_metadata.temperature
                temperature = torch.where(
                    temperature < 1e-5, torch.ones_like(temperature), temperature
                )  # for greedy rows, logprobs are those at temperature 1
                scaled = logits / temperature[:, None]
            whole = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)
            p = whole.exp()
            entropy = -torch.where(p > 0, p * whole, torch.zeros_like(p)).sum(-1)
            sampled, processed = super().sample(logits, sampling_metadata, *args, **kwargs)
            kept = torch.ones_like(entropy)
            if processed is not None:
                kept = torch.where(processed > -torch.inf, p, torch.zeros_like(p)).sum(-1)
            self.extra = torch.stack([entropy, kept], dim=-1)
            return sampled, whole

        def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
            extra, self.extra = self.extra, None
            if extra is None or num_logprobs < EXTRA_COLUMNS:  # prompt logprobs, or a request made by other code
                return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
            found = Sampler.gather_logprobs(logprobs, num_logprobs - EXTRA_COLUMNS, token_ids)
            ids, values = found.logprob_token_ids, found.logprobs
            return LogprobsTensors(
                torch.cat([ids[:, :1], ids.new_zeros(len(ids), EXTRA_COLUMNS), ids[:, 1:]], dim=1),
                torch.cat([values[:, :1], extra.to(values.dtype), values[:, 1:]], dim=1),
                found.selected_token_ranks,
            )

    sampler.__class__ = ExactSampler
    return True
