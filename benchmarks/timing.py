"""Timing of awaited calls, shared by the benchmarks in this folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in ms. With fewer than a hundred times, p99 is the maximum."""
    ordered = sorted(times)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
    }


async def took(call: Callable[[], Awaitable[object]]) -> float:
    """Await a call and return its duration in ms."""
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1e3


async def timed(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    """Return p50 and p99 of the durations of `count` calls in ms, after one warm-up call."""
    return spread([await took(call) for _ in range(count + 1)][1:])
