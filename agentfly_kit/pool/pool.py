"""`Pool`: sandboxes of one class, lent to chains.

Every change of state is made by one synchronous method (state.py), under a lock and without waiting. Sandboxes are
started, reset and closed outside it, in separate tasks that the cancellation of a waiting caller does not affect. The
design follows httpcore's connection pool. The pool is independent of chains, tools and rewards. A sandbox class is any
class with some of the methods `start`, `run`, `reset`, `fork`, `alive` and `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

from .._async.interrupts import keep_interruptible
from .._display import Displayable
from ..errors import IsolationError, PoolClosed, PoolTimeout, SandboxError, SettingsError
from .environment import is_environment
from .state import (
    Cancelled,
    Change,
    CloseAll,
    Closed,
    Died,
    Effects,
    Event,
    PoolState,
    Recycle,
    Released,
    Requested,
    Reset,
    SlotState,
    Started,
    StartFailed,
    TurnChanged,
    Wakeup,
)

S = TypeVar("S")
_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count(1)
_CLOSE_SECONDS = 5.0  # time limit of a sandbox's `close`, which is then cancelled and the sandbox killed
_CANCEL_GRACE_SECONDS = 1.0  # grace period after cancellation before a task is abandoned


def register(pool: Any) -> int:
    """Add a pool, or an object with the same interface, to `pools()`, and return its number."""
    _POOLS.add(pool)
    return next(_numbers)


def pools() -> list[Any]:
    """Return all existing pools that are not closed, including remote ones, oldest first."""
    return sorted((pool for pool in _POOLS if not pool.closed), key=lambda pool: pool.number)


# --- snapshots, events and leases ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease at one moment.

    Attributes:
        owner: Name of the holder.
        sandbox: Number of the sandbox.
        since: Start of the lease (monotonic seconds).
        turn: The holder's current turn, or None if the holder has not set it.
    """

    owner: str
    sandbox: int
    since: float
    turn: object = None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox at one moment.

    Attributes:
        id: Number of the sandbox.
        state: starting, idle, leased, resetting, closing.
        owner: Name of the holder, if it is leased.
        uses: Number of leases so far, including the current one.
        since: When it entered this state (monotonic seconds).
    """

    id: int
    state: SlotState
    owner: str | None
    uses: int
    since: float


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """State of a pool at one moment.

    Attributes:
        sandbox_type: Name of the sandbox class.
        isolation: Isolation level in use, or the requested one before the first start. None means the best available
            level, or a sandbox class without levels.
        size: Maximum number of sandboxes.
        idle: Number of sandboxes ready to be leased.
        starting: Number of sandboxes that are being started, or reset after a lease.
        leased: Number of leased sandboxes.
        waiting: Number of waiting requests.
        dead: Number of sandboxes found dead so far. Each is replaced when another is needed.
        closed: True after the pool was closed.
        time: When the snapshot was taken (monotonic seconds).
        leases: Current leases, oldest first.
        waiters: Owners of the waiting requests, in the order in which they will be served.
        sandboxes: All sandboxes.
        error: Error of the last failed start; None after a successful one.
    """

    sandbox_type: str
    isolation: str | None
    size: int
    idle: int
    starting: int
    leased: int
    waiting: int
    dead: int
    closed: bool
    time: float
    leases: tuple[LeaseInfo, ...]
    waiters: tuple[str, ...]
    sandboxes: tuple[SandboxInfo, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One change of a pool's state.

    Attributes:
        sequence: Number of the event, counted from 1 without gaps.
        kind: What changed.
        sandbox: Number of the sandbox, or None if the event concerns a request or the whole pool.
        owner: Name of the holder or requester, if there is one.
        time: When it changed (monotonic seconds).
        detail: Further information, such as the reason.
    """

    sequence: int
    kind: Change
    sandbox: int | None
    owner: str | None
    time: float
    detail: str = ""


