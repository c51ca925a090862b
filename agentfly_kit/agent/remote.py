"""Interface for running the groups of a rollout in other processes, implemented by `af.ray.workers`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentfly_kit.agent.branching import Branch
from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.progress import ChainKey, RolloutEvent
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.types import Task, Trajectory


@dataclass(frozen=True)
class RolloutRequest:
    """Arguments of `Agent.rollout`, with which another process can run any group of the rollout.

    `numbers` are the indices of the tasks to run, which differ between the processes of distributed training.
    """

    tasks: Sequence[Task]
    group_size: int
    branch: Branch | None
    max_concurrency: int
    group_budget: Budget | None
    index: int
    purpose: str
    numbers: Sequence[int] = ()

    def handle(self, agent: Any, number: int) -> Any:
        """Return a `RolloutHandle` for the group of task `number`. Seeds are the same as in the whole rollout."""
        return agent.rollout(
            self.tasks,
            self.group_size,
            branch=self.branch,
            max_concurrency=self.max_concurrency,
            group_budget=self.group_budget,
            index=self.index,
            purpose=self.purpose,
            share=(number, len(self.tasks)),
        )

    def groups_at_once(self, agent: AgentSettings) -> int:
        """Return how many groups may run concurrently in one process."""
        if self.branch is not None:
            return self.branch.groups_at_once(agent, self.group_size, self.max_concurrency)
        slots = getattr(agent.engine, "slots", self.max_concurrency)
        return max(1, int(min(slots, self.max_concurrency)) // self.group_size)


@dataclass(frozen=True)
class GroupResult:
    """Result of a group that a worker has run.

    Attributes:
        keys: Key of every chain, including forks, in order.
        finished: Trajectories of the finished chains.
        not_run: Stop reasons of the chains that a budget prevented from starting, by chain id.
        forks_refused: Number of forks that could not be made.
        events: Events of the chains, with times relative to the start of the group.
        seconds: Duration of the group.
    """

    keys: Sequence[ChainKey]
    finished: Sequence[Trajectory]
    not_run: dict[str, str]
    forks_refused: int
    events: Sequence[RolloutEvent]
    seconds: float


GroupResults = AsyncGenerator[tuple[int, GroupResult], None]
Gate = Callable[[], Awaitable[object]]


@runtime_checkable
class GroupWorkers(Protocol):
    """Worker processes that run groups of rollouts."""

    def check(self, agent: AgentSettings) -> None:
        """Raise SettingsError if the workers cannot run rollouts of this agent."""

    def run_groups(self, agent: AgentSettings, request: RolloutRequest, gate: Gate) -> GroupResults:
        """Run the groups of a rollout. When a group finishes, yield the index of its task and its result.

        `gate` is awaited before a group starts; it blocks while the rollout is paused.
        """
