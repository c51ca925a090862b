"""Measure whether `af.diagnose` names planted faults first, and is silent about healthy runs.

    python benchmarks/bench_diagnose.py                # 37 planted faults, 40 healthy runs, two sets of seeds
    python benchmarks/bench_diagnose.py --only lookup  # cases whose name contains a text
    python benchmarks/bench_diagnose.py --sets test    # one set of seeds

Writes one line per case and a summary per set. The thresholds of `diagnose` may be changed to improve the figures of
the set "tuning"; those of the set "test" are the result. A planted case is one rollout of 8 groups of the shipped
policy and, for faults of the update, one `ppo_step`. A healthy run is a rollout of an expert, an imitation, or `train`
on the shipped tasks (with rewards, by distillation, or with a harness), diagnosed after every iteration.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch; more threads slow down a small model
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import agentfly_kit as af

# (family, planted fault, names that `diagnose` may give it)
CASES = [
    ("calculator", "constant reward", "constant_reward"),
    ("calculator", "reward of the task only", "no_signal"),
    ("calculator", "leaked answer", "leaked_answer"),
    ("calculator", "another tool name", "unparsed_calls"),
    ("calculator", "another call format", "unparsed_calls"),
    ("calculator", "long observations", "long_observations"),
    ("calculator", "few tokens", "truncated"),
    ("calculator", "one turn", "truncated"),
    ("calculator", "reward raises", "unscored"),
    ("calculator", "tool raises", "failing_tools"),
    ("calculator", "mask of observations", "wrong_mask"),
    ("calculator", "cold", "collapsed_entropy"),
    ("calculator", "hot", "gibberish"),
    ("calculator", "pay for brevity", "length_reward"),
    ("calculator", "stale sampler", "sampler_gap"),
    ("calculator", "lr x 100", "policy_moved"),
    ("calculator", "reversed sign", "reversed_advantages"),
    ("calculator", "reward twice", "duplicate_component"),
    ("lookup", "leaked answer", "leaked_answer"),
    ("lookup", "another call format", "unparsed_calls"),
    ("lookup", "long observations", "long_observations"),
    ("lookup", "lr x 100", "policy_moved"),
    ("lookup", "mask without calls", "wrong_mask"),
    ("search", "leaked answer", "leaked_answer"),
    ("search", "tool raises", "failing_tools"),
    ("search", "cold", "collapsed_entropy"),
    ("sql", "constant reward", "constant_reward"),
    ("sql", "refused calls", "rejected_calls"),
    ("webshop", "few tokens", "truncated"),
    ("code", "reward raises", "unscored"),
    ("calculator", "wrong sign", "reversed_reward"),
    ("lookup", "pay for length", "length_reward"),
    ("lookup", "any matching character", "lenient_reward"),
    ("lookup", "another tokenizer", "other_tokenizer"),
    ("calculator", "seed ignored, groups differ", "different_starts"),
    ("calculator", "seed ignored, tasks equal", "same_start"),
    ("calculator", "results ignored", "ignored_results"),
]
HEALTHY = [
    *(("train", family, seed) for family in ("calculator", "lookup", "search") for seed in (0, 1, 2)),
    *(("train", family, 0) for family in ("sql", "webshop", "code", "alfworld")),
    *(("expert", family, 0) for family in (
        "calculator", "lookup", "search", "sql", "webshop", "code", "alfworld", "math", "chess", "judge",
        "competition", "repo", "scienceworld", "reasoning_gym")),
    *(("imitation", family, 0) for family in ("calculator", "lookup", "search", "sql", "webshop", "alfworld")),
    *(("rejection", family, 0) for family in ("calculator", "lookup")),
    *(("distillation", family, 0) for family in ("calculator", "lookup")),
    ("harness", "calculator", 0), ("harness", "calculator", 1),
]  # fmt: skip
# Seeds of the planted cases, and numbers added to the seeds of the healthy runs.
SETS = {"tuning": 0, "test": 5}


@af.reward
def half() -> float:
    """Return 0.5 for every answer."""
    return 0.5


@af.reward
def by_task(answer: str) -> float:
    """Return a number that depends on the task only."""
    return len(answer) / 10


@af.reward
def raising(final: str | None) -> float:
    """Fail for answers that are not a number."""
    return float(final or "nothing")


@af.reward
def exact(final: str | None, answer: str) -> float:
    """Return 1 for the exact answer, else 0."""
    return float(final == answer)


@af.reward
def exact_again(final: str | None, answer: str) -> float:
    """Return the same as `exact`."""
    return float(final == answer)


@af.reward
def brief(final: str | None, answer: str, trajectory: af.Trajectory) -> float:
    """Take 0.2 for every token from the reward for the exact answer."""
    return float(final == answer) - 0.2 * sum(len(turn.ids or ()) for turn in trajectory.actions)


@af.reward
def wrong_sign(final: str | None, answer: str) -> float:
    """Return -1 for the exact answer, else 0."""
    return -float(final == answer)


@af.reward
def long_answer(final: str | None) -> float:
    """Return the length of the answer."""
    return len(final or "") / 10


@af.reward
def any_character(final: str | None, answer: str) -> float:
    """Return 1 if any character of the final answer is in the reference."""
    return float(any(character in answer for character in final or ""))


class Sum(af.envs.calculator.Calculator):
    """Environment that asks for a sum, and whose `reset` ignores its seed."""

    rng: random.Random | None = None

    def reset(self, seed: int) -> str:
        rng = self.rng or random.Random(7)
        self.numbers = rng.randint(10, 99), rng.randint(10, 99)
        return "What is {}+{}?".format(*self.numbers)

    def reward(self, final: str | None) -> float:
        return float(final == str(sum(self.numbers)))


def ignoring(task: Any, messages: Any, rng: random.Random) -> Any:
    """Call the tool as the expert does, and then answer with one of four numbers."""
    move = af.envs.calculator.family.expert_player(task, messages, rng)
    return rng.choice("1234") if isinstance(move, str) else move


async def solve(question: str, endpoint: af.Endpoint) -> str:
    """Answer a question with the calculator, as an agent of another framework would."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    tools = af.ToolSet(af.envs.calculator.family.tools)
    while True:
        message = (await endpoint.chat(messages, tools.schemas))["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for made in message["tool_calls"]:
            try:
                content = str(eval(json.loads(made["function"]["arguments"])["expression"], {"__builtins__": {}}))
            except Exception as error:
                content = str(error)
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": content})


def pages(**arguments: Any) -> str:
    """Return a long page."""
    return "This page has many words that say nothing. " * 150


def broken(**arguments: Any) -> str:
    """Raise, as a tool with a mistake does."""
    raise KeyError("index")


def refusing(**arguments: Any) -> str:
    """Refuse every call."""
    raise af.ToolError("permission denied for this user")


def _with_tools(agent: Any, call: Callable[..., str], rename: str = "") -> Any:
    """Replace what every tool does; the names and schemas stay, unless `rename` is appended to the names."""
    tools = [af.Tool.from_schema(t.name + rename, t.schema, call) for t in agent.tools]
    return agent.replace(tools=tools)


def _leaky(task: Any) -> Any:
    *before, last = task.messages
    leaked = {**last, "content": f"{last['content']} (reference: {task.fields['answer']})"}
    return dataclasses.replace(task, messages=(*before, leaked))


def agent_of(family: str, policy: Any, seed: int) -> Any:
    of = getattr(af.envs, family)
    options = getattr(of, "BRIEF", None)
    return of.agent(policy, seed=seed, **({} if options is None else {"options": options}))


async def planted(family: str, fault: str, seed: int = 0) -> Any:
    """Return the rollout, batch and statistics of a step with a planted fault."""
    policy = af.tiny.policy(family)
    agent = agent_of(family, policy, seed)
    tasks = list(getattr(af.envs, family).tasks(8, "train", seed=seed))
    lr = 3e-4
    if fault == "constant reward":
        agent = agent.replace(reward=half)
    elif fault == "reward of the task only":
        agent = agent.replace(reward=by_task)
    elif fault == "leaked answer":
        tasks = [_leaky(task) for task in tasks]
    elif fault == "another tool name":
        agent = _with_tools(agent, pages, "_v2")
    elif fault == "another call format":
        agent = agent.replace(chat=af.Chat(policy.chat.tokenizer, format="react"))
    elif fault == "long observations":
        agent = _with_tools(agent, pages)
    elif fault == "tool raises":
        agent = _with_tools(agent, broken)
    elif fault == "refused calls":
        agent = _with_tools(agent, refusing)
    elif fault == "few tokens":
        agent = agent.replace(sampling=af.Sampling(max_tokens=3))
    elif fault == "one turn":
        agent = agent.replace(max_turns=1)
    elif fault == "reward raises":
        agent = agent.replace(reward=raising)
    elif fault == "cold":
        agent = agent.replace(sampling=agent.sampling.replace(temperature=0.05))
    elif fault == "hot":
        agent = agent.replace(sampling=agent.sampling.replace(temperature=4.0))
    elif fault == "pay for brevity":
        agent = agent.replace(reward=brief)
    elif fault == "reward twice":
        agent = agent.replace(reward=[exact, exact_again])
    elif fault == "stale sampler":
        other = policy.copy()
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1.03)
        agent = agent.replace(engine=af.LocalEngine(other))
    elif fault == "lr x 100":
        lr = 3e-2
    elif fault == "wrong sign":
        agent = agent.replace(reward=wrong_sign)
    elif fault == "pay for length":
        agent = agent.replace(reward=long_answer)
    elif fault == "any matching character":
        agent = agent.replace(reward=any_character)
    elif fault == "another tokenizer":
        agent = agent.replace(engine=af.LocalEngine(af.tiny.policy("search")))
    elif fault.startswith("seed ignored"):
        rng = random.Random(seed) if fault.endswith("groups differ") else None
        agent = af.envs.agent(type("Sum", (Sum,), {"rng": rng}), agent.engine, chat=policy.chat, max_turns=4, size=8)
        tasks = [af.Task(f"sum-{i}", ({"role": "user", "content": "Answer the question."},)) for i in range(8)]
    elif fault == "results ignored":
        of = af.envs.calculator
        player = of.family.agent(af.envs.family.PlayerEngine(ignoring, policy.chat), chat=policy.chat)
        shown = await player.rollout(list(of.tasks(64, "train", seed=seed + 1)), group_size=2)
        await af.imitate(policy, shown, epochs=4, minibatch=16)
    rollout = await agent.rollout(tasks, group_size=8)
    try:
        batch = af.collate(rollout, af.advantages.grpo)
    except af.errors.EmptyBatch:
        return rollout, None, None
    if fault == "mask of observations":
        columns = torch.arange(batch.ids.shape[1])
        return rollout, batch.replace(mask=batch.attention & (columns > 0)), None
    if fault == "mask without calls":
        last = torch.stack([torch.tensor(row.turn_index == row.turn_index.max()) for row in _padded(batch)])
        return rollout, batch.replace(mask=batch.mask & last), None
    if fault == "reversed sign":
        batch = batch.replace(advantages=-batch.advantages)
    try:
        stats = await af.ppo_step_async(policy, af.adamw(policy, lr), batch, af.PPOConfig(epochs=2, minibatch=32))
    except af.errors.BatchError:  # the update refuses ids of another tokenizer
        stats = None
    return rollout, batch, stats


