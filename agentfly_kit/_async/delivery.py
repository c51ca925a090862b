"""Thread-safe delivery of results to event loops."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any


class _Results(list[tuple[asyncio.Future[Any], Any]]):
    """Undelivered results of an event loop. Unlike `list`, this class supports weak references."""


# Maps the id of each event loop that has been woken to its undelivered results. Only the callback of the loop refers to
# the results, so that they and the waiting tasks can be garbage-collected if the loop is closed before the callback
# runs.
_pending: weakref.WeakValueDictionary[int, _Results] = weakref.WeakValueDictionary()
# The lock is reentrant, because a finalizer may deliver results.
_lock = threading.RLock()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that is running in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def deliver(*results: tuple[asyncio.Future[Any], Any]) -> bool:
    """Set the results or exceptions of futures that are not done yet. Can be called from any thread.

    An event loop is woken only once for all results that arrive before it runs. Return False if a loop is closed.
    """
    delivered = True
    with _lock:  # until a loop has been woken, no other thread may add results for it
        for future, result in results:
            loop = future.get_loop()
            if loop.is_closed():
                delivered = False
            elif loop is running_loop():
                _set_result(future, result)
            else:
                try:
                    _wake(loop).append((future, result))
                except RuntimeError:  # the event loop was closed in the meantime
                    delivered = False
    return delivered


def _wake(loop: asyncio.AbstractEventLoop) -> _Results:
    """Return the list of results that an event loop is going to set. Raises RuntimeError if the loop is closed."""
    waiting = _pending.get(id(loop))
    if waiting is None:
        waiting = _Results()
        loop.call_soon_threadsafe(_set_pending, loop, waiting)
        _pending[id(loop)] = waiting
    return waiting


def _set_pending(loop: asyncio.AbstractEventLoop, results: _Results) -> None:
    with _lock:
        _pending.pop(id(loop), None)
    for future, result in results:
        _set_result(future, result)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _after_fork() -> None:
    """Reset the state in a forked child, because another thread may have held the lock during the fork."""
    global _lock
    _lock = threading.RLock()
    _pending.clear()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_after_fork)
