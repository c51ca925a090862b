"""Statistics of a training step, their sums over micro-batches, phase timings, and the per-token report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit._display import Displayable
from agentfly_kit.batch.batch import Batch, drop_counts
from agentfly_kit.ppo.config import PolicyLoss, PPOConfig
from agentfly_kit.ppo.inputs import StepInputs, is_clipped


@dataclass(frozen=True, repr=False)
class Stats(Displayable):
    """Statistics of one call of `ppo_step`, averaged over action tokens unless stated otherwise.

    Attributes:
        loss: Total loss, averaged over updates.
        policy_loss: Policy loss, averaged over updates.
        approx_kl: k3 estimate of KL(old || new) in nats per token, from the forward passes of the last epoch. Rows that
            are skipped because their gradient is zero (see `dropped_groups`) are excluded; with `target_kl`, no row is
            skipped.
        clip_fraction: Fraction of action tokens whose gradient was zero in the last epoch because of clipping.
        entropy: Exact entropy at the sampling temperature, in nats per token.
        grad_norm: Gradient norm before clipping, averaged over updates.
        value_loss: Value loss, averaged over updates; NaN if the step has no value loss.
        kl_reference: KL divergence from the reference policy, estimated with `kl_kind`, in nats per token.
        explained_variance: Fraction of the variance of the returns that the values explain; NaN without values or with
            constant returns.
        ratio_max: 1 + the largest |ratio - 1|, where `ratio` is the probability ratio of a token.
        effective_sample_size: Effective sample size under the weights of `correction=`, as a fraction of tokens or
            rows; NaN without a correction.
        sampler_gap: Largest difference between the logprobs of the sampling engine and of the policy before the first
            update. The maximum is over all rows if the old logprobs were recomputed, and otherwise over the rows of the
            first minibatch that are not skipped. The value is NaN with old_logprobs="engine", and with "auto" if all
            tokens were sampled by the current version and all rows are skipped.
        reward_mean: Mean reward of the trajectories in the batch.
        reward_std: Standard deviation of the rewards of the trajectories in the batch.
        advantage_mean: Mean advantage of the action tokens.
        updates: Number of optimizer steps.
        rows: Number of rows in the batch.
        tokens: Number of action tokens in the batch.
        dropped_groups: Number of groups that were skipped because their gradient is exactly zero.
        dropped: Number of excluded trajectories, keyed by the reason for their exclusion.
        stopped_early: Whether the step ended early because of `target_kl`.
        lr: Learning rate of the policy.
        seconds: Wall-clock time of the step.
        phases: Seconds spent in each phase, keyed by "old" (scoring before the first update), "forward", "backward" and
            "optimizer".
        detail: Per-token float32 arrays, (B, T), keyed by name, such as "ratio"; None without `ppo_step(detail=True)`.
        batch: The batch of the step; None without `ppo_step(detail=True)`.
    """

    loss: float
    policy_loss: float
    approx_kl: float
    clip_fraction: float
    entropy: float
    grad_norm: float
    value_loss: float = math.nan
    kl_reference: float = math.nan
    explained_variance: float = math.nan
    ratio_max: float = math.nan
    effective_sample_size: float = math.nan
    sampler_gap: float = math.nan
    reward_mean: float = math.nan
    reward_std: float = math.nan
    advantage_mean: float = math.nan
    updates: int = 0
    rows: int = 0
    tokens: int = 0
    dropped_groups: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    stopped_early: bool = False
    lr: float = math.nan
    seconds: float = field(default=0.0, compare=False)
    phases: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    detail: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    batch: Any = field(default=None, compare=False, repr=False)

    def scalars(self) -> dict[str, float]:
        """Return the scalar fields in JSON-serializable form, without NaN values."""
        out: dict[str, float] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool | int | float) and not (isinstance(value, float) and math.isnan(value)):
                out[name] = value
        return out


class RunningStats:
    """Sums of statistics over micro-batches, and the maximum of "ratio". Values stay on the device until read."""

    NAMES = (
        "loss",
        "policy_loss",
        "value_loss",
        "kl_reference",
        "entropy",
        "tokens",
        "approx_kl",
        "clipped",
        "ratio",
    )

    def __init__(self) -> None:
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the statistics of a micro-batch. Missing statistics count as 0."""
        zero = next(iter(values.values())).new_zeros((), dtype=torch.float64)
        self.merge(torch.stack([values[name].detach().double() if name in values else zero for name in self.NAMES]))

    def merge(self, values: Tensor) -> None:
        """Add the `values` of another RunningStats."""
        mine = self.values.to(values.device)
        self.values = torch.cat([(mine + values)[:-1], torch.maximum(mine, values)[-1:]])

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.NAMES.index(name)])

    def per_token(self, name: str) -> float:
        """Return a statistic divided by the number of tokens, or NaN if there are no tokens."""
        return self[name] / self["tokens"] if self["tokens"] else math.nan


class PhaseTimer:
    """Wall-clock time spent in each phase of a step, in seconds."""

    def __init__(self) -> None:
        self.seconds = {"old": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the previous call, or since the timer was created, to a phase."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now


def batch_stats(batch: Batch) -> dict[str, Any]:
    """Return the fields of `Stats` that depend only on the batch."""
    rewards = batch.rewards[batch.first_rows]
    found = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "advantage_mean": float(batch.advantages[batch.mask].mean()),
        "rows": len(batch),
        "tokens": int(batch.mask.sum()),
        "dropped": drop_counts(batch.dropped),
    }
    if batch.values is not None and batch.returns is not None:
        returns, values = batch.returns[batch.mask], batch.values[batch.mask]
        variance = float(returns.var()) if len(returns) > 1 else 0.0
        if variance > 0:
            found["explained_variance"] = 1 - float((returns - values).var()) / variance
    return found


def token_detail(
    after: Tensor,
    config: PPOConfig,
    loss: PolicyLoss,
    inputs: StepInputs,
    entropy: Tensor,
) -> dict[str, Any]:
    """Return per-token values before and after the step, as float32 arrays (B, T) with NaN where the mask is 0.

    `after` contains the logprobs after the step, (B, T), and `entropy` the entropies before the step, (B, T). The
    arrays "weight", "kl_reference", "value" and "return" are included if known.
    """
    batch, old = inputs.batch, inputs.old_logprobs

    # A token counts as clipped if the policy loss with token weights of 1 has zero gradient at the new logprob.
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
