"""Imitation learning with `imitation_step` and `imitate`, which make recorded actions more probable."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from agentfly_kit._async.pending_call import pending_call, run_in_thread
from agentfly_kit._display import show_progress
from agentfly_kit.batch.batch import Batch
from agentfly_kit.batch.collate import Advantages, collate
from agentfly_kit.errors import BatchError, SettingsError, checks_keywords
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.ppo.inputs import minibatches
from agentfly_kit.ppo.optimizer import adamw
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.ppo.step import ppo_step

_DEFAULTS = PPOConfig()
# Settings of `PPOConfig` that `imitation_step` uses.
_SETTINGS = ("aggregate", "epochs", "minibatch", "micro_tokens", "max_grad_norm", "autocast", "checkpointing")
# Fraction of the updates of `imitate` during which the learning rate rises from 0.
_WARMUP = 0.05


@checks_keywords
def imitation_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: PPOConfig = _DEFAULTS,
    *,
    seed: int = 0,
    accelerator: Any = None,
    cancel: threading.Event | None = None,
) -> Stats:
    """Update a policy to increase the probability of the imitated actions of a batch (supervised fine-tuning).

    The loss of a token is -weight * log p at temperature 1. As in `ppo_step`, minibatches contain whole trajectories,
    rows can share the computation of prefixes, and token weights do not depend on the split into micro-batches.

    Args:
        policy: Policy to update.
        optimizer: Optimizer of the policy, such as `af.adamw(policy)`.
        batch: Batch created by `collate(imitate=)`.
        config: Settings of the step. Only `aggregate`, `epochs`, `minibatch`, `micro_tokens`, `max_grad_norm`,
            `autocast` and `checkpointing` may differ from their defaults.
        seed: Seed for the order of trajectories in each epoch.
        accelerator: Accelerator whose processes share the rows; see `ppo_step`.
        cancel: Event that cancels the step at the next micro-batch; see `ppo_step`.

    Returns:
        The statistics of the step. Statistics of probability ratios are NaN if any token was not sampled. `entropy` is
        the mean of the recorded entropies, or NaN if the entropy of any token was not recorded.

    Raises:
        AlignmentError: If the tensors of the batch are inconsistent.
        BatchError: If the batch was not created by `collate(imitate=)`, or was created with another tokenizer.
        SettingsError: If a setting that does not affect imitation was changed, or if the optimizer is for another
            policy.
        TrainingError: If a gradient is not finite.
    """
    if not batch.imitation:
        raise BatchError(
            "batch must be created by collate(rollout, imitate=True), got a batch for reinforcement learning"
        )
    for name in PPOConfig.__dataclass_fields__:
        value, default = getattr(config, name), getattr(type(config), name)
        if name not in _SETTINGS and value != default:
            raise SettingsError(f"{name} has no effect on imitation; leave it at {default!r}, got {value!r}")
    used = {name: getattr(config, name) for name in _SETTINGS}
    config = PPOConfig(loss="reinforce", old_logprobs="engine", value_coef=0.0, **used)
    return ppo_step(policy, optimizer, batch, config, seed=seed, accelerator=accelerator, cancel=cancel)


@pending_call
async def imitate(
    policy: Policy,
    rollout: Any,
    weights: Advantages = None,
    *,
    authors: str | Sequence[str] | None = None,
    epochs: int = 2,
    minibatch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> list[Stats]:
    """Train a policy to imitate recorded actions of people, scripts, other policies, or the policy itself.

    Args:
        policy: Policy to train.
        rollout: A rollout, a trajectory, or an iterable of trajectories.
        weights: Weights of the trajectories, which must be at least 0; see `collate(advantages=)`. For rejection
            sampling, pass `lambda rewards, groups: (rewards > 0).float()`. None weights all trajectories equally.
        authors: Authors whose actions are imitated. None imitates the actions of all authors.
        epochs: Number of passes over the trajectories.
        minibatch: Number of trajectories per update.
        lr: Peak learning rate. The rate rises from 0 during the first 5 % of the updates and decays linearly to a
            tenth of the peak.
        seed: Seed for the order of trajectories.

    Returns:
        The statistics of each update.

    Raises:
        AlignmentError: If a weight is negative or not finite, or if the weights have the wrong shape.
        BatchError: If there is nothing to imitate, or if a trajectory has no token ids.
        SettingsError: If `lr` is not a positive finite number.
    """
    batch = collate(rollout, weights, imitate=True if authors is None else authors)
    generator = torch.Generator().manual_seed(seed)
    order = [rows for _ in range(epochs) for rows in minibatches(batch.trajectory_index, minibatch, generator)]
    cancel = threading.Event()
    steps = imitation_steps(policy, map(batch.select, order), len(order), lr, cancel)
    out: list[Stats] = []
    while (stats := await run_in_thread(functools.partial(next, steps, None), on_cancel=cancel.set)) is not None:
        out.append(stats)
    return out


def imitation_steps(
    policy: Policy,
    batches: Iterable[Batch],
    count: int,
    lr: float,
    cancel: threading.Event | None = None,
) -> Iterator[Stats]:
    """Update a policy on `count` batches, with the learning rates of `imitate`. Yield the statistics of each update."""
    optimizer = adamw(policy, lr)
    began, done, loss = time.monotonic(), 0, math.nan

    def describe() -> str:
        if not done:
            return f"imitation, update 1 of {count}"
        left = (time.monotonic() - began) / done * (count - done)
        return f"imitation, {done} of {count} updates done, loss {loss:.2f}, about {left:.0f} s left"

    def result() -> str:
        return f"imitation: {done} updates in {time.monotonic() - began:.0f} s, final loss {loss:.3f}"

    with show_progress(describe, result):
        for i, batch in zip(range(count), batches, strict=False):
            scale = min(1.0, (i + 1) / max(1.0, _WARMUP * count)) * (1 - 0.9 * i / count)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale
            stats = imitation_step(policy, optimizer, batch, cancel=cancel)
            loss, done = 0.9 * loss + 0.1 * stats.loss if done else stats.loss, i + 1
            yield stats
