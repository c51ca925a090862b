"""Time limits that exclude the time during which the event loop is blocked, and detection of coroutines that block it.

A coroutine that calls `time.sleep` or computes for long delays all other calls in its event loop. The time limits of
these calls would expire, although the calls could not run.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

_INTERVAL = 0.02  # time in seconds between two ticks of an event loop while a limit is running
_BLOCKED = 2 * _INTERVAL  # an event loop that does not tick for longer is blocked


class _Clock:
    """Clock of one event loop, which stops while the loop is blocked."""

    def __init__(self) -> None:
        self.time = self.read_at = 0.0
        self.timers: set[Timer] = set()
        self.ticking = False

    def read(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return the time in seconds. Must be called at least once per tick."""
        now = loop.time()
        self.time += min(now - self.read_at, _BLOCKED)
        self.read_at = now
        return self.time

    def tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = self.read(loop)
        expired = [timer for timer in self.timers if timer.at <= now]
        self.timers.difference_update(expired)
        self.ticking = bool(self.timers)
        if self.ticking:
            loop.call_later(_INTERVAL, self.tick, loop)
        for timer in expired:
            timer.callback()


_clocks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Clock] = weakref.WeakKeyDictionary()


def now() -> float:
    """Return the time in seconds on the running event loop's clock, which stops while the loop is blocked."""
    loop = asyncio.get_running_loop()
    return _clocks.setdefault(loop, _Clock()).read(loop)


class Timer:
    """Timer that calls `callback()` after `seconds`, excluding time during which the running event loop is blocked."""

    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        self.at = now() + seconds
        self.extended_to = 0.0  # end of the last excluded period (`time.perf_counter`)
        self.callback = callback
        self.clock = _clocks[loop]
        self.clock.timers.add(self)
        if not self.clock.ticking:
            self.clock.tick(loop)

    def cancel(self) -> None:
        self.clock.timers.discard(self)


_current: ContextVar[tuple[Timer, ...]] = ContextVar("timers", default=())


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Async context manager like `asyncio.timeout` that excludes time during which the event loop is blocked."""
    async with asyncio.timeout(None) as limit:
        if seconds is None:
            yield limit
            return
        timer, before = Timer(seconds, lambda: limit.reschedule(0.0)), _current.get()
        _current.set((*before, timer))
        try:
            yield limit
        finally:
            _current.set(before)
            timer.cancel()


def extend(start: float, end: float) -> None:
    """Exclude a period (`time.perf_counter`), in which the current task was held up, from the task's time limits."""
    for timer in _current.get():
        timer.at += max(0.0, end - max(start, timer.extended_to))
        timer.extended_to = max(end, timer.extended_to)


def _waiting_seconds() -> float:
    """Return how many seconds this thread has waited for a CPU; 0 if unknown, as on systems without /proc."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class Steps(Generator[Any, Any, Any]):
    """Awaitable that runs a coroutine and measures how long its steps block the event loop.

    Time during which the thread of the event loop waits for a CPU, because the machine is busy, does not count.

    Attributes:
        blocked: Total duration in seconds of the steps that blocked the event loop; the loop's clock excludes this
            time.
        longest: Duration in seconds of the longest step.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.blocked = self.longest = self._waited = self._read_at = 0.0

    def __await__(self) -> Steps:
        return self

    def send(self, value: Any) -> Any:
        return self._timed(self._coroutine.send, value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        return self._timed(self._coroutine.throw, typ if val is None else val)

    def _timed(self, step: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        if began > self._read_at + _INTERVAL:  # reading the file takes some microseconds
            self._waited, self._read_at = _waiting_seconds(), began
        try:
            return step(*args)
        finally:
            seconds = time.perf_counter() - began
            if seconds > _BLOCKED:
                seconds -= max(0.0, _waiting_seconds() - self._waited)
            self.longest = max(self.longest, seconds)
            self.blocked += seconds if seconds > _BLOCKED else 0.0
