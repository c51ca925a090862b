"""Settings of a training run, validated on construction."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from agentfly_kit import advantages
from agentfly_kit.advantages.outcomes import RowCredit
from agentfly_kit.advantages.turns import Attribution
from agentfly_kit.agent.budget import Budget
from agentfly_kit.batch.collate import AdvantagePer, TruncationMode
from agentfly_kit.batch.filters import Filter, is_group_filter
from agentfly_kit.errors import SettingsError, check_accepts, check_instance, checks_keywords
from agentfly_kit.ppo.config import PPOConfig
from agentfly_kit.trainer.run_dir import KeepPolicies
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.agent.branching import Branch

OUTCOME_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "maxrl")
# Outcome estimators that need further inputs, and "none", which sets all advantages to 0.
_EXTENDED_ESTIMATORS = ("opo", "gdpo", "remax", "none")
TURN_ESTIMATORS = ("gigpo", "arpo")
_WHITENED_ESTIMATORS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
TOKEN_ESTIMATORS = (*_WHITENED_ESTIMATORS, "optimal_token_baseline")
# Estimators that use turn rewards ("gdpo" uses them as metrics), and "none", which uses no rewards.
SEE_TURN_REWARDS = (*TOKEN_ESTIMATORS, "gigpo", "gdpo", "none")
# Estimators that compare the chains of a group. They give a single chain the advantage 0.
GROUP_ESTIMATORS = (
    *OUTCOME_ESTIMATORS, *TURN_ESTIMATORS, "opo", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline",
)  # fmt: skip
# Settings that only some estimators use, with the names of these estimators.
_READ_BY = {
    "gamma": ("gae", "reinforce_plus_plus", "gigpo"),
    "lam": ("gae",),
    "whiten": _WHITENED_ESTIMATORS,
    "value_coef": ("gae",),
    "value_clip": ("gae",),
    "attribution": ("arpo",),
}


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class TrainConfig(PPOConfig):
    """Settings of a training run. An iteration is a rollout followed by a `ppo_step`; an update is an optimizer step.

    Includes all settings of `PPOConfig`, with different defaults for `epochs`, `minibatch` and `max_lag`. The reference
    policy for the KL penalty is the policy before the first iteration, or the base model if the policy has an adapter.

    Args:
        steps: Number of iterations of the run.
        tasks_per_step: Number of tasks sampled in each iteration.
        group_size: Number of chains sampled for each task, which form a group.
        branch: Settings for sampling each group as a tree; see `af.Branch`. If None, chains are independent.
        advantage: Advantage estimator: "grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "maxrl", "opo", "gdpo", "remax",
            "gigpo", "arpo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline", or
            the function with one of these names in `af.advantages`. Any other function must map rewards (N,) and groups
            (N,) to advantages of shape (N,), or (N, K) for one advantage per sampled turn (see `turn_data`). "gae"
            requires a policy with a value head, and "gdpo" an agent with several rewards. "remax" runs an additional
            greedy chain for each task. "none" sets all advantages to 0, for training with `teacher_coef` only.
        attribution: How "arpo" credits turns that several chains have in common: "soft", "hard" or "inverse_branching";
            see `af.advantages.arpo`.
        teacher_coef: Coefficient of on-policy distillation. This multiple of log p(teacher) - log p(sampler) is added
            to the advantage of each token, to reduce the reverse KL to the `teacher=` of `train`. 0 disables
            distillation.
        advantage_per: How outcome estimators count a chain that has several rows: as one member of its group
            ("trajectory"), or as one member per row ("row").
        sum_turn_rewards: Whether to add the turn rewards of a chain to its reward. By default, a run with turn rewards
            is rejected unless its estimator uses them, as "gigpo", "gdpo" and token-level estimators do.
        row_credit: How the advantage of a chain is distributed over its rows: "broadcast", "last", "uniform" or
            "geometric"; see `af.advantages.row_credit`. Only for outcome estimators with advantage_per="trajectory".
        row_discount: Discount factor for row_credit="geometric", applied to the advantage of a row for each later row.
        authors: Authors whose sampled tokens are trained on, such as names of roles (see `Turn.author`); None for all.
        gamma: Discount factor for rewards, used by "gae", "reinforce_plus_plus" and "gigpo".
        lam: Lambda of generalized advantage estimation, used by "gae".
        whiten: Whether to normalize token-level advantages to mean 0 and standard deviation 1 over the sampled tokens
            of the batch, for "gae", "reinforce_plus_plus" and "reinforce_plus_plus_baseline".
        difficulty: Name of a task field, or function of a task, that gives the task's difficulty as a number. In each
            pass, tasks are sorted by increasing difficulty, and tasks of equal difficulty are shuffled. None shuffles
            all tasks.
        lr: Learning rate in the first iteration. The learning rate of a value head is ten times as high.
        lr_end: Learning rate in the last iteration; the rate changes linearly in between. None keeps `lr` throughout.
        lr_warmup: Number of iterations at the start in which the learning rate is lower and rises linearly. Without
            warmup, AdamW's first updates are as large as the learning rate even if the gradient is uncertain, which can
            harm an adapter.
        kl_target: Target KL divergence from the reference policy, in nats per token. The KL coefficient starts at
            `kl_coef` and is adapted after each iteration; see `af.losses.adaptive_kl_coef`. None keeps it fixed.
        kl_horizon: Number of trajectories over which `kl_target` adapts the coefficient.
        max_kl: Maximum approximate KL of an iteration, in nats per token. If it is exceeded, the run ends with a
            TrainingError, the iteration is not recorded, and the weights of the last checkpoint are restored. None sets
            no limit. Regardless of this limit, a run without `difficulty` warns once if the mean reward stays below
            half of its best value for 3 consecutive iterations.
        overlap: Number of iterations whose chains are sampled during the update of the current one. 0 alternates
            sampling and updates. With 1, chains are one iteration off-policy. With k > 1, they have k iterations to
            finish, so that a few long chains do not delay the updates; they are up to k iterations off-policy. A
            `LocalEngine` samples them from k copies of the policy, with the weights at their start; other engines go on
            with each new version. At most 1 with `train(workers=)`. old_logprobs="auto" then means "recompute" if
            `correction` is set, otherwise "engine".
        filters: Functions, such as those in `af.filters`, that return the reason to exclude a chain, or None. Excluded
            chains are treated as unscored.
        refill: Maximum number of times per iteration that additional tasks are sampled to replace groups with no
            remaining chain, until `tasks_per_step` groups remain (dynamic sampling, as in DAPO).
        truncated: How to treat chains that were truncated by a limit. "score" trains on them like any other chain;
            "mask" excludes their rows after computing advantages; "penalty" subtracts `truncated_penalty` from their
            reward; "bootstrap", with advantage="gae", adds the value of the state in which they were cut to their
            return.
        truncated_penalty: Amount subtracted from the reward with truncated="penalty".
        max_concurrency: Maximum number of chains that run concurrently, in training and in evaluation.
        budget: Limits shared by all chains of an iteration. Chains that cannot start within these limits are skipped.
        group_budget: Limits shared by the chains of each group.
        evaluate_every: Number of iterations between evaluations on the `eval_tasks=` of `af.train`. The last iteration
            is always evaluated. 0 disables evaluation.
        checkpoint_every: Number of iterations between checkpoints. A checkpoint is always written after the last one.
        keep: Policies to keep in the folder of the run in addition to the last two checkpoints: "best" keeps the policy
            with the highest success in an evaluation, "all" keeps the policies of all checkpoints and evaluations, and
            "last" keeps none. With AdamW and without `lora`, a checkpoint is three times as large as the policy alone.
        save_rollouts: Whether to save every training rollout in the folder of the run.
        seed: Seed for the order of tasks and minibatches. Chains are seeded by `Agent.seed`.

    Raises:
        SettingsError: If a value is invalid, if settings contradict each other, or if a setting that differs from its
            default has no effect.
    """

    epochs: int = 2
    minibatch: int | None = 32
    max_lag: int | None = None
    steps: int = 24
    tasks_per_step: int = 16
    group_size: int = 8
    branch: Branch | None = None
    advantage: str | Callable[..., Tensor] = "grpo"
    attribution: Attribution = "soft"
    teacher_coef: float = 0.0
    advantage_per: AdvantagePer = "trajectory"
    sum_turn_rewards: bool = False
    row_credit: RowCredit = "broadcast"
    row_discount: float = 0.9
    authors: tuple[str, ...] | str | None = None
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    difficulty: str | Callable[[Task], float] | None = None
    lr: float = 3e-4
    lr_end: float | None = None
    lr_warmup: int = 0
    kl_target: float | None = None
    kl_horizon: float = 10_000
    max_kl: float | None = 10.0
    overlap: int = 0
    filters: list[Filter] | tuple[Filter, ...] = ()
    refill: int = 0
    truncated: TruncationMode = "score"
    truncated_penalty: float = 0.5
    max_concurrency: int = 128
    budget: Budget | None = None
    group_budget: Budget | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 1
    keep: KeepPolicies = "best"
    save_rollouts: bool = False
    seed: int = 0

    _limits: ClassVar[Mapping[str, Any]] = {
        **PPOConfig._limits,
        "steps": "of at least 1",
        "tasks_per_step": "of at least 1",
        "group_size": "of at least 1",
        "attribution": Attribution,
        "teacher_coef": "of at least 0",
        "advantage_per": AdvantagePer,
        "row_credit": RowCredit,
        "row_discount": "of at least 0 and at most 1",
        "lr": "above 0",
        "lr_end": "of at least 0",
        "lr_warmup": "of at least 0",
        "kl_target": "above 0",
        "kl_horizon": "above 0",
        "max_kl": "above 0",
        "overlap": "of at least 0",
        "refill": "of at least 0",
        "truncated": TruncationMode,
        "max_concurrency": "of at least 1",
        "checkpoint_every": "of at least 1",
        "keep": KeepPolicies,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        # Check the advantage first, because the other checks depend on the name of the estimator.
        self._check_advantage()
        self._check_effects()
        check_instance("filters", self.filters, list | tuple, "a list of functions, such as af.filters.equal_rewards")
        for each in self.filters:
            is_group_filter(each)
        names: Any = ("one name",) if isinstance(self.authors, str | None) else self.authors
        if not (isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names)):
            raise SettingsError(f"authors must be a name, a tuple of names, or None for all, got {self.authors!r}")
        if not isinstance(self.difficulty, str | None):
            check_accepts("difficulty", self.difficulty, "task")
        # Reject combinations in which a setting would be ignored or an estimator would lack its inputs.
        name = self.advantage
        shaped = self.kl_in == "reward" and self.kl_coef > 0
        whole = (*_EXTENDED_ESTIMATORS, *TURN_ESTIMATORS, *TOKEN_ESTIMATORS)
        conflicts = [
            (
                name == "none" and self.teacher_coef == 0,
                "teacher_coef must be above 0 with advantage='none', got 0",
            ),
            (
                self.truncated == "bootstrap" and name != "gae",
                f"truncated='bootstrap' needs the values of advantage='gae', got {name!r}",
            ),
            (
                self.truncated == "penalty" and name == "none",
                "truncated='penalty' has no effect with advantage='none'; use 'score' or 'mask'",
            ),
            (
                name == "gdpo" and (self.truncated == "penalty" or shaped),
                "advantage='gdpo' needs unmodified rewards; use truncated='score' and kl_in='loss'",
            ),
            (
                name == "remax" and self.overlap > 0,
                "overlap must be 0 for advantage='remax', so that all chains use the same weights",
            ),
            (
                self.advantage_per == "row" and name in whole,
                f"advantage_per must be 'trajectory' for advantage={name!r}, which requires whole chains",
            ),
            (
                self.advantage_per == "row" and shaped,
                "advantage_per must be 'trajectory' for kl_in='reward', whose penalty is summed over all rows of a "
                "chain; use kl_in='loss'",
            ),
        ]
        for wrong, text in conflicts:
            if wrong:
                raise SettingsError(text)

    def _check_advantage(self) -> None:
        """Raise SettingsError unless `advantage` is the name of an estimator or a function of rewards and groups."""
        given: Any = self.advantage
        inner = given.func if isinstance(given, functools.partial) else given
        name = getattr(inner, "__name__", str(inner))
        if not callable(given) or inner is getattr(advantages, name, None):
            known = (
                OUTCOME_ESTIMATORS
                if inner is not given
                else OUTCOME_ESTIMATORS + _EXTENDED_ESTIMATORS + TURN_ESTIMATORS + TOKEN_ESTIMATORS
            )
            if name not in known:
                raise SettingsError(
                    f"advantage must be one of {', '.join(map(repr, known))}, or a function of rewards and groups, got "
                    f"{name!r}; trajectory_level is applied by default, with advantage_per='trajectory'"
                )
            if inner is given:
                object.__setattr__(self, "advantage", name)
                return
        check_accepts("advantage", given, "rewards", "groups")
        if inner is getattr(advantages, name, None):
            given([0.0, 1.0], [0, 0])  # checks the options

    def _check_effects(self) -> None:
        """Raise SettingsError if a setting that differs from its default has no effect."""
        conditions = {
            "kl_target": ("with kl_coef above 0", self.kl_coef > 0),
            "kl_horizon": ("with kl_target", self.kl_target is not None),
            "refill": ("with filters", bool(self.filters)),
            "sum_turn_rewards": (
                "with estimators that compare the rewards of whole chains",
                self.advantage not in SEE_TURN_REWARDS,
            ),
            "row_credit": (
                "with outcome estimators and advantage_per='trajectory'",
                self.advantage_per == "trajectory"
                and self.advantage not in ("none", *TURN_ESTIMATORS, *TOKEN_ESTIMATORS),
            ),
            "row_discount": ("with row_credit='geometric'", self.row_credit == "geometric"),
            "truncated_penalty": ("with truncated='penalty'", self.truncated == "penalty"),
            "kl_kind": ("with kl_coef above 0", self.kl_coef > 0),
            "kl_in": (
                "with kl_coef above 0 and advantages other than 'none'",
                self.kl_coef > 0 and self.advantage != "none",
            ),
            "kl_weighted": ("with kl_in='loss' and kl_coef above 0", self.kl_coef > 0 and self.kl_in == "loss"),
        }
        for name, estimators in _READ_BY.items():
            conditions[name] = f"with advantage {' or '.join(map(repr, estimators))}", self.advantage in estimators
        for name, (where, met) in conditions.items():
            if not met and (value := getattr(self, name)) != (default := getattr(TrainConfig, name)):
                raise SettingsError(f"{name} has an effect only {where}; leave it at {default!r}, got {value!r}")


# Add the inherited settings to the docstring, so that `TrainConfig?` shows them in a notebook.
_inherited = (inspect.getdoc(PPOConfig) or "").split("Args:\n")[1].split("\nRaises:")[0]
TrainConfig.__doc__ = f"{inspect.getdoc(TrainConfig)}\n\nSettings of each step:\n\nArgs:\n{_inherited}"
