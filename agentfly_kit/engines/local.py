"""Sampling with the policy's own weights, in this process: continuous batching over key-value slots, on one thread.

Knows no chains and no tools. A request is ids, sampling and a seed; its row joins the running batch when its prompt is
in the cache and leaves at its stop. What a session has in its slot is reused when the next turn begins with the same
ids, and a prompt that another slot holds is copied instead of computed.
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

from agentfly_kit.engines.base import Engine
from agentfly_kit.engines.decoder import Decoder, run_itself
from agentfly_kit.engines.sampling import draw
from agentfly_kit.engines.slots import SLAB, Slots
from agentfly_kit.engines.tape import Tape
from agentfly_kit.errors import EngineError
from agentfly_kit.policy import Policy, compute_threads
from agentfly_kit.types import Sample, Sampling, TurnRequest

_IDLE_SECONDS = 2.0
"""A thread with nothing to do ends, so that an engine that is dropped can be collected."""
_ROWS = 8
"""A batch is a multiple of this: other counts run other kernels, whose last bits differ; see slots.py."""
_PREFILL_TOKENS = 4096
"""Tokens, padding included, of one prefill."""
_PIECE = 512
"""Tokens of one forward of a prefill: what lies between two of its products should stay in the processor's cache."""
_WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
"""A prefill chunk is as wide as one of these."""


_SPARE = 256
"""Room for tokens in a slot comes in multiples of this, where the model's context is as long."""
_COMPANY, _PATIENCE = 1, 12
"""A prefill waits until there are more rows for it than this part of those that run (1: all, 4: a quarter), or until
the first has waited for so many steps. Measured for small models, whose steps are short beside what a prefill
costs apart from its tokens ..."""
_SLOW_COMPANY, _SLOW_PATIENCE = 4, 8
"""... and of a model that runs itself that was not measured: less waiting, then."""


@dataclass(eq=False)
class _Request:
    ids: npt.NDArray[np.int64]
    sampling: Sampling
    seed: int
    session: str | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    top: int = 0
    """Above 0: only the distribution of the next token is wanted."""
    started: float = field(default_factory=time.perf_counter)
    limit: int = 0
    waited: int = 0
    lane: int = -1
    """Where the tape has what it sampled; -1 before its first token."""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.limit = self.sampling.max_tokens


