"""Sandboxes and pools: how long things take. JSON on standard output; times in ms, medians of the runs of one process.

Beside them, in the same run on the same machine: a bare `python -c`, which is what a code tool does without a pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentfly_kit.pool import Pool
from agentfly_kit.sandboxes import PythonSandbox, isolation


async def timed(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    """p50 and p99 in ms; the first call is thrown away."""
    times = []
    for _ in range(count + 1):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1e3)
    times = sorted(times[1:])
    return {
        "p50": round(statistics.median(times), 3),
        "p99": round(times[min(len(times) - 1, len(times) * 99 // 100)], 3),
    }


async def level(name: str, rounds: int) -> dict[str, Any]:
    out: dict[str, Any] = {}

    async def cold() -> None:
        async with PythonSandbox(isolation=name):
            pass

    out["start and close"] = await timed(cold, max(5, rounds // 20))
    async with PythonSandbox(isolation=name) as sandbox:
        out["run"] = await timed(lambda: sandbox.run("1 + 1"), rounds * 5)
        out["run that prints 1 kB"] = await timed(lambda: sandbox.run("print('x' * 1000)"), rounds)
        out["reset"] = await timed(sandbox.reset, rounds)

        async def both() -> None:
            await sandbox.run("open('f', 'w').write('x')")
            await sandbox.reset()

        out["run and reset"] = await timed(both, rounds)
        out["memory of one, MB (PSS)"] = round(pss(sandbox.pid or 0) / 1024, 1)
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
        out[f"chains of 4 calls a second, pool of {size}"] = round(chains / (time.perf_counter() - began), 1)
    return out


def pss(root: int) -> int:
    """Memory of a process and all below it, in kB, shared pages divided among those that share them."""
    total, pids = 0, [root]
    while pids:
        pid = pids.pop()
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                pids += [int(child) for child in file.read().split()]
        except OSError:
            continue
    return total


async def bare(rounds: int) -> dict[str, Any]:
    async def once(*options: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *options, "-c", "print(1 + 1)", stdout=subprocess.DEVNULL
        )
        await process.wait()

    return {
        "python -c": await timed(once, max(5, rounds // 10)),
        "python -I -S -c": await timed(lambda: once("-I", "-S"), max(5, rounds // 10)),
    }


async def main(rounds: int) -> dict[str, Any]:
    trouble = isolation.strict_trouble()
    return {
        "what": "milliseconds, one process",
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "limits": isolation.applied("strict", PythonSandbox().limits, isolation.hierarchy()),
        "strict": trouble or await level("strict", rounds),
        "none": await level("none", rounds),
        "bare subprocess": await bare(rounds),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="calls a measurement")
    print(json.dumps(asyncio.run(main(parser.parse_args().rounds)), indent=2))
