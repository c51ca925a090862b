"""Imitation learning with `imitation_step` and `imitate`, which make recorded actions more probable."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Iterator, Sequence
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
    learner: Any = None,
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
        learner: Processes created by `af.ray.learner` that update the policy. None updates it in this process. After
            the last update, the learner has a new optimizer with the learning rate that it had before.

    Returns:
        The statistics of each update.

    Raises:
        AlignmentError: If a weight is negative or not finite, or if the weights have the wrong shape.
        BatchError: If there is nothing to imitate, or if a trajectory has no token ids.
        SettingsError: If `lr` is not a positive finite number, or if `learner` is for another policy.
        TrainingError: If a process of the learner has failed. The policy then has the weights of the last update.
    """
    batch = collate(rollout, weights, imitate=True if authors is None else authors)
    generator = torch.Generator().manual_seed(seed)
    order = [rows for _ in range(epochs) for rows in minibatches(batch.trajectory_index, minibatch, generator)]
    if learner is None:
        optimizer = adamw(policy, lr)
    elif getattr(learner, "policy", None) is not policy:
        raise SettingsError("learner must update the policy that is trained: af.ray.learner(policy, n)")
    else:
        before = learner.optimizer.param_groups[0]["lr"]
        await learner.reset(lr)
        optimizer = learner.optimizer
    cancel = threading.Event()
    done: list[Stats] = []
    for i in updates(optimizer, len(order), done):
        part = batch.select(order[i])
        if learner is None:
            step = functools.partial(imitation_step, policy, optimizer, part, cancel=cancel)
            done.append(await run_in_thread(step, on_cancel=cancel.set))
        else:
            done.append(await learner.step(part))
    if learner is not None:
        await learner.reset(before)
    return done


def smoothed_loss(stats: Sequence[Stats]) -> float:
    """Return the moving average of the losses of updates at the last of them; NaN if there are none."""
    losses = [each.loss for each in stats] or [math.nan]
    return functools.reduce(lambda mean, loss: 0.9 * mean + 0.1 * loss, losses)


def updates(optimizer: torch.optim.Optimizer, count: int, done: Sequence[Stats]) -> Iterator[int]:
    """Yield the number of each of `count` updates, with its learning rate set, and show the progress.

    Args:
        optimizer: Optimizer of the policy.
        count: Number of updates.
        done: Statistics, to which the caller appends after each update.
    """
    began = time.monotonic()

    def describe() -> str:
        if not done:
            return f"imitation, update 1 of {count}"
        left = (time.monotonic() - began) / len(done) * (count - len(done))
        return (
            f"imitation, {len(done)} of {count} updates done, loss {smoothed_loss(done):.2f}, about {left:.0f} s left"
        )

    def result() -> str:
        return (
            f"imitation: {len(done)} updates in {time.monotonic() - began:.0f} s, "
            f"final loss {smoothed_loss(done):.3f}"
        )

    with show_progress(describe, result):
        for i in range(count):
            scale = min(1.0, (i + 1) / max(1.0, _WARMUP * count)) * (1 - 0.9 * i / count)
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale
            yield i
