"""Sampling of training rollouts: selecting tasks, replacing filtered groups, and prefetching the next rollout."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import numbers
import warnings
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentfly_kit import seeds
from agentfly_kit._async.pending_call import run_in_thread, wait_all
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.request import GroupWorkers, RolloutRequest, group_ids
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.batch.filters import drop_reasons
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.errors import SettingsError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.fingerprint import describe
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.evaluation import Evaluation


class RolloutSampler:
    """Samples the chains of each iteration of a run.

    Attributes:
        running: Training rollouts in progress, by index. With `overlap`, there may be several.
        latest: Step number and handle of the most recently started training rollout; None before the first.
        rollout_workers: Processes that run the groups of rollouts and evaluations, or None for this process.
    """

    def __init__(
        self,
        agent: Agent,
        policy: Policy,
        tasks: list[Task],
        config: TrainConfig,
        workers: WorkerGroup,
        rollout_workers: GroupWorkers | None = None,
    ) -> None:
        self.rollout_workers = rollout_workers
        self.agent, self.policy, self.tasks, self.config, self.workers = agent, policy, tasks, config, workers
        self.task_sampler = TaskSampler(tasks, config.tasks_per_step, config.seed, config.difficulty)
        self.running: dict[int, RolloutHandle] = {}
        self.latest: tuple[int, RolloutHandle] | None = None
        # Rollouts of later iterations, by index, and agents whose engines have copies of the weights, so that updates
        # do not affect their samples.
        self._ahead: dict[int, asyncio.Task[Rollout]] = {}
        self._copies: dict[int, Agent] = {}
        self._paused = False
        # All rollouts that have started and still exist, including evaluations and greedy rollouts.
        self._started: weakref.WeakSet[RolloutHandle] = weakref.WeakSet()

    @functools.cached_property
    def tasks_digest(self) -> str:
        """Hash of the ids and contents of all tasks."""
        return seeds.digest(*(f"{task.id} {describe([task.messages, task.fields])}" for task in self.tasks))

    def pause(self) -> None:
        """Pause the running chains and the chains of later rollouts, including evaluations."""
        self._paused = True
        for rollout in [*self._started]:
            rollout.pause()

    def resume(self) -> None:
        """Resume the chains after `pause`."""
        self._paused = False
        for rollout in [*self._started]:
            rollout.resume()

    def _pausable(self, agent: Agent, **changes: Any) -> Agent:
        """Return a copy of the agent that pauses and resumes its rollouts together with the run."""

        def watch(rollout: RolloutHandle) -> None:
            self._started.add(rollout)
            if self._paused:
                rollout.pause()
            if agent.watch is not None:
                agent.watch(rollout)

        return dataclasses.replace(agent, watch=watch, **changes)

    async def sample(self, index: int) -> Rollout:
        """Sample the chains of an iteration with the current weights."""

        async def sample() -> Rollout:
            await self.agent.engine.update(self.policy)
            return await self._sample(index, self.agent)

        return await self._gather(index, sample())

    async def _sample(self, index: int, agent: Agent) -> Rollout:
        """Sample this process's chains for an iteration, and replace filtered groups (`config.refill`)."""
        rollout = await self._run_rollout(agent, self.task_sampler.sample(index), index, "train")
        for again in range(1, self.config.refill + 1):
            left_out = drop_reasons(rollout.trajectories, self.config.filters)
            full = sum(
                any(t.reward is not None and t.id not in left_out for t in g.trajectories) for g in rollout.groups
            )
            missing = self.config.tasks_per_step - full
            if missing <= 0:
                break
            others = self.task_sampler.refill(index, again, missing, [g.trajectories[0].task for g in rollout.groups])
            if not others:
                break
            more = await self._run_rollout(agent, others, index, f"refill{again}")
            rollout = _joined((rollout, more), rollout.seconds + more.seconds)
        return rollout

    def request(self, tasks: list[Task], index: int, purpose: str) -> RolloutRequest:
        """Return the request for the part of a rollout that is assigned to this process."""
        config = self.config
        return RolloutRequest(
            tasks=tasks,
            group_size=config.group_size,
            branch=config.branch,
            max_concurrency=config.max_concurrency,
            budget=config.budget,
            group_budget=config.group_budget,
            index=index,
            purpose=purpose,
            share=(self.workers.rank, self.workers.size),
        )

    async def _run_rollout(self, agent: Agent, tasks: list[Task], index: int, purpose: str) -> Rollout:
        """Run the part of a rollout that is assigned to this process."""
        handle = RolloutHandle(self._pausable(agent), self.request(tasks, index, purpose), self.rollout_workers)
        self.running[index], self.latest = handle, (index + 1, handle)
        try:
            rollout = await handle
            return rollout.sum_turn_rewards() if self.config.sum_turn_rewards else rollout
        finally:
            if self.running.get(index) is handle:  # a later loop may sample the same iteration
                del self.running[index]

    async def greedy_rewards(self, rollout: Rollout) -> dict[str, float]:
        """Sample a greedy chain for each task. Return the rewards keyed by task id, with NaN for unscored chains."""
        agent = self._pausable(self.agent, sampling=self.agent.sampling.replace(temperature=0.0))
        greedy = await agent.rollout(
            rollout.tasks, max_concurrency=self.config.max_concurrency, workers=self.rollout_workers
        )
        greedy = greedy.sum_turn_rewards() if self.config.sum_turn_rewards else greedy
        firsts = [group.trajectories[0] for group in greedy.groups]
        return {t.task.id: math.nan if t.reward is None else t.reward for t in firsts}

    async def evaluate(self, tasks: list[Task]) -> Evaluation:
        """Evaluate the policy with its current weights."""
        from agentfly_kit.evaluation import evaluate

        await self.agent.engine.update(self.policy)
        limit, workers = self.config.max_concurrency, self.rollout_workers
        return await evaluate(self._pausable(self.agent), tasks, max_concurrency=limit, workers=workers)

    async def _gather(self, index: int, sampling: Awaitable[Rollout]) -> Rollout:
        """Collect the chains of an iteration from all processes, in task order. If one fails, all raise errors."""
        if self.workers.is_single:
            return await sampling
        mine, failed = None, None
        try:
            mine = await sampling
        except Exception as error:
            failed = error
        parts = await self.workers.all_gather_or_raise(mine, failed)
        rollout = _joined(parts, max(part.seconds for part in parts))
        # Order the groups by id. Groups that did not run because of a budget are missing.
        ids = group_ids(self.task_sampler.sample(index), index, "train")
        places = {id: place for place, id in enumerate(ids)}
        return dataclasses.replace(rollout, groups=tuple(sorted(rollout.groups, key=lambda group: places[group.id])))

    async def start_ahead(self, index: int) -> None:
        """Start sampling the chains of the `config.overlap` iterations after `index`, with the current weights.

        Chains that were started before continue: with the same weights if the engine shares them with the policy, which
        samples from copies, and otherwise with the current weights of the engine.
        """
        coming = range(index + 1, min(index + 1 + self.config.overlap, self.config.steps))
        for ahead in [i for i in coming if i not in self._ahead]:
            agent = await self._agent_ahead(ahead % self.config.overlap)
            self._ahead[ahead] = asyncio.create_task(self._sample(ahead, agent), name=f"agentfly-ahead-{ahead + 1}")

    async def _agent_ahead(self, copy: int) -> Agent:
        """Return the agent with an engine whose samples later updates of the policy do not affect.

        The copy number `copy` of the policy is no longer used when its number occurs again.
        """
        agent, policy = self.agent, self.policy
        if getattr(agent.engine, "policy", None) is not policy:
            await agent.engine.update(policy)
            return agent
        if not isinstance(agent.engine, LocalEngine):
            raise SettingsError(f"overlap needs LocalEngine or an engine with its own weights, got {agent.engine!r}")
        if copy not in self._copies:
            twin = await run_in_thread(policy.copy)
            # Unlike `agent.replace`, this shares internal state such as `last_run` and the warnings already issued.
            self._copies[copy] = dataclasses.replace(agent, engine=LocalEngine(twin, slots=agent.engine.slots))
        copied = self._copies[copy].engine.policy  # type: ignore[attr-defined]
        await run_in_thread(copied.load_state, policy.state())
        copied.version = policy.version
        return self._copies[copy]

    async def finish_ahead(self, index: int) -> Rollout | None:
        """Wait for chains that are sampled ahead. Return None if there are none, or, with a warning, if they failed."""
        if index not in self._ahead:
            return None
        try:
            return await self._gather(index, self._ahead[index])
        except Exception as error:  # do not lose the completed step
            warnings.warn(
                f"sampling the chains of step {index + 1} ahead failed ({type(error).__name__}: {error}); they are "
                "sampled again",
                stacklevel=2,
            )
            return None
        finally:
            if self._ahead[index].done():
                del self._ahead[index]

    async def cancel_ahead(self) -> None:
        """Cancel all chains that are sampled ahead, and wait until they have ended."""
        ahead, self._ahead = [*self._ahead.values()], {}
        for task in ahead:
            task.cancel()
        await wait_all(ahead)


