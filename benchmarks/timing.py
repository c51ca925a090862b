"""How benchmarks time an awaited call. Imported by those beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence


def spread(times: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of times in ms. Of fewer than a hundred the p99 is the longest."""
    ordered = sorted(times)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
    }


async def took(call: Callable[[], Awaitable[object]]) -> float:
    """ms"""
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1e3


async def timed(call: Callable[[], Awaitable[object]], count: int) -> dict[str, float]:
    """p50 and p99 in ms; the first call is thrown away."""
    return spread([await took(call) for _ in range(count + 1)][1:])
