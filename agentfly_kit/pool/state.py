"""State machine of a pool. It is pure: it uses no clock, no event loop and no I/O.

`PoolState.handle(event, now)` applies an event and returns its effects: which sandboxes to start, reset or close, and
which waiters are granted a sandbox or refused. The pool carries out the effects and reports the outcome as further
events.

A slot goes `starting -> idle <-> leased -> resetting -> idle`, and from any state `-> closing -> removed`. A closing
slot still counts towards the size, so there are never more than `size` sandboxes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

SlotState = Literal["starting", "idle", "leased", "resetting", "closing"]
Change = Literal[
    "waiting", "gave up", "refused", "starting", "start failed", "idle", "leased", "turn", "resetting",
    "expired", "ended by hand", "died", "closing", "closed", "pool closed",
]  # fmt: skip


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """A sandbox is requested.

    Attributes:
        ticket: Number of the request.
        owner: Name of the requester.
        run: Name of its rollout. Waiting runs are served in turn.
    """

    ticket: int
    owner: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A request was cancelled or timed out. It may have been granted already."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox has started."""

    slot: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A sandbox failed to start.

    Attributes:
        slot: Number of the slot.
        error: The error.
        permanent: True if another attempt would fail in the same way.
    """

    slot: int
    error: BaseException
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A lease was released. The sandbox is closed if it is not `reusable`."""

    slot: int
    reusable: bool = True


@dataclass(frozen=True, slots=True)
class Reset:
    """A sandbox was reset and can be lent again."""

    slot: int


@dataclass(frozen=True, slots=True)
class Died:
    """A sandbox was found dead, could not be reset, or failed its health check."""

    slot: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """A sandbox no longer exists: it was closed as requested, or killed."""

    slot: int


@dataclass(frozen=True, slots=True)
class TurnChanged:
    """The holder of a lease has set its turn."""

    slot: int
    turn: object


@dataclass(frozen=True, slots=True)
class Recycle:
    """A user requests that a sandbox be reset or closed. A leased one is revoked and closed in either case."""

    slot: int
    close: bool = False


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Nothing has happened; check for expired leases and waiting requests."""


@dataclass(frozen=True, slots=True)
class CloseAll:
    """The pool is closed."""


Event = (
    Requested
    | Cancelled
    | Started
    | StartFailed
    | Released
    | Reset
    | Died
    | Closed
    | TurnChanged
    | Recycle
    | Wakeup
    | CloseAll
)


# --- slots, waiters and effects ------------------------------------------------------------------


@dataclass(slots=True)
class Slot:
    """State of one sandbox, including one that is being started or closed."""

    id: int
    state: SlotState
    since: float
    created: float = 0.0
    owner: str | None = None
    ticket: int | None = None
    turn: object = None
    uses: int = 0


@dataclass(slots=True)
class Effects:
    """Actions that the caller of `handle` must take, and the changes to report, in order."""

    start: list[int] = field(default_factory=list)
    reset: list[int] = field(default_factory=list)
    close: list[int] = field(default_factory=list)
    grant: list[tuple[int, int]] = field(default_factory=list)  # (ticket, slot)
    revoked: dict[int, str] = field(default_factory=dict)  # slot whose lease was revoked -> reason
    refuse: list[tuple[int, BaseException | None]] = field(default_factory=list)  # (ticket, last error; None: closed)
    # (change, slot, owner, detail)
    changes: list[tuple[Change, int | None, str | None, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for a sandbox."""

    owner: str
    since: float
    run: str


