"""Measure imitation from random weights, and distillation against GRPO, on the calculator.

    make bench-imitation                                  # both, about 40 minutes of one core
    make bench-imitation ARGS="--part distillation --start shipped"

warm-start    random weights, imitation of correct demonstrations, and with --mixed of demonstrations of mixed quality,
              then GRPO at a low learning rate: success and CPU seconds after imitation and after GRPO, for each seed.
distillation  episodes until the greedy success on 200 held-out tasks is 90 % of the teacher's: GRPO, and distillation
              alone. The rule, fixed before the measurement: the teacher is the shipped policy after 24 iterations of
              GRPO. A student is the shipped policy, or that policy after imitating "I don't know" (other questions for
              each seed) until its sampled success on 200 training tasks is at most .1, or .02. Both arms sample 16
              episodes per iteration (4 tasks, groups of 4) for at most 24 iterations, with AdamW and a constant
              learning rate. For each student and arm, the learning rate and the number of epochs are those of a grid
              of nine with the smallest mean number of episodes over two other seeds; of equals, the first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.calculator import Recipe

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.envs import calculator

# Success of the students of the distillation part before training, at most.
STARTS = {"shipped": 1.0, "at most .1": 0.1, "at most .02": 0.02}
LEARNING_RATES, EPOCHS, TUNING_SEEDS = (1e-4, 3e-4, 1e-3), (1, 2, 4), (100, 101)
# A run that diverges has missed the goal, so it is not stopped by `max_kl`.
SMALL: dict[str, Any] = {
    "steps": 24, "tasks_per_step": 4, "group_size": 4, "minibatch": 16, "lr_end": None, "max_kl": None,
}  # fmt: skip
NOT_REACHED = 24 * 16 * 2  # counted for a run that does not reach the goal: twice the maximum


async def warm_start(steps: int, mixed: int, iterations: int, rl_lr: float, seed: int) -> dict[str, Any]:
    tasks = af.load_tasks("calculator")
    began = time.process_time()
    policy = af.Policy(tiny.model(seed=seed), af.Chat(tiny.tokenizer()))
    writer = Recipe(policy.chat, seed)
    for batches, count, lr in zip(writer.batches(), (steps, mixed), (3e-3, 1e-3), strict=True):
        demonstrations = [d for _, batch in zip(range(count), batches, strict=False) for d in batch]
        if demonstrations:
            await af.imitate(policy, demonstrations, epochs=1, minibatch=32, lr=lr)
    policy.version = 0  # the run below starts from these weights
    imitated = time.process_time() - began
    agent = calculator.agent(policy)
    before = (await af.evaluate(agent, tasks.test)).success
    began = time.process_time()
    config = af.TrainConfig(steps=iterations, group_size=16, lr=rl_lr, lr_end=None, seed=seed)
    await af.train(agent, policy, tasks.train, config)
    trained = time.process_time() - began
    after = (await af.evaluate(agent, tasks.test)).success
    numbers = {"imitated": before, "trained": after, "imitation_cpu": imitated, "rl_cpu": trained}
    return {"seed": seed, **{k: round(v, 3) for k, v in numbers.items()}}


async def reluctant(limit: float, seed: int) -> af.Policy:
    """Return the shipped policy after imitating "I don't know" until its success is at most the limit."""
    policy = tiny.policy("calculator")
    writer = Recipe(policy.chat, seed)
    while (await af.evaluate(calculator.agent(policy), af.load_tasks("calculator").train[-200:])).success > limit:
        refusals = [writer.demonstrate("unsure", writer.sample()) for _ in range(32)]
        await af.imitate(policy, refusals, epochs=1, minibatch=32, lr=3e-5)
        policy.version = 0
    return policy


async def episodes(
    students: Mapping[int, af.Policy], teacher: af.Policy | None, goal: float, setting: Mapping[str, Any]
) -> list[int | None]:
    """Return the number of sampled episodes until the goal for the student of each seed, None if it is not reached."""
    tasks = af.load_tasks("calculator")
    distil: dict[str, Any] = {"advantage": "none", "teacher_coef": 1.0} if teacher else {}
    counts: list[int | None] = []
    for seed, student in students.items():
        policy = student.copy()
        agent = calculator.agent(policy).replace(seed=seed)
        config = af.TrainConfig(**SMALL, **setting, **distil, seed=seed)
        counts.append(None)
        async for step in af.train(agent, policy, tasks.train, config, teacher=teacher):
            await agent.engine.update(policy)
            if (await af.evaluate(agent, tasks.test[:200], greedy=True)).success >= goal:
                counts[-1] = step.step * config.tasks_per_step * config.group_size
                break
    return counts


async def distillation(starts: Sequence[str], seeds: int) -> dict[str, Any]:
    tasks = af.load_tasks("calculator")
    teacher = tiny.policy("calculator")
    await af.train(calculator.agent(teacher), teacher, tasks.train, af.TrainConfig(lr_end=3e-5))
    success = (await af.evaluate(calculator.agent(teacher), tasks.test[:200], greedy=True)).success
    out: dict[str, Any] = {"teacher": success}
    grid = [{"lr": lr, "epochs": n} for lr, n in itertools.product(LEARNING_RATES, EPOCHS)]
    for start in starts:
        tuning = {seed: await reluctant(STARTS[start], seed) for seed in TUNING_SEEDS}
        measured = {seed: await reluctant(STARTS[start], seed) for seed in range(seeds)}
        for arm, guide in (("grpo", None), ("distillation", teacher)):
            means = []
            for setting in grid:
                counts = await episodes(tuning, guide, 0.9 * success, setting)
                means.append(statistics.mean(n or NOT_REACHED for n in counts))
                sys.stderr.write(f"{start}, {arm}, {setting}: {counts}\n")
            best = grid[means.index(min(means))]
            counts = await episodes(measured, guide, 0.9 * success, best)
            median = statistics.median(n or NOT_REACHED for n in counts)
            out[f"{start}, {arm}"] = {**best, "episodes": counts, "median": median}
            sys.stderr.write(f"{start}, {arm}: {out[f'{start}, {arm}']}\n")
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("warm-start", "distillation"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--start", choices=STARTS, help="students of the distillation; all of them by default")
    parser.add_argument("--demonstrations", type=int, default=350, help="updates on 32 correct demonstrations")
    parser.add_argument("--mixed", type=int, default=0, help="updates on 32 demonstrations of mixed quality")
    parser.add_argument("--iterations", type=int, default=6, help="iterations of GRPO after imitation")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate of GRPO after imitation")
    given = parser.parse_args()
    out: dict[str, Any] = {}
    if given.part in (None, "warm-start"):
        out["warm-start"] = []
        for seed in range(given.seeds):
            numbers = asyncio.run(warm_start(given.demonstrations, given.mixed, given.iterations, given.lr, seed))
            sys.stderr.write(f"warm-start: {numbers}\n")
            out["warm-start"].append(numbers)
    if given.part in (None, "distillation"):
        out["distillation"] = asyncio.run(distillation([given.start] if given.start else list(STARTS), given.seeds))
    sys.stdout.write(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
