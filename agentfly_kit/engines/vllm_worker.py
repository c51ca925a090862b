"""What runs inside vLLM's worker process: new weights from a file, exact numbers from the sampler, no orphans.

vLLM mixes `WorkerExtension` into its worker class and calls its methods by name. Nothing here is imported by the
notebook's process, and vLLM is imported only inside the functions. Verified with vLLM 0.32 (CPU); what a version lacks
is reported by `agentfly_prepare`, and the engine then declares less.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

EXTRA = 2
"""Columns that `exact_sampler` puts between the sampled token's logprob and the most probable ones."""


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    vllm_config: Any

    def agentfly_prepare(self, notebook: int) -> dict[str, bool]:
        """End with the notebook's process, and make the sampler say more. Returns what could be done."""
        _end_with(notebook)
        return {"exact": exact_sampler(self.model_runner)}

    def agentfly_load(self, path: str) -> None:
        """Put the weights of a safetensors file in place of the present ones, by the names of transformers.

        Raises:  ValueError naming parameters that the file did not fill.
        """
        import torch
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}

        def weights() -> Iterator[tuple[str, Any]]:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    yield name, file.get_tensor(name)

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            # On a CPU every matrix is packed after it was loaded: the plain way of loading would write into nothing.
            initialize_layerwise_reload(model)
            loaded = model.load_weights(weights())
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # A tied output matrix is packed too, and the reload leaves that copy as it was.
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
        missing = sorted(wanted - set(loaded)) if loaded is not None else []
        if missing:
            raise ValueError(f"the new weights lack {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")


def _end_with(notebook: int) -> None:
    """End this process, and the core that started it, when the notebook's process is gone: killed, say."""
    if not hasattr(os, "pidfd_open"):
        return
    core = os.getppid()

    def watch() -> None:
        try:
            handle = os.pidfd_open(notebook)
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
                warm = sampling_metadata.temperature
                warm = torch.where(warm < 1e-5, torch.ones_like(warm), warm)  # a greedy row is described at 1
                scaled = logits / warm[:, None]
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
            if extra is None or num_logprobs < EXTRA:  # of a prompt, or of a request that is not this kit's
                return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
            found = Sampler.gather_logprobs(logprobs, num_logprobs - EXTRA, token_ids)
            ids, values = found.logprob_token_ids, found.logprobs
            return LogprobsTensors(
                torch.cat([ids[:, :1], ids.new_zeros(len(ids), EXTRA), ids[:, 1:]], dim=1),
                torch.cat([values[:, :1], extra.to(values.dtype), values[:, 1:]], dim=1),
                found.selected_token_ranks,
            )

    sampler.__class__ = ExactSampler
    return True
