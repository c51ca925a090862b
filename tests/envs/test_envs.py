"""Environments: classes written in a cell, with reset, tools, done, reward and fork."""

import asyncio
import copy
import inspect
import json
import re
import threading
from typing import Any

import agents
import errors
import pytest
from waiting import GUARD

import agentfly_kit as af


class Guess:
    """The example of the documentation."""

    def reset(self, task: af.Task, seed: int) -> str:
        self.secret, self.tries, self.done = task.fields["secret"], [], False
        self.seed = seed
        return "I think of a number from 1 to 10."

    @af.tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 1 to 10.
        """
        self.tries.append(number)
        self.done = number == self.secret
        return "right" if self.done else "higher" if number < self.secret else "lower"

    def reward(self, state: dict[str, Any]) -> float:
        return float(state["done"])


class Forking(Guess):
    """The same environment with `fork`."""

    def fork(self, into: "Forking") -> None:
        into.__dict__.update(copy.deepcopy(self.__dict__))


def task(secret: int = 7, id: str = "g", **more: Any) -> af.Task:
    return af.Task(id, ({"role": "user", "content": "Find it."},), {"secret": secret, **more})


def call(number: int) -> str:
    return agents.call("", "guess").replace('{"expression":""}', json.dumps({"number": number}))


def guesser(script: Any, kind: type = Guess, **settings: Any) -> Any:
    return af.envs.agent(kind, af.ScriptedEngine(script), chat=agents.chat(), **settings)


async def test_a_class_written_in_a_cell_is_an_environment() -> None:
    (t,) = (await guesser([call(3), call(9), call(7), "I found it."]).rollout(task())).trajectories
    assert (t.stop, t.reward, t.success, t.metrics) == ("env_done", 1.0, True, {"reward": 1.0})
    assert [c.result.observation for c in t.tool_calls] == ["higher", "lower", "right"]
    assert t.turns[0].messages[-1]["content"] == "Find it.\n\nI think of a number from 1 to 10."
    assert "from 1 to 10" in t.turns[0].text and t.final is None


async def test_an_episode_ends_with_an_answer_or_with_the_call_that_ends_it() -> None:
    (t,) = (await guesser([call(3), "no idea"]).rollout(task())).trajectories
    assert (t.stop, t.reward, t.error) == ("answered", 0.0, None)
    (t,) = (await guesser([call(7) + call(3)]).rollout(task())).trajectories
    assert (t.stop, [c.result.observation for c in t.tool_calls]) == ("env_done", ["right", "The episode is over."])
    assert [c.result.ran for c in t.tool_calls] == [True, False]


async def test_a_pool_is_created_for_a_sandbox_that_the_reward_requests() -> None:
    class Written(Guess):
        async def reward(self, state: dict[str, Any], secret: int, sandbox: af.PythonSandbox) -> float:
            return float((await sandbox.run(f"{state['tries'][-1]} == {secret}")).value == "True")

    agent = guesser([call(3), "x"], Written)
    assert [pool.sandbox_type for pool in agent.pools] == [Written, af.PythonSandbox]
    a, b = (await agent.rollout([task(id="a"), task(id="b", secret=3)])).trajectories
    assert (a.reward, b.reward) == (0.0, 1.0), (a.error, b.error)
    async with af.Pool(af.PythonSandbox, size=1) as mine:
        assert list(guesser(["x"], Written, pools=[mine]).pools)[1:] == [mine]


async def test_chains_of_a_group_get_the_same_seed_which_a_task_may_set() -> None:
    seeds: list[int] = []

    @af.reward
    def seen(world: af.FromPool[Guess]) -> float:
        seeds.append(world.seed)
        return 0.0

    await guesser([call(1), "x"], reward=seen).rollout([task(id="a"), task(id="b"), task(id="c", seed=5)], 2)
    assert len(set(seeds)) == 3 and 5 in seeds


@pytest.mark.parametrize("family", ["code", "competition", "repo", "sql"])
async def test_unknown_sandbox_settings_are_rejected_by_name(family: str) -> None:
    """The error is raised when the agent is created, not when its first chain needs a sandbox."""
    module = getattr(af.envs, family)
    for wrong in ("memry_mb", "max_rows"):
        errors.check(
            lambda: module.agent(af.ScriptedEngine(["x"]), chat=af.tiny.policy().chat, options={wrong: 64}),
            af.errors.SettingsError,
            re.compile(rf"unexpected keyword argument '{wrong}'; it takes .*seconds=, .*memory_mb="),
        )
    agent = module.agent(
        af.ScriptedEngine(["x"]), chat=af.tiny.policy().chat, options={"memory_mb": 64, "seconds": 3}
    )
    (pool, *_) = agent.pools
    assert pool.sandbox_type(**pool.options)._sandbox.limits.memory_mb == 64
    for name, parameter in inspect.signature(pool.sandbox_type).parameters.items():
        if name in ("memory_mb", "processes", "cpu_seconds", "disk_mb", "network"):
            assert parameter.default == getattr(pool.sandbox_type()._sandbox.limits, name)
    assert (
        pool.sandbox_type()._sandbox.max_output
        == inspect.signature(pool.sandbox_type).parameters["max_output"].default
    )


async def test_cleanup_runs_on_release_unless_it_is_a_tool() -> None:
    class Room:
        tidied = 0

        def reset(self, task: af.Task, seed: int) -> None: ...

        async def cleanup(self) -> None:
            self.tidied += 1

    class Flat(Room):
        @af.tool
        def cleanup(self, room: str) -> str:  # type: ignore[override]
            """Tidy a room.

            Args:
                room: which one.
            """
            raise AssertionError

    for kind, times in ((Room, 1), (Flat, 0)):
        async with af.Pool(kind, size=1) as pool:
            async with pool.lease() as room:
                pass
            async with pool.lease() as again:
                assert again is room and room.tidied == times


async def test_chains_do_not_share_a_mutable_default_of_reset() -> None:
    class Remembers(Guess):
        def reset(self, task: af.Task, seed: int, seen: list[str] = []) -> str:  # noqa: B006
            super().reset(task, seed)
            seen.append(task.id)
            return " ".join(seen)

    rollout = await guesser(["7"], Remembers, size=1).rollout([task(id="a"), task(id="b")])
    assert [t.turns[0].messages[-1]["content"].split()[2:] for t in rollout.trajectories] == [["a"], ["b"]]


async def test_prepare_adds_the_result_of_reset_to_the_prompt() -> None:
    chain = guesser(["x"]).chain(task())
    errors.check(lambda: chain.force("x"), af.errors.SettingsError, "await chain.prepare()")
    assert "from 1 to 10" not in chain.turn.text
    assert "from 1 to 10" in (await chain.prepare()).text
    chain.force(call(7))
    await chain.act()
    assert (chain.stop, chain.context.held[Guess].tries) == ("env_done", [7])
    errors.check(lambda: chain.rewind(0), af.errors.SettingsError, "Guess")
    assert (await chain.finish()).reward == 1.0


async def test_a_fork_has_its_own_state() -> None:
    chain = guesser(["x"], Forking).chain(task())
    await chain.prepare()
    chain.force(call(3))
    await chain.act()
    twin = await chain.fork()
    twin.force(call(7))
    await twin.act()
    assert chain.context.held[Forking].tries == [3]
    assert twin.context.held[Forking].tries == [3, 7]
    assert ((await twin.finish()).reward, (await chain.finish()).reward) == (1.0, None)


async def test_a_failing_reset_leaves_only_its_chain_unscored() -> None:
    broken = af.Task("broken", ({"role": "user", "content": "?"},), {})
    a, b, c = (await guesser([call(7), "x"]).rollout([task(), broken, task(id="h")])).trajectories
    assert (a.reward, c.reward) == (1.0, 1.0)
    assert (b.reward, b.stop) == (None, "error")
    assert "Guess.reset failed for task 'broken'" in str(b.error) and "secret" in str(b.error)


class Connected(Guess):
    """An environment that stays broken once its connection is lost."""

    lost_in = ""
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.broken = False

    def lose(self, where: str) -> None:
        if self.broken or (where == self.lost_in and type(self).made == 1):
            self.broken = True
            raise ConnectionResetError("the simulator is gone")

    def reset(self, task: af.Task, seed: int) -> str:
        self.lose("reset")
        return super().reset(task, seed)

    @af.tool
    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 1 to 10.
        """
        self.lose("guess")
        return Guess.guess.function(self, number)

    def reward(self, state: dict[str, Any]) -> float:
        self.lose("reward")
        return super().reward(state)


