"""Prompt handling of interrupts while a notebook cell awaits.

When an awaiting cell is interrupted, Jupyter's kernel (ipykernel 7.4) adds a callback to the event loop's queue without
waking the loop. If the loop is otherwise idle, for example while the cell waits for a sandbox, the interrupt would have
no effect until the wait ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_WAKE_INTERVAL = 0.2
# The main thread's event loop and its number of active `keep_interruptible` contexts; None if no context is active.
_waiting: tuple[asyncio.AbstractEventLoop, int] | None = None


@contextlib.contextmanager
def keep_interruptible() -> Iterator[None]:
    """Wake the running event loop a few times per second within the context, so that interrupts are handled."""
    global _waiting
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _waiting is None or _waiting[0] is not loop:
        _waiting = (loop, 0)
        loop.call_later(_WAKE_INTERVAL, _wake_again, loop)
    _waiting = (loop, _waiting[1] + 1)
    try:
        yield
    finally:
        if _waiting is not None and _waiting[0] is loop:
            _waiting = (loop, _waiting[1] - 1)


def _wake_again(loop: asyncio.AbstractEventLoop) -> None:
    global _waiting
    if _waiting is None or _waiting[0] is not loop:
        return
    if _waiting[1] > 0:
        loop.call_later(_WAKE_INTERVAL, _wake_again, loop)
    else:
        _waiting = None
