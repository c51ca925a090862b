"""State machine of a pool, without a clock, an event loop or I/O.

Each event is a method of `PoolState`. `PoolState.apply(event, ...)` returns the effects of the event. The pool carries
out the effects and reports their outcomes as further events.

A slot represents one sandbox. The states of a slot are `starting -> idle <-> leased -> resetting -> idle`, and any
state can be followed by `closing -> removed`. Slots that are closing count towards `size`, so `size` is never exceeded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from .._async.threads import Worker
from ..errors import PoolTimeout
from ..types import grouped
from .records import Change, PoolEvent, SlotState

# Maximum number of sandboxes that start concurrently.
_MAX_STARTING = 8
# Number of consecutive failed starts after which starts are paused (see `PoolState`).
_MAX_FAILURES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass(slots=True, eq=False)
class Slot:
    """State of one sandbox, which may be starting or closing."""

    id: int
    state: SlotState
    since: float
    owner: str | None = None
    ticket: Any = None
    turn: object = None
    uses: int = 0
    # The following fields are set by `Pool`, not by `PoolState`.
    sandbox: Any = None
    worker: Worker = field(default_factory=Worker)
    lease: weakref.ref[Any] | None = None
    loop: Any = None  # event loop in which the sandbox was leased


class Waiter(NamedTuple):
    """Request that is waiting for a sandbox."""

    owner: str
    run: str
    since: float


@dataclass(slots=True)
class Effects:
    """Actions that the caller of `apply` must carry out, and events that it must report in order."""

    start: list[Slot] = field(default_factory=list)
    reset: list[Slot] = field(default_factory=list)
    close: list[Slot] = field(default_factory=list)
    grant: list[tuple[Any, Slot]] = field(default_factory=list)  # (ticket, slot)
    refuse: list[tuple[Any, BaseException | None]] = field(default_factory=list)  # (ticket, error; None if closed)
    revoked: list[tuple[Slot, str]] = field(default_factory=list)  # (slot whose lease was revoked, reason)
    events: list[PoolEvent] = field(default_factory=list)


class PoolState:
    """State of a pool with the settings of `Pool`. `alive(slot)` checks a sandbox before it is leased.

    A circuit breaker pauses starts for a second after three consecutive failed starts or one permanent failure. The
    pause doubles with each further failure, up to a minute. During a pause, requests that no sandbox can serve are
    refused with the error of the last start. After any failure, sandboxes are started one at a time until one succeeds.
    """

    def __init__(
        self,
        size: int,
        min_idle: int = 0,
        *,
        alive: Callable[[Slot], bool] = lambda slot: True,
        max_uses: int | None = None,
        max_lease: float = float("inf"),
    ) -> None:
        self.size = size
        self.min_idle = min_idle
        self.slots: dict[int, Slot] = {}
        # Slots in each state, in the order in which they entered it, so that events need not iterate over all slots.
        self._in_state: dict[SlotState, dict[int, Slot]] = {state: {} for state in get_args(SlotState)}
        # Ticket (any hashable object) -> waiter, in order of arrival
        self.waiters: dict[Any, Waiter] = {}
        self.closed = False
        self.failures = 0
        self.last_error: BaseException | None = None
        self.blocked_until = float("-inf")
        self.dead = self.recycled = self.failed_starts = 0
        self.sequence = 0  # number of the last event
        self._alive = alive
        self._max_uses, self._max_lease = max_uses, max_lease
        self._served: dict[str, int] = {}  # run -> sequence number of its last grant
        self._grants = 0
        self._next_slot = 1
        self._was_used = False
        self._now, self._effects = 0.0, Effects()  # time and effects of the current event

    def count(self, *states: SlotState) -> int:
        """Return the number of slots in any of the given states."""
        return sum(len(self._in_state[state]) for state in states)

    def next_expiry(self) -> float:
        """Return the time at which the oldest lease expires, or infinity if there are no leases."""
        oldest = next(iter(self._in_state["leased"].values()), None)
        return float("inf") if oldest is None else oldest.since + self._max_lease

    def order(self) -> Iterator[Any]:
        """Yield the tickets (ids) of waiting requests in the order in which they will be served."""
        # Requests by run, ordered by the first waiting request.
        queues = grouped(self.waiters, lambda ticket: self.waiters[ticket].run)
        runs = sorted(queues, key=lambda run: self._served.get(run, 0))
        for round in itertools.zip_longest(*(queues[run] for run in runs)):
            yield from (ticket for ticket in round if ticket is not None)

    def apply(self, event: Callable[..., None], *args: Any, now: float, may_start: bool = True) -> Effects:
        """Apply one event, lease idle sandboxes to waiting requests, start new sandboxes, and return the effects.

        An event that does not match the current state of its slot is outdated and ignored. If `may_start` is False, for
        example because there is no event loop, no sandbox is started and no lease expires.
        """
        self._now, self._effects = now, Effects()
        event(*args)
        if may_start:
            while self.next_expiry() <= now:
                slot = next(iter(self._in_state["leased"].values()))
                self._revoke(slot, "expired", f"held for {now - slot.since:.0f} s, longer than max_lease")
        if not self.closed:
            self._grant()
            if may_start:
                self._start()
        return self._effects

    # --- events

    def requested(self, ticket: Any, owner: str, run: str = "", queue: bool = True) -> None:
        """Handle a request for a sandbox. `run` is the name of a rollout or ""; waiting rollouts take turns.

        With queue=False, the request is refused if it would have to wait for the release of a lease.
        """
        if self.closed:
            self._effects.refuse.append((ticket, None))
        elif not queue and self.count("leased") + len(self.waiters) >= self.size:
            self._effects.refuse.append((ticket, PoolTimeout()))
        else:
            self._was_used = True
            self.waiters[ticket] = Waiter(owner, run, self._now)
            self._report("waiting", None, owner)

    def cancelled(self, ticket: Any) -> None:
        """Handle a request that was cancelled or timed out, possibly after it had been granted."""
        waiter = self.waiters.pop(ticket, None)
        if waiter is not None:
            self._report("cancelled", None, waiter.owner)
            return
        for slot in self.slots.values():
            if slot.ticket == ticket:
                self._report("cancelled", slot.id, slot.owner)
                slot.uses -= 1
                self._move(slot, "idle")  # the sandbox was not used yet, so no reset is needed

    def started(self, slot: Slot) -> None:
        """Handle the successful start of a sandbox, which ends a pause of the circuit breaker."""
        if slot.state == "starting":
            self.failures, self.last_error, self.blocked_until = 0, None, float("-inf")
            self._move(slot, "idle")

    def start_failed(self, slot: Slot, error: BaseException, permanent: bool = False) -> None:
        """Handle a failed start of a sandbox. If `permanent` is True, further attempts would fail in the same way."""
        if slot.state == "starting":
            self.failed_starts += 1
            self.failures = max(self.failures + 1, _MAX_FAILURES if permanent else 0)
            self.last_error = error
            self._report("start failed", slot.id, None, f"{type(error).__name__}: {error}")
            self._move(slot, "closing")
            if self.failures >= _MAX_FAILURES:
                pause = _FIRST_PAUSE * 2 ** (self.failures - _MAX_FAILURES)
                self.blocked_until = self._now + min(pause, _LONGEST_PAUSE)

    def released(self, slot: Slot, reusable: bool = True) -> None:
        """Handle the release of a lease. The sandbox is closed if `reusable` is False."""
        if slot.state == "leased":
            worn = reusable and self._max_uses is not None and slot.uses >= self._max_uses
            reason = f"used {slot.uses} times" if worn else ""
            self._move(slot, "resetting" if reusable and not worn else "closing", reason)

    def was_reset(self, slot: Slot) -> None:
        """Handle the successful reset of a sandbox, which can be leased again."""
        if slot.state == "resetting":
            self.recycled += 1
            self._move(slot, "idle")

    def died(self, slot: Slot, reason: str = "") -> None:
        """Handle a sandbox that was found dead, could not be reset, or failed its health check."""
        if slot.state != "closing":
            self.dead += 1
            self._report("died", slot.id, slot.owner, reason)
            self._move(slot, "closing")

    def removed(self, slot: Slot) -> None:
        """Handle a sandbox that was closed or killed and no longer exists."""
        if self.slots.pop(slot.id, None) is not None:
            del self._in_state[slot.state][slot.id]
            if slot.state != "closing":
                self.dead += 1
                self._report("died", slot.id, slot.owner, "ended while no event loop was running")
                slot.state = "closing"
            self._report("closed", slot.id)

    def turn_changed(self, slot: Slot, turn: object) -> None:
        """Handle a change of the current turn reported by the holder of a lease."""
        if slot.state == "leased":
            slot.turn = turn
            self._report("turn", slot.id, slot.owner, str(turn))

    def recycle(self, slot: Slot, close: bool = False) -> None:
        """Handle a user's request to reset or close a sandbox. A leased sandbox is closed and its lease revoked."""
        if slot.state == "leased":
            self._revoke(slot, "recycled", f"{'closed' if close else 'reset'} by hand")
        elif close and slot.state != "closing":
            self._move(slot, "closing", "closed by hand")
        elif slot.state == "idle":
            self._move(slot, "resetting", "reset by hand")

    def wakeup(self) -> None:
        """Do nothing, so that `apply` only checks for expired leases and waiting requests."""

    def close(self) -> None:
        """Handle the closing of the pool."""
        if not self.closed:
            self.closed = True
            self._report("pool closed")
            self._refuse_all(None)
            for slot in self.slots.values():
                if slot.state != "closing":
                    self._move(slot, "closing")

    # --- state changes

    def _report(self, kind: Change, slot: int | None = None, owner: str | None = None, detail: str = "") -> None:
        self.sequence += 1
        self._effects.events.append(PoolEvent(self.sequence, kind, slot, owner, self._now, detail))

    def _move(self, slot: Slot, state: SlotState, reason: str = "") -> None:
        owner = slot.owner
        if state != "leased":
            slot.owner = slot.ticket = slot.turn = slot.loop = None
        del self._in_state[slot.state][slot.id]
        self._in_state[state][slot.id] = slot
        slot.state, slot.since = state, self._now
        self._report(state, slot.id, owner, reason)
        if state == "resetting":
            self._effects.reset.append(slot)
        elif state == "closing":
            self._effects.close.append(slot)

    def _revoke(self, slot: Slot, change: Change, reason: str) -> None:
        """End a lease and close its sandbox, which cannot be reused because a call may still be running in it."""
        self._effects.revoked.append((slot, reason))
        self._report(change, slot.id, slot.owner, reason)
        self._move(slot, "closing")

    def _refuse_all(self, error: BaseException | None) -> None:
        for ticket, waiter in self.waiters.items():
            self._effects.refuse.append((ticket, error))
            self._report("refused", None, waiter.owner, "" if error is None else str(error))
        self.waiters.clear()

    def _grant(self) -> None:
        """Lease idle sandboxes to waiting requests, starting with the most recently used sandbox."""
        idle = self._in_state["idle"]
        while self.waiters and idle:
            slot = next(reversed(idle.values()))
            if not self._alive(slot):
                self.died(slot, "found dead before it was leased")
                continue
            ticket = next(self.order())
            waiter = self.waiters.pop(ticket)
            self._grants += 1
            self._served[waiter.run] = self._grants
            if len(self._served) > 1000:  # forget runs that have no waiting requests
                runs = {waiting.run for waiting in self.waiters.values()}
                self._served = {run: grant for run, grant in self._served.items() if run in runs}
            slot.owner, slot.ticket = waiter.owner, ticket
            slot.uses += 1
            self._move(slot, "leased")
            self._effects.grant.append((ticket, slot))

    def _start(self) -> None:
        """Start the sandboxes required by waiting requests and `min_idle`, unless the circuit breaker prevents it."""
        if self._now < self.blocked_until:
            if not self.count("starting", "idle", "leased", "resetting"):
                self._refuse_all(self.last_error)
            return
        coming = self.count("starting", "resetting")
        wanted = len(self.waiters) - coming
        if self._was_used and not self.failures:
            wanted = max(wanted, self.min_idle - self.count("idle") - coming)
        if self.failures:
            wanted = min(wanted, 1 - self.count("starting"))
        wanted = min(wanted, _MAX_STARTING - self.count("starting"), self.size - len(self.slots))
        for _ in range(wanted):
            slot = Slot(self._next_slot, "starting", since=self._now)
            self._next_slot += 1
            self.slots[slot.id] = self._in_state["starting"][slot.id] = slot
            self._effects.start.append(slot)
            self._report("starting", slot.id)
