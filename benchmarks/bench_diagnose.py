"""Measure whether `af.diagnose` names planted faults first, and is silent about healthy runs.

    python benchmarks/bench_diagnose.py                # 30 planted faults, 10 healthy runs
    python benchmarks/bench_diagnose.py --only lookup  # cases whose name contains a text

Writes one line per case and a summary. A planted case is one rollout of 8 groups of the shipped policy and, for
faults of the update, one `ppo_step`. A healthy run is `train` with the default settings for three iterations on the
shipped tasks, diagnosed after every iteration; its line says which share of the CPU time `diagnose` took.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch; more threads slow down a small model
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import dataclasses
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
]
HEALTHY = [
    ("calculator", 0), ("calculator", 1), ("lookup", 0), ("lookup", 1), ("search", 0), ("search", 1), ("sql", 0),
    ("webshop", 0), ("code", 0), ("alfworld", 0),
]  # fmt: skip


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
    stats = await af.ppo_step_async(policy, af.adamw(policy, lr), batch, af.PPOConfig(epochs=2, minibatch=32))
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


async def healthy(family: str, seed: int, steps: int = 3) -> list[Any]:
    """Train with the default settings and return the serious findings of every iteration."""
    policy = af.tiny.policy(family)
    agent = agent_of(family, policy, seed)
    tasks = af.load_tasks(family).train  # `af.envs.alfworld.tasks()` are too hard for the shipped policy
    out: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        run = af.train(agent, policy, tasks, af.TrainConfig(steps=steps, seed=seed), run=f"{folder}/run")
        began, spent = time.process_time(), 0.0
        async for step in run:
            at = time.process_time()
            findings = af.diagnose(step.rollout, stats=step.stats, records=run.records)
            spent += time.process_time() - at
            out += findings.serious
        total = time.process_time() - began - spent
    print(f"  diagnose took {spent:.3f} of {total:.2f} CPU s ({spent / total:.1%}); last: {[f.name for f in findings]}")
    return out


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    named = cases = quiet = runs = 0
    for family, fault, wanted in CASES:
        if given.only in f"{family} {fault}":
            findings = af.diagnose(*await planted(family, fault, given.seed))
            first = findings[0].name if findings else "nothing"
            cases, named = cases + 1, named + (first == wanted)
            rest = [(f.name, round(f.number, 2), round(f.effect, 2)) for f in findings]
            print("ok  " if first == wanted else "MISS", f"{family}, {fault}: {wanted}", rest, flush=True)
    for family, seed in HEALTHY:
        if given.only in f"{family} healthy":
            serious = await healthy(family, seed + 10 * given.seed)
            runs, quiet = runs + 1, quiet + (not serious)
            print("MISS" if serious else "ok  ", f"{family}, healthy, seed {seed}", serious, flush=True)
    print(f"{named} of {cases} planted faults were named first; nothing serious in {quiet} of {runs} healthy runs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
