"""Plain functions beside the event loop: quick ones in turn on one thread, all others on threads of their own.

A thread for each call is what isolation asks for, and it costs more than most calls do: sixty-four chains that each
call a calculator would wake sixty-four threads, which then fight for Python's lock. So a call first joins the worker,
one
thread that runs what is waiting and hands the results over together. A call that holds the worker up is left alone on
its
thread, the others get threads at once, and its function stays out of the worker until it has been quick for a while.
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

_STALL_SECONDS = 0.002
"""Seconds after which a call holds the worker up."""
_MAX_DELIVERY_DELAY = 0.001
"""Seconds that a result waits for those behind it."""
_count = itertools.count(1)

ValueOrError = tuple[Any, BaseException | None]
"""What a call gave. A pair, because a future refuses StopIteration and a SystemExit would end the loop."""


class CallTimeout(Exception):
    """The call took longer than it may; its thread goes on."""


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
    """`work()` on another thread: its value, or what it raised. function: whose call that is; see above.

    Raises:  CallTimeout after `timeout` seconds; CancelledError if the caller was cancelled. The thread goes on in both
    cases.
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
    """Results to the event loops that wait for them: one wake-up each."""
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

_slow: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions of which a call took too long for the worker: how many quick ones in a row let them into it again."""
_QUICK_CALLS_TO_RETURN = 16


def _record_speed(function: object, slow: bool) -> None:
    with contextlib.suppress(TypeError, KeyError):  # what cannot be remembered enters the worker each time
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
    """All of it is touched under `_lock` alone."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        self.done: list[tuple[_Call, ValueOrError]] = []
        """What the next wake-up of the event loop brings."""
        self.first_done_at = 0.0
        """When the first of those was done."""
        self.began: float | None = None
        """When the call that runs now began."""
        self.has_thread = False
        """Whether a thread runs it."""
        self.watched_by: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """Event loops that will see whether it is held up."""

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
        if call.future.done():  # cancelled, or late, before its turn came
            continue
        outcome = call.run()
        with _lock:
            if not worker.done:
                worker.first_done_at = time.perf_counter()
            worker.done.append((call, outcome))
        del call, outcome, done  # they are the worker's now, which lets go of them also when the next call never ends


def _watch_for_stall(worker: _SharedWorker, loop: asyncio.AbstractEventLoop) -> None:
    """On the event loop: if a call holds the worker up, those behind it get threads, and those before it their ends."""
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

# Threads that wait for a next call. A new thread for every call cost more than most calls. A call that never ends keeps
# its thread, and the next call gets another.
_idle: list[SimpleQueue[Callable[[], None]]] = []
_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_IDLE_SECONDS = 2.0
_STOP_SECONDS, _STOP_ATTEMPTS = 0.25, 40
_shutting_down = False


def _after_fork() -> None:
    """The child has none of these threads, and one of them may have held the lock."""
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
                continue  # it was taken just now: a call is on its way
            job()
            del job  # what the call held is not held by a waiting thread
            with _lock:
                if _shutting_down:
                    return
                _idle.append(queue)
    finally:
        _threads.discard(thread)


def _stop_threads() -> None:
    """Python ends. A thread that comes out of C++ (torch, say) after that aborts the process, so all are told to go.

    One that is in Python, or comes back to it, goes at once. One that waits for something, or will not go, is left.
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
            return  # what is left computes nothing: it waits