@pytest.mark.parametrize("where", ["reset", "guess", "reward"])
async def test_an_environment_that_failed_is_replaced(where: str) -> None:
    """Looked for: failures of infrastructure in `reset`, tools and rewards. After each, the instance was lent again."""

    class Losing(Connected):
        lost_in = where

    chains = (await guesser([call(7)], Losing, size=1).rollout([task(id=f"{i}") for i in range(4)])).trajectories
    assert sorted((t.stop, t.reward) for t in chains if t.error) == [
        ("error" if where != "reward" else "env_done", None)
    ]
    assert [t.reward for t in chains if not t.error] == [1.0] * 3
    assert Losing.made == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_time_limit_of_a_pool_holds_for_the_reset_of_an_environment(kind: str) -> None:
    released = threading.Event()

    class Slow(Guess):
        def reset(self, task: af.Task, seed: int) -> Any:
            if task.id == "slow":
                return asyncio.sleep(GUARD) if kind == "async" else released.wait(GUARD)
            return super().reset(task, seed)

    try:
        agent = guesser([call(7)], Slow, pool=af.Pool(Slow, size=1, start_timeout=1.0))
        slow, fast = (await agent.rollout([task(id="slow"), task(id="fast")], max_concurrency=1)).trajectories
    finally:
        released.set()
    assert slow.reward is None and "Slow.reset failed for task 'slow' (TimeoutError: took longer" in str(slow.error)
    assert fast.reward == 1.0


