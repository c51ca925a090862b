"""Budgets shared by a group of chains or a whole rollout, and the accounting of their use.

A `BudgetUsage` belongs to one rollout and one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
                raise SettingsError(f"Budget({name}={value!r}): must be an integer of at least 1, or None for no limit")
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"Budget(seconds={self.seconds!r}): must be above 0, or None for no limit")


class BudgetUsage:
    """Running totals of one budget. `name` ("group" or "run") is the prefix of its stop reasons."""

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.tokens = self.turns = self.tool_calls = 0
        # Deadline on the clock of the event loop; set by `start`.
        self.deadline: float | None = None
        self._reserved = 0
        self._running = 0
        self._changed: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start the clock with the first chain. Idempotent."""
        if self.deadline is None and self.budget.seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self.budget.seconds

    @property
    def exhausted(self) -> str | None:
        """Stop reason of the first limit that is used up, or None."""
        for what in ("tokens", "turns", "tool_calls"):
            limit = getattr(self.budget, what)
            if limit is not None and getattr(self, what) >= limit:
                return f"{self.name}_{what}"
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return f"{self.name}_seconds"
        return None

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are neither used nor reserved; None if there is no limit."""
        return None if self.budget.tokens is None else self.budget.tokens - self.tokens - self._reserved

    def next_change(self) -> asyncio.Future[None]:
        """Return a future that completes when the next reservation is released."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _notify(self) -> None:
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
            self._changed = None


class TokenReservation:
    """Async context manager that reserves tokens of several budgets for one action.

    Use as `async with TokenReservation(usages, 64) as reservation`, then sample at most `reservation.tokens`.

    Attributes:
        tokens: number of tokens granted.
        stop: stop reason if no action may start, else None.
        limited_by: stop reason of the budget that reduced `tokens` below the requested number, else None.
        used: to be set to the number of sampled tokens; if left None, the action does not count.
    """

    def __init__(self, usages: Sequence[BudgetUsage], wanted: int) -> None:
        self._meters = usages
        self.tokens = self._wanted = wanted
        self.stop: str | None = None
        self.limited_by: str | None = None
        self.used: int | None = None
        self._held = False

    async def __aenter__(self) -> TokenReservation:
        while True:
            if (stop := next((why for m in self._meters if (why := _stop_reason(m))), None)) is not None:
                self.stop = stop
                return self
            short = [m for m in self._meters if _must_wait(m, self._wanted)]
            if not short:
                break
            await asyncio.wait([m.next_change() for m in short], return_when=asyncio.FIRST_COMPLETED)
        for usage in self._meters:
            if usage.tokens_left is not None and usage.tokens_left < self.tokens:
                self.tokens, self.limited_by = usage.tokens_left, f"{usage.name}_tokens"
        for usage in self._meters:
            usage._reserved += self.tokens
            usage._running += 1
            usage.turns += 1
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._held:
            return
        for usage in self._meters:
            usage._reserved -= self.tokens
            usage._running -= 1
            usage.tokens += self.used or 0
            usage.turns -= self.used is None
            usage._notify()


def _stop_reason(usage: BudgetUsage) -> str | None:
    """Return the stop reason that forbids another action. Tool calls do not matter here: an answer needs none."""
    why = usage.exhausted
    if why is None or not why.endswith("_tool_calls"):
        return why
    turns = usage.budget.turns
    return f"{usage.name}_turns" if turns is not None and usage.turns >= turns else None


def _must_wait(usage: BudgetUsage, wanted: int) -> bool:
    """Return True if too few tokens are left and a running action may release some."""
    return usage.tokens_left is not None and usage.tokens_left < wanted and usage._running > 0


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
