"""Leases of chains: how long an interactive chain keeps one, and what happens when the pool revokes it."""

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

import errors
import pytest
from agents import Box, put, put_call, scripted
from waiting import until

import agentfly_kit as af

QUESTION = ({"role": "user", "content": "Fill the box."},)


@af.reward
def fine(final: str | None) -> float:
    return 1.0


def agent(pool: af.Pool[Any]) -> af.Agent:
    return scripted([put_call("a"), put_call("b"), "done"], tools=[put], reward=fine, pools=[pool], max_turns=9)


async def test_interactive_chain_keeps_its_sandbox_until_closed() -> None:
    async with af.Pool(Box, size=1) as pool:
        chain = agent(pool).chain(af.Task("t", QUESTION))
        await chain.step()
        held = re.compile(r"1 of 1 leased, 1 waiting\); held by chain-0:t/0 \(\d+\.\d s, turn 1\);")
        await errors.check(lambda: pool.acquire("another", timeout=0.05), af.errors.PoolTimeout, held)
        await chain.step()
        assert chain.snapshot().tool_calls[1].result.observation == "a,b"  # type: ignore[union-attr]
        waiting = asyncio.ensure_future(pool.acquire("another"))
        await asyncio.sleep(0)
        await chain.close()
        lease = await waiting
        assert (lease.sandbox.log, pool.snapshot().leases[0].owner) == ([], "another")
        await lease.release()


async def test_max_lease_revokes_the_sandbox_of_an_interactive_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    async with af.Pool(Box, size=1, max_lease=3600) as pool:
        chain = agent(pool).chain(af.Task("t", QUESTION))
        await chain.step()
        monkeypatch.setattr("agentfly_kit.pool.core.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
        async with pool.lease("another") as box:
            assert box.log == []
        await chain.step()
        assert chain.error is not None and "held for 3600 s, longer than max_lease" in chain.error.message
        trajectory = await chain.finish()
        assert (chain.error.type, trajectory.stop, trajectory.reward) == ("LeaseRevoked", "error", None)
        assert pool.snapshot().leased == 0


class Watched(Box):
    gone = False

    async def close(self) -> None:
        self.gone = True


async def wait_for_the_end(box: Watched, slow: bool) -> str:
    await until(lambda: box.gone or not slow)
    return "done"


@af.tool(describe="optional")
async def hold(box: Watched, slow: af.FromTask[bool]) -> str:
    return await wait_for_the_end(box, slow)


@af.tool(describe="optional")
async def hold_by_context(context: af.Context, slow: af.FromTask[bool]) -> str:
    return await wait_for_the_end(await context.sandbox(Watched), slow)


@pytest.mark.parametrize("tool", [hold, hold_by_context])
async def test_revoked_lease_leaves_only_its_own_chain_unscored(tool: Any):
    pool = af.Pool(Watched, size=4)
    call = f'<tool_call>\n{{"name": "{tool.name}", "arguments": {{}}}}\n</tool_call>'
    agent = scripted([call, "end"], tools=[tool], reward=fine, pools=[pool], max_turns=3)
    tasks = [af.Task("slow", QUESTION, {"slow": True}), af.Task("quick", QUESTION, {"slow": False})]
    rolling = asyncio.ensure_future(agent.rollout(tasks, group_size=4))
    while not rolling.done():
        for lease in pool.snapshot().leases:
            if "slow" in lease.owner:
                pool.recycle(lease.id, close=True)
        await asyncio.sleep(0.01)
    for trajectory in (await rolling).trajectories:
        error = trajectory.error
        if trajectory.task.id == "quick":
            assert (error, trajectory.stop) == (None, "answered")
        else:
            assert (error.type, trajectory.stop, trajectory.reward) == ("LeaseRevoked", "error", None)
            assert "closed by hand" in error.message
    assert pool.snapshot().leased == 0
    await pool.close()
