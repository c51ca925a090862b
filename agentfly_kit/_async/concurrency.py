"""Limits on the number of concurrent operations."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any


class ConcurrencyLimit:
    """Limit on concurrent operations per event loop, used as `async with limit.slot()`. None means no limit."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def slot(self) -> AbstractAsyncContextManager[Any]:
        if self.limit is None:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            for closed in [other for other in self._semaphores if other.is_closed()]:
                del self._semaphores[closed]
            self._semaphores[loop] = asyncio.Semaphore(self.limit)
        return self._semaphores[loop]


class ConcurrencyLimits:
    """Concurrency limits of an agent. Waiting for a slot counts towards the timeout of the chain, not of the call."""

    def __init__(self, requests: int | None = None, tools: int | None = None, rewards: int | None = None) -> None:
        self.requests, self.tools, self.rewards = map(ConcurrencyLimit, (requests, tools, rewards))
