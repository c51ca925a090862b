"""Coroutines that report a forgotten `await`, and helpers for tasks, threads and warnings.

Public `async` functions are decorated with `@pending_call`. If `await` is missing, `chain.step()` on the last line of a
notebook cell displays a hint to add `await`, and accessing an attribute of the result raises `NotAwaited`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from agentfly_kit.errors import NotAwaited, checks_keywords

T = TypeVar("T")
P = ParamSpec("P")


class PendingCall(Coroutine[Any, Any, T], Generic[T]):
    """Awaitable call that has not started yet; `await` it or pass it to `asyncio.create_task`, `gather` or `run`."""

    def __init__(self, name: str, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._name = name
        self._start: Callable[[], Coroutine[Any, Any, T]] | None = start
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._shown = False

    def _running(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            assert self._start is not None
            # Create the coroutine only now, because Python would otherwise issue its own warning if `await` is missing.
            start, self._start = self._start, None
            self._coroutine = start()
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        # Without this check, two awaits would silently share one coroutine.
        if self._start is None:
            raise RuntimeError(f"{self._name} was already awaited; call it again to run it again")
        return self._running().__await__()

    def send(self, value: Any) -> Any:
        return self._running().send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        return self._running().throw(typ if val is None else val)

    def close(self) -> None:
        self._start = None
        if self._coroutine is not None:
            self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotAwaited(f"{self._name} has not run, so it has no .{name}; write (await {self._name}).{name}")

    def __repr__(self) -> str:
        self._shown = True
        return f"<{self._name} has not run: write `await {self._name}`>"

    def __del__(self) -> None:
        if self._start is not None and not self._shown:
            warnings.warn(f"{self._name} was never awaited: write `await {self._name}`", RuntimeWarning, stacklevel=2)


class Handle(Coroutine[Any, Any, T], Generic[T]):
    """Base class of awaitable handles of background work, which can be awaited repeatedly or wrapped in tasks."""

    @abstractmethod
    async def _wait(self) -> T: ...

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    def _reject_items(self, *_: object) -> NoReturn:
        raise NotAwaited(
            f"a {type(self).__name__} has no items before it is awaited: write `result = await run` first, or "
            "`async for` instead of `for`"
        )

    # Without these methods, the errors of Python would not mention `await`.
    __len__ = __iter__ = __getitem__ = _reject_items

    def __bool__(self) -> bool:
        return True

    # Coroutine protocol, used when a handle is wrapped in an asyncio task. Each task runs its own `_wait()`.

    @functools.cached_property
    def _waits(self) -> weakref.WeakKeyDictionary[asyncio.Task[Any], Coroutine[Any, Any, T]]:
        return weakref.WeakKeyDictionary()

    def _wait_of_task(self) -> Coroutine[Any, Any, T]:
        task = asyncio.current_task()
        assert task is not None
        if task not in self._waits:
            self._waits[task] = self._wait()
        return self._waits[task]

    def send(self, value: Any) -> Any:
        return self._wait_of_task().send(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        return self._wait_of_task().throw(typ if val is None else val)

    def close(self) -> None:
        """Do nothing, because each task closes its own coroutine."""


async def maybe_await(value: Any) -> Any:
    """Await `value` if it is awaitable and return the result; otherwise return `value`."""
    return await value if inspect.isawaitable(value) else value


def cancelling() -> bool:
    """Return True if the current task itself was cancelled, not only an operation that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all tasks are done. If the caller is cancelled meanwhile, raise CancelledError afterwards.

    Exceptions of the tasks are marked as retrieved, because callers clean up after another exception.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while unfinished := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(unfinished)
            except asyncio.CancelledError as error:
                cancelled = error
    finally:  # also if the event loop was closed
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
    if cancelled is not None:
        raise cancelled


async def run_in_thread(function: Callable[..., T], *args: object, on_cancel: Callable[[], None] | None = None) -> T:
    """Run a function in a thread. On cancellation, call `on_cancel` and wait until the function has returned."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await wait_all([task])
        raise


def warn_or_log(text: str) -> None:
    """Issue a warning, or log its text if warnings are turned into errors."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        logging.getLogger("agentfly_kit").warning(text)


def pending_call(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, PendingCall[T]]:
    """Decorate an `async def` function so that it returns a `PendingCall`. Argument and result types are preserved."""
    name = function.__qualname__.split(".<locals>.")[-1]
    method = name.partition(".")[2]

    @checks_keywords
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        # Name a method after the class of its object, because `Chain` inherits methods.
        shown = f"{type(args[0]).__name__.lower()}.{method}" if method else name
        return PendingCall(f"{shown}(...)", lambda: function(*args, **kwargs))

    return call
