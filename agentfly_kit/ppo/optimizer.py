"""The optimizer of a policy, gradient clipping, and the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agentfly_kit.errors import SettingsError, TrainingError, check_instance, check_value
from agentfly_kit.policy.policy import Policy
from agentfly_kit.policy.value_head import Critic


def adamw(
    policy: Policy,
    lr: float = 3e-4,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """Create an AdamW optimizer for the trainable parameters of a policy.

    Parameters of type bfloat16 are updated in float32. The optimizer keeps float32 copies of these parameters and
    rounds the copies to bfloat16 after each step. Without the copies, most updates would be lost at small learning
    rates, because the relative precision of bfloat16 is 1/256. The copies and Adam's moments take 12 bytes per
    parameter.

    Args:
        policy: The policy to train.
        lr: Learning rate of the model and of the trunk of a separate critic. The value head uses ten times this rate.
        betas: Decay rates of Adam's moments.
        weight_decay: Weight decay.

    Raises:
        SettingsError: If `lr` is not a positive finite number, or if the policy has trainable float16 weights. In
            float16, Adam's epsilon is rounded to 0 and updates are hundreds of times too large.
        PolicyError: If the logits cannot be computed from hidden states; see `Policy.logits`.

    Source:  The default betas and the factor ten were chosen from measurements on the calculator task.
    """
    check_value("lr", lr, limit="above 0")
    policy.check_head()
    if any(p.requires_grad and p.dtype == torch.float16 for p in policy.parameters()):
        raise SettingsError(
            "policy must not have trainable weights of type float16, because Adam's updates are wrong in float16; load "
            'the policy with dtype="float32", and use PPOConfig(autocast=...) for speed'
        )
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": lr}]
    head = policy.value_head
    if isinstance(head, Critic):
        groups.append({"params": list(head.trunk.parameters()), "lr": lr})
        head = head.head
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": 10 * lr})
    return _AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


class _AdamW(torch.optim.AdamW):
    """AdamW optimizer that updates bfloat16 parameters in float32 and keeps the float32 values in its state."""

    def step(self, closure: Any = None) -> Any:
        """Make one step. A bfloat16 parameter that was changed after the last step starts from the changed value."""
        with self._float32() as parameters:
            loss = super().step(closure)
            for p, rounded in parameters:
                rounded.copy_(p.data)
                self.state[p]["master"] = p.data
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Without `_float32`, torch would round the moments to the type of the parameters."""
        with self._float32():
            super().load_state_dict(state_dict)

    @contextmanager
    def _float32(self) -> Iterator[list[tuple[torch.nn.Parameter, torch.Tensor]]]:
        """Convert bfloat16 parameters and gradients to float32. Yield the parameters with their bfloat16 values."""
        saved = [
            (p, p.data, p.grad) for group in self.param_groups for p in group["params"] if p.dtype == torch.bfloat16
        ]
        try:
            for p, rounded, gradient in saved:
                master = self.state[p].pop("master", None)
                changed = master is None or not torch.equal(master.to(rounded.dtype), rounded)
                p.grad = None  # because the types of parameter and gradient must be equal
                p.data = rounded.float() if changed else master
                p.grad = None if gradient is None else gradient.float()
            yield [(p, rounded) for p, rounded, _ in saved]
        finally:
            for p, rounded, gradient in saved:
                p.grad = None
                p.data, p.grad = rounded, gradient


def check_optimizer(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Raise SettingsError if the optimizer contains no parameter of the policy and would therefore change no weight."""
    check_instance("policy", policy, Policy, "an af.Policy")
    own = {id(parameter) for parameter in policy.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise SettingsError(
            "optimizer must update parameters of this policy, got an optimizer of another policy; after policy.copy(), "
            "use af.adamw(copy)"
        )


def clip_and_step(policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> float:
    """Clip the gradients, make an optimizer step, increment the version, and return the norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        # Adam's moments also change parameters that have no gradient in this minibatch.
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
    if policy.accelerator is not None:
        norm = norm.full_tensor()  # type: ignore[attr-defined]
    if not bool(torch.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"the gradient must be finite, got {float(norm)} at policy version {policy.version}; the weights are those "
            "from before this update. Check the advantages, or try a smaller lr or max_grad_norm=1"
        )
    with policy.lock:
        optimizer.step()
        policy.version += 1
    return float(norm)
