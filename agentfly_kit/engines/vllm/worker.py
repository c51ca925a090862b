"""Extension of vLLM's workers that receives weights, computes exact logprobs, and ends orphaned processes.

vLLM adds `WorkerExtension` to the base classes of its worker class and calls the methods by name. Only vLLM's processes
import this module. The module was tested with vLLM 0.32 on a CPU; for vLLM 0.26, only the interface was checked.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from agentfly_kit.engines.vllm.host import EXTRA_COLUMNS, exit_with
from agentfly_kit.engines.vllm.weight_transfer import BACKEND, TensorInfo, architecture, open_weights, read_weights


class WorkerExtension:
    """Methods that are added to vLLM's worker class and called through `collective_rpc`. `self` is the worker."""

    model_runner: Any
    vllm_config: Any

    def agentfly_prepare(self, parent_pid: int) -> bool:
        """Kill this process when its parent exits, and return True if the exact sampler could be installed."""
        exit_with(parent_pid, os.getppid(), os.getpid())
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if type(sampler) is not Sampler or hasattr(self.model_runner, "rejection_sampler"):
            return False
        sampler.__class__ = ExactSampler
        gpu_model_runner.apply_grammar_bitmask = functools.partial(
            sampler.hold_mask, gpu_model_runner.apply_grammar_bitmask
        )
        return True

    def agentfly_describe(self) -> dict[str, Any]:
        """Return the `architecture` settings and the dtype of the served model, and the backend for new weights."""
        config = self.vllm_config.model_config
        return architecture(config.hf_config) | {
            "dtype": str(config.dtype).removeprefix("torch."),
            "backend": getattr(self.vllm_config.weight_transfer_config, "backend", None),
        }


@dataclass
class _Source(WeightTransferInitInfo):  # type: ignore[misc]
    """Address of a file of weights."""

    address: str


@dataclass
class _Contents(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors in a file of weights."""

    tensors: list[TensorInfo]


class WeightFileEngine(WeightTransferEngine):  # type: ignore[misc]
    """Backend of vLLM's weight transfer that reads a `WeightFile`.

    An update has the four phases defined by vLLM. The file is opened in the first phase, before anything has changed,
    and read in the third phase. If reading fails, the weights are undefined until an update succeeds.
    """

    init_info_cls = _Source
    update_info_cls = _Contents
    _stream: Any = None

    def init_transfer_engine(self, init_info: _Source) -> None:
        self.shutdown()
        self._stream = open_weights(init_info.address)

    def start_weight_update(self) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}
        # On a CPU, vLLM repacks matrices after loading, so weights loaded without this call have no effect.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class also synchronizes with the accelerator, which raises an error on a machine without one.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Contents) -> None:
        try:
            with torch.no_grad(), set_current_vllm_config(self.vllm_config):
                loaded = self.model.load_weights(read_weights(self._stream, update_info.tensors))
            lacks = sorted(self._wanted - loaded) if loaded is not None else []  # some models do not report names
            if lacks:
                raise ValueError(f"the new weights lack {', '.join(lacks[:5])}{' ...' if len(lacks) > 5 else ''}")
        except BaseException:
            # Restore vLLM's layers so that another update can start.
            with contextlib.suppress(Exception):
                self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        self.shutdown()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
            # A tied output matrix also has a repacked copy, which the reload does not update.
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise NotImplementedError. vLLM 0.26 requires this method, but does not call it."""
        raise NotImplementedError


# vLLM imports this module before it creates the backend that its settings name.
WeightTransferEngineFactory.register_engine(BACKEND, WeightFileEngine)


class ExactSampler(Sampler):  # type: ignore[misc]
    """Sampler that reports exact logprobs and entropies.

    vLLM returns logprobs either before temperature or after truncation, and no entropies. With this sampler, a request
    with `logprobs=2 + k` returns for each token its logprob after temperature and before truncation, the entropy of
    that distribution, the probability mass kept by truncation and by a grammar, and the k highest logprobs.
    """

    extra: Any = None
    mask: Any = None  # 0 for the tokens that grammars allow, otherwise -inf

    def hold_mask(self, apply: Any, scheduled: Any, bits: Any, batch: Any, logits: Any) -> None:
        """Store the mask instead of applying it, because `sample` also needs the logits without it."""
        self.mask = torch.zeros_like(logits)
        apply(scheduled, bits, batch, self.mask)

    def sample(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        mask, self.mask = self.mask, None
        allowed = logits if mask is None else logits + mask
        if sampling_metadata.max_num_logprobs is None:
            return super().sample(allowed, sampling_metadata, *args, **kwargs)
        scaled = logits
        if sampling_metadata.temperature is not None:
            temperature = sampling_metadata.temperature
            # For greedy rows, logprobs are those at temperature 1.
            temperature = torch.where(temperature < 1e-5, torch.ones_like(temperature), temperature)
            scaled = logits / temperature[:, None]
        whole = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)
        p = whole.exp()
        entropy = -torch.where(p > 0, p * whole, torch.zeros_like(p)).sum(-1)
        sampled, processed = super().sample(allowed, sampling_metadata, *args, **kwargs)
        kept = torch.where((allowed if processed is None else processed) > -torch.inf, p, torch.zeros_like(p)).sum(-1)
        self.extra = torch.stack([entropy, kept], dim=-1)
        return sampled, whole

    def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        extra, self.extra = self.extra, None
        if extra is None or num_logprobs < EXTRA_COLUMNS:  # prompt logprobs, or a request made by other code
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        found = Sampler.gather_logprobs(logprobs, num_logprobs - EXTRA_COLUMNS, token_ids)
        ids, values = found.logprob_token_ids, found.logprobs
        extra = extra.to(values.dtype)
        no_ids = ids.new_zeros(len(ids), EXTRA_COLUMNS)
        ids = torch.cat([ids[:, :1], no_ids, ids[:, 1:]], dim=1)
        values = torch.cat([values[:, :1], extra, values[:, 1:]], dim=1)
        return LogprobsTensors(ids, values, found.selected_token_ranks)
