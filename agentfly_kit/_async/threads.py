"""Run sync functions off the event loop: fast ones share one worker thread, slow ones get their own threads.

A thread per call would isolate calls from each other, but costs more than most calls: 64 chains that each call a
calculator would wake 64 threads, which then compete for the GIL. Calls are therefore queued on a shared worker, a
single thread that runs them in turn and delivers results in batches. If a call stalls the worker, it keeps that thread,
the calls queued behind it are moved to threads of their own, and its function bypasses the shared worker until a number
of its calls have been fast.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
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
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# Duration in seconds from which a call counts as stalling the shared worker.
_STALL_SECONDS = 0.002
# Maximum time in seconds for which a result is held back to be delivered together with later ones.
_MAX_DELIVERY_DELAY = 0.001
_count = itertools.count(1)

# Value and exception of a call. They are stored as a pair instead of setting the exception on the future, because
# futures reject StopIteration, and SystemExit would stop the event loop.
ValueOrError = tuple[Any, BaseException | None]


class CallTimeout(Exception):
    """Raised when a call exceeds its timeout; its thread continues to run."""


class _Call:
    __slots__ = ("context", "function", "future", "loop", "work")

    def __init__(self, work: Callable[[], Any], function: object, loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.function, self.loop = work, function, loop
        self.future: asyncio.Future[ValueOrError] = loop.create_future()
        self.context = contextvars.copy_context()

    def run(self) -> ValueOrError:
        began = time.perf_counter()
        try:
            return self.context.run(self.work), None
        except BaseException as error:
            return None, error
        finally:
            _record_speed(self.function, time.perf_counter() - began >= _STALL_SECONDS)


async def run_off_loop(
    work: Callable[[], T], function: object, timeout: float | None
) -> tuple[T | None, BaseException | None]:
    """Run `work()` on another thread, without blocking the event loop.

    Args:
        work: The call to run.
        function: Function that `work` calls; its past speed decides whether the shared worker is used.
        timeout: Seconds until CallTimeout is raised; None for no limit.

    Returns:
        The value and the exception of the call; one of them is None.

    Raises:
        CallTimeout: After `timeout` seconds. The thread continues to run.
        asyncio.CancelledError: If the caller was cancelled. The thread continues to run.
    """
    loop = asyncio.get_running_loop()
    call = _Call(work, function, loop)
    limit = None if timeout is None else loop.call_later(timeout, _expire, call.future)
    if _is_slow(function):
        _run_on_thread(functools.partial(_run_alone, call))
    else:
        _queue_on_shared_worker(call)
    try:
        return await call.future
    finally:
        if limit is not None:
            limit.cancel()


def _expire(future: asyncio.Future[ValueOrError]) -> None:
    if not future.done():
        future.set_exception(CallTimeout())


def _deliver_to_loops(done: list[tuple[_Call, ValueOrError]]) -> None:
    """Deliver results to their event loops, with a single wake-up per loop."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[_Call, ValueOrError]]] = {}
    for call, outcome in done:
        loops.setdefault(call.loop, []).append((call, outcome))
    for loop, some in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed while an abandoned call ran on
            loop.call_soon_threadsafe(_set_results, some)


def _set_results(done: list[tuple[_Call, ValueOrError]]) -> None:
    for call, outcome in done:
        if not call.future.done():
            call.future.set_result(outcome)


# --- the worker ------------------------------------------------------------------------------------

# Slow functions, with the number of fast calls after which they may use the shared worker again.
_slow: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_QUICK_CALLS_TO_RETURN = 16


def _record_speed(function: object, slow: bool) -> None:
    with contextlib.suppress(TypeError, KeyError):  # functions that cannot be keys always use the shared worker
        if slow:
            _slow[function] = _QUICK_CALLS_TO_RETURN
        elif function in _slow:
            _slow[function] -= 1
            if _slow[function] <= 0:
                del _slow[function]


def _is_slow(function: object) -> bool:
    try:
        return function in _slow
    except TypeError:
        return False


