"""Chain identities, the hooks through which a rollout controls its chains, and progress events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agentfly_kit import seeds
from agentfly_kit._async.listeners import Listeners
from agentfly_kit._display import Displayable
from agentfly_kit.agent.budget import BudgetUsage
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Task, Turn


@dataclass(frozen=True)
class ChainKey:
    """Identity of a chain within a run, from which its seeds are derived.

    Attributes:
        purpose: Purpose of the rollout, such as "train" or "evaluate"; "chain" for an interactive chain.
        rollout: Index of the rollout.
        group: Id of the group.
        chain: Index of the chain in the group.
        fork: Numbers of the successive forks that led to the chain, such as ".1.2"; "" if the chain is not a fork.
    """

    purpose: str = "chain"
    rollout: int = 0
    group: str = ""
    chain: int = 0
    fork: str = ""

    @property
    def id(self) -> str:
        return f"{self.group}/{self.chain}{self.fork}"

    @property
    def position(self) -> tuple[int, tuple[int, ...]]:
        """Key for sorting within the group: the index of the chain, then the numbers of its successive forks."""
        return self.chain, tuple(int(number) for number in self.fork.split(".")[1:])

    def seed(self, run_seed: int, task: str, turn: int, attempt: int = 0) -> int:
        """Return the seed of the action with index `turn`. `task` is the task id. For `attempt`, see `Chain.sample`."""
        parts = (self.purpose, self.rollout, task, self.group, self.chain, self.fork, turn)
        return seeds.derive(run_seed, *parts, *([attempt] if attempt else []))


# Callback for progress events with the arguments of `Progress.report`.
Report = Callable[..., None]


async def _open() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ChainHooks:
    """Callbacks and budgets through which a rollout controls a chain. The defaults suit interactive chains.

    Attributes:
        report: Called with the fields of every progress event; see `RolloutEvent`.
        gate: Awaited before each action and before its tool calls. Blocks while the rollout is paused.
        spawn: Creates the number of forks that the hook `after_observation` requests; None outside a rollout.
        branch: Awaited with each action that follows an observation, before its tool calls run; None in a rollout
            without `branch`.
        usages: Usage of the budgets that the chain shares with other chains.
        run: Name of the rollout. A pool serves waiting requests of different rollouts in turn.
    """

    report: Report = lambda *_, **__: None
    gate: Callable[[], Awaitable[object]] = _open
    spawn: Callable[[Any, int], Awaitable[None]] | None = None
    branch: Callable[[Any, Turn], Awaitable[None]] | None = None
    usages: tuple[BudgetUsage, ...] = ()
    run: str = ""


@dataclass(frozen=True, repr=False)
class RolloutEvent(Displayable):
    """Start or end of a chain, or of one of its steps. Every "start" is followed by an "end", even after cancellation.

    The events of one chain are nested. The first and the last event have the kind "chain".

    Attributes:
        sequence: Consecutive number of the event within the rollout.
        kind: "chain", "turn", "tool" or "reward".
        phase: "start" or "end".
        trajectory: Id of the chain.
        task: Id of the task.
        turn: Index of the action; for the kinds "chain" and "reward", the number of actions so far.
        state: State of the chain after the event: waiting, sampling, tool, scoring, done, failed or cancelled.
        time: Seconds since the start of the rollout.
        detail: Text of the action, name of the tool, reward, stop reason or error message, depending on the event.
        call: Id of the tool call, for events of kind "tool". The calls of one action run concurrently.
        result: Trajectory of the chain in its last event, even if the chain was cancelled; None in other events.
    """

    sequence: int
    kind: Literal["chain", "turn", "tool", "reward"]
    phase: Literal["start", "end"]
    trajectory: str
    task: str
    turn: int
    state: Literal["waiting", "sampling", "tool", "scoring", "done", "failed", "cancelled"]
    time: float
    detail: str = ""
    call: str = ""
    result: Trajectory | None = None


class ChainProgress(NamedTuple):
    """State of one chain in a rollout.

    Attributes:
        trajectory: Id of the trajectory.
        task: Id of the task.
        state: queued, waiting, sampling, sandbox (waiting for a sandbox), tool, scoring, done, failed or cancelled.
        turn: Number of actions when the chain entered the state.
        since: Seconds from the start of the rollout until the chain entered the state.
        detail: Names of the running tools, or the stop reason of a chain that has ended or did not start.
        reward: Reward of the chain; None if it is unfinished or unscored.
        success: Whether the chain succeeded; None if it is unfinished or unscored.
    """

    trajectory: str
    task: str
    state: str = "queued"
    turn: int = 0
    since: float = 0.0
    detail: str = ""
    reward: float | None = None
    success: bool | None = None


@dataclass(frozen=True, repr=False)
class RolloutSnapshot(Displayable):
    """State of a rollout at one point in time.

    Attributes:
        state: not started, running, paused, stopping, done, stopped, interrupted or failed.
        seconds: Time since the start of the rollout, or its duration if it has ended.
        chains: State of each chain, in the order of the tasks.
    """

    state: str
    seconds: float
    chains: tuple[ChainProgress, ...] = field(repr=False)

    def count(self, *states: str) -> int:
        """Return the number of chains in any of the given states."""
        return sum(1 for chain in self.chains if chain.state in states)


class Progress:
    """Events and current states of the chains of one rollout."""

    def __init__(self) -> None:
        self.listeners: Listeners[RolloutEvent] = Listeners("a rollout")
        self._states: dict[str, ChainProgress] = {}
        self._running_calls: Counter[str] = Counter()
        self._sequence = 0
        self._started_at: float | None = None
        self._ended_at: float | None = None

    def add(self, key: ChainKey, task: Task) -> None:
        self._states[key.id] = ChainProgress(key.id, task.id)

    def start(self) -> None:
        self._started_at = time.perf_counter()

    def end(self) -> None:
        self._ended_at = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the rollout, or its duration if it has ended; 0 before the start."""
        return 0.0 if self._started_at is None else (self._ended_at or time.perf_counter()) - self._started_at

    def report(
        self,
        trajectory: str,
        kind: Any,
        phase: Any,
        state: Any,
        turn: int,
        detail: str = "",
        call: str = "",
        result: Trajectory | None = None,
        seconds: float | None = None,
    ) -> None:
        """Update the state of a chain and notify the listeners; see `RolloutEvent` for the arguments.

        `seconds` is the time of the event since the start of the rollout; by default the current time.
        """
        before = self._states.get(trajectory)
        if before is None:  # a fork that was created and is run by a hook
            return
        seconds = self.seconds if seconds is None else seconds
        self._states[trajectory] = self._next_state(before, kind, phase, state, turn, detail, seconds)
        if self.listeners:
            self._sequence += 1
            event = (kind, phase, trajectory, before.task, turn, state, seconds, detail, call, result)
            self.listeners.notify(RolloutEvent(self._sequence, *event))

    def _next_state(
        self, before: ChainProgress, kind: str, phase: str, state: str, turn: int, detail: str, seconds: float
    ) -> ChainProgress:
        """Return the state of a chain after an event. The state is "tool" until all concurrent calls have ended."""
        if kind == "tool":
            self._running_calls[before.trajectory] += 1 if phase == "start" else -1
            running = self._running_calls[before.trajectory]
            if phase == "end" and running > 0:
                return before._replace(turn=turn)
            if phase == "start" and running > 1:
                return before._replace(turn=turn, detail=f"{before.detail}, {detail}")
        shown = detail if (kind == "tool" and phase == "start") or kind == "chain" else ""
        return ChainProgress(before.trajectory, before.task, state, turn, seconds, shown, before.reward)

    def chain_state(
        self, key: ChainKey, done: Mapping[str, Trajectory], not_run: Mapping[str, str], waiting: set[str]
    ) -> ChainProgress:
        """Return the current state of a chain. `waiting` contains the ids of chains that are waiting for a sandbox."""
        state = self._states[key.id]
        if key.id in not_run:
            state = state._replace(state="cancelled", detail=not_run[key.id])
        elif key.id in waiting and state.state in ("tool", "scoring"):
            state = state._replace(state="sandbox")
        trajectory = done.get(key.id)
        return state if trajectory is None else state._replace(reward=trajectory.reward, success=trajectory.success)
