"""`make bench-envs`: steps a second and memory of each environment, begun anew for each chain and from a pool. JSON.

A step is one tool call of the random player, its parsing and its observation; no model runs. Memory is what the process
and its children use more than before, with one environment of the family open that has served all chains.

    make bench-envs ARGS="--families maze repo --tasks 16"
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import agentfly_kit as af


def memory() -> float:
    """MB of this process and all below it; shared pages are counted in parts."""
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
    first = of.random_agent(size=1)  # what is imported and built once
    await first.rollout(tasks[:1])
    for each in first.pools:
        await each.close()
    for how, options in (("alone", {"max_uses": 1}), ("pooled", {})):
        before = memory()
        pool = af.Pool(of.family.environment, size=1, warm=1, **options)
        async with pool.lease(owner="first"):
            pass
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
        steps = sum(len(t.tool_calls) for t in rollout.trajectories)
        found[how] = {
            "steps_per_second": round(steps / seconds, 1), "chains_per_second": round(count / seconds, 2),
            "cpu_seconds": round(cpu, 3), "lease_ms": round(1e3 * sorted(leases)[2], 2), "memory_mb": round(used, 1),
            "unscored": sum(t.reward is None for t in rollout.trajectories),
        }  # fmt: skip
        for each in agent.pools:
            await each.close()
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(af.envs.FAMILIES), choices=af.envs.FAMILIES)
    parser.add_argument("--tasks", type=int, default=16)
    given = parser.parse_args()
    results = {name: await measured(name, given.tasks) for name in given.families}
    print(json.dumps({"load": os.getloadavg()[0], "tasks": given.tasks, "families": results}, indent=1))


asyncio.run(main())
