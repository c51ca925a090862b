"""Code shared by local and remote pools: leases, listeners, and the list of all pools."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Self, TypeVar

from agentfly_kit._display import Displayable, printable

from .._async.listeners import Listeners
from .._async.threads import Worker
from ..errors import SettingsError, check_positive
from .records import PoolEvent, PoolSnapshot

S = TypeVar("S")
_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count(1)


def pools() -> list[Any]:
    """Return all open pools, including remote pools, oldest first."""
    return sorted((pool for pool in _POOLS if not pool.closed), key=lambda pool: pool.number)


class Lease(Displayable, Generic[S]):
    """A lease of a sandbox, held until `await pool.release(lease)`.

    Attributes:
        pool, sandbox, id: The pool, the leased sandbox, and the number of this sandbox in the pool.
        worker: Runs the sync methods of the sandbox in one thread.
        owner, since: Name of the holder, and start time of the lease (monotonic seconds).
        released: True after the lease was released or revoked.
        revoked: Reason why the pool ended the lease early, or "". The sandbox of a revoked lease is closed.
        turn: The holder's current turn. Set this attribute to show progress in snapshots and events.
    """

    def __init__(self, pool: BasePool[S], id: int, sandbox: S, owner: str, worker: Worker) -> None:
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
        """Release the lease, as `pool.release(lease)` does."""
        await self.pool.release(self)

    def __del__(self) -> None:
        if not getattr(self, "released", True):
            self.pool._on_lease_collected(self)

    def __repr__(self) -> str:
        state = "released" if self.released else f"{time.monotonic() - self.since:.1f} s"
        state = f"revoked: {self.revoked}" if self.revoked else state
        return printable(f"<Lease {self.pool.name} {self.id} of {self.owner}, {state}>")


class BasePool(ABC, Generic[S]):
    """Base class of `Pool` and `RemotePool`."""

    def __init__(self, sandbox_type: type[S], acquire_timeout: float) -> None:
        if not isinstance(sandbox_type, type):
            raise SettingsError(f"sandbox_type must be a class such as PythonSandbox, got {sandbox_type!r}")
        check_positive("number of seconds", acquire_timeout=acquire_timeout)
        self.sandbox_type = sandbox_type
        self.name = sandbox_type.__name__
        self.acquire_timeout = acquire_timeout
        self._listeners: Listeners[PoolEvent] = Listeners(f"the pool of {self.name}")

    def _register(self) -> None:
        """Add the pool to `pools()`. Called at the end of `__init__`."""
        self.number = next(_numbers)
        _POOLS.add(self)

    @abstractmethod
    async def acquire(
        self, owner: str = "unnamed", timeout: float | None = None, *, run: str = "", queue: bool = True
    ) -> Lease[S]: ...

    @abstractmethod
    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def snapshot(self) -> PoolSnapshot: ...

    @abstractmethod
    def _on_turn_changed(self, lease: Lease[S]) -> None: ...

    @abstractmethod
    def _on_lease_collected(self, lease: Lease[S]) -> None:
        """Handle a lease that was garbage-collected without a release. May be called at any time, in any thread."""

    def _is_reusable(self, lease: Lease[S]) -> bool:
        """Return False if a call of the lease was given up or has failed, and may go on or has changed the sandbox."""
        ends_calls = getattr(self.sandbox_type, "ends_cancelled_calls", False)
        return not (lease.worker.busy if ends_calls else lease.worker.discarded)

    def _begin_release(self, lease: Lease[S]) -> bool:
        """Mark a lease as released. Return False if it was released before."""
        if lease.pool is not self:
            raise SettingsError(f"lease must be a lease of this pool, got {lease!r}")
        released, lease.released = lease.released, True
        return not released

    @contextlib.asynccontextmanager
    async def lease(self, owner: str = "unnamed", timeout: float | None = None, *, run: str = "") -> AsyncIterator[S]:
        """Async context manager that leases a sandbox: `async with pool.lease(owner="me") as sandbox`.

        For arguments and exceptions, see `acquire`.
        """
        lease = await self.acquire(owner, timeout, run=run)
        try:
            yield lease.sandbox
        finally:
            await self.release(lease)

    def subscribe(self, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Call `callback` with every future event, in order. Return a function that ends the subscription.

        The callback runs synchronously in the thread that caused the event (for a remote pool, in its background
        thread) and must be fast. It may use the pool. If it raises, the pool warns once and continues.
        """
        return self._listeners.subscribe(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
