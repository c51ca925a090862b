"""Errors of agents, rollouts, chains, budgets, branches and harnesses: settings and arguments that are rejected."""

import math
from typing import Any

import errors
from agents import Box, ForkingBox, Played, agent, call, chat, played, put, scripted
from test_agent import ODD, TASK, numbered
from test_harness import harnessed, solve

import agentfly_kit as af
from agentfly_kit.chat.text_chat import TextChat
from agentfly_kit.errors import ChatTemplateError, RewardError, RunError, SettingsError, TaskError, check_settings

STRING = "must be Task objects, got the string 'What is 2+3?'; af.tasks_from"
HARNESS = "must not be given with harness"


def rollout(given: Any = (TASK,), **options: Any) -> Any:
    return scripted(["5"]).rollout(list(given) if isinstance(given, tuple) else given, **options)


def made(**options: Any) -> Any:
    return agent(**{"engine": Played(["5"]), "chat": chat()} | options)


def rewarded(completions: list[str], answer: str, **kwargs: Any) -> list[float]:
    return []


test_errors = errors.rejected(
    (lambda: rollout([]), TaskError, "tasks must hold at least one task"),
    (lambda: rollout([{"id": "x"}]), TaskError, "must be Task objects, got "),
    (lambda: rollout([{"id": "x"}]), TaskError, "af.tasks_from"),
    (lambda: rollout(["What is 2+3?"]), TaskError, STRING),
    (lambda: rollout("What is 2+3?"), TaskError, STRING),
    (lambda: agent().chain("What is 2+3?"), TaskError, STRING),
    (lambda: af.evaluate(agent(), "What is 2+3?"), TaskError, STRING),
    (lambda: af.train(agent(), agent().engine.policy, "What is 2+3?"), TaskError, STRING),
    (lambda: rollout(5), TaskError, "must be Task objects, got 5"),
    (lambda: rollout([ODD]), ChatTemplateError, "rejected messages"),
    (lambda: rollout([af.Task("u", TASK.messages)]), Exception, "answer"),
    (lambda: rollout(group_size=2.5), SettingsError, "group_size must be an integer of at least 1, got 2.5"),
    (lambda: rollout(share=(2, 2)), SettingsError, "share must be (i, n) with 0 <= i < n, got (2, 2)"),
    (lambda: rollout(share=3), SettingsError, "share must be (i, n) with 0 <= i < n, got 3"),
    (lambda: rollout(workers=3), SettingsError, "workers must be the result of af.ray.workers, or None, got 3"),
    (lambda: check_settings(af.Budget(), {"tokens": "of at leat 1"}), KeyError, "at leat"),
    (lambda: check_settings(af.Budget(), {"token": "of at least 1"}), KeyError, "token"),
    (lambda: rollout(group_size=0), SettingsError, "group_size must be an integer of at least 1, got 0"),
    (lambda: rollout(max_concurrency=0), SettingsError, "max_concurrency must be an integer of at least 1, got 0"),
    (lambda: rollout(budget=100), SettingsError, "budget must be an af.Budget or None, got 100"),
    (lambda: rollout(group_budget={"tokens": 3}), SettingsError, "group_budget must be an af.Budget"),
    (lambda: af.Budget(tokens=0), SettingsError, "tokens must be"),
    (lambda: af.Budget(turns=1.5), SettingsError, "turns must be"),
    (lambda: af.Budget(tool_calls=True), SettingsError, "tool_calls must be"),
    (lambda: af.Budget(seconds=0), SettingsError, "seconds must be"),
    (lambda: af.Agent(af.OpenAIEngine("http://127.0.0.1:1/v1", "m"), chat=TextChat()).rollout(
        numbered(1), budget=af.Budget(tokens=5)), SettingsError, "must not limit tokens"),
    (lambda: harnessed(solve, ["5"]).rollout([TASK], budget=af.Budget(tool_calls=3)), SettingsError,
     "must not limit tool_calls: the harness runs its own tools"),
    (lambda: made(engine="vllm"), SettingsError, "engine must be an engine"),
    (lambda: made(chat="qwen"), SettingsError, "chat must be a Chat"),
    (lambda: made(max_turns=0), SettingsError, "max_turns must be an integer of at least 1, got 0"),
    (lambda: made(max_turns=None), SettingsError, "max_turns must be an integer of at least 1, got None"),
    (lambda: made(max_tokens=0), SettingsError,
     "max_tokens must be an integer of at least 1 or None, got 0"),
    (lambda: made(max_tool_calls=0), SettingsError,
     "max_tool_calls must be an integer of at least 1 or None, got 0"),
    (lambda: made(max_concurrent_requests=0), SettingsError,
     "max_concurrent_requests must be an integer of at least 1 or None, got 0"),
    (lambda: made(timeout=0), SettingsError, "timeout must be a finite number above 0 or None, got 0"),
    (lambda: made(sampling={"temperature": 1}), SettingsError, "sampling must be an af.Sampling, got {"),
    (lambda: made(tools=[put]), SettingsError, "got none for Box; add pools=[af.Pool(Box, size=8)]"),
    (lambda: made(reward=rewarded), RewardError,
     "parameters can be final, trajectory, context, a sandbox, or a field of the task"),
    (lambda: made(nudge=3), SettingsError, "nudge must be a string or None, got 3"),
    (lambda: made(max_nudges=2), SettingsError, "max_nudges has an effect only with nudge, got 2"),
    (lambda: made(nudge="x", max_nudges=0), SettingsError, "max_nudges must be an integer of at least 1, got 0"),
    (lambda: made(nudge="x", user=lambda chain: None), SettingsError, "nudge must be None with user"),
    (lambda: af.hooks.simulated_user(Played(["5"]), "x"), SettingsError,
     "requires token ids: pass simulated_user(..., chat=af.Chat(tokenizer))"),
    (lambda: af.hooks.sliding_window(-1), SettingsError, "steps must be an integer of at least 0, got -1"),
    (lambda: made().last_run, SettingsError, "has not started a rollout yet"),
    *((lambda name=name, value=value: made(**{name: value}), SettingsError,
       f"{name} must be a function of ({parameters}), got {said}")
      for name, parameters in (
          ("before_chain", "chain"), ("before_turn", "chain"), ("after_observation", "chain"),
          ("on_context_full", "chain"), ("after_chain", "chain, trajectory"), ("group_reward", "group"))
      for value, said in ((lambda a, b, c: None, ""), ("later", "'later'"))),
    (lambda: made(before_turn=lambda a, b, c: None), SettingsError, "<lambda>(a, b, c)"),
)  # fmt: skip


