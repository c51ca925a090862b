"""Cancel asynchronous work at the k-th suspension of any of its tasks.

The coroutines of all tasks that the event loop creates are wrapped, in order to count how often any of them returns
control to the loop. At the k-th time, either the task that waits for the whole work is cancelled (like an interrupt by
the user), or the suspended task (like `asyncio.run`, which cancels all remaining tasks when it returns).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import dice
import pytest
from waiting import GUARD

from agentfly_kit._async import threads

Whom = Literal["waiter", "itself"]


class Steps:
    """Counter of suspensions that cancels a task at a given count."""

    def __init__(self, at: int = 0, whom: Whom = "waiter") -> None:
        self.at, self.whom = at, whom
        self.count = 0
        self.waiter: asyncio.Task[Any] | None = None
        self.where = ""

    def suspended(self, coroutine: Any) -> None:
        self.count += 1
        if self.count == self.at:
            task = asyncio.current_task()
            assert task is not None
            self.where = f"{task.get_name()} in {getattr(coroutine, '__qualname__', coroutine)}"
            (self.waiter if self.whom == "waiter" and self.waiter is not None else task).cancel()


class _Counted(Coroutine[Any, Any, Any]):
    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def send(self, value: Any) -> Any:
        out = self._inner.send(value)
        self._steps.suspended(self._inner)
        return out

    def throw(self, *error: Any) -> Any:
        out = self._inner.throw(*error)
        self._steps.suspended(self._inner)
        return out

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        raise NotImplementedError


@contextmanager
def counted(steps: Steps) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(lambda loop, coro, **more: asyncio.Task(_Counted(coro, steps), loop=loop, **more))
    try:
        yield
    finally:
        loop.set_task_factory(before)


async def cancel_at(k: int, work: Callable[[], Awaitable[Any]], whom: Whom = "waiter") -> Steps:
    """Run the work and cancel it at the k-th suspension, or never if k is 0. The work must end, and may then raise."""
    steps = Steps(k, whom)

    async def main() -> None:
        await work()

    with counted(steps):
        steps.waiter = asyncio.create_task(main(), name="waiter")
        done, _ = await asyncio.wait([steps.waiter], timeout=GUARD)
    assert done, f"cancelled at suspension {k} ({steps.where}) and never ended"
    if not steps.waiter.cancelled() and (error := steps.waiter.exception()) is not None and not k:
        raise error
    return steps


def some(total: int, count: int | None) -> list[int]:
    """Choose suspensions to test: all if `count` is None, else the first and some random ones (the seed is printed)."""
    if count is None or count >= total:
        return list(range(1, total + 1))
    seed = dice.seed()
    first = list(range(1, count // 3 + 1))
    return first + sorted(random.Random(seed).sample(range(count // 3 + 1, total + 1), count - len(first)))


def patient_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sandboxes start, reset and handle an interrupt as slowly as the machine requires."""
    for name in (
        "sandbox._START_SECONDS",
        "sandbox.CONTROL_SECONDS",
        "call.CONTROL_SECONDS",
        "sandbox.GRACE_SECONDS",
    ):
        monkeypatch.setattr(f"agentfly_kit.sandboxes.{name}", GUARD)
    monkeypatch.setattr("agentfly_kit.sandboxes.call.GRACE_SECONDS", GUARD)


def tasks_left() -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]


def threads_busy() -> list[str]:
    """Return the names of the threads that are running a tool or a reward."""
    return ["agentfly-call" for worker in threads._state.workers if worker.busy]


# --- cancelled leases ----------------------------------------------------------------------------

_CODES = ["1", "print('x' * 5000)", "import time; time.sleep(0.003)", "while True: pass", "import os; os._exit(1)"]


async def cancelled_lives(
    opened: Callable[[random.Random], Any], chance: random.Random, count: int, *, late: float = 0.05
) -> int:
    """Use leases of a pool of Python sandboxes, and cancel each use after a random number of steps or seconds.

    Cancellations occur in acquire, start, run, reset, release and close. The caller checks for leftovers.

    Args:
        opened: Creates the pool; called for a new pool after at most 60 uses.
        late: Maximum number of seconds before a use is cancelled.

    Returns:
        The number of uses.
    """
    done = 0
    while done < count:
        async with opened(chance) as pool:

            async def life(pool: Any = pool) -> None:
                lease = await pool.acquire("life", run=chance.choice("ab"))
                try:
                    sandbox = lease.sandbox
                    fresh = (await sandbox.run("'mark' in dir()", timeout=GUARD)).value == "False"
                    assert fresh, "what the last one wrote is gone"
                    await sandbox.run("mark = 1\n" + chance.choice(_CODES), timeout=chance.choice((0.01, 1)))
                    if chance.random() < 0.3:
                        await sandbox.reset()
                finally:
                    await pool.release(lease)

            for _ in range(min(10, 1 + count // 10)):
                tasks = [asyncio.ensure_future(life()) for _ in range(6)]
                for task in tasks:
                    for _ in range(chance.randrange(8)):
                        await asyncio.sleep(0)
                    if chance.random() < 0.7:
                        await asyncio.sleep(chance.random() ** 3 * late)
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    assert result is None or isinstance(result, asyncio.CancelledError), result
                done += len(tasks)
            closing = asyncio.ensure_future(pool.close())
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.003)
                closing.cancel()
                await asyncio.wait([closing])
            assert (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0)
    return done
