"""The policy loss of a micro-batch: looked up by name, called with its inputs, and weighted per token."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.errors import SettingsError

# Each is a function in losses/surrogates.py.
LossName = Literal["ppo", "reinforce", "gspo", "gmpo", "sapo", "cispo", "dppo"]
# Losses whose value at a token depends on the whole row. The others need only the sampled tokens.
_ROW_WISE = ("gspo", "gmpo")


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


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss.

    Attributes:
        function: Computes per-token losses from (logprobs, old_logprobs, advantages, mask).
        name: Its name in `LossName`; empty for a custom function, of which nothing is known.
    """

    function: Callable[..., Tensor]
    name: str

    @classmethod
    def resolve(cls, loss: str | Callable[..., Tensor], **clips: float | None) -> PolicyLoss:
        """Look up a loss by name and bind its clip options, of which None is the default of the loss.

        Raises:
            SettingsError: If the name is unknown, the loss does not take one of the options, or options are given with
                a function.
        """
        options = {name: value for name, value in clips.items() if value is not None}
        names = get_args(LossName)
        if callable(loss):
            if options:
                raise SettingsError(
                    f"{', '.join(options)} must be None if loss is a function; use functools.partial(function, ...)"
                )
            inner = loss.func if isinstance(loss, functools.partial) else loss
            if inner in (losses.clip_cov, losses.kl_cov):
                raise SettingsError(
                    f"loss must not be {inner.__name__}: it compares all tokens of a minibatch, which the step splits "
                    "into micro-batches; call it in a training loop of your own"
                )
            _check_signature(loss)
            return cls(loss, next((name for name in names if inner is getattr(losses, name)), ""))
        if loss not in names:
            raise SettingsError(f"loss must be one of {', '.join(map(repr, names))}, or a function, got {loss!r}")
        function = getattr(losses, loss)
        accepted = inspect.signature(function).parameters
        for name, value in options.items():
            if name not in accepted:
                raise SettingsError(f"loss={loss!r} takes no {name}, got {name}={value!r}")
        return cls(functools.partial(function, **options) if options else function, loss)

    def __call__(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """Return the weighted loss of each sampled token: logprobs (N,) -> (N,). Their sum is the policy loss.

        Raises:
            SettingsError: If the function returns a tensor of the wrong shape, or one without a gradient.
        """
        if self.name and self.name not in _ROW_WISE:
            sampled = torch.ones_like(micro.old_logprobs).bool()
            per_token = self.function(logprobs, micro.old_logprobs, micro.advantages, sampled)
        else:
            rows = [micro.grid(x) for x in (logprobs, micro.old_logprobs, micro.advantages)]
            per_row = self.function(*rows, micro.mask)
            if per_row.shape != micro.mask.shape:
                raise SettingsError(
                    "loss must return one loss per token, without a mean (aggregate= reduces them): the shape "
                    f"{tuple(micro.mask.shape)} of its arguments, got {tuple(per_row.shape)}"
                )
            per_token = per_row[micro.mask]
        if not per_token.requires_grad:
            raise SettingsError("loss must return a tensor with a gradient in the logprobs, got one without")
        if micro.importance_weights is not None:
            per_token = per_token * micro.importance_weights
        return per_token * micro.token_weight


def _check_signature(loss: Callable[..., Tensor]) -> None:
    """Reject a function that cannot be called with the four arguments of a loss."""
    try:
        inspect.signature(loss).bind("logprobs", "old_logprobs", "advantages", "mask")
    except TypeError as error:
        raise SettingsError(
            f"loss must be a function of (logprobs, old_logprobs, advantages, mask), got {loss!r}: {error}"
        ) from None
    except ValueError:  # a callable without a signature
        return


def is_clipped(gradient: Tensor, micro: MicroBatch) -> Tensor:
    """Return which tokens are clipped: those with a nonzero advantage but no gradient of the policy loss, (N,)."""
    # A token with importance weight 0 has no gradient either, but is not clipped.
    clipped = (gradient == 0) & (micro.advantages != 0)
    return clipped if micro.importance_weights is None else clipped & (micro.importance_weights != 0)
