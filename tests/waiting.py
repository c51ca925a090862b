"""Waiting for a state. Tests wait with these functions instead of sleeping for a fixed time before they assert.

The speed of the machine must not decide whether a test passes: `GUARD` only ends a test that would never end.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

# Seconds. Also the time limit of every subprocess, kernel, server and page that a test waits for.
GUARD = 300.0


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop run until the condition is true.

    Raises:
        AssertionError: The condition is still false after `GUARD` seconds.
    """
    __tracebackhide__ = True
    end, pause = time.monotonic() + GUARD, 0.0
    while not condition():
        assert time.monotonic() < end, f"still false after {GUARD:g} s"
        await asyncio.sleep(pause)
        pause = min(pause + 0.001, 0.05)


def blocking_until(condition: Callable[[], Any]) -> None:
    """Block this thread until the condition is true, and raise as `until` does."""
    __tracebackhide__ = True
    end, pause = time.monotonic() + GUARD, 0.001
    while not condition():
        assert time.monotonic() < end, f"still false after {GUARD:g} s"
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