def recorded() -> Any:
    return af.Rollout.from_trajectories([af.Trajectory("g/0", TASK, "g", 0, (), "answered", 1.0)])


test_errors_of_rollouts = errors.rejected(
    (lambda: recorded().to_frame("rows"), SettingsError, "kind must be one of 'trajectories', 'turns', 'tokens'"),
    (lambda: recorded().diff(af.Rollout()), SettingsError, "no task in common"),
    (lambda: af.Rollout.load("none.jsonl"), RunError, "cannot be read"),
    (lambda: af.train(agent(), agent().engine.policy, [af.Task("t", TASK.messages, {"answer": "5", "x": object()})],
                      af.TrainConfig(steps=1, save_rollouts=True)),
     RunError, "task 't' cannot be saved as JSON: got a object"),
)  # fmt: skip


def chain_of(script: Any = ("5",), **settings: Any) -> Any:
    return played(list(script), **settings).chain(TASK)


async def stopped_by_max_turns() -> Any:
    chain = chain_of([call("1+1"), "5"], max_turns=1)
    await chain.step()
    await chain.sample()


test_errors_of_chains = errors.rejected(
    (stopped_by_max_turns, SettingsError, "chain.sample: the chain was stopped by max_turns; call chain.finish() or"),
    (lambda: chain_of().force([-1]), SettingsError, "vocabulary"),
    (lambda: chain_of().force([400]), SettingsError, "vocabulary"),
    (lambda: chain_of().force([10**9]), SettingsError, "vocabulary"),
    (lambda: chain_of().fork(at=9), SettingsError, "at must be one of chain.turns, or its index, got 9"),
    (lambda: chain_of().act(), SettingsError, "nothing to run"),
    (lambda: chain_of().act(), SettingsError, "await chain.sample()"),
    (lambda: chain_of().observe("x"), SettingsError, "no complete action yet"),
    *((lambda to=to: chain_of().rewind(to=to), SettingsError, "chain.turns") for to in (7, -9)),
)  # fmt: skip


def coins(**settings: Any) -> Any:
    return played(["5"], tools=[put], pools=[af.Pool(ForkingBox, size=4)], **settings)


def branched(a: Any, group_size: int = 2, branch: Any = None) -> Any:
    return a.rollout(numbered(1), group_size, branch=af.Branch() if branch is None else branch)


