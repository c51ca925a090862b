"""Kendall's tau-b of two sequences, and the overlap of two multisets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any


def tau(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return Kendall's tau-b: (concordant pairs - discordant pairs) / sqrt(pairs untied in a * pairs untied in b).

    Shapes:  two sequences of equal length n, each with values that can be ordered.
    Units:   -1 to 1; NaN if all values of one sequence are equal.
    Source:  Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945).
    """
    if len(a) != len(b):
        raise ValueError(f"sequences must have the same length, got {len(a)} and {len(b)} values")
    pairs = sorted(zip(a, b, strict=True))
    every = _pairs(len(pairs))
    ties_a, ties_b, ties_both = _ties(a), _ties(b), _ties(pairs)
    if ties_a == every or ties_b == every:
        return math.nan
    # After sorting by (a, b), the inversions of b are exactly the discordant pairs.
    discordant = 0
    seen: list[Any] = []
    for _, y in pairs:
        at = bisect_right(seen, y)
        discordant += len(seen) - at
        seen.insert(at, y)
    concordant = every - ties_a - ties_b + ties_both - discordant
    found = (concordant - discordant) / math.sqrt(every - ties_a) / math.sqrt(every - ties_b)
    return max(-1.0, min(1.0, found))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


def _ties(values: Sequence[Hashable]) -> int:
    return sum(_pairs(count) for count in Counter(values).values())


def overlap(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """Return the intersection over union of two multisets, from 0 to 1. If both are empty, return 1."""
    have, want = Counter(a), Counter(b)
    union = (have | want).total()
    return (have & want).total() / union if union else 1.0


def shared(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[str]]:
    """Restrict both sequences to the elements of their multiset intersection, keeping the order of each sequence."""
    common = Counter(a) & Counter(b)
    return _kept(a, common.copy()), _kept(b, common)


def _kept(values: Sequence[str], left: Counter[str]) -> list[str]:
    found = []
    for value in values:
        if left[value] > 0:
            left[value] -= 1
            found.append(value)
    return found