class _SharedWorker:
    """Queue and state of a shared worker thread; all access requires `_lock`."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        # Finished calls that have not been delivered yet.
        self.done: list[tuple[_Call, ValueOrError]] = []
        # Time at which the first of them finished.
        self.first_done_at = 0.0
        # Start time of the running call; None if idle.
        self.began: float | None = None
        # True while a thread runs this worker.
        self.has_thread = False
        # Event loops with a scheduled `_watch_for_stall` for this worker.
        self.watched_by: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    @property
    def is_stalled(self) -> bool:
        return self.began is not None and time.perf_counter() - self.began > _STALL_SECONDS

    def take_done(self) -> list[tuple[_Call, ValueOrError]]:
        done, self.done = self.done, []
        return done


_shared_worker = _SharedWorker()


def _queue_on_shared_worker(call: _Call) -> None:
    global _shared_worker
    with _lock:
        if _shared_worker.is_stalled:
            _shared_worker = _SharedWorker()
        worker, loop = _shared_worker, call.loop
        worker.waiting.append(call)
        serve, worker.has_thread = not worker.has_thread, True
        look = loop not in worker.watched_by
        if look:
            worker.watched_by.add(loop)
    if serve:
        _run_on_thread(functools.partial(_run_shared_worker, worker))
    if look:
        loop.call_later(_STALL_SECONDS, _watch_for_stall, worker, loop)


def _run_shared_worker(worker: _SharedWorker) -> None:
    while True:
        with _lock:
            now = time.perf_counter()
            call = worker.waiting.popleft() if worker.waiting and not _shutting_down else None
            worker.has_thread = call is not None
            worker.began = now if call is not None else None
            done = worker.take_done() if call is None or now - worker.first_done_at > _MAX_DELIVERY_DELAY else []
        _deliver_to_loops(done)
        if call is None:
            return
        if call.future.done():  # cancelled or timed out while it was queued
            continue
        outcome = call.run()
        with _lock:
            if not worker.done:
                worker.first_done_at = time.perf_counter()
            worker.done.append((call, outcome))
        del call, outcome, done  # drop the references, so that a next call that never returns does not keep them alive


def _watch_for_stall(worker: _SharedWorker, loop: asyncio.AbstractEventLoop) -> None:
    """Replace a stalled worker: deliver its finished results, and move its waiting calls to threads of their own.

    Runs on the event loop.
    """
    global _shared_worker
    stuck: list[_Call] = []
    done: list[tuple[_Call, ValueOrError]] = []
    with _lock:
        if worker.is_stalled:
            done = worker.take_done()
            stuck = list(worker.waiting)
            worker.waiting.clear()
            if _shared_worker is worker:
                _shared_worker = _SharedWorker()
        again = bool(worker.waiting or worker.done)
        if not again:
            worker.watched_by.discard(loop)
    if again:
        loop.call_later(_STALL_SECONDS, _watch_for_stall, worker, loop)
    _deliver_to_loops(done)
    for call in stuck:
        _run_on_thread(functools.partial(_run_alone, call))


def _run_alone(call: _Call) -> None:
    _deliver_to_loops([(call, call.run())])


# --- threads -------------------------------------------------------------------------------------

# Idle threads are reused, because starting a thread costs more than most calls. A call that never returns keeps its
# thread, and the next call gets another one.
_idle: list[SimpleQueue[Callable[[], None]]] = []
_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_IDLE_SECONDS = 2.0
_STOP_SECONDS, _STOP_ATTEMPTS = 0.25, 40
_shutting_down = False


def _after_fork() -> None:
    """Reset the state in a forked child, which has none of the threads and may have inherited a locked lock."""
    global _shared_worker, _lock
    _shared_worker, _lock = _SharedWorker(), threading.Lock()
    _idle.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def _run_on_thread(job: Callable[[], None]) -> None:
    with _lock:
        queue = _idle.pop() if _idle else None
    if queue is None:
        queue = SimpleQueue()
        if not _threads:
            atexit.unregister(_stop_threads)
            atexit.register(_stop_threads)
        threading.Thread(target=_run_thread, args=(queue,), name=f"agentfly-call-{next(_count)}", daemon=True).start()
    queue.put(job)


def _run_thread(queue: SimpleQueue[Callable[[], None]]) -> None:
    thread = threading.current_thread()
    _threads.add(thread)
    try:
        while True:
            try:
                job = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                with _lock:
                    if queue in _idle:
                        _idle.remove(queue)
                        return
                continue  # removed from `_idle` just now, so a job is about to arrive
            job()
            del job  # an idle thread should not keep the call's objects alive
            with _lock:
                if _shutting_down:
                    return
                _idle.append(queue)
    finally:
        _threads.discard(thread)


def _stop_threads() -> None:
    """Stop all threads at interpreter exit, because one returning from C++ code (torch) later would abort the process.

    Threads that execute Python code, or return to it, exit immediately. Threads that keep waiting are left behind.
    """
    global _shutting_down
    _shutting_down = True
    with _lock:
        while _idle:
            _idle.pop().put(sys.exit)
    left = [thread for thread in _threads if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for _ in range(_STOP_ATTEMPTS):
        spent, until = time.process_time(), time.monotonic() + _STOP_SECONDS
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread for thread in left if thread.is_alive()]
        if not left or time.process_time() - spent < 0.02 * _STOP_SECONDS:
            return  # the remaining threads are waiting, not computing