def train_branching(size: int) -> Any:
    policy, config = af.tiny.policy("lookup"), af.TrainConfig(branch=af.Branch(4), advantage="arpo")
    return af.train(af.envs.lookup.agent(policy, size=size), policy, af.load_tasks("lookup").train, config)


test_errors_of_branching = errors.rejected(
    (lambda: af.Branch(initial=0), SettingsError, "initial must be an integer of at least 1 or None, got 0"),
    (lambda: af.Branch(initial=2.0), SettingsError, "initial must be an integer of at least 1 or None, got 2.0"),
    (lambda: af.Branch(width=0), SettingsError, "width must be an integer of at least 1, got 0"),
    (lambda: af.Branch(tokens=True), SettingsError, "tokens must be an integer of at least 1, got True"),
    (lambda: af.Branch(base=math.nan), SettingsError, "base must be a finite number, got nan"),
    (lambda: af.Branch(weight=math.inf), SettingsError, "weight must be a finite number, got inf"),
    (lambda: af.Branch(threshold="high"), SettingsError, "threshold must be a finite number or None, got 'high'"),
    (lambda: af.Branch(measure="variance"), SettingsError,
     "measure must be 'entropy', 'surprisal' or a function of a turn, got 'variance'"),
    (lambda: branched(coins(), 8, af.Branch(9)), SettingsError, "initial must be at most group_size=8, got 9"),
    (lambda: branched(coins(), 8, 3), SettingsError, "branch must be an af.Branch or None, got "),
    (lambda: branched(coins(), 8), SettingsError,
     "a group of 8 chains runs as a whole, so the pool of ForkingBox must be at least 8, got 4; increase it"),
    (lambda: branched(played(["5"]), 80), SettingsError, "so max_concurrency must be at least 80, got 64"),
    (lambda: branched(agent(engine=af.LocalEngine(agent().engine.policy, slots=8)), 40), SettingsError,
     "the slots of the engine must be"),
    (lambda: branched(coins(after_observation=lambda chain: 0)), SettingsError,
     "combined with Agent(after_observation="),
    (lambda: branched(coins(before_turn=lambda chain: None)), SettingsError, "combined with Agent(before_turn="),
    (lambda: branched(agent(tools=(), harness=lambda endpoint: None)), SettingsError, "combined with Agent(harness="),
    (lambda: branched(scripted(["5"])), SettingsError, "branch needs entropies, which ScriptedEngine does not report"),
    (lambda: branched(scripted(["5"]), branch=af.Branch(measure="surprisal")), SettingsError,
     "branch needs logprobs, which ScriptedEngine does not report"),
    (lambda: branched(played(["5"], tools=[put], pools=[af.Pool(Box, size=64)])), SettingsError,
     "can fork, but Box has no method fork"),
    (lambda: af.TrainConfig(branch=4), SettingsError, "branch must be an af.Branch or None, got "),
    (lambda: af.TrainConfig(advantage="arpo", attribution="firm"), SettingsError, "attribution must be"),
    (lambda: af.TrainConfig(attribution="hard"), SettingsError,
     "attribution has an effect only with advantage 'arpo'"),
    (lambda: train_branching(size=4), SettingsError, "the pool of Lookup must be at least 8, got 4"),
)  # fmt: skip


test_errors_of_harnesses = errors.rejected(
    (lambda: harnessed(solve, ["5"], tools=[put]), SettingsError, f"tools {HARNESS}"),
    (lambda: harnessed(solve, ["5"], before_turn=lambda chain: None), SettingsError, f"before_turn {HARNESS}"),
    (lambda: harnessed("solve", ["5"]), SettingsError, "harness must be a function"),
    *((lambda harness=harness: harnessed(harness, []), SettingsError, text) for harness, text in (
        (lambda endpiont: "5", "'endpoint', through which it reaches the policy, got (endpiont)"),
        (lambda question, base_url: "5", "got (question, base_url)"),
        (lambda endpoint, /: "5", "must accept a keyword argument, got a positional-only parameter; name each"),
        (lambda endpoint, *fields: "5", "must accept a keyword argument, got a variadic positional parameter; name"),
        (lambda endpoint, **fields: "5", "remove / and *; parameters can be endpoint, task, context, a sandbox, or"),
    )),
)  # fmt: skip


class Few(af.Budget):
    pass


class Cold(af.Sampling):
    pass


async def test_subclasses_of_settings_are_accepted() -> None:
    assert len(await rollout(budget=Few(turns=3), group_budget=Few(turns=3))) == 1
    assert made(sampling=Cold(0.5)).sampling.temperature == 0.5
