"""Run sync functions in threads, so that they do not block the event loop.

Calls that use a leased sandbox run in the sandbox's own thread, one at a time: objects such as an SQLite connection can
only be used in the thread that created them, and an abandoned call could change the state that later calls see. Other
calls run in any idle thread, or in a new one.

Unlike the threads of `concurrent.futures` and anyio, these threads are daemons, because a call that never returns must
not prevent the interpreter from exiting.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from .delivery import deliver
from .limits import Timer

T = TypeVar("T")

# Seconds to wait for running threads at interpreter exit, and the maximum number of such waits.
_STOP_SECONDS, _STOP_ATTEMPTS = 0.25, 240


class CallTimeout(Exception):
    """Raised when a call exceeds its timeout. If the call has begun, its thread continues to run."""

    begun = True


class _Call:
    """A function call whose `future` receives the pair (return value, exception) as its result.

    The exception is not set on the future, because futures reject StopIteration, and SystemExit would stop the loop.
    """

    __slots__ = ("begun", "context", "ended", "future", "pooled", "work", "workers")

    def __init__(self, work: Callable[[], Any], workers: tuple[Worker, ...]) -> None:
        self.work = work
        self.pooled = not workers  # True if the worker becomes idle after this call
        self.workers = workers or (_idle_worker(),)
        for worker in self.workers:
            worker._unfinished.add(self)
        self.begun = False
        self.ended = threading.Event()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        self.context = contextvars.copy_context()
        self.context.run(_workers.set, ())  # calls that `work` makes must not wait for it

    def expire(self) -> None:
        expired = CallTimeout()
        expired.begun = self.begun
        deliver((self.future, expired))

    def run(self) -> None:
        """Run the call, unless it was cancelled or has timed out while it waited."""
        outcome: tuple[Any, BaseException | None] = None, None
        try:
            if not self.future.done():
                self.begun = True
                outcome = self.context.run(self.work), None
        except BaseException as error:
            outcome = None, error
        for worker in self.workers:
            worker._unfinished.discard(self)
        if self.pooled:
            _state.idle.extend(self.workers)
        self.ended.set()
        deliver((self.future, outcome))


class Worker:
    """Thread that runs calls in order, from the first call until the worker is garbage-collected."""

    def __init__(self) -> None:
        self._discarded = False
        self._unfinished: set[_Call] = set()
        self._queue: SimpleQueue[Callable[[], object] | None] | None = None

    @property
    def busy(self) -> bool:
        """True if a call is running or waiting."""
        return bool(self._unfinished)

    @property
    def discarded(self) -> bool:
        """True if the sandbox must be replaced when it is released, because a call was abandoned or has failed."""
        return self._discarded or self.busy

    def discard(self) -> None:
        self._discarded = True

    def put(self, job: Callable[[], object]) -> None:
        """Run `job()` after all earlier calls, without waiting for it."""
        if self._queue is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None).atexit = False
            _state.workers.add(self)
            # Register `_stop_threads` after the functions of other modules, so that it runs before them.
            if not _state.threads:
                atexit.unregister(_stop_threads)
                atexit.register(_stop_threads)
            name = f"agentfly-call-{next(_count)}"
            threading.Thread(target=_run_jobs, args=(self._queue,), name=name, daemon=True).start()
        self._queue.put(job)


_workers: contextvars.ContextVar[tuple[Worker, ...]] = contextvars.ContextVar("workers", default=())


def current() -> tuple[Worker, ...]:
    """Return the workers of the sandboxes that this task uses."""
    return _workers.get()


@contextmanager
def using(*workers: Worker) -> Iterator[None]:
    """Run sync calls of this task in the thread of the first worker, or in any thread if no worker is given."""
    before = _workers.get()
    _workers.set(tuple(dict.fromkeys(workers)))
    try:
        yield
    finally:
        _workers.set(before)


def discard() -> None:
    """Replace the sandboxes that this task uses when they are released, instead of leasing them to other chains."""
    for worker in current():
        worker.discard()


class _State:
    """Workers and their threads."""

    def __init__(self) -> None:
        # Workers that run no call, and are reused because starting a thread is slower than most calls.
        self.idle: list[Worker] = []
        self.threads: set[threading.Thread] = set()
        self.workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self.shutting_down = False


_state = _State()
_count = itertools.count(1)


def _after_fork() -> None:
    """Reset the state in a forked child process, which has no copies of the threads."""
    global _state
    for worker in _state.workers:
        worker.__init__()  # type: ignore[misc]  # the next call starts a thread
    _state = _State()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_after_fork)


async def run_off_loop(work: Callable[[], T], timeout: float | None) -> tuple[T | None, BaseException | None]:
    """Run `work()` on another thread (see `using`). Return (value, None), or (None, exception) if `work` raises.

    Raises CallTimeout after `timeout` seconds (None for no limit). After a timeout or a cancellation of the caller, the
    thread continues to run.
    """
    call = _Call(work, _workers.get())
    limit = None if timeout is None else Timer(timeout, call.expire)
    for worker in call.workers[1:]:
        worker.put(call.ended.wait)
    call.workers[0].put(call.run)
    try:
        return await call.future
    finally:
        if limit is not None:
            limit.cancel()


async def call(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a function on another thread (see `using`). Return the result, or raise the function's exception."""
    value, error = await run_off_loop(functools.partial(function, *args, **options), None)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _idle_worker() -> Worker:
    try:
        return _state.idle.pop()
    except IndexError:
        return Worker()


def _run_jobs(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    thread = threading.current_thread()
    _state.threads.add(thread)
    try:
        while (job := queue.get()) is not None and not _state.shutting_down:
            job()
            del job  # release its objects while the thread waits
    finally:
        _state.threads.discard(thread)


def _stop_threads() -> None:
    """Stop all threads at interpreter exit. A thread that returns from C++ code after the exit aborts the process."""
    _state.shutting_down = True
    for worker in list(_state.workers):
        worker.put(sys.exit)
    left = [thread for thread in list(_state.threads) if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    join_busy(left)


def join_busy(threads: Iterable[threading.Thread]) -> None:
    """Wait at interpreter exit until the given threads have ended or no longer use CPU time.

    On a busy machine, the last step of a computation may take a long time.
    """
    left = list(threads)
    for _ in range(_STOP_ATTEMPTS):
        spent, until = {thread: _cpu_seconds(thread) for thread in left}, time.monotonic() + _STOP_SECONDS
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread for thread in left if thread.is_alive()]
        if all(_cpu_seconds(thread) - spent[thread] < 0.02 * _STOP_SECONDS for thread in left):
            return  # the remaining threads are only waiting


def _cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time of a thread or, where the system does not report it, of this process."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except OSError:
        return time.process_time()
