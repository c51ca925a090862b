"""What a training run is told: every setting, checked where it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from agentfly_kit import losses
from agentfly_kit.agent.budget import Budget
from agentfly_kit.batch.batch import AdvantagePer, TruncationMode
from agentfly_kit.batch.filters import Filter, is_group_filter
from agentfly_kit.errors import SettingsError
from agentfly_kit.ppo import Aggregate, Correction, LossName, aggregate_options
from agentfly_kit.types import Task

OUTCOME_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
TURN_ESTIMATORS = ("gigpo", "arpo")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. An iteration is one rollout and one `ppo_step`; an update is one optimizer step."""

    steps: int = 24
    """Iterations."""
    tasks_per_step: int = 16
    group_size: int = 8
    """Chains a task."""
    advantage: str | Callable[..., Tensor] = "grpo"
    """"grpo", "dr_grpo", "rloo", "gigpo", "arpo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"; or a
    function (rewards (N,), groups (N,)) -> (N,), or -> (N, K) for each sampled turn (`turn_data`)."""
    advantage_per: AdvantagePer = "trajectory"
    """For an estimator of outcomes: a chain of several rows is one in its group, or ("row") as many as it has rows."""
    authors: tuple[str, ...] | str | None = None
    """Whose tokens are trained, where the policy samples in the name of several roles; None is all."""
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    """Whiten token-level advantages over the sampled tokens of the batch (gae, reinforce_plus_plus)."""
    difficulty: str | Callable[[Task], float] | None = None
    """A task field, or a function of a task: each pass over the tasks goes from the lowest to the highest, and only
    tasks of one difficulty are shuffled. None shuffles all."""
    lr: float = 3e-4
    lr_end: float | None = 3e-5
    """Reached linearly at the last iteration; None keeps `lr`."""
    minibatch: int | None = 32
    """Trajectories an update, each with all its rows."""
    epochs: int = 2
    loss: LossName | Callable[..., Tensor] = "ppo"
    aggregate: Aggregate = "token_mean"
    denominator: float | None = None
    clip: float | None = None
    """None is the loss's own: 0.2 for "ppo"."""
    clip_high: float | None = None
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: losses.KLKind = "k3"
    """The reference is the policy as it was before the first iteration; under an adapter, its base."""
    kl_in: Literal["loss", "reward"] = "loss"
    """"reward" takes it from each token's reward before the advantages; an outcome estimator sees its sum."""
    kl_weighted: bool = False
    kl_target: float | None = None
    """nats a token: `kl_coef` is then only where the coefficient starts; see `losses.adaptive_kl_coef`."""
    kl_horizon: float = 10_000
    """Trajectories over which the coefficient adapts."""
    entropy_coef: float = 0.0
    max_grad_norm: float | None = 1.0
    target_kl: float | None = None
    """nats a token: an iteration makes no further update once one exceeded it."""
    max_kl: float | None = 10.0
    """nats a token: an iteration whose approx_kl exceeds it has diverged. It ends the run with a TrainingError, is not
    kept, and the weights go back to the last checkpoint. None keeps whatever comes. A smaller update can destroy the
    policy too: a run warns once when the mean reward stayed below half of its best value for 3 steps in a row. Not
    with `difficulty`, where harder tasks lower the reward by themselves."""
    micro_tokens: int | None = None
    old_logprobs: Literal["auto", "engine", "recompute"] = "auto"
    """The ratio's denominator; see `ppo_step`. With `overlap`, "auto" is "engine" without a correction, and
    "recompute" with one."""
    correction: Correction | None = None
    """Importance weights of trainer over sampler; see `ppo_step`."""
    overlap: Literal[0, 1] = 0
    """1: while an iteration updates the weights, the next one's chains are sampled with those from before (one step off
    policy; a `LocalEngine` samples them from a copy of the policy). 0 does one after the other."""
    filters: list[Filter] | tuple[Filter, ...] = ()
    """What is not trained on and why, in the words of `af.filters`: such a chain is left out as if it were unscored."""
    refill: int = 0
    """DAPO's dynamic sampling: up to so many times an iteration, other tasks are sampled for the groups of which
    `filters` left nothing, until there are `tasks_per_step` with something to learn from. 0 trains on what is left."""
    autocast: Literal["bfloat16"] | None = None
    checkpointing: bool = False
    truncated: TruncationMode = "score"
    """What a chain that a limit cut is worth; see `collate`. "bootstrap" needs advantage="gae"."""
    truncated_penalty: float = 0.5
    """Taken from its reward by truncated="penalty"."""
    max_concurrency: int = 128
    budget: Budget | None = None
    """What the chains of an iteration may spend together; those that it kept from beginning are not trained on."""
    group_budget: Budget | None = None
    """The same for the chains of one task."""
    evaluate_every: int = 0
    """Iterations; 0 is never. Needs `eval_tasks=`."""
    checkpoint_every: int = 1
    save_rollouts: bool = False
    """Keep every training rollout in the run's folder."""
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
        return dataclasses.replace(self, **changes)
