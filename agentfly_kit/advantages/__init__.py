"""Advantages: rewards (and values) in, one number a trajectory or a token out.

Pure functions: no model, no config object, no gradient. They do not know what a trajectory, a tool or a tokenizer is,
and not what the loss does with the result. Lists, arrays and tensors of any float type are taken; half precision is
computed and returned in float32.

What all of them keep to: a reward that is NaN (or None in a list) is unscored, is left out of every mean and gets
advantage 0; an infinite one raises. Whatever stands where the mask is 0 is never read, so that inserting observation
tokens anywhere changes no action's advantage. Axis letters: N trajectories (or rows), K rewards, B rows, T tokens.
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
    trajectory_level,
)
from agentfly_kit.advantages.tokens import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from agentfly_kit.advantages.turns import arpo, branch_weights, gigpo
from agentfly_kit.advantages.whitening import whiten

__all__ = [
    "arpo",
    "branch_weights",
    "dr_grpo",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "trajectory_level",
    "whiten",
]
