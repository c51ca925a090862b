"""`Pool`: sandboxes of one class, lent to chains.

Every change of state is made by one synchronous method (state.py), under a lock and without waiting; the pool then
carries out its effects. The design follows httpcore's connection pool. The pool is independent of chains, tools and
rewards. A sandbox class is any class with some of the methods `start`, `run`, `reset`, `fork`, `alive` and `close`.

All mutable state, and what makes it difficult:

`_state`       which sandboxes exist, who holds them and who waits. Accessed only under `_lock`, which is never held
               while user code runs or anything is awaited. The garbage collector, however, may call
               `_on_lease_collected` while its thread holds the lock; the lease then goes to `_dropped`.
`_sandboxes`   slot -> sandbox object, from its construction until it was closed or killed.
`_leases`      slot -> lease, weakly, to mark it when it is revoked. A lease that is garbage-collected without a
               release was dropped; its sandbox is killed.
`_requests`    ticket -> future that the requester awaits. A request that is cancelled may have been granted just
               before; `cancelled` then passes the sandbox on.
`_tasks`       slot -> the task that starts, resets or closes it. Cancelling the caller that waits for it does not
               cancel it. Closing a slot cancels its start or reset first. Each method of a sandbox has a time limit,
               after which it is cancelled; if it ignores even that, it is abandoned, so every task ends in time.
`_events`      events that have not been passed to the listeners yet, which happens in order and without the lock.

Requests and tasks belong to the event loop that made them, and event loops may end: sandboxes of cancelled tasks are
killed without a loop, and requests and tasks of closed loops are removed by the next `acquire`. Without a running loop
(a lease collected in another thread) nothing can be started, so a loop of a waiting request is asked to do so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from .._async.delivery import deliver, running_loop
from .._async.interrupts import keep_interruptible
from .._display import Displayable
from ..errors import IsolationError, PoolClosed, PoolTimeout, SandboxError, SettingsError, suggest_keyword
from .base import BasePool, Lease
from .calls import call, call_within, is_alive, kill, kill_all, maybe_await
from .environment import is_environment
from .records import PoolEvent, PoolSnapshot, SandboxInfo
from .state import Effects, PoolState

S = TypeVar("S")
_CLOSE_SECONDS = 5.0  # time limit of a sandbox's `close`, after which it is killed


class Pool(Displayable, BasePool[S]):
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
        options: passed to `sandbox_type`, for example `isolation=`, `memory_mb=`, `processes=`, `cpu_seconds=`,
            `disk_mb=` and `network=` of a PythonSandbox. A keyword that it does not accept raises SettingsError, so
            that no limit is silently ignored.

    Raises:
        SettingsError: if a setting is invalid or not accepted by `sandbox_type`.
    """

    def __init__(
        self,
        sandbox_type: type[S],
        size: int = 8,
        *,
        min_idle: int = 0,
        max_uses: int | None = None,
        max_age: float | None = None,
        max_lease: float = 3600.0,
        healthy: Callable[[S], object] | None = None,
        max_starting: int | None = 8,
        acquire_timeout: float = 120.0,
        start_timeout: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(sandbox_type, acquire_timeout)
        for name in ("alive", "kill"):
            if inspect.iscoroutinefunction(getattr(sandbox_type, name, None)):
                raise SettingsError(f"{self.name}.{name} must not be async, because the pool calls it without waiting")
        _check_options(sandbox_type, options)
        if size < 1:
            raise SettingsError(f"size must be at least 1, got {size}")
        if not 0 <= min_idle <= size:
            raise SettingsError(f"min_idle must be between 0 and size={size}, got {min_idle}")
        for name, value in (("max_uses", max_uses), ("max_age", max_age), ("max_starting", max_starting)):
            if value is not None and value <= 0:
                raise SettingsError(f"{name} must be positive, or None for no limit, got {value!r}")
        if not 0 < max_lease < float("inf"):
            raise SettingsError(f"max_lease must be a positive, finite number of seconds, got {max_lease!r}")
        self.size = size
        self.min_idle = min_idle
        self.max_lease = max_lease
        self.start_timeout = start_timeout
        self.options = options
        self._healthy = healthy
        self._sandboxes: dict[int, S] = {}
        sandboxes = self._sandboxes  # without a reference to self: no cycle, so an unused pool is freed immediately
        self._state = PoolState(
            size, min_idle, alive=lambda slot: is_alive(sandboxes.get(slot)), max_starting=max_starting,
            max_uses=max_uses, max_age=max_age, max_lease=max_lease,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._leases: weakref.WeakValueDictionary[int, Lease[S]] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        self._requests: dict[int, asyncio.Future[int]] = {}
        self._next_ticket = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wakeup_loop: asyncio.AbstractEventLoop | None = None  # with a timer for the next lease that expires
        self._events: deque[PoolEvent] = deque()
        self._notifying = threading.Lock()
        self._finalizer = weakref.finalize(self, kill_all, sandboxes)
        self._register()

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
        """Return the current sandboxes and requests. Can be called from any thread."""
        with self._lock:
            state = self._state
            return PoolSnapshot(
                sandbox_type=self.name,
                isolation=self.isolation,
                size=self.size,
                dead=state.dead,
                closed=state.closed,
                time=time.monotonic(),
                waiters=tuple(state.waiters[ticket].owner for ticket in state.order()),
                sandboxes=tuple(
                    SandboxInfo(s.id, s.state, s.owner, s.uses, s.since, s.turn) for s in state.slots.values()
                ),
                error=None if state.last_error is None else str(state.last_error),
            )

    def __repr__(self) -> str:
        s = self.snapshot()
        if s.closed:
            return f"<Pool {s.sandbox_type} closed, size {s.size}>"
        counts = f"{s.leased} leased, {s.idle} idle, {s.starting} starting, {s.waiting} waiting"
        return f"<Pool {s.sandbox_type} {counts}, size {s.size}>"

    # --- leasing

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
        deadline = time.monotonic() + timeout
        self._forget_closed_loops()
        while True:
            slot = await self._request(owner, run, deadline, timeout)
            with self._lock:
                granted = self._state.slots.get(slot)
                if granted is not None and granted.state == "leased" and slot in self._sandboxes:
                    lease = self._leases[slot] = Lease(self, slot, self._sandboxes[slot], owner)
                    break
            # After the grant the pool was closed or the sandbox died. Request again; a closed pool raises PoolClosed.
        self._schedule_wakeup()
        return lease

    async def _request(self, owner: str, run: str, deadline: float, timeout: float) -> int:
        """Request a sandbox and return the slot that was granted."""
        ticket = next(self._next_ticket)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests[ticket] = future
        self._dispatch(self._state.requested, ticket, owner, run)
        try:
            if not future.done():
                with keep_interruptible():
                    await asyncio.wait([future], timeout=max(0.0, deadline - time.monotonic()))
            if not future.done():
                raise PoolTimeout(self._timeout_message(timeout))
            slot = future.result()
        except GeneratorExit:
            # Garbage-collected with its event loop, perhaps while this thread holds the lock. Do not dispatch;
            # `_forget_closed_loops` will remove the request.
            raise
        except BaseException:
            self._requests.pop(ticket, None)
            self._dispatch(self._state.cancelled, ticket)
            if future.done() and not future.cancelled():
                future.exception()  # mark as retrieved
            raise
        self._requests.pop(ticket, None)
        return slot

    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None:
        """Release a lease. The sandbox is reset, or replaced if resetting fails. Idempotent.

        Args:
            lease: a lease of this pool.
            reusable: False closes the sandbox instead of resetting it.

        Raises:
            SettingsError: if the lease belongs to another pool.
        """
        if not self._begin_release(lease):
            return
        if reusable and not is_alive(lease.sandbox):
            self._dispatch(self._state.died, lease.id, "found dead when it came back")
        else:
            resettable = callable(getattr(lease.sandbox, "reset", None))
            self._dispatch(self._state.released, lease.id, reusable and resettable)
        slot = self._state.slots.get(lease.id)
        uses = 0 if slot is None else slot.uses
        # Wait until the sandbox was reset or closed, unless it has been lent again.
        while slot is not None and slot.uses == uses and await self._wait_for_task(lease.id):
            slot = self._state.slots.get(lease.id)

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
            raise SettingsError(f"sandbox must be the number of a {self.name} of this pool ({have}), got {sandbox}")
        self._dispatch(self._state.recycle, sandbox, close)

    async def close(self) -> None:
        """Close the pool and all its sandboxes, including leased ones, and wait until they are closed.

        Waiting requests raise PoolClosed.
        """
        self._dispatch(self._state.close)
        for slot in list(self._tasks):
            await self._wait_for_task(slot)
        self._finalizer()  # kill sandboxes whose `close` was scheduled on an event loop that is closed now

    # --- state changes

    def _dispatch(self, event: Callable[..., None], *args: Any, may_start: bool = True) -> None:
        """Apply an event to the state and start carrying out its effects. All state changes go through here.

        Never waits.
        """
        may_start = may_start and running_loop() is not None
        with self._lock:
            effects = self._state.apply(event, *args, now=time.monotonic(), may_start=may_start)
            if self._listeners:
                self._events.extend(effects.events)
            for slot, reason in effects.revoked.items():
                lease = self._leases.pop(slot, None)
                if lease is not None:
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
        if not may_start and self._state.waiters:
            self._wake_a_loop()
        self._notify()
        self._kill_dropped()

    def _answer_requests(self, effects: Effects) -> None:
        answers: list[tuple[int, int | Exception]] = [*effects.grant]
        answers += [(ticket, self._acquire_error(error)) for ticket, error in effects.refuse]
        for ticket, answer in answers:
            future = self._requests.get(ticket)
            if future is not None and not deliver(future, answer):  # its event loop is closed
                self._requests.pop(ticket, None)
                self._dispatch(self._state.cancelled, ticket)

    def _acquire_error(self, error: BaseException | None) -> Exception:
        if error is None:
            return PoolClosed(f"the pool of {self.name} is closed; create a new one")
        error_type = IsolationError if isinstance(error, IsolationError) else SandboxError
        refusal = error_type(f"no {self.name} could be started" + (f": {error}" if str(error) else ""))
        refusal.__cause__ = error
        return refusal

    def _wake_a_loop(self) -> None:
        """Ask an event loop with a waiting request to start the sandboxes that this thread could not."""
        for future in list(self._requests.values()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(self._dispatch, self._state.wakeup)
                return

    def _schedule_wakeup(self) -> None:
        """Set a timer for the next lease that expires, unless there is one. All leases have the same duration."""
        loop = asyncio.get_running_loop()
        with self._lock:
            due = self._state.next_expiry
            if due == float("inf") or (self._wakeup_loop is not None and not self._wakeup_loop.is_closed()):
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

    def _forget_closed_loops(self) -> None:
        """Cancel requests and kill sandboxes that wait for a closed event loop; nothing else would end them."""
        for ticket, future in list(self._requests.items()):
            if future.get_loop().is_closed():
                self._requests.pop(ticket, None)
                self._dispatch(self._state.cancelled, ticket)
        for slot, task in list(self._tasks.items()):
            if task.get_loop().is_closed():
                self._tasks.pop(slot, None)
                self._kill_slot(slot)

    def _on_turn_changed(self, lease: Lease[S]) -> None:
        self._dispatch(self._state.turn_changed, lease.id, lease.turn)

    def _on_lease_collected(self, lease: Lease[S]) -> None:
        if lease.id not in self._state.slots:
            return  # the pool was closed and has removed it
        self._dropped.append(lease.id)
        if not self._lock.locked():  # otherwise this thread may hold it, and kills the sandbox after releasing it
            self._kill_dropped()
        warnings.warn(f"{lease!r} was dropped without a release", ResourceWarning, stacklevel=3)

    def _kill_dropped(self) -> None:
        while self._dropped:
            self._kill_slot(self._dropped.popleft())

    def _notify(self) -> None:
        """Pass queued events to the listeners, in order: only one thread at a time, which takes those of all threads.

        A listener may use the pool, so events may be added meanwhile.
        """
        while self._events and self._notifying.acquire(blocking=False):
            try:
                while self._events:
                    self._listeners.notify(self._events.popleft())
            finally:
                self._notifying.release()

    # --- starting, resetting and closing sandboxes, in separate tasks

    def _spawn(self, slot: int, work: Coroutine[Any, Any, None]) -> None:
        """Run the next step of a slot in a task, in place of the previous one, if that has not ended."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name} {slot}")
        self._tasks[slot] = task

        def done(task: asyncio.Task[None]) -> None:
            failed = task.cancelled() or task.exception() is not None
            if self._tasks.get(slot) is task:
                del self._tasks[slot]
                if failed:  # cancelled by the shutdown of its event loop
                    self._kill_slot(slot)

        task.add_done_callback(done)

    async def _wait_for_task(self, slot: int) -> bool:
        """Wait for the task of a slot, without cancelling it if the wait is cancelled. Return False if it has none."""
        task = self._tasks.get(slot)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            return False
        await asyncio.wait([task])
        return True

    async def _start(self, slot: int) -> None:
        try:
            sandbox = self._sandboxes[slot] = self.sandbox_type(**self.options)
            await call_within(self.start_timeout, f"the start of a {self.name}", self._start_sandbox, slot, sandbox)
        except (Exception, SystemExit) as error:
            permanent = isinstance(error, IsolationError | SettingsError | TypeError)
            self._dispatch(self._state.start_failed, slot, error, permanent)
        else:
            self._dispatch(self._state.started, slot)

    async def _start_sandbox(self, slot: int, sandbox: S) -> None:
        await call(sandbox, "start")
        if self._sandboxes.get(slot) is not sandbox:  # it started after it had been abandoned
            await self._close_or_kill(sandbox)

    async def _reset(self, slot: int) -> None:
        failure = ""
        try:
            if not await call_within(
                self.start_timeout, f"the reset of a {self.name}", self._reset_sandbox, self._sandboxes[slot]
            ):
                failure = "its health check failed"
        except NotImplementedError:
            failure = "this kind is not reset but replaced"
        except Exception as error:
            failure = f"its reset failed: {type(error).__name__}: {error}"
        if failure:
            self._dispatch(self._state.died, slot, failure)
        else:
            self._dispatch(self._state.was_reset, slot)

    async def _reset_sandbox(self, sandbox: S) -> bool:
        """Reset a sandbox and return whether it is healthy. The next holder resets an environment for its task."""
        if not is_environment(self.sandbox_type):
            await call(sandbox, "reset")
        elif inspect.ismethod(getattr(sandbox, "cleanup", None)):  # a method, not a tool of that name
            await call(sandbox, "cleanup")
        if self._healthy is not None:
            return bool(await maybe_await(self._healthy(sandbox)))
        return not callable(getattr(sandbox, "healthy", None)) or bool(await call(sandbox, "healthy"))

    async def _close(self, slot: int, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done() and previous.get_loop() is asyncio.get_running_loop():
            previous.cancel()  # a start or reset that is no longer needed
            await asyncio.wait([previous])
        sandbox = self._sandboxes.get(slot)
        if sandbox is not None:
            await self._close_or_kill(sandbox)
            self._sandboxes.pop(slot, None)
        self._dispatch(self._state.removed, slot)

    async def _close_or_kill(self, sandbox: S) -> None:
        """Close a sandbox, and kill it if `close` fails or exceeds its time limit. Errors are ignored."""
        try:
            await call_within(_CLOSE_SECONDS, f"the close of a {self.name}", call, sandbox, "close")
        except Exception:
            with contextlib.suppress(Exception):
                await call(sandbox, "kill")

    def _kill_slot(self, slot: int) -> None:
        """Kill a sandbox immediately, for use without an event loop or during its shutdown. Starts no task."""
        sandbox = self._sandboxes.pop(slot, None)
        if sandbox is not None:
            kill(sandbox)
        self._dispatch(self._state.removed, slot, may_start=False)

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


def _check_options(sandbox_type: Any, options: dict[str, Any]) -> None:
    """Reject options that the sandbox class does not take, before a sandbox is started."""
    try:
        signature = inspect.signature(sandbox_type)
    except ValueError:  # a class without a signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        names = ", ".join(f"{name}=" for name in signature.parameters) or "no arguments"
        wrong = next((name for name in options if name not in signature.parameters), "")
        hint = suggest_keyword(wrong, [*inspect.signature(Pool).parameters, *signature.parameters])
        raise SettingsError(f"{sandbox_type.__name__}: {error}; it takes {names}{hint}") from None
