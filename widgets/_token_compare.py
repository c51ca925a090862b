"""Comparison of the rows of two sources, for TokenView."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentfly_kit.images import row_keys

from ._format import count
from ._tokens import Row, some


def compare_rows(rows: list[Row], others: list[Row]) -> tuple[list[Row], list[str], dict[int, int]]:
    """Add the values of `others` to the matching tokens of `rows`. Values are missing where the tokens differ.

    If `rows` and `others` are single rows of different trajectories, both are shown with the length of their common
    prefix.

    Returns:
        The rows to show, notes for the page, and a mapping from row index to the index of the first differing token.
    """
    notes: list[str] = []
    if len(rows) == len(others) == 1 and rows[0].id != others[0].id:
        a, b = _keys(rows[0]), _keys(others[0])
        n = min(len(a), len(b))
        differ = np.flatnonzero(a[:n] != b[:n])
        shared = int(differ[0]) if len(differ) else n
        notes.append(f"{rows[0].id} and {others[0].id} share their first {count(shared, 'token')}")
        return [*rows, *others], notes, {0: shared, 1: shared}
    by_id: dict[str, list[Row]] = {}
    for other in others:
        by_id.setdefault(other.id, []).append(other)
    alone, differing = [], 0
    for row in rows:
        match = by_id.pop(row.id, None)
        if match is None:
            alone.append(row.id)
            continue
        names = sorted({name for other in match for name in other.signals})
        own = _keys(row)
        given = [(other, _keys(other)) for other in match]
        for name in names:
            values = np.full(len(row.ids), np.nan, np.float32)
            for other, keys in given:
                lo = max(row.start, other.start)
                hi = min(row.start + len(row.ids), other.start + len(other.ids))
                if hi > lo:
                    mine, theirs = slice(lo - row.start, hi - row.start), slice(lo - other.start, hi - other.start)
                    same = own[mine] == keys[theirs]
                    differing += int((~same).sum()) if name == names[0] else 0
                    values[mine] = np.where(same, other.signals[name][theirs], np.nan)
            row.signals[f"{name} ′"] = values
            if name in row.signals:
                with np.errstate(invalid="ignore"):
                    row.signals[f"Δ {name}"] = values - row.signals[name]
    if alone:
        notes.append(f"not in the second source: {some(alone)}")
    if by_id:
        notes.append(f"only in the second source, not shown: {some(list(by_id))}")
    if differing:
        notes.append(f"{count(differing, 'token')} differ between the sources; their values are shown as missing")
    return rows, notes, {}


def _keys(row: Row) -> npt.NDArray[np.int64]:
    """Return the token ids of a row, in which placeholders of different images get different ids."""
    return row_keys(row.ids, ((image, first, after - first) for first, after, image in row.images))
