"""Advantage estimators: one number per trajectory or per token, from rewards and optionally values.

Pure functions without model, config object or gradient, independent of the loss. They accept lists, arrays and tensors
of any float type; half precision is computed and returned in float32.

Conventions of all estimators: a reward that is NaN (or None in a list) is unscored, is excluded from every mean and
has advantage 0; infinity raises ValueError. Values where the mask is 0 are never read, so inserting observation
tokens does not change the advantage of any action; a nonzero token reward there raises ValueError, because it
would be lost. Axes: N trajectories (or rows), K rewards, B rows, T tokens.
"""

from agentfly_kit.advantages.outcomes import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    remax,
    rloo,
    row_credit,
    trajectory_level,
)
from agentfly_kit.advantages.tokens import (
    distillation,
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)
from agentfly_kit.advantages.turns import arpo, branch_weights, gigpo

__all__ = [
    "arpo", "branch_weights", "distillation", "dr_grpo", "gae", "gdpo", "gigpo", "gpg", "grpo", "grpo_passk", "maxrl",
    "opo", "optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
    "row_credit", "trajectory_level", "whiten",
]  # fmt: skip
