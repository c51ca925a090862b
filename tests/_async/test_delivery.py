"""Results of other threads: one wake-up for several."""

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import errors
import pytest

from agentfly_kit._async.delivery import deliver


async def test_results_that_arrive_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in range(8)]
    futures[0].cancel()
    wake_ups = []
    wake_up = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (wake_ups.append(given), wake_up(*given))[1])

    def work() -> None:
        for number, future in enumerate(futures):
            assert deliver((future, ValueError("last") if number == 7 else number))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()  # the event loop is blocked meanwhile
    assert await asyncio.gather(*futures[1:7]) == list(range(1, 7))
    await errors.check(lambda: futures[7], ValueError, "last")
    assert len(wake_ups) == 1
    assert deliver((futures[1], "late")) and futures[1].result() == 1


def test_no_thread_relies_on_a_wake_up_that_failed() -> None:
    """While a thread finds out that the loop was closed, another one adds a result."""
    loop, found = Mock(), []
    loop.is_closed.return_value = False
    other = threading.Thread(target=lambda: found.append(deliver((Mock(get_loop=lambda: loop), 2))))

    def wake_up(*_: Any) -> None:
        if loop.call_soon_threadsafe.call_count == 1:
            other.start()
            other.join(0.2)  # it cannot end before this thread does
        raise RuntimeError

    loop.call_soon_threadsafe.side_effect = wake_up
    found.append(deliver((Mock(get_loop=lambda: loop), 1)))
    other.join()
    assert found == [False, False]
