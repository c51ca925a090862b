"""An event loop that wakes often enough for an interrupt to be noticed.

Jupyter's kernel (ipykernel 7.4) puts an interrupt of a cell that awaits into the event loop's queue and does not wake
the loop: where nothing else happens, as while somebody waits for a sandbox, the cell would go on until its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_WAKE_INTERVAL = 0.2
_waiting: tuple[asyncio.AbstractEventLoop, int] | None = None  # of the main thread's loop, which alone is interrupted


@contextlib.contextmanager
def keep_interruptible() -> Iterator[None]:
    """While this lasts the running event loop wakes a few times a second, however many ask for it."""
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
