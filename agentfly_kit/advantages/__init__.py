"""Advantage estimators, which compute one number per trajectory, turn or token from rewards and, optionally, values.

They are pure functions that involve no model, config object or gradients, and do not depend on the loss. They accept
lists, arrays and tensors of any float type; half-precision inputs are converted to float32.

In all estimators, a trajectory whose reward is NaN (or None in a list) is unscored: it is excluded from every mean and
has advantage 0. An infinite reward raises ValueError. Values where the mask is 0 are ignored, so inserting observation
tokens does not change the advantage of any action; a nonzero token reward where the mask is 0 raises ValueError,
because no advantage would include it. Shapes use N for the number of trajectories (or rows), K for the number of
rewards or turns per trajectory, B for the number of rows, and T for the number of tokens per row.
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
