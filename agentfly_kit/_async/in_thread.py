"""Running a function in a thread that outlives a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from .pending_call import wait_all

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *args: object, on_cancel: Callable[[], None] | None = None) -> T:
    """Run a function in a thread. If cancelled, call `on_cancel` and wait until the function has returned."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await wait_all([task])
        if not task.cancelled():
            task.exception()  # mark as retrieved
        raise
