"""Detects that training has made a policy worse. Knows no policy and no loss: it reads the records of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STEPS = 3


def detect_collapse(records: Sequence[dict[str, float]], groups: int) -> str | None:
    """A description of a collapse that the last record completes; None in every other case.

    The mean reward has collapsed when it stayed below half of the best recorded value for 3 consecutive steps. A run
    is reported once. The best value is the mean reward less two standard errors (`reward_std` over the square root of
    `groups`, the groups of a step), and only a positive one counts: means that are negative, or zero up to the noise
    of one step, never start a report. Steps without a scored trajectory are skipped.
    """
    best, threshold, low = "", 0.0, 0
    for record in records:
        if "reward" not in record:
            continue
        reward, std = record["reward"], record.get("reward_std", math.inf)
        if (half := (reward - 2 * std / math.sqrt(groups)) / 2) > threshold:
            best, threshold = f"{reward:.3g} at step {record['step']:.0f}", half
        low = low + 1 if best and reward < threshold else 0
        if low == _STEPS:
            text = f"the mean reward stayed below half of its best value for {_STEPS} steps: {reward:.3g}, from {best}"
            return text if record is records[-1] else None
    return None
