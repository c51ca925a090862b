"""A pool of sandboxes of one kind, lent to chains one lease at a time.

Every change of state is made by one synchronous method (state.py), under a lock and without waiting; what it
says must be started, reset or closed happens outside it, in tasks of its own that the cancellation of a waiter does
not reach. The shape is that of httpcore's connection pool. The pool knows nothing of chains, tools or rewards, and
nothing of what is in a sandbox: a kind is any class with some of `start, run, reset, fork, alive, close`.
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

from .. import _html
from .._async.interrupts import keep_interruptible
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
_CLOSE_SECONDS = 5.0  # then it is cancelled, and killed
_CANCEL_GRACE_SECONDS = 1.0  # what goes on for so long after it was cancelled is waited for no more


def register(pool: Any) -> int:
    """From now on `pools()` has this one too, or one that is used like it. Gives its number."""
    _POOLS.add(pool)
    return next(_numbers)


def pools() -> list[Any]:
    """The pools that are alive and not closed, remote ones too, oldest first."""
    return sorted((pool for pool in _POOLS if not pool.closed), key=lambda pool: pool.number)


# --- what can be seen ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """Who holds a sandbox, since when (monotonic seconds) and in which turn, as far as the holder said."""

    owner: str
    sandbox: int
    since: float
    turn: object = None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """`uses` counts its leases, the present one too; `since` is when it came into this state (monotonic)."""

    id: int
    state: SlotState
    owner: str | None
    uses: int
    since: float


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment.

    Attributes:
        sandbox_type
        isolation: The level in use; before the first start the one asked for; None: the best, or a kind without levels.
        size
        idle
        starting: Being made ready: started, or reset after a lease.
        leased
        waiting
        dead: Sandboxes that were found dead so far; all were replaced when they were needed.
        closed
        time: When this was (monotonic seconds).
        leases: Longest first.
        waiters: Owners, in the order in which they will be served.
        sandboxes
        error: Why the last start failed, until one succeeds.
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
    """One change of state. `sequence` counts from 1 without gaps; `time` is monotonic seconds."""

    sequence: int
    kind: Change
    sandbox: int | None
    owner: str | None
    time: float
    detail: str = ""


class Lease(Generic[S]):
    """A sandbox in somebody's hands, until `await pool.release(lease)`. Set `turn` to show where its holder is."""

    def __init__(self, pool: Pool[S], id: int, sandbox: S, owner: str) -> None:
        self._pool = pool
        # Why the pool ended it under its holder; "" as long as it has not. `sandbox` is closed then.
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
        """The same as `pool.release(lease)`."""
        await self._pool.release(self)

    def __del__(self) -> None:
        if not getattr(self, "released", True):
            self._pool._on_lease_collected(self)

    def __repr__(self) -> str:
        state = "released" if self.released else f"{time.monotonic() - self.since:.1f} s"
        state = f"revoked: {self.revoked}" if self.revoked else state
        return f"<Lease {self._pool.name} {self.id} of {self.owner}, {state}>"


class _Listener:
    """A callback, and whether it has been complained about."""

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
    except Warning:  # where warnings are errors: they are the listener's or the kind's, not those of who holds a lease
        logging.getLogger(__name__).exception(text)


# --- the pool ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ticket:
    """A waiter's place, and the loop to which its answer must be carried."""

    future: asyncio.Future[int]
    loop: asyncio.AbstractEventLoop


