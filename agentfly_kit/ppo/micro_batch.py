"""Micro-batches: the rows of one forward pass, the inputs of their sampled tokens, and the forward pass itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import SettingsError
from agentfly_kit.policy.policy import Policy


@dataclass
class MicroBatch:
    """Rows of one forward pass, and (N,) inputs of their sampled tokens on the policy's device.

    Attributes:
        ids: (b, w) token ids.
        mask: (b, w) bool: True where the policy sampled the token.
        temperatures: (b,) sampling temperatures.
        positions: Row and column of each token in the batch.
        old_logprobs: Denominator of the probability ratio.
        advantages: Advantages.
        token_weight: Weight of each token's loss in the minibatch.
        importance_weights: Importance weights of the correction; None without one.
        ref_logprobs: Logprobs under the reference policy, if there is one.
        values: Values before the update; 0 if the batch has none.
        returns: Targets of the value loss, if the batch has them.
    """

    ids: Tensor
    mask: Tensor
    temperatures: Tensor
    positions: tuple[Tensor, Tensor]
    old_logprobs: Tensor
    advantages: Tensor
    token_weight: Tensor
    importance_weights: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor
    returns: Tensor | None

    def grid(self, values: Tensor) -> Tensor:
        """Scatter token values (N,) into rows (b, w), with 0 where the mask is 0."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


class StepInputs:
    """Per-token inputs of a step, (B, T) each, from which micro-batches are selected."""

    def __init__(
        self, batch: Batch, old_logprobs: Tensor, ref_logprobs: Tensor | None, importance_weights: Tensor | None
    ) -> None:
        self.batch, self.old_logprobs, self.ref_logprobs, self.importance_weights = (
            batch,
            old_logprobs,
            ref_logprobs,
            importance_weights,
        )
        self.token_weight = torch.zeros(0)
        self.values = batch.values
        if batch.values is None and batch.returns is not None:
            self.values = torch.zeros_like(batch.returns)

    def select(self, rows: Tensor, device: torch.device) -> MicroBatch:
        """Return the given rows as a micro-batch on `device`, without columns that are padding in all of them."""
        batch = self.batch
        width = int(batch.lengths[rows].max())
        mask = batch.mask[rows, :width]
        r, c = mask.nonzero(as_tuple=True)
        positions = (rows[r], c)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[positions].to(device)

        old_logprobs, advantages, token_weight = cut(self.old_logprobs), cut(batch.advantages), cut(self.token_weight)
        assert old_logprobs is not None and advantages is not None and token_weight is not None
        values = cut(self.values)
        return MicroBatch(
            ids=batch.ids[rows, :width].to(device),
            mask=mask.to(device),
            temperatures=batch.temperatures[rows],
            positions=positions,
            old_logprobs=old_logprobs,
            advantages=advantages,
            token_weight=token_weight,
            importance_weights=cut(self.importance_weights),
            ref_logprobs=cut(self.ref_logprobs),
            values=values if values is not None else torch.zeros_like(old_logprobs),
            returns=cut(batch.returns),
        )


class Forward:
    """Runs the policy with the precision, gradient checkpointing and micro-batch size of a step.

    Args:
        policy: The policy.
        micro_tokens: Number of padded tokens per forward pass.
        autocast: "bfloat16", or None for the dtype of the weights.
        checkpointing: Whether to recompute activations in the backward pass.

    Raises:
        SettingsError: If `autocast` is anything else, or `micro_tokens` is below 1.
    """

    def __init__(self, policy: Policy, micro_tokens: int, autocast: str | None, checkpointing: bool) -> None:
        if autocast not in (None, "bfloat16"):
            raise SettingsError(f"autocast={autocast!r}: give 'bfloat16' or None")
        if micro_tokens < 1:
            raise SettingsError(f"micro_tokens={micro_tokens}: give at least 1")
        self.policy, self.micro_tokens = policy, micro_tokens
        self._half = autocast is not None
        self._checkpointing = checkpointing

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._half:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16)

    def __call__(self, micro: MicroBatch, *, entropy: bool, value: bool) -> Any:
        with self._precision(), self.policy.checkpointing(self._checkpointing):
            return self.policy.forward(micro.ids, micro.mask, micro.temperatures, entropy=entropy, value=value)

    def score(self, batch: Any, want: Any, policy: Policy | None = None) -> Any:
        """Score a batch without gradients under `policy`, by default the policy that is trained."""
        with self._precision():
            return (policy or self.policy).score(batch, want, micro_tokens=self.micro_tokens)

    def micro_batches(self, rows: Tensor, batch: Batch) -> Iterable[Tensor]:
        """Split rows of a batch into micro-batches; see `Policy.micro_batches`."""
        return self.policy.micro_batches(batch, rows, self.micro_tokens)


class RowSubset:
    """The tensors of some rows of a batch that `Policy.score` reads."""

    def __init__(self, batch: Batch, rows: Tensor) -> None:
        self.ids, self.mask = batch.ids[rows], batch.mask[rows]
        self.temperatures, self.lengths = batch.temperatures[rows], batch.lengths[rows]


def raise_if_cancelled(
    cancel: threading.Event | None, optimizer: torch.optim.Optimizer, *, force: bool = False
) -> None:
    """Discard the gradients and raise asyncio.CancelledError if `cancel` is set or `force` is True."""
    if force or (cancel is not None and cancel.is_set()):
        optimizer.zero_grad(set_to_none=True)
        raise asyncio.CancelledError("ppo_step was cancelled; the weights are those of the last update")


def minibatches(batch: Batch, size: int | None, generator: torch.Generator) -> list[Tensor]:
    """Return the row indices of each minibatch of an epoch: `size` random trajectories, each with all of its rows.

    Args:
        batch: The batch.
        size: Number of trajectories per minibatch; None for all.
        generator: Source of randomness.
    """
    trajectories = batch.trajectory_index.unique()
    order = trajectories[torch.randperm(len(trajectories), generator=generator)]
    return [torch.isin(batch.trajectory_index, part).nonzero()[:, 0] for part in order.split(size or len(order))]