class Lease(Generic[S]):
    """A leased sandbox, held until `await pool.release(lease)`.

    Attributes:
        revoked: Reason why the pool ended the lease early, or "". The sandbox of a revoked lease is closed.
        id: Number of the sandbox.
        sandbox: The sandbox.
        owner: Name of the holder.
        since: Start of the lease (monotonic seconds).
        released: True after the lease was released or revoked.
        turn: The holder's current turn; set it to show the progress in snapshots and events.
    """

    def __init__(self, pool: Pool[S], id: int, sandbox: S, owner: str) -> None:
        self._pool = pool
        self.revoked = ""
        self.id = id
        self.sandbox = sandbox
        self.owner = owner
        self.since = time.monotonic()
        self.released = False
        self._turn: object = None

    @property
    def pool(self) -> Pool[S]:
        return self._pool

    @property
    def turn(self) -> object:
        return self._turn

    @turn.setter
    def turn(self, turn: object) -> None:
        self._turn = turn
        if not self.released:
            self._pool._dispatch(TurnChanged(self.id, turn))

    async def release(self) -> None:
        """Release the lease; the same as `pool.release(lease)`."""
        await self._pool.release(self)

    def __del__(self) -> None:
        if not getattr(self, "released", True):
            self._pool._on_lease_collected(self)

    def __repr__(self) -> str:
        state = "released" if self.released else f"{time.monotonic() - self.since:.1f} s"
        state = f"revoked: {self.revoked}" if self.revoked else state
        return f"<Lease {self._pool.name} {self.id} of {self.owner}, {state}>"


class _Listener:
    """A subscribed callback, which is warned about at most once."""

    def __init__(self, callback: Callable[[PoolEvent], object]) -> None:
        self.callback = callback
        self.warned = False

    def notify(self, event: PoolEvent, name: str) -> None:
        try:
            self.callback(event)
        except Exception as error:
            if self.warned:
                return
            self.warned = True
            _warn(f"a listener of the pool of {name} raised {error!r}; this is said once")


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:  # warnings are errors here; do not raise in the caller, who is not at fault
        logging.getLogger(__name__).exception(text)


# --- the pool ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ticket:
    """The future that a waiting request awaits, and its event loop."""

    future: asyncio.Future[int]
    loop: asyncio.AbstractEventLoop


