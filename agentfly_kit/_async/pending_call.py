"""A coroutine that says so when its `await` was forgotten.

Knows nothing of what it runs. The public `async` calls of this package are decorated with `@pending_call`; what they
return
is awaited like any coroutine, but `chain.step()` alone on a cell's last line prints what to type, and the text of a
turn that was never awaited raises `NotAwaited` instead of "coroutine object has no attribute".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from agentfly_kit.errors import NotAwaited

T = TypeVar("T")
P = ParamSpec("P")


class PendingCall(Coroutine[Any, Any, T], Generic[T]):
    """A call that has not run yet. `await` it (or hand it to `asyncio.create_task`, `gather`, `run`)."""

    def __init__(self, name: str, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._name = name
        self._start: Callable[[], Coroutine[Any, Any, T]] | None = start
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._shown = False

    def _running(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            if self._start is None:
                raise RuntimeError(f"{self._name} was awaited already; call it again for a second run")
            # The body's coroutine is made at the first send, so a forgotten one never exists and warns only once, here.
            self._coroutine, self._start = self._start(), None
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        # Not the coroutine's own `__await__`: that would let two awaits share one body in silence.
        if self._start is None and self._coroutine is not None:
            raise RuntimeError(f"{self._name} was awaited already; call it again for a second run")
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


def cancelling() -> bool:
    """Whether the running task was asked to end. If not, a CancelledError in it is only that of what it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all of them are done, however often the one who waits is cancelled: it is cancelled after that."""
    cancelled: asyncio.CancelledError | None = None
    while unfinished := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(unfinished)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def warn_or_log(text: str) -> None:
    """Warn of what somebody's callback did. Where warnings are errors it is logged: a chain must not pay for it."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        logging.getLogger("agentfly_kit").warning(text)


def pending_call(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, PendingCall[T]]:
    """Decorate an `async def`: it returns a `PendingCall` with the call's name. Types of arguments and result are
    kept."""
    name = f"{function.__qualname__.split('.<locals>.')[-1]}(...)"
    head, _, tail = name.partition(".")
    # A method is named as a person writes it: chain.step(...), not Chain.step(...).
    display_name = f"{head.lower()}.{tail}" if tail else name

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        return PendingCall(display_name, lambda: function(*args, **kwargs))

    return call
