"""Per-token report of a step, for inspection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.inputs import StepInputs, score
from agentfly_kit.ppo.policy_loss import PolicyLoss, is_clipped


def token_detail(
    policy: Policy, config: PPOConfig, loss: PolicyLoss, inputs: StepInputs, entropy: Tensor
) -> dict[str, Any]:
    """Compare every token before and after the step.

    Args:
        policy: The policy after the step.
        config: Settings of the step.
        loss: Policy loss of the step.
        inputs: Inputs of the step.
        entropy: Entropies before the step, (B, T).

    Returns:
        float32 arrays of shape (B, T) by name, NaN where the mask is 0. "weight", "kl_reference", "value" and "return"
        are included if available.
    """
    batch, old = inputs.batch, inputs.old_logprobs
    after = score(policy, batch, "logprob", config)

    # A token is clipped if the policy loss at the new logprobs, with weight 1 per token, has no gradient in it.
    micro = inputs.select(torch.arange(len(batch)), batch.mask.float(), torch.device("cpu"))
    logprobs = after[micro.positions].requires_grad_()
    gradient = torch.autograd.grad(loss(logprobs, micro).sum(), logprobs)[0]
    clipped = torch.zeros_like(after)
    clipped[micro.positions] = is_clipped(gradient, micro).float()

    found = {
        "logprob_before": old,
        "logprob_after": after,
        "ratio": (after - old).exp(),
        "clipped": clipped,
        "advantage": batch.advantages,
        "entropy": entropy,
        "sampler_gap": old - batch.logprobs,
        "weight": inputs.importance_weights,
        "kl_reference": None
        if inputs.ref_logprobs is None
        else losses.kl(after, inputs.ref_logprobs, "k3", batch.mask),
        "value": batch.values,
        "return": batch.returns,
    }
    nan = torch.full_like(after, torch.nan)
    return {k: torch.where(batch.mask, v.float(), nan).numpy() for k, v in found.items() if v is not None}
