"""The optimizer: learning rates of the parts of a policy, and an update that rejects gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch

from agentfly_kit.errors import TrainingError
from agentfly_kit.policy.forward import Critic
from agentfly_kit.policy.policy import Policy


def adamw(
    policy: Policy,
    lr: float = 3e-4,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    value_lr: float | None = None,
) -> torch.optim.AdamW:
    """Create an AdamW optimizer for the trainable parameters of a policy.

    Args:
        policy: The policy.
        lr: Learning rate of the model, and of the trunk of a separate critic.
        betas: Decay rates of Adam's moments.
        weight_decay: Weight decay.
        value_lr: Learning rate of the value head. None is ten times `lr`.

    Returns:
        The optimizer.

    Source:  The default betas and the rate of the value head were measured on the calculator task; see docs/log.md.
    """
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": lr}]
    head = policy.value_head
    if isinstance(head, Critic):
        groups.append({"params": list(head.trunk.parameters()), "lr": lr})
        head = head.head
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": 10 * lr if value_lr is None else value_lr})
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def clip_and_step(policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> float:
    """Clip the gradients, make one optimizer step and increment the version of the policy.

    Returns the gradient norm before clipping.

    Raises:
        TrainingError: If the norm is not finite. The weights are then unchanged.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if p.grad is None:  # Adam's moments move a parameter even if the minibatch gives it no gradient
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
    if not bool(torch.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"the gradient must be finite, got {float(norm)} at policy version {policy.version}; the weights are those "
            "before this update. Try a smaller lr, max_grad_norm=1, or check the advantages"
        )
    with policy.lock:
        optimizer.step()
        policy.version += 1
    return float(norm)
