"""One optimisation step on a batch: scores, ratios, losses, gradients, updates. Knows no rollout and no loop.

The result does not depend on padding, on the order of rows within a minibatch, on how it is split into micro-batches,
or on how many processes share it: what a token weighs is computed over the whole minibatch before the first forward.

How a gradient is made. All losses are functions of what the forward gave at the sampled tokens: logprobs, values,
entropies, N numbers each. They are differentiated down to these numbers first, on leaves of their own, and one backward
then takes these gradients through the model. So no loss sees a grid with holes, a token's gradient is known (one that
the clip holds is one whose gradient is 0), and a loss of the whole minibatch can be split like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch import Batch, join
from agentfly_kit.errors import BatchError, SettingsError, TrainingError
from agentfly_kit.pending import awaited, ended
from agentfly_kit.policy import Critic, Policy, compute_threads, micro_batches
from agentfly_kit.types import Stats

TokenLoss = Callable[..., Tensor]
LossName = Literal[
    "ppo", "reinforce", "gpg", "gspo", "gmpo", "sapo", "cispo", "dppo", "clip_cov", "kl_cov"
]  # each a function of losses.py
Correction = Literal["token", "sequence"] | Mapping[str, Any]

_ROW_WISE = ("gspo", "gmpo")
"""Losses in which a token's loss depends on its whole row: they need rows, the others only tokens."""
_BATCH_WIDE = ("clip_cov", "kl_cov")
"""Losses in which it depends on the whole minibatch, rows without advantage included."""

_EXACT = 1e-4
"""nats: an engine whose logprobs are closer than this to a full forward is taken at its word."""


def adamw(
    policy: Policy,
    lr: float = 3e-4,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    value_lr: float | None = None,
) -> torch.optim.AdamW:
    """AdamW over what learns in a policy; its value head at `value_lr` (ten times `lr` unless given).

    The trunk of a separate critic learns at `lr`.
    Source:  betas and the value head's rate were measured on the calculator task; see docs/log.md.
    """
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": lr}]
    head = policy.value_head
    if isinstance(head, Critic):
        groups.append({"params": list(head.trunk.parameters()), "lr": lr})
        head = head.head
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": 10 * lr if value_lr is None else value_lr})
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def shaped_rewards(batch: Batch, coef: float, *, kind: losses.KLKind = "k1") -> Tensor:
    """Token rewards with a KL to the reference taken from every sampled token: what `kl_in="reward"` means.

    token_rewards - coef KL(sampled || reference), from the sampler's logprobs and `batch.ref_logprobs`. It comes before
    the advantages, so it is no part of `ppo_step`: an estimator of token rewards takes the result as it is, one of
    outcomes its sum over each row.

        batch = batch.replace(ref_logprobs=reference.score(batch, {"logprob"})["logprob"])
        rewards = shaped_rewards(batch, 0.05)

    Shapes:  -> (B, T), NaN where the mask is 0.
    Raises:  BatchError without reference logprobs.
    Source:  Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, eq. 2, which is kind="k1".
    """
    if batch.ref_logprobs is None:
        raise BatchError(
            "the batch has no reference logprobs; "
            "batch.replace(ref_logprobs=reference.score(batch, {'logprob'})['logprob'])"
        )
    return batch.token_rewards - coef * losses.kl(batch.logprobs, batch.ref_logprobs, kind, batch.mask)


def gather(batch: Batch, accelerator: Any) -> Batch:
    """The rows that all processes collected, in order of rank: what each of them gives to `ppo_step`."""
    if accelerator.num_processes == 1:
        return batch
    parts: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, batch)
    return join(parts)


