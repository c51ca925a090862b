"""Kendall's tau-b of two sequences, and the overlap of two multisets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any


def tau(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return Kendall's tau-b: (concordant - discordant pairs) / sqrt(untied pairs of a * untied pairs of b).

    Shapes:  two sequences of one length n, each of values that can be ordered; O(n log n).
    Units:   -1 to 1; NaN if all values of one sequence are equal.
    Source:  Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945); discordant pairs are counted
             with the algorithm of Knight, JASA 61 (1966).
    """
    if len(a) != len(b):
        raise ValueError(f"sequences must have the same length, got {len(a)} and {len(b)} values")
    pairs = sorted(zip(a, b, strict=True))
    every = _pairs(len(pairs))
    ties_a, ties_b, ties_both = _ties(a), _ties(b), _ties(pairs)
    if ties_a == every or ties_b == every:
        return math.nan
    # After sorting by (a, b), the inversions of b are exactly the discordant pairs.
    discordant = _inversions([y for _, y in pairs])[1]
    concordant = every - ties_a - ties_b + ties_both - discordant
    found = (concordant - discordant) / math.sqrt(every - ties_a) / math.sqrt(every - ties_b)
    return max(-1.0, min(1.0, found))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


def _ties(values: Sequence[Hashable]) -> int:
    return sum(_pairs(count) for count in Counter(values).values())


def _inversions(values: list[Any]) -> tuple[list[Any], int]:
    """Return the sorted values and the number of inversions, by merge sort."""
    if all(x <= y for x, y in pairwise(values)):
        return values, 0
    middle = len(values) // 2
    (left, n), (right, m) = _inversions(values[:middle]), _inversions(values[middle:])
    merged, found, i = [], n + m, 0
    for y in right:
        while i < len(left) and left[i] <= y:
            merged.append(left[i])
            i += 1
        merged.append(y)
        found += len(left) - i
    return merged + left[i:], found


def overlap(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """Return intersection over union of two multisets, from 0 to 1; 1 if both are empty."""
    have, want = Counter(a), Counter(b)
    union = (have | want).total()
    return (have & want).total() / union if union else 1.0


def shared(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[str]]:
    """Reduce each sequence to the multiset intersection of both, keeping its own order."""
    common = Counter(a) & Counter(b)
    return _kept(a, common.copy()), _kept(b, common)


def _kept(values: Sequence[str], common: Counter[str]) -> list[str]:
    found = []
    for value in values:
        if common[value] > 0:
            common[value] -= 1
            found.append(value)
    return found
