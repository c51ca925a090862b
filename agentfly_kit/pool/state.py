"""The pool's state and its one method that changes it. Pure: no clock, no event loop, no input or output.

`PoolState.handle(event, now)` takes what happened and returns what must be done about it: which sandboxes to start,
reset or close, and which waiters have got one or are refused. Whoever does those things reports back with the next
event.

A slot is `starting -> idle <-> leased -> resetting -> idle`, and from anywhere `-> closing -> gone`. A slot that is
closing still counts against the size: there are never more than `size` sandboxes, not even for a moment.
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


# --- what may happen -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Requested:
    """Somebody wants a sandbox.

    Attributes:
        ticket
        owner
        run: Whose turn it is goes round the runs.
    """

    ticket: int
    owner: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """That somebody does not want it any more: cancelled, or its time is up. Maybe it had been granted already."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Started:
    slot: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Starting a sandbox failed.

    Attributes:
        slot
        error
        permanent: Trying again cannot help.
    """

    slot: int
    error: BaseException
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A lease has ended. Not reusable: close it."""

    slot: int
    reusable: bool = True


@dataclass(frozen=True, slots=True)
class Reset:
    """It is as good as new."""

    slot: int


@dataclass(frozen=True, slots=True)
class Died:
    """It was found dead, or could not be reset; or its start was given up."""

    slot: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """It is gone: closed as it was told, or ended on the spot."""

    slot: int


@dataclass(frozen=True, slots=True)
class TurnChanged:
    """The holder says where it is."""

    slot: int
    turn: object


@dataclass(frozen=True, slots=True)
class Recycle:
    """A person wants it reset, or closed. A holder that works loses it, and it is closed either way."""

    slot: int
    close: bool = False


@dataclass(frozen=True, slots=True)
class Wakeup:
    """Nothing happened; look again."""


@dataclass(frozen=True, slots=True)
class CloseAll:
    """The pool ends."""


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


# --- what is to be done, and what is told --------------------------------------------------------


@dataclass(slots=True)
class Slot:
    """One sandbox, or the place of one that is coming or going."""

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
    """What the caller of `handle` must do now, and what changed, in order."""

    start: list[int] = field(default_factory=list)
    reset: list[int] = field(default_factory=list)
    close: list[int] = field(default_factory=list)
    grant: list[tuple[int, int]] = field(default_factory=list)  # (ticket, slot)
    revoked: dict[int, str] = field(default_factory=dict)  # slots whose holder has lost them -> why
    refuse: list[tuple[int, BaseException | None]] = field(default_factory=list)  # (ticket, last error; None: closed)
    changes: list[tuple[Change, int | None, str | None, str]] = field(default_factory=list)  # what, slot, owner, detail


@dataclass(frozen=True, slots=True)
class Waiter:
    owner: str
    since: float
    run: str


class PoolState:
    """See the module. `alive` is asked before a sandbox is handed out.

    Order: the runs that wait take turns, and within a run the first to come is the first to be served.

    Wear: a sandbox that has been lent `max_uses` times, or is `max_age` seconds old, is closed instead of lent again.

    Age of a lease: who has held a sandbox for `max_lease` seconds loses it, and it is closed, for whatever runs in it
    may go on.

    The breaker: after `max_failures` starts in a row have failed, and while nothing else could serve them, waiters are
    refused with the last error; so is everybody who comes within the pause, which doubles with each further failure.
    After any failure one start at a time is tried; else at most `max_starting` at once.
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
        self._served: dict[str, int] = {}  # run -> when it was served last, counted in grants
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
        # No lease is too old before this, in the seconds of `now`.
        self.next_expiry = float("inf")
        self._next = 1
        self._was_used = False

    def count(self, *states: SlotState) -> int:
        return sum(slot.state in states for slot in self.slots.values())

    def handle(self, event: Event, now: float, may_start: bool = True) -> Effects:
        """Take one event, then hand out what is free and start what is wanted.

        An event about a slot that is gone, or in another state by now, is late news and changes nothing.
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
        """The tickets that wait, in the order in which they would be served now."""
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
        """Take it from a holder that may be in the middle of a call: it is never anybody else's again."""
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
                self._move(slot, "idle", now, effects)  # nobody has touched it
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
            if len(self._served) > 1000:  # runs that are long over
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
