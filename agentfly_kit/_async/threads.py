"""Run sync functions in threads, so that they do not block the event loop.

Calls wait in one queue. As long as they are fast, a single thread runs them sequentially, because a thread per call
costs more than most calls, and many threads would compete for the GIL. When no call has been taken from the queue for
`_STALL_SECONDS`, each waiting call gets its own thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
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

from .delivery import deliver

T = TypeVar("T")

# Time in seconds without progress after which each waiting call gets its own thread.
_STALL_SECONDS = 0.002
# Time in seconds after which an idle thread exits.
_IDLE_SECONDS = 2.0
# At interpreter exit, running threads are awaited for this time in seconds, at most this many times.
_STOP_SECONDS, _STOP_ATTEMPTS = 0.25, 40


class CallTimeout(Exception):
    """Raised when a call exceeds its timeout. The thread of the call continues to run."""


class _Call:
    """A function call whose `future` receives the pair (return value, exception) as its result.

    The exception is not set on the future, because futures reject StopIteration, and SystemExit would stop the loop.
    """

    __slots__ = ("context", "future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        self.context = contextvars.copy_context()

    def run(self) -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = self.context.run(self.work), None
        except BaseException as error:
            outcome = None, error
        deliver((self.future, outcome))


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
        self.shutting_down = False

    @property
    def is_stalled(self) -> bool:
        return not self.active or time.perf_counter() - self.taken_at > _STALL_SECONDS


_state = _State()
_count = itertools.count(1)


def _after_fork() -> None:
    """Reset the state in a forked child process, which has no copies of the threads and may inherit a held lock."""
    global _state
    _state = _State()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_after_fork)


async def run_off_loop(work: Callable[[], T], timeout: float | None) -> tuple[T | None, BaseException | None]:
    """Run `work()` on another thread. Return (value, None), or (None, exception) if it raises.

    Raises CallTimeout after `timeout` seconds (None for no limit). After a timeout or a cancellation of the caller, the
    thread continues to run.
    """
    loop = asyncio.get_running_loop()
    call = _Call(work)
    limit = None if timeout is None else loop.call_later(timeout, deliver, (call.future, CallTimeout()))
    with _state.lock:
        _state.waiting.append(call)
        if _state.is_stalled:
            _start_threads(1)
        watch = loop not in _state.watched_by
        _state.watched_by.add(loop)
    if watch:
        loop.call_later(_STALL_SECONDS, _check_progress, loop)
    try:
        return await call.future
    finally:
        if limit is not None:
            limit.cancel()


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
    if not _state.threads:
        atexit.unregister(_stop_threads)
        atexit.register(_stop_threads)
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    threading.Thread(target=_run_thread, args=(queue,), name=f"agentfly-call-{next(_count)}", daemon=True).start()
    return queue


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
        if not call.future.done():  # not cancelled or timed out while queued
            call.run()
        del call  # release its objects, even if the next call never returns


def _stop_threads() -> None:
    """Stop all threads at interpreter exit. A thread that returns from C++ code after the exit aborts the process."""
    with _state.lock:
        _state.shutting_down = True
        while _state.idle:
            _state.idle.pop().put(sys.exit)
    left = [thread for thread in _state.threads if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for _ in range(_STOP_ATTEMPTS):
        spent, until = time.process_time(), time.monotonic() + _STOP_SECONDS
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread for thread in left if thread.is_alive()]
        if not left or time.process_time() - spent < 0.02 * _STOP_SECONDS:
            return  # the remaining threads are only waiting
