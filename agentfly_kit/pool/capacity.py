"""What pools of several kinds may use together: memory and processes that are shared out, and given up for one another.

Knows nothing of sandboxes or of event loops: a pool tells how much one of its sandboxes may use, asks before it starts
one, and says when one is gone. The numbers are the sandboxes' limits, not what they use at the moment: a cap that holds
only as long as nobody needs what was promised is none.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError


@dataclass(slots=True)
class _Member:
    """One pool, as far as the others must know it."""

    cost: tuple[int, int, int]
    tick: Callable[[], None]
    """Look again whether there is room."""
    evict: Callable[[], None]
    """Close the sandbox that has been idle for longest."""
    held: int = 0
    closing: int = 0
    idle: int = 0
    short: int = 0
    """Sandboxes that somebody waits for, and for which there was no room."""
    oldest: float = float("inf")
    """Since when its first waiter has waited."""


class Capacity:
    """A cap on all the sandboxes of several pools: `Pool(A, capacity=both)`, `Pool(B, capacity=both)`.

    memory_mb   sum of the sandboxes' own memory limits, in MB
    processes   sum of their own limits
    sandboxes   their number

    Where there is no room, an idle sandbox of another kind is closed for whoever waits; where none is idle,
    what comes back next goes to whoever waited longest, of whatever kind. A chain that holds one kind and waits for
    another can then wait for a chain that does the opposite: give room for one of each for every chain that runs at
    once, or the wait ends with PoolTimeout.
    """

    def __init__(
        self, *, memory_mb: int | None = None, processes: int | None = None, sandboxes: int | None = None
    ) -> None:
        given = {"memory_mb": memory_mb, "processes": processes, "sandboxes": sandboxes}
        if all(value is None for value in given.values()):
            raise SettingsError("Capacity(): want at least one of memory_mb=, processes=, sandboxes=")
        for name, value in given.items():
            if value is not None and value < 1:
                raise SettingsError(f"Capacity({name}={value!r}): want at least 1")
        self.memory_mb, self.processes, self.sandboxes = memory_mb, processes, sandboxes
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._gone: deque[int] = deque()  # pools that were collected
        self._settling = threading.local()

    @property
    def used(self) -> dict[str, int]:
        """What the sandboxes that there are may use, closing ones too."""
        with self._lock:
            return dict(zip(("memory_mb", "processes", "sandboxes"), self._sum("held"), strict=True))

    def __repr__(self) -> str:
        limits = {"memory_mb": self.memory_mb, "processes": self.processes, "sandboxes": self.sandboxes}
        parts = [f"{self.used[name]} of {limit} {name}" for name, limit in limits.items() if limit is not None]
        return f"<Capacity {', '.join(parts)}, {len(self._members)} pools>"

    # --- for pools

    def join(
        self, pool: object, name: str, cost: dict[str, Any], tick: Callable[[], None], evict: Callable[[], None]
    ) -> int:
        """A pool enters; gives its number. `cost`: what one of its sandboxes may use, None without a limit.

        Raises:  SettingsError if a sandbox of this kind could not be counted, or could never be started.
        """
        for resource in ("memory_mb", "processes"):
            limit = getattr(self, resource)
            if limit is None:
                continue
            if cost.get(resource) is None:
                raise SettingsError(f"Pool({name}, capacity=...): no {resource}= of its own, so it cannot be counted")
            if cost[resource] > limit:
                raise SettingsError(
                    f"Pool({name}, {resource}={cost[resource]}): more than the whole capacity of {limit}"
                )
        number = id(pool)
        member = _Member((cost.get("memory_mb") or 0, cost.get("processes") or 0, 1), tick, evict)
        with self._lock:
            self._members[number] = member
        # It may be called in the middle of anything, under any lock; the next look at the members finds it.
        weakref.finalize(pool, self._gone.append, number).atexit = False
        return number

    def leave(self, number: int) -> None:
        """A pool is closed, and all its sandboxes with it."""
        with self._lock:
            self._members.pop(number, None)
        self.settle()

    def take(self, number: int) -> bool:
        """Room for one more of this pool's sandboxes; it is then held."""
        with self._lock:
            member = self._members.get(number)
            if member is None or not self._fits(member.cost):
                return False
            member.held += 1
            return True

    def publish(self, number: int, *, held: int, closing: int, idle: int, short: int, oldest: float) -> None:
        """How a pool stands after a change; called under the pool's lock, so no other pool is asked anything here."""
        with self._lock:
            member = self._members.get(number)
            if member is not None:
                member.held, member.closing, member.idle = held, closing, idle
                member.short, member.oldest = short, oldest

    def must_yield(self, number: int, since: float) -> bool:
        """Whether a sandbox that comes back should be closed: another pool's waiter was there before `since`."""
        with self._lock:
            return any(
                other != number and member.short and member.oldest < since and self._missing(member)
                for other, member in self._members.items()
            )

    def settle(self) -> None:
        """Wake whoever may start now, first come first served; else have idle ones closed. Called without any lock."""
        if getattr(self._settling, "now", False):
            return  # a change of state that is made below: the loop looks again by itself
        self._settling.now = True
        try:
            before = None
            while (now := self._standing()) != before:
                before = now
                self._settle()
        finally:
            self._settling.now = False

    def _standing(self) -> list[tuple[int, int, int, int, int]]:
        with self._lock:
            while self._gone:
                self._members.pop(self._gone.popleft(), None)
            return [(number, m.held, m.closing, m.idle, m.short) for number, m in self._members.items()]

    def _settle(self) -> None:
        with self._lock:
            hungry = sorted((m for m in self._members.values() if m.short), key=lambda member: member.oldest)
        for member in hungry:
            with self._lock:
                fits, missing = self._fits(member.cost), self._missing(member)
                victims = [m for m in self._members.values() if m.idle and m is not member]
            if fits:
                member.tick()
            elif missing and victims:
                max(victims, key=lambda victim: victim.idle).evict()
                return

    # --- sums, under the lock

    def _sum(self, what: str) -> list[int]:
        return [sum(getattr(m, what) * m.cost[i] for m in self._members.values()) for i in range(3)]

    def _fits(self, cost: tuple[int, int, int]) -> bool:
        limits = (self.memory_mb, self.processes, self.sandboxes)
        return all(
            limit is None or held + more <= limit
            for limit, held, more in zip(limits, self._sum("held"), cost, strict=True)
        )

    def _missing(self, member: _Member) -> bool:
        """Whether there is too little for one of it even when all that is closing is gone."""
        limits = (self.memory_mb, self.processes, self.sandboxes)
        sums = zip(limits, self._sum("held"), self._sum("closing"), member.cost, strict=True)
        return any(limit is not None and held - leaving + more > limit for limit, held, leaving, more in sums)
