"""An engine that samples with the policy's own weights in this process, with continuous batching on one thread.

Each request consists of ids, sampling settings and a seed, and occupies a row of the batch from its prefill until its
last token. The KV cache has one slot per sequence. A chain keeps its slot between turns, so that only new tokens are
computed. A prefix that another slot already contains is copied.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentfly_kit._async.threads import join_busy
from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.local import grammar
from agentfly_kit.engines.local.generation import ContinuousBatch
from agentfly_kit.engines.local.kv_cache import is_batch_invariant
from agentfly_kit.engines.local.slots import ROW_MULTIPLE, Request
from agentfly_kit.errors import EngineError, check_count, check_value, checks_keywords
from agentfly_kit.policy.cpu import single_torch_thread
from agentfly_kit.policy.policy import Policy
from agentfly_kit.samples import Constraint, Sample, Sampling, TurnRequest
from agentfly_kit.types import ImageSpan

# Seconds after which an idle thread exits, so that an unreferenced engine can be garbage-collected.
_IDLE_SECONDS = 2.0
_MAX_IMAGES = 16


@checks_keywords
class LocalEngine(Engine):
    """Sample from the current weights of `policy`, which the engine shares with the trainer.

    `update` only checks that it is called with the same policy. For Llama-like models (Llama, Qwen2, Qwen3) of up to a
    billion parameters in float32 on a CPU, the engine keeps a copy of the weights, with LoRA adapters added.

    Args:
        policy: The policy. The engine tests that its model gives the same hidden states with and without a KV cache.
            docs/models.md lists the families of models.
        slots: Maximum number of sequences in the KV cache, including those of chains between two turns; rounded up to a
            multiple of 8. If all slots are taken, a new sequence replaces the least recently used idle one. The history
            of the replaced sequence is recomputed at its next turn.
        alternatives: Number of most probable tokens to record at each position in `Turn.alternatives`; 0 to record
            none. This setting does not affect sampling.

    Raises:
        EngineError, SettingsError: If an argument is invalid, or the model cannot be run with a KV cache.
        PolicyError: If the logits cannot be computed from hidden states; see `Policy.logits`.
    """

    def __init__(self, policy: Policy, *, slots: int = 256, alternatives: int = 0) -> None:
        if not isinstance(policy, Policy):
            raise EngineError(f"policy must be a Policy, such as Policy.load(path), got {policy!r}")
        if policy.accelerator is not None:
            raise EngineError(
                f"policy must not be sharded, because LocalEngine samples in one process, got {policy!r}"
            )
        check_count("slots", slots)
        check_value("alternatives", alternatives, "int", f"of at least 0 and at most {policy.vocab_size}")
        self.policy = policy
        self.alternatives = alternatives
        self.slots = -(-slots // ROW_MULTIPLE) * ROW_MULTIPLE
        self._wake = threading.Condition()
        self._submitted: deque[Request] = deque()
        self._inbox: deque[Request] = deque()
        self._released: deque[str] = deque()
        self._thread: threading.Thread | None = None
        # The last thread that exited because it was idle; this thread may still be executing torch code.
        self._last_thread: threading.Thread | None = None
        self._exiting = False
        # Only the engine's thread modifies the batch.
        self._batch = ContinuousBatch(policy, self.slots, alternatives)
        if policy.chat.reader is not None:
            _ = self.images  # run the trial now, because the weights may change later

    def __reduce__(self) -> Any:
        # A pickled engine that is loaded in another process has empty caches and its own copy of the policy.
        return functools.partial(LocalEngine, self.policy, slots=self.slots, alternatives=self.alternatives), ()

    # --- capabilities ---

    @property
    def reproducible(self) -> bool:  # type: ignore[override]
        """True if samples do not depend on other requests. Otherwise, the engine's repr states the reason."""
        return self._irreproducible_because() is None

    def _irreproducible_because(self) -> str | None:
        config = self.policy.model.config.get_text_config()
        if not self.policy.is_float32_on_cpu:
            return "the policy is not in float32 on a CPU"
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return "the rows of an expert depend on the other rows"
        if self._batch.is_recurrent:
            return "recurrent states are rounded differently in other batches"
        if getattr(config, "kv_lora_rank", None):
            return "attention whose keys and values differ in size was not tested for batch invariance"
        if self._batch.table.num_replaced:
            return "histories were recomputed, because there were more unfinished chains than slots"
        with single_torch_thread(self.policy):
            packed = getattr(self._batch._cached_forward, "is_packed", False)
            return (
                None
                if is_batch_invariant(torch.get_num_threads(), packed)
                else "the processor's kernels depend on the batch"
            )

    @property
    def images(self) -> int:  # type: ignore[override]
        """Maximum number of images per request; 0 if the policy reads none; see `Policy.image_obstacle`."""
        return 0 if self.image_obstacle else _MAX_IMAGES

    @functools.cached_property
    def image_obstacle(self) -> str:  # type: ignore[override]
        if self.policy.image_obstacle:
            return self.policy.image_obstacle
        from agentfly_kit.engines.local.images import find_obstacle

        return find_obstacle(self.policy)

    @property
    def max_length(self) -> int:
        return self.policy.max_length

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.policy.vocab_size

    @property
    def prefilled(self) -> int:
        """Number of context tokens computed so far, excluding those whose keys and values were copied or reused."""
        return self._batch.prefilled

    @property
    def sampled(self) -> int:
        """Number of tokens sampled so far."""
        return self._batch.sampled

    def __repr__(self) -> str:
        reason = self._irreproducible_because()
        return f"LocalEngine({self.policy!r}, {self.slots} slots{f', not reproducible: {reason}' if reason else ''})"

    # --- calls from the event loop ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        session = None if request is None else request.session
        images = () if request is None else request.images
        constraint = None if request is None else request.constraint
        matchers = () if constraint is None else self._grammars.matchers(constraint)
        got: Sample = await self._submit(ids, sampling, seed, session, 0, matchers, images)
        return got

    def constraint_obstacle(self) -> str:
        return grammar.obstacle(self.policy.chat)

    def check_constraint(self, constraint: Constraint) -> None:
        self._grammars.matchers(constraint)

    @functools.cached_property
    def _grammars(self) -> grammar.Grammars:
        return grammar.Grammars(self.policy.chat, self.policy.vocab_size)

    async def distribution(
        self, ids: Sequence[int], sampling: Sampling, *, top: int = 20, images: Sequence[ImageSpan] = ()
    ) -> tuple[list[int], list[float], float]:
        got: tuple[list[int], list[float], float] = await self._submit(
            ids, sampling, 0, None, max(1, top), (), images
        )
        return got

    async def update(self, policy: Any) -> None:
        if policy is not self.policy:
            raise EngineError(
                "policy must be the one from which this LocalEngine samples; create the engine from the policy that is "
                "trained: LocalEngine(policy)"
            )

    def release(self, session: str) -> None:
        with self._wake:
            self._released.append(session)

    async def _submit(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        session: str | None,
        top: int,
        matchers: Sequence[Any] = (),
        images: Sequence[ImageSpan] = (),
    ) -> Any:
        self._check_ids(ids)
        array = keys = np.asarray(ids, dtype=np.int64)
        if images:
            if not self.images:
                raise EngineError(
                    f"the ids must contain text only, because {self!r} reads no images: {self.image_obstacle}"
                )
            from agentfly_kit.images import row_keys

            keys = row_keys(array, images)
        loop = asyncio.get_running_loop()
        limit = min(sampling.max_tokens, self.max_length - len(ids))
        wanted = Request(array, keys, sampling, seed, session, loop.create_future(), limit, top, matchers, images)
        with self._wake:
            self._submitted.append(wanted)
            if self._thread is None:
                _started.add(self)
                atexit.unregister(_stop_all)
                atexit.register(_stop_all)
                self._thread = threading.Thread(target=self._run, name="agentfly-engine", daemon=True)
                self._thread.start()
        loop.call_soon(self._flush_submitted)
        try:
            return await wanted.future
        except asyncio.CancelledError:
            wanted.cancelled = True  # the engine's thread removes the row at its next step
            raise

    def _flush_submitted(self) -> None:
        """Pass all requests that were submitted in the same iteration of the event loop to the engine's thread at once.

        Chains that start together, or whose previous actions ended in the same decode step, are therefore prefilled
        together.
        """
        if self._submitted:
            with self._wake:
                self._inbox.extend(self._submitted)
                self._submitted.clear()
                self._wake.notify()

    # --- the engine's thread ---

    def _run(self) -> None:
        batch = self._batch
        with torch.inference_mode(), single_torch_thread(self.policy):
            while True:
                with self._wake:
                    while not (self._inbox or batch.waiting or batch.table.active or self._exiting):
                        if self._wake.wait(_IDLE_SECONDS) or self._inbox:
                            continue
                        if self._submitted:  # the event loop of these requests is blocked or closed
                            self._inbox.extend(self._submitted)
                            self._submitted.clear()
                        else:
                            self._last_thread, self._thread = self._thread, None
                            return
                    if self._exiting:
                        return
                    batch.waiting.extend(self._inbox)
                    self._inbox.clear()
                    released = list(self._released)
                    self._released.clear()
                try:
                    batch.step(released)
                except Exception as error:
                    batch.fail(error)

    def _stop_thread(self) -> None:
        """Stop the engine's thread at interpreter exit; a thread that still runs torch code would abort the process."""
        with self._wake:
            self._exiting = True
            self._wake.notify()
            running = (self._thread, self._last_thread)
        join_busy(thread for thread in running if thread is not None)


_started: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _stop_all() -> None:
    for engine in list(_started):
        engine._stop_thread()