class Pool(Generic[S]):
    """At most `size` sandboxes of one kind, started when they are first wanted and lent in the order of asking.

    Where several rollouts wait on one pool they take turns, one sandbox each, and within a rollout the first to come is
    the first to be served.

    Args:
        sandbox_type: a class whose objects have some of `async start()`, `async run(...)`, `async reset()`,
            `async fork(into)`, `alive`, `async close()`, and `kill()` for the end of the process. Without `reset` a
            sandbox is replaced after each lease; where `reset(task, seed)` takes a task the kind is an environment,
            which the next chain resets for its own; its `cleanup()`, where it has one, is called when it is given back.
        min_idle: keep this many ready beyond what is leased, once the first lease was asked for.
        isolation, memory_mb, processes, cpu_seconds, disk_mb, network, and any other keyword: go to the kind; left out,
            the kind's own default holds (see PythonSandbox). One that the kind does not take is refused here: a limit
            is applied or refused, never only noted.
        max_uses, max_age: close a sandbox and start another after so many leases or seconds, instead of resetting it;
            `max_uses=1` never resets.
        max_lease: seconds that anybody may hold one. Then it is taken from them: the sandbox is closed, what the holder
            asks of it fails with LeaseRevoked, its chain is unscored, and the next in the queue gets another.
        healthy: `healthy(sandbox)`, plain or async, after each reset: one for which it is false, or raises, is
            replaced. A kind's own method `healthy()` is asked where this is not given.
        max_starting: how many may be on their way up at once.
        acquire_timeout: seconds that a lease is waited for when the one who waits says nothing else.
        start_timeout: seconds that a sandbox may take to start, or to be reset. Then it is cancelled, and another takes
            its place; for `close` it is 5 seconds, then `kill`. One that catches its cancellation and goes on is warned
            about and left behind.

    No `async with` is needed. A pool that is rebound, collected, or there when Python exits takes its sandboxes with
    it. It may be used from one event loop after another.
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
        sandboxes = self._sandboxes  # not self: a pool must go when its last name goes, not at the next collection
        self._healthy = healthy
        self._state = PoolState(
            size, min_idle, alive=lambda slot: _is_alive(sandboxes.get(slot)), max_starting=max_starting,
            max_uses=max_uses, max_age=max_age, max_lease=max_lease,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._dropped: deque[int] = deque()  # leases that were collected, not released
        self._leases: weakref.WeakValueDictionary[int, Lease[S]] = weakref.WeakValueDictionary()  # by slot
        self._wakeup_timer: tuple[asyncio.AbstractEventLoop, float] | None = (
            None  # where it rings when a lease is too old
        )
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = itertools.count(1)
        self._tasks: dict[asyncio.Task[None], int] = {}  # what is under way -> its slot
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

    # --- looking

    @property
    def closed(self) -> bool:
        return self._state.closed

    @property
    def isolation(self) -> str | None:
        for sandbox in list(self._sandboxes.values()):
            return cast("str | None", getattr(sandbox, "isolation", None))
        asked = self.options.get("isolation")
        return None if asked is None else str(asked)

    def snapshot(self) -> PoolSnapshot:
        """Counts, leases and sandboxes at this moment. May be called from any thread."""
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

    def _repr_html_(self) -> str:
        s = self.snapshot()
        rows = [(box.id, box.state, box.owner, box.uses, round(s.time - box.since, 1)) for box in s.sandboxes[:100]]
        out = _html.heading(self) + _html.table(("sandbox", "state", "held by", "leases", "seconds so"), rows)
        if s.waiters:
            out += f"<p>waiting: {_html.escape(', '.join(s.waiters[:20]))}</p>"
        return out + (f"<p>the last start failed: {_html.escape(s.error, 1000)}</p>" if s.error else "")

    def subscribe(self, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        """Call `callback` with every change from now on, in order; returns what ends that.

        It is called between the pool's steps, in the thread that made the change, and must be quick. If it raises,
        there is a warning, once, and the pool goes on.
        """
        listener = _Listener(callback)
        lock, listeners = self._lock, self._listeners  # not self: whoever can end it does not keep the pool
        with lock:
            listeners.append(listener)

        def unsubscribe() -> None:
            with lock, contextlib.suppress(ValueError):
                listeners.remove(listener)

        return unsubscribe

    # --- lending

    @contextlib.asynccontextmanager
    async def lease(
        self, owner: str = "somebody", timeout: float | None = None, *, run: str = ""
    ) -> AsyncIterator[S]:  # fmt: skip
        """`async with pool.lease(owner="me") as sandbox`: yours until the block ends. Errors as in `acquire`."""
        lease = await self.acquire(owner, timeout, run=run)
        try:
            yield lease.sandbox
        finally:
            await self.release(lease)

    async def acquire(self, owner: str = "somebody", timeout: float | None = None, *, run: str = "") -> Lease[S]:
        """A sandbox to keep over many calls, until `release`. First come, first served among those of one `run`; runs
        take turns.

        Units:   timeout in seconds; None means the pool's `acquire_timeout`.
        Raises:  PoolTimeout, which says who holds what; PoolClosed; SandboxError or IsolationError if none can start.
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
            # Between the grant and this line the pool was closed, which the next round says, or the sandbox was ended.
        self._schedule_wakeup(loop)
        return lease

    def _schedule_wakeup(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that somebody looks when the first lease is too old. In the loop's own thread."""
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
            # Collected with its event loop, perhaps in the middle of a change of state in this very thread:
            # `_forget_closed_loops` will find the ticket.
            raise
        except BaseException:
            # Also when it was granted just now and never reached us: then it goes to the next in the queue.
            self._tickets.pop(number, None)
            self._dispatch(Cancelled(number))
            if ticket.future.done() and not ticket.future.cancelled():
                ticket.future.exception()  # seen, even if another exception was on its way
            raise
        self._tickets.pop(number, None)
        return slot

    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None:
        """Give a sandbox back: it is reset, or replaced where that fails or `reusable` is False. Twice is once."""
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
        """By hand: have the sandbox of this number reset, or closed. Who is working with it loses it, as with
        `max_lease`, and another takes its place. May be called twice.

        Raises:  SettingsError if there is no such sandbox.
        """
        if sandbox not in self._state.slots:
            have = ", ".join(map(str, self._state.slots)) or "none"
            raise SettingsError(f"{self.name} {sandbox} is not in this pool (there are: {have})")
        self._dispatch(Recycle(sandbox, close))

    async def close(self) -> None:
        """End every sandbox, the leased ones too, and refuse everybody who waits. Nothing is left when it returns."""
        self._dispatch(CloseAll())
        await self._wait_for_tasks(None)
        self._finalizer()  # what another, closed event loop was about to close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- the one place where the state changes

    def _dispatch(self, event: Event, *, may_start: bool = True) -> None:
        """Tell the state what happened, and set going what it says is to be done. Never waits."""
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
        except RuntimeError:  # its loop is closed: nobody will come for it
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
        """Waiters and work that belonged to an event loop which is no more. Nothing else would ever end them."""
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

    # --- input and output, in tasks of their own

    def _spawn(self, slot: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name} {slot}")
        with self._lock:
            self._tasks[task] = slot
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Work that ended by itself has reported. If it was cancelled its event loop is being torn down."""
        with self._lock:
            slot = self._tasks.pop(task, None)
            closing = slot in self._tasks.values()  # it was cancelled for that
        if slot is not None and not closing and (task.cancelled() or task.exception() is not None):
            self._kill_slot(slot)

    async def _wait_for_tasks(self, slot: int | None, uses: int | None = None) -> None:
        """Wait for the work on a slot (None: on all), until it is lent again; cancelling that cancels no work."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                now = self._state.slots.get(slot or 0)
                if uses is not None and now is not None and now.uses != uses:
                    return
                tasks = [t for t, s in self._tasks.items() if slot in (None, s) and t.get_loop() is loop]
            if not tasks:
                return
            # Each ends itself in time, unless the kind does not let itself be cancelled.
            _, stuck = await asyncio.wait(
                tasks, timeout=self.start_timeout + 2 * (_CLOSE_SECONDS + _CANCEL_GRACE_SECONDS)
            )
            await asyncio.sleep(0)  # their done callbacks
            for stuck_slot in self._abandon_tasks(stuck):
                self._kill_slot(stuck_slot)

    def _abandon_tasks(self, stuck: set[asyncio.Task[None]]) -> list[int]:
        """Wait no more for work that went on when it was cancelled; the slots that it was for."""
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
                await self._close_or_kill(sandbox)  # given up meanwhile, it has come up after all
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
                elif inspect.ismethod(getattr(sandbox, "cleanup", None)):  # a tool of that name is none
                    await _call(sandbox, "cleanup")  # it is reset for the task of whoever gets it next
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
        for task in others:  # a start or a reset that is not wanted any more
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
        """Have it close itself, and kill it if it fails or takes long; its error would help nobody."""
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
        """End a sandbox at once, without an event loop or while one is torn down: nothing may be started then."""
        with self._lock:
            sandbox = self._sandboxes.pop(slot, None)
        if sandbox is not None:
            _kill(sandbox)
        self._dispatch(Closed(slot), may_start=False)

    def _on_lease_collected(self, lease: Lease[S]) -> None:
        """A lease was collected and never released. This may be called in the middle of anything in this thread."""
        if lease.id not in self._state.slots:
            return  # the pool was closed, and took it
        self._dropped.append(lease.id)
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._kill_dropped()
        warnings.warn(f"{lease!r} was dropped without a release", ResourceWarning, stacklevel=3)

    def _kill_dropped(self) -> None:
        while self._dropped:
            self._kill_slot(self._dropped.popleft())

    # --- telling

    def _notify(self) -> None:
        """Call the listeners, one event at a time, in order, whoever changed the state; no lock is held meanwhile."""
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
            except BaseException:  # an interrupt, which may arrive anywhere: whoever changes something next goes on
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
    """Call a method that a kind may leave out, and may write without async.

    Raises:  SandboxError for an exit or a cancellation of its own making: they would end more than this sandbox.
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
        return False  # one that cannot say so


def _kill(sandbox: object) -> None:
    """End a sandbox without an event loop: its `kill()`, or its `close()` on a thread with a loop of its own."""
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
    """The pool is gone, or Python is about to be."""
    while sandboxes:
        _kill(sandboxes.popitem()[1])
