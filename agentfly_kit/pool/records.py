"""Snapshots and events of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentfly_kit._display import Displayable

SlotState = Literal["starting", "idle", "leased", "resetting", "closing"]
Change = Literal[
    "waiting", "cancelled", "refused", "starting", "start failed", "idle", "leased", "turn", "resetting",
    "expired", "recycled", "died", "closing", "closed", "pool closed",
]  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class SandboxInfo(Displayable):
    """State of a sandbox at one point in time.

    Attributes:
        id, state: Number and state of the sandbox.
        owner, turn: Name of the holder and its current turn, if set.
        uses: Number of leases so far, including the current lease.
        since: Time at which the sandbox entered this state (monotonic seconds).
    """

    id: int
    state: SlotState
    owner: str | None
    uses: int
    since: float
    turn: object = None


@dataclass(frozen=True, slots=True, repr=False)
class PoolSnapshot(Displayable):
    """State of a pool at one point in time.

    Attributes:
        sandbox_type: Name of the sandbox class.
        isolation: Isolation level in use. Before the first start, the requested level, or None for the best available.
        size: Maximum number of sandboxes.
        dead: Number of sandboxes so far that died or could not be reset.
        closed: Whether the pool has been closed.
        time: Time of the snapshot (monotonic seconds).
        waiters: Owners of the waiting requests, in the order in which they will be served.
        sandboxes: All sandboxes.
        error: Error of the most recent start, or None if it succeeded.
        waiting_seconds: Time that each of the `waiters` has waited so far.
        recycled: Number of successful resets so far.
        failed_starts: Number of failed starts so far.
    """

    sandbox_type: str
    isolation: str | None
    size: int
    dead: int
    closed: bool
    time: float
    waiters: tuple[str, ...]
    sandboxes: tuple[SandboxInfo, ...]
    error: str | None
    waiting_seconds: tuple[float, ...] = ()
    recycled: int = 0
    failed_starts: int = 0

    @property
    def leases(self) -> tuple[SandboxInfo, ...]:
        """Leased sandboxes, longest lease first."""
        return tuple(sorted((box for box in self.sandboxes if box.state == "leased"), key=lambda box: box.since))

    @property
    def leased(self) -> int:
        """Number of leased sandboxes."""
        return self._count("leased")

    @property
    def idle(self) -> int:
        """Number of sandboxes that are ready to be leased."""
        return self._count("idle")

    @property
    def starting(self) -> int:
        """Number of sandboxes that are being started."""
        return self._count("starting")

    @property
    def resetting(self) -> int:
        """Number of sandboxes that are being reset after a lease."""
        return self._count("resetting")

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiters)

    def _count(self, *states: SlotState) -> int:
        return sum(box.state in states for box in self.sandboxes)


@dataclass(frozen=True, slots=True, repr=False)
class PoolEvent(Displayable):
    """A change in the state of a pool.

    Attributes:
        sequence: Consecutive number of the event, starting at 1.
        kind: Kind of the change.
        sandbox: Number of the sandbox, or None if the event concerns a request or the whole pool.
        owner: Name of the holder or requester, if any.
        time: Time of the change (monotonic seconds).
        detail: Further information, such as the reason.
    """

    sequence: int
    kind: Change
    sandbox: int | None
    owner: str | None
    time: float
    detail: str = ""
