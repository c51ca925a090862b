"""Compare GRPO on independent chains with ARPO on branching chains, at equal numbers of executed tool calls.

    make bench-branching           # or: python benchmarks/bench_branching.py --seeds 5 --out branching.json
    python benchmarks/bench_branching.py --first-seed 3 --seeds 1

Both start from the shipped policy of `webshop` and train on 16 tasks per iteration with 8 chains each; ARPO begins 4
chains per group and forks the others. A run ends after the first iteration in which the executed tool calls (a call
that several chains share counts once) reach `CALLS`. The rule, fixed before the first measurement:

- the mean success on the held-out tasks is at most 0.03 below that of GRPO;
- the executed calls per trained chain are at most 0.9 of those of GRPO.

Writes JSON to standard output (and to --out), and one line per run to standard error. Times are CPU seconds of this
process and exclude the evaluation.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch; more threads slow down a small model
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import agentfly_kit as af
from agentfly_kit.batch.turn_data import executed_calls

CALLS = 2000
MOST_STEPS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo"},
    "arpo": {"advantage": "arpo", "branch": af.Branch(initial=4)},
}


async def learn(name: str, seed: int, tasks: Any, held_out: Any) -> dict[str, Any]:
    """Train one policy until its tool calls are used up, and evaluate it."""
    policy = af.tiny.policy("webshop")
    agent = af.envs.webshop.agent(policy, seed=seed, options=af.envs.webshop.BRIEF)
    config = af.TrainConfig(steps=MOST_STEPS, seed=seed, lr_end=None, checkpoint_every=MOST_STEPS, **SETTINGS[name])
    calls, chains, successes = 0, 0, []
    began = time.process_time()
    async for step in af.train(agent, policy, tasks, config):
        calls += executed_calls(step.rollout)
        chains += len(step.rollout)
        successes.append(round(step.success, 4))
        if calls >= CALLS:
            break
    cpu = time.process_time() - began
    evaluation = await af.evaluate(agent, held_out)
    await agent.engine.close()
    return {
        "algorithm": name,
        "seed": seed,
        "success": round(evaluation.success, 4),
        "steps": len(successes),
        "calls": calls,
        "chains": chains,
        "cpu_seconds": round(cpu, 1),
        "training_success": successes,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    by = {name: [run for run in runs if run["algorithm"] == name] for name in SETTINGS}
    out: dict[str, Any] = {
        name: {
            "seeds": len(mine),
            "success": round(statistics.mean(run["success"] for run in mine), 4),
            "calls_per_chain": round(sum(run["calls"] for run in mine) / sum(run["chains"] for run in mine), 3),
            "cpu_seconds": round(statistics.mean(run["cpu_seconds"] for run in mine), 1),
        }
        for name, mine in by.items()
    }
    out["met"] = {
        "success": out["arpo"]["success"] >= out["grpo"]["success"] - 0.03,
        "calls": out["arpo"]["calls_per_chain"] <= 0.9 * out["grpo"]["calls_per_chain"],
    }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=None, help="number of held-out tasks; default: all")
    parser.add_argument("--out", type=Path, default=None, help="runs already in this file are kept and not repeated")
    given = parser.parse_args()
    tasks = af.load_tasks("webshop")
    known = given.out is not None and given.out.exists()
    runs: list[dict[str, Any]] = json.loads(given.out.read_text(encoding="utf-8"))["runs"] if known else []
    done = {(run["algorithm"], run["seed"]) for run in runs}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in SETTINGS:
            if (name, seed) in done:
                continue
            run = asyncio.run(learn(name, seed, tasks.train, tasks.test[: given.held_out]))
            runs.append(run)
            print(
                f"{name} seed {seed}: success {run['success']:.3f} after {run['steps']} steps and {run['calls']} calls "
                f"({run['calls'] / run['chains']:.2f} per chain), {run['cpu_seconds']} cpu s",
                file=sys.stderr,
                flush=True,
            )
    text = json.dumps({"benchmark": "branching", "summary": summary(runs), "runs": runs}, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
