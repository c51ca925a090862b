"""Requests, and a table that maps each KV-cache slot to its request and session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly_kit.engines.local.kv_cache import KVCache
from agentfly_kit.errors import EngineError
from agentfly_kit.samples import Sample, Sampling
from agentfly_kit.types import ImageSpan

# Batch sizes are multiples of this number, because other sizes use kernels that round differently; see kv_cache.py.
ROW_MULTIPLE = 8
# The capacity of a slot grows in multiples of this number of tokens, up to the model's context length.
_CAPACITY_STEP = 256


@dataclass(eq=False)
class Request:
    """A request and the tokens sampled for it so far."""

    ids: npt.NDArray[np.int64]
    # Rows with equal prefixes of these keys, not of ids, have equal keys and values in the cache; see `Row.keys`.
    row_keys: npt.NDArray[np.int64]
    sampling: Sampling
    seed: int
    session: str | None
    future: asyncio.Future[Any]
    # Maximum number of tokens to sample.
    limit: int
    # If positive, return this many of the most probable next tokens instead of sampling.
    top: int = 0
    # Matchers for the constraint (see grammar.py). Without matchers, all tokens are allowed.
    matchers: Sequence[Any] = ()
    # Spans of the ids that are placeholders of images.
    images: Sequence[ImageSpan] = ()
    # Difference between rotary position and position after the prompt; an image takes up fewer rotary positions.
    shift: int = 0
    started: float = field(default_factory=time.perf_counter)
    # Number of decode steps that the request has waited for its prefill.
    waited: int = 0
    cancelled: bool = False
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def sample(self, stop: Any) -> Sample | EngineError:
        """Return the sampled tokens with their stop reason, or an error if the constraint could not be followed."""
        if problem := "".join(matcher.get_error() for matcher in self.matchers):
            return EngineError(f"the constraint could not be followed: {problem}")
        truncated = self.sampling.truncates or (bool(self.matchers) and not self.sampling.greedy)
        return Sample(
            ids=tuple(self.sampled),
            logprobs=tuple(self.logprobs),
            entropies=tuple(self.entropies),
            stop=stop,
            versions=tuple(self.versions),
            kept_mass=tuple(self.kept_mass) if truncated else None,
            alternatives=tuple(self.alternatives) or None,
            seconds=time.perf_counter() - self.started,
        )


@dataclass(eq=False)
class _Slot:
    # The request that runs in this slot; None if the slot is idle.
    request: Request | None = None
    # The session whose history is in the slot.
    session: str | None = None
    # Index of the engine step in which the slot was last used.
    last_used: int = 0
    # Number that identifies the weights that computed the keys and values; see `_WeightMonitor`.
    weights: int = -1


class SlotTable:
    """Slots of a KV cache. Each of the first `active` slots runs a request; the others keep the histories of sessions.

    `round_up` is passed to `KVCache`.
    """

    def __init__(self, limit: int, max_length: int, round_up: Callable[[int], int]) -> None:
        self.limit = limit
        self.max_length = max_length
        self.cache = KVCache(0, 0, round_up)
        self.active = 0
        self.session_slot: dict[str | None, int] = {}
        # Number that identifies the current weights; see `_WeightMonitor`.
        self.weights = -1
        self.tick = 0
        # Number of live sessions whose history was dropped.
        self.num_replaced = 0
        self._slots: list[_Slot] = []

    def running(self, row: int) -> Request:
        """Return the request of a running row."""
        request = self._slots[row].request
        assert request is not None
        return request

    def requests(self) -> list[Request]:
        """Return the requests of all slots, including those reserved by an interrupted prefill."""
        return [slot.request for slot in self._slots if slot.request is not None]

    def reserve(self, index: int, request: Request | None) -> None:
        """Assign a request to an idle slot, so that no other request takes the slot; None makes the slot idle again."""
        self._slots[index].request = request

    def release(self, session: str) -> None:
        """Remove a session from the table, so that its slot can be reused."""
        slot = self.session_slot.pop(session, None)
        if slot is not None:
            self._slots[slot].session = None

    def start(self, index: int) -> None:
        """Move a slot to the end of the running rows."""
        self._swap(index, self.active)
        self.active += 1

    def retire(self, row: int) -> None:
        """Make a running row idle. The slot keeps the history for the session's next turn."""
        self.active -= 1
        self._swap(row, self.active)
        slot = self._slots[self.active]
        slot.request, slot.last_used = None, self.tick

    def use_weights(self, number: int) -> None:
        """Set the number of the current weights, and clear idle slots whose keys were computed with other weights."""
        self.weights = number
        for i in range(self.active, len(self._slots)):
            if self._slots[i].weights != number:
                self.cache.length[i] = 0

    def admit(self, request: Request, waiting: int, *, empty: bool) -> tuple[int, int] | None:
        """Assign a slot to a request. Return (slot, number of ids already in it), or None if no slot is idle.

        If every idle slot belongs to a session, slots are first added for all `waiting` requests, up to the limit. If
        `empty` is True, no common prefix is looked up, because the caller will copy the whole prompt.
        """
        own = self.session_slot.get(request.session)
        self._grow(len(request.ids) + request.limit + 1, waiting if own is None else 0)
        if own is not None and self._slots[own].request is not None:
            raise EngineError(
                f"session {request.session!r} has two concurrent requests; sample one action at a time per chain"
            )
        source, common = own, self.held_history(request)
        if not common and not empty:
            usable = np.array([slot.weights == self.weights for slot in self._slots])
            source, common = self.cache.longest_prefix(request.row_keys, own, usable)
            # Recompute decoded keys, because other chains affect which of them are still cached.
            if own is None:
                common = min(common, int(self.cache.prefilled[source]))
        common = min(common, len(request.ids) - 1)  # at least one token must be computed for its logits
        if self.cache.is_recurrent and source is not None and common != self.cache.length[source]:
            common = 0
        if own is None:
            own = self._claim(avoid=source if common else None)
            if own is None:
                return None
        if source is not None and source != own and common:
            self.cache.copy(source, own, common)
        self.cache.length[own] = common
        slot = self._slots[own]
        slot.request, slot.weights, slot.last_used, slot.session = request, self.weights, self.tick, request.session
        if request.session is not None:
            self.session_slot[request.session] = own
        return own, common

    def held_history(self, request: Request) -> int:
        """Return the number of ids in the session's slot, or 0 if the request does not begin with these ids."""
        own = self.session_slot.get(request.session)
        if own is None or self._slots[own].weights != self.weights:
            return 0
        held = int(self.cache.length[own])
        same = held < len(request.ids) and bool((self.cache.row_keys[own, :held] == request.row_keys[:held]).all())
        return held if same else 0

    def _grow(self, capacity: int, waiting: int) -> None:
        """Enlarge the cache to `capacity` tokens per slot, and add slots if every idle slot belongs to a session."""
        held = self.cache.capacity
        if capacity > held:
            # Allocate more than requested, because growing copies the cache and the next prompt may be slightly longer.
            capacity = min(
                max(-(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP, held * 3 // 2),
                max(capacity, self.max_length + 1),
            )
        count = self.cache.count
        if waiting and count < self.limit and all(slot.session is not None for slot in self._slots[self.active :]):
            wanted = -(-(self.active + waiting) // ROW_MULTIPLE) * ROW_MULTIPLE
            count = min(self.limit, max(2 * count, 2 * ROW_MULTIPLE, wanted))
        self.cache.grow(count, capacity)
        self._slots += [_Slot() for _ in range(self.cache.count - len(self._slots))]

    def _claim(self, avoid: int | None) -> int | None:
        """Return the least recently used idle slot, or None. Prefer slots without a session, and avoid slot `avoid`."""
        idle = [i for i in range(self.active, len(self._slots)) if self._slots[i].request is None]
        candidates = [i for i in idle if self._slots[i].session is None] or idle
        if avoid in candidates and len(candidates) > 1:
            candidates.remove(avoid)
        if not candidates:
            return None
        slot = min(candidates, key=lambda i: (self._slots[i].last_used, i))
        if (owner := self._slots[slot].session) is not None:
            self.release(owner)
            self.num_replaced += 1
        return slot

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self.cache.swap(a, b)
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
        for i in (a, b):
            if (session := self._slots[i].session) is not None:
                self.session_slot[session] = i