class _padded:
    """Rows of a batch whose `turn_index` is padded to the width of the batch."""

    def __init__(self, batch: Any) -> None:
        import numpy as np

        width = batch.ids.shape[1]
        self.rows = [np.pad(row.turn_index, (0, width - len(row)), constant_values=-1) for row in batch.rows]

    def __iter__(self) -> Any:
        for index in self.rows:
            yield type("Padded", (), {"turn_index": index})


async def healthy(kind: str, family: str, seed: int, steps: int = 2) -> list[Any]:
    """Make a healthy run and return the serious findings of all its iterations."""
    if kind == "expert":
        chains = await getattr(af.envs, family).expert().rollout(
            list(getattr(af.envs, family).tasks(4, "train", seed=seed)), group_size=2)  # fmt: skip
        return list(af.diagnose(chains).serious)
    policy = af.tiny.policy(family)
    agent = agent_of(family, policy, seed)
    tasks = list(af.load_tasks(family).train)  # `af.envs.alfworld.tasks()` are too hard for the shipped policy
    random.Random(seed).shuffle(tasks)
    out: list[Any] = []
    if kind in ("imitation", "rejection"):
        optimizer = af.adamw(policy, 1e-3)
        for first in range(0, 8 * steps, 8):
            given = tasks[first : first + 8]
            if kind == "imitation":
                chains, weights = await getattr(af.envs, family).expert(policy).rollout(given, group_size=2), None
            else:
                chains, weights = await agent.rollout(given, group_size=8), lambda rewards, _: (rewards > 0).float()
            batch = af.collate(chains, weights, imitate=True)
            stats = await asyncio.to_thread(af.imitation_step, policy, optimizer, batch)
            out += af.diagnose(chains, batch, stats).serious
        return out
    more: dict[str, Any] = {}
    config = af.TrainConfig(steps=steps, lr_end=3e-5, seed=seed)
    if kind == "distillation":
        more["teacher"] = af.tiny.policy(family)
        config = config.replace(advantage="none", teacher_coef=1.0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.02)
    elif kind == "harness":
        tasks = [af.Task(t.id, t.messages, {**t.fields, "question": t.messages[-1]["content"]}) for t in tasks]
        agent = af.Agent(
            af.LocalEngine(policy), chat=policy.chat, harness=solve, reward=exact, max_turns=4,
            sampling=af.Sampling(max_tokens=64),
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = af.train(agent, policy, tasks, config, run=f"{folder}/run", **more)
        began, spent = time.process_time(), 0.0
        async for step in run:
            at = time.process_time()
            findings = af.diagnose(step.rollout, stats=step.stats, records=run.records)
            spent += time.process_time() - at
            out += findings.serious
        total = time.process_time() - began - spent
    print(
        f"  diagnose took {spent:.3f} of {total:.2f} CPU s ({spent / total:.1%}); last: {[f.name for f in findings]}"
    )
    return out


async def measure(only: str, of: str, steps: int) -> None:
    """Run all cases with one set of seeds."""
    named = cases = quiet = runs = 0
    for family, fault, wanted in CASES:
        if only in f"{family} {fault}":
            findings = af.diagnose(*await planted(family, fault, SETS[of]))
            first = findings[0].name if findings else "nothing"
            cases, named = cases + 1, named + (first == wanted)
            rest = [(f.name, round(f.number, 2), round(f.effect, 2)) for f in findings]
            print("ok  " if first == wanted else "MISS", f"{of}: {family}, {fault}: {wanted}", rest, flush=True)
    for kind, family, seed in HEALTHY:
        if only in f"{family} healthy {kind}":
            serious = await healthy(kind, family, seed + SETS[of], steps)
            runs, quiet = runs + 1, quiet + (not serious)
            print("MISS" if serious else "ok  ", f"{of}: {family}, {kind}, seed {seed}", serious, flush=True)
    print(
        f"{of}: {named} of {cases} planted faults were named first; nothing serious in {quiet} of {runs} healthy runs"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of seeds")
    parser.add_argument("--steps", type=int, default=2, help="iterations of each healthy run")
    given = parser.parse_args()
    for of in given.sets:
        await measure(given.only, of, given.steps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
