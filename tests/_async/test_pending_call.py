"""Calls that were not awaited say so; awaited ones are ordinary coroutines."""

from __future__ import annotations

import asyncio
import gc
import inspect

import pytest

from agentfly_kit._async.pending_call import PendingCall, pending_call
from agentfly_kit.errors import NotAwaited


class Chain:
    def __init__(self) -> None:
        self.ran = 0

    @pending_call
    async def step(self, n: int = 1) -> int:
        """Step."""
        await asyncio.sleep(0)
        self.ran += n
        return self.ran

    @pending_call
    async def fail(self) -> None:
        raise ValueError("inside")


@pending_call
async def evaluate(x: int) -> int:
    return x + 1


async def test_it_is_a_coroutine_for_asyncio() -> None:
    assert Chain.step.__name__ == "step"
    assert Chain.step.__doc__ == "Step."
    chain = Chain()
    chain.step(2).close()
    assert chain.ran == 0, "it does not run before it is awaited, and closing it does not warn"
    assert await asyncio.create_task(chain.step()) == 1
    assert await asyncio.gather(chain.step(), evaluate(1)) == [2, 2]
    assert await asyncio.wait_for(chain.step(), 5) == 3
    pending = evaluate(1)
    assert inspect.isawaitable(pending)
    assert asyncio.iscoroutine(pending)
    assert isinstance(pending, PendingCall)
    pending.close()
    with pytest.raises(ValueError, match="inside"):
        await chain.fail()


async def test_two_awaits_of_one_call_are_refused() -> None:
    pending = evaluate(1)
    await pending
    with pytest.raises(RuntimeError, match=r"evaluate\(\.\.\.\) was already awaited; call it again"):
        await pending


async def test_the_repr_says_what_to_type() -> None:
    pending = Chain().step()
    assert repr(pending) == "<chain.step(...) has not run: write `await chain.step(...)`>"
    del pending  # it was shown: no warning beside it


def test_a_forgotten_one_warns_once() -> None:
    def forget() -> None:
        Chain().step()
        gc.collect()

    with pytest.warns(RuntimeWarning, match=r"chain\.step\(\.\.\.\) was never awaited: write `await chain") as got:
        forget()
    assert len(got) == 1


def test_its_result_is_refused_by_name() -> None:
    pending = Chain().step()
    with pytest.raises(NotAwaited, match=r"chain\.step\(\.\.\.\) has not run, so it has no \.text; write \(await"):
        _ = pending.text  # type: ignore[attr-defined]
    assert not hasattr(pending, "_repr_html_")
    pending.close()


async def test_cancelled_before_it_began_it_never_ran() -> None:
    chain = Chain()
    task = asyncio.create_task(chain.step())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert chain.ran == 0
