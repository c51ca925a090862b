"""A fair lock that serializes calls on one sandbox. Unlike an asyncio.Lock it is not bound to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FifoLock:
    """An asynchronous lock that is granted in order of arrival and can be used from successive event loops.

    `acquire` does not wait for a holder in another event loop.
    """

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Hold the lock in an `async with` block; later callers wait until it ends."""
        loop = asyncio.get_running_loop()
        before, mine = self._last, loop.create_future()
        if before is not None and (before.done() or before.get_loop() is not loop):
            before = None
        self._last = mine
        try:
            if before is not None:
                await asyncio.wait([before])
            yield
        finally:
            if before is not None and not before.done():
                # Cancelled while waiting: the next caller must still wait for the earlier one.
                before.add_done_callback(lambda _: mine.set_result(None))
            else:
                mine.set_result(None)
