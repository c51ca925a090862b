"""Garbage collection is less frequent while many chains run."""

import asyncio
import gc
from typing import Any

import pytest
from agents import agent, chat, tasks
from waiting import until

import agentfly_kit as af
from agentfly_kit._async.gc_pause import relaxed_gc


@pytest.fixture(autouse=True)
def thresholds() -> Any:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("young", [60_000, 0])
def test_thresholds_set_by_other_code_and_a_disabled_collector_are_kept(young: int) -> None:
    with relaxed_gc():
        gc.set_threshold(young, 20, 20)
    assert gc.get_threshold() == (young, 20, 20)
    with relaxed_gc():
        assert gc.get_threshold() == (young, 20, 20)


async def test_a_rollout_restores_the_thresholds_also_when_cancelled() -> None:
    seen = []

    def script(task: Any, turn: int) -> str:
        seen.append(gc.get_threshold())
        return "1"

    await agent(engine=af.ScriptedEngine(script), chat=chat()).rollout(tasks(8))
    assert set(seen) == {(50_000, 10, 100)}
    assert gc.get_threshold() == (700, 10, 10)
    slow = agent(engine=af.ScriptedEngine(["1"], latency=3600.0), chat=chat()).rollout(tasks(8))
    going = asyncio.ensure_future(slow._wait())
    await until(lambda: gc.get_threshold() == (50_000, 10, 100))
    going.cancel()
    await asyncio.wait([going])
    assert gc.get_threshold() == (700, 10, 10)