class TaskSampler:
    """Selects the tasks of each iteration. Each pass over the tasks is shuffled or sorted from easy to hard."""

    def __init__(
        self, tasks: Sequence[Task], size: int, seed: int, difficulty: str | Callable[[Task], float] | None
    ) -> None:
        self._tasks, self._size, self._seed = tasks, size, seed
        self._difficulties = _difficulties(tasks, difficulty)

    def sample(self, index: int) -> list[Task]:
        count, size = len(self._tasks), self._size
        out: list[Task] = []
        for position in range(index * size, (index + 1) * size):
            turn, place = divmod(position, count)
            if place == 0 or not out:
                generator = torch.Generator().manual_seed(seeds.derive(self._seed, "tasks", turn))
                order = torch.randperm(count, generator=generator).tolist()
                order.sort(key=self._difficulties.__getitem__)  # stable, so tasks of equal difficulty stay shuffled
            out.append(self._tasks[order[place]])
        return out

    def refill(self, index: int, attempt: int, count: int, used: Sequence[Task]) -> list[Task]:
        """Return up to `count` additional tasks for an iteration, with the same difficulties as the tasks in `used`."""
        known = {task.id for task in used}
        levels = {level for task, level in zip(self._tasks, self._difficulties, strict=True) if task.id in known}
        left = [i for i, t in enumerate(self._tasks) if t.id not in known and self._difficulties[i] in levels]
        generator = torch.Generator().manual_seed(seeds.derive(self._seed, "refill", index, attempt))
        return [self._tasks[left[i]] for i in torch.randperm(len(left), generator=generator)[:count].tolist()]


def _joined(parts: Sequence[Rollout], seconds: float) -> Rollout:
    return Rollout(
        tuple(group for part in parts for group in part.groups),
        seconds,
        {id: stop for part in parts for id, stop in part.not_run.items()},
        sum(part.forks_refused for part in parts),
    )


def _difficulties(tasks: Sequence[Task], difficulty: str | Callable[[Task], float] | None) -> list[float]:
    if difficulty is None:
        return [0.0] * len(tasks)
    out = []
    for task in tasks:
        value: Any = difficulty(task) if callable(difficulty) else task.fields.get(difficulty)
        if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
            given = difficulty if isinstance(difficulty, str) else "a function"
            raise SettingsError(f"difficulty must give a number, got {value!r} from {given!r} for task {task.id!r}")
        out.append(float(value))
    return out
