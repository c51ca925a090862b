"""One optimisation step on a batch: scores, ratios, losses, gradients, updates. Knows no rollout and no loop.

The result does not depend on padding, on the order of rows within a minibatch, or on how it is split into
micro-batches: every denominator is counted over the whole minibatch before the first forward.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch import Batch
from agentfly_kit.errors import BatchError, SettingsError, TrainingError
from agentfly_kit.pending import awaited
from agentfly_kit.policy import Policy, compute_threads, micro_batches
from agentfly_kit.types import Stats

TokenLoss = Callable[..., Tensor]

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
    """AdamW over a policy; its value head learns at `value_lr` (ten times `lr` unless given).

    Source:  betas and the value head's rate were measured on the calculator task; see docs/log.md.
    """
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.model.parameters() if p.requires_grad], "lr": lr}]
    if policy.value_head is not None:
        groups.append({"params": list(policy.value_head.parameters()), "lr": 10 * lr if value_lr is None else value_lr})
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def ppo_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: Literal["ppo"] | TokenLoss = "ppo",
    aggregate: losses.How = "token_mean",
    denominator: float | None = None,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    value_coef: float = 0.5,
    value_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_kind: losses.KLKind = "k3",
    reference: Policy | None = None,
    entropy_coef: float = 0.0,
    epochs: int = 1,
    minibatch: int | None = None,
    micro_tokens: int | None = None,
    max_grad_norm: float | None = 1.0,
    target_kl: float | None = None,
    old: Literal["auto", "engine", "recompute"] = "auto",
    seed: int = 0,
    detail: bool = False,
    cancel: threading.Event | None = None,
) -> Stats:
    """Masked PPO on a batch: `epochs` passes over minibatches of rollouts, one `optimizer.step()` each.

    loss: "ppo", or a function (logprobs, old_logprobs, advantages, mask) -> (B, T).
    aggregate: how per-token losses become one; see `losses.aggregate`.
    value_coef, value_clip: used when the policy has a value head and the batch has returns.
    kl_coef, kl_kind, reference: a KL to a frozen policy in the loss.
    minibatch: rollouts an update; None is all of them.
    micro_tokens: padded tokens a forward (None: the policy's own choice); it bounds memory and changes nothing else.
    target_kl: stop before the next minibatch once approx_kl of an update exceeds it.
    old: the ratio's denominator. "engine" takes the sampler's logprobs, "recompute" the policy's before the first
        update, "auto" the sampler's if they are of this policy version and a probe agrees to 1e-4.
    detail: keep (B, T) tensors of what the step did to every token.
    cancel: when set, stop at the next micro-batch; weights stay at the last update.
    Raises:  BatchError for a batch without advantages or of another vocabulary; TrainingError when a gradient is not
             finite, with the weights left at the last update; SettingsError for options that contradict each other.
    Source:  PPO, arXiv 1707.06347, eq. 7; masked as docs/conventions.md says.
    """
    started = time.perf_counter()
    micro_tokens = micro_tokens or policy.micro_tokens
    _check(policy, batch, kl_coef, reference, epochs, minibatch, loss, old)
    token_loss = _token_loss(loss, clip, clip_high, dual_clip)
    with_value = policy.value_head is not None and batch.returns is not None and value_coef > 0
    phases = {"old": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    def clock(phase: str, since: float) -> float:
        now = time.perf_counter()
        phases[phase] += now - since
        return now

    with compute_threads(policy):
        at = time.perf_counter()
        old_logprobs, gap = _old_logprobs(policy, batch, old, micro_tokens)
        ref_logprobs = None
        if reference is not None and (kl_coef > 0 or detail):
            ref_logprobs = reference.score(batch, {"logprob"}, micro_tokens=micro_tokens)["logprob"]
        before = policy.score(batch, {"entropy"}, micro_tokens=micro_tokens)["entropy"] if detail else None
        at = clock("old", at)

        # A row whose advantage is exactly 0 moves nothing when nothing but the advantage speaks. It is not run, but it
        # stays in every denominator and in the schedule of updates.
        live = torch.ones(len(batch), dtype=torch.bool)
        if not (kl_coef > 0 or entropy_coef > 0 or with_value or callable(loss)):
            live = (torch.where(batch.mask, batch.advantages, 0.0) != 0).any(1)
        flat = {int(g) for g in batch.groups} - {int(g) for g in batch.groups[live]}

        # The engine's entropies are exact and cover every row; only without them does the forward make its own.
        known = not bool(torch.isnan(batch.entropies[batch.mask]).any())

        totals = _Totals()
        generator = torch.Generator().manual_seed(seed)
        rollouts = batch.rollouts.unique()
        size = len(rollouts) if minibatch is None else minibatch
        updates, norms, stopped = 0, 0.0, False
        for epoch in range(epochs):
            order = rollouts[torch.randperm(len(rollouts), generator=generator)]
            last = epoch == epochs - 1
            for start in range(0, len(order), size):
                rows = torch.isin(batch.rollouts, order[start : start + size]).nonzero()[:, 0]
                total = _total(batch, rows, aggregate)
                running = rows[live[rows]]
                optimizer.zero_grad(set_to_none=False)
                sums = _Totals()
                for part in micro_batches(batch.lengths[running], micro_tokens):
                    if cancel is not None and cancel.is_set():
                        optimizer.zero_grad(set_to_none=True)
                        raise asyncio.CancelledError("ppo_step was cancelled; the weights are those of the last update")
                    picked = running[part]
                    width = int(batch.lengths[picked].max())
                    mask = batch.mask[picked, :width].to(policy.device)
                    got = policy.forward(
                        batch.ids[picked, :width].to(policy.device),
                        mask,
                        batch.temperatures[picked],
                        entropy=entropy_coef > 0 or not known,
                        value=with_value,
                    )
                    where = mask.nonzero(as_tuple=True)

                    def grid(values: Tensor, where: Any = where, shape: Any = mask.shape) -> Tensor:
                        return values.new_zeros(shape).index_put(where, values)

                    def cut(values: Tensor, picked: Tensor = picked, width: int = width) -> Tensor:
                        return values[picked, :width].to(policy.device)

                    def mean(
                        per_token: Tensor, mask: Tensor = mask, picked: Tensor = picked, total: Any = total
                    ) -> Tensor:
                        many = aggregate == "rollout_mean"
                        return losses.aggregate(
                            per_token,
                            mask,
                            aggregate,
                            total=total,
                            denominator=denominator,
                            rollouts=batch.rollouts[picked] if many else None,
                            rollout_tokens=_rollout_tokens(batch)[picked] if many else None,
                        )

                    logp, was, adv = grid(got.logprob), cut(old_logprobs), cut(batch.advantages)
                    policy_loss = mean(token_loss(logp, was, adv, mask))
                    objective = policy_loss
                    if with_value:
                        assert got.value is not None and batch.returns is not None
                        values = batch.values if batch.values is not None else torch.zeros_like(batch.returns)
                        per_value = losses.value(
                            grid(got.value), cut(values), cut(batch.returns), mask, clip=value_clip
                        )
                        value_loss = mean(per_value)
                        objective = objective + value_coef * value_loss
                        sums.add("value_loss", value_loss)
                    if kl_coef > 0 and ref_logprobs is not None:
                        reference_kl = mean(losses.kl(logp, cut(ref_logprobs), kl_kind, mask))
                        objective = objective + kl_coef * reference_kl
                        sums.add("kl_reference", reference_kl)
                    if got.entropy is not None:
                        if entropy_coef > 0:
                            objective = objective - entropy_coef * mean(grid(got.entropy))
                        sums.add("entropy_sum", got.entropy.detach().sum())
                    sums.add("policy_loss", policy_loss)
                    sums.add("loss", objective)
                    count = int(mask.sum())
                    sums.add("tokens", count)
                    with torch.no_grad():
                        sums.add("kl_sum", losses.approx_kl(logp, was, mask) * count)
                        sums.add(
                            "clip_sum", losses.clip_fraction(logp, was, adv, mask, clip, clip_high, dual_clip) * count
                        )
                        ratio = torch.where(mask, (logp - torch.where(mask, was, logp)).exp(), 1.0)
                        sums.largest("ratio_max", (ratio - 1).abs().max())
                    at = clock("forward", at)
                    objective.backward()
                    at = clock("backward", at)
                norms += _update(policy, optimizer, max_grad_norm)
                updates += 1
                at = clock("optimizer", at)
                totals.merge(sums, statistics=last)
                if target_kl is not None and sums.rate("kl_sum") > target_kl:
                    stopped = True
                    if not last:
                        totals.merge(sums, statistics=True)
                    break
            if stopped:
                break

        after = (
            _detail(policy, batch, old_logprobs, ref_logprobs, before, clip, clip_high, dual_clip) if detail else None
        )

    scored = batch.rewards
    return Stats(
        loss=totals.get("loss") / updates,
        policy_loss=totals.get("policy_loss") / updates,
        value_loss=totals.get("value_loss") / updates if with_value else math.nan,
        kl_reference=totals.get("kl_reference") / updates if kl_coef > 0 else math.nan,
        approx_kl=totals.rate("kl_sum"),
        clip_fraction=totals.rate("clip_sum"),
        entropy=float(batch.entropies[batch.mask].mean()) if known else totals.rate("entropy_sum"),
        grad_norm=norms / updates,
        explained_variance=_explained_variance(batch),
        ratio_max=1 + totals.get("ratio_max"),
        sampler_gap=gap,
        reward_mean=float(scored.mean()),
        reward_std=float(scored.std()) if len(scored) > 1 else 0.0,
        advantage_mean=float(batch.advantages[batch.mask].mean()),
        unscored=batch.flagged[0],
        truncated=batch.flagged[1],
        updates=updates,
        rows=len(batch),
        tokens=int(batch.mask.sum()),
        dropped_groups=len(flat),
        stopped_early=stopped,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=time.perf_counter() - started,
        phases=phases,
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
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


class _Totals:
    """Sums over micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self._sums[name] = self._sums.get(name, 0.0) + number

    def largest(self, name: str, value: Tensor) -> None:
        self._sums[name] = max(self._sums.get(name, 0.0), float(value))

    def merge(self, other: _Totals, *, statistics: bool) -> None:
        """Losses are averaged over all updates; the other statistics are those of the last epoch."""
        for name, value in other._sums.items():
            if name == "ratio_max":
                self._sums[name] = max(self._sums.get(name, 0.0), value)
            elif name in ("loss", "policy_loss", "value_loss", "kl_reference") or statistics:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def get(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def rate(self, name: str) -> float:
        tokens = self.get("tokens")
        return self.get(name) / tokens if tokens else math.nan


def _check(
    policy: Policy,
    batch: Batch,
    kl_coef: float,
    reference: Policy | None,
    epochs: int,
    minibatch: int | None,
    loss: Any,
    old: str,
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
    if kl_coef > 0 and reference is None:
        raise SettingsError(f"kl_coef={kl_coef} needs reference=, a frozen policy such as policy.copy()")
    if epochs < 1 or (minibatch is not None and minibatch < 1):
        raise SettingsError(f"epochs={epochs}, minibatch={minibatch}: both are at least 1")
    if not callable(loss) and loss != "ppo":
        raise SettingsError(f"loss={loss!r}: give 'ppo', or a function such as af.losses.ppo")
    if old not in ("auto", "engine", "recompute"):
        raise SettingsError(f"old={old!r}: give 'auto', 'engine' or 'recompute'")


def _token_loss(loss: Any, clip: float, clip_high: float | None, dual_clip: float | None) -> TokenLoss:
    if callable(loss):
        function: TokenLoss = loss
        return function
    return lambda logp, old, adv, mask: losses.ppo(logp, old, adv, mask, clip, clip_high, dual_clip)


def _old_logprobs(policy: Policy, batch: Batch, old: str, micro_tokens: int) -> tuple[Tensor, float]:
    """The ratio's denominator (B, T), and the largest gap to the engine's logprobs where it was measured."""

    def gap(rows: Iterable[int] | Tensor, scored: Tensor) -> float:
        rows = torch.as_tensor(rows)
        mask = batch.mask[rows]
        return float((scored[mask] - batch.logprobs[rows][mask]).abs().max())

    if old == "recompute":
        scored = policy.score(batch, {"logprob"}, micro_tokens=micro_tokens)["logprob"]
        return scored, gap(torch.arange(len(batch)), scored)
    if old == "auto":
        fresh = bool((batch.versions[batch.mask] == policy.version).all())
        some = torch.linspace(0, len(batch) - 1, min(8, len(batch))).long().unique()
        probe = _Rows(batch, some)
        measured = (
            gap(some, policy.score(probe, {"logprob"}, micro_tokens=micro_tokens)["logprob"]) if fresh else math.inf
        )
        if measured > _EXACT:
            return _old_logprobs(policy, batch, "recompute", micro_tokens)
        return batch.logprobs, measured
    return batch.logprobs, math.nan


class _Rows:
    """A few rows of a batch, for scoring."""

    def __init__(self, batch: Batch, rows: Tensor) -> None:
        self.ids, self.mask = batch.ids[rows], batch.mask[rows]
        self.temperatures, self.lengths = batch.temperatures[rows], batch.lengths[rows]


def _rollout_tokens(batch: Batch) -> Tensor:
    tokens = batch.mask.sum(1)
    whole = torch.zeros(int(batch.rollouts.max()) + 1, dtype=tokens.dtype).index_add(0, batch.rollouts, tokens)
    return whole[batch.rollouts]


def _total(batch: Batch, rows: Tensor, how: str) -> float:
    """What `losses.aggregate` divides by, over the whole minibatch."""
    tokens = batch.mask[rows].sum(1)
    if how == "token_mean":
        return float(tokens.sum())
    if how == "rollout_mean":
        return float(len(batch.rollouts[rows].unique()))
    return float((tokens > 0).sum())


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
    policy: Policy,
    batch: Batch,
    old: Tensor,
    reference: Tensor | None,
    entropy: Tensor | None,
    clip: float,
    clip_high: float | None,
    dual_clip: float | None,
) -> dict[str, Any]:
    """(B, T) float32 arrays, NaN where the mask is 0: each token before and after the step."""
    after = policy.score(batch, {"logprob"})["logprob"]
    nan = torch.full_like(after, torch.nan)

    def keep(values: Tensor) -> Any:
        return torch.where(batch.mask, values.float(), nan).numpy()

    out = {
        "logprob_before": keep(old),
        "logprob_after": keep(after),
        "ratio": keep((after - old).exp()),
        "clipped": keep(losses.clipped(after, old, batch.advantages, batch.mask, clip, clip_high, dual_clip)),
        "advantage": keep(batch.advantages),
        "entropy": keep(entropy if entropy is not None else nan),
        "sampler_gap": keep(old - batch.logprobs),
    }
    if reference is not None:
        out["kl_reference"] = keep(losses.kl(after, reference, "k3", batch.mask))
    if batch.values is not None:
        out["value"] = keep(batch.values)
    if batch.returns is not None:
        out["return"] = keep(batch.returns)
    return out
