"""Budgets shared by a group of chains or a whole rollout, and the accounting of their use.

A `BudgetUsage` belongs to one rollout and one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentfly_kit.errors import SettingsError


@dataclass(frozen=True)
class Budget:
    """Limits shared by several chains; None means no limit. Pass to `agent.rollout(tasks, budget=, group_budget=)`.

    Limits of a single chain are arguments of the agent: `max_tokens`, `max_turns`, `max_tool_calls`, `timeout`.
    The limits on tokens, turns and tool calls are never exceeded. A chain that would exceed one is truncated, with a
    stop reason such as `run_tokens` or `group_tool_calls`, and scored. Chains that have not started by then are listed
    in `rollout.not_run`. Which chains these are depends on timing if several run concurrently; it is deterministic with
    `max_concurrency=1` and without `seconds`.

    Args:
        tokens: Number of sampled tokens. Each running action reserves its maximum length. When too few tokens remain
            for another, it waits until some are released, or until no other action is running; then it receives the
            remainder.
        turns: Number of actions.
        tool_calls: Number of calls that reach a tool. Malformed calls and calls of unknown tools do not count.
        seconds: Seconds since the start of the rollout, or of the first chain of the group. Running chains are then
            cancelled.

    Raises:
        SettingsError: if a limit is not positive.
    """

    tokens: int | None = None
    turns: int | None = None
    tool_calls: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "turns", "tool_calls"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingsError(f"{name} must be an integer of at least 1, or None for no limit, got {value!r}")
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"seconds must be above 0, or None for no limit, got {self.seconds!r}")


class BudgetUsage:
    """Running totals of one budget. `name` ("group" or "run") is the prefix of its stop reasons."""

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.tokens = self.turns = self.tool_calls = 0
        # Deadline on the clock of the event loop; set by `start`.
        self.deadline: float | None = None
        # Tokens reserved by running actions, and the number of these actions.
        self.reserved = 0
        self.running = 0
        # Set when a reservation is released, and then replaced.
        self.released = asyncio.Event()

    def start(self) -> None:
        """Start the clock with the first chain. Idempotent."""
        if self.deadline is None and self.budget.seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self.budget.seconds

    def exhausted(self, limits: Sequence[str] = ("tokens", "turns", "tool_calls")) -> str | None:
        """Return the stop reason of the first of these limits that is used up, or of the time limit; None if none."""
        for name in limits:
            limit = getattr(self.budget, name)
            if limit is not None and getattr(self, name) >= limit:
                return f"{self.name}_{name}"
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return f"{self.name}_seconds"
        return None

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are neither used nor reserved; None if there is no limit."""
        return None if self.budget.tokens is None else self.budget.tokens - self.tokens - self.reserved


@dataclass
class TokenReservation:
    """Tokens reserved for one action.

    Attributes:
        tokens: number of tokens granted.
        stop: stop reason if no action may start, else None.
        limited_by: stop reason of the budget that reduced `tokens` below the requested number, else None.
        used: to be set to the number of sampled tokens; if left None, the action does not count.
    """

    tokens: int
    stop: str | None = None
    limited_by: str | None = None
    used: int | None = None


@asynccontextmanager
async def reserve_tokens(usages: Sequence[BudgetUsage], wanted: int) -> AsyncIterator[TokenReservation]:
    """Reserve tokens of several budgets for one action, which may sample at most `reservation.tokens`.

    Args:
        usages: the usages of the budgets.
        wanted: maximum number of tokens of the action.
    """
    reservation = TokenReservation(wanted)
    while True:
        # Used up tool calls do not matter here: an action that answers needs none.
        reservation.stop = next((stop for usage in usages if (stop := usage.exhausted(("tokens", "turns")))), None)
        if reservation.stop is not None:
            yield reservation
            return
        # Wait while too few tokens are left and a running action may release some.
        short = [u for u in usages if u.tokens_left is not None and u.tokens_left < wanted and u.running > 0]
        if not short:
            break
        await short[0].released.wait()
    for usage in usages:
        if usage.tokens_left is not None and usage.tokens_left < reservation.tokens:
            reservation.tokens, reservation.limited_by = usage.tokens_left, f"{usage.name}_tokens"
    granted = reservation.tokens
    for usage in usages:
        usage.reserved += granted
        usage.running += 1
        usage.turns += 1
    try:
        yield reservation
    finally:
        for usage in usages:
            usage.reserved -= granted
            usage.running -= 1
            usage.tokens += reservation.used or 0
            usage.turns -= reservation.used is None
            usage.released.set()
            usage.released = asyncio.Event()


def reserve_tool_calls(usages: Sequence[BudgetUsage], wanted: int) -> tuple[int, str | None]:
    """Count up to `wanted` tool calls against all budgets.

    Returns:
        The number of calls granted, and the stop reason if that is fewer than `wanted`.
    """
    granted, stop = wanted, None
    for usage in usages:
        limit = usage.budget.tool_calls
        if limit is not None and limit - usage.tool_calls < granted:
            granted, stop = max(0, limit - usage.tool_calls), f"{usage.name}_tool_calls"
    for usage in usages:
        usage.tool_calls += granted
    return granted, stop
