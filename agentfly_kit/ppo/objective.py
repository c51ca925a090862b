"""The training objective: losses per token, weights per token, and gradients with respect to the forward outputs.

Losses are differentiated with respect to the outputs of the forward pass at the sampled tokens. The caller then
propagates these gradients through the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.batch.batch import Batch
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo.micro_batch import MicroBatch
from agentfly_kit.ppo.stats import RunningStats

TokenLoss = Callable[..., Tensor]
Aggregate: TypeAlias = losses.AggregateMode | Mapping[str, Any]
LossName = Literal[
    "ppo", "reinforce", "gpg", "gspo", "gmpo", "sapo", "cispo", "dppo", "clip_cov", "kl_cov"
]  # each is a function in losses/surrogates.py

# Losses whose value at a token depends on the whole row. The others need only the sampled tokens.
_ROW_WISE = ("gspo", "gmpo")
# Losses whose value at a token depends on the whole minibatch, which must therefore be one micro-batch.
_MINIBATCH_WISE = ("clip_cov", "kl_cov")


@dataclass(frozen=True)
class Loss:
    """A policy loss, and how much of a minibatch it needs in one call.

    Attributes:
        function: Computes per-token losses from (logprobs, old_logprobs, advantages, mask).
        name: Its name in `losses`; empty for a custom function.
    """

    function: TokenLoss
    name: str

    @property
    def is_custom(self) -> bool:
        """True if the function is not one of `losses`, so that nothing is known about its inputs."""
        return not self.name

    @property
    def needs_rows(self) -> bool:
        """True if the loss needs complete rows, (B, T); otherwise it receives only the N sampled tokens."""
        return self.is_custom or self.name in _ROW_WISE

    @property
    def needs_minibatch(self) -> bool:
        """True if the loss of a token depends on the whole minibatch, including rows with zero advantage."""
        return self.name in _MINIBATCH_WISE

    @classmethod
    def resolve(cls, loss: Any, clip: float | None, clip_high: float | None, dual_clip: float | None) -> Loss:
        """Look up a loss and bind its clip options.

        Args:
            loss: Name of a loss in `losses`, or a function.
            clip: Clip range below 1; None for the default of the loss.
            clip_high: Clip range above 1; None for the default of the loss.
            dual_clip: Bound for negative advantages; None for the default of the loss.

        Raises:
            SettingsError: If the name is unknown, the loss does not take one of the options, or options are given with
                a function.
        """
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
            return cls(loss, name)
        if loss not in get_args(LossName):
            known = ", ".join(get_args(LossName))
            raise SettingsError(f"loss={loss!r}: give one of {known}, or a function such as af.losses.ppo")
        function = getattr(losses, loss)
        takes = inspect.signature(function).parameters
        if unknown := [name for name in options if name not in takes]:
            raise SettingsError(f"{unknown[0]}={options[unknown[0]]!r} with loss={loss!r}, which takes no {unknown[0]}")
        return cls(functools.partial(function, **options) if options else function, loss)

    def __call__(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """Compute the loss of each sampled token: logprobs (N,) -> (N,).

        Raises:
            SettingsError: If the loss function returns a tensor of the wrong shape.
        """
        if not self.needs_rows:
            everywhere = torch.ones_like(micro.old_logprobs).bool()
            return self.function(logprobs, micro.old_logprobs, micro.advantages, everywhere)
        grid = [micro.grid(x) for x in (logprobs, micro.old_logprobs, micro.advantages)]
        out = self.function(*grid, micro.mask)
        if tuple(out.shape) != tuple(micro.mask.shape):
            raise SettingsError(f"the loss function gave {tuple(out.shape)} for {tuple(micro.mask.shape)} tokens")
        return out[micro.mask]


def aggregate_options(given: Aggregate, denominator: float | None) -> tuple[losses.AggregateMode, dict[str, Any]]:
    """Split an aggregate setting into the mode and the options of `losses.aggregate`.

    Args:
        given: A mode, or a dict with the mode under "how" and further options.
        denominator: Number of tokens by which the mode "fixed" divides each row.

    Returns:
        The mode and the options.

    Raises:
        SettingsError: If the mode or an option is unknown.
    """
    options: dict[str, Any] = {"how": given} if isinstance(given, str) else dict(given)
    how = options.pop("how", None)
    if how not in get_args(losses.AggregateMode) or not set(options) <= {"empty_rows", "count", "denominator"}:
        raise SettingsError(
            f"aggregate={given!r}: give one of {', '.join(map(repr, get_args(losses.AggregateMode)))}, or a dict "
            "of 'how' with 'count', 'empty_rows' or 'denominator'"
        )
    if denominator is not None:
        options["denominator"] = denominator
    return how, options


@dataclass(frozen=True)
class Objective:
    """The training objective as a function of the outputs of a forward pass.

    Attributes:
        loss: Policy loss.
        aggregate: How per-token losses are reduced to one number.
        options: Options of `losses.aggregate`.
        value_coef: Coefficient of the value loss.
        value_clip: Range within which the value loss clips a new value around the old one.
        kl_coef: Coefficient of the KL penalty in the loss.
        kl_kind: Estimator of that KL.
        kl_weighted: Whether to multiply the KL of each token by its probability ratio.
        entropy_coef: Coefficient of the entropy bonus.
    """

    loss: Loss
    aggregate: losses.AggregateMode
    options: dict[str, Any]
    value_coef: float
    value_clip: float | None
    kl_coef: float
    kl_kind: losses.KLKind
    kl_weighted: bool
    entropy_coef: float

    @property
    def only_advantage(self) -> bool:
        """True if rows with zero advantage have zero gradient, so that their forward pass can be skipped."""
        quiet = self.value_coef == 0 and self.kl_coef == 0 and self.entropy_coef == 0
        return quiet and not self.loss.is_custom and not self.loss.needs_minibatch

    def token_weights(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return the weight of each token's loss in the loss of a minibatch: (B, T), 0 outside of `rows`.

        Every aggregate is linear in the per-token losses, so the weights are its gradient.
        """
        per_token = torch.zeros(len(rows), batch.ids.shape[1], requires_grad=True)
        one = losses.aggregate(
            per_token,
            batch.mask[rows],
            self.aggregate,
            trajectory_index=batch.trajectory_index[rows] if self.aggregate == "trajectory_mean" else None,
            **self.options,
        )
        out = torch.zeros(batch.ids.shape)
        out[rows] = torch.autograd.grad(one, per_token)[0]
        return out

    def policy_loss(self, leaf: Tensor, micro: MicroBatch) -> Tensor:
        """Return the weighted sum of the policy losses of a micro-batch, as a function of its logprobs `leaf`, (N,).

        Raises:
            SettingsError: If the loss does not depend on the logprobs.
        """
        per_token = self.loss(leaf, micro)
        if not per_token.requires_grad:
            raise SettingsError("the loss function gave something without a gradient in the logprobs")
        if micro.importance_weights is not None:
            per_token = per_token * micro.importance_weights
        return (per_token * micro.token_weight).sum()

    def differentiate(self, got: Any, micro: MicroBatch, sums: RunningStats) -> list[tuple[Tensor, Tensor | None]]:
        """Differentiate the objective with respect to the outputs of a forward pass.

        Args:
            got: Outputs of the forward pass.
            micro: The micro-batch.
            sums: Statistics of the minibatch, to which those of the micro-batch are added.

        Returns:
            Pairs of an output tensor and the gradient of the objective in it.
        """
        # Policy loss. Its gradient is kept separate from the KL's, because it shows where the clip binds.
        logp = got.logprob
        leaf = logp.detach().requires_grad_()
        policy_loss = self.policy_loss(leaf, micro)
        policy_grad = torch.autograd.grad(policy_loss, leaf)[0]
        policy_loss = policy_loss.detach()
        gradient, total = policy_grad, policy_loss
        out: list[tuple[Tensor, Tensor | None]] = []
        # KL penalty towards the reference policy.
        if self.kl_coef > 0:
            assert micro.ref_logprobs is not None
            kl = losses.kl(leaf, micro.ref_logprobs, self.kl_kind, torch.ones_like(leaf).bool())
            weighed = kl * (leaf - micro.old_logprobs).clamp(max=20.0).exp() if self.kl_weighted else kl
            term = self.kl_coef * (weighed * micro.token_weight).sum()
            gradient = gradient + torch.autograd.grad(term, leaf)[0]
            total = total + term.detach()
            sums.add("kl_reference", kl.detach().sum())
        out.append((logp, gradient))
        # Value loss and entropy bonus have gradients in other outputs than the logprobs.
        if got.value is not None:
            assert micro.returns is not None
            value = got.value.detach().requires_grad_()
            per_token = losses.value(
                value, micro.values, micro.returns, torch.ones_like(value).bool(), clip=self.value_clip
            )
            value_loss = (per_token * micro.token_weight).sum()
            out.append((got.value, self.value_coef * torch.autograd.grad(value_loss, value)[0]))
            total = total + self.value_coef * value_loss.detach()
            sums.add("value_loss", value_loss.detach())
        if got.entropy is not None:
            sums.add("entropy", got.entropy.detach().sum())
            if self.entropy_coef > 0:
                out.append((got.entropy, -self.entropy_coef * micro.token_weight))
                total = total - self.entropy_coef * (got.entropy.detach() * micro.token_weight).sum()
        # Statistics of the ratio; approx_kl is the "k3" estimator.
        sums.add("policy_loss", policy_loss)
        sums.add("loss", total)
        with torch.no_grad():
            difference = (leaf.detach() - micro.old_logprobs).clamp(max=20.0)  # exp overflows float32 above 88
            ratio = difference.exp()
            sums.add("approx_kl", (ratio - 1 - difference).sum())
            sums.add("clipped", is_clipped(policy_grad, micro).sum())
            sums.max("ratio", (ratio - 1).abs().max())
        sums.add("tokens", torch.tensor(float(len(leaf)), device=leaf.device))
        return out


def is_clipped(policy_grad: Tensor, micro: MicroBatch) -> Tensor:
    """Return which tokens are clipped: those with a nonzero advantage but no policy gradient."""
    # A token with importance weight 0 has no gradient either, but is not clipped.
    held = (policy_grad == 0) & (micro.advantages != 0)
    return held if micro.importance_weights is None else held & (micro.importance_weights != 0)
