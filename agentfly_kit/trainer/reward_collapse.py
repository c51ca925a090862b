"""Detection of a reward collapse from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STEPS = 3


def detect_collapse(records: Sequence[dict[str, float]], groups: int) -> str | None:
    """Describe a reward collapse that becomes apparent in the last record; return None otherwise.

    The mean reward has collapsed when it has stayed below half of the best recorded value for 3 consecutive steps.
    A run is reported at most once. The best value is the mean reward minus two standard errors (`reward_std` divided by
    the square root of `groups`), and only positive values count: a mean that is negative, or zero up to the noise of
    one step, never leads to a report. Steps without a scored trajectory are skipped.

    Args:
        records: Records of the run, oldest first.
        groups: Number of groups per step.

    Returns:
        The description, or None.
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
