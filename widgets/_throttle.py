"""Rate limiting of updates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


class Throttle:
    """Rate limiter that calls `send` at most once every `seconds` seconds, and always after the last `schedule` call.

    `schedule` may be called from any thread, thousands of times per second. If the thread has a running event loop,
    `send` is called on that loop, so that no record changes during the call; otherwise a timer thread calls `send`.
    """

    def __init__(self, send: Callable[[], None], seconds: float = 0.1) -> None:
        self.send = send
        self.seconds = seconds
        self.sent = 0
        self._lock = threading.Lock()
        self._next = 0.0
        self._planned: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def schedule(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._closed or (self._planned is not None and not self._stuck(now)):
                return
            try:
                loop = asyncio.get_running_loop() if self._planned is None else None
            except RuntimeError:
                loop = None
            delay = max(0.0, self._next - now)
            self._planned, self._loop = now + delay, loop
            if loop is not None:
                loop.call_later(delay, self._fire)
                return
        timer = threading.Timer(delay, self._fire)
        timer.daemon = True
        timer.start()

    def _stuck(self, now: float) -> bool:
        """Return True if the event loop of the planned call is closed, stopped or blocked by a cell."""
        loop = self._loop
        if loop is None or self._planned is None:
            return False
        return loop.is_closed() or not loop.is_running() or now > self._planned + 2 * self.seconds + 0.2

    def _fire(self) -> None:
        with self._lock:
            if self._closed or self._planned is None:
                return
            # Reset before sending, so that a change during `send` plans another call and the last state is always sent.
            self._planned = None
            self._next = time.monotonic() + self.seconds
        self.sent += 1
        self.send()

    def close(self) -> None:
        with self._lock:
            self._closed = True
