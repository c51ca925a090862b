"""Inputs of a step, computed with the weights from before the first update, and their split into micro-batches."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError, SettingsError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.policy_loss import MicroBatch

# Largest difference, in nats, between the engine's logprobs and the policy's at which the engine's are used.
_EXACT_GAP = 1e-4
# Number of rows in which the engine's logprobs are compared with the policy's before the first update.
_PROBE_ROWS = 8


@dataclass(frozen=True)
class StepInputs:
    """Per-token inputs of a step, (B, T) each.

    Attributes:
        batch: The batch: ids, mask, advantages, values and returns.
        old_logprobs: Denominator of the probability ratio.
        ref_logprobs: Logprobs under the reference policy, if there is one.
        importance_weights: Weights that correct for the difference between the old policy and the sampler, if any.
        sampler_gap: Largest difference between the engine's logprobs and the policy's, in nats; NaN if not compared.
        effective_sample_size: Of the importance weights, as a fraction; NaN without a correction.
    """

    batch: Batch
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None
    sampler_gap: float
    effective_sample_size: float

    @classmethod
    def prepare(cls, policy: Policy, batch: Batch, config: PPOConfig, reference: Policy | None) -> StepInputs:
        """Score the batch with the weights from before the first update, and under the reference policy if given."""
        old_logprobs, gap = _old_logprobs(policy, batch, config)
        ref_logprobs = batch.ref_logprobs
        if ref_logprobs is None and reference is not None:
            ref_logprobs = score(reference, batch, "logprob", config)
        weights, sample_size = _importance_weights(batch, old_logprobs, config)
        return cls(batch, old_logprobs, ref_logprobs, weights, gap, sample_size)

    def select(self, rows: Tensor, token_weight: Tensor, device: torch.device) -> MicroBatch:
        """Return the given rows as a micro-batch on `device`, without columns that are padding in all of them."""
        batch = self.batch
        width = int(batch.lengths[rows].max())
        mask = batch.mask[rows, :width]
        row, column = mask.nonzero(as_tuple=True)
        positions = (rows[row], column)
        old_logprobs = self.old_logprobs[positions].to(device)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[positions].to(device)

        return MicroBatch(
            ids=batch.ids[rows, :width].to(device),
            mask=mask.to(device),
            temperatures=batch.temperatures[rows],
            positions=positions,
            old_logprobs=old_logprobs,
            advantages=batch.advantages[positions].to(device),
            token_weight=token_weight[positions].to(device),
            importance_weights=cut(self.importance_weights),
            ref_logprobs=cut(self.ref_logprobs),
            values=torch.zeros_like(old_logprobs) if batch.values is None else batch.values[positions].to(device),
            returns=cut(batch.returns),
        )


def precision(policy: Policy, config: PPOConfig) -> AbstractContextManager[Any]:
    """Return the context in which the model runs."""
    if config.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(policy.device.type, dtype=torch.bfloat16)


def score(policy: Policy, batch: Any, what: Any, config: PPOConfig) -> Tensor:
    """Score a batch without gradients, in the precision of the step."""
    with precision(policy, config):
        return policy.score(batch, {what}, micro_tokens=config.micro_tokens)[what]


def minibatches(batch: Batch, size: int | None, generator: torch.Generator) -> list[Tensor]:
    """Return the row indices of each minibatch of an epoch: `size` random trajectories (None: all) with all rows."""
    trajectories = batch.trajectory_index.unique()
    order = trajectories[torch.randperm(len(trajectories), generator=generator)]
    return [torch.isin(batch.trajectory_index, part).nonzero()[:, 0] for part in order.split(size or len(order))]


def token_weights(batch: Batch, rows: Tensor, config: PPOConfig) -> Tensor:
    """Return the weight of each token's loss in the loss of a minibatch: (B, T), 0 outside of `rows`.

    Every aggregate is linear in the per-token losses, so the weights are its gradient.
    """
    options = config.aggregate_options()
    index = batch.trajectory_index[rows] if options["how"] == "trajectory_mean" else None
    per_token = torch.zeros(len(rows), batch.ids.shape[1], requires_grad=True)
    aggregated = losses.aggregate(per_token, batch.mask[rows], trajectory_index=index, **options)
    out = torch.zeros(batch.ids.shape)
    out[rows] = torch.autograd.grad(aggregated, per_token)[0]
    return out


def shaped_rewards(batch: Batch, coef: float, *, kind: losses.KLKind = "k1") -> Tensor:
    """Subtract a KL penalty towards the reference policy from the reward of every sampled token.

    Computes token_rewards - coef * KL(sampled || reference) from the sampler's logprobs and `batch.ref_logprobs`. This
    implements `kl_in="reward"`. It precedes the computation of advantages and is therefore not part of `ppo_step`: pass
    the result to an estimator of token rewards, or its sum over each row to an outcome estimator.

        batch = batch.replace(ref_logprobs=reference.score(batch, {"logprob"})["logprob"])
        rewards = shaped_rewards(batch, 0.05)

    Args:
        batch: Batch with `ref_logprobs`.
        coef: Coefficient of the KL penalty.
        kind: Estimator of the KL per token; see `af.losses.kl`.

    Returns:
        Rewards per token.

    Raises:
        BatchError: If the batch has no reference logprobs.

    Shapes:  -> (B, T), NaN where the mask is 0.
    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, eq. 2, which is kind="k1".
    """
    if batch.ref_logprobs is None:
        raise BatchError(
            "shaped_rewards needs reference logprobs; add them with "
            "batch.replace(ref_logprobs=reference.score(batch, {'logprob'})['logprob'])"
        )
    return batch.token_rewards - coef * losses.kl(batch.logprobs, batch.ref_logprobs, kind, batch.mask)


def _old_logprobs(policy: Policy, batch: Batch, config: PPOConfig) -> tuple[Tensor, float]:
    """Choose the denominator of the probability ratio, (B, T); see `PPOConfig.old_logprobs`.

    Also returns the largest difference between the engine's logprobs and the policy's over the compared rows.
    """

    def largest_gap(rows: Tensor, scored: Tensor) -> float:
        mask = batch.mask[rows]
        return float((scored[mask] - batch.logprobs[rows][mask]).abs().max())

    if config.old_logprobs == "engine":
        return batch.logprobs, math.nan
    if config.old_logprobs == "auto" and bool((batch.versions[batch.mask] == policy.version).all()):
        rows = _probe_rows(batch)
        names = ("ids", "mask", "temperatures", "lengths")  # what `Policy.score` reads
        probe = SimpleNamespace(**{name: getattr(batch, name)[rows] for name in names})
        gap = largest_gap(rows, score(policy, probe, "logprob", config))
        if gap <= _EXACT_GAP:
            return batch.logprobs, gap
    scored = score(policy, batch, "logprob", config)
    return scored, largest_gap(torch.arange(len(batch)), scored)


def _probe_rows(batch: Batch) -> Tensor:
    """Return up to `_PROBE_ROWS` rows with sampled tokens, spread over the batch and including the longest."""
    rows = batch.mask.any(1).nonzero()[:, 0]
    if len(rows) <= _PROBE_ROWS:
        return rows
    probed = rows[torch.linspace(0, len(rows) - 1, _PROBE_ROWS).long()]
    probed[0] = rows[batch.lengths[rows].argmax()]  # differences grow with the length of the context
    distinct: Tensor = probed.unique()
    return distinct


def _importance_weights(batch: Batch, old_logprobs: Tensor, config: PPOConfig) -> tuple[Tensor | None, float]:
    """Compute the weights of `PPOConfig.correction`, (B, T), and their effective sample size, as a fraction."""
    if config.correction is None:
        return None, math.nan
    options: dict[str, Any] = (
        {"level": config.correction} if isinstance(config.correction, str) else dict(config.correction)
    )
    sampler = batch.logprobs
    if batch.kept_mass is not None:  # recorded logprobs precede truncation, but tokens were drawn from the kept mass
        sampler = sampler - torch.where(batch.mask, batch.kept_mass, 1.0).log()
    try:
        weights = losses.importance_weights(old_logprobs, sampler, batch.mask, **options)
    except TypeError as error:
        raise SettingsError(f"correction must hold options of losses.importance_weights: {error}") from error
    level = options.get("level", "token")
    return weights, float(losses.effective_sample_size(weights, batch.mask, level=level))
