"""One PPO step on a batch: old logprobs, losses, gradients and optimizer updates.

The result does not depend on the padding, on the order of rows within a minibatch, on how it is split into
micro-batches, or on the number of processes: token weights are computed over the whole minibatch before the first
forward pass.

Gradients are computed in two stages. The forward pass returns N logprobs, values and entropies, one of each per sampled
token. The loss is first differentiated with respect to these numbers, as detached leaf tensors, and a single backward
pass then propagates the gradients through the model. As a result, no loss has to handle masked positions, and the
gradient of each token is known: where the clip binds, it is 0.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any, Literal

import torch

from agentfly_kit import losses
from agentfly_kit._async.pending_call import pending_call, wait_all
from agentfly_kit.batch.batch import Batch, drop_counts
from agentfly_kit.errors import BatchError, SettingsError
from agentfly_kit.policy.forward import single_torch_thread
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.distributed import DistributedStep
from agentfly_kit.ppo.micro_batch import Forward, StepInputs, minibatches, raise_if_cancelled
from agentfly_kit.ppo.objective import (
    Aggregate,
    Loss,
    LossName,
    Objective,
    TokenLoss,
    aggregate_options,
)
from agentfly_kit.ppo.old_logprobs import Correction, resolve_old_logprobs, sampler_weights
from agentfly_kit.ppo.optimizer import clip_and_step
from agentfly_kit.ppo.stats import PhaseTimer, RunningStats
from agentfly_kit.ppo.token_detail import token_detail
from agentfly_kit.types import Stats

# Number of tokens whose text is compared with the policy's tokenizer.
_PROBE_TOKENS = 64


def ppo_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: LossName | TokenLoss = "ppo",
    aggregate: Aggregate = "token_mean",
    denominator: float | None = None,
    clip: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    value_coef: float = 0.5,
    value_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_kind: losses.KLKind = "k3",
    kl_in: Literal["loss", "reward"] = "loss",
    kl_weighted: bool = False,
    reference: Policy | None = None,
    entropy_coef: float = 0.0,
    epochs: int = 1,
    minibatch: int | None = None,
    micro_tokens: int | None = None,
    max_grad_norm: float | None = 1.0,
    target_kl: float | None = None,
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto",
    correction: Correction | None = None,
    max_lag: int | None = 64,
    autocast: Literal["bfloat16"] | None = None,
    checkpointing: bool = False,
    accelerator: Any = None,
    seed: int = 0,
    detail: bool = False,
    cancel: threading.Event | None = None,
) -> Stats:
    """Update a policy on a batch with masked PPO.

    Makes `epochs` passes over the batch, with one optimizer step per minibatch of trajectories.

    Args:
        policy: Policy to update.
        optimizer: Its optimizer, such as `af.adamw(policy)`.
        batch: Batch with advantages, from `collate`.
        loss: Policy loss: the name of a function in `af.losses`, or a function (logprobs, old_logprobs, advantages,
            mask) -> (B, T), such as functools.partial(af.losses.cispo, bounds="upper"). A custom function receives the
            complete rows of a micro-batch. "clip_cov" and "kl_cov" need the whole minibatch, which must fit into one
            micro-batch of `micro_tokens` in a single process. "clip_cov" samples with its own `seed`; set another with
            functools.partial.
        aggregate: How per-token losses are reduced to one number: a mode of `af.losses.aggregate`, or a dict of its
            options, such as {"how": "trajectory_mean", "count": "rows"}. Sequence means and sequence losses treat each
            row as a sequence, even if a trajectory has several.
        denominator: Number of tokens by which aggregate="fixed" divides each row. Required by that mode and rejected by
            all others.
        clip: Clip range of the probability ratio below 1. None is the default of the loss (0.2 for "ppo"). This and the
            next two options are rejected if `loss` is a function; bind them with functools.partial.
        clip_high: Clip range of the probability ratio above 1. None is the default of the loss.
        dual_clip: Bound on the loss of tokens with a negative advantage. None is the default of the loss.
        value_coef: Coefficient of the value loss. Used if the policy has a value head and the batch has returns.
        value_clip: Range within which the value loss clips a new value around the old one. None does not clip.
        kl_coef: Coefficient of the KL penalty towards the reference policy.
        kl_kind: Estimator of that KL; see `af.losses.kl`.
        kl_in: "loss" adds the KL penalty to the loss. "reward" means that the advantages already include it (see
            `shaped_rewards`): it is reported, but not added again.
        kl_weighted: Whether to multiply the KL of each token by its probability ratio to the old policy. The estimate
            and its gradient are then unbiased for samples of the old policy (`use_bias_correction_kl` in TRL). Without
            it, the estimator is valid only for samples of the current policy.
        reference: Frozen policy to which the KL is computed. Not needed if the batch has `ref_logprobs`, which take
            precedence.
        entropy_coef: Coefficient of the entropy bonus, which is subtracted from the loss.
        epochs: Number of passes over the batch.
        minibatch: Number of trajectories per update, each with all of its rows. None uses all of them.
        micro_tokens: Number of padded tokens per forward pass. It bounds memory and changes nothing else. None is the
            default of the policy.
        max_grad_norm: Norm to which gradients are clipped before each update. None does not clip.
        target_kl: Limit of the approximate KL, in nats per token: once an update exceeds it, the step ends before the
            next minibatch. None sets no limit.
        old_logprobs: Logprobs in the denominator of the probability ratio. "engine" uses those of the sampler,
            "recompute" those of the policy before the first update. "auto" uses those of the sampler if all tokens come
            from the current policy version and the logprobs agree with the policy's to 1e-4 in up to eight rows, spread
            over the batch and including the longest; otherwise it recomputes. Such a probe detects an engine that
            computes differently, but not a single row that was recorded incorrectly; "recompute" compares all rows. The
            largest difference over the compared rows is `stats.sampler_gap`.
        correction: Importance weights p_old / p_sampler of the tokens: "token", "sequence", or a dict of options of
            `af.losses.importance_weights`, such as {"level": "sequence", "cap": 5.0, "beyond": "mask"}. For tokens
            sampled under top-p, top-k or min-p, p_sampler is renormalized to the kept probability mass.
        max_lag: Maximum age of a token, in updates since it was sampled. A batch with an older token is rejected,
            because it says little about the current policy. None accepts any age.
        autocast: "bfloat16" runs the model in bfloat16; weights, losses and the optimizer keep their own dtype.
        checkpointing: Whether to recompute the activations inside layers in the backward pass instead of storing them.
        accelerator: An accelerate.Accelerator with several processes. Each process must have the same policy and pass
            the same batch (see `gather`). The rows of each minibatch are distributed so that token counts are balanced,
            and counts and gradients are summed. Every process holds all weights; sharded models are not supported.
        seed: Seed of the order of trajectories in each epoch.
        detail: Whether to store per-token arrays of the step, (B, T), in `stats.detail`.
        cancel: Event that cancels the step at the next micro-batch (with several processes: at the next update). The
            weights are then those of the last complete update.

    Returns:
        The statistics of the step.

    Raises:
        AlignmentError: If the tensors of the batch do not fit together.
        BatchError: If the batch has no advantages, is stale, or was made with another tokenizer or policy.
        SettingsError: If options contradict each other, or a loss of the whole minibatch would be split.
        TrainingError: If a gradient is not finite. The weights are then those of the last complete update.
        asyncio.CancelledError: If `cancel` was set.

    Source:  PPO, arXiv 1707.06347, eq. 7; for the masking see docs/conventions.md.
    """
    # Reject an unsuitable batch or invalid settings before any computation.
    started = time.perf_counter()
    _check(policy, batch, kl_coef, kl_in, reference, epochs, minibatch, old_logprobs, correction, max_lag)
    for name, coefficient in (("value_coef", value_coef), ("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if not coefficient >= 0:
            raise SettingsError(f"{name}={coefficient}: give 0 or more")

    # The objective contains only the terms that apply to this policy and batch.
    how, options = aggregate_options(aggregate, denominator)
    forward = Forward(policy, micro_tokens or policy.micro_tokens, autocast, checkpointing)
    objective = Objective(
        loss=Loss.resolve(loss, clip, clip_high, dual_clip),
        aggregate=how,
        options=options,
        value_coef=value_coef if policy.value_head is not None and batch.returns is not None else 0.0,
        value_clip=value_clip,
        kl_coef=kl_coef if kl_in == "loss" else 0.0,
        kl_kind=kl_kind,
        kl_weighted=kl_weighted,
        entropy_coef=entropy_coef,
    )

    # Every process draws the same minibatches from the same seed and runs its share of the rows of each.
    ranks = DistributedStep(accelerator)
    ranks.check_same_batch(batch)
    generator = torch.Generator().manual_seed(seed)
    schedule = [minibatches(batch, minibatch, generator) for _ in range(epochs)]
    if objective.loss.needs_minibatch:
        _check_not_split(objective.loss.name, batch, schedule, forward.micro_tokens, ranks)
    phases = PhaseTimer()

    with single_torch_thread(policy):
        # A row with zero advantage has zero gradient unless there is a KL, entropy or value term. Its forward pass is
        # skipped, but it still counts in every denominator and in the schedule of updates.
        live = batch.mask.any(1)
        if objective.only_advantage and target_kl is None:  # target_kl needs the KL of every row
            live = (torch.where(batch.mask, batch.advantages, 0.0) != 0).any(1)
        flat = len(batch.groups[batch.mask.any(1)].unique()) - len(batch.groups[live].unique())

        # Score the batch with the weights from before the first update: the denominator of the ratio, the logprobs of
        # the reference policy, and the importance weights of the correction.
        old_logp, gap = resolve_old_logprobs(forward, batch, old_logprobs)
        ref_logprobs = batch.ref_logprobs
        if ref_logprobs is None and reference is not None and (kl_coef > 0 or detail):
            ref_logprobs = forward.score(batch, {"logprob"}, reference)["logprob"]
        weights, sample_size = sampler_weights(batch, old_logp, correction)
        before = forward.score(batch, {"entropy"})["entropy"] if detail else None
        phases.lap("old")

        # Use the engine's entropies if it recorded all of them: they are exact and cover skipped rows too. Otherwise
        # the forward pass computes them.
        known = not bool(torch.isnan(batch.entropies[batch.mask]).any())
        data = StepInputs(batch, old_logp, ref_logprobs, weights)

        # One optimizer update per minibatch. Means over the whole step come from `totals`; the KL and the clip fraction
        # describe the last epoch only.
        totals, last_epoch = RunningStats(), RunningStats()
        updates, norms, tokens, stopped = 0, 0.0, 0, False
        for parts in schedule:
            last_epoch, tokens = RunningStats(), 0
            for rows in parts:
                # Weights are computed over the whole minibatch, so the losses of its micro-batches add up to its loss.
                data.token_weight = objective.token_weights(batch, rows)
                running = rows[live[rows]]
                optimizer.zero_grad(set_to_none=False)
                sums = RunningStats()
                local = ranks.local_rows(batch, running)
                # A loss of the whole minibatch runs as one micro-batch; `_check_not_split` made sure that it fits.
                unsplit = objective.loss.needs_minibatch and len(local) > 0
                for picked in [local] if unsplit else forward.micro_batches(local, batch):
                    if ranks.is_single:
                        raise_if_cancelled(cancel, optimizer)
                    micro = data.select(picked, policy.device)
                    # Differentiate the loss with respect to the outputs of the forward pass, then propagate these
                    # gradients through the model; they accumulate over the micro-batches.
                    got = forward(micro, entropy=entropy_coef > 0 or not known, value=objective.value_coef > 0)
                    gradients = objective.differentiate(got, micro, sums)
                    phases.lap("forward")
                    tensors = [t for t, g in gradients if g is not None]
                    torch.autograd.backward(tensors, [g for _, g in gradients if g is not None])
                    phases.lap("backward")
                # The processes cancel together, so that all of them keep the same weights.
                if not ranks.is_single:
                    ranks.sum_gradients(optimizer)
                    if ranks.sum_stats(sums.tensor(cancel is not None and cancel.is_set()), sums):
                        raise_if_cancelled(cancel, optimizer, force=True)
                norms += clip_and_step(policy, optimizer, max_grad_norm)
                updates += 1
                phases.lap("optimizer")
                totals.merge(sums)
                last_epoch.merge(sums)
                tokens += int(batch.mask[rows].sum())
                if target_kl is not None and sums.per_token("approx_kl") > target_kl:
                    stopped = True
                    break
            if stopped:
                break

        # Score the batch again with the new weights, for the per-token report.
        after = None
        if detail:
            assert before is not None
            after = token_detail(forward, objective, batch, old_logp, ref_logprobs, before, weights)

    # Report the KL to the reference policy even if it is part of the reward instead of the loss.
    kl_reference = math.nan
    if kl_coef > 0:
        if kl_in == "loss":
            kl_reference = totals.per_token("kl_reference")
        elif ref_logprobs is not None:
            kl_reference = float(losses.kl(old_logp, ref_logprobs, kl_kind, batch.mask).sum() / batch.mask.sum())
    scored = batch.rewards[batch.first_rows]
    return Stats(
        loss=totals["loss"] / updates,
        policy_loss=totals["policy_loss"] / updates,
        value_loss=totals["value_loss"] / updates if objective.value_coef > 0 else math.nan,
        kl_reference=kl_reference,
        approx_kl=last_epoch.per_token("approx_kl"),
        clip_fraction=last_epoch["clipped"] / tokens,  # of all tokens: the clip never binds in a skipped row
        entropy=float(batch.entropies[batch.mask].mean()) if known else last_epoch.per_token("entropy"),
        grad_norm=norms / updates,
        explained_variance=_explained_variance(batch),
        ratio_max=1 + totals["ratio"],
        effective_sample_size=sample_size,
        sampler_gap=gap,
        reward_mean=float(scored.mean()),
        reward_std=float(scored.std()) if len(scored) > 1 else 0.0,
        advantage_mean=float(batch.advantages[batch.mask].mean()),
        unscored=batch.flagged[0],
        truncated=batch.flagged[1],
        updates=updates,
        rows=len(batch),
        tokens=int(batch.mask.sum()),
        dropped_groups=flat,
        dropped=drop_counts(batch.dropped),
        stopped_early=stopped,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=time.perf_counter() - started,
        phases=phases.seconds,
        detail=after,
        batch=batch if detail else None,
    )


@pending_call
async def ppo_step_async(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any) -> Stats:
    """Run `ppo_step` in a thread, without blocking the event loop.

    Raises the same errors as `ppo_step`. If cancelled, the weights are those of the last complete update.

    Args:
        policy: Policy to update.
        optimizer: Its optimizer.
        batch: Batch with advantages.
        options: Keyword arguments of `ppo_step`, except `cancel`.

    Returns:
        The statistics of the step.
    """
    cancel = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(ppo_step, policy, optimizer, batch, cancel=cancel, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        # Wait until the thread no longer uses the weights.
        await wait_all([task])
        if not task.cancelled():
            task.exception()
        raise


def _check(
    policy: Policy,
    batch: Batch,
    kl_coef: float,
    kl_in: str,
    reference: Policy | None,
    epochs: int,
    minibatch: int | None,
    old_logprobs: str,
    correction: Any,
    max_lag: int | None,
) -> None:
    """Raise if the batch does not belong to this policy, is stale, or does not fit the settings."""
    batch.check()
    advantages = batch.advantages[batch.mask]
    if bool(torch.isnan(advantages).any()):
        raise BatchError(
            "the batch has no advantages (NaN at sampled tokens); collate(rollout, advantages=af.advantages.grpo), or "
            "batch.replace(advantages=...)"
        )
    if bool(torch.isinf(advantages).any()):
        raise BatchError("an advantage is infinite; look at the rewards and values that it came from")
    if int(batch.ids.max()) >= policy.vocab_size:
        raise BatchError(
            f"the batch has the token id {int(batch.ids.max())} and the policy a vocabulary of {policy.vocab_size}: "
            "the batch was made with another tokenizer"
        )
    for row in batch.rows[:1]:  # a tokenizer of the same or a smaller size is recognized by the texts of its ids
        ids = row.ids[:_PROBE_TOKENS].tolist()
        for token, was, now in zip(ids, row.token_texts, policy.chat.token_texts(ids), strict=False):
            if was not in (now, f"[{token}]"):
                raise BatchError(
                    f"the token id {token} was {was!r} when the batch was sampled and is {now!r} to this policy: "
                    "the batch was made with another tokenizer"
                )
    newest = int(batch.versions.max())
    if newest > policy.version:
        raise BatchError(
            f"the batch was sampled at policy version {newest} and this policy is at {policy.version}: "
            "it is another policy"
        )
    oldest = int(batch.versions[batch.mask].min()) if bool(batch.mask.any()) else policy.version
    if max_lag is not None and policy.version - oldest > max_lag:
        raise BatchError(
            f"the batch is stale: it was sampled at policy version {oldest} and this policy is at {policy.version}, "
            f"more than max_lag={max_lag} updates later. Sample anew; or allow it with max_lag=None, best with "
            "correction='token'"
        )
    if kl_in not in ("loss", "reward"):
        raise SettingsError(f"kl_in={kl_in!r}: give 'loss' or 'reward'")
    if kl_coef > 0 and kl_in == "loss" and reference is None and batch.ref_logprobs is None:
        raise SettingsError(f"kl_coef={kl_coef} needs reference=, a frozen policy such as policy.reference()")
    if epochs < 1 or (minibatch is not None and minibatch < 1):
        raise SettingsError(f"epochs={epochs}, minibatch={minibatch}: both are at least 1")
    if old_logprobs not in ("auto", "engine", "recompute"):
        raise SettingsError(f"old_logprobs={old_logprobs!r}: give 'auto', 'engine' or 'recompute'")
    if correction is None and batch.kept_mass is not None and bool((batch.kept_mass[batch.mask] < 1).any()):
        raise BatchError(
            "the batch was sampled under top-p, top-k or min-p, and the ratio would be wrong by the mass that was "
            "kept; give correction='token' or 'sequence'"
        )


def _check_not_split(
    loss: str, batch: Batch, schedule: list[list[torch.Tensor]], micro_tokens: int, ranks: DistributedStep
) -> None:
    """Reject a loss of the whole minibatch if a minibatch would be split over micro-batches or processes.

    Raises:
        SettingsError: If there are several processes, or the largest minibatch exceeds `micro_tokens`.
    """
    if not ranks.is_single:
        raise SettingsError(
            f"loss={loss!r} is computed over the whole minibatch, and several processes would split it; "
            "run it in one process (accelerator=None), or use another loss"
        )
    largest = max(len(rows) * int(batch.lengths[rows].max()) for parts in schedule for rows in parts)
    if largest > micro_tokens:
        raise SettingsError(
            f"loss={loss!r} is computed over the whole minibatch, which must fit into one micro-batch: the largest "
            f"minibatch has {largest} padded tokens and micro_tokens is {micro_tokens}; set micro_tokens to at least "
            f"{largest}, or use a smaller minibatch"
        )


def _explained_variance(batch: Batch) -> float:
    """Return 1 - Var(returns - values) / Var(returns); NaN without values or if the returns do not vary."""
    if batch.values is None or batch.returns is None:
        return math.nan
    returns, values = batch.returns[batch.mask], batch.values[batch.mask]
    variance = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).var()) / variance if variance > 0 else math.nan
