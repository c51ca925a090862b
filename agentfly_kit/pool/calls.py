"""Calls of sandbox methods, with a time limit or without an event loop. Sandboxes may be objects of any class."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from .._async.pending_call import maybe_await, warn_or_log
from ..errors import SandboxError

_CANCEL_GRACE_SECONDS = 1.0  # a cancelled call that takes longer to end is abandoned


async def call(sandbox: object, method: str) -> Any:
    """Call a sync or async method of a sandbox. Return its result, or None if the sandbox lacks the method."""
    bound = getattr(sandbox, method, None)
    return await maybe_await(bound()) if callable(bound) else None


async def call_within(seconds: float, name: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    """Await `work(*args)`, and cancel it after `seconds`. If `work` ignores the cancellation, warn and stop waiting.

    Raises:
        SandboxError: if the call exceeds the time limit, raises SystemExit, or raises CancelledError without having
            been cancelled. The latter two would otherwise end the process or the calling task.
    """

    async def run() -> Any:
        try:
            return await work(*args)
        except SystemExit as error:  # would stop the event loop
            raise SandboxError(f"{name} raised SystemExit({error.code!r})") from error

    task = asyncio.ensure_future(run())
    try:
        await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task, name)
        raise
    if not task.done():
        await _cancel(task, name)
        raise SandboxError(f"{name} took longer than {seconds:g} s")
    if task.cancelled():
        raise SandboxError(f"{name} raised CancelledError without having been cancelled")
    return task.result()


async def _cancel(task: asyncio.Future[Any], name: str) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=_CANCEL_GRACE_SECONDS)
    if not task.done():
        warn_or_log(
            f"{name} ignored its cancellation and is abandoned: something in it catches "
            "CancelledError; write `except Exception`, not a bare `except`"
        )
    elif not task.cancelled():
        task.exception()  # mark as retrieved


def is_alive(sandbox: object) -> bool:
    if sandbox is None:
        return False
    try:
        alive = getattr(sandbox, "alive", True)
        return bool(alive() if callable(alive) else alive)
    except Exception:
        return False  # a sandbox whose `alive` raises is treated as dead


def kill(sandbox: object) -> None:
    """Kill a sandbox without an event loop. Call `kill()` if it is defined, else run `close()` in a separate thread."""
    method = getattr(sandbox, "kill", None)
    if callable(method):
        with contextlib.suppress(Exception):
            method()
    elif callable(getattr(sandbox, "close", None)):
        thread = threading.Thread(target=_close_in_thread, args=(sandbox,), daemon=True)
        thread.start()
        thread.join(2.0)


def _close_in_thread(sandbox: object) -> None:
    with contextlib.suppress(BaseException):
        asyncio.run(call(sandbox, "close"))


def kill_all(slots: Mapping[int, Any]) -> None:
    """Kill all sandboxes of a pool. Called when the pool is closed or garbage-collected, or when Python exits."""
    for slot in list(slots.values()):
        sandbox, slot.sandbox = slot.sandbox, None
        kill(sandbox)
