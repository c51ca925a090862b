"""The KL to a reference as part of the reward, before there are advantages."""

from __future__ import annotations

from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import BatchError


def shaped_rewards(batch: Batch, coef: float, *, kind: losses.KLKind = "k1") -> Tensor:
    """Token rewards with a KL to the reference taken from every sampled token: what `kl_in="reward"` means.

    token_rewards - coef KL(sampled || reference), from the sampler's logprobs and `batch.ref_logprobs`. It comes before
    the advantages, so it is no part of `ppo_step`: an estimator of token rewards takes the result as it is, one of
    outcomes its sum over each row.

        batch = batch.replace(ref_logprobs=reference.score(batch, {"logprob"})["logprob"])
        rewards = shaped_rewards(batch, 0.05)

    Shapes:  -> (B, T), NaN where the mask is 0.
    Raises:  BatchError without reference logprobs.
    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, eq. 2, which is kind="k1".
    """
    if batch.ref_logprobs is None:
        raise BatchError(
            "the batch has no reference logprobs; "
            "batch.replace(ref_logprobs=reference.score(batch, {'logprob'})['logprob'])"
        )
    return batch.token_rewards - coef * losses.kl(batch.logprobs, batch.ref_logprobs, kind, batch.mask)
