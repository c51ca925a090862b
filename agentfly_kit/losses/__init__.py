"""Loss functions of logprobs and advantages, and `aggregate`, which reduces per-token losses to a scalar.

All losses are pure functions of tensors, independent of the policy, the optimizer, and the split of a batch. Per-token
values have the shape (B, T) for B rows of T tokens, or (T,) for one row. The logprob at index t is that of token t.
Where the mask is 0, results are 0, and inputs are replaced *before* any subtraction or exp. Therefore, NaN or inf at
tokens that were not sampled affects neither values nor gradients. Half-precision inputs yield results in float32.

Losses are to be minimized. A policy loss has the unit of the advantage, and a KL is in nats per token. All policy
losses have the signature f(logprobs, old_logprobs, advantages, mask, ...). Advantages have the shape (B, T), or (B,) if
there is one per row.
"""

from agentfly_kit.losses.divergence import KLKind as KLKind
from agentfly_kit.losses.divergence import (
    adaptive_kl_coef,
    approx_kl,
    effective_sample_size,
    importance_weights,
    kl,
)
from agentfly_kit.losses.reduction import AggregateMode as AggregateMode
from agentfly_kit.losses.reduction import aggregate
from agentfly_kit.losses.surrogates import (
    cispo,
    clipped,
    dppo,
    gmpo,
    gspo,
    ppo,
    reinforce,
    sapo,
    value,
)

__all__ = [
    "adaptive_kl_coef", "aggregate", "approx_kl", "cispo", "clipped", "dppo", "effective_sample_size",
    "gmpo", "gspo", "importance_weights", "kl", "ppo", "reinforce", "sapo", "value",
]  # fmt: skip
