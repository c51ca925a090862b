"""An interrupt that does not wake the event loop, like that of ipykernel, is handled during long waits."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import errors
from agents import Box, played, tasks
from waiting import GUARD, until

import agentfly_kit as af


async def interrupted(wait: Callable[[], Awaitable[Any]], is_waiting: Callable[[], Any]) -> None:
    """Cancel from a signal handler that adds a callback to a sleeping event loop."""
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(wait())
    await until(is_waiting)
    before = signal.signal(signal.SIGALRM, lambda *_: loop.call_soon(waiting.cancel))
    too_late = loop.call_later(GUARD, waiting.set_name, "too late")
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        await errors.check(lambda: waiting, asyncio.CancelledError)
        assert waiting.get_name() != "too late"
    finally:
        too_late.cancel()
        signal.signal(signal.SIGALRM, before)


async def test_while_waiting_for_a_sandbox_or_a_call_in_another_process(tmp_path: Path):
    async with af.Pool(Box, size=1) as pool, pool.lease():
        await interrupted(lambda: pool.acquire("late", timeout=3600), lambda: pool.snapshot().waiting)
        assert pool.snapshot().waiting == 0
    begun = tmp_path / "begun"
    code = f"import time; open({str(begun)!r}, 'w').close(); time.sleep(1000)"
    async with af.PythonSandbox(isolation="none") as sandbox:
        await interrupted(lambda: sandbox.run(code, timeout=3600), begun.exists)
        assert (await sandbox.run("1 + 1", GUARD)).value == "2"


async def test_while_a_rollout_waits_for_the_engine():
    asked = []

    class Stuck(af.ScriptedEngine):
        async def sample(self, *given: Any, **more: Any) -> Any:
            asked.append(given)
            await asyncio.Event().wait()

    agent = played(["never"]).replace(engine=Stuck(["never"]))
    await interrupted(lambda: agent.rollout(tasks(2))._wait(), lambda: asked)
