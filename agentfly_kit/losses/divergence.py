"""Estimators of the KL divergence between two policies, an adaptive KL coefficient, and importance weights."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from agentfly_kit.errors import check_choice
from agentfly_kit.losses.inputs import MAX_LOG_RATIO, as_bool_mask, masked

KLKind: TypeAlias = Literal["k1", "abs", "k2", "k3", "k3+"]
WeightLevel: TypeAlias = Literal["token", "sequence"]
BeyondBounds: TypeAlias = Literal["truncate", "mask"]


def kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = "k3", mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy, from the logprobs of both models.

    With d = logprobs - ref_logprobs, "k1" is d, "abs" is |d|, "k2" is d²/2, and "k3" is exp(-d) - 1 + d. "k3+" has the
    value of k3 and the gradient of k2. The values of k1 and k3 are unbiased. Only k2, and hence k3+, has the gradient
    of the KL in expectation. The expected gradient of k1 is 0, so k1 is suitable as part of a reward, but only adds
    noise to a loss.

    Shapes:  each (B rows, T tokens) -> (B, T), 0 where the mask is 0.
    Units:   nats per token.
    Raises:  SettingsError for an unknown kind. Warns (UserWarning) if kind is "k1" and logprobs require gradients.
    Source:  Schulman, "Approximating KL divergence" (2020): k1, k2, k3.
    """
    check_choice("kind", kind, KLKind)
    m = as_bool_mask(mask, logprobs)
    d = masked(logprobs, m, "logprobs") - masked(ref_logprobs, m, "ref_logprobs")
    if kind == "k1":
        if d.requires_grad:
            warnings.warn(
                "kl(kind='k1') in a loss only adds noise, because the expected gradient of k1 is 0; use kind='k2' or "
                "'k3+', or use k1 in the reward (under torch.no_grad())",
                UserWarning,
                stacklevel=2,
            )
        return d
    if kind == "abs":
        return d.abs()
    k2 = 0.5 * d.square()
    if kind == "k2":
        return k2
    k3 = torch.exp((-d).clamp(max=MAX_LOG_RATIO)) - 1 + d
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def adaptive_kl_coef(coef: float, kl: float, *, target: float, steps: float, horizon: float = 10_000) -> float:
    """Return a KL coefficient slightly above `coef` if the measured KL exceeds its target, and slightly below if not.

    The result is coef * (1 + clip(kl / target - 1, -0.2, 0.2) * steps / horizon), where `steps` is the number of
    trajectories since the previous adjustment.

    Units:   kl and target in nats per token, steps and horizon in trajectories.
    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, 2.2.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * steps / horizon)


@torch.no_grad()
def approx_kl(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(old || new) from samples of the old policy by the mean of ratio - 1 - log(ratio) over action tokens.

    Shapes:  each (B rows, T tokens) -> (), never negative.
    Units:   nats per token.
    Source:  Schulman, "Approximating KL divergence" (2020), where this estimator is called k3.
    """
    m = as_bool_mask(mask, logprobs)
    return kl(old_logprobs, logprobs, "k3", m).sum() / m.sum().clamp(min=1)


@torch.no_grad()
def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: WeightLevel = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    beyond: BeyondBounds = "truncate",
) -> Tensor:
    """Return importance weights, the ratios of the token probabilities in the trainer to those in the sampler.

    level="token" weights each token by its own ratio. "sequence" weights all tokens of a row by the product of their
    ratios, which is unbiased before truncation but has a much higher variance. Weights outside [floor, cap] are clamped
    with beyond="truncate", or set to 0 with "mask", which drops the token or row. Multiply the loss by the weights.

    Shapes:  each (B rows, T tokens) -> (B, T), 0 where the mask is 0, without gradient.
    Source:  Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), for truncated
             token weights; Liu et al., "When speed kills stability" (2025), for sequence weights and masking.
    """
    check_choice("level", level, WeightLevel)
    check_choice("beyond", beyond, BeyondBounds)
    m = as_bool_mask(mask, logprobs)
    d = masked(logprobs, m, "logprobs") - masked(sampler_logprobs, m, "sampler_logprobs")
    if level == "sequence":
        d = d.sum(-1, keepdim=True).expand_as(d)
    w = torch.exp(d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    w = w.clamp(floor, cap) if beyond == "truncate" else torch.where((w >= floor) & (w <= cap), w, 0.0)
    return torch.where(m, w, 0.0)


@torch.no_grad()
def effective_sample_size(weights: Tensor, mask: Tensor, *, level: WeightLevel = "token") -> Tensor:
    """Return the effective sample size as a fraction of the sample, (sum w)^2 / (n sum w^2). Equal weights give 1.

    With level="sequence", w is the common weight of a row's tokens, and n is the number of rows with action tokens.

    Shapes:  weights and mask (B rows, T tokens) -> ().
    Units:   fraction of action tokens or rows; 0 if all weights are 0.
    Source:  Kish (1965).
    """
    check_choice("level", level, WeightLevel)
    m = as_bool_mask(mask, weights)
    w = masked(weights, m, "weights")
    if level == "sequence":
        w, m = w.amax(-1), m.any(-1)
    bottom = m.sum() * w.square().sum()
    return torch.where(bottom > 0, w.sum().square() / torch.where(bottom > 0, bottom, 1.0), 0.0)
