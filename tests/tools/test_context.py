"""`Context`: leases of sandboxes, copies of task fields, forks, resetting environments."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import errors
import pytest
from agents import Box, ForkingBox, chat
from waiting import until

import agentfly_kit as af
from agentfly_kit.pool.environment import environment_seed, is_environment, reset_arguments
from agentfly_kit.tools.injection import Injection, injection

TASK = af.Task("t", ({"role": "user", "content": "?"},), {"answer": ["5"], "lock": asyncio.Event})


class OtherBox(Box):
    pass


class Fleeting:
    """Class without `run` and `close`, a sandbox only if annotated with `FromPool`."""


class FakePool:
    """Pool whose `acquire` can wait or fail, and whose `release` can fail."""

    def __init__(self, sandbox_type: type = Box, *, fails: int = 0, release_fails: bool = False) -> None:
        self.sandbox_type = sandbox_type
        self.fails, self.release_fails = fails, release_fails
        self.gate = asyncio.Event()
        self.gate.set()
        self.out: list[Any] = []
        self.asked: list[tuple[str, str]] = []
        self.given_back = 0

    async def acquire(self, owner: str, *, run: str) -> Any:
        self.asked.append((owner, run))
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise af.errors.PoolTimeout("no sandbox free")
        lease = type("Lease", (), {"sandbox": self.sandbox_type(), "turn": None, "revoked": ""})()
        self.out.append(lease)
        return lease

    async def release(self, lease: Any, *, reusable: bool = True) -> None:
        if self.release_fails:
            raise af.errors.SandboxError("would not end")
        self.out.remove(lease)
        self.given_back += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("annotation", "injected"),
    [
        (Box, Injection("sandbox", Box)), (af.FromPool[Fleeting], Injection("sandbox", Fleeting)),
        (af.FromTask[dict[str, int]], Injection("field")), (af.FromTask, Injection("field")),
        (af.Context, Injection("context")),
        *((plain, None) for plain in (str, Fleeting, list[str], str | None, dict)),
    ],
)  # fmt: skip
def test_injection_of_annotations(annotation: Any, injected: Injection | None) -> None:
    assert injection(annotation) == injected


async def test_one_lease_per_sandbox_class() -> None:
    boxes, others = FakePool(fails=1), FakePool(OtherBox)
    context = af.Context(TASK, trajectory_id="chain 7", pools=[others, boxes], run="rollout-1")
    assert boxes.asked == []  # leased on first use
    await errors.check(lambda: context.sandbox(Box), af.errors.PoolTimeout)
    first = await context.sandbox(Box)  # a failed attempt is repeated
    assert await context.sandbox(Box) is first
    other = await context.sandbox(OtherBox)
    assert type(other) is OtherBox and boxes.asked == [("chain 7", "rollout-1")] * 2
    assert context.held == {Box: first, OtherBox: other}
    await context.close()
    assert (boxes.given_back, others.given_back, context.held) == (1, 1, {})


async def test_concurrent_requests_share_one_lease() -> None:
    pool = FakePool()
    pool.gate.clear()
    context = af.Context(TASK, pools=[pool])
    waiting = [asyncio.create_task(context.sandbox(Box)) for _ in range(5)]
    await until(lambda: pool.asked)
    waiting[0].cancel()  # the first request; the others keep the lease
    await asyncio.wait(waiting[:1])
    pool.gate.set()
    boxes = await asyncio.gather(*waiting[1:])
    assert len({id(box) for box in boxes}) == len(pool.asked) == 1
    await context.close()
    assert pool.out == []
    pool.gate.clear()
    context = af.Context(TASK, pools=[pool])
    late = asyncio.create_task(context.sandbox(Box))
    await until(lambda: len(pool.asked) == 2)
    await context.close()
    await errors.check(lambda: late, af.errors.SandboxError, "ended while it waited for a Box")
    assert pool.out == []


async def test_exactly_one_pool_must_match() -> None:
    context = af.Context(TASK, pools=[FakePool(ForkingBox)])
    assert await context.sandbox(Box) is await context.sandbox(ForkingBox)
    await context.close()
    both = af.Context(TASK, pools=[FakePool(ForkingBox), FakePool(Box)])
    assert type(await both.sandbox(Box)) is Box  # an exact match has precedence
    await both.close()


async def test_close_is_idempotent_and_final() -> None:
    pool = FakePool()
    context = af.Context(TASK, pools=[pool])
    await context.sandbox(Box)
    await asyncio.gather(context.close(), context.close())
    await context.close()
    assert pool.given_back == 1
    await errors.check(lambda: context.sandbox(Box), af.errors.SandboxError, "has ended, and its Box was released")
    assert repr(context) == "<Context of 't', turn 0, holds no sandbox, closed>"


async def test_close_finishes_before_its_caller_is_cancelled() -> None:
    pool = FakePool()
    context = af.Context(TASK, pools=[pool])
    await context.sandbox(Box)
    closing = asyncio.create_task(context.close())
    await asyncio.sleep(0)
    closing.cancel()
    await errors.check(lambda: closing, asyncio.CancelledError)
    assert pool.out == []


async def test_close_releases_all_leases_if_one_pool_fails() -> None:
    bad, good = FakePool(release_fails=True), FakePool(OtherBox)
    context = af.Context(TASK, pools=[bad, good])
    await context.sandbox(OtherBox)
    await context.sandbox(Box)  # the last lease is released first
    await errors.check(context.close, af.errors.SandboxError, "would not end")
    assert good.out == []


async def test_fields_are_copied_per_chain() -> None:
    lock = threading.Lock()  # cannot be copied, so it is shared
    task = af.Task("t", TASK.messages, {"answer": ["5"], "lock": lock})
    one, two = af.Context(task), af.Context(task)
    one.fields["answer"].append("6")
    assert dict(one.fields) == {"answer": ["5", "6"], "lock": lock} and "nothing" not in one.fields
    assert two.fields["answer"] == task.fields["answer"] == ["5"]


async def test_fork_copies_state_and_forks_sandboxes() -> None:
    async with af.Pool(ForkingBox, size=3) as pool:
        context = af.Context(TASK, trajectory_id="a", pools=[pool], seed=4, turn=2)
        box = await context.sandbox(ForkingBox)
        box.log.append("1")
        context.state["list"] = [1]
        context.fields["answer"].append("own")
        twin = await context.fork("b")
        other = await twin.sandbox(ForkingBox)
        assert other.log == ["1"]
        other.log.append("2")
        twin.state["list"].append(2)
        assert (box.log, context.state) == (["1"], {"list": [1]})
        assert (twin.trajectory_id, twin.seed, twin.turn, twin.fields["answer"]) == ("b", 4, 2, ["5", "own"])
        # Leases show the owner and the turn.
        assert {info.owner: info.turn for info in pool.snapshot().leases} == {"a": 2, "b": 2}
        twin.turn = 4
        await twin.sandbox(ForkingBox)
        assert {info.owner: info.turn for info in pool.snapshot().leases} == {"a": 2, "b": 4}
        await context.close()
        await twin.close()
        assert pool.snapshot().leased == 0


class Guess:
    """Environment in TRL's format: `reset` with task fields, tools, and `get_reward`."""

    def reset(self, target: int, **kwargs: Any) -> str:
        self.target, self.kwargs, self.guesses = target, kwargs, list[int]()
        return f"Guess up to {kwargs['limit']}."

    @af.tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: an integer.
        """
        self.guesses.append(number)
        return "right" if number == self.target else "wrong"

    def get_reward(self) -> float:
        return float(self.target in self.guesses)


GUESS_TASK = af.Task("g", TASK.messages, {"target": 7, "limit": 9})


async def test_reset_gets_task_fields_by_name_and_get_reward_scores() -> None:
    script = ['<tool_call>{"name":"guess","arguments":{"number":7}}</tool_call>', "7"]
    (t,) = await af.envs.agent(Guess, af.ScriptedEngine(script), chat=chat(), size=1).rollout([GUESS_TASK])
    assert (t.stop, t.reward, t.metrics) == ("answered", 1.0, {"reward": 1.0})
    assert "Guess up to 9." in t.turns[0].text


@pytest.mark.parametrize(
    ("reset", "arguments"),
    [
        (lambda self, task: ..., {"task": GUESS_TASK}),
        (lambda self, target, seed: ..., {"target": 7, "seed": environment_seed(GUESS_TASK)}),
        (lambda self, **kwargs: ..., {"target": 7, "limit": 9}),
        (lambda self, *, limit, task, other=3: ..., {"limit": 9, "task": GUESS_TASK}),
        (lambda self, target, **kwargs: ..., {"target": 7, "limit": 9}),
    ],
)
def test_arguments_of_reset(reset: Any, arguments: dict[str, Any]) -> None:
    environment = type("Environment", (), {"reset": reset})
    assert is_environment(environment) and reset_arguments(environment, GUESS_TASK) == arguments
