"""Identity of a chain, and its connections to the rollout that runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentfly_kit import seeds
from agentfly_kit.agent.budget import BudgetUsage


@dataclass(frozen=True)
class ChainKey:
    """Identity of a chain within its run, from which its seeds are derived."""

    purpose: str = "chain"
    rollout: int = 0
    group: str = ""
    chain: int = 0
    fork: str = ""

    @property
    def id(self) -> str:
        return f"{self.group}/{self.chain}{self.fork}"

    def seed(self, run_seed: int, task: str, turn: int) -> int:
        """Return the seed of a turn.

        Args:
            run_seed: the agent's seed.
            task: id of the task.
            turn: index of the action.
        """
        return seeds.derive(run_seed, self.purpose, self.rollout, task, self.group, self.chain, self.fork, turn)


# Receiver of the progress events of chains: (trajectory, kind, phase, state, turn, detail, call); see `RolloutEvent`.
Report = Callable[..., None]


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class ChainHooks:
    """Connections of a chain to its rollout. The defaults are those of a chain that is stepped interactively.

    Attributes:
        report: Called with every progress event.
        gate: Awaited before each action and before its tool calls. A paused rollout waits there.
        spawn: Called with the chain and the number of forks to run, which `after_observation` returned.
        usages: Usages of the budgets that the chain shares with others.
        run: Name of the rollout. A pool serves rollouts in turn.
    """

    report: Report = _ignore
    gate: Callable[[], Awaitable[object]] | None = None
    spawn: Callable[[Any, int], Awaitable[None]] | None = None
    usages: tuple[BudgetUsage, ...] = ()
    run: str = ""
