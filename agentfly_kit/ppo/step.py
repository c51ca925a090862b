"""A PPO step on a batch, from old logprobs to losses, gradients and optimizer updates.

The result does not depend on padding, on the order or split of a minibatch, or on the number of processes, because
token weights are first computed over the whole minibatch. The forward pass returns one logprob, value and entropy per
sampled token, so token-wise losses need no mask. Row-wise and custom losses receive (B, T) tensors and a mask.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit._async.pending_call import pending_call, run_in_thread
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import checks_keywords
from agentfly_kit.policy.cpu import single_torch_thread, warn_if_bfloat16_is_slow
from agentfly_kit.policy.forward import ForwardOutput
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.config import PolicyLoss, PPOConfig
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.ppo.inputs import (
    EXACT_GAP,
    MicroBatch,
    StepInputs,
    check_batch,
    is_clipped,
    minibatches,
)
from agentfly_kit.ppo.optimizer import check_optimizer, clip_and_step
from agentfly_kit.ppo.scoring import precision, score, token_weights
from agentfly_kit.ppo.stats import PhaseTimer, RunningStats, Stats, batch_stats, token_detail

_DEFAULTS = PPOConfig()


@checks_keywords
def ppo_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: PPOConfig = _DEFAULTS,
    *,
    reference: Policy | None = None,
    seed: int = 0,
    accelerator: Any = None,
    detail: bool = False,
    cancel: threading.Event | None = None,
) -> Stats:
    """Update a policy on the sampled tokens of a batch with PPO.

    The function makes `config.epochs` passes over the batch, with one optimizer step per minibatch of trajectories.

    Args:
        policy: Policy to update.
        optimizer: Optimizer of the policy, such as `af.adamw(policy)`.
        batch: Batch with advantages, created by `collate`.
        config: Settings of the step. A `TrainConfig` is also accepted.
        reference: Frozen reference policy for the KL; not used if the batch has `ref_logprobs`.
        seed: Seed for the order of trajectories in each epoch.
        accelerator: accelerate.Accelerator whose processes share the rows of each minibatch. Each process must have
            the same policy and pass the same batch (see `gather`). None selects the accelerator of a sharded policy;
            see `Policy.shard`.
        detail: Whether to store per-token arrays of the step, (B, T), in `stats.detail`.
        cancel: Event that cancels the step at the next micro-batch or, with several processes, at the next update. The
            weights are then those of the last complete update.

    Returns:
        The statistics of the step.

    Raises:
        AlignmentError: If the tensors of the batch are inconsistent.
        BatchError: If the batch has no advantages, is stale, or was created with another tokenizer or policy.
        SettingsError: If the settings are inconsistent with the batch, or if the optimizer is for another policy.
        TrainingError: If a gradient is not finite. The weights are then those of the last complete update.
        asyncio.CancelledError: If `cancel` was set.

    Source:  PPO, arXiv 1707.06347, eq. 7. The masking is described in docs/conventions.md.
    """
    # Reject an unsuitable optimizer or batch before any computation.
    started = time.perf_counter()
    check_optimizer(policy, optimizer)
    check_batch(policy, batch, config, reference)
    ranks = WorkerGroup(accelerator or policy.accelerator)
    if not ranks.is_single:
        ranks.check_same_batch(batch)
    loss = config.policy_loss()
    if config.autocast is not None:
        warn_if_bfloat16_is_slow(policy.device)
    has_values = config.value_coef > 0 and policy.value_head is not None and batch.returns is not None

    # All processes draw the same minibatches from the same seed. Each process computes some rows of each minibatch.
    generator = torch.Generator().manual_seed(seed)
    schedule = [minibatches(batch.trajectory_index, config.minibatch, generator) for _ in range(config.epochs)]
    phases = PhaseTimer()

    with single_torch_thread(policy):
        # Compute the reference logprobs, the importance weights and, unless the logprobs of the sampler are used, the
        # old logprobs.
        inputs = StepInputs.prepare(policy, batch, config, reference if config.kl_coef > 0 or detail else None, ranks)
        entropy_before = score(policy, batch, "entropy", config, ranks) if detail else None
        phases.lap("old")

        # A row with zero advantages has zero gradient unless there is a KL, entropy or value term. The forward pass of
        # such a row is skipped, but the row still counts in every denominator and in the schedule of updates.
        live = batch.mask.any(1)
        if _only_advantage(loss, config, has_values):
            live = (torch.where(batch.mask, batch.advantages, 0.0) != 0).any(1)

        # If the sampling engine recorded all entropies, use them, because they are exact and cover skipped rows.
        # Otherwise, compute entropies in the forward pass.
        entropies_known = not bool(torch.isnan(batch.entropies[batch.mask]).any())
        needs_entropy = config.entropy_coef > 0 or not (entropies_known or batch.imitation)

        def check_cancelled() -> None:
            # Several processes are cancelled together at the end of a minibatch.
            if ranks.is_single and cancel is not None and cancel.is_set():
                raise _cancelled(optimizer)

        accumulate = functools.partial(
            _accumulate_gradients,
            policy,
            ranks=ranks,
            config=config,
            loss=loss,
            phases=phases,
            entropy=needs_entropy,
            value=has_values,
            check_cancelled=check_cancelled,
        )

        # Make one update per minibatch. `totals` collects the statistics of the whole step, and `last_epoch` those of
        # the last epoch. The KL and the clip fraction are computed from `last_epoch`.
        totals, last_epoch = RunningStats(), RunningStats()
        updates, norms, tokens, stopped = 0, 0.0, 0, False
        for epoch in schedule:
            last_epoch, tokens = RunningStats(), 0
            for rows in epoch:
                # Compute token weights over the whole minibatch, whose loss is then the sum of the micro-batch losses.
                weights = token_weights(batch, rows, config)
                local = ranks.local_rows(rows[live[rows]], batch.lengths)
                optimizer.zero_grad(set_to_none=True)
                sums, gap = accumulate(inputs, local, weights)
                if inputs.is_provisional:  # in the first minibatch
                    # All processes must use the same old logprobs. If no process had a row to compare, `gap` is NaN.
                    gap = ranks.largest(gap)
                    if gap <= EXACT_GAP or not bool(live.any()):
                        inputs = replace(inputs, sampler_gap=gap, is_provisional=False)
                    else:
                        inputs = inputs.recompute(policy, config, ranks)
                        phases.lap("old")
                        optimizer.zero_grad(set_to_none=True)
                        sums, _ = accumulate(inputs, local, weights)
                # If one process is cancelled, cancel all processes, because their weights must stay equal.
                if not ranks.is_single:
                    if policy.accelerator is None:  # otherwise, the backward pass has summed the gradients
                        ranks.sum_gradients(optimizer)
                    if ranks.sum_stats(sums, cancel is not None and cancel.is_set()):
                        raise _cancelled(optimizer)
                norms += clip_and_step(policy, optimizer, config.max_grad_norm)
                updates += 1
                phases.lap("optimizer")
                totals.merge(sums.values)
                last_epoch.merge(sums.values)
                tokens += int(batch.mask[rows].sum())
                stopped = config.target_kl is not None and sums.per_token("approx_kl") > config.target_kl
                if stopped:
                    break
            if stopped:
                break

        # Score the batch again with the new weights, for the per-token report.
        after = None
        if entropy_before is not None:
            new = score(policy, batch, "logprob", config, ranks)
            after = token_detail(new, config, loss, inputs, entropy_before)

    entropy = float(batch.entropies[batch.mask].mean())  # NaN if the engine did not record all of them
    if needs_entropy and not entropies_known:
        entropy = last_epoch.per_token("entropy")
    trained_groups, live_groups = (len(batch.groups[some].unique()) for some in (batch.mask.any(1), live))
    return Stats(
        loss=totals["loss"] / updates,
        policy_loss=totals["policy_loss"] / updates,
        value_loss=totals["value_loss"] / updates if has_values else math.nan,
        kl_reference=_kl_reference(totals, inputs, config),
        approx_kl=last_epoch.per_token("approx_kl"),
        clip_fraction=last_epoch["clipped"] / tokens,  # of all tokens, because skipped rows have no clipped ones
        entropy=entropy,
        grad_norm=norms / updates,
        ratio_max=1 + totals["ratio"],
        effective_sample_size=inputs.effective_sample_size,
        sampler_gap=inputs.sampler_gap,
        updates=updates,
        dropped_groups=trained_groups - live_groups,
        stopped_early=stopped,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=time.perf_counter() - started,
        phases=phases.seconds,
        detail=after,
        batch=batch if detail else None,
        **batch_stats(batch),
    )


def _accumulate_gradients(
    policy: Policy,
    inputs: StepInputs,
    rows: Tensor,
    weights: Tensor,
    *,
    ranks: WorkerGroup,
    config: PPOConfig,
    loss: PolicyLoss,
    phases: PhaseTimer,
    entropy: bool,
    value: bool,
    check_cancelled: Callable[[], None],
) -> tuple[RunningStats, float]:
    """Accumulate the gradients of the given rows in the policy's parameters, micro-batch by micro-batch.

    Returns:
        The statistics and, if the old logprobs are provisional, their largest difference from the logprobs of the
        policy. If a difference exceeds `EXACT_GAP`, infinity is returned and the remaining rows are not computed. NaN
        means that no logprobs were compared.
    """
    sums, gap = RunningStats(), math.nan
    for picked in policy.micro_batches(inputs.batch, rows, config.micro_tokens):
        check_cancelled()
        micro = inputs.select(picked, weights, policy.device)
        with precision(policy, config), policy.checkpointing(config.checkpointing):
            options: Any = {"entropy": entropy, "value": value, "row_keys": micro.row_keys, "images": micro.images}
            out = policy.forward(micro.ids, micro.mask, micro.temperatures, **options)
        if inputs.is_provisional:
            gaps = (out.logprob.detach() - micro.old_logprobs).abs()
            found = float(gaps.max()) if len(picked) else math.nan
            if policy.accelerator is not None:  # either all processes continue or all return
                found = ranks.largest(found)
            if not found <= EXACT_GAP:
                phases.lap("old")
                return sums, math.inf
            gap = max(found, gap)  # `found` if `gap` is NaN
        if not len(picked):  # only other processes have rows left
            torch.cat([out.logprob, *([] if out.value is None else [out.value])]).sum().backward()
            continue
        objective, stats = _objective(out, micro, loss, config)
        phases.lap("forward")
        objective.backward()
        sums.add(stats)
        # If the entropies are not in the loss, the backward pass keeps their graph, so free it here.
        del out, objective, stats
        phases.lap("backward")
    return sums, gap


def _objective(
    out: ForwardOutput, micro: MicroBatch, loss: PolicyLoss, config: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the objective to minimize for a micro-batch, and statistics summed over its tokens."""
    # Compute the policy loss, which is max(-ratio A, -clip(ratio) A) for "ppo"; see losses/surrogates.py. A token is
    # clipped if the gradient of the policy loss is 0 although the advantage is not.
    objective = policy_loss = loss(out.logprob, micro).sum()
    policy_gradient = torch.autograd.grad(policy_loss, out.logprob, retain_graph=True)[0]
    log_ratio = (out.logprob - micro.old_logprobs).clamp(max=20.0)  # exp overflows float32 above 88
    stats = {"policy_loss": policy_loss}

    # Add the KL penalty with respect to the reference policy.
    if config.kl_coef > 0 and config.kl_in == "loss":
        assert micro.ref_logprobs is not None
        kl = losses.kl(out.logprob, micro.ref_logprobs, config.kl_kind)
        weighted = kl * log_ratio.exp() if config.kl_weighted else kl
        objective = objective + config.kl_coef * (weighted * micro.token_weight).sum()
        stats["kl_reference"] = kl.sum()

    # Add the value loss.
    if out.value is not None:
        assert micro.returns is not None
        everywhere = torch.ones_like(out.value).bool()
        squared = losses.value(out.value, micro.values, micro.returns, everywhere, clip=config.value_clip)
        stats["value_loss"] = (squared * micro.token_weight).sum()
        objective = objective + config.value_coef * stats["value_loss"]

    # Subtract the entropy bonus.
    if out.entropy is not None:
        stats["entropy"] = out.entropy.sum()
        if config.entropy_coef > 0:
            objective = objective - config.entropy_coef * (out.entropy * micro.token_weight).sum()

    # Compute statistics of the probability ratios. approx_kl is the k3 estimate of KL(old policy || new policy).
    stats["loss"] = objective
    with torch.no_grad():
        ratio = log_ratio.exp()
        stats["approx_kl"] = (ratio - 1 - log_ratio).sum()
        stats["clipped"] = is_clipped(policy_gradient, micro).sum()
        stats["ratio"] = (ratio - 1).abs().max()
        stats["tokens"] = torch.tensor(float(len(ratio)), device=ratio.device)
    return objective, stats


