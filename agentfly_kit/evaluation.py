"""Evaluation of an agent on tasks: success rate with a confidence interval, and cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.request import GroupWorkers
from agentfly_kit.agent.rollout import Rollout, RolloutDiff
from agentfly_kit.agent.settings import task_list
from agentfly_kit.errors import SettingsError
from agentfly_kit.samples import Sampling
from agentfly_kit.success import pass_at_k, success_interval
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task


@dataclass(frozen=True)
class Evaluation(Displayable):
    """Results of an evaluation. Success is defined by `Trajectory.success`.

    Attributes:
        success: Fraction of the scored chains of a task that succeeded, averaged over tasks.
        low, high: Bounds of the 95 % confidence interval for `success`, which accounts for the dependence between
            chains of the same task; see `success_interval`.
        pass_at_k: Unbiased estimate of the probability that at least one of k chains solves a task, for k = 1, 2, 4,
            ..., `samples`. It is averaged over tasks with at least k scored chains, and omitted if there are none.
        tasks_at_k: Number of tasks with at least k scored chains.
        reward: Mean reward of the scored chains.
        tasks, samples: Number of tasks with at least one scored chain, and number of chains per task.
        turns, calls, tokens: Mean numbers of actions, tool calls and sampled tokens per chain. `tokens` is NaN for
            text-only engines.
        unscored, truncated: Fractions of chains without a reward, and of chains truncated by a limit.
        greedy: Whether the most probable tokens were chosen instead of sampling.
        metrics: Mean of each metric over the scored chains that report it.
        seconds: Wall-clock time of the rollouts.
        rollout: The evaluated chains.
    """

    success: float
    low: float
    high: float
    pass_at_k: dict[int, float] = field(hash=False)
    tasks_at_k: dict[int, int] = field(hash=False)
    reward: float
    tasks: int
    samples: int
    turns: float
    calls: float
    tokens: float
    unscored: float
    truncated: float
    greedy: bool
    metrics: dict[str, float] = field(hash=False)
    seconds: float = field(compare=False)
    rollout: Rollout = field(repr=False, compare=False)

    def summary(self) -> dict[str, float]:
        """Return all statistics that are not NaN. `tasks@k` is omitted if all tasks have at least k scored chains."""
        names = ("success", "low", "high", "reward", "turns", "calls", "tokens", "unscored", "truncated")
        numbers = {n: v for n in names if not math.isnan(v := getattr(self, n))}
        numbers |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
        return numbers | {f"tasks@{k}": n for k, n in self.tasks_at_k.items() if n < self.tasks}

    def diff(self, other: Evaluation) -> RolloutDiff:
        """Compare this evaluation with a later one of the same tasks, using a paired test; see `Rollout.diff`."""
        return self.rollout.diff(other.rollout)

    def __iter__(self) -> Iterator[Trajectory]:
        """Iterate over the evaluated chains."""
        return iter(self.rollout)

    def __repr__(self) -> str:
        parts = [
            f"success {self.success:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})",
            "greedy" if self.greedy else "sampled",
            f"{self.tasks} tasks x {self.samples}",
        ]
        if len(self.pass_at_k) > 1:
            k = max(self.pass_at_k)
            among = f" (of {self.tasks_at_k[k]} tasks)" if self.tasks_at_k[k] < self.tasks else ""
            parts.append(f"pass@{k} {self.pass_at_k[k]:.3f}{among}")
        parts += [f"{self.turns:.1f} turns", f"{self.calls:.1f} calls"]
        if self.rollout.unscored_reason:
            parts.append(self.rollout.unscored_reason)
        return f"Evaluation({', '.join(parts)})"


@pending_call
async def evaluate(
    agent: Agent,
    tasks: Iterable[Task],
    group_size: int = 1,
    *,
    sampling: Sampling | None = None,
    seeds: Sequence[int] = (0,),
    max_concurrency: int = 64,
    greedy: bool = False,
    budget: Budget | None = None,
    group_budget: Budget | None = None,
    workers: GroupWorkers | None = None,
) -> Evaluation:
    """Run `group_size` chains of each task for each seed, and compute the success rate and other statistics.

    `Agent(success=)` defines whether a chain succeeds. By default, a chain succeeds if its metric "success" is nonzero
    or, if there is no such metric, if its reward is at least 1.

    Args:
        agent: the agent to evaluate, which must have a reward.
        tasks: the tasks.
        group_size: number of chains per task and seed.
        sampling: sampling parameters to use instead of the agent's parameters.
        seeds: distinct seeds, one per rollout. Evaluations never use the seeds of training rollouts.
        max_concurrency: maximum number of chains that run concurrently.
        greedy: whether to choose the most probable token instead of sampling. Greedy and sampled results are not
            comparable.
        budget: limits shared by all chains of a seed. Chains that cannot start because of the budget are listed in
            `evaluation.rollout.not_run` and are not evaluated.
        group_budget: limits shared by the chains of one task and seed.
        workers: worker processes that run the groups, created by `af.ray.workers`. If None, this process runs them.

    Raises:
        SettingsError: if the agent has no reward, no chain was scored, or `seeds` is empty or has duplicates.
    """
    given = task_list(tasks)
    if not agent.reward and agent.group_reward is None:
        raise SettingsError("agent must have a reward to evaluate, got none; add one with agent.replace(reward=...)")
    if len(seeds) == 0 or len(set(seeds)) < len(seeds):
        raise SettingsError(f"seeds must contain at least one seed and no duplicates, got {tuple(seeds)}")
    if greedy:
        sampling = (sampling or agent.sampling).replace(temperature=0.0)
    if sampling is not None:
        # The copy is shallow, so it shares `last_run` and the record of issued warnings with the given agent.
        agent = dataclasses.replace(agent, sampling=sampling)
    found: list[Trajectory] = []
    not_run: dict[str, str] = {}
    seconds, forks_refused = 0.0, 0
    for seed in seeds:
        rollout = await agent.rollout(
            given,
            group_size,
            max_concurrency=max_concurrency,
            budget=budget,
            group_budget=group_budget,
            index=seed,
            purpose="evaluate",
            workers=workers,
        )
        found.extend(rollout.trajectories)
        not_run.update(rollout.not_run)
        seconds += rollout.seconds
        forks_refused += rollout.forks_refused
    rollout = Rollout.from_trajectories(found, seconds, not_run, forks_refused)
    rollout = dataclasses.replace(rollout, splits=getattr(tasks, "split_names", {}))
    return summarise(rollout, group_size * len(seeds), greedy=agent.sampling.greedy)


def summarise(rollout: Rollout, samples: int, *, greedy: bool = False) -> Evaluation:
    """Compute the `Evaluation` of a rollout with `samples` chains per task. At least one chain must be scored."""
    by_task: dict[str, list[bool]] = {}
    measured: dict[str, list[float]] = {}
    for t in rollout.trajectories:
        if t.success is not None:
            by_task.setdefault(t.task.id, []).append(t.success)
            for name, value in t.metrics.items():
                measured.setdefault(name, []).append(value)
    if not by_task:
        raise SettingsError(f"none of {len(rollout)} chains was scored: {rollout.unscored_reason or 'none ran'}")
    outcomes = list(by_task.values())
    # Leave out tasks with fewer than k scored chains, for which there is no unbiased estimate.
    at_k: dict[int, list[float]] = {}
    for k in sorted({*(2**i for i in range(samples.bit_length())), samples}):
        at_k[k] = [pass_at_k(len(of_task), sum(of_task), k) for of_task in outcomes if len(of_task) >= k]
    numbers = rollout.summary()
    means = {name: numbers[name] for name in ("reward", "turns", "calls", "unscored", "truncated")}
    low, high = success_interval(outcomes)
    return Evaluation(
        success=sum(sum(of_task) / len(of_task) for of_task in outcomes) / len(outcomes),
        low=low,
        high=high,
        pass_at_k={k: sum(values) / len(values) for k, values in at_k.items() if values},
        tasks_at_k={k: len(values) for k, values in at_k.items()},
        tasks=len(by_task),
        samples=samples,
        tokens=numbers.get("tokens", math.nan),
        greedy=greedy,
        metrics={name: sum(values) / len(values) for name, values in measured.items()},
        seconds=rollout.seconds,
        rollout=rollout,
        **means,
    )
