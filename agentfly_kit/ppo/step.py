"""One optimisation step on a batch: scores, ratios, losses, gradients, updates. Knows no rollout and no loop.

The result does not depend on padding, on the order of rows within a minibatch, on how it is split into micro-batches,
or on how many processes share it: what a token weighs is computed over the whole minibatch before the first forward.

How a gradient is made. All losses are functions of what the forward gave at the sampled tokens: logprobs, values,
entropies, N numbers each. They are differentiated down to these numbers first, on leaves of their own, and one backward
then takes these gradients through the model. So no loss sees a grid with holes, and a token's gradient is known (one
that the clip holds is one whose gradient is 0).
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
from agentfly_kit.policy.policy import Policy, single_torch_thread
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

# Tokens of a batch whose text is compared with the policy's.
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
    """Masked PPO on a batch: `epochs` passes over minibatches of trajectories, one `optimizer.step()` each.

    loss: the name of one in `losses`, or a function (logprobs, old_logprobs, advantages, mask) -> (B, T), such as
        functools.partial(af.losses.cispo, bounds="upper"). A function of your own is given whole rows of a micro-batch.
        "clip_cov" and "kl_cov" look at the whole minibatch: it must fit into one micro-batch of `micro_tokens`, in one
        process. "clip_cov" draws with its own `seed`; give another in a functools.partial.
    clip, clip_high, dual_clip: those of the loss; None is its own default (0.2 for ppo).
    aggregate: how per-token losses become one, or the options of `losses.aggregate`, such as {"how": "trajectory_mean",
        "count": "rows"}. Sequence means and losses take a row for a sequence, also where a trajectory has several.
    value_coef, value_clip: used when the policy has a value head and the batch has returns.
    kl_coef, kl_kind, reference: a KL to a frozen policy in the loss. `batch.ref_logprobs` stands for `reference`.
    kl_in: "reward" says that the advantages hold the KL already (`shaped_rewards`): it is reported, and not added here.
    kl_weighted: multiply each token's KL by its ratio to the old policy, which makes it, and its gradient, unbiased on
        samples of that policy: TRL's `use_bias_correction_kl`. Without it an estimator holds for fresh samples.
    minibatch: trajectories an update, each with all its rows; None is all of them.
    micro_tokens: padded tokens a forward (None: the policy's own choice); it bounds memory and changes nothing else.
    target_kl: stop before the next minibatch once approx_kl of an update exceeds it.
    old_logprobs: the ratio's denominator. "engine" takes the sampler's logprobs, "recompute" the policy's before the
        first update, "auto" the sampler's if they are of this policy version and agree with the policy's to 1e-4 in up
        to eight rows spread over the batch, the longest one among them. Those eight find an engine that computes
        otherwise, not one row that was recorded wrongly; "recompute" compares all rows. `stats.sampler_gap` is the
        largest gap over the rows that were compared.
    correction: weigh tokens by p_old / p_sampler: "token", "sequence", or the options of `losses.importance_weights`,
        such as {"level": "sequence", "cap": 5.0, "beyond": "mask"}. What truncated sampling kept belongs to p_sampler.
    max_lag: a batch with a token that was sampled more updates ago is refused, for it says little about the policy as
        it is. None takes any.
    autocast: run the model in bfloat16; weights, losses and optimizer stay in theirs.
    checkpointing: keep no activations inside layers, and compute them again in the backward.
    accelerator: an accelerate.Accelerator of several processes. Each has the same policy and gives the same batch (see
        `gather`); rows of a minibatch are dealt so that tokens balance, and counts and gradients are summed. Every
        process holds all weights: a model that is sharded over them is not supported.
    detail: keep (B, T) tensors of what the step did to every token.
    cancel: when set, stop at the next micro-batch (with several processes: update); weights stay at the last update.
    Raises:  BatchError for a batch without advantages or of another vocabulary; TrainingError when a gradient is not
             finite, with the weights left at the last update; SettingsError for options that contradict each other,
             or a loss of the whole minibatch where that would be split.
    Source:  PPO, arXiv 1707.06347, eq. 7; masked as docs/conventions.md says.
    """
    started = time.perf_counter()
    _check(policy, batch, kl_coef, kl_in, reference, epochs, minibatch, old_logprobs, correction, max_lag)
    for name, coefficient in (("value_coef", value_coef), ("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if not coefficient >= 0:
            raise SettingsError(f"{name}={coefficient}: give 0 or more")
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
    ranks = DistributedStep(accelerator)
    ranks.check_same_batch(batch)
    generator = torch.Generator().manual_seed(seed)
    schedule = [minibatches(batch, minibatch, generator) for _ in range(epochs)]
    if objective.loss.needs_minibatch:
        _check_not_split(objective.loss.name, batch, schedule, forward.micro_tokens, ranks)
    phases = PhaseTimer()

    with single_torch_thread(policy):
        # A row whose advantage is exactly 0 moves nothing when nothing but the advantage speaks. It is not run, but it
        # stays in every denominator and in the schedule of updates.
        live = batch.mask.any(1)
        if objective.only_advantage and target_kl is None:  # a target reads the KL of every row
            live = (torch.where(batch.mask, batch.advantages, 0.0) != 0).any(1)
        flat = len(batch.groups[batch.mask.any(1)].unique()) - len(batch.groups[live].unique())

        old_logp, gap = resolve_old_logprobs(forward, batch, old_logprobs)
        ref_logprobs = batch.ref_logprobs
        if ref_logprobs is None and reference is not None and (kl_coef > 0 or detail):
            ref_logprobs = forward.score(batch, {"logprob"}, reference)["logprob"]
        weights, sample_size = sampler_weights(batch, old_logp, correction)
        before = forward.score(batch, {"entropy"})["entropy"] if detail else None
        phases.lap("old")

        # The engine's entropies are exact and cover every row; only without them does the forward make its own.
        known = not bool(torch.isnan(batch.entropies[batch.mask]).any())
        data = StepInputs(batch, old_logp, ref_logprobs, weights)

        totals, last_epoch = RunningStats(), RunningStats()
        updates, norms, tokens, stopped = 0, 0.0, 0, False
        for parts in schedule:
            last_epoch, tokens = RunningStats(), 0
            for rows in parts:
                data.token_weight = objective.token_weights(batch, rows)
                running = rows[live[rows]]
                optimizer.zero_grad(set_to_none=False)
                sums = RunningStats()
                local = ranks.local_rows(batch, running)
                # A loss that needs the whole minibatch runs unsplit, which was checked to fit.
                unsplit = objective.loss.needs_minibatch and len(local) > 0
                for picked in [local] if unsplit else forward.micro_batches(local, batch):
                    if ranks.is_single:
                        raise_if_cancelled(cancel, optimizer)
                    micro = data.select(picked, policy.device)
                    got = forward(micro, entropy=entropy_coef > 0 or not known, value=objective.value_coef > 0)
                    gradients = objective.differentiate(got, micro, sums)
                    phases.lap("forward")
                    tensors = [t for t, g in gradients if g is not None]
                    torch.autograd.backward(tensors, [g for _, g in gradients if g is not None])
                    phases.lap("backward")
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

        after = None
        if detail:
            assert before is not None
            after = token_detail(forward, objective, batch, old_logp, ref_logprobs, before, weights)

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
        clip_fraction=last_epoch["clipped"] / tokens,  # of all: in a row that was left out nothing binds
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
    """`ppo_step` in a thread, so that the event loop goes on. Cancelling leaves the weights at an update boundary."""
    cancel = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(ppo_step, policy, optimizer, batch, cancel=cancel, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        # The thread must have let go of the weights before anyone else touches them.
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
    for row in batch.rows[:1]:  # another tokenizer of the same size, or a smaller one, has other texts for the ids
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
    """Reject a loss of the whole minibatch where a minibatch would be split over micro-batches or processes."""
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
    if batch.values is None or batch.returns is None:
        return math.nan
    returns, values = batch.returns[batch.mask], batch.values[batch.mask]
    variance = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).var()) / variance if variance > 0 else math.nan
