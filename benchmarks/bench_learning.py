"""Benchmark how well and how fast a shipped policy learns, over several seeds, on held-out tasks, in CPU seconds.

    make bench-learning            # or: python benchmarks/bench_learning.py --seeds 5 --out learning.json
    python benchmarks/bench_learning.py --family webshop --seeds 3 --algorithms grpo --steps 12

Writes JSON to standard output (and to --out), and one line per run to standard error. "cpu seconds"
is the CPU time of this process, which other load hardly affects; it excludes evaluation and sandbox processes. "to
good" means up to and including the first iteration in which at least 90 % of the sampled training chains succeed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before importing torch; more threads slow down a small model
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import ast
import asyncio
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import agentfly_kit as af

GOOD = 0.90
BARS = {
    "alfworld": {
        "grpo": {"success": 0.85, "cpu_seconds_to_good": 120.0},
        "ppo": {"success": 0.80, "cpu_seconds_to_good": 180.0},
    },
    "calculator": {
        "grpo": {"success": 0.92, "cpu_seconds_to_good": 5.0},
        "ppo": {"success": 0.88, "cpu_seconds_to_good": 12.0},
    },
    "code": {
        "grpo": {"success": 0.85, "cpu_seconds_to_good": 60.0},
        "ppo": {"success": 0.80, "cpu_seconds_to_good": 90.0},
    },
    "lookup": {
        "grpo": {"success": 0.90, "cpu_seconds_to_good": 21.0},
        "ppo": {"success": 0.85, "cpu_seconds_to_good": 40.0},
    },
    "search": {
        "grpo": {"success": 0.85, "cpu_seconds_to_good": 120.0},
        "ppo": {"success": 0.80, "cpu_seconds_to_good": 180.0},
    },
    "sql": {
        "grpo": {"success": 0.85, "cpu_seconds_to_good": 90.0},
        "ppo": {"success": 0.80, "cpu_seconds_to_good": 120.0},
    },
    "webshop": {
        "grpo": {"success": 0.85, "cpu_seconds_to_good": 120.0},
        "ppo": {"success": 0.80, "cpu_seconds_to_good": 180.0},
    },
}
ADVANTAGE = {"grpo": "grpo", "ppo": "gae"}
_SIGNS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__}


@af.tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError) as error:
        raise af.ToolError("only integers, + - * and brackets") from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


@af.reward
def exact(final: str | None, answer: str) -> float:
    """Return 1 for the exact answer, else 0."""
    return float(final == answer)


def agent_of(family: str, policy: Any, seed: int) -> Any:
    if family != "calculator":
        of = getattr(af.envs, family)
        return of.agent(policy, seed=seed, options=getattr(of, "BRIEF", None))
    return af.Agent(
        af.LocalEngine(policy),
        chat=policy.chat,
        tools=[calculator],
        reward=exact,
        max_turns=4,
        sampling=af.Sampling(temperature=1.0, max_tokens=64),
        seed=seed,
    )


async def learn(
    family: str, algorithm: str, seed: int, steps: int, tasks: Any, held_out: Any, greedy: bool = True
) -> dict[str, Any]:
    """Train once, starting from the shipped policy."""
    policy = af.tiny.policy(family, value_head=algorithm == "ppo")
    agent = agent_of(family, policy, seed)
    config = af.TrainConfig(steps=steps, advantage=ADVANTAGE[algorithm], lr_end=3e-5, seed=seed)
    before = await measure(agent, held_out, greedy)
    batches: list[float] = []
    good: tuple[int, float] | None = None
    began, wall = time.process_time(), time.perf_counter()
    async for step in af.train(agent, policy, tasks, config):
        batches.append(round(step.success, 4))
        if good is None and step.success >= GOOD:
            good = (len(batches) * config.tasks_per_step * config.group_size, time.process_time() - began)
    cpu, wall = time.process_time() - began, time.perf_counter() - wall
    after = await measure(agent, held_out, greedy)
    await agent.engine.close()
    return {
        "algorithm": algorithm,
        "seed": seed,
        "episodes": steps * config.tasks_per_step * config.group_size,
        "before": before,
        "after": after,
        "batches": batches,
        "episodes_to_good": good[0] if good else None,
        "cpu_seconds_to_good": round(good[1], 2) if good else None,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
    }


async def measure(agent: Any, held_out: Any, also_greedy: bool = True) -> dict[str, Any]:
    """Return the sampled and greedy success rates on held-out tasks, with 95 % intervals by bootstrap over tasks."""
    sampled = await af.evaluate(agent, held_out)
    greedy = (await af.evaluate(agent, held_out, greedy=True)).success if also_greedy else None
    return {
        "n": sampled.tasks,
        "sampled": round(sampled.success, 4),
        "interval": [round(sampled.low, 4), round(sampled.high, 4)],
        "greedy": None if greedy is None else round(greedy, 4),
        "calls": round(sampled.calls, 3),
        "tokens": round(sampled.tokens, 1),
    }


def summary(family: str, algorithm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize runs over seeds. In the medians, a run that never reaches a good batch takes infinitely long."""
    after = [run["after"]["sampled"] for run in runs]
    never = float("inf")
    cpu = statistics.median(run["cpu_seconds_to_good"] or never for run in runs)
    episodes = statistics.median(run["episodes_to_good"] or never for run in runs)
    bar = BARS[family][algorithm]
    return {
        "seeds": len(runs),
        "before": round(statistics.mean(run["before"]["sampled"] for run in runs), 4),
        "success": round(statistics.mean(after), 4),
        "success_by_seed": after,
        "greedy": None
        if None in (greedy := [run["after"]["greedy"] for run in runs])
        else round(statistics.mean(greedy), 4),
        "cpu_seconds_to_good": cpu if cpu < never else None,
        "episodes_to_good": episodes if episodes < never else None,
        "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in runs), 2),
        "lowest_batch_after_good": min(
            (min(run["batches"][run["batches"].index(first) :]) for run in runs if (first := first_good(run))),
            default=None,
        ),
        "bars": bar,
        "met": statistics.mean(after) >= bar["success"] and cpu <= bar["cpu_seconds_to_good"],
    }


