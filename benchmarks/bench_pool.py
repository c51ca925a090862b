"""Benchmark time and memory of sandboxes and pools. Writes JSON to standard output, with times in ms.

The baseline in the same run is a plain `python -c`, as used by code tools without a pool. With --container IMAGE,
sandboxes in containers are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

from timing import spread, timed, took

from agentfly_kit.pool.pool import Pool
from agentfly_kit.pool.records import PoolEvent
from agentfly_kit.sandboxes.host import isolation
from agentfly_kit.sandboxes.python import PythonSandbox


async def level(name: Any, rounds: int, crowd: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    async with PythonSandbox(isolation=name) as sandbox:
        out["run"] = await timed(lambda: sandbox.run("1 + 1"), rounds * 5)
        out["run that prints 1 kB"] = await timed(lambda: sandbox.run("print('x' * 1000)"), rounds)
        out["reset"] = await timed(sandbox.reset, rounds)

        started: list[PythonSandbox] = []

        async def start() -> None:
            started.append(PythonSandbox(isolation=name))
            await started[-1].start()

        out[f"start, the others of {crowd} being there"] = await timed(start, crowd - 1)
        megabytes = weight([sandbox, *started]) / 1024 / (len(started) + 1)
        out[f"memory of each of {len(started) + 1} idle, MB (PSS)"] = (
            round(megabytes, 2) or None
        )  # None for containers, whose processes are children of the engine
        out["idle ones a GB"] = round(1024 / megabytes) if megabytes else None
        for each in started:
            await each.close()
        started.clear()

        times: list[float] = []
        bare: list[float] = []
        for _ in range(max(20, rounds // 2) + 1):  # alternate the variants, so that other load affects both alike
            bare.append(await took(python))
            times.append(await took(start))
            await started.pop().close()
        out["start"], out["python -c, in turn with it"] = spread(times[1:]), spread(bare[1:])
        out["start, times python -c"] = {
            name: round(value / out["python -c, in turn with it"][name], 2) for name, value in out["start"].items()
        }
    async with Pool(PythonSandbox, size=1, isolation=name) as pool:

        async def lease() -> None:
            async with pool.lease():
                pass

        out["warm lease and return"] = await timed(lease, rounds)
    size, chains = 16, 200
    async with Pool(PythonSandbox, size=size, isolation=name, acquire_timeout=600) as pool:

        async def chain() -> None:
            async with pool.lease() as mine:
                for _ in range(4):
                    await mine.run("x = 1")

        began = time.perf_counter()
        await asyncio.gather(*(chain() for _ in range(size)))
        out[f"{size} chains of 4 calls from nothing, s"] = round(time.perf_counter() - began, 3)
        began = time.perf_counter()
        await asyncio.gather(*(chain() for _ in range(chains)))
        out[f"chains of 4 calls per second, pool of {size}"] = round(chains / (time.perf_counter() - began), 1)
    return out


async def crowded(name: str, leases: int, waiters: int, size: int) -> dict[str, Any]:
    """Measure the order of service and the longest wait when many waiters share few sandboxes."""
    asked: list[str] = []
    served: list[str] = []
    waits: list[float] = []

    def told(event: PoolEvent) -> None:
        if event.kind in ("waiting", "leased"):
            (asked if event.kind == "waiting" else served).append(event.owner or "")

    async with Pool(PythonSandbox, size=size, isolation=name, acquire_timeout=3600) as pool:
        pool.subscribe(told)
        numbers = iter(range(leases))

        async def customer() -> None:
            for number in numbers:
                began = time.perf_counter()
                async with pool.lease(str(number)):
                    waits.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(customer() for _ in range(waiters)))
        seconds = time.perf_counter() - began
    waits.sort()
    return {
        "leases": len(served),
        "served in the order of asking": asked == served,
        "leases per second": round(leases / seconds, 1),
        "wait, s": {"p50": round(waits[leases // 2], 3), "longest": round(waits[-1], 3)},
    }


def weight(sandboxes: list[PythonSandbox]) -> int:
    """Return the total memory of the sandboxes in kB."""
    roots = {sandbox.pid for sandbox in sandboxes}
    pids = {pid for root in roots if root for pid in below(root)}
    return sum(map(pss, pids))


def below(root: int) -> list[int]:
    try:
        with open(f"/proc/{root}/task/{root}/children") as file:
            return [root, *(each for child in file.read().split() for each in below(int(child)))]
    except OSError:
        return [root]


def pss(pid: int) -> int:
    """Return the proportional set size of a process in kB, in which shared pages are divided among the processes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


async def python(*options: str) -> None:
    """Run `python -c`, like a code tool without a pool."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *options, "-c", "print(1 + 1)", stdout=subprocess.DEVNULL
    )
    await process.wait()


async def main(rounds: int, crowd: int, leases: int, container: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "what": "milliseconds, one process",
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "limits": isolation.limit_mechanisms("strict", PythonSandbox().limits, isolation.hierarchy()),
    }
    for name in isolation.LEVELS:
        out[name] = isolation.unavailable_reason(name) or await level(name, rounds, crowd)
    if container:
        from agentfly_kit.sandboxes.host.container import Container

        out["container"] = await level(Container(container), max(5, rounds // 10), 4)
    out["bare subprocess"] = {
        "python -c": await timed(python, max(5, rounds // 2)),
        "python -I -S -c": await timed(lambda: python("-I", "-S"), max(5, rounds // 2)),
    }
    name = isolation.best()
    out[f"{leases} leases of 32 {name} sandboxes, 1000 waiters"] = await crowded(name, leases, 1000, 32)
    out["machine"]["load at the end"] = os.getloadavg()[0]
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="calls per measurement")
    parser.add_argument("--crowd", type=int, default=64, help="number of concurrently idle sandboxes")
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--container", metavar="IMAGE", help="also measure sandboxes in this container image")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(main(given.rounds, given.crowd, given.leases, given.container)), indent=2))
