"""`Pool`, which leases sandboxes to chains, and `pools`, the list of all pools. Internals are in core.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeVar, cast

from .._async.gc_pause import collect
from .._async.interrupts import keep_interruptible
from .._display import Displayable
from ..errors import PoolTimeout, SettingsError, check_count, check_instance, check_value, suggest_keyword
from .calls import is_alive
from .core import PoolCore
from .lease import Lease
from .records import PoolEvent, PoolSnapshot, SandboxInfo
from .state import PoolState, Slot

S = TypeVar("S")
_POOLS: weakref.WeakSet[Pool[Any]] = weakref.WeakSet()
_numbers = itertools.count(1)


def pools() -> list[Pool[Any]]:
    """Return all open pools, oldest first."""
    return sorted((pool for pool in _POOLS if not pool.closed), key=lambda pool: pool.number)


class Pool(Displayable, PoolCore[S]):
    """Pool of up to `size` sandboxes of one class, started on demand.

    Requests are served in order of arrival. If several rollouts wait for the same pool, they receive sandboxes in turn.

    `async with` is optional: sandboxes are closed when the pool is garbage-collected or Python exits. A pool can be
    used in several event loops, one after another.

    Args:
        sandbox_type: a class that may define `async start()`, `async run(...)`, `async reset()`, `async fork(into)`,
            `alive`, `async close()` and `kill()` (called when the process exits). Without `reset`, a sandbox is
            replaced after each lease. If `reset` takes arguments (`task`, `seed`), the class is an environment: each
            chain resets it for its own task, and `cleanup()`, if defined, is called on release. Sync methods of a
            sandbox, except `alive` and `kill`, run in one thread; so does the constructor, unless `start` is a
            coroutine function or the constructor needs an event loop.
        size: maximum number of sandboxes.
        min_idle: number of idle sandboxes to keep ready after the first request.
        max_uses: number of leases after which a sandbox is replaced instead of reset, or None for no limit.
        max_lease: maximum duration of a lease in seconds, after which it is revoked: the sandbox is closed, the
            holder's next use of it raises LeaseRevoked, the holder's chain is not scored, and the next request gets a
            new sandbox.
        healthy: sync or async function, called with a sandbox after each reset. If `healthy` returns a false value or
            raises, the sandbox is replaced.
        acquire_timeout: default time to wait for a lease, in seconds.
        start_timeout: time limit in seconds for starting or resetting a sandbox. After this time, the method is
            cancelled and the sandbox is replaced. The time limit for `close` is always 5 seconds. A method that does
            not end when it is cancelled is abandoned with a warning.
        options: keyword arguments of `sandbox_type`. None is passed on like any other value; for example,
            `memory_mb=None` of a PythonSandbox means no limit.

    Raises:
        SettingsError: if a setting is invalid, or if `sandbox_type` does not accept an option, because it has no such
            parameter or because its class method `validate_options(**options)`, if defined, rejects the value.
    """

    def __init__(
        self,
        sandbox_type: type[S],
        size: int = 8,
        *,
        min_idle: int = 0,
        max_uses: int | None = None,
        max_lease: float = 3600.0,
        healthy: Callable[[S], object] | None = None,
        acquire_timeout: float = 120.0,
        start_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        check_instance("sandbox_type", sandbox_type, type, "a class such as PythonSandbox")
        check_count("size", size)
        check_value("min_idle", min_idle, "int", f"of at least 0 and at most {size}")
        check_count("max_uses", max_uses, optional=True)
        times = {"start_timeout": start_timeout, "max_lease": max_lease, "acquire_timeout": acquire_timeout}
        for name, seconds in times.items():
            check_value(name, seconds, limit="above 0")
        state = PoolState(
            size, min_idle, alive=lambda slot: is_alive(slot.sandbox), max_uses=max_uses, max_lease=max_lease
        )
        super().__init__(sandbox_type, state)
        _check_sandbox_type(sandbox_type, options)
        self.size = size
        self.min_idle = min_idle
        self.acquire_timeout = acquire_timeout
        self.max_lease = max_lease
        self.start_timeout = start_timeout
        self.options = options
        self._healthy = healthy
        self._arguments = {
            "min_idle": min_idle,
            "max_uses": max_uses,
            "max_lease": max_lease,
            "healthy": healthy,
            "acquire_timeout": acquire_timeout,
            "start_timeout": start_timeout,
        } | options
        self.number = next(_numbers)
        _POOLS.add(self)

    def __reduce__(self) -> Any:
        # A pool that is unpickled in another process starts its own sandboxes.
        return functools.partial(Pool, self.sandbox_type, self.size, **self._arguments), ()

    # --- inspection

    @property
    def closed(self) -> bool:
        """True if the pool has been closed."""
        return self._state.closed

    @property
    def isolation(self) -> str | None:
        """Isolation level in use. Before any sandbox has started, the requested level or None."""
        for slot in list(self._state.slots.values()):
            if slot.sandbox is not None:
                return cast("str | None", getattr(slot.sandbox, "isolation", None))
        asked = self.options.get("isolation")
        return None if asked is None else str(asked)

    def snapshot(self) -> PoolSnapshot:
        """Return the current state of the sandboxes and requests. Can be called from any thread."""
        with self._lock:
            state, now = self._state, time.monotonic()
            waiters = [state.waiters[ticket] for ticket in state.order()]
            return PoolSnapshot(
                sandbox_type=self.name,
                isolation=self.isolation,
                size=self.size,
                dead=state.dead,
                closed=state.closed,
                time=now,
                waiters=tuple(waiter.owner for waiter in waiters),
                sandboxes=tuple(
                    SandboxInfo(s.id, s.state, s.owner, s.uses, s.since, s.turn) for s in state.slots.values()
                ),
                error=None if state.last_error is None else str(state.last_error),
                waiting_seconds=tuple(now - waiter.since for waiter in waiters),
                recycled=state.recycled,
                failed_starts=state.failed_starts,
            )

    def __repr__(self) -> str:
        s = self.snapshot()
        if s.closed:
            return f"<Pool {s.sandbox_type} closed, size {s.size}>"
        resetting = f"{s.resetting} resetting, " if s.resetting else ""
        counts = f"{s.leased} leased, {s.idle} idle, {s.starting} starting, {resetting}{s.waiting} waiting"
        return f"<Pool {s.sandbox_type} {counts}, size {s.size}>"

    def subscribe(self, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Call `callback` with every future event, in order. Return a function that unsubscribes.

        The callback runs synchronously in the thread that caused the event and must be fast. The callback may use the
        pool. If the callback raises an exception, the pool warns once and continues.
        """
        return self._listeners.subscribe(callback)

    # --- leasing

    @contextlib.asynccontextmanager
    async def lease(self, owner: str = "unnamed", timeout: float | None = None, *, run: str = "") -> AsyncIterator[S]:
        """Lease a sandbox within an async context manager: `async with pool.lease(owner="me") as sandbox`.

        For arguments and exceptions, see `acquire`.
        """
        lease = await self.acquire(owner, timeout, run=run)
        try:
            yield lease.sandbox
        finally:
            await self.release(lease)

    async def acquire(
        self, owner: str = "unnamed", timeout: float | None = None, *, run: str = "", queue: bool = True
    ) -> Lease[S]:
        """Wait for a sandbox and lease it until `release` is called.

        Args:
            owner: name of the holder, shown in snapshots and error messages.
            timeout: maximum time to wait, in seconds; None means the pool's `acquire_timeout`.
            run: name of the rollout. Rollouts take turns; requests of the same rollout are served in order of arrival.
            queue: whether to wait for the release of another lease. With False, wait only for a sandbox that is being
                started, reset or replaced.

        Raises:
            PoolTimeout: if no sandbox becomes free in time; the message names the holders. With queue=False, also
                raised if all sandboxes are leased or requested.
            PoolClosed: if the pool is closed.
            SandboxError, IsolationError: if no sandbox can be started.
        """
        timeout = self.acquire_timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        if self._forget_closed_loops():
            # Collect chains that were dropped together with their event loop and are in reference cycles.
            collect()
        # Repeat if the granted sandbox has died. If the pool was closed, the next request raises PoolClosed.
        while True:
            slot = await self._request(owner, run, queue, deadline, timeout)
            with self._lock:
                if slot.state == "leased" and slot.sandbox is not None:
                    lease = Lease(self, slot.id, slot.sandbox, owner, slot.worker)
                    slot.lease, slot.ticket, slot.loop = weakref.ref(lease), None, asyncio.get_running_loop()
                    break
        self._schedule_wakeup()
        return lease

    async def _request(self, owner: str, run: str, queue: bool, deadline: float, timeout: float) -> Slot:
        """Request a sandbox, wait until it is granted, and return its slot."""
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._dispatch(self._state.requested, future, owner, run, queue)
        try:
            if not future.done():
                with keep_interruptible():
                    await asyncio.wait([future], timeout=max(0.0, deadline - time.monotonic()))
            if not future.done():
                raise PoolTimeout(_timeout_message(self.snapshot(), timeout))
            return future.result()
        except GeneratorExit:
            # This coroutine was garbage-collected with its event loop, possibly while this thread holds the lock, so do
            # not dispatch here. `_forget_closed_loops` removes the request.
            raise
        except BaseException:
            self._dispatch(self._state.cancelled, future)  # also if the request has just been granted
            if future.done() and not future.cancelled():
                future.exception()  # mark as retrieved
            raise

    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None:
        """Release a lease. Idempotent. The sandbox is reset, or replaced if it cannot be reset.

        Args:
            lease: a lease of this pool.
            reusable: whether the sandbox may be reset for another lease. With False, the sandbox is closed.

        Raises:
            SettingsError: if the lease belongs to another pool.
        """
        if lease.pool is not self:
            raise SettingsError(f"lease must be a lease of this pool, got {lease!r}")
        slot = self._state.slots.get(lease.id)
        released, lease.released = lease.released, True
        if released or slot is None:
            return
        if reusable and not is_alive(lease.sandbox):
            self._dispatch(self._state.died, slot, "found dead when it was released")
        else:
            resettable = callable(getattr(lease.sandbox, "reset", None))
            self._dispatch(self._state.released, slot, reusable and resettable and _is_reusable(lease))
        uses = slot.uses
        # Wait until the sandbox has been reset or closed, or leased to another holder.
        while slot.uses == uses and await self._wait_for_task(slot):
            pass

    def recycle(self, sandbox: int, *, close: bool = False) -> None:
        """Reset or close a sandbox at the request of a user. Repeated calls are harmless.

        If the sandbox is leased, the lease is revoked as if `max_lease` had passed, and the sandbox is replaced.

        Args:
            sandbox: number of the sandbox.
            close: whether to close the sandbox instead of resetting it.

        Raises:
            SettingsError: if there is no such sandbox.
        """
        slot = self._state.slots.get(sandbox)
        if slot is None:
            have = ", ".join(map(str, self._state.slots)) or "none"
            raise SettingsError(f"sandbox must be the number of a sandbox in this pool ({have}), got {sandbox}")
        self._dispatch(self._state.recycle, slot, close)

    async def close(self) -> None:
        """Close the pool and all its sandboxes, including leased ones, and wait until they are closed.

        Waiting requests raise PoolClosed.
        """
        self._dispatch(self._state.close)
        for slot in list(self._tasks):
            await self._wait_for_task(slot)
        # Kill sandboxes whose `close` was scheduled on an event loop that is closed by now.
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _is_reusable(lease: Lease[Any]) -> bool:
    """Return False if an abandoned or failed call may still be running or may have changed the sandbox."""
    ends_calls = getattr(lease.pool.sandbox_type, "ends_cancelled_calls", False)
    return not (lease.worker.busy if ends_calls else lease.worker.discarded)


