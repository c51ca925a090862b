"""Calls on one sandbox, one after the other. An asyncio.Lock would do it, but would be one event loop's for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FifoLock:
    """Whoever enters waits for all that entered before, in order, whatever event loop they come from."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Until it is left, everybody who enters later waits."""
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
                # Cancelled while it waited: the next one must not pass before this one would have.
                before.add_done_callback(lambda _: mine.set_result(None))
            else:
                mine.set_result(None)
