"""Measure imitation from random weights, and distillation against GRPO, on the calculator.

    make bench-imitation                                  # both, about 5 minutes of one core
    make bench-imitation ARGS="--part warm-start"

warm-start    random weights, imitation of correct demonstrations, then of demonstrations of mixed quality, then GRPO:
              success and CPU seconds after each phase.
distillation  episodes until the held-out success is 90 % of the teacher's: GRPO, and distillation alone, over seeds.
              The teacher is the shipped policy after 24 iterations of GRPO; the students begin as the shipped policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from recipes.calculator import Recipe

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.envs import calculator

# GRPO reaches the goal in one iteration of the default size, 128 episodes.
SMALL: dict[str, Any] = {"tasks_per_step": 4, "group_size": 4, "minibatch": 16, "evaluate_every": 1}


async def warm_start(steps: int, mixed: int, iterations: int, seed: int) -> dict[str, Any]:
    tasks = af.load_tasks("calculator")
    began = time.process_time()
    policy = af.Policy(tiny.model(seed=seed), af.Chat(tiny.tokenizer()))
    writer = Recipe(policy.chat, seed)
    for batches, count, lr in zip(writer.batches(), (steps, mixed), (3e-3, 1e-3), strict=True):
        demonstrations = [d for _, batch in zip(range(count), batches, strict=False) for d in batch]
        await af.imitate(policy, demonstrations, epochs=1, minibatch=32, lr=lr)
    policy.version = 0  # the run below starts from these weights
    imitated = time.process_time() - began
    agent = calculator.agent(policy)
    before = (await af.evaluate(agent, tasks.test)).success
    began = time.process_time()
    await af.train(agent, policy, tasks.train, af.TrainConfig(steps=iterations, seed=seed))
    trained = time.process_time() - began
    after = (await af.evaluate(agent, tasks.test)).success
    numbers = {"imitated": before, "trained": after, "imitation_cpu": imitated, "rl_cpu": trained}
    return {"seed": seed, **{k: round(v, 3) for k, v in numbers.items()}}


async def reached(agent: af.Agent, policy: af.Policy, goal: float, config: af.TrainConfig, **options: Any) -> list[Any]:
    """Return the number of episodes until the goal (None if it is not reached), and the success after each step."""
    tasks = af.load_tasks("calculator")
    curve: list[float] = []
    run = af.train(agent.replace(seed=config.seed), policy, tasks.train, config, eval_tasks=tasks.test[:200], **options)
    async for step in run:
        assert step.evaluation is not None
        curve.append(round(step.evaluation.success, 3))
        if curve[-1] >= goal:
            return [config.tasks_per_step * config.group_size * step.step, curve]
    return [None, curve]


async def distillation(seeds: int, steps: int) -> dict[str, Any]:
    tasks = af.load_tasks("calculator")
    teacher = tiny.policy("calculator")
    await af.train(calculator.agent(teacher), teacher, tasks.train, af.TrainConfig())
    success = (await af.evaluate(calculator.agent(teacher), tasks.test[:200])).success
    out: dict[str, Any] = {"teacher": round(success, 3), "goal": round(0.9 * success, 3)}
    arms: dict[str, dict[str, Any]] = {"grpo": {}, "distillation": {"advantage": "none", "teacher_coef": 1.0}}
    for arm, settings in arms.items():
        found = []
        for seed in range(seeds):
            policy = tiny.policy("calculator")
            config = af.TrainConfig(steps=steps, seed=seed, **SMALL, **settings)
            options = {"teacher": teacher} if settings else {}
            found.append(await reached(calculator.agent(policy), policy, 0.9 * success, config, **options))
            sys.stderr.write(f"{arm} {seed}: {found[-1]}\n")
        episodes = [n for n, _ in found]
        reaching = [n for n in episodes if n is not None]
        median = statistics.median(reaching) if reaching else None
        out[arm] = {"episodes": episodes, "median": median, "curves": [curve for _, curve in found]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("warm-start", "distillation"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="iterations at most, for distillation")
    parser.add_argument("--demonstrations", type=int, default=350, help="updates on 32 correct demonstrations")
    parser.add_argument("--mixed", type=int, default=50, help="updates on 32 demonstrations of mixed quality")
    parser.add_argument("--iterations", type=int, default=6, help="iterations of GRPO after imitation")
    given = parser.parse_args()
    out: dict[str, Any] = {}
    if given.part in (None, "warm-start"):
        out["warm-start"] = asyncio.run(warm_start(given.demonstrations, given.mixed, given.iterations, 0))
    if given.part in (None, "distillation"):
        out["distillation"] = asyncio.run(distillation(given.seeds, given.steps))
    sys.stdout.write(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
