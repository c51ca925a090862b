"""How good an agent is on tasks: success with an interval, and what it cost. Trains nothing."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfly_kit._async.pending_call import pending_call
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.errors import SettingsError
from agentfly_kit.types import Sampling, Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """Means over tasks. Intervals are 95 %, by bootstrap over *tasks*: chains of one task are not independent."""

    success: float
    """mean@k: the share of scored chains that succeed."""
    low: float
    high: float
    pass_at_k: float
    """Share of tasks that at least one of its k chains solves."""
    reward: float
    tasks: int
    samples: int
    """k, chains a task."""
    turns: float
    calls: float
    tokens: float
    """Sampled tokens a chain; NaN from a text-only engine."""
    unscored: float
    truncated: float
    greedy: bool
    metrics: dict[str, float] = field(hash=False)
    """What else the rewards measured, by name: the stages of a task, say. Means over the scored chains that have it."""
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

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{k}</td><td style='text-align:right'>{v:.4g}</td></tr>"
            for k, v in (self.summary() | self.metrics).items()
        )
        return f"<p><b>{html.escape(repr(self))}</b></p><table><tbody>{rows}</tbody></table>"


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
    """Roll out `samples` chains of each task for each seed, and summarise.

    greedy: the most probable tokens instead of samples; the two are different numbers and are never mixed.
    budget, group_budget: what all chains of a seed, and those of each of its tasks, may spend together. Chains that
        were kept from beginning are in `evaluation.rollout.not_run` and in no number.
    Seeds of evaluation are its own: they are not those of any training rollout.
    Raises:  SettingsError if nothing could be scored.
    """
    given = list(tasks)
    if greedy:
        sampling = (sampling or agent.sampling).replace(temperature=0.0)
    if len(seeds) == 0:
        raise SettingsError("seeds=() rolls nothing out; give at least one")
    if sampling is not None:
        # Still the same agent: it knows its last run, and what it warned of.
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
    """An `Evaluation` of chains that have run."""
    by_task: dict[str, list[bool]] = {}
    for t in rollout.trajectories:
        if t.success is not None:
            by_task.setdefault(t.task.id, []).append(t.success)
    if not by_task:
        why = next((str(t.error) for t in rollout.trajectories if t.error), "the agent has no reward")
        raise SettingsError(f"none of {len(rollout)} chains was scored ({why}); give the agent a reward=")
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
    """Percentile interval of the mean, resampling the values. (N,) -> (low, high)."""
    import numpy as np

    data: Any = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = np.array([data[rng.integers(0, len(data), len(data))].mean() for _ in range(draws)])
    tail = (1 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))