async def test_a_tool_is_tried_alone() -> None:
    (guess,) = af.envs.tools(Guess)
    result = await guess.try_(number=3, task=task())
    assert (result.ok, result.observation, result.env_done) == (True, "higher", False)
    result = await guess.try_(number="three", task=task())
    assert not result.ok
    assert (await guess.try_(number=7, task=task())).env_done


def test_classes_that_are_not_environments_are_rejected() -> None:
    class Nothing:
        def reset(self) -> None: ...

    class Silent:
        def reset(self, task: af.Task) -> None: ...

    class Positional(Guess):
        def reset(self, secret: int, /) -> None: ...  # type: ignore[override]

    errors.check(
        lambda: guesser(["x"], Positional),
        af.errors.SettingsError,
        "secret can only be passed by position; remove the '/'",
    )
    errors.check(
        lambda: guesser(["x"], Nothing), af.errors.SettingsError, "Nothing is not an environment: its reset has no"
    )
    errors.check(lambda: guesser(["x"], Silent), af.errors.SettingsError, "Silent has no tool")


def test_the_fingerprint_of_a_reward_depends_on_its_source() -> None:
    class Other(Guess):
        def reward(self, state: dict[str, Any]) -> float:
            return 0.5

    first, again, other = af.envs.reward(Guess), af.envs.reward(Guess), af.envs.reward(Other)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert 'state["done"]' in first.source


async def test_try_replays_the_chain_for_the_reward() -> None:
    agent = guesser([call(3), call(7)])
    (t,) = (await agent.rollout(task())).trajectories
    (mine,) = agent.reward
    assert (await mine.try_(t)).reward == 1.0
    score = await mine.try_(t.replace(task=task(secret=3)))
    assert score.reward is None and "returned 'right' on replay" in str(score.error)


# ---- Gymnasium


async def test_a_gymnasium_environment_is_wrapped() -> None:
    import gymnasium

    frozen = af.envs.from_env(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False),
        action={"left": 0, "down": 1, "right": 2, "up": 3},
    )
    way = ["down", "down", "right", "right", "down", "right"]
    script = [agents.call("", "act").replace('{"expression":""}', json.dumps({"action": a})) for a in way]
    agent = af.envs.agent(frozen, af.ScriptedEngine(script), chat=agents.chat())
    asked = af.Task("lake", ({"role": "user", "content": "Reach 15."},))
    (t,) = (await agent.rollout(asked)).trajectories
    assert (t.stop, t.success, t.metrics["total"]) == ("env_done", True, 1.0)
    assert [c.result.observation for c in t.tool_calls] == ["4", "8", "9", "10", "14", "15"]
    assert [turn.reward for turn in t.turns if turn.author == "tool"][-1] == 1.0
    (wrong,) = af.envs.tools(frozen)
    assert "unknown action 'jump'" in (await wrong.try_(action="jump", task=asked)).observation
