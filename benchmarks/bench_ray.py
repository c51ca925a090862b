"""Benchmark rollouts on a local Ray cluster against one process. Writes JSON to standard output.

    make bench-ray ARGS="--workers 2"

64 chains (16 tasks in groups of 4) call a tool that computes in Python for 50 ms, twice each. Both ways alternate, and
the median of the wall times is reported. `overhead` is the time per group of chains that do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import ray

import agentfly_kit as af

CALL = '<tool_call>{"name":"burn","arguments":{"milliseconds":50}}</tool_call>'


@af.tool
def burn(milliseconds: int) -> str:
    """Compute.

    Args:
        milliseconds: CPU time.
    """
    began = time.thread_time()
    while time.thread_time() - began < milliseconds / 1000:
        sum(range(1000))
    return "done"


@af.reward
def right(final: str | None) -> float:
    return float(final == "1")


def tasks(count: int) -> list[af.Task]:
    return [af.Task(f"t{i}", ({"role": "user", "content": f"question {i}"},)) for i in range(count)]


def wall(agent: af.Agent, count: int, workers: Any = None) -> float:
    async def run() -> af.Rollout:
        return await agent.rollout(tasks(count), 4, workers=workers)

    began = time.perf_counter()
    assert asyncio.run(run()).summary()["success"] == 1
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chat = af.tiny.policy("calculator").chat
    agent = af.Agent(af.ScriptedEngine([CALL, CALL, "1"]), chat=chat, tools=[burn], reward=right)
    idle = af.Agent(af.ScriptedEngine(["1"]), chat=chat, reward=right)
    ray.init(num_cpus=arguments.workers, include_dashboard=False, log_to_driver=False)
    with af.ray.workers(agent, arguments.workers) as workers:
        pairs = [(wall(agent, 16), wall(agent, 16, workers)) for _ in range(arguments.rounds + 1)][1:]
    with af.ray.workers(idle, arguments.workers) as workers:
        wall(idle, 64, workers)
        overhead = wall(idle, 64, workers) / 64
    figures = {
        "seconds in one process": round(statistics.median(a for a, _ in pairs), 2),
        f"seconds on {arguments.workers} workers": round(statistics.median(b for _, b in pairs), 2),
        "speedup": round(statistics.median(a / b for a, b in pairs), 2),
        "milliseconds per group of chains without calls": round(overhead * 1000, 1),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