class Pool(Displayable, Generic[S]):
    """Pool of up to `size` sandboxes of one class, which are started on demand.

    Requests are served first come, first served. If several rollouts wait for one pool, they are served in turn, one
    sandbox each.

    `async with` is optional: the sandboxes are closed when the pool is garbage-collected or Python exits. A pool can be
    used from several event loops, one after another.

    Args:
        sandbox_type: a class with some of `async start()`, `async run(...)`, `async reset()`, `async fork(into)`,
            `alive`, `async close()`, and `kill()`, which is used when the process exits. Without `reset`, a sandbox is
            replaced after each lease. If `reset(task, seed)` takes a task, the class is an environment: the next chain
            resets it for its task, and `cleanup()`, if defined, is called on release.
        size: maximum number of sandboxes.
        min_idle: number of idle sandboxes to keep ready, from the first request on.
        isolation, memory_mb, processes, cpu_seconds, disk_mb, network, and any other keyword: passed to `sandbox_type`,
            whose defaults apply to those left out (see PythonSandbox). A keyword that it does not accept raises
            SettingsError, so that no limit is silently ignored.
        max_uses, max_age: replace a sandbox after this many leases or seconds instead of resetting it. With
            `max_uses=1` no sandbox is reset.
        max_lease: maximum duration of a lease in seconds. After that the lease is revoked: the sandbox is closed, the
            holder's next use of it raises LeaseRevoked, its chain is unscored, and the next request gets a new sandbox.
        healthy: `healthy(sandbox)`, sync or async, called after each reset. If it returns false or raises, the sandbox
            is replaced. By default the sandbox's own method `healthy()` is called, if defined.
        max_starting: maximum number of sandboxes that start concurrently, or None for no limit.
        acquire_timeout: default time to wait for a lease, in seconds.
        start_timeout: time limit in seconds for starting or resetting a sandbox, which is then cancelled and replaced.
            The limit for `close` is 5 seconds, followed by `kill`. A method that ignores its cancellation is abandoned
            with a warning.

    Raises:
        SettingsError: if a setting is invalid or not accepted by `sandbox_type`.
    """

    def __init__(
        self,
        sandbox_type: type[S],
        size: int = 8,
        *,
        min_idle: int = 0,
        isolation: object = None,
        memory_mb: int | None = None,
        processes: int | None = None,
        cpu_seconds: float | None = None,
        disk_mb: int | None = None,
        network: bool | None = None,
        max_uses: int | None = None,
        max_age: float | None = None,
        max_lease: float = 3600.0,
        healthy: Callable[[S], object] | None = None,
        max_starting: int | None = 8,
        acquire_timeout: float = 120.0,
        start_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if not isinstance(sandbox_type, type):
            raise SettingsError(
                f"Pool({sandbox_type!r}): want a class, such as PythonSandbox; a pool makes its own sandboxes"
            )
        for name in ("alive", "kill"):
            if inspect.iscoroutinefunction(getattr(sandbox_type, name, None)):
                raise SettingsError(
                    f"{sandbox_type.__name__}.{name} is async: the pool asks it without waiting; leave out async"
                )
        if size < 1:
            raise SettingsError(f"size={size}: want at least 1")
        if not 0 <= min_idle <= size:
            raise SettingsError(f"min_idle={min_idle}: want between 0 and size={size}")
        for name, value in (("max_uses", max_uses), ("max_age", max_age), ("max_starting", max_starting)):
            if value is not None and value <= 0:
                raise SettingsError(f"{name}={value!r}: want more than 0, or None for no bound")
        if not 0 < max_lease < float("inf"):
            raise SettingsError(f"max_lease={max_lease!r}: want a number of seconds; every lease ends some time")
        given: dict[str, Any] = {
            "isolation": isolation, "memory_mb": memory_mb, "processes": processes, "cpu_seconds": cpu_seconds,
            "disk_mb": disk_mb, "network": network,
        }  # fmt: skip
        self.sandbox_type = sandbox_type
        self.name = sandbox_type.__name__
        self.size = size
        self.min_idle = min_idle
        self.acquire_timeout = acquire_timeout
        self.start_timeout = start_timeout
        self.max_lease = max_lease
        self.options = {name: value for name, value in given.items() if value is not None} | options
        self._check_options()
        self._sandboxes: dict[int, S] = {}
        sandboxes = self._sandboxes  # without a reference to self: no cycle, so an unused pool is freed immediately
        self._healthy = healthy
        self._state = PoolState(
            size, min_idle, alive=lambda slot: _is_alive(sandboxes.get(slot)), max_starting=max_starting,
            max_uses=max_uses, max_age=max_age, max_lease=max_lease,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._dropped: deque[int] = deque()  # leases that were collected, not released
        self._leases: weakref.WeakValueDictionary[int, Lease[S]] = weakref.WeakValueDictionary()  # by slot
        # Event loop and time of the timer for the next lease that expires.
        self._wakeup_timer: tuple[asyncio.AbstractEventLoop, float] | None = None
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = itertools.count(1)
        self._tasks: dict[asyncio.Task[None], int] = {}  # running start, reset or close -> its slot
        self._listeners: list[_Listener] = []
        self._events: deque[PoolEvent] = deque()
        self._sequence = 0
        self._notifying = False
        self._finalizer = weakref.finalize(self, _kill_all, sandboxes)
        self.number = register(self)

    def _check_options(self) -> None:
        try:
            parameters = inspect.signature(self.sandbox_type).parameters
        except (TypeError, ValueError):
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name, value in self.options.items():
            if name not in parameters:
                takes = ", ".join(f"{each}=" for each in parameters) or "no settings"
                raise SettingsError(
                    f"Pool({self.name}, {name}={value!r}): {self.name} takes no {name}=; it takes {takes}"
                )

    # --- inspection

    @property
    def closed(self) -> bool:
        """True after the pool was closed."""
        return self._state.closed

    @property
    def isolation(self) -> str | None:
        """The isolation level in use; before the first start, the requested level or None."""
        for sandbox in list(self._sandboxes.values()):
            return cast("str | None", getattr(sandbox, "isolation", None))
        asked = self.options.get("isolation")
        return None if asked is None else str(asked)

    def snapshot(self) -> PoolSnapshot:
        """Return the current counts, leases and sandboxes. Can be called from any thread."""
        with self._lock:
            state = self._state
            slots = list(state.slots.values())
            leases = [LeaseInfo(s.owner or "", s.id, s.since, s.turn) for s in slots if s.state == "leased"]
            return PoolSnapshot(
                sandbox_type=self.name,
                isolation=self.isolation,
                size=self.size,
                idle=state.count("idle"),
                starting=state.count("starting", "resetting"),
                leased=len(leases),
                waiting=len(state.waiters),
                dead=state.dead,
                closed=state.closed,
                time=time.monotonic(),
                leases=tuple(sorted(leases, key=lambda lease: lease.since)),
                waiters=tuple(state.waiters[ticket].owner for ticket in state.order()),
                sandboxes=tuple(SandboxInfo(s.id, s.state, s.owner, s.uses, s.since) for s in slots),
                error=None if state.last_error is None else str(state.last_error),
            )

    def __repr__(self) -> str:
        s = self.snapshot()
        if s.closed:
            return f"<Pool {s.sandbox_type} closed, size {s.size}>"
        counts = f"{s.leased} leased, {s.idle} idle, {s.starting} starting, {s.waiting} waiting"
        return f"<Pool {s.sandbox_type} {counts}, size {s.size}>"

    def subscribe(self, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Call `callback` with every further event, in order, and return a function that unsubscribes.

        The callback runs synchronously in the thread that made the change, without the pool's lock, and must be fast.
        If it raises, the pool warns once and continues.
        """
        listener = _Listener(callback)
        lock, listeners = self._lock, self._listeners  # not self, so that `unsubscribe` does not keep the pool alive
        with lock:
            listeners.append(listener)

        def unsubscribe() -> None:
            with lock, contextlib.suppress(ValueError):
                listeners.remove(listener)

        return unsubscribe

    # --- leasing

    @contextlib.asynccontextmanager
    async def lease(
        self, owner: str = "somebody", timeout: float | None = None, *, run: str = ""
    ) -> AsyncIterator[S]:  # fmt: skip
        """Async context manager that leases a sandbox: `async with pool.lease(owner="me") as sandbox`.

        Arguments and errors are those of `acquire`.
        """
        lease = await self.acquire(owner, timeout, run=run)
        try:
            yield lease.sandbox
        finally:
            await self.release(lease)

    async def acquire(self, owner: str = "somebody", timeout: float | None = None, *, run: str = "") -> Lease[S]:
        """Wait for a sandbox and lease it until `release`.

        Args:
            owner: name of the holder, shown in snapshots and error messages.
            timeout: maximum time to wait; None means the pool's `acquire_timeout`.
            run: name of the rollout. Runs are served in turn, and the requests of one run first come, first served.

        Units:
            timeout in seconds.

        Raises:
            PoolTimeout: if no sandbox becomes free in time. The message lists the holders.
            PoolClosed: if the pool is closed.
            SandboxError, IsolationError: if no sandbox can be started.
        """
        timeout = self.acquire_timeout if timeout is None else timeout
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._forget_closed_loops()
        while True:
            slot = await self._wait(Requested(next(self._next_ticket), owner, run), loop, deadline, timeout)
            with self._lock:
                taken = self._state.slots.get(slot)
                if taken is not None and taken.state == "leased" and slot in self._sandboxes:
                    lease = Lease(self, slot, self._sandboxes[slot], owner)
                    self._leases[slot] = lease
                    break
            # After the grant the pool was closed or the sandbox died. Request again; a closed pool raises PoolClosed.
        self._schedule_wakeup(loop)
        return lease

    def _schedule_wakeup(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set a timer for the next lease that expires. Must be called in the thread of `loop`."""
        with self._lock:
            due = self._state.next_expiry
            if due == float("inf") or (
                self._wakeup_timer and self._wakeup_timer[1] <= due and not self._wakeup_timer[0].is_closed()
            ):
                return
            self._wakeup_timer = (loop, due)
        me = weakref.ref(self)

        def ring() -> None:
            pool = me()
            if pool is None or pool._wakeup_timer != (loop, due):
                return
            pool._wakeup_timer = None
            pool._dispatch(Wakeup())
            pool._schedule_wakeup(loop)

        loop.call_later(max(0.0, due - time.monotonic()) + 0.01, ring)

    async def _wait(self, event: Requested, loop: asyncio.AbstractEventLoop, deadline: float, timeout: float) -> int:
        number = event.ticket
        ticket = _Ticket(loop.create_future(), loop)
        with self._lock:
            self._tickets[number] = ticket
        self._dispatch(event)
        try:
            if not ticket.future.done():
                with keep_interruptible():
                    await asyncio.wait([ticket.future], timeout=max(0.0, deadline - loop.time()))
            if not ticket.future.done():
                raise PoolTimeout(self._timeout_message(timeout))
            slot = ticket.future.result()
        except GeneratorExit:
            # Garbage-collected with its event loop, perhaps while this thread holds the lock. Do not dispatch;
            # `_forget_closed_loops` will remove the ticket.
            raise
        except BaseException:
            # If the request was granted in the meantime, cancelling it passes the sandbox to the next one.
            self._tickets.pop(number, None)
            self._dispatch(Cancelled(number))
            if ticket.future.done() and not ticket.future.cancelled():
                ticket.future.exception()  # mark as retrieved
            raise
        self._tickets.pop(number, None)
        return slot

    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None:
        """Release a lease. The sandbox is reset, or replaced if resetting fails. Idempotent.

        Args:
            lease: a lease of this pool.
            reusable: False closes the sandbox instead of resetting it.

        Raises:
            SettingsError: if the lease belongs to another pool.
        """
        if lease.pool is not self:
            raise SettingsError(f"{lease!r} is a lease of another pool")
        if lease.released:
            return
        lease.released = True
        alive = _is_alive(lease.sandbox)
        if alive or not reusable:
            resettable = callable(getattr(lease.sandbox, "reset", None))
            self._dispatch(Released(lease.id, reusable and resettable))
        else:
            self._dispatch(Died(lease.id, "found dead when it came back"))
        with self._lock:
            taken = self._state.slots.get(lease.id)
            uses = None if taken is None else taken.uses
        await self._wait_for_tasks(lease.id, uses)

    def recycle(self, sandbox: int, *, close: bool = False) -> None:
        """Reset or close a sandbox interactively. Repeating the call is harmless.

        If the sandbox is leased, the lease is revoked as with `max_lease`, and the sandbox is closed and replaced.

        Args:
            sandbox: number of the sandbox.
            close: close the sandbox instead of resetting it.

        Raises:
            SettingsError: if there is no such sandbox.
        """
        if sandbox not in self._state.slots:
            have = ", ".join(map(str, self._state.slots)) or "none"
            raise SettingsError(f"{self.name} {sandbox} is not in this pool (there are: {have})")
        self._dispatch(Recycle(sandbox, close))

    async def close(self) -> None:
        """Close the pool and all its sandboxes, including leased ones, and wait until they are closed.

        Waiting requests raise PoolClosed.
        """
        self._dispatch(CloseAll())
        await self._wait_for_tasks(None)
        self._finalizer()  # kill sandboxes whose `close` was scheduled on an event loop that is closed now

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- state changes

    def _dispatch(self, event: Event, *, may_start: bool = True) -> None:
        """Apply an event to the state and start carrying out its effects. All state changes go through here.

        Never waits.
        """
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        may_start = may_start and loop is not None
        with self._lock:
            now = time.monotonic()
            effects = self._state.handle(event, now, may_start)
            for change, slot, owner, detail in effects.changes:
                self._sequence += 1
                if self._listeners:
                    self._events.append(PoolEvent(self._sequence, change, slot, owner, now, detail))
            for slot, why in effects.revoked.items():
                lease = self._leases.pop(slot, None)
                if lease is not None:
                    lease.revoked, lease.released = why, True
        self._resolve_tickets(effects)
        for slot in effects.start:
            self._spawn(slot, self._start(slot))
        for slot in effects.reset:
            if may_start:
                self._spawn(slot, self._reset(slot))
            else:
                self._kill_slot(slot)
        for slot in effects.close:
            if may_start:
                self._spawn(slot, self._close(slot))
            else:
                self._kill_slot(slot)
        if not may_start and self._state.waiters:
            self._wake_a_loop()
        self._notify()
        if self._dropped:
            self._kill_dropped()

    def _resolve_tickets(self, effects: Effects) -> None:
        for number, slot in effects.grant:
            self._deliver(number, slot)
        for number, error in effects.refuse:
            self._deliver(number, self._acquire_error(error))

    def _deliver(self, number: int, answer: int | Exception) -> None:
        with self._lock:
            ticket = self._tickets.get(number)
        if ticket is None:
            return

        def arrive() -> None:
            if ticket.future.done():
                return
            if isinstance(answer, int):
                ticket.future.set_result(answer)
            else:
                ticket.future.set_exception(answer)

        try:
            here = asyncio.get_running_loop() is ticket.loop
        except RuntimeError:
            here = False
        if here:
            arrive()
            return
        try:
            ticket.loop.call_soon_threadsafe(arrive)
        except RuntimeError:  # the waiter's event loop is closed, so the request is cancelled
            with self._lock:
                self._tickets.pop(number, None)
            self._dispatch(Cancelled(number))

    def _acquire_error(self, error: BaseException | None) -> Exception:
        if error is None:
            return PoolClosed(f"the pool of {self.name} is closed; make a new one")
        error_type = IsolationError if isinstance(error, IsolationError) else SandboxError
        refusal = error_type(
            f"no {self.name} could be started: {error}" if str(error) else f"no {self.name} could be started"
        )
        refusal.__cause__ = error
        return refusal

    def _wake_a_loop(self) -> None:
        with self._lock:
            loops = [self._tickets[number].loop for number in self._state.waiters if number in self._tickets]
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._dispatch, Wakeup())
                return
            except RuntimeError:
                continue

    def _forget_closed_loops(self) -> None:
        """Cancel requests and kill sandboxes that wait for a closed event loop; nothing else would end them."""
        with self._lock:
            gone = [number for number, ticket in self._tickets.items() if ticket.loop.is_closed()]
            for number in gone:
                del self._tickets[number]
            stuck = [(task, slot) for task, slot in self._tasks.items() if task.get_loop().is_closed()]
            for task, _ in stuck:
                del self._tasks[task]
        for number in gone:
            self._dispatch(Cancelled(number))
        for _, slot in stuck:
            self._kill_slot(slot)

    # --- starting, resetting and closing sandboxes, in separate tasks

    def _spawn(self, slot: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name} {slot}")
        with self._lock:
            self._tasks[task] = slot
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Remove a task. If it failed or was cancelled by the shutdown of its event loop, kill its sandbox."""
        with self._lock:
            slot = self._tasks.pop(task, None)
            closing = slot in self._tasks.values()  # `_close` cancelled the task and ends the sandbox
        if slot is not None and not closing and (task.cancelled() or task.exception() is not None):
            self._kill_slot(slot)

    async def _wait_for_tasks(self, slot: int | None, uses: int | None = None) -> None:
        """Wait for the tasks of a slot, or of all slots if None. Cancelling the wait does not cancel the tasks.

        Args:
            slot: number of the slot.
            uses: stop waiting if the slot's number of uses differs, that is, if it has been lent again.
        """
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                now = self._state.slots.get(slot or 0)
                if uses is not None and now is not None and now.uses != uses:
                    return
                tasks = [t for t, s in self._tasks.items() if slot in (None, s) and t.get_loop() is loop]
            if not tasks:
                return
            # Every task has its own time limit, so it ends in time unless the sandbox class ignores cancellation.
            _, stuck = await asyncio.wait(
                tasks, timeout=self.start_timeout + 2 * (_CLOSE_SECONDS + _CANCEL_GRACE_SECONDS)
            )
            await asyncio.sleep(0)  # let the done callbacks run
            for stuck_slot in self._abandon_tasks(stuck):
                self._kill_slot(stuck_slot)

    def _abandon_tasks(self, stuck: set[asyncio.Task[None]]) -> list[int]:
        """Stop waiting for tasks that ignored their cancellation, warn about them, and return their slots."""
        with self._lock:
            slots = [self._tasks.pop(task) for task in stuck if task in self._tasks]
        if stuck:
            _warn(
                f"a {self.name} goes on though it was cancelled, and is waited for no more: in its start, reset, "
                "cleanup or close something catches CancelledError; write `except Exception`, not a bare `except`"
            )
        return slots

    async def _start(self, slot: int) -> None:
        clock: asyncio.Timeout | None = None
        try:
            sandbox = self.sandbox_type(**self.options)
            with self._lock:
                self._sandboxes[slot] = sandbox
            async with asyncio.timeout(self.start_timeout) as clock:
                await _call(sandbox, "start")
        except (Exception, SystemExit) as error:
            late = clock is not None and clock.expired()
            reason: BaseException = error
            if late:
                reason = SandboxError(f"it did not start within {self.start_timeout:g} s")
            permanent = isinstance(reason, IsolationError | SettingsError | TypeError)
            self._dispatch(StartFailed(slot, reason, permanent))
        else:
            if self._sandboxes.get(slot) is not sandbox:
                await self._close_or_kill(sandbox)  # the slot was closed or killed in the meantime
            self._dispatch(Started(slot))

    async def _is_healthy(self, sandbox: S) -> bool:
        check = (
            getattr(sandbox, "healthy", None) if self._healthy is None else functools.partial(self._healthy, sandbox)
        )
        return bool(await _maybe_await(check())) if callable(check) else True

    async def _reset(self, slot: int) -> None:
        try:
            async with asyncio.timeout(self.start_timeout):
                sandbox = self._sandboxes[slot]
                if not is_environment(self.sandbox_type):
                    await _call(sandbox, "reset")
                elif inspect.ismethod(getattr(sandbox, "cleanup", None)):  # a method, not a tool of that name
                    await _call(sandbox, "cleanup")  # the next holder resets it for its task
                if not await self._is_healthy(sandbox):
                    self._dispatch(Died(slot, "its health check failed"))
                    return
        except NotImplementedError:
            self._dispatch(Died(slot, "this kind is not reset but replaced"))
        except (Exception, SystemExit) as error:
            self._dispatch(Died(slot, f"its reset failed: {type(error).__name__}: {error}"))
        else:
            self._dispatch(Reset(slot))

    async def _close(self, slot: int) -> None:
        me = asyncio.current_task()
        with self._lock:
            others = [task for task, its in self._tasks.items() if its == slot and task is not me]
        for task in others:  # a start or reset that is no longer needed
            task.cancel()
        if others:
            _, stuck = await asyncio.wait(others, timeout=_CLOSE_SECONDS)
            self._abandon_tasks(stuck)
        with self._lock:
            sandbox = self._sandboxes.get(slot)
        if sandbox is not None:
            await self._close_or_kill(sandbox)
        with self._lock:
            self._sandboxes.pop(slot, None)
        self._dispatch(Closed(slot))

    async def _close_or_kill(self, sandbox: S) -> None:
        """Close a sandbox, and kill it if `close` fails or exceeds its time limit. Errors are ignored."""
        closing = asyncio.ensure_future(_call(sandbox, "close"))
        try:
            await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
            if not closing.done():
                closing.cancel()
                await asyncio.wait([closing], timeout=_CANCEL_GRACE_SECONDS)
        except BaseException:
            closing.cancel()
            raise
        if not closing.done():
            self._abandon_tasks({closing})
        if not closing.done() or closing.cancelled() or closing.exception() is not None:
            with contextlib.suppress(Exception):
                await _call(sandbox, "kill")

    def _kill_slot(self, slot: int) -> None:
        """Kill a sandbox immediately, for use without an event loop or during its shutdown. Starts no task."""
        with self._lock:
            sandbox = self._sandboxes.pop(slot, None)
        if sandbox is not None:
            _kill(sandbox)
        self._dispatch(Closed(slot), may_start=False)

    def _on_lease_collected(self, lease: Lease[S]) -> None:
        """Kill the sandbox of a lease that was garbage-collected without a release.

        The collector may call this at any point, even while this thread holds the lock. If the lock is held, the
        sandbox is killed later.
        """
        if lease.id not in self._state.slots:
            return  # the pool was closed and has removed it
        self._dropped.append(lease.id)
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._kill_dropped()
        warnings.warn(f"{lease!r} was dropped without a release", ResourceWarning, stacklevel=3)

    def _kill_dropped(self) -> None:
        while self._dropped:
            self._kill_slot(self._dropped.popleft())

    # --- notification

    def _notify(self) -> None:
        """Deliver queued events to the listeners, one at a time and in order, without holding the lock."""
        with self._lock:
            if self._notifying:
                return
            self._notifying = True
        while True:
            with self._lock:
                if not self._events:
                    self._notifying = False
                    return
                event = self._events.popleft()
                listeners = list(self._listeners)
            try:
                for listener in listeners:
                    listener.notify(event, self.name)
            except BaseException:  # such as KeyboardInterrupt; the next change resumes
                self._notifying = False
                raise

    def _timeout_message(self, timeout: float) -> str:
        s = self.snapshot()
        counts = f"{s.leased} of {s.size} leased, {s.waiting} waiting"
        if s.starting:
            counts += f", {s.starting} starting"
        text = f"no {self.name} free after {timeout:.1f} s ({counts}); "
        if s.leases:
            held = [
                f"{lease.owner} ({s.time - lease.since:.1f} s{'' if lease.turn is None else f', turn {lease.turn}'})"
                for lease in s.leases[:4]
            ]
            more = len(s.leases) - len(held)
            text += f"held by {', '.join(held)}{f' and {more} more' if more > 0 else ''}; "
        if s.leased < s.size and s.starting:
            text += "starting takes long: raise timeout=, or keep some ready with min_idle="
        else:
            text += "raise size=, or look for a lease held while sampling; a chain stepped by hand keeps its sandbox "
            text += "until `await chain.close()`"
        return text if s.error is None else f"{text}; the last start failed: {s.error}"


# --- any object as a sandbox ---------------------------------------------------------------------


async def _maybe_await(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def _call(sandbox: object, method: str) -> None:
    """Call an optional method of a sandbox, which may be sync or async.

    Raises:
        SandboxError: if the method raises SystemExit, or CancelledError without having been cancelled. These would
            otherwise end the process or the calling task.
    """
    bound = getattr(sandbox, method, None)
    if not callable(bound):
        return
    try:
        await _maybe_await(bound())
    except SystemExit as error:
        raise SandboxError(f"its {method} left by SystemExit({error.code!r})") from error
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if me is None or me.cancelling():
            raise
        raise SandboxError(f"its {method} left by a CancelledError, though nobody cancelled it") from None


def _is_alive(sandbox: object) -> bool:
    if sandbox is None:
        return False
    try:
        alive = getattr(sandbox, "alive", True)
        return bool(alive() if callable(alive) else alive)
    except Exception:
        return False  # a sandbox whose `alive` raises is treated as dead


def _kill(sandbox: object) -> None:
    """Kill a sandbox without an event loop: call its `kill()`, or else run its `close()` in a separate thread."""
    kill = getattr(sandbox, "kill", None)
    if callable(kill):
        with contextlib.suppress(Exception):
            kill()
        return
    if callable(getattr(sandbox, "close", None)):
        thread = threading.Thread(target=_close_in_thread, args=(sandbox,), daemon=True)
        thread.start()
        thread.join(2.0)


def _close_in_thread(sandbox: object) -> None:
    with contextlib.suppress(BaseException):
        asyncio.run(_call(sandbox, "close"))


def _kill_all(sandboxes: dict[int, Any]) -> None:
    """Kill all sandboxes, when their pool is closed or garbage-collected, or Python exits."""
    while sandboxes:
        _kill(sandboxes.popitem()[1])
