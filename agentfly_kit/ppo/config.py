"""Settings of a PPO step, which are validated on construction, and the policy loss that these settings select."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from agentfly_kit import losses
from agentfly_kit._display import Displayable
from agentfly_kit.errors import SettingsError, check_accepts, check_choice, check_settings, checks_keywords

if TYPE_CHECKING:
    from agentfly_kit.ppo.inputs import MicroBatch

# Names of the policy losses in losses/surrogates.py.
LossName = Literal["ppo", "reinforce", "gspo", "gmpo", "sapo", "cispo", "dppo"]
# Losses whose value at a token depends on all tokens of the row. These losses and custom ones receive padded rows. All
# other losses receive only the sampled tokens.
_ROW_WISE = ("gspo", "gmpo")


Aggregate: TypeAlias = losses.AggregateMode | Mapping[str, Any]
OldLogprobs: TypeAlias = Literal["auto", "engine", "recompute"]
Correction: TypeAlias = Literal["token", "sequence"] | Mapping[str, Any]


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class PPOConfig(Displayable):
    """Settings of `ppo_step`, which `TrainConfig` inherits.

    Args:
        loss: Policy loss, given as the name of a function in `af.losses` or as a function of (logprobs, old_logprobs,
            advantages, mask), such as functools.partial(af.losses.cispo, bounds="upper"). A custom function receives
            tensors of shape (B, T) for the rows of one micro-batch, with 0 where the mask is 0, and returns the loss of
            each token, (B, T), which is reduced according to `aggregate`.
        aggregate: Reduction of per-token losses to a scalar, given as a mode of `af.losses.aggregate` or as a dict with
            the mode under "how" and its options, such as {"how": "fixed", "denominator": 512.0}. Modes and losses that
            operate on sequences treat each row as a sequence, even if a trajectory has several rows.
        clip: Lower clip range. The loss "ppo" clips ratios below 1 - clip. None selects the default of the loss, which
            is 0.2 for "ppo". If `loss` is a function, `clip`, `clip_high` and `dual_clip` must be None; use
            functools.partial instead.
        clip_high: Upper clip range (clip-higher of DAPO). None selects the default of the loss (for "ppo", `clip`).
        dual_clip: Factor, above 1, that limits the loss of a token with a negative advantage A to dual_clip * |A|. None
            sets no limit.
        value_coef: Coefficient of the value loss, which is used if the policy has a value head and the batch contains
            returns.
        value_clip: Maximum difference between new and old values in the value loss, in units of reward. Larger
            differences are clipped. None disables clipping.
        kl_coef: Coefficient of the KL penalty with respect to the reference policy. 0 disables the penalty.
        kl_kind: Estimator of the KL in the loss and in the statistics, which is "k1", "abs", "k2", "k3" or "k3+"; see
            `af.losses.kl`.
        kl_in: "loss" adds the KL penalty to the loss. With "reward", `train` subtracts the penalty from the rewards
            before advantages are computed (see `shaped_rewards`), and `ppo_step` only reports the KL.
        kl_weighted: Whether to multiply the KL of each token by the token's probability ratio if kl_in="loss". This
            factor makes the estimate and its gradient unbiased for samples from the old policy
            (`use_bias_correction_kl` in TRL).
        entropy_coef: Coefficient of the entropy bonus, which is subtracted from the loss. 0 disables the bonus.
        epochs: Number of passes over the batch.
        minibatch: Number of trajectories per update, each with all of its rows. None uses all trajectories.
        micro_tokens: Maximum number of tokens per forward pass, including padding. This limit bounds memory use and
            does not affect the result. None selects the default of the policy. On a CPU, the default is 1,536, or 512
            for models of at least 33 million parameters. On a GPU, the default is at most 32,768, and activations take
            up to about a quarter of the GPU's memory.
        max_grad_norm: Norm to which gradients are clipped before each update. None disables clipping.
        target_kl: Limit on the approximate KL between the old and the new policy, in nats per token. If an update
            exceeds this limit, the step ends before the next minibatch. None sets no limit.
        old_logprobs: Source of the logprobs in the denominator of the probability ratio. "engine" uses the logprobs of
            the sampler, and "recompute" those of the policy before the first update. "auto" uses the logprobs of the
            sampler if all tokens were sampled by the current policy version, and recomputes the logprobs otherwise.
            "auto" also compares the logprobs of sampler and policy in the forward passes of the first update.
            If a difference (`stats.sampler_gap`) exceeds 1e-4, or if all rows of the first minibatch are skipped, the
            old logprobs of the whole batch are recomputed and the first update is restarted.
        correction: Importance weights p_old / p_sampler of the tokens, selected by "token", "sequence", or a dict of
            options for `af.losses.importance_weights`, such as {"level": "sequence", "cap": 5.0, "beyond": "mask"}.
            None applies no correction. Tokens sampled under top-p, top-k or min-p require a correction, for which
            p_sampler is the probability in the truncated distribution.
        max_lag: Maximum number of updates since a token was sampled. A batch with an older token is rejected, because
            old samples carry little information about the current policy. None sets no limit.
        autocast: "bfloat16" runs the model in bfloat16, while weights, losses and the optimizer keep their dtype. None
            runs the model in the dtype of the weights.
        checkpointing: Whether to recompute the activations inside layers in the backward pass instead of storing them.
            Recomputation saves memory and costs time.

    Raises:
        SettingsError: If a value is invalid, or if settings contradict each other.
    """

    loss: LossName | Callable[..., Tensor] = "ppo"
    aggregate: Aggregate = "token_mean"
    clip: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: losses.KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    epochs: int = 1
    minibatch: int | None = None
    micro_tokens: int | None = None
    max_grad_norm: float | None = 1.0
    target_kl: float | None = None
    old_logprobs: OldLogprobs = "auto"
    correction: Correction | None = None
    max_lag: int | None = 64
    autocast: Literal["bfloat16"] | None = None
    checkpointing: bool = False

    # Conditions in the form that `check_settings` expects.
    _limits: ClassVar[Mapping[str, Any]] = {
        "clip": "of at least 0",
        "clip_high": "of at least 0",
        "dual_clip": "above 1",
        "value_coef": "of at least 0",
        "value_clip": "of at least 0",
        "kl_coef": "of at least 0",
        "kl_kind": losses.KLKind,
        "kl_in": Literal["loss", "reward"],
        "entropy_coef": "of at least 0",
        "epochs": "of at least 1",
        "minibatch": "of at least 1",
        "micro_tokens": "of at least 1",
        "max_grad_norm": "above 0",
        "target_kl": "above 0",
        "old_logprobs": OldLogprobs,
        "max_lag": "of at least 0",
        "autocast": Literal["bfloat16", None],
    }

    def __post_init__(self) -> None:
        check_settings(self, self._limits)
        check_choice("aggregate", self.aggregate_options().get("how"), losses.AggregateMode)

        # The functions in af.losses validate their options, so call them with a single token to check the settings.
        one = torch.zeros(1, 1)
        loss = self.policy_loss()
        if loss.name:
            loss.function(one, one, one, one == 0)
        if self.correction is not None:
            try:
                losses.importance_weights(one, one, one == 0, **self.correction_options())
            except (TypeError, ValueError) as error:
                raise SettingsError(f"correction={self.correction!r}: {error}") from error
        options = self.aggregate_options()
        index = [0] if options["how"] == "trajectory_mean" else None
        losses.aggregate(one, one == 0, trajectory_index=index, **options)

    def policy_loss(self) -> PolicyLoss:
        """Return the policy loss with its clip options bound."""
        return PolicyLoss.resolve(self.loss, clip=self.clip, clip_high=self.clip_high, dual_clip=self.dual_clip)

    def correction_options(self) -> dict[str, Any]:
        """Return `correction`, which must not be None, as keyword arguments of `losses.importance_weights`."""
        given: Any = self.correction
        return {"level": given} if isinstance(given, str) else dict(given)

    def aggregate_options(self) -> dict[str, Any]:
        """Return `aggregate` as keyword arguments of `losses.aggregate`."""
        given: Any = self.aggregate
        return dict(given) if isinstance(given, Mapping) else {"how": given}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed. Raise SettingsError if a value is invalid."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss as a function of (logprobs, old_logprobs, advantages, mask) that returns the loss of each token."""

    function: Callable[..., Tensor]
    name: str  # name of the function in `LossName`; "" for a custom function

    @classmethod
    def resolve(cls, loss: str | Callable[..., Tensor], **clips: float | None) -> PolicyLoss:
        """Look up a loss by its name, and bind the clip options. Options that are None keep their defaults."""
        options = {name: value for name, value in clips.items() if value is not None}
        names = get_args(LossName)
        if callable(loss):
            if options:
                raise SettingsError(
                    f"{', '.join(options)} must be None if loss is a function; use functools.partial(function, ...)"
                )
            inner = loss.func if isinstance(loss, functools.partial) else loss
            check_accepts("loss", loss, "logprobs", "old_logprobs", "advantages", "mask")
            return cls(loss, next((name for name in names if inner is getattr(losses, name)), ""))
        if loss not in names:
            raise SettingsError(f"loss must be one of {', '.join(map(repr, names))}, or a function, got {loss!r}")
        function = getattr(losses, loss)
        return cls(functools.partial(function, **options) if options else function, loss)

    def __call__(self, logprobs: Tensor, micro: MicroBatch) -> Tensor:
        """Return the weighted loss of each sampled token, (N,). The policy loss is the sum over all tokens."""
        if self.name and self.name not in _ROW_WISE:
            sampled = torch.ones_like(micro.old_logprobs).bool()
            per_token = self.function(logprobs, micro.old_logprobs, micro.advantages, sampled)
        else:
            rows = [micro.grid(x) for x in (logprobs, micro.old_logprobs, micro.advantages)]
            per_row = self.function(*rows, micro.mask)
            if per_row.shape != micro.mask.shape:
                raise SettingsError(
                    "loss must return one loss per token, without a mean, as a tensor of "
                    f"shape {tuple(micro.mask.shape)}, got {tuple(per_row.shape)}"
                )
            per_token = per_row[micro.mask]
        if not per_token.requires_grad:
            raise SettingsError(
                "loss must be differentiable with respect to the logprobs, got a result without a gradient"
            )
        if micro.importance_weights is not None:
            per_token = per_token * micro.importance_weights
        return per_token * micro.token_weight