class LocalEngine(Engine):
    """Samples from `policy` as it is now: there are no weights to send, and `update` only checks that.

    slots: sequences whose keys and values are held at once, running or between two turns. A chain that finds none left
        takes the one unused for longest, whose chain then computes its history again.
    """

    def __init__(self, policy: Policy, *, slots: int = 256) -> None:
        if slots < 1:
            raise EngineError(f"slots={slots}: give at least 1; it is rounded up to a multiple of {_ROWS}")
        self.policy = policy
        self.slots = -(-slots // _ROWS) * _ROWS
        self._max_length = policy.max_length
        self._wake = threading.Condition()
        self._arriving: deque[_Request] = deque()
        self._inbox: deque[_Request] = deque()
        self._released: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None  # the last one that had nothing to do; it may still be in torch
        self._ending = False
        # From here on: touched by the engine's thread alone.
        self._store: Slots | None = None
        self._waiting: list[_Request] = []
        self._rows: list[_Request | None] = []  # by slot; the running ones are the first `_active`
        self._model: Any = None
        self._decoder: Decoder | None = None
        self._tape = Tape()
        self._lanes: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # by slot, of the running ones
        self._active = 0
        self._session: dict[str, int] = {}
        self._owner: list[str | None] = []  # by slot
        self._used: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._weights: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # by slot: which weights made its keys
        self._now = 0
        self._known: tuple[int, int] | None = None
        self._lie: list[int] = []  # where each weight lies in memory
        self._windows: list[Tensor] = []  # views of a few numbers of each
        self._some: Tensor | None = None  # those numbers
        self._vocabulary = 0
        self._tick = 0
        self.prefilled = 0
        """Tokens computed as context since the start; copies and reused history are not counted."""
        self.sampled = 0

    # --- what it declares ---

    @property
    def reproducible(self) -> bool:  # type: ignore[override]
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
                "this LocalEngine samples from the policy it was made with, and another one was handed to update(); "
                "make the engine from the policy that is trained: LocalEngine(policy)"
            )

    def release(self, session: str) -> None:
        with self._wake:
            self._released.append(session)

    async def _submit(self, ids: Sequence[int], sampling: Sampling, seed: int, session: str | None, top: int) -> Any:
        if len(ids) == 0:
            raise EngineError("an engine continues ids, and got none; give the prompt's ids")
        if len(ids) >= self.max_length:
            raise EngineError(f"{len(ids)} ids leave no room in a context of {self.max_length}")
        array = np.asarray(ids, dtype=np.int64)
        # As unsigned numbers negative ones are huge. The model is asked for its vocabulary once a prefill.
        if array.view(np.uint64).max() >= self._vocabulary and (
            array.min() < 0 or array.max() >= self.policy.vocab_size
        ):
            raise EngineError(
                f"ids from {array.min()} to {array.max()} do not fit a vocabulary of {self.policy.vocab_size}: "
                "they come from another tokenizer"
            )
        loop = asyncio.get_running_loop()
        wanted = _Request(array, sampling, seed, session, loop, loop.create_future(), top=top)
        wanted.limit = min(sampling.max_tokens, self.max_length - len(ids))
        with self._wake:
            self._arriving.append(wanted)
            if self._thread is None:
                _running.add(self)
                atexit.unregister(_end_all)
                atexit.register(_end_all)
                self._thread = threading.Thread(target=self._run, name="agentfly-engine", daemon=True)
                self._thread.start()
        loop.call_soon(self._arrived)
        try:
            return await wanted.future
        except asyncio.CancelledError:
            wanted.cancelled = True  # the thread drops the row at its next step
            raise

    def _arrived(self) -> None:
        """What was asked for in one turn of the event loop comes in together: chains that begin at once, or that one
        step brought to their next turn, would else be prefilled in pieces and stay out of step."""
        if self._arriving:
            with self._wake:
                self._inbox.extend(self._arriving)
                self._arriving.clear()
                self._wake.notify()

    # --- the thread ---

    def _run(self) -> None:
        with torch.inference_mode(), compute_threads(self.policy):
            while True:
                with self._wake:
                    while not (self._inbox or self._waiting or self._active or self._ending):
                        if self._wake.wait(_IDLE_SECONDS) or self._inbox:
                            continue
                        if self._arriving:  # their event loop is stuck, or gone
                            self._inbox.extend(self._arriving)
                            self._arriving.clear()
                        else:
                            self._leaving, self._thread = self._thread, None
                            return
                    if self._ending:
                        return
                    self._waiting.extend(self._inbox)
                    self._inbox.clear()
                    released = list(self._released)
                    self._released.clear()
                try:
                    self._step(released)
                except Exception as error:
                    self._fail(error)

    def _end(self) -> None:
        """Python ends. A thread that is inside torch when the interpreter goes would abort the process."""
        with self._wake:
            self._ending = True
            self._wake.notify()
            threads = (self._thread, self._leaving)
        for thread in threads:
            if thread is not None:
                thread.join(10)

    def _fail(self, error: Exception) -> None:
        """Everything in flight gets the error; the slots are made anew, for their state is unknown."""
        wrapped = EngineError(f"LocalEngine failed while sampling: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        # All rows: those behind the running ones may be reserved by a prefill that did not end.
        requests = [*self._waiting, *(r for r in self._rows if r is not None)]
        self._waiting, self._rows, self._active, self._store = [], [], 0, None
        self._tape, self._lanes = Tape(), np.zeros(0, dtype=np.int64)
        self._session, self._owner = {}, []
        self._used, self._weights = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
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
                pass  # that loop is closed; nobody waits there any more

    def _step(self, released: list[str]) -> None:
        self._tick += 1
        for session in released:
            slot = self._session.pop(session, None)
            if slot is not None:
                self._owner[slot] = None
        self._waiting = [r for r in self._waiting if not r.cancelled]
        for row in reversed(range(self._active)):
            request = self._rows[row]
            if request is not None and request.cancelled:
                self._retire(row)
        if self._waiting:
            for request in self._waiting:
                request.waited += 1
            # A prefill of one row costs as much as a decode of many: wait for company, but not for long.
            short = self._decoder is not None
            company, patience = (_COMPANY, _PATIENCE) if short else (_SLOW_COMPANY, _SLOW_PATIENCE)
            if len(self._waiting) > self._active // company or self._waiting[0].waited > patience:
                self._prefill()
        if self._active:
            self._decode()

    # --- slots ---

    def _room(self, capacity: int, *, another: bool) -> Slots:
        """The slots, each with room for so many tokens; with `another`, one more than are in use if it may be."""
        held = self._store.capacity if self._store is not None else 0
        if capacity > held:
            # More than asked for: growing copies everything that is held, and the next prompt may be a bit longer.
            capacity = min(max(-(-capacity // _SPARE) * _SPARE, held * 3 // 2), max(capacity, self.max_length + 1))
        if self._store is None:
            # A model that runs itself wants a row's keys in one piece.
            self._store = Slots(0, capacity, self.policy.layers, slab=SLAB if self._own_decoder() else None)
        store = self._store
        count = store.count
        if another and count < self.slots and None not in self._owner[self._active :]:
            # Room for all that wait now: growing copies everything that is held.
            wanted = -(-(self._active + len(self._waiting)) // _ROWS) * _ROWS
            count = min(self.slots, max(2 * count, 2 * _ROWS, wanted))
        store.grow(count, capacity)
        extra = store.count - len(self._rows)
        if extra:
            self._rows.extend([None] * extra)
            self._owner.extend([None] * extra)
            self._lanes = np.concatenate([self._lanes, np.zeros(extra, dtype=np.int64)])
            self._used = np.concatenate([self._used, np.zeros(extra, dtype=np.int64)])
            self._weights = np.concatenate([self._weights, np.full(extra, -1, dtype=np.int64)])
        return store

    def _look_at_weights(self) -> None:
        """Number the weights that are there now. Not by `policy.version` alone: loading weights may bring it back. Nor
        by torch's own counts: a fused optimizer that somebody steps by hand moves neither."""
        parameters = list(self.policy.model.parameters())
        lie = [p.data_ptr() for p in parameters]
        if lie != self._lie:
            self._lie, self._windows = lie, [_window(p.detach()) for p in parameters]
        some = torch.cat(self._windows)
        key = (self.policy.version, sum(p._version for p in parameters))
        self._vocabulary = self.policy.vocab_size
        if key != self._known or self._some is None or not torch.equal(some, self._some):
            self._known, self._some = key, some
            self._now += 1

    def _forget_stale(self) -> None:
        """Empty the slots that other weights filled; rows that run end their turn on what they have."""
        if self._store is not None:
            stale = self._weights != self._now
            stale[: self._active] = False
            self._store.length[stale] = 0

    def _admit(self, request: _Request, *, empty: bool = False) -> tuple[int, int] | None:
        """A slot for the request and how many of its ids are in it already; None if every slot is running.

        empty: nothing is looked up, because all of it will be copied.
        """
        own = self._session.get(request.session) if request.session is not None else None
        store = self._room(len(request.ids) + request.limit + 1, another=own is None)
        if own is not None and self._rows[own] is not None:
            raise EngineError(f"two requests of the session {request.session!r} at once; a chain samples one at a time")
        source, common = -1, 0
        if own is not None and 0 < (held := int(store.length[own])) < len(request.ids):
            # The usual second turn: all that the session holds is the beginning of what it asks.
            source, common = own, held if bool((store.ids[own, :held] == request.ids[:held]).all()) else 0
        if not common and not empty:
            source, common = store.longest_prefix(request.ids, own, self._weights == self._now)
        common = min(common, len(request.ids) - 1)  # at least one token must run, for its logits
        if own is None:
            own = self._take(avoid=source if common else None)
            if own is None:
                return None
        if source != own and common:
            store.copy(source, own, common)
        store.length[own] = common
        self._weights[own] = self._now
        self._used[own] = self._tick
        if request.session is not None:
            self._session[request.session] = own
            self._owner[own] = request.session
        return own, common

    def _left(self, request: _Request) -> int:
        """How many of its ids its own session's slot does not hold."""
        own = self._session.get(request.session) if request.session is not None else None
        if own is None or self._store is None or self._weights[own] != self._now:
            return len(request.ids)
        held = int(self._store.length[own])
        same = held < len(request.ids) and bool((self._store.ids[own, :held] == request.ids[:held]).all())
        return len(request.ids) - held if same else len(request.ids)

    def _take(self, avoid: int | None) -> int | None:
        """A slot that is not running: a free one, else the one unused for longest."""
        idle = [i for i in range(self._active, len(self._rows)) if self._rows[i] is None]
        free = [i for i in idle if self._owner[i] is None]
        candidates = free or idle
        if avoid in candidates and len(candidates) > 1:
            candidates.remove(avoid)
        if not candidates:
            return None
        slot = min(candidates, key=lambda i: (self._used[i], i))
        owner = self._owner[slot]
        if owner is not None:
            del self._session[owner]
            self._owner[slot] = None
        return slot

    def _swap(self, a: int, b: int) -> None:
        if a == b or self._store is None:
            return
        self._store.swap(a, b)
        self._rows[a], self._rows[b] = self._rows[b], self._rows[a]
        self._owner[a], self._owner[b] = self._owner[b], self._owner[a]
        for array in (self._used, self._weights, self._lanes):
            array[[a, b]] = array[[b, a]]
        for slot in (a, b):
            owner = self._owner[slot]
            if owner is not None:
                self._session[owner] = slot

    def _retire(self, row: int) -> None:
        """Take a row out of the running batch. Its slot keeps the history for the session's next turn."""
        request = self._rows[row]
        assert request is not None
        self._tape.close(request.lane)
        self._active -= 1
        self._swap(row, self._active)
        self._rows[self._active] = None
        self._used[self._active] = self._tick

    # --- computing ---

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | int) -> Tensor:
        """(R, C) tokens at (R, C) positions -> hidden states (R, C, d)."""
        store = self._store
        assert store is not None
        mask = store.aim(rows, positions)
        decoder = self._own_decoder()
        if decoder is not None:
            return decoder(store, tokens, positions, mask, stamp=(self._now, self.policy.version))
        return run_itself(self.policy.model.get_decoder(), store, tokens, positions, mask)

    def _own_decoder(self) -> Decoder | None:
        """None if the model must run itself. Hold the policy's lock: a model not met before is tried."""
        if self._model is not self.policy.model:  # one that got an adapter, say, is another
            self._model, self._decoder = self.policy.model, Decoder.of(self.policy.model)
        return self._decoder

    def _prefill(self) -> None:
        """Put waiting prompts into slots, one chunk each; those that are complete get their first token."""
        chosen: list[tuple[_Request, int, int]] = []
        twins: list[tuple[_Request, int, int]] = []
        later: list[_Request] = []
        lead: dict[bytes, int] = {}
        width = 0
        # Locked from here on: what is admitted as computed with these weights is continued with these weights.
        with self.policy.lock:
            self._look_at_weights()
            self._forget_stale()
            for request in self._waiting:
                # Chains of one group bring the same prompt: one computes it, and the others take what it found.
                key = request.ids.tobytes()
                width = max(width, min(self._left(request), _WIDTHS[-1]))
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
                self._rows[place[0]] = request  # reserved: `_take` leaves it alone
                if key in lead:
                    twins.append((request, place[0], lead[key]))
                else:
                    lead[key] = len(chosen)
                    chosen.append((request, *place))
            self._waiting = later
            if not chosen:
                return
            logits, version = self._prompt_logits(chosen)
            store = self._store
            assert store is not None
            for request, slot, first in twins:
                store.copy(chosen[first][1], slot, len(request.ids))
            logits = torch.cat([logits, logits[[first for _, _, first in twins]]])
            chosen += twins
        looking = [i for i, (r, _, _) in enumerate(chosen) if r.top]
        if looking:
            self._deliver([(chosen[i][0], self._top(logits[i], chosen[i][0])) for i in looking])
            for i in looking:
                self._rows[chosen[i][1]] = None
        going = [i for i, (r, _, _) in enumerate(chosen) if not r.top]
        if not going:
            return
        for i in going:
            request = chosen[i][0]
            request.lane = self._tape.open(request.sampling, request.seed, request.limit)
        requests = [chosen[i][0] for i in going]
        lanes = np.array([r.lane for r in requests], dtype=np.int64)
        ended = self._extend(requests, lanes, logits[going], version)
        results, joining = [], []
        for i, request in enumerate(requests):
            slot = chosen[going[i]][1]
            if i not in ended:
                self._lanes[slot] = request.lane
                joining.append(slot)
            else:
                self._rows[slot] = None
                results.append((request, self._sample(request, ended[i])))
                self._tape.close(request.lane)
        # They join behind those that run. Who stands there already stays: a move copies all that a slot holds.
        places = range(self._active, self._active + len(joining))
        free = sorted({*places}.difference(joining))
        for slot in joining:
            if slot not in places:
                self._swap(slot, free.pop())
        self._active += len(joining)
        self._deliver(results)

    def _prompt_logits(self, chosen: list[tuple[_Request, int, int]]) -> tuple[Tensor, int]:
        """Compute (request, slot, how much of it is there); logits after each prompt (R, V), and their version."""
        store = self._store
        assert store is not None
        device = self.policy.device
        for request, slot, _ in chosen:
            store.ids[slot, : len(request.ids)] = request.ids
        done: dict[int, Tensor] = {}
        left = [(request, slot, start) for request, slot, start in chosen]
        while left:
            longest = max(len(r.ids) - start for r, _, start in left)
            width = next((w for w in _WIDTHS if w >= longest), _WIDTHS[-1])
            tokens = np.zeros((len(left), width), dtype=np.int64)
            starts = np.array([start for _, _, start in left])
            counts = np.array([min(width, len(r.ids) - start) for r, _, start in left])
            for i, (request, _, start) in enumerate(left):
                tokens[i, : counts[i]] = request.ids[start : start + counts[i]]
            # Padding is written just behind the row, where the next token will overwrite it unread.
            ends = starts + counts
            positions = torch.as_tensor(np.minimum(starts[:, None] + np.arange(width), ends[:, None]), device=device)
            slots = torch.as_tensor([slot for _, slot, _ in left], device=device)
            given = torch.as_tensor(tokens, device=device)
            few = max(_ROWS, _PIECE // width // _ROWS * _ROWS)
            pieces = zip(given.split(few), positions.split(few), slots.split(few), strict=True)
            hidden = torch.cat([self._forward(*piece) for piece in pieces])
            self.prefilled += int(counts.sum())
            following = []
            for i, (request, slot, start) in enumerate(left):
                end = start + int(counts[i])
                store.length[slot] = end
                if end == len(request.ids):
                    done[slot] = hidden[i, int(counts[i]) - 1]
                else:
                    following.append((request, slot, end))
            left = following
        states = torch.stack([done[slot] for _, slot, _ in chosen])
        padded = torch.cat([states, states[:1].expand(-len(chosen) % _ROWS, -1)])
        logits = self.policy.logits(padded)[: len(chosen)]
        return logits, self.policy.version

    def _decode(self) -> None:
        store = self._store
        assert store is not None
        count = self._active
        rows = -(-count // _ROWS) * _ROWS
        lanes = self._lanes[:count]
        tokens = np.zeros(rows, dtype=np.int64)
        tokens[:count] = self._tape.last(lanes)
        at = store.length[:rows].copy()  # for the rows that only fill up, a place that nobody reads
        device = self.policy.device
        with self.policy.lock:
            hidden = self._forward(
                torch.as_tensor(tokens, device=device)[:, None], torch.as_tensor(at, device=device)[:, None], rows
            )
            logits = self.policy.logits(hidden[:, 0])[:count]
            version = self.policy.version
        store.ids[np.arange(count), at[:count]] = tokens[:count]
        store.length[:count] += 1
        ended = self._extend(self._rows[:count], lanes, logits, version)
        results = []
        for row in sorted(ended, reverse=True):
            request = self._rows[row]
            assert request is not None
            results.append((request, self._sample(request, ended[row])))
            self._retire(row)
        if results:
            self._deliver(results[::-1])

    def _extend(
        self, requests: Sequence[_Request | None], lanes: npt.NDArray[np.int64], logits: Tensor, version: int
    ) -> dict[int, str]:
        """Sample one token for each request, whose lanes those are; returns why some ended, by their place."""
        tape, device = self._tape, logits.device
        noise = tape.noise(lanes)

        def column(values: npt.NDArray[Any], off: float) -> Tensor | None:
            return torch.as_tensor(values, device=device) if bool((values != off).any()) else None

        drawn = draw(
            logits,
            torch.as_tensor(tape.temperature[lanes], device=device),
            torch.as_tensor(noise, device=device),
            top_p=column(tape.top_p[lanes], 1.0),
            top_k=column(tape.top_k[lanes], 0),
            min_p=column(tape.min_p[lanes], 0.0),
        )
        self.sampled += len(requests)
        ids, logprobs = drawn.ids.cpu().numpy(), drawn.logprobs.cpu().numpy()
        if not bool(np.isfinite(logprobs).all()):
            raise EngineError("the logits are not finite: the policy's weights have diverged")
        kept = drawn.kept.cpu().numpy() if drawn.kept is not None else None
        full = tape.write(lanes, ids, logprobs, drawn.entropies.cpu().numpy(), kept, version)
        ended = {int(i): "length" for i in full.nonzero()[0]}
        for i in tape.stops[lanes].nonzero()[0].tolist():
            request = requests[i]
            if request is not None and self._says(request):
                ended[i] = "string"
        for stop in self.policy.chat.stop_ids:
            ended.update((i, "stop") for i in (ids == stop).nonzero()[0].tolist())
        return ended

    def _says(self, request: _Request) -> bool:
        text = self.policy.chat.text(self._tape.ids[request.lane, : self._tape.count[request.lane]].tolist())
        return any(stop in text for stop in request.sampling.stop)

    def _sample(self, request: _Request, stop: Any) -> Sample:
        tape, lane = self._tape, request.lane
        count = int(tape.count[lane])
        return Sample(
            ids=tuple(tape.ids[lane, :count].tolist()),
            logprobs=tuple(tape.logprobs[lane, :count].tolist()),
            entropies=tuple(tape.entropies[lane, :count].tolist()),
            stop=stop,
            versions=tuple(tape.versions[lane, :count].tolist()),
            kept_mass=tuple(tape.kept[lane, :count].tolist()) if request.sampling.truncates else None,
            seconds=time.perf_counter() - request.started,
        )

    @staticmethod
    def _top(logits: Tensor, request: _Request) -> tuple[list[int], list[float], float]:
        logp = torch.log_softmax(logits.float() / (request.sampling.temperature or 1.0), dim=-1)
        best = logp.topk(min(request.top, len(logp)))
        p = logp.exp()
        entropy = float(-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum())
        return best.indices.tolist(), best.values.tolist(), entropy


def _window(weight: Tensor) -> Tensor:
    """Its first numbers; always a view."""
    while weight.dim() > 1:
        weight = weight[0]
    return weight.reshape(-1)[:8]


_running: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _end_all() -> None:
    for engine in list(_running):
        engine._end()
