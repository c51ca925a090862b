"""`Agent`, which creates chains and rollouts according to its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.chain_editing import Chain, create_chain
from agentfly_kit.agent.request import GroupWorkers, RolloutRequest
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.agent.settings import AgentSettings, task_list
from agentfly_kit.errors import SettingsError, checks_keywords
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.agent.branching import Branch


@checks_keywords
class Agent(AgentSettings):
    # With this docstring, `af.Agent?` describes all settings.
    __doc__ = AgentSettings.__doc__

    def __post_init__(self) -> None:
        if self.harness is not None:
            from agentfly_kit.agent.harness import Harness

            if not isinstance(self.harness, Harness):
                object.__setattr__(self, "harness", Harness(self.harness))
        super().__post_init__()

    def replace(self, **changes: Any) -> Agent:
        """Return a copy of the agent with some settings changed."""
        return dataclasses.replace(self, _semaphores={}, _warned=[], _last_handle=[], **changes)

    def __repr__(self) -> str:
        tools = f"harness {self.harness.name}" if self.harness else ", ".join(self.tools.names) or "no tools"
        reward = f", reward {' + '.join(self.reward.names)}" if self.reward else ", no reward"
        return f"Agent({tools}{reward}, {self.max_turns} turns, {self.engine!r})"

    @property
    def last_run(self) -> RolloutHandle:
        """Handle of the most recently started rollout. After an interrupt, `last_run.partial` holds finished chains."""
        if not self._last_handle:
            raise SettingsError("this agent has not started a rollout yet; await agent.rollout(tasks) first")
        return cast(RolloutHandle, self._last_handle[0])

    def chain(self, task: Task | Trajectory) -> Chain:
        """Create a chain to step interactively.

        The chain keeps its sandboxes until `chain.finish()` or `chain.close()` is called, or until the pool revokes the
        leases, either after `max_lease` or because `pool.recycle` is called.

        Args:
            task: a task, or a trajectory to continue from its end; see `Chain.from_trajectory`.
        """
        if isinstance(task, Trajectory):
            self.check_tasks([task.task])
            if self.harness is not None:
                raise SettingsError(
                    f"with a harness, task must be a Task, got the trajectory {task.id!r}, which cannot be continued"
                )
            return Chain.from_trajectory(self, task)
        self.check_tasks(task_list(task))
        return cast(Chain, create_chain(self, task))

    @checks_keywords
    def rollout(
        self,
        tasks: Iterable[Task] | Task,
        group_size: int = 1,
        *,
        branch: Branch | None = None,
        max_concurrency: int = 64,
        budget: Budget | None = None,
        group_budget: Budget | None = None,
        index: int = 0,
        purpose: str = "rollout",
        progress: bool = False,
        share: tuple[int, int] = (0, 1),
        workers: GroupWorkers | None = None,
    ) -> RolloutHandle:
        """Run `group_size` chains of each task concurrently. The rollout starts when the returned handle is awaited.

        Args:
            tasks: the tasks, or a single task.
            group_size: number of chains per task.
            branch: settings for sampling each group as a tree in which chains fork after observations; see `af.Branch`.
                By default, all chains of a group are independent.
            max_concurrency: maximum number of chains that run concurrently.
            budget: limits shared by all chains, or None.
            group_budget: limits shared by the chains of each group, or None.
            index: index of the rollout. All seeds depend on `index` and `purpose`, so that equal values give equal
                trajectories if the engine is deterministic.
            purpose: purpose of the rollout, such as "evaluate".
            progress: show a progress bar that remains after the rollout.
            share: pair (i, n) if n processes share the rollout and this is process i, which runs every n-th task,
                starting with task i. Ids and seeds of the chains depend neither on `share` nor on `workers`.
            workers: worker processes that run the groups, created by `af.ray.workers`. By default, this process runs
                the groups. `max_concurrency` and the limits of the agent apply to each worker.
        """
        given, splits = task_list(tasks), getattr(tasks, "split_names", {})
        request = RolloutRequest(
            given, group_size, branch, max_concurrency, budget, group_budget, index, purpose, share, splits
        )
        return RolloutHandle(self, request, workers, progress)
