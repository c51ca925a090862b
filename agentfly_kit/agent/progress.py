"""Progress of a rollout: its events, and the current state of every chain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agentfly_kit._async.listeners import Listeners
from agentfly_kit.agent.chain_hooks import ChainKey
from agentfly_kit.types import Task, Trajectory


@dataclass(frozen=True)
class RolloutEvent:
    """Change of state of a chain. `state` is the state after the event.

    Events of a rollout arrive in the order of `sequence`, without gaps. Events of one chain nest: every "start" has a
    matching "end", even after a failure or cancellation, and the first and last event have kind "chain".

    Attributes:
        sequence: Number of the event within the rollout, without gaps.
        kind: "chain", "turn", "tool" or "reward".
        phase: "start" or "end".
        trajectory: Id of the chain.
        task: Id of its task.
        turn: Index of the action; of a chain or a reward, the number of actions so far.
        state: "waiting", "sampling", "tool", "scoring", "done", "failed" or "cancelled".
        time: Seconds since the start of the rollout.
        detail: Text (end of a turn), tool name (tool), stop reason (end of a chain), or description of a failure.
        call: Id of the call, for tool events. The calls of one action run concurrently.
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


class ChainState(NamedTuple):
    """State of one chain of a rollout.

    Attributes:
        trajectory: Id of the trajectory.
        task: Id of the task.
        state: queued, waiting, sampling, sandbox (waiting for one), tool, scoring; done, failed, cancelled.
        turn: Number of actions taken when this state began.
        since: Seconds from the start of the rollout to the beginning of this state.
        detail: Names of the running tools, or the stop reason.
        reward: Reward of the finished chain; None if it is unfinished or unscored.
    """

    trajectory: str
    task: str
    state: str
    turn: int
    since: float
    detail: str
    reward: float | None


@dataclass(frozen=True)
class RolloutSnapshot:
    """State of a rollout at one moment.

    Attributes:
        state: not started, running, paused, stopping; done, stopped, failed.
        seconds: Time since the start of the rollout, or its duration if it has ended.
        chains: State of each chain, in the order of the tasks.
    """

    state: str
    seconds: float
    chains: tuple[ChainState, ...] = field(repr=False)

    def count(self, *states: str) -> int:
        """Return the number of chains in any of these states."""
        return sum(1 for chain in self.chains if chain.state in states)


class _ChainProgress:
    """State of a chain, updated from its events. Concurrent tool calls count as one state until the last one ends."""

    __slots__ = ("calls", "detail", "since", "state", "task", "turn")

    def __init__(self, task: str) -> None:
        self.task = task
        self.state, self.turn, self.since, self.detail, self.calls = "queued", 0, 0.0, "", 0

    def update(self, kind: str, phase: str, state: str, turn: int, detail: str, seconds: float) -> None:
        self.turn = turn
        if kind == "tool":
            self.calls += 1 if phase == "start" else -1
            if phase == "end" and self.calls > 0:
                return
        if kind == "tool" and phase == "start" and self.calls > 1:
            self.detail = f"{self.detail}, {detail}"
            return
        self.state, self.since = state, seconds
        self.detail = detail if (kind == "tool" and phase == "start") or kind == "chain" else ""


class Progress:
    """Progress of the chains of one rollout."""

    def __init__(self) -> None:
        self.listeners: Listeners[RolloutEvent] = Listeners("a rollout")
        self._chains: dict[str, _ChainProgress] = {}
        self._sequence = 0
        self._started_at: float | None = None
        self._ended_at: float | None = None

    def add(self, key: ChainKey, task: Task) -> None:
        self._chains[key.id] = _ChainProgress(task.id)

    def start(self) -> None:
        self._started_at = time.perf_counter()

    def end(self) -> None:
        self._ended_at = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start, or from the start to the end; 0 before the start."""
        if self._started_at is None:
            return 0.0
        return (self._ended_at or time.perf_counter()) - self._started_at

    def report(
        self, trajectory: str, kind: Any, phase: Any, state: Any, turn: int, detail: str = "", call: str = ""
    ) -> None:
        """Update the state of a chain and notify the listeners; see `RolloutEvent` for the arguments."""
        progress = self._chains.get(trajectory)
        if progress is None:  # a fork that a hook made and runs itself
            return
        seconds = self.seconds
        progress.update(kind, phase, state, turn, detail, seconds)
        if self.listeners:
            self._sequence += 1
            self.listeners.notify(
                RolloutEvent(self._sequence, kind, phase, trajectory, progress.task, turn, state, seconds, detail, call)
            )

    def chain_state(
        self, key: ChainKey, done: Mapping[str, Trajectory], not_run: Mapping[str, str], waiting: set[str]
    ) -> ChainState:
        """Return the current state of a chain. `waiting` holds the ids of the chains that wait for a sandbox."""
        id, progress = key.id, self._chains[key.id]
        state, detail = progress.state, progress.detail
        if id in not_run:
            state, detail = "cancelled", not_run[id]
        elif id in waiting and state in ("tool", "scoring"):
            state = "sandbox"
        reward = done[id].reward if id in done else None
        return ChainState(id, progress.task, state, progress.turn, progress.since, detail, reward)