def ppo_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: LossName | TokenLoss = "ppo",
    aggregate: losses.How = "token_mean",
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
    old: Literal["auto", "engine", "recompute"] = "auto",
    correction: Correction | None = None,
    autocast: Literal["bfloat16"] | None = None,
    checkpointing: bool = False,
    accelerator: Any = None,
    seed: int = 0,
    detail: bool = False,
    cancel: threading.Event | None = None,
) -> Stats:
    """Masked PPO on a batch: `epochs` passes over minibatches of rollouts, one `optimizer.step()` each.

    loss: the name of one in `losses`, or a function (logprobs, old_logprobs, advantages, mask) -> (B, T), such as
        functools.partial(af.losses.cispo, bounds="upper"). A function of your own is given whole rows of a micro-batch.
    clip, clip_high, dual_clip: those of the loss; None is its own default (0.2 for ppo).
    aggregate: how per-token losses become one; see `losses.aggregate`.
    value_coef, value_clip: used when the policy has a value head and the batch has returns.
    kl_coef, kl_kind, reference: a KL to a frozen policy in the loss. `batch.ref_logprobs` stands for `reference`.
    kl_in: "reward" says that the advantages hold the KL already (`shaped_rewards`): it is reported, and not added here.
    kl_weighted: multiply each token's KL by its ratio to the old policy, which makes it, and its gradient, unbiased on
        samples of that policy: TRL's `use_bias_correction_kl`. Without it an estimator holds for fresh samples.
    minibatch: rollouts an update; None is all of them.
    micro_tokens: padded tokens a forward (None: the policy's own choice); it bounds memory and changes nothing else.
    target_kl: stop before the next minibatch once approx_kl of an update exceeds it.
    old: the ratio's denominator. "engine" takes the sampler's logprobs, "recompute" the policy's before the first
        update, "auto" the sampler's if they are of this policy version and a probe agrees to 1e-4.
    correction: weigh tokens by p_old / p_sampler: "token", "sequence", or the options of `losses.importance_weights`,
        such as {"level": "sequence", "cap": 5.0, "beyond": "mask"}. What truncated sampling kept belongs to p_sampler.
    autocast: run the model in bfloat16; weights, losses and optimizer stay in theirs.
    checkpointing: keep no activations inside layers, and compute them again in the backward.
    accelerator: an accelerate.Accelerator of several processes. Each has the same policy and gives the same batch (see
        `gather`); rows of a minibatch are dealt so that tokens balance, and counts and gradients are summed. Every
        process holds all weights: a model that is sharded over them is not supported.
    detail: keep (B, T) tensors of what the step did to every token.
    cancel: when set, stop at the next micro-batch (with several processes: update); weights stay at the last update.
    Raises:  BatchError for a batch without advantages or of another vocabulary; TrainingError when a gradient is not
             finite, with the weights left at the last update; SettingsError for options that contradict each other.
    Source:  PPO, arXiv 1707.06347, eq. 7; masked as docs/conventions.md says.
    """
    started = time.perf_counter()
    _check(policy, batch, kl_coef, kl_in, reference, epochs, minibatch, old, correction)
    for name, coefficient in (("value_coef", value_coef), ("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if not coefficient >= 0:
            raise SettingsError(f"{name}={coefficient}: give 0 or more")
    forward = _Forward(policy, micro_tokens or policy.micro_tokens, autocast, checkpointing)
    objective = _Objective(
        loss=_Loss.of(loss, clip, clip_high, dual_clip),
        aggregate=aggregate,
        denominator=denominator,
        value_coef=value_coef if policy.value_head is not None and batch.returns is not None else 0.0,
        value_clip=value_clip,
        kl_coef=kl_coef if kl_in == "loss" else 0.0,
        kl_kind=kl_kind,
        kl_weighted=kl_weighted,
        entropy_coef=entropy_coef,
    )
    ranks = _Ranks(accelerator)
    ranks.check(batch)
    phases = _Phases()

    with compute_threads(policy):
        old_logprobs, gap = _old_logprobs(forward, batch, old)
        ref_logprobs = batch.ref_logprobs
        if ref_logprobs is None and reference is not None and (kl_coef > 0 or detail):
            ref_logprobs = forward.score(batch, {"logprob"}, reference)["logprob"]
        weights, sample_size = _weights(batch, old_logprobs, correction)
        before = forward.score(batch, {"entropy"})["entropy"] if detail else None
        phases.lap("old")

        # A row whose advantage is exactly 0 moves nothing when nothing but the advantage speaks. It is not run, but it
        # stays in every denominator and in the schedule of updates.
        live = torch.ones(len(batch), dtype=torch.bool)
        if objective.advantage_alone and target_kl is None:  # a target reads the KL of every row
            live = (torch.where(batch.mask, batch.advantages, 0.0) != 0).any(1)
        flat = len(batch.groups.unique()) - len(batch.groups[live].unique())

        # The engine's entropies are exact and cover every row; only without them does the forward make its own.
        known = not bool(torch.isnan(batch.entropies[batch.mask]).any())
        data = _Data(batch, old_logprobs, ref_logprobs, weights)

        totals, last_epoch = _Sums(), _Sums()
        generator = torch.Generator().manual_seed(seed)
        rollouts = batch.rollouts.unique()
        size = len(rollouts) if minibatch is None else minibatch
        updates, norms, tokens, stopped = 0, 0.0, 0, False
        for _ in range(epochs):
            order = rollouts[torch.randperm(len(rollouts), generator=generator)]
            last_epoch, tokens = _Sums(), 0
            for start in range(0, len(order), size):
                rows = torch.isin(batch.rollouts, order[start : start + size]).nonzero()[:, 0]
                data.mass = objective.mass(batch, rows)
                running = rows[live[rows]]
                optimizer.zero_grad(set_to_none=False)
                sums = _Sums()
                whole = None
                if objective.loss.batch_wide:
                    whole = _whole_gradient(forward, objective, data, running, seed + updates, ranks, cancel)
                for picked in forward.micro_batches(ranks.share(batch, running), batch):
                    if ranks.alone:
                        _stop_if(cancel, optimizer)
                    micro = data.at(picked, policy.device)
                    got = forward(micro, entropy=entropy_coef > 0 or not known, value=objective.value_coef > 0)
                    gradients = objective.differentiate(got, micro, sums, whole)
                    phases.lap("forward")
                    tensors = [t for t, g in gradients if g is not None]
                    torch.autograd.backward(tensors, [g for _, g in gradients if g is not None])
                    phases.lap("backward")
                if not ranks.alone:
                    ranks.sum_gradients(optimizer)
                    if ranks.sum(sums.tensor(cancel is not None and cancel.is_set()), sums):
                        _stop_if(cancel, optimizer, force=True)
                norms += _update(policy, optimizer, max_grad_norm)
                updates += 1
                phases.lap("optimizer")
                totals.merge(sums)
                last_epoch.merge(sums)
                tokens += int(batch.mask[rows].sum())
                if target_kl is not None and sums.rate("approx_kl") > target_kl:
                    stopped = True
                    break
            if stopped:
                break

        after = None
        if detail:
            assert before is not None
            after = _detail(forward, objective, batch, old_logprobs, ref_logprobs, before, weights)

    kl_reference = math.nan
    if kl_coef > 0:
        if kl_in == "loss":
            kl_reference = totals.rate("kl_reference")
        elif ref_logprobs is not None:
            kl_reference = float(losses.kl(old_logprobs, ref_logprobs, kl_kind, batch.mask).sum() / batch.mask.sum())
    scored = batch.rewards
    return Stats(
        loss=totals["loss"] / updates,
        policy_loss=totals["policy_loss"] / updates,
        value_loss=totals["value_loss"] / updates if objective.value_coef > 0 else math.nan,
        kl_reference=kl_reference,
        approx_kl=last_epoch.rate("approx_kl"),
        clip_fraction=last_epoch["clipped"] / tokens,  # of all: in a row that was left out nothing binds
        entropy=float(batch.entropies[batch.mask].mean()) if known else last_epoch.rate("entropy"),
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
        stopped_early=stopped,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=time.perf_counter() - started,
        phases=phases.seconds,
        detail=after,
        batch=batch if detail else None,
    )


@awaited
async def ppo_step_async(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, **options: Any) -> Stats:
    """`ppo_step` in a thread, so that the event loop goes on. Cancelling leaves the weights at an update boundary."""
    cancel = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(ppo_step, policy, optimizer, batch, cancel=cancel, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        # The thread must have let go of the weights before anyone else touches them.
        await ended([task])
        if not task.cancelled():
            task.exception()
        raise


# --- the objective -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """A policy loss, and what of the minibatch it must be shown at once."""

    function: TokenLoss
    rows: bool
    """It needs (B, T) rows; else N tokens will do."""
    batch_wide: bool
    own: bool
    """A function of the user's: nothing is known of it."""
    seeded: bool = False

    @classmethod
    def of(cls, loss: Any, clip: float | None, clip_high: float | None, dual_clip: float | None) -> _Loss:
        given = {"clip": clip, "clip_high": clip_high, "dual_clip": dual_clip}
        options = {name: value for name, value in given.items() if value is not None}
        if callable(loss):
            if options:
                raise SettingsError(
                    f"{', '.join(options)} with a function as loss: it is not handed on; "
                    "give functools.partial(function, clip=...)"
                )
            inner = loss.func if isinstance(loss, functools.partial) else loss
            name = next((n for n in get_args(LossName) if inner is getattr(losses, n)), "")
            return cls(loss, name in _ROW_WISE or not name, name in _BATCH_WIDE, not name, name == "clip_cov")
        if loss not in get_args(LossName):
            known = ", ".join(get_args(LossName))
            raise SettingsError(f"loss={loss!r}: give one of {known}, or a function such as af.losses.ppo")
        function = getattr(losses, loss)
        takes = inspect.signature(function).parameters
        if unknown := [name for name in options if name not in takes]:
            raise SettingsError(f"{unknown[0]}={options[unknown[0]]!r} with loss={loss!r}, which takes no {unknown[0]}")
        made = functools.partial(function, **options) if options else function
        return cls(made, loss in _ROW_WISE, loss in _BATCH_WIDE, False, loss == "clip_cov")

    def __call__(self, logprobs: Tensor, micro: _Micro, seed: int = 0) -> Tensor:
        """(N,) of (N,)."""
        more = {"seed": seed} if self.seeded else {}
        if not self.rows:
            return self.function(logprobs, micro.old, micro.advantages, torch.ones_like(micro.old).bool(), **more)
        grid = [micro.grid(x) for x in (logprobs, micro.old, micro.advantages)]
        out = self.function(*grid, micro.mask, **more)
        if tuple(out.shape) != tuple(micro.mask.shape):
            raise SettingsError(f"the loss function gave {tuple(out.shape)} for {tuple(micro.mask.shape)} tokens")
        return out[micro.mask]


@dataclass(frozen=True)
class _Objective:
    """What is minimised, as a function of the numbers that a forward gave."""

    loss: _Loss
    aggregate: losses.How
    denominator: float | None
    value_coef: float
    value_clip: float | None
    kl_coef: float
    kl_kind: losses.KLKind
    kl_weighted: bool
    entropy_coef: float

    @property
    def advantage_alone(self) -> bool:
        """Whether a row without advantage has no gradient."""
        quiet = self.value_coef == 0 and self.kl_coef == 0 and self.entropy_coef == 0
        return quiet and not self.loss.own and not self.loss.batch_wide

    def mass(self, batch: Batch, rows: Tensor) -> Tensor:
        """What each token's loss is multiplied by, over the whole minibatch: (B, T), 0 outside of `rows`.

        Every aggregate is linear in the per-token losses, so its gradient is all there is to know of it.
        """
        ones = torch.zeros(len(rows), batch.ids.shape[1], requires_grad=True)
        one = losses.aggregate(
            ones,
            batch.mask[rows],
            self.aggregate,
            denominator=self.denominator,
            rollouts=batch.rollouts[rows] if self.aggregate == "rollout_mean" else None,
        )
        out = torch.zeros(batch.ids.shape)
        out[rows] = torch.autograd.grad(one, ones)[0]
        return out

    def policy_loss(self, leaf: Tensor, micro: _Micro, seed: int = 0) -> Tensor:
        per_token = self.loss(leaf, micro, seed)
        if not per_token.requires_grad:
            raise SettingsError("the loss function gave something without a gradient in the logprobs")
        if micro.weights is not None:
            per_token = per_token * micro.weights
        return (per_token * micro.mass).sum()

    def differentiate(
        self, got: Any, micro: _Micro, sums: _Sums, whole: tuple[Tensor, Tensor] | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The forward's tensors with the objective's gradient in each. Adds to the statistics."""
        logp = got.logprob
        leaf = logp.detach().requires_grad_()
        if whole is None:
            policy_loss = self.policy_loss(leaf, micro)
            pull = torch.autograd.grad(policy_loss, leaf)[0]
            policy_loss = policy_loss.detach()
        else:  # the loss of the minibatch was taken before; its value is spread over the tokens that carry it
            pull, policy_loss = whole[0][micro.where].to(leaf.device), whole[1][micro.where].sum()
        gradient, total = pull, policy_loss
        out: list[tuple[Tensor, Tensor | None]] = []
        if self.kl_coef > 0:
            assert micro.ref is not None
            kl = losses.kl(leaf, micro.ref, self.kl_kind, torch.ones_like(leaf).bool())
            weighed = kl * (leaf - micro.old).clamp(max=20.0).exp() if self.kl_weighted else kl
            term = self.kl_coef * (weighed * micro.mass).sum()
            gradient = gradient + torch.autograd.grad(term, leaf)[0]
            total = total + term.detach()
            sums.add("kl_reference", kl.detach().sum())
        out.append((logp, gradient))
        if got.value is not None:
            assert micro.returns is not None
            value = got.value.detach().requires_grad_()
            per_token = losses.value(
                value, micro.values, micro.returns, torch.ones_like(value).bool(), clip=self.value_clip
            )
            value_loss = (per_token * micro.mass).sum()
            out.append((got.value, self.value_coef * torch.autograd.grad(value_loss, value)[0]))
            total = total + self.value_coef * value_loss.detach()
            sums.add("value_loss", value_loss.detach())
        if got.entropy is not None:
            sums.add("entropy", got.entropy.detach().sum())
            if self.entropy_coef > 0:
                out.append((got.entropy, -self.entropy_coef * micro.mass))
                total = total - self.entropy_coef * (got.entropy.detach() * micro.mass).sum()
        sums.add("policy_loss", policy_loss)
        sums.add("loss", total)
        with torch.no_grad():
            difference = (leaf.detach() - micro.old).clamp(max=20.0)  # a float32 exp ends at 88
            ratio = difference.exp()
            sums.add("approx_kl", (ratio - 1 - difference).sum())
            sums.add("clipped", _held(pull, micro).sum())
            sums.largest("ratio", (ratio - 1).abs().max())
        sums.add("tokens", torch.tensor(float(len(leaf)), device=leaf.device))
        return out


def _held(pull: Tensor, micro: _Micro) -> Tensor:
    """Tokens that have an advantage and get no gradient from it: the clip binds."""
    held = (pull == 0) & (micro.advantages != 0)
    return held if micro.weights is None else held & (micro.weights != 0)


# --- rows, tokens, forwards ----------------------------------------------------------------------


@dataclass
class _Micro:
    """Rows of one forward, and (N,) values of their sampled tokens on the policy's device."""

    ids: Tensor
    mask: Tensor
    temperatures: Tensor
    where: tuple[Tensor, Tensor]
    """Row and column of each token in the batch."""
    old: Tensor
    advantages: Tensor
    mass: Tensor
    weights: Tensor | None
    ref: Tensor | None
    values: Tensor
    returns: Tensor | None

    def grid(self, values: Tensor) -> Tensor:
        """(N,) -> (b, w), 0 where the mask is 0."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


class _Data:
    """The per-token inputs of a step, (B, T) each, and how a micro-batch is cut from them."""

    def __init__(self, batch: Batch, old: Tensor, ref: Tensor | None, weights: Tensor | None) -> None:
        self.batch, self.old, self.ref, self.weights = batch, old, ref, weights
        self.mass = torch.zeros(0)
        self.values = batch.values
        if batch.values is None and batch.returns is not None:
            self.values = torch.zeros_like(batch.returns)

    def at(self, rows: Tensor, device: torch.device) -> _Micro:
        batch = self.batch
        width = int(batch.lengths[rows].max())
        mask = batch.mask[rows, :width]
        r, c = mask.nonzero(as_tuple=True)
        where = (rows[r], c)

        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[where].to(device)

        old, advantages, mass = cut(self.old), cut(batch.advantages), cut(self.mass)
        assert old is not None and advantages is not None and mass is not None
        values = cut(self.values)
        return _Micro(
            ids=batch.ids[rows, :width].to(device),
            mask=mask.to(device),
            temperatures=batch.temperatures[rows],
            where=where,
            old=old,
            advantages=advantages,
            mass=mass,
            weights=cut(self.weights),
            ref=cut(self.ref),
            values=values if values is not None else torch.zeros_like(old),
            returns=cut(batch.returns),
        )


class _Forward:
    """The policy, run in a precision and with or without kept activations."""

    def __init__(self, policy: Policy, micro_tokens: int, autocast: str | None, checkpointing: bool) -> None:
        if autocast not in (None, "bfloat16"):
            raise SettingsError(f"autocast={autocast!r}: give 'bfloat16' or None")
        if micro_tokens < 1:
            raise SettingsError(f"micro_tokens={micro_tokens}: give at least 1")
        self.policy, self.micro_tokens = policy, micro_tokens
        self._half = autocast is not None
        self._checkpointing = checkpointing
        self._launch = policy.launch

    def _precision(self) -> AbstractContextManager[Any]:
        if not self._half:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16)

    def __call__(self, micro: _Micro, *, entropy: bool, value: bool) -> Any:
        with self._precision(), self.policy.checkpointing(self._checkpointing):
            return self.policy.forward(micro.ids, micro.mask, micro.temperatures, entropy=entropy, value=value)

    def score(self, batch: Any, want: Any, policy: Policy | None = None) -> Any:
        with self._precision():
            return (policy or self.policy).score(batch, want, micro_tokens=self.micro_tokens)

    def micro_batches(self, rows: Tensor, batch: Batch) -> Iterable[Tensor]:
        return (rows[part] for part in micro_batches(batch.lengths[rows], self.micro_tokens, self._launch))


@torch.no_grad()
def _whole_gradient(
    forward: _Forward,
    objective: _Objective,
    data: _Data,
    rows: Tensor,
    seed: int,
    ranks: _Ranks,
    cancel: threading.Event | None,
) -> tuple[Tensor, Tensor]:
    """For a loss of the whole minibatch: its gradient in each logprob, and its value a token. (B, T) both.

    It costs a forward without gradients, and is the same whatever the micro-batches.
    """
    device = forward.policy.device
    logprobs = torch.zeros(data.batch.ids.shape)
    for picked in forward.micro_batches(ranks.share(data.batch, rows), data.batch):
        if ranks.alone:
            _stop_if(cancel, None)
        micro = data.at(picked, device)
        logprobs[micro.where] = forward(micro, entropy=False, value=False).logprob.cpu()
    logprobs = ranks.sum_tensor(logprobs, device)
    everything = data.at(rows, device)
    with torch.enable_grad():
        leaf = logprobs[everything.where].to(device).requires_grad_()
        loss = objective.policy_loss(leaf, everything, seed)
        pull = torch.autograd.grad(loss, leaf)[0]
    gradient, value = torch.zeros(data.batch.ids.shape), torch.zeros(data.batch.ids.shape)
    gradient[everything.where] = pull.cpu()
    value[everything.where] = float(loss.detach()) / len(leaf)
    return gradient, value


# --- before and after ----------------------------------------------------------------------------


def _stop_if(cancel: threading.Event | None, optimizer: torch.optim.Optimizer | None, *, force: bool = False) -> None:
    if force or (cancel is not None and cancel.is_set()):
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        raise asyncio.CancelledError("ppo_step was cancelled; the weights are those of the last update")


def _check(
    policy: Policy,
    batch: Batch,
    kl_coef: float,
    kl_in: str,
    reference: Policy | None,
    epochs: int,
    minibatch: int | None,
    old: str,
    correction: Any,
) -> None:
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
    newest = int(batch.versions.max())
    if newest > policy.version:
        raise BatchError(
            f"the batch was sampled at policy version {newest} and this policy is at {policy.version}: "
            "it is another policy"
        )
    if kl_in not in ("loss", "reward"):
        raise SettingsError(f"kl_in={kl_in!r}: give 'loss' or 'reward'")
    if kl_coef > 0 and kl_in == "loss" and reference is None and batch.ref_logprobs is None:
        raise SettingsError(f"kl_coef={kl_coef} needs reference=, a frozen policy such as policy.reference()")
    if epochs < 1 or (minibatch is not None and minibatch < 1):
        raise SettingsError(f"epochs={epochs}, minibatch={minibatch}: both are at least 1")
    if old not in ("auto", "engine", "recompute"):
        raise SettingsError(f"old={old!r}: give 'auto', 'engine' or 'recompute'")
    if correction is None and batch.kept_mass is not None and bool((batch.kept_mass[batch.mask] < 1).any()):
        raise BatchError(
            "the batch was sampled under top-p, top-k or min-p, and the ratio would be wrong by the mass that was "
            "kept; give correction='token' or 'sequence'"
        )


def _weights(batch: Batch, old: Tensor, correction: Any) -> tuple[Tensor | None, float]:
    """Importance weights (B, T) of the sampled tokens, and the effective sample size they leave."""
    if correction is None:
        return None, math.nan
    options: dict[str, Any] = {"level": correction} if isinstance(correction, str) else dict(correction)
    sampler = batch.logprobs
    if batch.kept_mass is not None:  # what is recorded is from before the cut; the token was drawn from what was kept
        sampler = sampler - torch.where(batch.mask, batch.kept_mass, 1.0).log()
    try:
        weights = losses.importance_weights(old, sampler, batch.mask, **options)
    except TypeError as error:
        raise SettingsError(f"correction={correction!r}: {error}") from error
    level = options.get("level", "token")
    return weights, float(losses.effective_sample_size(weights, batch.mask, level=level))


def _old_logprobs(forward: _Forward, batch: Batch, old: str) -> tuple[Tensor, float]:
    """The ratio's denominator (B, T), and the largest gap to the engine's logprobs where it was measured."""

    def gap(rows: Tensor, scored: Tensor) -> float:
        mask = batch.mask[rows]
        return float((scored[mask] - batch.logprobs[rows][mask]).abs().max())

    if old == "recompute":
        scored = forward.score(batch, {"logprob"})["logprob"]
        return scored, gap(torch.arange(len(batch)), scored)
    if old == "auto":
        measured = math.inf
        if bool((batch.versions[batch.mask] == forward.policy.version).all()):
            some = torch.linspace(0, len(batch) - 1, min(8, len(batch))).long().unique()
            measured = gap(some, forward.score(_Rows(batch, some), {"logprob"})["logprob"])
        if measured > _EXACT:
            return _old_logprobs(forward, batch, "recompute")
        return batch.logprobs, measured
    return batch.logprobs, math.nan


class _Rows:
    """A few rows of a batch, for scoring."""

    def __init__(self, batch: Batch, rows: Tensor) -> None:
        self.ids, self.mask = batch.ids[rows], batch.mask[rows]
        self.temperatures, self.lengths = batch.temperatures[rows], batch.lengths[rows]


def _update(policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> float:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if p.grad is None:  # an update moves by Adam's moments even where a minibatch had no signal
            p.grad = torch.zeros_like(p)
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
    if not bool(torch.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"the gradient is {float(norm)} at policy version {policy.version}: the weights are those before this "
            "update. Try a smaller lr (3e-4 and below here), max_grad_norm=1, or look at the advantages"
        )
    with policy.lock:
        optimizer.step()
        policy.version += 1
    return float(norm)


def _explained_variance(batch: Batch) -> float:
    if batch.values is None or batch.returns is None:
        return math.nan
    returns, values = batch.returns[batch.mask], batch.values[batch.mask]
    variance = float(returns.var()) if len(returns) > 1 else 0.0
    return 1 - float((returns - values).var()) / variance if variance > 0 else math.nan


def _detail(
    forward: _Forward,
    objective: _Objective,
    batch: Batch,
    old: Tensor,
    reference: Tensor | None,
    entropy: Tensor,
    weights: Tensor | None,
) -> dict[str, Any]:
    """(B, T) float32 arrays, NaN where the mask is 0: each token before and after the step."""
    after = forward.score(batch, {"logprob"})["logprob"]
    nan = torch.full_like(after, torch.nan)

    def keep(values: Tensor) -> Any:
        return torch.where(batch.mask, values.float(), nan).numpy()

    data = _Data(batch, old, None, weights)
    data.mass = batch.mask.float()
    everything = data.at(torch.arange(len(batch)), torch.device("cpu"))
    leaf = after[everything.where].requires_grad_()
    pull = torch.autograd.grad(objective.policy_loss(leaf, everything), leaf)[0]
    clipped = torch.zeros_like(after)
    clipped[everything.where] = _held(pull, everything).float()

    out = {
        "logprob_before": keep(old),
        "logprob_after": keep(after),
        "ratio": keep((after - old).exp()),
        "clipped": keep(clipped),
        "advantage": keep(batch.advantages),
        "entropy": keep(entropy),
        "sampler_gap": keep(old - batch.logprobs),
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


# --- several processes, and counting -------------------------------------------------------------


class _Sums:
    """Sums over micro-batches. They stay tensors until they are read, so that a GPU is not waited for."""

    NAMES = ("loss", "policy_loss", "value_loss", "kl_reference", "entropy", "tokens", "approx_kl", "clipped")

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        self._known: dict[str, float] | None = {}

    def add(self, name: str, value: Tensor) -> None:
        self._parts.setdefault(name, []).append(value)
        self._known = None

    def largest(self, name: str, value: Tensor) -> None:
        self.add(name, value)

    def merge(self, other: _Sums) -> None:
        for name in (*self.NAMES, "ratio"):
            self.add(name, torch.tensor(other[name], dtype=torch.float64))

    def _read(self) -> dict[str, float]:
        if self._known is None:
            self._known = {}
            for name, parts in self._parts.items():
                numbers = torch.stack([p.double() for p in parts])
                self._known[name] = float(numbers.max() if name == "ratio" else numbers.sum())
        return self._known

    def __getitem__(self, name: str) -> float:
        return self._read().get(name, 0.0)

    def rate(self, name: str) -> float:
        """A token."""
        return self[name] / self["tokens"] if self["tokens"] else math.nan

    def tensor(self, cancelled: bool) -> Tensor:
        return torch.tensor([*(self[name] for name in self.NAMES), float(cancelled)], dtype=torch.float64)

    def set(self, values: Tensor, ratio: float) -> None:
        self._parts = {}
        for name, value in zip((*self.NAMES, "ratio"), (*values.tolist(), ratio), strict=True):
            self.add(name, torch.tensor(value, dtype=torch.float64))


class _Phases:
    def __init__(self) -> None:
        self.seconds = {"old": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._at
        self._at = now


class _Ranks:
    """What several processes share. With one, nothing."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.alone = accelerator is None or accelerator.num_processes == 1

    def check(self, batch: Batch) -> None:
        if self.alone:
            return
        seen = [float(len(batch)), float(batch.ids.sum()), float(batch.advantages.nansum())]
        every = self.accelerator.gather(torch.tensor([seen], dtype=torch.float64, device=self.accelerator.device))
        if not bool((every == every[0]).all()):
            raise BatchError(
                f"the processes gave batches of {[int(n) for n in every[:, 0]]} rows that are not the same; "
                "give each of them gather(batch, accelerator)"
            )

    def share(self, batch: Batch, rows: Tensor) -> Tensor:
        """This process's rows: longest first, each to the process that has the fewest tokens so far."""
        if self.alone:
            return rows
        loads = [0] * self.accelerator.num_processes
        mine: list[int] = []
        for i in torch.argsort(batch.lengths[rows], descending=True, stable=True).tolist():
            to = loads.index(min(loads))
            loads[to] += int(batch.lengths[rows[i]])
            if to == self.accelerator.process_index:
                mine.append(i)
        return rows[mine]

    def sum_tensor(self, value: Tensor, device: torch.device) -> Tensor:
        if self.alone:
            return value
        out: Tensor = self.accelerator.reduce(value.to(device), reduction="sum")
        return out.to(value.device)

    def sum_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """In one message."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        together = self.accelerator.reduce(torch.cat([g.flatten() for g in gradients]), reduction="sum")
        for p, g in zip(parameters, together.split([g.numel() for g in gradients]), strict=True):
            p.grad = g.view_as(p).clone()

    def sum(self, values: Tensor, into: _Sums) -> bool:
        """Add up the statistics; whether any process was cancelled."""
        summed = self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").cpu()
        ratio = torch.tensor([into["ratio"]], dtype=torch.float64, device=self.accelerator.device)
        into.set(summed[:-1], float(self.accelerator.gather(ratio).max()))
        return bool(summed[-1] > 0)
