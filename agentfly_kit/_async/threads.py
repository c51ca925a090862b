"""Run sync functions in threads, so that they do not block the event loop.

Calls wait in one queue. As long as they are fast, a single thread runs them sequentially, because a thread per call
costs more than most calls, and many threads would compete for the GIL. When no call has been taken from the queue for
`_STALL_SECONDS`, each waiting call gets its own thread.

Calls that use a leased sandbox run in the sandbox's own thread, one after another: objects such as an SQLite connection
can only be used in the thread that created them, and a call that was given up could change what later calls see.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .delivery import deliver
from .limits import Timer

T = TypeVar("T")

# Time in seconds without progress after which each waiting call gets its own thread.
_STALL_SECONDS = 0.002
# Time in seconds after which an idle thread exits.
_IDLE_SECONDS = 2.0
# At interpreter exit, running threads are awaited for this time in seconds, at most this many times.
_STOP_SECONDS, _STOP_ATTEMPTS = 0.25, 240


class CallTimeout(Exception):
    """Raised when a call exceeds its timeout. If it has begun, its thread continues to run."""

    begun = True


class _Call:
    """A function call whose `future` receives the pair (return value, exception) as its result.

    The exception is not set on the future, because futures reject StopIteration, and SystemExit would stop the loop.
    """

    __slots__ = ("begun", "context", "ended", "future", "work", "workers")

    def __init__(self, work: Callable[[], Any], workers: tuple[Worker, ...]) -> None:
        self.work = work
        self.workers = workers
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
        self.ended.set()
        deliver((self.future, outcome))


class Worker:
    """Thread that runs the sync calls of one sandbox in order. It starts with the first call."""

    def __init__(self) -> None:
        self._discarded = False
        self._unfinished: set[_Call] = set()
        self._queue: SimpleQueue[Callable[[], object] | None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is running or waiting."""
        return bool(self._unfinished)

    @property
    def discarded(self) -> bool:
        """Whether the sandbox must be replaced when it is released, because a call was given up or has failed."""
        return self._discarded or self.busy

    def discard(self) -> None:
        self._discarded = True

    def put(self, job: Callable[[], object]) -> None:
        """Run `job()` after all earlier calls, without waiting for it."""
        if self._queue is None:
            self._queue = SimpleQueue()
            weakref.finalize(self, self._queue.put, None).atexit = False
            _state.workers.add(self)
            _start_thread("agentfly-sandbox", _run_worker, self._queue)
        self._queue.put(job)


_workers: contextvars.ContextVar[tuple[Worker, ...]] = contextvars.ContextVar("workers", default=())


def current() -> tuple[Worker, ...]:
    """Return the workers of the sandboxes that this task uses."""
    return _workers.get()


@contextmanager
def using(*workers: Worker) -> Iterator[None]:
    """Run sync calls of this task in the thread of the first worker, and with none, in any thread."""
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
    """Waiting calls and the threads that run them. Access to all attributes except `threads` requires `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[_Call] = deque()
        # Number of threads that are running a call or about to take one from the queue.
        self.active = 0
        # Time at which a call was last taken from the queue; infinity if a thread is about to take a call.
        self.taken_at = 0.0
        # Event loops in which `_check_progress` is scheduled.
        self.watched_by: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        # Queues in which idle threads wait for work. Threads are reused because starting one is slower than most calls.
        self.idle: list[SimpleQueue[Callable[[], None]]] = []
        self.threads: set[threading.Thread] = set()
        self.workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self.shutting_down = False

    @property
    def is_stalled(self) -> bool:
        return not self.active or time.perf_counter() - self.taken_at > _STALL_SECONDS


_state = _State()
_count = itertools.count(1)


def _after_fork() -> None:
    """Reset the state in a forked child process, which has no copies of the threads and may inherit a held lock."""
    global _state
    for worker in _state.workers:
        worker.__init__()  # type: ignore[misc]  # the next call starts a thread
    _state = _State()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_after_fork)


async def run_off_loop(work: Callable[[], T], timeout: float | None) -> tuple[T | None, BaseException | None]:
    """Run `work()` on another thread, see `using`. Return (value, None), or (None, exception) if it raises.

    Raises CallTimeout after `timeout` seconds (None for no limit). After a timeout or a cancellation of the caller, the
    thread continues to run.
    """
    loop = asyncio.get_running_loop()
    call = _Call(work, _workers.get())
    limit = None if timeout is None else Timer(timeout, call.expire)
    if call.workers:
        for worker in call.workers:
            worker._unfinished.add(call)
        for worker in call.workers[1:]:
            worker.put(call.ended.wait)
        call.workers[0].put(call.run)
    else:
        _enqueue(call, loop)
    try:
        return await call.future
    finally:
        if limit is not None:
            limit.cancel()


async def call(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a function on another thread, see `using`. Return its result, or raise its exception."""
    value, error = await run_off_loop(functools.partial(function, *args, **options), None)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _enqueue(call: _Call, loop: asyncio.AbstractEventLoop) -> None:
    """Add a call to the queue of calls that may run in any thread."""
    with _state.lock:
        _state.waiting.append(call)
        if _state.is_stalled:
            _start_threads(1)
        watch = loop not in _state.watched_by
        _state.watched_by.add(loop)
    if watch:
        loop.call_later(_STALL_SECONDS, _check_progress, loop)


