"""Call sandbox methods with a time limit or without an event loop. Sandboxes may be objects of any class."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from .._async import threads
from .._async.pending_call import maybe_await, warn_or_log
from ..errors import SandboxError

T = TypeVar("T")
_CANCEL_GRACE_SECONDS = 1.0  # a cancelled call that has not ended after this time is abandoned


async def create(worker: threads.Worker, sandbox_type: type, make: Callable[[], T]) -> T:
    """Call `make`, which creates a sandbox, in the thread of `worker`.

    `make` is called on the event loop instead if the class has a coroutine function `start`, which should do any slow
    work, or if the constructor needs an event loop.
    """
    if inspect.iscoroutinefunction(getattr(sandbox_type, "start", None)):
        return make()
    try:
        with threads.using(worker):
            return await threads.call(make)
    except RuntimeError as error:
        if "event loop" not in str(error):
            raise
        return make()


async def call(worker: threads.Worker, function: Callable[..., Any] | None, *args: Any) -> Any:
    """Call a method of a sandbox, in the thread of `worker` if it is sync. Return None if there is no such method."""
    if not callable(function):
        return None
    with threads.using(worker):
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await maybe_await(await threads.call(function, *args))


async def call_within(seconds: float, name: str, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    """Await `work(*args)` and cancel it after `seconds`. If the call ignores the cancellation, warn and stop waiting.

    Raises:
        SandboxError: if the call exceeds the time limit, raises SystemExit, or raises CancelledError without having
            been cancelled. The latter two exceptions would end the process or the calling task.
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
    """Kill a sandbox without an event loop: call `kill()` if it is defined, or run `close()` in a separate thread."""
    method = getattr(sandbox, "kill", None)
    if callable(method):
        with contextlib.suppress(Exception):
            method()
    elif callable(getattr(sandbox, "close", None)):
        thread = threading.Thread(target=_close_in_thread, args=(sandbox,), daemon=True)
        thread.start()
        thread.join(2.0)


async def _close(sandbox: Any) -> None:
    await maybe_await((getattr(sandbox, "kill", None) or sandbox.close)())


def _close_in_thread(sandbox: Any) -> None:
    with contextlib.suppress(BaseException):
        asyncio.run(_close(sandbox))


def end(slot: Any) -> None:
    """Kill the sandbox of a slot. If an abandoned call is running, a sandbox without `kill` is closed afterwards."""
    if slot.worker.busy and not callable(getattr(slot.sandbox, "kill", None)):
        slot.worker.put(lambda: _close_in_thread(slot.sandbox))
    else:
        sandbox, slot.sandbox = slot.sandbox, None
        kill(sandbox)


def kill_all(slots: Mapping[int, Any]) -> None:
    """Kill all sandboxes of a pool. Called when the pool is closed or garbage-collected, or when Python exits."""
    # ExitStack kills every sandbox, even if SIGINT raises KeyboardInterrupt while one is killed.
    with contextlib.ExitStack() as each:
        for slot in list(slots.values()):
            sandbox, slot.sandbox = slot.sandbox, None
            each.callback(kill, sandbox)
