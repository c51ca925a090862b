"""Assignment of rewards and advantages to the tokens of a batch."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentfly_kit.batch.batch import Batch
from agentfly_kit.batch.turn_data import credited_turn, sampled_turn_indices
from agentfly_kit.errors import AlignmentError
from agentfly_kit.types import Trajectory


def token_rewards(t: Trajectory, masks: list[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.float32]]:
    """Return the token rewards of each row, (T,): 0 at trained tokens without a reward, NaN where the mask is 0.

    The reward of a turn goes to the last token of the turn that earned it (`credited_turn`), and is left out if that
    token is not trained. The reward of the trajectory goes to its last trained token.

    Args:
        t: A scored trajectory.
        masks: Trained tokens of each row; at least one is True.

    Raises:
        BatchError: If a turn has a reward, but no turn was sampled up to it.
    """
    assert t.reward is not None
    out = [np.where(mask, np.float32(0), np.float32(np.nan)) for mask in masks]
    # Row and column of the last token of each turn.
    last_token = [
        (j, end - 1)
        for j, row in enumerate(t.rows)
        for end in itertools.accumulate(len(x.ids or ()) for x in row.turns)
    ]
    for i, turn in enumerate(t.turns):
        if turn.reward is not None:
            j, column = last_token[credited_turn(t, i)]
            out[j][column] += turn.reward  # NaN stays NaN where the mask is 0
    j = max(j for j, mask in enumerate(masks) if mask.any())
    out[j][masks[j].nonzero()[0][-1]] += t.reward
    return out


def advantages_per_token(batch: Batch, values: Tensor, units: list[int], num_units: int, per: str) -> Tensor:
    """Expand advantages to tokens, (B, T).

    `values` are (N,), one per unit, (N, K), one per sampled turn of each trajectory, or (B, T). A unit is what the
    estimator received one reward for: a trajectory or a row, including those that are not in the batch. `units` has
    the unit of each row of the batch.

    Raises:
        AlignmentError: If the values have none of these shapes.
    """
    if values.shape == batch.ids.shape:
        return values
    if values.ndim == 2 and len(values) == num_units and per == "trajectory":
        return _turn_advantages_per_token(batch, values, units)
    if tuple(values.shape) != (num_units,):
        raise AlignmentError(
            f"advantages must have the shape ({num_units},), one per {per}, ({num_units}, K), one per sampled turn "
            f"(only with per='trajectory'), or {tuple(batch.ids.shape)}, one per token of the rows that are kept; "
            f"got {tuple(values.shape)}"
        )
    return values[units, None].expand(batch.ids.shape)


def _turn_advantages_per_token(batch: Batch, values: Tensor, units: list[int]) -> Tensor:
    out = torch.zeros(batch.ids.shape)
    for i, (t, row, unit) in enumerate(zip(batch.trajectories, batch.rows, units, strict=True)):
        turns = sampled_turn_indices(t)
        if len(turns) > values.shape[1]:
            raise AlignmentError(
                f"advantages must have a column per sampled turn, got {tuple(values.shape)}, and trajectory {t.id!r} "
                f"has {len(turns)} sampled turns; see `turn_data`"
            )
        # Column of each sampled token. Other tokens get any column: their advantage is masked.
        columns = np.searchsorted(turns, row.turn_index, side="right") - 1
        out[i, : len(row)] = values[unit][torch.from_numpy(columns)]
    return out
