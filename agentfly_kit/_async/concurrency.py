"""Limits on the number of concurrent operations."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any


class ConcurrencyLimit:
    """Limit on concurrent operations per event loop: `async with limit.slot(): ...`.

    Slots are granted in the order of the requests. None means unlimited.
    """

    def __init__(self, limit: int | None = None) -> None:
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

    def __repr__(self) -> str:
        return f"ConcurrencyLimit({self.limit})"


@dataclass(frozen=True, eq=False)
class ConcurrencyLimits:
    """Concurrency limits of an agent. Time spent waiting for a slot counts only towards the chain's own timeout."""

    requests: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    tools: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    rewards: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)

    @classmethod
    def from_counts(cls, requests: int | None, tools: int | None, rewards: int | None) -> ConcurrencyLimits:
        return cls(ConcurrencyLimit(requests), ConcurrencyLimit(tools), ConcurrencyLimit(rewards))

    @property
    def counts(self) -> tuple[int | None, int | None, int | None]:
        return self.requests.limit, self.tools.limit, self.rewards.limit
