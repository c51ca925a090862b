"""Unchanged rewards and environments of TRL, verifiers, Gymnasium, TextArena and OpenEnv."""

import json
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agents
import errors
import numpy as np
import packages
import pytest
import vision_models
from paths import TESTS
from waiting import GUARD, until

import agentfly_kit as af


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SUM = af.Task("sum", ({"role": "user", "content": "2+3?"},), {"answer": "5", "info": {"level": 1}})


async def chain(reward: Any, task: af.Task = SUM, texts: tuple[str, ...] = ("5",), **settings: Any) -> af.Trajectory:
    agent = af.Agent(af.ScriptedEngine(list(texts)), chat=agents.chat(), reward=reward, **settings)
    return (await agent.rollout(task)).trajectories[0]


# --- rewards -------------------------------------------------------------------------------------


async def test_rewards_of_trl() -> None:
    seen: dict[str, Any] = {}

    def exact(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, completions=completions)
        return [1.0 if c[-1]["content"] == a else 0.0 for c, a in zip(completions, answer, strict=True)]

    async def short(prompts: Any, completions: Any) -> list[float]:
        return [float(len(p[-1]["content"]) + len(c)) for p, c in zip(prompts, completions, strict=True)]

    def skipped(completions: Any, **kwargs: Any) -> list[float | None]:
        return [None]

    t = await chain([af.trl.reward(exact), af.trl.reward(short, weight=0.5, name="length")])
    assert (t.reward, t.metrics) == (3.5, {"exact": 1.0, "length": 5.0})
    assert seen["prompts"] == [[{"role": "user", "content": "2+3?"}]]
    assert [m["role"] for m in seen["completions"][0]] == ["assistant"]
    assert seen["info"] == [{"level": 1}] and seen["trainer_state"] is None
    assert (await chain(af.trl.reward(exact), texts=("6",))).reward == 0.0
    assert (await chain(af.trl.reward(skipped))).reward is None
    tools = await chain(af.trl.reward(short), texts=(agents.call("2+3"), "5"), tools=[agents.calculator])
    assert tools.reward == 4 + 3, "the call, its result and the answer"
    assert af.trl.reward(exact).fingerprint != af.trl.reward(skipped, name="exact").fingerprint


@pytest.mark.parametrize("trl", [True, False])
async def test_images_are_parts_as_the_library_writes_them(trl: bool) -> None:
    seen: list[Any] = []
    image = af.Image(vision_models.picture(1))

    def of_trl(prompts: Any, completions: Any) -> list[float]:
        return [float(seen.extend((*prompts, *completions)) or 1)]

    def of_verifiers(prompt: Any, completion: Any) -> float:
        return float(seen.extend((prompt, completion)) or 1)

    policy = vision_models.shared("idefics3")
    given = {"chat": policy.chat, "reward": af.trl.reward(of_trl if trl else of_verifiers), "max_turns": 1}
    agent = af.Agent(af.LocalEngine(policy), sampling=af.Sampling(max_tokens=2), **given)
    messages = ({"role": "system", "content": "Look."}, {"role": "user", "content": ["What is", image]})
    await agent.rollout(af.Task("t", messages))
    (system, user), completion = seen
    part = (
        {"type": "image", "image": image.to_pil()}
        if trl
        else {"type": "image_url", "image_url": {"url": image.data_url}}
    )
    assert system["content"] == "Look." and isinstance(completion[0]["content"], str)
    assert user == {"role": "user", "content": [{"type": "text", "text": "What is"}, part]}