def _check_progress(loop: asyncio.AbstractEventLoop) -> None:
    """If the running calls are slow, start a thread for each waiting call. If calls are waiting, check again later."""
    with _state.lock:
        if _state.waiting and _state.is_stalled:
            _start_threads(len(_state.waiting))
        again = bool(_state.waiting)
        if not again:
            _state.watched_by.discard(loop)
    if again:
        loop.call_later(_STALL_SECONDS, _check_progress, loop)


def _start_threads(count: int) -> None:
    """Wake idle threads or start new threads to run waiting calls. The caller must hold the lock."""
    _state.taken_at = float("inf")
    _state.active += count
    for _ in range(count):
        queue: SimpleQueue[Callable[[], None]] = _state.idle.pop() if _state.idle else _new_thread()
        queue.put(_run_waiting_calls)


def _new_thread() -> SimpleQueue[Callable[[], None]]:
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    _start_thread("agentfly-call", _run_thread, queue)
    return queue


def _start_thread(name: str, target: Callable[..., None], queue: SimpleQueue[Any]) -> None:
    if not _state.threads:
        atexit.unregister(_stop_threads)
        atexit.register(_stop_threads)
    threading.Thread(target=target, args=(queue,), name=f"{name}-{next(_count)}", daemon=True).start()


def _run_worker(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    thread = threading.current_thread()
    _state.threads.add(thread)
    try:
        while (job := queue.get()) is not None and not _state.shutting_down:
            job()
            del job  # release its objects while the thread waits
    finally:
        _state.threads.discard(thread)


def _run_thread(queue: SimpleQueue[Callable[[], None]]) -> None:
    thread = threading.current_thread()
    _state.threads.add(thread)
    try:
        while True:
            try:
                job = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                with _state.lock:
                    if queue in _state.idle:
                        _state.idle.remove(queue)
                        return
                continue  # no longer in `idle`, so a job is about to arrive
            job()
            with _state.lock:
                if _state.shutting_down:
                    return
                _state.idle.append(queue)
    finally:
        _state.threads.discard(thread)


def _run_waiting_calls() -> None:
    while True:
        with _state.lock:
            if not _state.waiting or _state.shutting_down:
                _state.active -= 1
                return
            call = _state.waiting.popleft()
            _state.taken_at = time.perf_counter()
        call.run()
        del call  # release its objects, even if the next call never returns


def _stop_threads() -> None:
    """Stop all threads at interpreter exit. A thread that returns from C++ code after the exit aborts the process."""
    with _state.lock:
        _state.shutting_down = True
        while _state.idle:
            _state.idle.pop().put(sys.exit)
        for worker in list(_state.workers):
            worker.put(sys.exit)
    left = [thread for thread in _state.threads if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    join_busy(left)


def join_busy(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads at interpreter exit, until they have ended or use no CPU time any more.

    A busy machine may need long for the last step of a computation.
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
