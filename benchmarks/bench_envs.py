"""Benchmark the environments: steps per second, lease times and memory, with and without reuse by a pool.

A step is one action of the random player: a tool call with its observation, or an answer. No model runs. Memory is the
increase of the process and its children, with one open environment that has served all chains. Families are measured
one after another. Each result is reported on standard error; JSON of all results is written to standard output.

    make bench-envs ARGS="--families math scienceworld --tasks 4"
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import agentfly_kit as af


def memory() -> float:
    """Return the memory of this process and all its descendants in MB, as proportional set size (PSS)."""
    pending, total = [os.getpid()], 0
    while pending:
        pid = pending.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (OSError, StopIteration):
            continue
    return total / 1024


async def measured(name: str, count: int) -> dict[str, Any]:
    of = getattr(af.envs, name)
    if of.family.missing:
        return {"missing": of.family.install}
    tasks = of.tasks(count, "train")
    found: dict[str, Any] = {}
    first = of.random_agent(size=1)  # warm up: imports and other one-time costs
    await first.rollout(tasks[:1])
    for each in first.pools:
        await each.close()
    for how, options in (("alone", {"max_uses": 1}), ("pooled", {})):
        before = memory()
        pool = af.Pool(of.family.environment, size=1, min_idle=1, **options)
        began = time.perf_counter()
        async with pool.lease(owner="first"):
            start = time.perf_counter() - began
        agent = of.random_agent(pool=pool)
        leases = []
        for number in range(5):
            began = time.perf_counter()
            async with pool.lease(owner=f"lease {number}"):
                leases.append(time.perf_counter() - began)
        began, cpu = time.perf_counter(), time.process_time()
        rollout = await agent.rollout(tasks, max_concurrency=1)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        used = memory() - before
        steps = sum(len(t.actions) for t in rollout.trajectories)
        found[how] = {
            "steps_per_second": round(steps / seconds, 1), "chains_per_second": round(count / seconds, 2),
            "cpu_seconds": round(cpu, 3), "start_ms": round(1e3 * start, 2),
            "lease_ms": round(1e3 * sorted(leases)[2], 2), "memory_mb": round(used, 1),
            "unscored": sum(t.reward is None for t in rollout.trajectories),
        }  # fmt: skip
        for each in agent.pools:
            await each.close()
    return found


def line(found: dict[str, Any]) -> str:
    if "missing" in found:
        return f"not installed; type: {found['missing']}"
    alone, pooled = found["alone"], found["pooled"]
    return (
        f"{alone['steps_per_second']} steps/s alone, {pooled['steps_per_second']} pooled; lease {alone['lease_ms']} ms "
        f"of a new one, {pooled['lease_ms']} ms of a warm one; {pooled['memory_mb']} MB"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(af.envs.FAMILIES), choices=af.envs.FAMILIES)
    parser.add_argument("--tasks", type=int, default=16)
    given = parser.parse_args()
    results = {}
    for name in given.families:
        results[name] = found = await measured(name, given.tasks)
        print(f"{name}: {line(found)}", file=sys.stderr, flush=True)
    print(json.dumps({"load": os.getloadavg()[0], "tasks": given.tasks, "families": results}, indent=1))


asyncio.run(main())