def _only_advantage(loss: PolicyLoss, config: PPOConfig, has_values: bool) -> bool:
    """Return True if rows with zero advantages affect neither the gradient nor early stopping."""
    kl_in_loss = config.kl_coef > 0 and config.kl_in == "loss"
    return (
        loss.name != ""
        and not (kl_in_loss or has_values)
        and config.entropy_coef == 0
        and config.target_kl is None  # target_kl needs the KL of every row
    )


@pending_call
async def ppo_step_async(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, config: PPOConfig = _DEFAULTS, **options: Any
) -> Stats:
    """Run `ppo_step` in a thread without blocking the event loop.

    If the call is cancelled, the weights are those of the last complete update.

    Args:
        policy, optimizer, batch, config: As in `ppo_step`.
        options: Further arguments of `ppo_step`, except `cancel`.
    """
    cancel = threading.Event()
    step = functools.partial(ppo_step, policy, optimizer, batch, config, cancel=cancel, **options)
    return await run_in_thread(step, on_cancel=cancel.set)


def _cancelled(optimizer: torch.optim.Optimizer) -> asyncio.CancelledError:
    """Discard the gradients and return a CancelledError for the caller to raise."""
    optimizer.zero_grad(set_to_none=True)
    return asyncio.CancelledError("ppo_step was cancelled; the weights are those of the last complete update")


def _kl_reference(totals: RunningStats, inputs: StepInputs, config: PPOConfig) -> float:
    """Return the mean KL divergence from the reference policy, or NaN if there is none."""
    if config.kl_coef == 0:
        return math.nan
    if config.kl_in == "loss":
        return totals.per_token("kl_reference")
    if inputs.ref_logprobs is None:
        return math.nan
    mask = inputs.batch.mask
    return float(losses.kl(inputs.old_logprobs, inputs.ref_logprobs, config.kl_kind, mask).sum() / mask.sum())
