"""Settings of a training run, validated on construction."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from agentfly_kit.agent.budget import Budget
from agentfly_kit.batch.collate import AdvantagePer, TruncationMode
from agentfly_kit.batch.filters import Filter, is_group_filter
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo.config import PPOConfig, check_at_least, check_choice
from agentfly_kit.types import Task

OUTCOME_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
TURN_ESTIMATORS = ("gigpo", "arpo")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PPOConfig):
    """Settings of a training run. An iteration is one rollout and one `ppo_step`; an update is one optimizer step.

    Takes all settings of `PPOConfig`, with other defaults for `epochs`, `minibatch` and `max_lag`. The reference of the
    KL penalty is the policy as it was before the first iteration; for a policy with an adapter, it is the base model.

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
        kl_target: Target KL to the reference policy, in nats per token. The coefficient then starts at `kl_coef` and is
            adapted after each iteration; see `af.losses.adaptive_kl_coef`. None keeps the coefficient fixed.
        kl_horizon: Number of trajectories over which the KL coefficient adapts; a larger number adapts more slowly.
            Used only with `kl_target`.
        max_kl: Limit of the approximate KL, in nats per token, above which an iteration counts as diverged: the run
            ends with a TrainingError, the iteration is not recorded, and the policy gets back the weights of the last
            checkpoint. None sets no limit. A smaller update can destroy the policy too; the run therefore also warns
            once when the mean reward has stayed below half of its best value for 3 steps in a row. With `difficulty` it
            does not, because harder tasks lower the reward by themselves.
        overlap: 1 samples the chains of the next iteration while the current one updates the weights, so that they come
            from the weights before the update (one step off-policy); a `LocalEngine` then samples from a copy of the
            policy, and old_logprobs="auto" means "engine" without a `correction` and "recompute" with one. 0 alternates
            sampling and updating.
        filters: Functions that select chains to exclude from training, such as those in `af.filters`; each gives a
            reason. An excluded chain is treated as unscored.
        refill: Maximum number of times per iteration that further tasks are sampled to replace groups of which
            `filters` left nothing, until `tasks_per_step` groups remain (dynamic sampling of DAPO). Requires `filters`.
            0 trains on what is left.
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

    Raises:
        SettingsError: If a value is invalid, or settings contradict each other.
    """

    epochs: int = 2
    minibatch: int | None = 32
    max_lag: int | None = None
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
    kl_target: float | None = None
    kl_horizon: float = 10_000
    max_kl: float | None = 10.0
    overlap: Literal[0, 1] = 0
    filters: list[Filter] | tuple[Filter, ...] = ()
    refill: int = 0
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
        super().__post_init__()
        check_at_least(self, 1, "steps", "tasks_per_step", "group_size", "checkpoint_every", "max_concurrency")
        check_at_least(self, 0, "refill")
        check_choice(self, "overlap", 0, 1)
        check_choice(self, "truncated", *get_args(TruncationMode))
        check_choice(self, "advantage_per", *get_args(AdvantagePer))
        if not callable(self.advantage):
            check_choice(self, "advantage", *OUTCOME_ESTIMATORS, *TURN_ESTIMATORS, *TOKEN_ESTIMATORS)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SettingsError(f"lr must be a positive number, got {self.lr}")
        if self.max_kl is not None and not self.max_kl > 0:
            raise SettingsError(f"max_kl must be above 0, or None for no limit, got {self.max_kl}")
        if self.kl_target is not None and not (self.kl_target > 0 and self.kl_coef > 0):
            raise SettingsError(
                f"kl_target and the initial kl_coef must be above 0, got kl_target={self.kl_target} with "
                f"kl_coef={self.kl_coef}"
            )
        for name in ("budget", "group_budget"):
            if not isinstance(value := getattr(self, name), Budget | None):
                raise SettingsError(f"{name} must be an af.Budget, such as af.Budget(tokens=1000), got {value!r}")
        filters: Any = self.filters
        if not isinstance(filters, list | tuple):
            raise SettingsError(
                f"filters must be a list of functions, such as af.filters.equal_rewards, got {filters!r}"
            )
        for each in filters:
            is_group_filter(each)
        if self.refill and not filters:
            raise SettingsError(f"refill={self.refill} needs filters=, such as [af.filters.equal_rewards]")
        if self.truncated == "bootstrap" and self.advantage != "gae":
            raise SettingsError(f"truncated='bootstrap' needs the values of advantage='gae', got {self.advantage!r}")
        if self.advantage_per == "row" and self.advantage in TURN_ESTIMATORS:
            raise SettingsError(
                f"advantage_per must be 'trajectory' for advantage={self.advantage!r}, which sees whole chains"
            )
        if self.advantage_per == "row" and self.kl_in == "reward" and self.kl_coef > 0:
            raise SettingsError(
                "advantage_per must be 'trajectory' for kl_in='reward', which is summed over a chain; use kl_in='loss'"
            )


# `TrainConfig?` in a notebook shows this docstring: add the settings that are inherited.
_inherited = (inspect.getdoc(PPOConfig) or "").split("Args:\n")[1].split("\nRaises:")[0]
TrainConfig.__doc__ = f"{inspect.getdoc(TrainConfig)}\n\nSettings of each step:\n\nArgs:\n{_inherited}"
