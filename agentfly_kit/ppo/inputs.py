"""Checks of the batch of a training step, values computed before the first update, and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError, SettingsError, check_instance
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.ppo.scoring import score
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import ImageSpan

# Largest difference, in nats, between the logprobs of policy and sampler at which old_logprobs="auto" uses the logprobs
# of the sampler.
EXACT_GAP = 1e-4


@dataclass
class MicroBatch:
    """Inputs of a forward pass over b rows of w tokens, and of the loss at the N sampled tokens of these rows."""

    ids: Tensor  # (b, w)
    row_keys: Tensor | None  # (b, w), on the CPU
    images: list[tuple[ImageSpan, ...]] | None  # spans of images in each row
    mask: Tensor  # (b, w) bool: True where the policy sampled the token
    temperatures: Tensor  # (b,)
    positions: tuple[Tensor, Tensor]  # row and column of each sampled token in the batch
    old_logprobs: Tensor  # (N,) like all fields below; denominator of the probability ratio
    advantages: Tensor
    token_weight: Tensor  # weight of each token's loss in the minibatch
    importance_weights: Tensor | None  # from `PPOConfig.correction`
    ref_logprobs: Tensor | None
    values: Tensor  # values predicted before the update; 0 if the batch has no values
    returns: Tensor | None

    def grid(self, values: Tensor) -> Tensor:
        """Scatter the values of the N sampled tokens to their positions in the rows, (b, w), with 0 elsewhere."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


