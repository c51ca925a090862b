"""Evaluation of an agent on tasks: success rate with a confidence interval, and cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit._display import Displayable
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.settings import task_list
from agentfly_kit.errors import SettingsError
from agentfly_kit.types import Sampling, Task, Trajectory


@dataclass(frozen=True)
class Evaluation(Displayable):
    """Results of an evaluation, as means over tasks.

    Intervals are at the 95 % level, by bootstrap over *tasks*, because chains of one task are not independent.

    Attributes:
        success: mean@k: success rate of the scored chains of a task, averaged over tasks.
        low: Lower end of the interval of `success`.
        high: Upper end of the interval of `success`.
        pass_at_k: Fraction of tasks that at least one of k chains solves.
        reward: Mean reward of the scored chains.
        tasks: Number of tasks with a scored chain.
        samples: Number of chains per task, k.
        turns: Mean number of actions per chain.
        calls: Mean number of tool calls per chain.
        tokens: Sampled tokens per chain; NaN for text-only engines.
        unscored: Share of chains without a reward.
        truncated: Share of chains that a limit cut off.
        greedy: Whether the most probable tokens were taken instead of samples.
        metrics: Other metrics of the rewards by name, such as stages of a task; means over the scored chains that have
            them.
        seconds: Wall-clock time of the rollouts.
        rollout: The chains.
    """

    success: float
    low: float
    high: float
    pass_at_k: float
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
        names = ("success", "low", "high", "pass_at_k", "reward", "turns", "calls", "tokens", "unscored", "truncated")
        return {n: v for n in names if not math.isnan(v := getattr(self, n))}

    def __repr__(self) -> str:
        how = "greedy" if self.greedy else "sampled"
        return (
            f"Evaluation(success {self.success:.3f} [{self.low:.3f}, {self.high:.3f}], {how}, "
            f"{self.tasks} tasks x {self.samples}, {self.turns:.1f} turns, {self.calls:.1f} calls)"
        )


@pending_call
async def evaluate(
    agent: Agent,
    tasks: Iterable[Task],
    samples: int = 1,
    *,
    sampling: Sampling | None = None,
    seeds: Sequence[int] = (0,),
    max_concurrency: int = 64,
    greedy: bool = False,
    budget: Budget | None = None,
    group_budget: Budget | None = None,
) -> Evaluation:
    """Roll out `samples` chains of each task for each seed, and summarise their rewards.

    Args:
        agent: the agent to evaluate; it needs a reward.
        tasks: the tasks.
        samples: number of chains per task and seed.
        sampling: replaces the sampling parameters of the agent.
        seeds: seeds of the rollouts; evaluation seeds never coincide with those of training rollouts.
        max_concurrency: maximum number of chains that run concurrently.
        greedy: take the most probable token instead of sampling. Greedy and sampled results are not comparable.
        budget: limit shared by all chains of a seed. Chains that it prevents from starting are listed in
            `evaluation.rollout.not_run` and do not count.
        group_budget: limit shared by the chains of one task and seed.

    Raises:
        SettingsError: if no chain was scored, or `seeds` is empty.
    """
    given = task_list(tasks)
    if greedy:
        sampling = (sampling or agent.sampling).replace(temperature=0.0)
    if len(seeds) == 0:
        raise SettingsError("seeds must hold at least one seed, got ()")
    if sampling is not None:
        # A shallow copy, which shares the last run and the warnings already shown with the original agent.
        agent = dataclasses.replace(agent, sampling=sampling)
    found: list[Trajectory] = []
    not_run: dict[str, str] = {}
    seconds = 0.0
    for seed in seeds:
        run = agent.rollout(
            given,
            samples,
            max_concurrency=max_concurrency,
            budget=budget,
            group_budget=group_budget,
            index=seed,
            purpose="evaluate",
        )
        rollout = await run
        found.extend(rollout.trajectories)
        not_run.update(rollout.not_run)
        seconds += rollout.seconds
    return summarise(
        Rollout.from_trajectories(found, seconds, not_run), samples * len(seeds), greedy=agent.sampling.greedy
    )


def summarise(rollout: Rollout, samples: int, *, greedy: bool = False) -> Evaluation:
    """Compute the `Evaluation` of a finished rollout with `samples` chains per task.

    Raises:
        SettingsError: if no chain was scored.
    """
    by_task: dict[str, list[bool]] = {}
    for t in rollout.trajectories:
        if t.success is not None:
            by_task.setdefault(t.task.id, []).append(t.success)
    if not by_task:
        why = next((str(t.error) for t in rollout.trajectories if t.error), "the agent has no reward")
        raise SettingsError(f"none of {len(rollout)} chains was scored ({why}); check that the agent has a reward=")
    numbers = rollout.summary()
    measured: dict[str, list[float]] = {}
    for t in rollout.trajectories:
        if t.reward is not None:
            for name, value in t.metrics.items():
                measured.setdefault(name, []).append(value)
    means = [sum(values) / len(values) for values in by_task.values()]
    low, high = bootstrap(means)
    return Evaluation(
        success=sum(means) / len(means),
        low=low,
        high=high,
        pass_at_k=sum(any(values) for values in by_task.values()) / len(by_task),
        reward=numbers["reward"],
        tasks=len(by_task),
        samples=samples,
        turns=numbers["turns"],
        calls=numbers["calls"],
        tokens=numbers.get("tokens", math.nan),
        unscored=numbers["unscored"],
        truncated=numbers["truncated"],
        greedy=greedy,
        metrics={name: sum(values) / len(values) for name, values in measured.items()},
        seconds=rollout.seconds,
        rollout=rollout,
    )


def bootstrap(values: Sequence[float], *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean. (N,) -> (low, high)."""
    import numpy as np

    data: Any = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = np.array([data[rng.integers(0, len(data), len(data))].mean() for _ in range(draws)])
    tail = (1 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))