def first_good(run: dict[str, Any]) -> float | None:
    return next((success for success in run["batches"] if success >= GOOD), None)


def picture(family: str, runs: list[dict[str, Any]]) -> str:
    """Return an SVG plot of the success rate of the training batches by iteration, with one line per run."""
    left, right, top, bottom = 46.0, 444.0, 14.0, 190.0
    colours, dashes, marks = ("#3b6fb6", "#c2572b", "#3f8f57"), ("", "6 3", "2 3"), ("___", "---", "...")
    most = max(len(run["batches"]) for run in runs)

    def x(i: int) -> float:
        return left + (right - left) * i / max(1, most - 1)

    def y(success: float) -> float:
        return bottom - (bottom - top) * success

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 230" font-family="sans-serif" font-size="11">',
        f"<title>Success of the training batches of {family}, by iteration, {len(runs)} seeds</title>",
        '<rect width="460" height="230" fill="#ffffff"/>',
    ]
    for at in (0, 0.25, 0.5, 0.75, 1):
        lines.append(
            f'<line x1="{left:g}" y1="{y(at):.1f}" x2="{right:g}" y2="{y(at):.1f}" stroke="#dddddd"/>'
            f'<text x="40" y="{y(at) + 4:.1f}" text-anchor="end" fill="#333333">{at:g}</text>'
        )
    for i in range(most):
        lines.append(f'<text x="{x(i):.1f}" y="206" text-anchor="middle" fill="#333333">{i + 1}</text>')
    for i, run in enumerate(runs):
        colour, dash, mark = (choice[i % 3] for choice in (colours, dashes, marks))
        points = " ".join(f"{x(j):.1f},{y(success):.1f}" for j, success in enumerate(run["batches"]))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        lines.append(f'<text x="380" y="{110.8 + 15 * i:.1f}" fill="{colour}">seed {run["seed"]} {mark}</text>')
    lines.append('<text x="253" y="224" text-anchor="middle" fill="#333333">iteration of 128 chains</text></svg>')
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="iterations of 128 episodes")
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ADVANTAGE), default=sorted(ADVANTAGE))
    parser.add_argument("--family", choices=sorted(BARS), default="calculator")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=None, help="number of held-out tasks; default: all")
    parser.add_argument("--sampled-only", action="store_true", help="no greedy evaluation")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--picture", type=Path, default=None, help="write a plot of the success as .svg, for docs/learning"
    )
    given = parser.parse_args()
    import torch
    import transformers

    tasks = af.load_tasks(given.family)
    runs: list[dict[str, Any]] = []
    for algorithm in given.algorithms:
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            held_out = tasks.test[: given.held_out]
            run = asyncio.run(
                learn(given.family, algorithm, seed, given.steps, tasks.train, held_out, not given.sampled_only)
            )
            runs.append(run)
            print(
                f"{algorithm} seed {seed}: {run['before']['sampled']:.3f} -> {run['after']['sampled']:.3f} "
                f"(greedy {run['after']['greedy']}), {GOOD:.0%} after {run['episodes_to_good']} episodes and "
                f"{run['cpu_seconds_to_good']} cpu s, all {run['episodes']} in {run['cpu_seconds']} cpu s",
                file=sys.stderr,
                flush=True,
            )
    result = {
        "benchmark": "learning",
        "family": given.family,
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        },
        "summary": {
            a: summary(given.family, a, [run for run in runs if run["algorithm"] == a]) for a in given.algorithms
        },
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    if given.picture is not None:
        given.picture.write_text(picture(given.family, runs), encoding="utf-8")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    main()
