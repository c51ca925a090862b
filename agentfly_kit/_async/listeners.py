"""Callbacks that are subscribed to the events of an object."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from .pending_call import warn_or_log

Event = TypeVar("Event")


class Listeners(Generic[Event]):
    """Callbacks that receive every event of one object. Warnings refer to this object as `source`.

    If a callback raises, the others are still called. Only the first exception of each callback causes a warning.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._callbacks: list[Callable[[Event], object]] = []
        self._failed: list[Callable[[Event], object]] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def subscribe(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Register a callback, and return a function that unregisters it. Unregistering twice has no effect."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            for callbacks in (self._callbacks, self._failed):
                with contextlib.suppress(ValueError):
                    callbacks.remove(callback)

        return unsubscribe

    def notify(self, event: Event) -> None:
        """Call all callbacks with an event, in the calling thread."""
        for callback in list(self._callbacks):
            try:
                callback(event)
            except Exception as error:
                if callback not in self._failed:
                    self._failed.append(callback)
                    warn_or_log(f"a listener of {self._source} raised {type(error).__name__}: {error}")
