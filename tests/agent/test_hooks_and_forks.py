"""Hooks of an agent: validation, forced actions, forks, finished chains, errors."""

import asyncio
from typing import Any

import pytest
from agents import ForkingBox, Text, agent, call, put_call, put_forking, scripted
from waiting import GUARD, until

import agentfly_kit as af

CALL = call("3+3")


TASKS = [af.Task(f"t{i}", ({"role": "user", "content": f"What is 3+3? ({i})"},), {"answer": "6"}) for i in range(5)]


def force_first_call(chain: af.Chain) -> None:
    if chain.actions == 0:
        chain.force(CALL, author="hook")


async def test_before_turn_can_write_the_action() -> None:
    for t in await scripted(["never said", "6"], before_turn=force_first_call).rollout(TASKS):
        assert [(x.kind, x.author) for x in t.turns] == [
            ("prompt", "task"), ("forced", "hook"), ("observation", "tool"), ("action", "script"),
        ]  # fmt: skip
        assert t.reward == 1
        assert not t.action_mask.any()


async def test_forks_share_turns_and_group_of_their_parent() -> None:
    def twice(chain: af.Chain) -> int:
        return 2 if chain.key.fork == "" and chain.actions == 1 else 0

    seen: list[str] = []
    rollout = await scripted(
        [CALL, "6"], after_observation=twice, after_chain=lambda _, t: seen.append(t.id)
    ).rollout(TASKS, group_size=2, max_concurrency=3)
    assert [len(group) for group in rollout.groups] == [6] * 5
    assert sorted(seen) == sorted(t.id for t in rollout)
    for group in rollout.groups:
        assert [t.id.removeprefix(f"{group.id}/") for t in group] == ["0", "0.1", "0.2", "1", "1.1", "1.2"]
        parent, *forks = [t for t in group if t.chain == 0]
        for fork in forks:
            assert all(a is b for a, b in zip(parent.turns[:3], fork.turns[:3], strict=True))
            assert fork.turns[3] is not parent.turns[3]
            assert fork.seed != parent.seed
    assert len({t.id for t in rollout}) == 30


async def test_forks_of_a_policy_differ_and_are_reproducible() -> None:
    def once(chain: af.Chain) -> int:
        return 3 if chain.key.fork == "" and chain.actions == 1 else 0

    made = agent(
        sampling=af.Sampling(max_tokens=16, temperature=3.0), before_turn=force_first_call, after_observation=once
    )
    rollout = await made.rollout(TASKS, max_concurrency=2)
    again = await made.rollout(TASKS, max_concurrency=64)
    assert [(t.id, t.ids.tolist()) for t in rollout] == [(t.id, t.ids.tolist()) for t in again]
    assert all(len({tuple(t.ids) for t in group}) > 1 for group in rollout.groups)


async def test_hook_that_raises_affects_only_its_chain() -> None:
    def bad(chain: af.Chain) -> None:
        if chain.task.id == "t2":
            raise ValueError("no")

    rollout = await scripted([CALL, "6"], before_turn=bad).rollout(TASKS)
    good = ("answered", 1)
    assert [(t.stop, t.reward) for t in rollout] == [good, good, ("error", None), good, good]
    assert "no" in str(rollout.trajectories[2].error)


async def test_error_in_after_chain_is_a_warning() -> None:
    def bad(chain: af.Chain, trajectory: af.Trajectory) -> None:
        raise ValueError("no")

    with pytest.warns(UserWarning, match="after_chain raised ValueError"):
        rollout = await scripted([CALL, "6"], after_chain=bad).rollout(TASKS[:1])
    assert rollout.trajectories[0].reward == 1


async def test_forks_of_one_task_run_concurrently() -> None:
    running, most = 0, 0

    async def script(task: af.Task, turn: int) -> str:
        nonlocal running, most
        if turn == 0:
            return CALL
        running += 1
        most = max(most, running)
        await until(lambda: most == 6)
        running -= 1
        return "6"

    run = scripted(script, after_observation=lambda chain: 5 if chain.key.fork == "" else 0).rollout(TASKS[:1])
    assert len(await run) == 6
    assert "rollout of 1 task x 1, 6 of 6 chains done" in repr(run)


@pytest.mark.parametrize("max_concurrency", [1, 2])
async def test_forks_do_not_wait_for_sandboxes_of_their_siblings(max_concurrency: int) -> None:
    """Both chains hold one of two sandboxes and request two forks. A fork must not wait for a sibling's sandbox."""
    async with af.Pool(ForkingBox, size=2) as pool:
        a = scripted(
            [put_call("x", "put_forking"), "6"],
            tools=[put_forking],
            pools=[pool],
            after_observation=lambda chain: 0 if chain.key.fork else 2,
        )
        with pytest.warns(UserWarning, match="not forked: no ForkingBox is free"):
            rollout = await asyncio.wait_for(a.rollout(TASKS[:2], max_concurrency=max_concurrency), GUARD)
        forks = len(rollout) - 2
        summary = {"forks": 0, **rollout.summary()}
        assert all(t.reward == 1 for t in rollout), [t.error for t in rollout]
        assert (summary["forks"], summary["forks_refused"]) == (forks, 4 - forks) and forks < 4
        assert pool.snapshot().leased == 0


class SlowReset(ForkingBox):
    may_end = asyncio.Event()

    async def reset(self) -> None:
        await self.may_end.wait()
        await super().reset()


@af.tool(describe="optional")
async def put_slowly(text: Text, box: SlowReset) -> str:
    return await box.run(text)


async def test_fork_waits_for_a_sandbox_that_another_chain_gets_first() -> None:
    """One of two sandboxes is being reset, and another chain waits for it. The fork gets it after that chain."""

    async with af.Pool(SlowReset, size=2) as pool:
        lease = await pool.acquire("another")
        releasing: list[asyncio.Task[None]] = []

        async def hook(chain: af.Chain) -> int:
            if lease.released:
                return 0
            await until(lambda: pool.snapshot().waiting)
            releasing.append(asyncio.create_task(lease.release()))
            await until(lambda: lease.released)
            return 1

        async def reset_when_both_wait() -> None:
            await until(lambda: pool.snapshot().waiting == 2)
            SlowReset.may_end.set()

        a = scripted([put_call("x", "put_slowly"), "6"], tools=[put_slowly], pools=[pool], after_observation=hook)
        run = asyncio.gather(a.rollout(TASKS[:2]), reset_when_both_wait())
        rollout, _ = await asyncio.wait_for(run, GUARD)
    assert rollout.summary()["forks"] == 1
    assert [t.reward for t in rollout] == [1, 1, 1]


def test_hooks_may_accept_any_arguments() -> None:
    names = "before_chain", "before_turn", "after_observation", "on_context_full", "after_chain", "group_reward"
    scripted(["6"], **{name: lambda *given: None for name in names})


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("before_chain", {"role": "user", "content": "x"}, "message 1 must be a dict with 'role' and 'content'"),
        ("after_observation", "2", "'str' object cannot be interpreted as an integer"),
    ],
)
async def test_invalid_result_of_a_hook_is_an_error(hook: str, returned: Any, message: str) -> None:
    (t,) = await scripted([CALL, "6"], **{hook: lambda chain: returned}).rollout(TASKS[:1])
    assert (t.stop, t.reward) == ("error", None)
    assert t.error is not None and message in t.error.message
