"""`PoolCore`, the part of a pool that answers requests and starts, resets and closes sandboxes.

Every state change is made by a synchronous method of `PoolState` (state.py) under a lock that is never held while user
code runs. `_dispatch` then carries out the effects of the change. The design follows the connection pool of httpcore.

Each start, reset or close of a sandbox runs in its own task, which continues even if the waiting caller is cancelled.
Requests and tasks belong to the event loop that created them. After this loop has been closed, the next `acquire`
removes them. If a lease is garbage-collected in a thread without an event loop, the event loop of a waiting request is
asked to start a new sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from .._async.delivery import deliver, running_loop
from .._async.listeners import Listeners
from .._async.threads import Worker
from ..errors import IsolationError, PoolClosed, PoolTimeout, SandboxError, SettingsError
from .calls import call, call_within, create, end, kill_all
from .environment import is_environment
from .lease import Lease
from .records import PoolEvent
from .state import Effects, PoolState, Slot

S = TypeVar("S")
_CLOSE_SECONDS = 5.0  # time limit for `close` of a sandbox, after which it is killed


class PoolCore(Generic[S]):
    """Base class of `Pool` that manages the sandboxes and their states."""

    options: dict[str, Any]
    start_timeout: float
    _healthy: Callable[[S], object] | None

    def __init__(self, sandbox_type: type[S], state: PoolState) -> None:
        self.sandbox_type = sandbox_type
        self.name = sandbox_type.__name__
        self._state = state
        self._listeners: Listeners[PoolEvent] = Listeners(f"the pool of {self.name}")
        self._lock = threading.Lock()
        # Slots whose lease was garbage-collected, and whose sandboxes are killed as soon as `_lock` is free.
        self._dropped: deque[Slot] = deque()
        self._tasks: dict[Slot, asyncio.Task[None]] = {}  # starts, resets and closes in progress
        self._wakeup_loop: asyncio.AbstractEventLoop | None = None  # runs the timer for the next lease expiry
        self._events: deque[PoolEvent] = deque()  # events not yet passed to the listeners
        self._notifying = threading.Lock()
        self._finalizer = weakref.finalize(self, kill_all, state.slots)

    def _dispatch(self, event: Callable[..., None], *args: Any, may_start: bool = True) -> None:
        """Apply an event to the state and start carrying out its effects, without waiting for them."""
        may_start = may_start and running_loop() is not None
        with self._lock:
            effects = self._state.apply(event, *args, now=time.monotonic(), may_start=may_start)
            if self._listeners:
                self._events.extend(effects.events)
            for slot, reason in effects.revoked:
                lease = None if slot.lease is None else slot.lease()
                if lease is not None and not lease.released:
                    lease.revoked, lease.released = reason, True
        self._answer_requests(effects)
        for slot in effects.start:
            self._spawn(slot, self._start(slot))
        for slot in (*effects.reset, *effects.close):
            if not may_start:
                self._kill_slot(slot)
            elif slot in effects.reset:
                self._spawn(slot, self._reset(slot))
            else:
                self._spawn(slot, self._close(slot, self._tasks.get(slot)))
        if not may_start:
            # Ask the event loop of a waiting request to start the sandboxes that this thread cannot start.
            for future in list(self._state.waiters):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    future.get_loop().call_soon_threadsafe(self._dispatch, self._state.wakeup)
                    break
        self._notify()
        self._kill_dropped()

    def _answer_requests(self, effects: Effects) -> None:
        answers: list[tuple[asyncio.Future[Slot], Slot | Exception]] = [*effects.grant]
        answers += [(future, _acquire_error(self.name, error)) for future, error in effects.refuse]
        for future, answer in answers:
            if not deliver((future, answer)):  # the future's event loop is closed
                self._dispatch(self._state.cancelled, future)

    def _schedule_wakeup(self) -> None:
        """Set a timer for the next lease expiry. One timer suffices, as all leases have the same duration limit."""
        loop = asyncio.get_running_loop()
        with self._lock:
            due = self._state.next_expiry()
            if due == math.inf or (self._wakeup_loop is not None and not self._wakeup_loop.is_closed()):
                return
            self._wakeup_loop = loop
        reference = weakref.ref(self)

        def wake_up() -> None:
            pool = reference()
            if pool is not None:
                pool._wakeup_loop = None
                pool._dispatch(pool._state.wakeup)
                pool._schedule_wakeup()

        loop.call_later(max(0.0, due - time.monotonic()) + 0.01, wake_up)

    def _forget_closed_loops(self) -> bool:
        """Cancel requests of closed event loops, and kill sandboxes whose start, reset or close they interrupted.

        Return True if sandboxes were leased in event loops that have been closed since the last call.
        """
        with self._lock:
            slots = list(self._state.slots.values())
            futures = [*self._state.waiters, *(slot.ticket for slot in slots if slot.ticket is not None)]
            abandoned = [slot for slot in slots if slot.loop is not None and slot.loop.is_closed()]
            for slot in abandoned:
                slot.loop = None
        for future in futures:
            if future.get_loop().is_closed():
                self._dispatch(self._state.cancelled, future)
        for slot, task in list(self._tasks.items()):
            if task.get_loop().is_closed():
                self._tasks.pop(slot, None)
                self._kill_slot(slot)
        return bool(abandoned)

    def _on_turn_changed(self, lease: Lease[S]) -> None:
        slot = self._state.slots.get(lease.id)
        if slot is not None:
            self._dispatch(self._state.turn_changed, slot, lease.turn)

    def _on_lease_collected(self, lease: Lease[S]) -> None:
        """Handle a lease that was garbage-collected without being released. May be called anytime, in any thread."""
        slot = self._state.slots.get(lease.id)
        if slot is None:
            return  # already removed because the pool was closed
        self._dropped.append(slot)
        if not self._lock.locked():  # otherwise, the thread that holds the lock will kill the sandbox
            self._kill_dropped()
        warnings.warn(f"{lease!r} was garbage-collected without a release", ResourceWarning, stacklevel=3)

    def _kill_dropped(self) -> None:
        while self._dropped:
            self._kill_slot(self._dropped.popleft())

    def _notify(self) -> None:
        """Pass queued events to the listeners in order, in one thread at a time and without holding `_lock`."""
        while self._events and self._notifying.acquire(blocking=False):
            try:
                while self._events:
                    self._listeners.notify(self._events.popleft())
            finally:
                self._notifying.release()

    # --- starting, resetting and closing sandboxes, in separate tasks

    def _spawn(self, slot: Slot, work: Coroutine[Any, Any, None]) -> None:
        """Start, reset or close a sandbox in a new task, which replaces any previous task in `_tasks`."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name} {slot.id}")
        self._tasks[slot] = task

        def done(task: asyncio.Task[None]) -> None:
            failed = task.cancelled() or task.exception() is not None
            if self._tasks.get(slot) is task:
                del self._tasks[slot]
                if failed:  # for example, cancelled because the event loop is shutting down
                    self._kill_slot(slot)

        task.add_done_callback(done)

    async def _wait_for_task(self, slot: Slot) -> bool:
        """Wait for the task of a slot, which continues if the wait is cancelled. Return False if there is no task."""
        task = self._tasks.get(slot)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            return False
        await asyncio.wait([task])
        return True

    async def _start(self, slot: Slot) -> None:
        def make() -> None:
            slot.sandbox = self.sandbox_type(**self.options)

        async def start() -> None:
            await create(slot.worker, self.sandbox_type, make)
            sandbox = slot.sandbox
            await call(slot.worker, getattr(sandbox, "start", None))
            if self._state.slots.get(slot.id) is not slot:  # the sandbox was abandoned while it was starting
                await self._close_or_kill(sandbox, slot.worker)

        try:
            await call_within(self.start_timeout, f"the start of a {self.name}", start)
        except (Exception, SystemExit) as error:
            permanent = isinstance(error, IsolationError | SettingsError | TypeError)
            self._dispatch(self._state.start_failed, slot, error, permanent)
        else:
            self._dispatch(self._state.started, slot)

    async def _reset(self, slot: Slot) -> None:
        failure = ""
        try:
            if not await call_within(self.start_timeout, f"the reset of a {self.name}", self._reset_sandbox, slot):
                failure = "its health check failed"
        except NotImplementedError:
            failure = f"a {self.name} is replaced instead of reset"
        except Exception as error:
            failure = f"its reset failed: {type(error).__name__}: {error}"
        if failure:
            self._dispatch(self._state.died, slot, failure)
        else:
            self._dispatch(self._state.was_reset, slot)

    async def _reset_sandbox(self, slot: Slot) -> bool:
        """Reset a sandbox or clean up an environment. Return True if it is healthy."""
        sandbox: Any = slot.sandbox
        worker = slot.worker
        if not is_environment(self.sandbox_type):
            await call(worker, sandbox.reset)
        elif inspect.ismethod(getattr(sandbox, "cleanup", None)):  # a method, not a tool named "cleanup"
            await call(worker, sandbox.cleanup)
        return self._healthy is None or bool(await call(worker, self._healthy, sandbox))

    async def _close(self, slot: Slot, previous: asyncio.Task[None] | None) -> None:
        """Close a sandbox in any state, also during its start or reset, and remove its slot."""
        if previous is not None and not previous.done() and previous.get_loop() is asyncio.get_running_loop():
            previous.cancel()  # a start or reset that is no longer needed
            await asyncio.wait([previous])
        if slot.worker.busy:  # an abandoned call is still running, so replace the sandbox at once
            end(slot)
        elif slot.sandbox is not None:
            await self._close_or_kill(slot.sandbox, slot.worker)
            slot.sandbox = None
        self._dispatch(self._state.removed, slot)

    async def _close_or_kill(self, sandbox: S, worker: Worker) -> None:
        """Close a sandbox, or kill it if `close` fails or exceeds its time limit. Errors are ignored."""
        close = getattr(sandbox, "close", None)
        try:
            await call_within(_CLOSE_SECONDS, f"the close of a {self.name}", call, worker, close)
        except Exception:
            with contextlib.suppress(Exception):
                sandbox.kill()  # type: ignore[attr-defined]

    def _kill_slot(self, slot: Slot) -> None:
        """Kill a sandbox immediately. No event loop is needed, so this also works while one is shutting down."""
        try:
            end(slot)
        finally:  # SIGINT may raise KeyboardInterrupt in `end`
            self._dispatch(self._state.removed, slot, may_start=False)


def _acquire_error(name: str, error: BaseException | None) -> Exception:
    if error is None:
        return PoolClosed(f"the pool of {name} is closed; create a new one")
    if isinstance(error, PoolTimeout):
        return PoolTimeout(f"no {name} is free")
    error_type = IsolationError if isinstance(error, IsolationError) else SandboxError
    refusal = error_type(f"no {name} could be started" + (f": {error}" if str(error) else ""))
    refusal.__cause__ = error
    return refusal
