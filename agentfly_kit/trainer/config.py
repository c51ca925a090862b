"""Settings of a training run, validated on construction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.agent.budget import Budget
from agentfly_kit.batch.collate import AdvantagePer, TruncationMode
from agentfly_kit.batch.filters import Filter, is_group_filter
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo import Aggregate, Correction, LossName, aggregate_options
from agentfly_kit.types import Task

OUTCOME_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
TURN_ESTIMATORS = ("gigpo", "arpo")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. An iteration is one rollout and one `ppo_step`; an update is one optimizer step.

    Args:
        steps: Number of iterations of the run.
        tasks_per_step: Number of tasks sampled in each iteration.
        group_size: Number of chains sampled for each task; together they form a group.
        advantage: Advantage estimator: "grpo", "dr_grpo", "rloo", "gigpo", "arpo", "gae", "reinforce_plus_plus" or
            "reinforce_plus_plus_baseline"; or a function that maps rewards (N,) and groups (N,) to advantages of shape
            (N,), or (N, K) for one advantage per sampled turn (see `turn_data`). "gae" requires a policy with a value
            head.
        advantage_per: How outcome estimators count a chain that has several rows: as one member of its group
            ("trajectory"), or as one member for each of its rows ("row").
        authors: Authors whose tokens are trained, when the policy samples on behalf of several roles. None trains the
            tokens of all of them.
        gamma: Discount factor of the rewards. Read by "gae", "reinforce_plus_plus" and "gigpo".
        lam: Lambda of generalized advantage estimation. Read by "gae".
        whiten: Whether to normalize token-level advantages to mean 0 and standard deviation 1 over the sampled tokens
            of the batch. Read by "gae", "reinforce_plus_plus" and "reinforce_plus_plus_baseline".
        difficulty: Name of a task field, or a function of a task, that gives its difficulty as a number. Each pass over
            the tasks then goes from the lowest difficulty to the highest, and only tasks of equal difficulty are
            shuffled. None shuffles all tasks.
        lr: Learning rate of the first iteration. A value head learns at ten times this rate, following the same
            schedule.
        lr_end: Learning rate of the last iteration; the rate changes linearly in between. None keeps `lr` throughout.
        minibatch: Number of trajectories per update, each with all of its rows. None uses the whole batch for each
            update.
        epochs: Number of passes over the batch in each iteration.
        loss: Policy loss: the name of a function in `af.losses`, or a function (logprobs, old_logprobs, advantages,
            mask) -> (B, T) of per-token losses.
        aggregate: How per-token losses are reduced to one number: a mode of `af.losses.aggregate`, or a dict of its
            options, such as {"how": "trajectory_mean", "count": "rows"}.
        denominator: Number of tokens by which aggregate="fixed" divides each row. Required by that mode and rejected by
            all others, for which it is None.
        clip: Clip range of the probability ratio below 1, as far as the loss takes one. None is the default of the
            loss: 0.2 for "ppo".
        clip_high: Clip range of the probability ratio above 1 (clip-higher of DAPO). None is the default of the loss:
            for "ppo", the same as `clip`.
        dual_clip: Bound on the loss of a token with a negative advantage A: at most dual_clip * |A|; must be above 1.
            None sets no bound.
        value_coef: Coefficient of the value loss. Used only with a value head and an estimator that gives returns
            ("gae").
        value_clip: Range, in units of reward, within which the value loss clips a new value around the value before the
            update. None does not clip.
        kl_coef: Coefficient of the KL penalty towards the reference policy. 0 uses no reference. The reference is the
            policy as it was before the first iteration; for a policy with an adapter, it is the base model.
        kl_kind: Estimator of the KL in the loss and in the statistics: "k1", "abs", "k2", "k3" or "k3+"; see
            `af.losses.kl`.
        kl_in: Where the KL penalty is applied: "loss" adds it to the loss; "reward" subtracts the "k1" estimate from
            the reward of each token before advantages are computed. An outcome estimator then sees the sum over the
            chain.
        kl_weighted: Whether to multiply the KL of each token by its ratio to the old policy, which makes the KL and its
            gradient unbiased on samples of that policy. Applies to kl_in="loss".
        kl_target: Target KL to the reference policy, in nats per token. The coefficient then starts at `kl_coef` and is
            adapted after each iteration; see `af.losses.adaptive_kl_coef`. None keeps the coefficient fixed.
        kl_horizon: Number of trajectories over which the KL coefficient adapts; a larger number adapts more slowly.
            Used only with `kl_target`.
        entropy_coef: Coefficient of the entropy bonus, which is subtracted from the loss. 0 adds none.
        max_grad_norm: Norm to which gradients are clipped before each update. None does not clip.
        target_kl: Limit of the approximate KL between the old and the new policy, in nats per token: once an update
            exceeds it, the iteration makes no further updates. None sets no limit.
        max_kl: Limit of the approximate KL, in nats per token, above which an iteration counts as diverged: the run
            ends with a TrainingError, the iteration is not recorded, and the policy gets back the weights of the last
            checkpoint. None sets no limit. A smaller update can destroy the policy too; the run therefore also warns
            once when the mean reward has stayed below half of its best value for 3 steps in a row. With `difficulty` it
            does not, because harder tasks lower the reward by themselves.
        micro_tokens: Number of padded tokens in one forward pass. It bounds the memory and changes nothing else. None
            is the choice of the policy: 1,536 on a CPU, 32,768 on a GPU.
        old_logprobs: Log-probabilities in the denominator of the probability ratio: those recorded by the engine
            ("engine"), those of the policy before the first update ("recompute"), or the engine's if they come from the
            current policy version and a check finds that they agree ("auto"); see `af.ppo_step`. With `overlap=1`,
            "auto" means "engine" without a `correction` and "recompute" with one.
        correction: Importance weights that correct for the difference between the trained policy and the sampler:
            "token", "sequence", or a dict of options of `af.losses.importance_weights`. Required when the agent samples
            with top_p, top_k or min_p. None applies none.
        overlap: 1 samples the chains of the next iteration while the current one updates the weights, so that they come
            from the weights before the update (one step off-policy); a `LocalEngine` then samples from a copy of the
            policy. 0 alternates sampling and updating.
        filters: Functions that select chains to exclude from training, such as those in `af.filters`; each gives a
            reason. An excluded chain is treated as unscored.
        refill: Maximum number of times per iteration that further tasks are sampled to replace groups of which
            `filters` left nothing, until `tasks_per_step` groups remain (dynamic sampling of DAPO). Requires `filters`.
            0 trains on what is left.
        autocast: "bfloat16" runs the model in bfloat16; weights, losses and the optimizer keep their own dtype. None
            runs it in the dtype of its weights.
        checkpointing: Whether to recompute the activations inside layers in the backward pass instead of keeping them,
            which saves memory and costs time.
        truncated: How to treat chains that a limit cut off: "score" trains on them like any other; "mask" excludes
            their rows after the advantages were computed; "penalty" first subtracts `truncated_penalty` from their
            reward; "bootstrap" adds the value of the state in which they were cut, and requires advantage="gae". See
            `af.collate`.
        truncated_penalty: Amount that truncated="penalty" subtracts from the reward of a truncated chain, in units of
            reward.
        max_concurrency: Maximum number of chains that run at the same time, in training and in evaluation.
        budget: Limit that the chains of an iteration share. Chains that it prevents from starting are not trained on.
            None sets no limit.
        group_budget: Limit that the chains of one group share. None sets no limit.
        evaluate_every: Number of iterations between evaluations on the `eval_tasks=` of `af.train`, which are then
            required; the last iteration is evaluated as well. 0 never evaluates.
        checkpoint_every: Number of iterations between checkpoints; the last iteration writes one as well.
        save_rollouts: Whether to save every training rollout in the folder of the run.
        seed: Seed of the order of the tasks and of the minibatches. Chains are seeded by `Agent.seed`.
    """

    steps: int = 24
    tasks_per_step: int = 16
    group_size: int = 8
    advantage: str | Callable[..., Tensor] = "grpo"
    advantage_per: AdvantagePer = "trajectory"
    authors: tuple[str, ...] | str | None = None
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    difficulty: str | Callable[[Task], float] | None = None
    lr: float = 3e-4
    lr_end: float | None = 3e-5
    minibatch: int | None = 32
    epochs: int = 2
    loss: LossName | Callable[..., Tensor] = "ppo"
    aggregate: Aggregate = "token_mean"
    denominator: float | None = None
    clip: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: losses.KLKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    kl_target: float | None = None
    kl_horizon: float = 10_000
    entropy_coef: float = 0.0
    max_grad_norm: float | None = 1.0
    target_kl: float | None = None
    max_kl: float | None = 10.0
    micro_tokens: int | None = None
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    correction: Correction | None = None
    overlap: Literal[0, 1] = 0
    filters: list[Filter] | tuple[Filter, ...] = ()
    refill: int = 0
    autocast: Literal["bfloat16"] | None = None
    checkpointing: bool = False
    truncated: TruncationMode = "score"
    truncated_penalty: float = 0.5
    max_concurrency: int = 128
    budget: Budget | None = None
    group_budget: Budget | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 1
    save_rollouts: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "group_size", "epochs", "checkpoint_every", "max_concurrency"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: give at least 1")
        if not callable(self.advantage) and self.advantage not in (
            *OUTCOME_ESTIMATORS,
            *TURN_ESTIMATORS,
            *TOKEN_ESTIMATORS,
        ):
            known = ", ".join((*OUTCOME_ESTIMATORS, *TURN_ESTIMATORS, *TOKEN_ESTIMATORS))
            raise SettingsError(f"advantage={self.advantage!r}: give one of {known}, or a function")
        if self.truncated == "bootstrap" and self.advantage != "gae":
            raise SettingsError(f"truncated='bootstrap' needs values, so advantage='gae'; got {self.advantage!r}")
        if self.kl_target is not None and not (self.kl_target > 0 and self.kl_coef > 0):
            raise SettingsError(
                f"kl_target={self.kl_target} with kl_coef={self.kl_coef}: both are above 0, the coefficient is where "
                "it starts"
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SettingsError(f"lr={self.lr}: give a positive number")
        if self.minibatch is not None and self.minibatch < 1:
            raise SettingsError(f"minibatch={self.minibatch}: give at least 1 trajectory, or None for all of them")
        for name in ("value_coef", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name}={getattr(self, name)}: give 0 or more")
        if self.overlap not in (0, 1):
            raise SettingsError(f"overlap={self.overlap!r}: give 0, or 1 for one rollout ahead of the update")
        for name in ("budget", "group_budget"):
            if not isinstance(getattr(self, name), Budget | None):
                wanted = "give an af.Budget(tokens=, turns=, tool_calls=, seconds=)"
                raise SettingsError(f"{name}={getattr(self, name)!r}: {wanted}")
        if self.max_kl is not None and not self.max_kl > 0:
            raise SettingsError(f"max_kl={self.max_kl}: give nats a token above 0, or None for no limit")
        if self.old_logprobs not in ("auto", "engine", "recompute"):
            raise SettingsError(f"old_logprobs={self.old_logprobs!r}: give 'auto', 'engine' or 'recompute'")
        given: Any = self.filters
        if not isinstance(given, list | tuple):
            wanted = "give a list of functions, such as [af.filters.equal_rewards]"
            raise SettingsError(f"filters={given!r}: {wanted}")
        for each in self.filters:
            is_group_filter(each)
        if self.refill < 0 or (self.refill and not self.filters):
            raise SettingsError(
                f"refill={self.refill} with {len(self.filters)} filters: give a number of rounds, and in filters= what "
                "a group is left out for, such as af.filters.equal_rewards"
            )
        aggregate_options(self.aggregate, self.denominator)
        if self.advantage_per == "row" and self.advantage in TURN_ESTIMATORS:
            raise SettingsError(f"advantage_per='row' with advantage={self.advantage!r}: it sees whole chains already")
        if self.advantage_per == "row" and self.kl_in == "reward" and self.kl_coef > 0:
            raise SettingsError("advantage_per='row' with kl_in='reward': a chain pays as a whole; give kl_in='loss'")
        for name, kind in (
            ("loss", LossName),
            ("truncated", TruncationMode),
            ("advantage_per", AdvantagePer),
        ):
            value = getattr(self, name)
            if not callable(value) and value not in get_args(kind):
                raise SettingsError(f"{name}={value!r}: give one of {', '.join(map(repr, get_args(kind)))}")

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with other settings.

        Args:
            changes: New values by setting.

        Raises:
            SettingsError: If a value is invalid.
        """
        return dataclasses.replace(self, **changes)
