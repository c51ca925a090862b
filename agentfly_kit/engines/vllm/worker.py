"""What runs inside vLLM's worker process: new weights in place, exact numbers from the sampler, no orphans.

vLLM mixes `WorkerExtension` into its worker class and calls its methods by name. Nothing here is imported by the
notebook's process, and vLLM is imported only inside the functions. Verified with vLLM 0.32 (CPU); what a version lacks
is reported by `agentfly_prepare`, and the engine then declares less.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Any

from agentfly_kit.engines.vllm.weight_transfer import ChunkReader, TensorSlice, gpu_uuid, open_buffer

EXTRA_COLUMNS = 2
"""Columns that `exact_sampler` puts between the sampled token's logprob and the most probable ones."""


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    device: Any
    _agentfly_receiver: _WeightReceiver | None = None

    def agentfly_prepare(self, parent_pid: int) -> dict[str, Any]:
        """End with the notebook's process, and make the sampler say more. Returns what could be done, and the GPU's
        own name ("" on a CPU)."""
        _exit_with(parent_pid)
        return {"exact": exact_sampler(self.model_runner), "gpu_uuid": gpu_uuid(self.device)}

    def agentfly_receive(
        self, handle: dict[str, Any], slices: list[TensorSlice], number: int, last: bool
    ) -> str | None:
        """Put one chunk of new weights in place of the present ones, by the names of transformers.

        handle: where the chunk is; the same buffer for each of a delivery.
        number: 0 begins a delivery, whatever became of the one before; the others follow in order.
        Returns None when the chunk is needed no more, or why the buffer could not be opened: nothing has changed then.
        Raises:  ValueError naming parameters that the delivery did not fill, or for a chunk out of turn. The weights
            are then neither the old nor the new ones, until a whole delivery has come.
        """
        if number == 0:
            self.agentfly_abort()
            try:
                buffer = open_buffer(handle, self.device)
            except Exception as error:  # a driver's refusals have many types
                return f"{type(error).__name__}: {error}"
            self._agentfly_receiver = _WeightReceiver(self.model_runner.get_model(), self.vllm_config, buffer)
        if self._agentfly_receiver is None:
            raise ValueError(f"chunk {number} of new weights came without the ones before")
        try:
            self._agentfly_receiver.receive(slices, number, last)
        except BaseException:
            self.agentfly_abort()
            raise
        if last:
            self._agentfly_receiver = None
        return None

    def agentfly_abort(self) -> None:
        """Give up a delivery that will not go on, and close its buffer."""
        receiver, self._agentfly_receiver = self._agentfly_receiver, None
        if receiver is not None:
            receiver.abort()


class _WeightReceiver:
    """One delivery, as far as it has come: vLLM's layerwise reload, begun with its first chunk, ended with its last."""

    def __init__(self, model: Any, config: Any, buffer: Any) -> None:
        self._model, self._config, self._buffer = model, config, buffer
        self._unpacking = ChunkReader()
        self._next = 0
        self._wanted = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] | None = set()
        """None from a model that does not tell."""

    def receive(self, slices: list[TensorSlice], number: int, last: bool) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if number != self._next:
            raise ValueError(f"chunk {number} of new weights came where {self._next} should be")
        self._next += 1
        with torch.no_grad(), set_current_vllm_config(self._config):
            if number == 0:
                # On a CPU every matrix is packed after it was loaded: the plain way to load would write into nothing.
                initialize_layerwise_reload(self._model)
            whole = list(self._unpacking.read(slices, self._buffer))
            loaded = self._model.load_weights(iter(whole)) if whole else set()
            self._loaded = None if self._loaded is None or loaded is None else self._loaded | set(loaded)
            if last:
                self._finish()
        if self._buffer.is_cuda:
            torch.cuda.synchronize(self._buffer.device)  # the sender writes over it when this has returned
        if last:
            unseen = self._wanted - self._loaded if self._loaded is not None else set()
            lacks = sorted({*self._unpacking.unfinished, *unseen})
            if lacks:
                raise ValueError(f"the new weights lack {', '.join(lacks[:5])}{' ...' if len(lacks) > 5 else ''}")

    def _finish(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._config.model_config)
        # A tied output matrix is packed too, and the reload leaves that copy as it was.
        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def abort(self) -> None:
        """Leave vLLM's layers as a new delivery needs them. What they hold is of no use until it has come."""
        import torch
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self._config), contextlib.suppress(Exception):
            self._finish()
        if self._buffer.is_cuda:
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(self._buffer.device)  # it is closed next, and copies from it may still run


def _exit_with(parent_pid: int) -> None:
    """End this process, and the core that started it, when the notebook's process is gone: killed, say."""
    if not hasattr(os, "pidfd_open"):
        return
    core = os.getppid()

    def watch() -> None:
        try:
            handle = os.pidfd_open(parent_pid)
            select.select([handle], [], [])
        except ProcessLookupError:
            pass
        for process in (core, os.getpid()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass

    threading.Thread(target=watch, name="agentfly-watch", daemon=True).start()


def exact_sampler(runner: Any) -> bool:
    """Teach the runner's sampler to report what a record needs; False if it is not the one that is known.

    As it is, vLLM gives either logprobs before temperature or those after truncation, and no entropy. From here on a
    request with `logprobs=2 + k` gets, for each token: the sampled one's logprob after temperature and before
    truncation, the entropy of that distribution, the probability that truncation kept, and then the k most probable.
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
                )  # a greedy row is described at 1
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
            if extra is None or num_logprobs < EXTRA_COLUMNS:  # of a prompt, or of a request that is not this kit's
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
