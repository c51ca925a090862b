"""Collections are rare while many chains run, and everything is as before afterwards."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from agents import agent, chat, tasks

from agentfly_kit._async.gc_pause import relaxed_gc
from agentfly_kit.engines.scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def thresholds() -> Any:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_rare_by_the_number_of_chains_and_as_before_after_the_last() -> None:
    with relaxed_gc(2):
        assert gc.get_threshold() == (700, 10, 100)  # few chains make less than Python's own number
        with relaxed_gc(4096):
            assert gc.get_threshold() == (250 * 4098, 10, 100)
        assert gc.get_threshold() == (700, 10, 100)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_somebody_sets_meanwhile_stays() -> None:
    with relaxed_gc(64):
        gc.set_threshold(5000, 20, 20)
        with relaxed_gc(64):
            assert gc.get_threshold() == (5000, 20, 20)
    assert gc.get_threshold() == (5000, 20, 20)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0, 10, 10)
    with relaxed_gc(64):
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)


async def test_a_rollout_asks_for_it_and_gives_it_back_also_when_it_is_cancelled() -> None:
    seen = []

    def script(task: Any, turn: int) -> str:
        seen.append(gc.get_threshold())
        return "1"

    await agent(engine=ScriptedEngine(script), chat=chat()).rollout(tasks(8))
    assert set(seen) == {(2000, 10, 100)}
    assert gc.get_threshold() == (700, 10, 10)
    slow = agent(engine=ScriptedEngine(["1"], latency=5.0), chat=chat()).rollout(tasks(8))
    going = asyncio.ensure_future(slow._wait())
    await asyncio.sleep(0.05)
    assert gc.get_threshold() == (2000, 10, 100)
    going.cancel()
    await asyncio.wait([going])
    assert gc.get_threshold() == (700, 10, 10)
