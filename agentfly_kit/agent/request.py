"""`RolloutRequest`, the arguments of a rollout, and the interface of processes that run its groups."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentfly_kit.agent.budget import Budget
from agentfly_kit.agent.progress import ChainKey, RolloutEvent
from agentfly_kit.agent.rollout import Rollout
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.agent.turns import is_long
from agentfly_kit.errors import SettingsError, check_instance, check_settings
from agentfly_kit.types import Task

if TYPE_CHECKING:
    from agentfly_kit.agent.branching import Branch


@dataclass(frozen=True)
class RolloutRequest:
    """Arguments of `Agent.rollout`, from which another process can run any group of the rollout.

    With `share` = (i, n), the request covers the tasks i, i + n, i + 2n and so on. `splits` maps task ids to the names
    of their splits, if known.
    """

    tasks: Sequence[Task]
    group_size: int
    branch: Branch | None
    max_concurrency: int
    budget: Budget | None
    group_budget: Budget | None
    index: int
    purpose: str
    share: tuple[int, int]
    splits: Mapping[str, str] = field(default_factory=dict)

    @property
    def numbers(self) -> Sequence[int]:
        """Indices of the tasks to run, which differ between the processes of distributed training."""
        return range(self.share[0], len(self.tasks), self.share[1])

    def for_task(self, number: int) -> RolloutRequest:
        """Return the request for the group of one task, with the ids and seeds of the whole rollout."""
        return dataclasses.replace(self, share=(number, len(self.tasks)))

    def plan(self) -> list[tuple[Task, ChainKey]]:
        """Return the task and the key of every chain to run, in order. With `branch`, these are the initial chains."""
        size = self.group_size if self.branch is None else self.branch.num_initial(self.group_size)
        ids = group_ids(self.tasks, self.index, self.purpose)
        return [
            (self.tasks[number], ChainKey(self.purpose, self.index, ids[number], chain))
            for number in self.numbers
            for chain in range(size)
        ]

    def groups_at_once(self, agent: AgentSettings) -> int:
        """Return the number of groups that may run concurrently in one process."""
        if self.branch is not None:
            return self.branch.groups_at_once(agent, self.group_size, self.max_concurrency)
        slots = getattr(agent.engine, "slots", self.max_concurrency)
        return max(1, int(min(slots, self.max_concurrency)) // self.group_size)

    def check(self, agent: AgentSettings, workers: GroupWorkers | None) -> None:
        """Raise an error if the arguments are invalid, or if the agent or the workers cannot run this rollout."""
        limits = dict.fromkeys(("group_size", "max_concurrency"), "of at least 1")
        check_settings(self, {**limits, "index": "of at least 0"})
        share: object = self.share
        match share:
            case (int(i), int(n)) if 0 <= i < n:
                pass
            case _:
                raise SettingsError(f"share must be (i, n) with 0 <= i < n, got {share!r}")
        for name in ("budget", "group_budget"):
            limit = getattr(self, name)
            if limit is not None and limit.tokens is not None and not agent.exact:
                raise SettingsError(
                    f"{name}={limit} must not limit tokens, because a text-only engine returns no token ids"
                )
            if limit is not None and limit.tool_calls is not None and agent.harness is not None:
                raise SettingsError(f"{name}={limit} must not limit tool_calls: the harness runs its own tools")
        check_instance("workers", workers, GroupWorkers | None, "the result of af.ray.workers, or None")
        if workers is not None:
            if self.budget is not None:
                raise SettingsError(
                    f"budget must be None with workers, each of which counts only its own chains, got {self.budget}; "
                    "use group_budget="
                )
            workers.check(agent)
        if self.branch is not None:
            self.branch.groups_at_once(agent, self.group_size, self.max_concurrency)  # checks the agent
        agent.check_tasks(self.tasks)
        if agent.exact and not is_long(agent.opening(self.tasks[0])):
            # Render the first prompt here, so that an error is raised if the template rejects every task. If the
            # template, or the image processor, rejects only a later task, the error is recorded in the trajectories of
            # that task.
            try:
                agent.chat.prompt(agent.opening(self.tasks[0]), agent.tools.schemas)
            except SettingsError as error:
                raise SettingsError(f"task {self.tasks[0].id!r}: {error}") from error


def group_ids(tasks: Iterable[Task], index: int, purpose: str) -> list[str]:
    """Return the group id of each task. A task that occurs repeatedly has several groups with different seeds."""
    seen: dict[str, int] = {}
    ids = []
    for task in tasks:
        count = seen[task.id] = seen.get(task.id, 0) + 1
        ids.append(f"{purpose}-{index}:{task.id}" + (f"~{count}" if count > 1 else ""))
    return ids


@dataclass(frozen=True)
class GroupResult:
    """Result of a group that was run by a worker.

    Attributes:
        keys: Key of every chain, including forks, in order.
        rollout: The finished chains.
        events: Events of the chains, with times relative to the start of the group.
    """

    keys: Sequence[ChainKey]
    rollout: Rollout
    events: Sequence[RolloutEvent]


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