def _timeout_message(s: PoolSnapshot, timeout: float) -> str:
    counts = f"{s.leased} of {s.size} leased, {s.waiting} waiting"
    if s.starting:
        counts += f", {s.starting} starting"
    if s.resetting:
        counts += f", {s.resetting} resetting"
    text = f"no {s.sandbox_type} free after {timeout:.1f} s ({counts}); "
    if s.leases:
        held = [
            f"{lease.owner} ({s.time - lease.since:.1f} s{'' if lease.turn is None else f', turn {lease.turn}'})"
            for lease in s.leases[:4]
        ]
        more = len(s.leases) - len(held)
        text += f"held by {', '.join(held)}{f' and {more} more' if more > 0 else ''}; "
    if s.leased < s.size and s.starting:
        text += "sandboxes start slowly: increase timeout=, or keep some ready with min_idle="
    else:
        text += (
            "increase size=, or release sandboxes that are not in use; a chain stepped by hand keeps its sandbox "
            "until `await chain.close()`"
        )
    return text if s.error is None else f"{text}; the last start failed: {s.error}"


def _check_sandbox_type(sandbox_type: Any, options: dict[str, Any]) -> None:
    """Raise SettingsError if `alive` or `kill` is async, or if the class does not accept the options."""
    name = sandbox_type.__name__
    for method in ("alive", "kill"):
        if inspect.iscoroutinefunction(getattr(sandbox_type, method, None)):
            raise SettingsError(f"{name}.{method} must not be async, because the pool calls it without waiting")
    try:
        signature = inspect.signature(sandbox_type)
    except ValueError:  # a class without a signature, such as dict
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        names = ", ".join(f"{each}=" for each in signature.parameters) or "no arguments"
        wrong = next((each for each in options if each not in signature.parameters), "")
        hint = suggest_keyword(wrong, [*inspect.signature(Pool).parameters, *signature.parameters])
        raise SettingsError(f"{name}: {error}; it takes {names}{hint}") from None
    if hasattr(sandbox_type, "validate_options"):
        sandbox_type.validate_options(**options)
