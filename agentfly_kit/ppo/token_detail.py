"""Per-token report of a step, for inspection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.ppo.micro_batch import Forward, StepInputs
from agentfly_kit.ppo.objective import Objective, is_clipped


def token_detail(
    forward: Forward,
    objective: Objective,
    batch: Batch,
    old_logprobs: Tensor,
    reference: Tensor | None,
    entropy: Tensor,
    weights: Tensor | None,
) -> dict[str, Any]:
    """Compare every token before and after the step.

    Args:
        forward: Runs the policy after the step.
        objective: Objective of the step.
        batch: The batch.
        old_logprobs: Denominator of the probability ratio, (B, T).
        reference: Logprobs under the reference policy, (B, T), if there is one.
        entropy: Entropies before the step, (B, T).
        weights: Importance weights, (B, T), if there are any.

    Returns:
        float32 arrays of shape (B, T) by name, NaN where the mask is 0. "weight", "kl_reference", "value" and "return"
        are included if available.
    """
    after = forward.score(batch, {"logprob"})["logprob"]
    nan = torch.full_like(after, torch.nan)

    def keep(values: Tensor) -> Any:
        return torch.where(batch.mask, values.float(), nan).numpy()

    # A token is clipped if the policy loss at the new logprobs, with weight 1 per token, has no gradient in it.
    data = StepInputs(batch, old_logprobs, None, weights)
    data.token_weight = batch.mask.float()
    everything = data.select(torch.arange(len(batch)), torch.device("cpu"))
    leaf = after[everything.positions].requires_grad_()
    policy_grad = torch.autograd.grad(objective.policy_loss(leaf, everything), leaf)[0]
    clipped = torch.zeros_like(after)
    clipped[everything.positions] = is_clipped(policy_grad, everything).float()

    out = {
        "logprob_before": keep(old_logprobs),
        "logprob_after": keep(after),
        "ratio": keep((after - old_logprobs).exp()),
        "clipped": keep(clipped),
        "advantage": keep(batch.advantages),
        "entropy": keep(entropy),
        "sampler_gap": keep(old_logprobs - batch.logprobs),
    }
    if weights is not None:
        out["weight"] = keep(weights)
    if reference is not None:
        out["kl_reference"] = keep(losses.kl(after, reference, "k3", batch.mask))
    if batch.values is not None:
        out["value"] = keep(batch.values)
    if batch.returns is not None:
        out["return"] = keep(batch.returns)
    return out
