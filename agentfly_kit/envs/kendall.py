"""Kendall's tau-b of two sequences, and the share of two multisets that they have in common. Knows no database."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any


def tau(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Tau-b: pairs in the same order less pairs in the other, over the pairs that are tied in neither sequence.

    Shapes:  two sequences of one length n, each of values that can be ordered; O(n log n).
    Units:   -1 to 1; NaN where one of them has no two different values.
    Source:  Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945); the order of pairs is counted
             as by Knight, JASA 61 (1966).
    """
    if len(a) != len(b):
        raise ValueError(f"tau of {len(a)} and {len(b)} values; want as many")
    pairs = sorted(zip(a, b, strict=True))
    every = _pairs(len(pairs))
    ties_a, ties_b, ties_both = _ties(a), _ties(b), _ties(pairs)
    if ties_a == every or ties_b == every:
        return math.nan
    # Sorted by (a, b), a pair in the wrong order of b is one that the sequences order differently.
    discordant = _inversions([y for _, y in pairs])[1]
    concordant = every - ties_a - ties_b + ties_both - discordant
    found = (concordant - discordant) / math.sqrt(every - ties_a) / math.sqrt(every - ties_b)
    return max(-1.0, min(1.0, found))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


def _ties(values: Sequence[Hashable]) -> int:
    return sum(_pairs(count) for count in Counter(values).values())


def _inversions(values: list[Any]) -> tuple[list[Any], int]:
    """Sorted, and how many pairs stood the wrong way round."""
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
    """Intersection over union of two multisets, from 0 to 1; 1 where both are empty."""
    have, want = Counter(a), Counter(b)
    union = (have | want).total()
    return (have & want).total() / union if union else 1.0


def shared(a: Sequence[str], b: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of each sequence the values that both have, as often as both have them, in its own order."""
    common = Counter(a) & Counter(b)
    return _kept(a, common.copy()), _kept(b, common)


def _kept(values: Sequence[str], common: Counter[str]) -> list[str]:
    found = []
    for value in values:
        if common[value] > 0:
            common[value] -= 1
            found.append(value)
    return found
