"""Listeners: order, failures, and unsubscribing."""

import gc
import warnings
import weakref

import pytest

from agentfly_kit._async.listeners import Listeners


def test_each_callback_receives_every_event_and_a_failing_one_warns_once() -> None:
    listeners = Listeners[int]("pool 1")
    received: list[tuple[str, int]] = []

    def failing(event: int) -> None:
        received.append(("failing", event))
        raise ValueError("bad")

    listeners.subscribe(failing)
    listeners.subscribe(lambda event: received.append(("other", event)))
    with pytest.warns(UserWarning, match="a listener of pool 1 raised ValueError: bad"):
        listeners.notify(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listeners.notify(2)
    assert received == [("failing", 1), ("other", 1), ("failing", 2), ("other", 2)]


def test_unsubscribing_works_once_and_during_an_event() -> None:
    listeners = Listeners[int]("it")
    received: list[int] = []
    unsubscribe = listeners.subscribe(lambda event: (received.append(event), unsubscribe()))
    listeners.notify(1)
    listeners.notify(2)
    unsubscribe()
    assert received == [1]
    assert not listeners


def test_the_unsubscribe_function_does_not_keep_the_owner_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.listeners = Listeners[int]("owner")

    owner = Owner()
    reference, unsubscribe = weakref.ref(owner), owner.listeners.subscribe(print)
    del owner
    gc.collect()
    assert reference() is None
    unsubscribe()