@dataclass(frozen=True)
class StepInputs:
    """A batch with per-token values, (B, T), that are computed before the first update."""

    batch: Batch
    old_logprobs: Tensor  # denominator of the probability ratio
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None  # from `PPOConfig.correction`
    # Largest difference between the logprobs of sampler and policy, in nats; NaN if they were not compared.
    sampler_gap: float
    # Effective sample size under the importance weights, as a fraction; NaN without a correction.
    effective_sample_size: float
    # Whether `old_logprobs` are the sampler's and must be compared with the policy's in the first update.
    is_provisional: bool = False

    @classmethod
    def prepare(
        cls, policy: Policy, batch: Batch, config: PPOConfig, reference: Policy | None, ranks: WorkerGroup
    ) -> StepInputs:
        """Compute the old logprobs, the importance weights and, if `reference` is given, the reference logprobs."""
        ref_logprobs = batch.ref_logprobs
        if ref_logprobs is None and reference is not None:
            ref_logprobs = score(reference, batch, "logprob", config, ranks)
        inputs = cls(batch, batch.logprobs, ref_logprobs, None, math.nan, math.nan)
        is_current = bool((batch.versions[batch.mask] == policy.version).all())
        if config.old_logprobs == "recompute" or (config.old_logprobs == "auto" and not is_current):
            return inputs.recompute(policy, config, ranks)
        return replace(inputs._with_weights(config), is_provisional=config.old_logprobs == "auto")

    def recompute(self, policy: Policy, config: PPOConfig, ranks: WorkerGroup) -> StepInputs:
        """Return a copy with old logprobs from the policy, which must not have been updated yet."""
        scored = score(policy, self.batch, "logprob", config, ranks)
        gap = float((scored - self.batch.logprobs)[self.batch.mask].abs().max())
        return replace(self, old_logprobs=scored, sampler_gap=gap, is_provisional=False)._with_weights(config)

    def _with_weights(self, config: PPOConfig) -> StepInputs:
        """Return a copy with the importance weights of `PPOConfig.correction` and their effective sample size."""
        if config.correction is None:
            return self
        options = config.correction_options()
        mask, sampler = self.batch.mask, self.batch.logprobs
        # The recorded probabilities are those before truncation, so divide them by the kept mass.
        if self.batch.kept_mass is not None:
            sampler = sampler - torch.where(mask, self.batch.kept_mass, 1.0).log()
        weights = losses.importance_weights(self.old_logprobs, sampler, mask, **options)
        size = losses.effective_sample_size(weights, mask, level=options.get("level", "token"))
        return replace(self, importance_weights=weights, effective_sample_size=float(size))

    def select(self, rows: Tensor, token_weight: Tensor, device: torch.device) -> MicroBatch:
        """Return the given rows as a micro-batch on `device`, without columns that are padding in all rows."""
        batch = self.batch
        width = max(batch.lengths[rows].tolist(), default=2)
        mask = batch.mask[rows, :width]
        row, column = mask.nonzero(as_tuple=True)
        positions = (rows[row], column)
        old_logprobs = self.old_logprobs[positions].to(device)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[positions].to(device)

        return MicroBatch(
            ids=batch.ids[rows, :width].to(device),
            row_keys=None if batch.row_keys is None else batch.row_keys[rows, :width],
            images=None if batch.images is None else [batch.images[row] for row in rows.tolist()],
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


def is_clipped(gradient: Tensor, micro: MicroBatch) -> Tensor:
    """Return a mask, (N,), of clipped tokens, which have a nonzero advantage but zero gradient of the policy loss."""
    # A token with importance weight 0 has zero gradient, too, but is not clipped.
    clipped = (gradient == 0) & (micro.advantages != 0)
    return clipped if micro.importance_weights is None else clipped & (micro.importance_weights != 0)


def check_batch(policy: Policy, batch: Batch, config: PPOConfig, reference: Policy | None) -> None:
    """Raise an error if the batch lacks advantages, is for another policy, is stale, or conflicts with the settings."""
    check_instance("batch", batch, Batch, "a Batch such as af.collate(rollout, af.advantages.grpo)")
    batch.check()
    if batch.row_keys is not None and policy.image_obstacle:
        raise BatchError(f"batch must contain text only, because {policy!r} reads no images: {policy.image_obstacle}")
    if not bool(torch.isfinite(batch.advantages[batch.mask]).all()):
        raise BatchError(
            "batch must have finite advantages at all sampled tokens; use collate(rollout, af.advantages.grpo) or "
            "batch.replace(advantages=...)"
        )
    largest = int(batch.ids.max())
    if largest >= policy.vocab_size:
        raise BatchError(
            f"token ids must be below {policy.vocab_size}, the vocabulary size of the policy, got {largest}; the batch "
            "was made with another tokenizer"
        )
    check_vocabulary(policy, batch.trajectories, batch.row_index)
    # The remaining checks are for probability ratios, which imitated tokens do not have.
    if batch.imitation:
        if config.loss != "reinforce" or config.old_logprobs != "engine":
            raise BatchError(
                "ppo_step needs a batch of sampled tokens; use imitation_step for a batch of collate(imitate=...)"
            )
        return
    newest = int(batch.versions.max())
    if newest > policy.version:
        raise BatchError(
            f"batch must have been sampled at version {policy.version} or earlier of this policy, got version "
            f"{newest}, which is from another policy"
        )
    oldest = int(batch.versions[batch.mask].min()) if bool(batch.mask.any()) else policy.version
    if config.max_lag is not None and policy.version - oldest > config.max_lag:
        raise BatchError(
            f"the batch is stale: its oldest token is from policy version {oldest}, more than max_lag={config.max_lag} "
            f"updates before the current version {policy.version}; sample again, or set max_lag=None and "
            "correction='token'"
        )
    if config.kl_coef > 0 and config.kl_in == "loss" and reference is None and batch.ref_logprobs is None:
        raise SettingsError(f"kl_coef={config.kl_coef} needs reference=, a frozen policy such as policy.reference()")
    if config.correction is None and batch.kept_mass is not None and bool((batch.kept_mass[batch.mask] < 1).any()):
        raise BatchError(
            "correction must be 'token' or 'sequence' for a batch that was sampled under top-p, top-k, min-p or a "
            "constraint, got None; without a correction, probability ratios would be wrong by a factor equal to the "
            "kept probability mass"
        )


def check_vocabulary(policy: Policy, trajectories: Sequence[Trajectory], row_index: Tensor) -> None:
    """Raise BatchError if the token ids of a trajectory belong to a vocabulary other than the policy's."""
    own = policy.chat.vocabulary
    remedy = "sample with the chat of this policy, as af.envs.lookup.expert(policy) does"
    for trajectory in trajectories:
        if trajectory.vocabulary not in (None, own):
            raise BatchError(
                f"trajectory {trajectory.id!r} was made with another tokenizer, not that of the policy; {remedy}"
            )
    # Trajectories from older versions and other programs record no vocabulary, so compare their token texts.
    unknown = [t.rows[i] for t, i in zip(trajectories, row_index.tolist(), strict=True) if t.vocabulary is None]
    recorded = {pair for row in unknown for pair in zip(row.ids.tolist(), row.token_texts, strict=True)}
    tokens = sorted({token for token, _ in recorded})
    texts = dict(zip(tokens, policy.chat.token_texts(tokens), strict=True))
    for token, text in sorted(recorded):
        if text not in (texts[token], f"[{token}]"):
            raise BatchError(
                f"token id {token} had the text {text!r} when the batch was sampled, but has {texts[token]!r} in this "
                f"policy; the batch was made with another tokenizer; {remedy}"
            )


def minibatches(trajectory_index: Tensor, size: int | None, generator: torch.Generator) -> list[Tensor]:
    """Return the row indices of random minibatches of `size` trajectories, or of one minibatch if `size` is None."""
    trajectories = trajectory_index.unique()
    order = trajectories[torch.randperm(len(trajectories), generator=generator)]
    return [torch.isin(trajectory_index, part).nonzero()[:, 0] for part in order.split(size or len(order))]
