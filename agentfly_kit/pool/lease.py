"""`Lease`, returned by `Pool.acquire`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

from agentfly_kit._display import Displayable, printable

from .._async.threads import Worker

if TYPE_CHECKING:
    from .pool import Pool

S = TypeVar("S")


class Lease(Displayable, Generic[S]):
    """Lease of a sandbox, valid until `await pool.release(lease)`.

    Attributes:
        pool, sandbox, id: The pool, the leased sandbox, and the number of the sandbox in the pool.
        worker: Worker that runs the sync methods of the sandbox in one thread.
        owner, since: Name of the holder, and start time of the lease (monotonic seconds).
        released: Whether the lease has been released or revoked.
        revoked: Reason why the pool ended the lease early, or "". The sandbox of a revoked lease is closed.
        turn: Current turn of the holder. Set this attribute to show progress in snapshots and events.
    """

    def __init__(self, pool: Pool[S], id: int, sandbox: S, owner: str, worker: Worker) -> None:
        self.pool = pool
        self.id = id
        self.sandbox = sandbox
        self.owner = owner
        self.worker = worker
        self.since = time.monotonic()
        self.released = False
        self.revoked = ""
        self._turn: object = None

    @property
    def turn(self) -> object:
        return self._turn

    @turn.setter
    def turn(self, turn: object) -> None:
        self._turn = turn
        if not self.released:
            self.pool._on_turn_changed(self)

    async def release(self) -> None:
        """Release the lease, like `pool.release(lease)`."""
        await self.pool.release(self)

    def __del__(self) -> None:
        if not getattr(self, "released", True):
            self.pool._on_lease_collected(self)

    def __repr__(self) -> str:
        state = "released" if self.released else f"{time.monotonic() - self.since:.1f} s"
        state = f"revoked: {self.revoked}" if self.revoked else state
        return printable(f"<Lease {self.pool.name} {self.id} of {self.owner}, {state}>")
