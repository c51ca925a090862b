"""Plain functions beside the event loop: quick ones in turn on one thread, all others on threads of their own.

A thread for each call is what isolation asks for, and it costs more than most calls do: sixty-four chains that each
call a calculator would wake sixty-four threads, which then fight for Python's lock. So a call first joins the lane, one
thread that runs what is waiting and hands the results over together. A call that holds the lane up is left alone on its
thread, the others get threads at once, and its function stays out of the lane until it has been quick for a while.
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

_STALL = 0.002
"""Seconds after which a call holds the lane up."""
_KEEP = 0.001
"""Seconds that a result waits for those behind it."""
_count = itertools.count(1)

ValueOrError = tuple[Any, BaseException | None]
"""What a call gave. A pair, because a future refuses StopIteration and a SystemExit would end the loop."""


class Late(Exception):
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
            _remember(self.function, time.perf_counter() - began >= _STALL)


async def run(work: Callable[[], T], function: object, timeout: float | None) -> tuple[T | None, BaseException | None]:
    """`work()` on another thread: its value, or what it raised. function: whose call that is; see above.

    Raises:  Late after `timeout` seconds; CancelledError if the caller was cancelled. The thread goes on in both cases.
    """
    loop = asyncio.get_running_loop()
    call = _Call(work, function, loop)
    limit = None if timeout is None else loop.call_later(timeout, _expire, call.future)
    if _is_slow(function):
        _on_a_thread(functools.partial(_alone, call))
    else:
        _into_the_lane(call)
    try:
        return await call.future
    finally:
        if limit is not None:
            limit.cancel()


def _expire(future: asyncio.Future[ValueOrError]) -> None:
    if not future.done():
        future.set_exception(Late())


def _hand_over(done: list[tuple[_Call, ValueOrError]]) -> None:
    """Results to the event loops that wait for them: one wake-up each."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[_Call, ValueOrError]]] = {}
    for call, outcome in done:
        loops.setdefault(call.loop, []).append((call, outcome))
    for loop, some in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed while an abandoned call ran on
            loop.call_soon_threadsafe(_deliver, some)


def _deliver(done: list[tuple[_Call, ValueOrError]]) -> None:
    for call, outcome in done:
        if not call.future.done():
            call.future.set_result(outcome)


# --- the lane ------------------------------------------------------------------------------------

_slow: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Functions of which a call took too long for the lane: how many quick ones in a row let them into it again."""
_QUICK_ONES = 16


def _remember(function: object, slow: bool) -> None:
    with contextlib.suppress(TypeError, KeyError):  # what cannot be remembered enters the lane each time
        if slow:
            _slow[function] = _QUICK_ONES
        elif function in _slow:
            _slow[function] -= 1
            if _slow[function] <= 0:
                del _slow[function]


def _is_slow(function: object) -> bool:
    try:
        return function in _slow
    except TypeError:
        return False


class _Lane:
    """All of it is touched under `_lock` alone."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        self.done: list[tuple[_Call, ValueOrError]] = []
        """What the next wake-up of the event loop brings."""
        self.since = 0.0
        """When the first of those was done."""
        self.began: float | None = None
        """When the call that runs now began."""
        self.served = False
        """Whether a thread runs it."""
        self.looked_after: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        """Event loops that will see whether it is held up."""

    @property
    def held_up(self) -> bool:
        return self.began is not None and time.perf_counter() - self.began > _STALL

    def take_done(self) -> list[tuple[_Call, ValueOrError]]:
        done, self.done = self.done, []
        return done


_lane = _Lane()


def _into_the_lane(call: _Call) -> None:
    global _lane
    with _lock:
        if _lane.held_up:
            _lane = _Lane()
        lane, loop = _lane, call.loop
        lane.waiting.append(call)
        serve, lane.served = not lane.served, True
        look = loop not in lane.looked_after
        if look:
            lane.looked_after.add(loop)
    if serve:
        _on_a_thread(functools.partial(_serve_lane, lane))
    if look:
        loop.call_later(_STALL, _look_after, lane, loop)


def _serve_lane(lane: _Lane) -> None:
    while True:
        with _lock:
            now = time.perf_counter()
            call = lane.waiting.popleft() if lane.waiting and not _ended else None
            lane.served = call is not None
            lane.began = now if call is not None else None
            done = lane.take_done() if call is None or now - lane.since > _KEEP else []
        _hand_over(done)
        if call is None:
            return
        if call.future.done():  # cancelled, or late, before its turn came
            continue
        outcome = call.run()
        with _lock:
            if not lane.done:
                lane.since = time.perf_counter()
            lane.done.append((call, outcome))
        del call, outcome, done  # they are the lane's now, which lets go of them also when the next call never ends


def _look_after(lane: _Lane, loop: asyncio.AbstractEventLoop) -> None:
    """On the event loop: if a call holds the lane up, those behind it get threads, and those before it their ends."""
    global _lane
    stuck: list[_Call] = []
    done: list[tuple[_Call, ValueOrError]] = []
    with _lock:
        if lane.held_up:
            done = lane.take_done()
            stuck = list(lane.waiting)
            lane.waiting.clear()
            if _lane is lane:
                _lane = _Lane()
        again = bool(lane.waiting or lane.done)
        if not again:
            lane.looked_after.discard(loop)
    if again:
        loop.call_later(_STALL, _look_after, lane, loop)
    _hand_over(done)
    for call in stuck:
        _on_a_thread(functools.partial(_alone, call))


def _alone(call: _Call) -> None:
    _hand_over([(call, call.run())])


# --- threads -------------------------------------------------------------------------------------

# Threads that wait for a next call. A new thread for every call cost more than most calls. A call that never ends keeps
# its thread, and the next call gets another.
_idle: list[SimpleQueue[Callable[[], None]]] = []
_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_IDLE_SECONDS = 2.0
_END_SECONDS, _END_TICKS = 0.25, 40
_ended = False


def _after_fork() -> None:
    """The child has none of these threads, and one of them may have held the lock."""
    global _lane, _lock
    _lane, _lock = _Lane(), threading.Lock()
    _idle.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def _on_a_thread(job: Callable[[], None]) -> None:
    with _lock:
        queue = _idle.pop() if _idle else None
    if queue is None:
        queue = SimpleQueue()
        if not _threads:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        threading.Thread(target=_serve, args=(queue,), name=f"agentfly-call-{next(_count)}", daemon=True).start()
    queue.put(job)


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
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
                if _ended:
                    return
                _idle.append(queue)
    finally:
        _threads.discard(thread)


def _end_all() -> None:
    """Python ends. A thread that comes out of C++ (torch, say) after that aborts the process, so all are told to go.

    One that is in Python, or comes back to it, goes at once. One that waits for something, or will not go, is left.
    """
    global _ended
    _ended = True
    with _lock:
        while _idle:
            _idle.pop().put(sys.exit)
    left = [thread for thread in _threads if thread.ident is not None]
    for thread in left:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for _ in range(_END_TICKS):
        spent, until = time.process_time(), time.monotonic() + _END_SECONDS
        for thread in left:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread for thread in left if thread.is_alive()]
        if not left or time.process_time() - spent < 0.02 * _END_SECONDS:
            return  # what is left computes nothing: it waits