class PoolState:
    """State of a pool; see the module docstring. `alive(slot)` is called before a sandbox is granted.

    Order: waiting runs are served in turn, and the requests of one run first come, first served.

    Retirement: a sandbox that has been lent `max_uses` times, or is `max_age` seconds old, is closed instead of being
    lent again.

    Expiry: a lease held for `max_lease` seconds is revoked. Its sandbox is closed, because code may still run in it.

    Circuit breaker: after `max_failures` consecutive failed starts, or one permanent failure, no sandbox is started for
    `backoff` seconds, doubled with each further failure up to `max_backoff`. Meanwhile, if there is no other sandbox to
    serve them, requests are refused with the last error. After any failure, sandboxes are started one at a time until a
    start succeeds; otherwise at most `max_starting` start concurrently.
    """

    def __init__(
        self, size: int, min_idle: int = 0, *, alive: Callable[[int], bool] = lambda slot: True, max_failures: int = 3,
        backoff: float = 1.0, max_backoff: float = 60.0, max_starting: int | None = None, max_uses: int | None = None,
        max_age: float | None = None, max_lease: float = float("inf"),
    ) -> None:  # fmt: skip
        self.size = size
        self.min_idle = min_idle
        self.slots: dict[int, Slot] = {}
        self.waiters: dict[int, Waiter] = {}  # ticket -> waiter, in order of arrival
        self._queues: dict[str, dict[int, None]] = {}  # run -> its tickets, in order of arrival
        self._served: dict[str, int] = {}  # run -> number of the last grant to it
        self._grants = 0
        self.closed = False
        self.failures = 0
        self.last_error: BaseException | None = None
        self.blocked_until = float("-inf")
        self.dead = 0
        self._alive = alive
        self._max_failures, self._backoff, self._max_backoff = max_failures, backoff, max_backoff
        self._max_starting, self._max_uses, self._max_age = max_starting, max_uses, max_age
        self._max_lease = max_lease
        # Time, on the clock of `now`, before which no lease can expire.
        self.next_expiry = float("inf")
        self._next = 1
        self._was_used = False

    def count(self, *states: SlotState) -> int:
        """Return the number of slots in any of these states."""
        return sum(slot.state in states for slot in self.slots.values())

    def handle(self, event: Event, now: float, may_start: bool = True) -> Effects:
        """Apply one event, then grant idle sandboxes and start missing ones, and return the effects.

        An event that does not fit the current state of its slot, or whose slot was removed, is outdated and ignored.

        Args:
            event: the event.
            now: current time in seconds, on a monotonic clock.
            may_start: False if nothing can be started, for example without an event loop. Leases then do not expire.
        """
        effects = Effects()
        slot = self.slots.get(getattr(event, "slot", 0))
        match event:
            case Requested(ticket, owner, run):
                if self.closed:
                    effects.refuse.append((ticket, None))
                else:
                    self._was_used = True
                    self.waiters[ticket] = Waiter(owner, now, run)
                    self._queues.setdefault(run, {})[ticket] = None
                    effects.changes.append(("waiting", None, owner, ""))
            case Cancelled(ticket):
                self._give_up(ticket, now, effects)
            case Started() if slot and slot.state == "starting":
                self.failures = 0
                self.last_error = None
                self._move(slot, "idle", now, effects)
            case StartFailed(_, error, permanent) if slot and slot.state == "starting":
                self._start_failed(slot, error, permanent, now, effects)
            case Released(_, reusable) if slot and slot.state == "leased":
                why = self._retire_reason(slot, now) if reusable else ""
                self._move(slot, "closing" if why or not reusable or self.closed else "resetting", now, effects, why)
            case Reset() if slot and slot.state == "resetting":
                self._move(slot, "idle", now, effects)
            case Died(_, why) if slot and slot.state != "closing":
                self.dead += 1
                effects.changes.append(("died", slot.id, slot.owner, why))
                self._move(slot, "closing", now, effects)
            case Closed() if slot:
                if slot.state != "closing":
                    self.dead += 1
                    effects.changes.append(("died", slot.id, slot.owner, "ended without an event loop"))
                effects.changes.append(("closed", slot.id, None, ""))
                del self.slots[slot.id]
            case TurnChanged(_, turn) if slot and slot.state == "leased":
                slot.turn = turn
                effects.changes.append(("turn", slot.id, slot.owner, str(turn)))
            case Recycle(_, close) if slot and slot.state != "closing":
                self._recycle(slot, close or not may_start, now, effects)
            case CloseAll() if not self.closed:
                self.closed = True
                effects.changes.append(("pool closed", None, None, ""))
                self._refuse_all(None, effects)
                for each in list(self.slots.values()):
                    if each.state != "closing":
                        self._move(each, "closing", now, effects)
        if may_start and now >= self.next_expiry:
            self._expire(now, effects)
        if not self.closed:
            self._grant(now, effects)
            if may_start:
                self._start(now, effects)
        return effects

    def order(self) -> list[int]:
        """Return the waiting tickets in the order in which they would be served."""
        queues = {run: list(tickets) for run, tickets in self._queues.items()}
        served, grants, found = dict(self._served), self._grants, []
        while queues:
            run = min(queues, key=lambda run: (served.get(run, 0), queues[run][0]))
            found.append(queues[run].pop(0))
            grants += 1
            served[run] = grants
            if not queues[run]:
                del queues[run]
        return found

    def _take_waiter(self, ticket: int) -> Waiter | None:
        waiter = self.waiters.pop(ticket, None)
        if waiter is not None:
            del self._queues[waiter.run][ticket]
            if not self._queues[waiter.run]:
                del self._queues[waiter.run]
        return waiter

    def _expire(self, now: float, effects: Effects) -> None:
        self.next_expiry = float("inf")
        for slot in [slot for slot in self.slots.values() if slot.state == "leased"]:
            if now < slot.since + self._max_lease:
                self.next_expiry = min(self.next_expiry, slot.since + self._max_lease)
            else:
                self._end(slot, "expired", f"held for {now - slot.since:.0f} s, longer than max_lease=", now, effects)

    def _recycle(self, slot: Slot, close: bool, now: float, effects: Effects) -> None:
        if slot.state == "leased":
            self._end(slot, "ended by hand", f"{'closed' if close else 'reset'} by hand", now, effects)
        elif close:
            self._move(slot, "closing", now, effects, "closed by hand")
        elif slot.state == "idle":
            self._move(slot, "resetting", now, effects, "reset by hand")

    def _end(self, slot: Slot, change: Change, why: str, now: float, effects: Effects) -> None:
        """Revoke a lease and close its sandbox, which cannot be lent again because a call may still use it."""
        effects.revoked[slot.id] = why
        effects.changes.append((change, slot.id, slot.owner, why))
        self._move(slot, "closing", now, effects)

    def _retire_reason(self, slot: Slot, now: float) -> str:
        if self._max_uses is not None and slot.uses >= self._max_uses:
            return f"used {slot.uses} times"
        if self._max_age is not None and now - slot.created >= self._max_age:
            return f"{now - slot.created:.0f} s old"
        return ""

    def _move(self, slot: Slot, state: SlotState, now: float, effects: Effects, why: str = "") -> None:
        owner = slot.owner
        if state != "leased":
            slot.owner = slot.ticket = slot.turn = None
        slot.state, slot.since = state, now
        effects.changes.append((state, slot.id, owner, why))
        if state == "resetting":
            effects.reset.append(slot.id)
        elif state == "closing":
            effects.close.append(slot.id)

    def _give_up(self, ticket: int, now: float, effects: Effects) -> None:
        waiter = self._take_waiter(ticket)
        if waiter is not None:
            effects.changes.append(("gave up", None, waiter.owner, ""))
            return
        for slot in self.slots.values():
            if slot.ticket == ticket and slot.state == "leased":
                effects.changes.append(("gave up", slot.id, slot.owner, ""))
                slot.uses -= 1
                self._move(slot, "idle", now, effects)  # not used yet, so no reset is needed
                return

    def _start_failed(self, slot: Slot, error: BaseException, permanent: bool, now: float, effects: Effects) -> None:
        self.failures = max(self.failures + 1, self._max_failures if permanent else 0)
        self.last_error = error
        effects.changes.append(("start failed", slot.id, None, f"{type(error).__name__}: {error}"))
        self._move(slot, "closing", now, effects)
        over = self.failures - self._max_failures
        if over >= 0:
            self.blocked_until = now + min(self._backoff * 2**over, self._max_backoff)

    def _refuse_all(self, error: BaseException | None, effects: Effects) -> None:
        for ticket, waiter in self.waiters.items():
            effects.refuse.append((ticket, error))
            effects.changes.append(("refused", None, waiter.owner, "" if error is None else str(error)))
        self.waiters.clear()
        self._queues.clear()

    def _grant(self, now: float, effects: Effects) -> None:
        for slot in sorted((s for s in self.slots.values() if s.state == "idle"), key=lambda s: s.since, reverse=True):
            if not self.waiters:
                return
            if not self._alive(slot.id):
                self.dead += 1
                effects.changes.append(("died", slot.id, None, "found dead when it was to be lent"))
                self._move(slot, "closing", now, effects)
                continue
            if why := self._retire_reason(slot, now):
                self._move(slot, "closing", now, effects, why)
                continue
            run = min(self._queues, key=lambda run: (self._served.get(run, 0), next(iter(self._queues[run]))))
            ticket = next(iter(self._queues[run]))
            waiter = self._take_waiter(ticket)
            assert waiter is not None
            self._grants += 1
            self._served[run] = self._grants
            if len(self._served) > 1000:  # forget runs that have no waiting requests
                self._served = {run: stamp for run, stamp in self._served.items() if run in self._queues}
            slot.owner, slot.ticket = waiter.owner, ticket
            slot.uses += 1
            self._move(slot, "leased", now, effects)
            self.next_expiry = min(self.next_expiry, now + self._max_lease)
            effects.grant.append((ticket, slot.id))

    def _start(self, now: float, effects: Effects) -> None:
        if now < self.blocked_until:
            if not self.count("starting", "idle", "leased", "resetting"):
                self._refuse_all(self.last_error, effects)
            return
        coming = self.count("starting", "resetting")
        wanted = len(self.waiters) - coming
        if self._was_used and not self.failures:
            wanted = max(wanted, self.min_idle - self.count("idle") - coming)
        if self.failures:
            wanted = min(wanted, 1 - self.count("starting"))
        if self._max_starting is not None:
            wanted = min(wanted, self._max_starting - self.count("starting"))
        for _ in range(min(wanted, self.size - len(self.slots))):
            slot = Slot(self._next, "starting", now, created=now)
            self._next += 1
            self.slots[slot.id] = slot
            effects.start.append(slot.id)
            effects.changes.append(("starting", slot.id, None, ""))
