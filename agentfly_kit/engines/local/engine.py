"""An engine that samples with the policy's own weights in this process, with continuous batching on one thread.

Each request consists of ids, sampling settings and a seed. Its row joins the running batch after prefill and leaves it
when it stops. The KV cache has one slot per sequence. A session keeps its slot between turns and computes only the new
tokens; a prefix that another slot holds is copied instead of computed.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentfly_kit import seeds
from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.local.decoder import FusedLlamaDecoder, reference_forward
from agentfly_kit.engines.local.kv_cache import KVCache
from agentfly_kit.engines.local.sampling import sample_tokens
from agentfly_kit.errors import EngineError, checks_keywords
from agentfly_kit.policy.forward import single_torch_thread
from agentfly_kit.policy.policy import Policy
from agentfly_kit.types import Sample, Sampling, TurnRequest

# Seconds after which an idle thread exits, so that an unreferenced engine can be garbage-collected.
_IDLE_SECONDS = 2.0
# Batch sizes are multiples of this, because other sizes use kernels that round differently; see kv_cache.py.
_ROW_MULTIPLE = 8
# Maximum number of tokens per prefill, including padding.
_PREFILL_TOKENS = 4096
# Maximum number of tokens per forward pass of a prefill, so that intermediate results fit the processor's cache.
_PREFILL_FORWARD_TOKENS = 512
# Possible widths of a prefill chunk in tokens.
_CHUNK_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
# Capacity of a slot in tokens grows in multiples of this, up to the model's context length.
_CAPACITY_STEP = 256
# A prefill starts when more requests wait than run, or when the oldest has waited for this number of decode steps.
_PREFILL_MAX_WAIT = 12


@dataclass(eq=False)
class _Request:
    ids: npt.NDArray[np.int64]
    sampling: Sampling
    seed: int
    session: str | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    # Maximum number of tokens to sample.
    limit: int
    # If positive, return this many entries of the next token's distribution instead of sampling.
    top: int = 0
    started: float = field(default_factory=time.perf_counter)
    # Number of decode steps that the request has waited for its prefill.
    waited: int = 0
    cancelled: bool = False
    # The sampled tokens so far.
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Slot:
    # The request that runs in this slot; None if the slot is idle.
    request: _Request | None = None
    # The session whose history the slot holds.
    session: str | None = None
    # Index of the engine step in which the slot was last used.
    last_used: int = 0
    # Number of the weights that computed the keys and values; see `LocalEngine._detect_weight_change`.
    weights: int = -1


@checks_keywords
class LocalEngine(Engine):
    """Sample from the current weights of `policy`, which the engine shares with the trainer.

    No weights are copied: `update` only checks that it is called with the same policy.

    Args:
        policy: The policy.
        slots: Number of sequences in the KV cache, running or between two turns; rounded up to a multiple of 8. If all
            slots are taken, a new sequence replaces the least recently used idle one, whose chain must then recompute
            its history.
    """

    def __init__(self, policy: Policy, *, slots: int = 256) -> None:
        if slots < 1:
            raise EngineError(f"slots must be at least 1, got {slots}")
        self.policy = policy
        self.slots = -(-slots // _ROW_MULTIPLE) * _ROW_MULTIPLE
        self._max_length = policy.max_length
        self._wake = threading.Condition()
        self._submitted: deque[_Request] = deque()
        self._inbox: deque[_Request] = deque()
        self._released: deque[str] = deque()
        self._thread: threading.Thread | None = None
        # The last thread that exited when idle; it may still be inside torch.
        self._last_thread: threading.Thread | None = None
        self._exiting = False
        # The attributes below are accessed only by the engine's thread.
        self._cache: KVCache | None = None
        self._waiting: list[_Request] = []
        self._slots: list[_Slot] = []  # the first `_active` slots are running
        self._active = 0
        self._session_slot: dict[str | None, int] = {}
        self._model: Any = None
        self._decoder: FusedLlamaDecoder | None = None
        self._weights_number = 0
        self._weights_key: tuple[int, int] | None = None
        self._weight_addresses: list[int] = []  # memory address of each weight
        self._weight_windows: list[Tensor] = []  # views of the first elements of each weight
        self._weight_values: Tensor | None = None  # the values seen through those views
        self._tick = 0
        # Number of context tokens computed so far, excluding copied and reused ones.
        self.prefilled = 0
        self.sampled = 0

    # --- capabilities ---

    @property
    def reproducible(self) -> bool:  # type: ignore[override]
        """True for a policy in float32 on a CPU, where decoding is batch-invariant."""
        parameter = next(iter(self.policy.model.parameters()))
        return bool(parameter.device.type == "cpu" and parameter.dtype == torch.float32)

    @property
    def version(self) -> int:
        return self.policy.version

    @property
    def max_length(self) -> int:
        return self._max_length

    def __repr__(self) -> str:
        return f"LocalEngine({self.policy!r}, {self.slots} slots)"

    # --- calls from the event loop ---

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> Sample:
        session = request.session if request is not None else None
        got: Sample = await self._submit(ids, sampling, seed, session, top=0)
        return got

    async def distribution(
        self, ids: Sequence[int], sampling: Sampling, *, top: int = 20
    ) -> tuple[list[int], list[float], float]:
        got: tuple[list[int], list[float], float] = await self._submit(ids, sampling, 0, None, top=max(1, top))
        return got

    async def update(self, policy: Any) -> None:
        if policy is not self.policy:
            raise EngineError(
                "update() was called with a different policy than the one this LocalEngine samples from; "
                "create the engine from the policy that is trained: LocalEngine(policy)"
            )

    def release(self, session: str) -> None:
        with self._wake:
            self._released.append(session)

    async def _submit(self, ids: Sequence[int], sampling: Sampling, seed: int, session: str | None, top: int) -> Any:
        if len(ids) == 0:
            raise EngineError("ids must not be empty; pass the ids of the prompt")
        if len(ids) >= self.max_length:
            raise EngineError(f"{len(ids)} ids leave no space for an action in a context of {self.max_length} tokens")
        array = np.asarray(ids, dtype=np.int64)
        if array.min() < 0 or array.max() >= self.policy.vocab_size:
            raise EngineError(
                f"ids from {array.min()} to {array.max()} exceed the vocabulary of {self.policy.vocab_size} tokens; "
                "encode the prompt with the tokenizer of this policy"
            )
        loop = asyncio.get_running_loop()
        limit = min(sampling.max_tokens, self.max_length - len(ids))
        wanted = _Request(array, sampling, seed, session, loop, loop.create_future(), limit, top)
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
        """Move all requests submitted in one event-loop iteration to the inbox together.

        Chains that start together, or that one decode step brought to their next turn, are then prefilled together
        and stay synchronized.
        """
        if self._submitted:
            with self._wake:
                self._inbox.extend(self._submitted)
                self._submitted.clear()
                self._wake.notify()

    # --- the thread ---

    def _run(self) -> None:
        with torch.inference_mode(), single_torch_thread(self.policy):
            while True:
                with self._wake:
                    while not (self._inbox or self._waiting or self._active or self._exiting):
                        if self._wake.wait(_IDLE_SECONDS) or self._inbox:
                            continue
                        if self._submitted:  # their event loop is blocked or closed
                            self._inbox.extend(self._submitted)
                            self._submitted.clear()
                        else:
                            self._last_thread, self._thread = self._thread, None
                            return
                    if self._exiting:
                        return
                    self._waiting.extend(self._inbox)
                    self._inbox.clear()
                    released = list(self._released)
                    self._released.clear()
                try:
                    self._step(released)
                except Exception as error:
                    self._fail_all(error)

    def _stop_thread(self) -> None:
        """Stop the thread at interpreter exit; a thread still inside torch at that point would abort the process."""
        with self._wake:
            self._exiting = True
            self._wake.notify()
            threads = (self._thread, self._last_thread)
        for thread in threads:
            if thread is not None:
                thread.join(10)

    def _fail_all(self, error: Exception) -> None:
        """Fail all pending requests with the error and discard the slots, whose state is now undefined."""
        wrapped = EngineError(f"LocalEngine failed while sampling: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        # All slots, because an interrupted prefill may have reserved some beyond the running ones.
        requests = [*self._waiting, *(slot.request for slot in self._slots if slot.request is not None)]
        self._waiting, self._slots, self._active, self._cache, self._session_slot = [], [], 0, None, {}
        self._deliver([(request, wrapped) for request in requests])

    @staticmethod
    def _deliver(results: list[tuple[_Request, Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, Any]]] = {}
        for request, result in results:
            by_loop.setdefault(request.loop, []).append((request, result))

        def hand_over(batch: list[tuple[_Request, Any]]) -> None:
            for request, result in batch:
                if request.future.done():
                    continue
                if isinstance(result, BaseException):
                    request.future.set_exception(result)
                else:
                    request.future.set_result(result)

        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(hand_over, batch)
            except RuntimeError:
                pass  # the loop is closed, so nothing awaits the result

    def _step(self, released: list[str]) -> None:
        self._tick += 1
        for session in released:
            slot = self._session_slot.pop(session, None)
            if slot is not None:
                self._slots[slot].session = None
        self._waiting = [r for r in self._waiting if not r.cancelled]
        for row in reversed(range(self._active)):
            if self._running(row).cancelled:
                self._retire(row)
        if self._waiting:
            for request in self._waiting:
                request.waited += 1
            # A prefill of one row costs as much as a decode step of many, so collect several requests first.
            if len(self._waiting) > self._active or self._waiting[0].waited > _PREFILL_MAX_WAIT:
                self._prefill()
        if self._active:
            self._decode()

    # --- slots ---

    def _running(self, row: int) -> _Request:
        request = self._slots[row].request
        assert request is not None
        return request

    def _ensure_capacity(self, capacity: int, *, another: bool) -> KVCache:
        """Return the cache, enlarged to `capacity` tokens per slot and, if `another`, by a free slot where possible."""
        held = self._cache.capacity if self._cache is not None else 0
        if capacity > held:
            # Allocate more than requested, because growing copies the cache and the next prompt may be slightly longer.
            capacity = min(
                max(-(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP, held * 3 // 2), max(capacity, self.max_length + 1)
            )
        if self._cache is None:
            self._cache = KVCache(0, capacity, self.policy.layers)
        cache = self._cache
        count = cache.count
        if another and count < self.slots and all(slot.session is not None for slot in self._slots[self._active :]):
            # Allocate slots for all waiting requests, because growing copies the cache.
            wanted = -(-(self._active + len(self._waiting)) // _ROW_MULTIPLE) * _ROW_MULTIPLE
            count = min(self.slots, max(2 * count, 2 * _ROW_MULTIPLE, wanted))
        cache.grow(count, capacity)
        self._slots += [_Slot() for _ in range(cache.count - len(self._slots))]
        return cache

    def _detect_weight_change(self) -> None:
        """Increment the weights number if the weights have changed, and empty the idle slots with older weights.

        Running rows keep their keys and values until the turn ends.

        `policy.version` alone is not sufficient, because loading weights may restore an old value. torch's version
        counters are not either, because a fused optimizer that a user steps directly changes neither. The first
        elements of each weight are therefore compared as well.
        """
        parameters = list(self.policy.model.parameters())
        addresses = [p.data_ptr() for p in parameters]
        if addresses != self._weight_addresses:
            self._weight_addresses, self._weight_windows = addresses, [_weight_window(p.detach()) for p in parameters]
        some = torch.cat(self._weight_windows)
        key = (self.policy.version, sum(p._version for p in parameters))
        if key != self._weights_key or self._weight_values is None or not torch.equal(some, self._weight_values):
            self._weights_key, self._weight_values = key, some
            self._weights_number += 1
        for i in range(self._active, len(self._slots)):
            if self._cache is not None and self._slots[i].weights != self._weights_number:
                self._cache.length[i] = 0

    def _admit(self, request: _Request, *, empty: bool = False) -> tuple[int, int] | None:
        """Return a slot and the number of the request's ids that it already holds; None if all slots are running.

        If `empty`, no common prefix is searched, because the caller will copy the whole prompt.
        """
        own = self._session_slot.get(request.session)
        cache = self._ensure_capacity(len(request.ids) + request.limit + 1, another=own is None)
        if own is not None and self._slots[own].request is not None:
            raise EngineError(
                f"session {request.session!r} has two concurrent requests; sample one action at a time per chain"
            )
        source, common = own, self._held_history(request)
        if not common and not empty:
            usable = np.array([slot.weights == self._weights_number for slot in self._slots])
            source, common = cache.longest_prefix(request.ids, own, usable)
        common = min(common, len(request.ids) - 1)  # at least one token must be computed for its logits
        if own is None:
            own = self._claim_slot(avoid=source if common else None)
            if own is None:
                return None
        if source is not None and source != own and common:
            cache.copy(source, own, common)
        cache.length[own] = common
        slot = self._slots[own]
        slot.weights, slot.last_used, slot.session = self._weights_number, self._tick, request.session
        if request.session is not None:
            self._session_slot[request.session] = own
        return own, common

    def _held_history(self, request: _Request) -> int:
        """Return the length of the history in the slot of the request's session, or 0 if its ids do not continue it."""
        own = self._session_slot.get(request.session)
        if own is None or self._cache is None or self._slots[own].weights != self._weights_number:
            return 0
        held = int(self._cache.length[own])
        same = held < len(request.ids) and bool((self._cache.ids[own, :held] == request.ids[:held]).all())
        return held if same else 0

    def _claim_slot(self, avoid: int | None) -> int | None:
        """Return an idle slot: a free one, else the least recently used; None if all are running."""
        idle = [i for i in range(self._active, len(self._slots)) if self._slots[i].request is None]
        candidates = [i for i in idle if self._slots[i].session is None] or idle
        if avoid in candidates and len(candidates) > 1:
            candidates.remove(avoid)
        if not candidates:
            return None
        slot = min(candidates, key=lambda i: (self._slots[i].last_used, i))
        if (owner := self._slots[slot].session) is not None:
            del self._session_slot[owner]
            self._slots[slot].session = None
        return slot

    def _swap(self, a: int, b: int) -> None:
        if a == b or self._cache is None:
            return
        self._cache.swap(a, b)
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
        for i in (a, b):
            if self._slots[i].session is not None:
                self._session_slot[self._slots[i].session] = i

    def _retire(self, row: int) -> None:
        """Remove a row from the running batch; its slot keeps the history for the session's next turn."""
        self._active -= 1
        self._swap(row, self._active)
        slot = self._slots[self._active]
        slot.request, slot.last_used = None, self._tick

    # --- forward passes ---

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | int) -> Tensor:
        """Compute hidden states, (R, C, d), of the tokens (R, C) at the positions (R, C) of the given slots."""
        cache = self._cache
        assert cache is not None
        mask = cache.prepare(rows, positions)
        decoder = self._fused_decoder()
        if decoder is not None:
            return decoder(cache, tokens, positions, mask, stamp=(self._weights_number, self.policy.version))
        return reference_forward(self.policy.model.get_decoder(), cache, tokens, positions, mask)

    def _fused_decoder(self) -> FusedLlamaDecoder | None:
        """Return the fused decoder, or None if the model is not supported. Requires the policy's lock."""
        if self._model is not self.policy.model:  # adding an adapter, for example, replaces the model
            self._model, self._decoder = self.policy.model, FusedLlamaDecoder.try_build(self.policy.model)
        return self._decoder

    def _prefill(self) -> None:
        """Assign slots to waiting requests, compute their prompts and sample their first tokens."""
        chosen: list[tuple[_Request, int, int]] = []
        duplicates: list[tuple[_Request, int, int]] = []
        later: list[_Request] = []
        lead: dict[bytes, int] = {}
        width = 0
        # Hold the lock so that prefixes found in the cache are continued with the weights that computed them.
        with self.policy.lock:
            self._detect_weight_change()
            for request in self._waiting:
                # The chains of a group have the same prompt: compute it once and copy its keys and logits.
                key = request.ids.tobytes()
                width = max(width, min(len(request.ids) - self._held_history(request), _CHUNK_WIDTHS[-1]))
                if key not in lead and width * (len(chosen) + 1) > _PREFILL_TOKENS:
                    later.append(request)
                    continue
                try:
                    place = self._admit(request, empty=key in lead)
                except EngineError as error:
                    self._deliver([(request, error)])
                    continue
                if place is None:
                    later.append(request)
                    continue
                self._slots[place[0]].request = request  # reserve it, so that `_claim_slot` skips it
                if key in lead:
                    duplicates.append((request, place[0], lead[key]))
                else:
                    lead[key] = len(chosen)
                    chosen.append((request, *place))
            self._waiting = later
            if not chosen:
                return
            logits, version = self._prompt_logits(chosen)
            cache = self._cache
            assert cache is not None
            for request, slot, first in duplicates:
                cache.copy(chosen[first][1], slot, len(request.ids))
            logits = torch.cat([logits, logits[[first for _, _, first in duplicates]]])
            chosen += duplicates
        going: list[int] = []
        for i, (request, slot, _) in enumerate(chosen):
            if request.top:
                self._slots[slot].request = None
                self._deliver([(request, self._top_distribution(logits[i], request))])
            else:
                going.append(i)
        if not going:
            return
        ended = self._sample_next([chosen[i][0] for i in going], logits[going], version)
        results, joining = [], []
        for at, i in enumerate(going):
            request, slot, _ = chosen[i]
            if at in ended:
                self._slots[slot].request = None
                results.append((request, self._sample(request, ended[at])))
            else:
                joining.append(slot)
        # Running rows are the leading slots, so new rows are swapped with the idle slots after them.
        for slot in sorted(joining):
            self._swap(slot, self._active)
            self._active += 1
        self._deliver(results)

    def _prompt_logits(self, chosen: list[tuple[_Request, int, int]]) -> tuple[Tensor, int]:
        """Compute the prompts of `chosen`: tuples of request, slot and number of tokens already in the slot.

        Returns:
            Logits after each prompt, (R, V), and the policy version that computed them.
        """
        cache = self._cache
        assert cache is not None
        device = self.policy.device
        for request, slot, _ in chosen:
            cache.ids[slot, : len(request.ids)] = request.ids
        done: dict[int, Tensor] = {}
        left = chosen
        while left:
            longest = max(len(r.ids) - start for r, _, start in left)
            width = next((w for w in _CHUNK_WIDTHS if w >= longest), _CHUNK_WIDTHS[-1])
            tokens = np.zeros((len(left), width), dtype=np.int64)
            starts = np.array([start for _, _, start in left])
            counts = np.array([min(width, len(r.ids) - start) for r, _, start in left])
            for i, (request, _, start) in enumerate(left):
                tokens[i, : counts[i]] = request.ids[start : start + counts[i]]
            # Padding is written to the position after the row, where the next token overwrites it before it is read.
            ends = starts + counts
            positions = torch.as_tensor(np.minimum(starts[:, None] + np.arange(width), ends[:, None]), device=device)
            slots = torch.as_tensor([slot for _, slot, _ in left], device=device)
            given = torch.as_tensor(tokens, device=device)
            few = max(_ROW_MULTIPLE, _PREFILL_FORWARD_TOKENS // width // _ROW_MULTIPLE * _ROW_MULTIPLE)
            pieces = zip(given.split(few), positions.split(few), slots.split(few), strict=True)
            hidden = torch.cat([self._forward(*piece) for piece in pieces])
            self.prefilled += int(counts.sum())
            following = []
            for i, (request, slot, start) in enumerate(left):
                end = start + int(counts[i])
                cache.length[slot] = end
                if end == len(request.ids):
                    done[slot] = hidden[i, int(counts[i]) - 1]
                else:
                    following.append((request, slot, end))
            left = following
        states = torch.stack([done[slot] for _, slot, _ in chosen])
        padded = torch.cat([states, states[:1].expand(-len(chosen) % _ROW_MULTIPLE, -1)])
        return self.policy.logits(padded)[: len(chosen)], self.policy.version

    def _decode(self) -> None:
        cache = self._cache
        assert cache is not None
        count = self._active
        rows = -(-count // _ROW_MULTIPLE) * _ROW_MULTIPLE
        requests = [self._running(row) for row in range(count)]
        tokens = np.zeros(rows, dtype=np.int64)
        tokens[:count] = [request.sampled[-1] for request in requests]
        at = cache.length[:rows].copy()  # padding rows write to a position that is never read
        device = self.policy.device
        with self.policy.lock:
            hidden = self._forward(
                torch.as_tensor(tokens, device=device)[:, None], torch.as_tensor(at, device=device)[:, None], rows
            )
            logits = self.policy.logits(hidden[:, 0])[:count]
            version = self.policy.version
        cache.ids[np.arange(count), at[:count]] = tokens[:count]
        cache.length[:count] += 1
        ended = self._sample_next(requests, logits, version)
        results = [(requests[row], self._sample(requests[row], why)) for row, why in ended.items()]
        for row in sorted(ended, reverse=True):
            self._retire(row)
        self._deliver(results)

    def _sample_next(self, requests: Sequence[_Request], logits: Tensor, version: int) -> dict[int, str]:
        """Sample one token for each request and return the stop reasons of those that ended, by index."""
        device = logits.device
        noise = seeds.uniforms(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([len(request.sampled) for request in requests], dtype=np.uint64),
        )

        def column(name: str, off: float) -> Tensor | None:
            values = [getattr(request.sampling, name) for request in requests]
            return torch.tensor(values, device=device) if any(value != off for value in values) else None

        drawn = sample_tokens(
            logits,
            torch.tensor([float(request.sampling.temperature) for request in requests], device=device),
            torch.as_tensor(noise, device=device),
            top_p=column("top_p", 1.0),
            top_k=column("top_k", 0),
            min_p=column("min_p", 0.0),
        )
        if not bool(drawn.logprobs.isfinite().all()):
            raise EngineError("the logits are not finite; the policy's weights have diverged")
        self.sampled += len(requests)
        ids, logprobs, entropies = drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.entropies.tolist()
        kept_mass = drawn.kept_mass.tolist() if drawn.kept_mass is not None else None
        stop_ids = self.policy.chat.stop_ids
        ended: dict[int, str] = {}
        for i, request in enumerate(requests):
            request.sampled.append(ids[i])
            request.logprobs.append(logprobs[i])
            request.entropies.append(entropies[i])
            request.versions.append(version)
            if kept_mass is not None:
                request.kept_mass.append(kept_mass[i])
            if ids[i] in stop_ids:
                ended[i] = "stop"
            elif request.sampling.stop and self._has_stop_string(request):
                ended[i] = "string"
            elif len(request.sampled) >= request.limit:
                ended[i] = "length"
        return ended

    def _has_stop_string(self, request: _Request) -> bool:
        text = self.policy.chat.text(request.sampled)
        return any(stop in text for stop in request.sampling.stop)

    @staticmethod
    def _sample(request: _Request, stop: Any) -> Sample:
        return Sample(
            ids=tuple(request.sampled),
            logprobs=tuple(request.logprobs),
            entropies=tuple(request.entropies),
            stop=stop,
            versions=tuple(request.versions),
            kept_mass=tuple(request.kept_mass) if request.sampling.truncates else None,
            seconds=time.perf_counter() - request.started,
        )

    @staticmethod
    def _top_distribution(logits: Tensor, request: _Request) -> tuple[list[int], list[float], float]:
        logp = torch.log_softmax(logits.float() / (request.sampling.temperature or 1.0), dim=-1)
        best = logp.topk(min(request.top, len(logp)))
        p = logp.exp()
        entropy = float(-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum())
        return best.indices.tolist(), best.values.tolist(), entropy


def _weight_window(weight: Tensor) -> Tensor:
    """Return a view of up to 8 leading elements of a weight."""
    while weight.dim() > 1:
        weight = weight[0]
    return weight.reshape(-1)[:8]


_started: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _stop_all() -> None:
    for engine in list(_started):
        engine._stop_thread()