async def test_rewards_of_verifiers() -> None:
    def exact(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    async def level(prompt: Any, info: Any, state: Any, task: str) -> float:
        assert prompt == state["prompt"] and state["answer"] == "5" and task == "sum"
        return float(info["level"])

    def everything(completion: Any, **kwargs: Any) -> float:
        return float(kwargs["extra"])

    assert (await chain([af.trl.reward(exact), af.trl.reward(level)])).metrics == {"exact": 1.0, "level": 1.0}
    assert (await chain(af.trl.reward(everything), af.Task("a", SUM.messages, {"extra": 3}))).reward == 3.0


async def test_fields_and_results_of_rewards_are_checked() -> None:
    def gold(completions: Any, gold: Any) -> Any:
        return [1.0, 2.0]

    await errors.check(
        lambda: chain(af.trl.reward(gold)), af.errors.TaskError, "reward gold requires the field 'gold'"
    )
    t = await chain(af.trl.reward(gold), af.Task("a", SUM.messages, {"gold": "5"}))
    assert t.reward is None and "must return a list with one number per completion, got [" in str(t.error)


def test_an_agent_rejects_rewards_of_other_packages_with_a_remedy() -> None:
    def trl(completions: Any, answer: Any, **kwargs: Any) -> Any: ...

    def trl_without(prompts: Any, answer: Any) -> Any: ...

    def verifiers(completion: Any, answer: Any, state: Any) -> Any: ...

    for function in (trl, trl_without, verifiers):
        errors.check(
            lambda: af.Agent(af.ScriptedEngine([""]), chat=agents.chat(), reward=function),
            af.errors.RewardError,
            re.compile(r"can be passed as af.trl.reward\(function\)"),
        )

    def late(state: Any) -> float: ...

    errors.check(
        lambda: af.Agent(af.ScriptedEngine([""]), chat=agents.chat(), reward=late).check_tasks([SUM]),
        af.errors.TaskError,
        re.compile(r"for a reward function of verifiers use af.trl.reward\(function\)"),
    )


# --- environments of TRL -------------------------------------------------------------------------


class Counter:
    """An environment as defined in TRL's documentation."""

    def __init__(self, step: int = 1) -> None:
        self.value, self.step = 0, step

    def reset(self, target: int, **kwargs: Any) -> str:
        self.value, self.target, self.prompt = 0, target, kwargs["prompt"]
        return f"Count to {target}."

    def increment(self, by: int) -> dict[str, int]:
        """Increment the counter.

        Args:
            by: the amount.
        """
        if by < 0:
            raise ValueError("by must not be negative")
        self.value += by * self.step
        return {"value": self.value}

    async def look(self) -> int:
        """Return the value."""
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def _hidden(self) -> None: ...


COUNT = af.Task("c", ({"role": "user", "content": "Count."},), {"target": 4, "task": "a column named task"})


async def test_environments_of_trl() -> None:
    script = [call("increment", by=2), call("increment", by=-1), call("look"), "Done."]
    environment = af.trl.environment(Counter)
    agent = af.envs.agent(environment, af.ScriptedEngine(script), chat=agents.chat(), options={"step": 2})
    (t,) = (await agent.rollout(COUNT)).trajectories
    assert agent.tools.names == ("increment", "look")
    assert "Count to 4." in str(t.messages)
    assert [c.result.observation for c in t.tool_calls if c.result] == [
        "{'value': 4}",
        "{'error': 'by must not be negative'}",
        "4",
    ]
    assert (t.reward, t.stop, t.metrics) == (1.0, "answered", {"reward": 1.0})

    def value(environments: Any, **kwargs: Any) -> list[float]:
        return [float(each.value) for each in environments]

    agent = af.envs.agent(
        environment,
        af.ScriptedEngine(script),
        chat=agents.chat(),
        reward=af.trl.reward(value, environment=environment),
    )
    assert (await agent.rollout(COUNT))[0].reward == 2.0
    missing = type("Missing", (Counter,), {"reset": lambda self, goal: None})
    agent = af.envs.agent(af.trl.environment(missing), af.ScriptedEngine(script), chat=agents.chat())
    words = r"Missing.reset requires the field 'goal', which 'c' lacks \(it has: target, task\)"
    await errors.check(lambda: agent.rollout(COUNT), af.errors.TaskError, re.compile(words))


# --- environments with reset and step ------------------------------------------------------------


async def played(environment: type, actions: list[str], **settings: Any) -> af.Trajectory:
    script = [*(call("act", action=text) for text in actions), "I stop."]
    agent = af.envs.agent(environment, af.ScriptedEngine(script), chat=agents.chat(), max_turns=30, **settings)
    return (await agent.rollout(af.Task("t", ({"role": "user", "content": "Play."},), {"seed": 3}))).trajectories[0]


def observations(t: af.Trajectory) -> list[str]:
    return [c.result.observation for c in t.tool_calls if c.result]


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


class Echo:
    """An environment with the protocol of OpenEnv's asynchronous clients."""

    async def reset(self, **options: Any) -> StepResult:
        self.seed = options["seed"]
        return StepResult({"text": f"seed {self.seed}"})

    async def step(self, action: dict[str, str]) -> StepResult:
        return StepResult({"text": action["say"] + "!"}, 0.5, action["say"] == "end")

    async def close(self) -> None: ...


class Guess:
    """An environment with the protocol of TextArena. Each observation repeats the earlier observations."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        self.text, self.done, self.secret = "Guess.", False, seed

    def get_observation(self) -> tuple[int, str]:
        return 0, self.text

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.done = int(action) == self.secret
        self.text += f"\n{action}: {'right' if self.done else 'wrong'}"
        return self.done, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: float(self.done)}, {}


async def test_environments_of_three_protocols() -> None:
    def say(text: str) -> dict[str, str]:
        if text == "bad":
            raise ValueError("say something good")
        return {"say": text}

    gymnasium = pytest.importorskip("gymnasium")

    class Words(gymnasium.Env):  # type: ignore[misc, name-defined]
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return f"word {self.np_random_seed}", {}

        def step(self, action: str) -> Any:
            return action.upper(), 0.25, False, action == "end", {}

    class Old:
        """Protocol of Gym before 0.26, with observations that are tuples."""

        def reset(self) -> Any:
            return 1, {"cards": 2}, False

        def step(self, action: str) -> Any:
            return (1, action), np.float32(0.25), np.bool_(action == "end"), {}

    echo = af.envs.from_env(Echo, action=say, show=lambda o: o["text"])
    for environment, actions, shown, seen, end in (
        (echo, ["a", "bad", "end", "more"], "seed 3", ["a!", "say something good", "end!"], (1.0, "env_done", True)),
        (af.envs.from_env(Guess), ["1", "3"], "Guess.", ["1: wrong", "3: right"], (1.0, "env_done", True)),
        (af.envs.from_env(Guess), ["1"], "Guess.", ["1: wrong"], (0.0, "answered", False)),
        (af.envs.from_env(Words), ["a", "end"], "word 3", ["A", "END"], (0.5, "env_done", True)),
        (af.envs.from_env(Old), ["a", "end"], "(1, {'cards': 2}, False)", ["(1, 'a')", "(1, 'end')"],
         (0.5, "env_done", True)),
    ):  # fmt: skip
        t = await played(environment, actions)
        assert shown in str(t.messages[0]["content"]) and observations(t) == seen
        assert (t.metrics["total"], t.stop, t.success) == end


class NoStep:
    def reset(self) -> None: ...


async def test_environments_without_a_method_are_rejected() -> None:
    t = await played(af.envs.from_env(lambda: NoStep()), ["a"])
    assert t.reward is None and "NoStep must have a method step" in str(t.error)


Timestep = namedtuple("Timestep", "step_type, reward, discount, observation")


@pytest.mark.parametrize(
    "result",
    [
        1.0, None, ("o", 1.0, True), ("o", 1.0, True, False), Timestep(1, 1.0, 1.0, {}), ("o", float("nan"), True, {}),
        (np.zeros((1, 2)), np.ones(1), np.array([True]), np.array([False]), {}), (["o"], [1.0], [True], [{}]),
        ({"a": 1}, {"a": 1.0}, {"a": False}, {"a": False}, {"a": {}}), StepResult("o", [1.0], [True]),  # type: ignore
    ],
)  # fmt: skip
async def test_a_chain_whose_environment_has_another_protocol_is_not_scored(result: Any) -> None:
    """Three values, no info, dm_env, vector environments, and those for several agents. All were scored 0."""

    class Odd(NoStep):
        def step(self, action: str) -> Any:
            return result

    t = await played(af.envs.from_env(Odd), ["a"])
    assert (t.reward, t.stop) == (None, "error")
    assert "Odd.step must return a result as in Gymnasium, TextArena or OpenEnv, " in str(t.error)


# --- the packages themselves; install them to run these -------------------------------------------


@pytest.mark.long
async def test_textarena() -> None:
    textarena = pytest.importorskip("textarena")
    environment = af.envs.from_env(lambda: textarena.make("GuessTheNumber-v0"))
    t = await played(environment, [f"[{n}]" for n in range(1, 21)])
    assert "between 1 and 20" in str(t.messages)
    assert "[1]" in observations(t)[0] and "between 1 and 20" not in observations(t)[0]
    assert t.stop == "env_done" and 0 < t.metrics["total"] <= 1


@pytest.mark.long
async def test_openenv() -> None:
    pytest.importorskip("openenv")
    import threading

    import uvicorn
    from openenv.core import GenericEnvClient
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str

    class Heard(Observation):
        text: str

    class Parrot(Environment):  # type: ignore[misc]
        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
            return Heard(text=f"seed {seed}", done=False, reward=None)

        def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
            return Heard(text=action.text.upper(), done=action.text == "end", reward=0.5)

        @property
        def state(self) -> State:
            return State(episode_id="a", step_count=0)

    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Parrot, Say, Heard), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    environment = af.envs.from_env(
        lambda: GenericEnvClient(base_url=f"http://127.0.0.1:{port}"),
        action=lambda text: {"text": text},
        show=lambda observation: observation["text"],
    )
    try:
        t = await played(environment, ["hello", "end"])
    finally:
        server.should_exit = True
        thread.join(GUARD)
    assert observations(t) == ["HELLO", "END"] and "seed 3" in str(t.messages)
    assert (t.metrics["total"], t.stop) == (1.0, "env_done")


# verifiers before 0.4 imports the package `agents`, whose name is also that of a module of the tests.
RUBRIC = f"""
import sys
tests = [path for path in sys.path if path.startswith({str(TESTS)!r})]
sys.path[:] = [path for path in sys.path if path not in tests]
import verifiers
for name in [name for name in sys.modules if name.split(".")[0] == "agents"]:
    del sys.modules[name]
sys.path[:0] = tests
import asyncio, test_adapters
asyncio.run(test_adapters.score_with_a_rubric())
"""


@pytest.mark.long
def test_verifiers(tmp_path: Path) -> None:
    packages.install(tmp_path, "verifiers==0.1.14")
    packages.run(tmp_path, RUBRIC)


async def score_with_a_rubric() -> None:
    import verifiers  # type: ignore[import-not-found, unused-ignore]

    def exact(completion: Any, answer: str, **kwargs: Any) -> float:
        return float(completion[-1]["content"] == answer) + kwargs["info"]["level"]

    t = await chain(af.trl.reward(exact))
    state = {"prompt": t.messages[:1], "completion": [dict(m) for m in t.messages[1:]], **SUM.fields}
    state["input"] = {"task": "sum"}
    theirs = await verifiers.Rubric(funcs=[exact])._call_individual_reward_func(exact, state)
    assert t.reward == theirs == 2.0
