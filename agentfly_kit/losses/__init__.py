"""Losses: logprobs and advantages in, one number a token out; `aggregate` makes one number of them.

Pure functions of tensors. They do not know the policy, the optimizer, or how a batch was split. Everything per token is
(B, T), or (T,) for one row, and is indexed by the predicted token. Every input is replaced where the mask is 0 *before*
any subtraction or exp, so that NaN or inf there (which records hold on purpose) reaches neither value nor gradient; the
result is 0 there. Half precision is computed and returned in float32.

The sign: a loss is minimised. The unit of a policy loss is the advantage's, of a KL nats a token. All policy losses are
called alike, f(logprobs, old_logprobs, advantages, mask, ...), where an advantage is (B, T), or (B,) for one a row.
"""

from agentfly_kit.losses.clipping import clip_fraction, clipped
from agentfly_kit.losses.critic import value
from agentfly_kit.losses.divergence import KLKind as KLKind
from agentfly_kit.losses.divergence import adaptive_kl_coef, approx_kl, kl, kl_full
from agentfly_kit.losses.importance import effective_sample_size, importance_weights
from agentfly_kit.losses.reduction import AggregateMode as AggregateMode
from agentfly_kit.losses.reduction import aggregate
from agentfly_kit.losses.surrogates import cispo, clip_cov, dppo, gmpo, gpg, gspo, kl_cov, ppo, reinforce, sapo

__all__ = [
    "adaptive_kl_coef",
    "aggregate",
    "approx_kl",
    "cispo",
    "clip_cov",
    "clip_fraction",
    "clipped",
    "dppo",
    "effective_sample_size",
    "gmpo",
    "gpg",
    "gspo",
    "importance_weights",
    "kl",
    "kl_cov",
    "kl_full",
    "ppo",
    "reinforce",
    "sapo",
    "value",
]
