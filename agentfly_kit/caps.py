"""How many of one kind of thing may go on at once. Knows not what they are."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any


class Cap:
    """`async with cap.slot():` at most `limit` at once in one event loop, in the order of asking; None is no limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def slot(self) -> AbstractAsyncContextManager[Any]:
        if self.limit is None:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            for gone in [other for other in self._slots if other.is_closed()]:
                del self._slots[gone]
            self._slots[loop] = asyncio.Semaphore(self.limit)
        return self._slots[loop]

    def __repr__(self) -> str:
        return f"Cap({self.limit})"


@dataclass(frozen=True, eq=False)
class Caps:
    """Those of one agent. Waiting for one counts to no timeout but the chain's own."""

    requests: Cap = field(default_factory=Cap)
    tools: Cap = field(default_factory=Cap)
    rewards: Cap = field(default_factory=Cap)

    @classmethod
    def of(cls, requests: int | None, tools: int | None, rewards: int | None) -> Caps:
        return cls(Cap(requests), Cap(tools), Cap(rewards))

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        return self.requests.limit, self.tools.limit, self.rewards.limit
