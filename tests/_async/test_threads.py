"""Synchronous calls off the event loop: they reuse threads, and a slow one delays no other."""

import asyncio
import subprocess
import sys
import threading
import weakref
from typing import Any

import errors
from waiting import GUARD, until

from agentfly_kit._async import threads


async def call(function: Any, *given: Any, timeout: float | None = GUARD) -> Any:
    value, error = await threads.run_off_loop(lambda: function(*given), timeout)
    if error is not None:
        raise error
    return value


def where() -> int:
    return threading.get_ident()


async def test_calls_one_after_another_share_a_thread() -> None:
    found = {await call(where) for _ in range(64)}
    assert len(found) == 1 and threading.get_ident() not in found


async def test_calls_that_wait_for_each_other_run_concurrently() -> None:
    barrier = threading.Barrier(8)

    def meet() -> int:
        barrier.wait(GUARD)
        return threading.get_ident()

    assert len(set(await asyncio.wait_for(asyncio.gather(*(call(meet) for _ in range(8))), GUARD))) == 8


async def test_a_hanging_call_delays_no_other() -> None:
    stuck = threading.Event()

    def hang() -> None:
        stuck.wait(GUARD)

    def quick(n: int) -> int:
        return n

    before = [asyncio.ensure_future(call(quick, n)) for n in range(3)]
    hung = asyncio.ensure_future(call(hang))
    after = [asyncio.ensure_future(call(quick, n)) for n in range(3, 6)]
    assert await asyncio.wait_for(asyncio.gather(*before, *after), GUARD) == list(range(6))
    assert await asyncio.wait_for(call(quick, 6), GUARD) == 6
    assert not hung.done()
    stuck.set()
    await hung


async def test_timed_out_and_cancelled_calls() -> None:
    stuck = threading.Event()
    await errors.check(lambda: call(lambda: stuck.wait(GUARD), timeout=0.01), threads.CallTimeout)
    assert await call(where) != threading.get_ident()
    ran: list[int] = []
    with threads.using(threads.Worker()):
        first = asyncio.ensure_future(call(lambda: stuck.wait(GUARD)))
        second = asyncio.ensure_future(call(lambda: ran.append(1)))
    await asyncio.sleep(0)  # the second waits for the first
    second.cancel()
    await asyncio.wait([second])
    stuck.set()
    await first
    assert second.cancelled()
    assert await call(len, "ab") == 2
    assert ran == [], "it never starts"


def test_calls_of_a_closed_loop_do_not_block_others() -> None:
    stuck = threading.Event()

    async def leave() -> None:
        left = [asyncio.ensure_future(call(lambda: stuck.wait(GUARD))), asyncio.ensure_future(call(where))]
        await asyncio.sleep(0)
        assert not any(future.done() for future in left)

    asyncio.run(leave())  # closed while one call runs and another waits

    async def others() -> list[int]:
        return list(await asyncio.wait_for(asyncio.gather(*(call(where) for _ in range(8))), GUARD))

    assert len(asyncio.run(others())) == 8
    stuck.set()


async def test_arguments_are_released_after_a_call() -> None:
    class Big:
        pass

    big: Any = Big()
    gone = weakref.ref(big)

    def take(what: Any) -> None: ...

    stuck, began = threading.Event(), threading.Event()
    await call(take, big)

    def hang() -> None:
        began.set()
        stuck.wait(GUARD)

    hung = asyncio.ensure_future(call(hang))
    await until(began.is_set)
    del big
    await until(lambda: gone() is None)  # no thread keeps the arguments of an earlier call
    stuck.set()
    await hung


def test_a_forked_child_has_its_own_threads() -> None:
    code = """
import asyncio, os, threading, warnings
from agentfly_kit._async import delivery, gc_pause, threads
warnings.simplefilter("ignore")
stuck = threading.Event()
def wait(): stuck.wait()
async def both():
    calls = threads.run_off_loop(wait, 0.01), threads.run_off_loop(int, None)
    return await asyncio.gather(*calls, return_exceptions=True)
async def one():
    return await threads.run_off_loop(int, None)
asyncio.run(both())
delivery._lock.acquire()
collecting = threading.Thread(target=gc_pause._collecting.acquire)
collecting.start()
collecting.join()
if os.fork() == 0:
    gc_pause.collect()
    print(asyncio.run(one()), flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD)
    assert (done.stdout, done.stderr) == ("(0, None)\n0\n", "")
