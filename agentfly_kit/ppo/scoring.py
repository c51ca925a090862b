"""Logprobs, weights and penalties for the tokens of a batch, computed before an update."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError
from agentfly_kit.policy.forward import ScoreName
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.distributed import WorkerGroup


def precision(policy: Policy, config: PPOConfig) -> AbstractContextManager[Any]:
    """Return a context manager that applies `config.autocast`, or does nothing if this setting is None."""
    if config.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(policy.device.type, dtype=torch.bfloat16)


def score(policy: Policy, batch: Batch, what: ScoreName, config: PPOConfig, ranks: WorkerGroup) -> Tensor:
    """Compute a score of each token, (B, T), without gradients and under `config.autocast`; see `WorkerGroup.score`."""
    with precision(policy, config):
        return ranks.score(policy, batch, what, config.micro_tokens)


def token_weights(batch: Batch, rows: Tensor, config: PPOConfig) -> Tensor:
    """Return the weight of each token's loss in the loss of a minibatch, (B, T), with 0 outside of `rows`.

    The loss of a minibatch is linear in the losses of its tokens, and the weights are the gradient of this loss.
    """
    options = config.aggregate_options()
    index = batch.trajectory_index[rows] if options["how"] == "trajectory_mean" else None
    per_token = torch.zeros(len(rows), batch.ids.shape[1], requires_grad=True)
    aggregated = losses.aggregate(per_token, batch.mask[rows], trajectory_index=index, **options)
    out = torch.zeros(batch.ids.shape)
    out[rows] = torch.autograd.grad(aggregated, per_token)[0]
    return out


def shaped_rewards(batch: Batch, coef: float, *, kind: losses.KLKind = "k1") -> Tensor:
    """Subtract a KL penalty with respect to the reference policy from the reward of every sampled token.

    The result, token_rewards - coef * KL(sampler || reference), is computed from the sampler's logprobs and
    `batch.ref_logprobs`. Pass the shaped rewards, or their sum over each row, to an estimator, as `train`
    does with `kl_in="reward"`::

        batch = batch.replace(ref_logprobs=reference.score(batch, {"logprob"})["logprob"])
        rewards = shaped_rewards(batch, 0.05)

    Args:
        batch: Batch with `ref_logprobs`.
        coef: Coefficient of the KL penalty.
        kind: Estimator of the per-token KL; see `af.losses.kl`.

    Returns:
        The token rewards, (B, T), with NaN where the mask is 0.

    Raises:
        BatchError: If the batch has no reference logprobs.

    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, eq. 2, which uses kind="k1".
    """
    if batch.ref_logprobs is None:
        raise BatchError(
            "shaped_rewards needs reference logprobs; add them with "
            "batch.replace(ref_logprobs=reference.score(batch, {'logprob'})['logprob'])"
        )
    return batch.token_rewards - coef * losses.kl(batch.logprobs, batch.ref_logprobs, kind, batch.mask)
