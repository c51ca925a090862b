"""KL penalty in the reward, applied before advantages are computed."""

from __future__ import annotations

from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError


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
            "the batch has no reference logprobs; "
            "batch.replace(ref_logprobs=reference.score(batch, {'logprob'})['logprob'])"
        )
    return batch.token_rewards - coef * losses.kl(batch.logprobs, batch.ref_logprobs, kind, batch.mask)
