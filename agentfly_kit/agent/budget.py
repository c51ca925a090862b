"""What a group of chains, or a whole rollout, may spend together, and what has been spent of it.

Knows no chains and no engines. A `BudgetUsage` belongs to one rollout and to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentfly_kit.errors import SettingsError


@dataclass(frozen=True)
class Budget:
    """A limit that several chains share; None is no limit. `agent.rollout(tasks, budget=, group_budget=)`.

    One chain's own limits are the agent's: `max_tokens, max_turns, max_tool_calls, timeout`.
    Tokens, turns and tool calls are never exceeded. A chain that would, ends as truncated, with a stop reason such as
    `run_tokens` or `group_tool_calls`, and is scored; chains that have not begun by then are listed in
    `rollout.not_run`. Which chains those are depends, with several at a time, on who came first; one at a time
    (`max_concurrency=1`) and without `seconds` it is always the same ones.
    """

    tokens: int | None = None
    """Sampled tokens. Towards the end chains wait for each other: an action begins when what is left is enough for the
    longest that it may become, or when nothing else runs; then it gets what is left."""
    turns: int | None = None
    """Actions."""
    tool_calls: int | None = None
    """Calls that reached a tool; unreadable and unknown ones cost nothing."""
    seconds: float | None = None
    """Since the rollout began, or the group's first chain. What runs then is cancelled."""

    def __post_init__(self) -> None:
        for name in ("tokens", "turns", "tool_calls"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingsError(
                    f"Budget({name}={value!r}): give a whole number of at least 1, or None for no limit"
                )
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"Budget(seconds={self.seconds!r}): give seconds above 0, or None for no limit")


class BudgetUsage:
    """What was spent of one budget. `name` is the first word of its stop reasons: group, run."""

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.tokens = self.turns = self.tool_calls = 0
        self.deadline: float | None = None
        """In the event loop's time, from `start` on."""
        self._reserved = 0
        self._running = 0
        self._changed: asyncio.Future[None] | None = None

    def start(self) -> None:
        """The first chain begins; a second start changes nothing."""
        if self.deadline is None and self.budget.seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self.budget.seconds

    @property
    def exhausted(self) -> str | None:
        """The stop reason, if there is nothing left of something."""
        for what in ("tokens", "turns", "tool_calls"):
            limit = getattr(self.budget, what)
            if limit is not None and getattr(self, what) >= limit:
                return f"{self.name}_{what}"
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return f"{self.name}_seconds"
        return None

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are neither spent nor promised; None is no limit."""
        return None if self.budget.tokens is None else self.budget.tokens - self.tokens - self._reserved

    def next_change(self) -> asyncio.Future[None]:
        """Done when something that was promised has been spent or given back."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _notify(self) -> None:
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
            self._changed = None


class TokenReservation:
    """One action's share of some budgets: `async with TokenReservation(usages, 64) as it`, then sample at most
    `it.tokens`.

    stop     why there may be no action, or None
    limited_by   the stop reason of the budget that made `tokens` less than was wanted
    used     set it to the number of tokens that were sampled; without it nothing was spent
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
    """Why no further action may begin. Tool calls are not asked for here: an answer needs none."""
    why = usage.exhausted
    if why is None or not why.endswith("_tool_calls"):
        return why
    turns = usage.budget.turns
    return f"{usage.name}_turns" if turns is not None and usage.turns >= turns else None


def _must_wait(usage: BudgetUsage, wanted: int) -> bool:
    """Whether to wait for what others may give back: too little is left, and somebody runs."""
    return usage.tokens_left is not None and usage.tokens_left < wanted and usage._running > 0


def reserve_tool_calls(usages: Sequence[BudgetUsage], wanted: int) -> tuple[int, str | None]:
    """Spend up to `wanted` tool calls. Returns how many may run, and the stop reason if that is fewer."""
    granted, stop = wanted, None
    for usage in usages:
        limit = usage.budget.tool_calls
        if limit is not None and limit - usage.tool_calls < granted:
            granted, stop = max(0, limit - usage.tool_calls), f"{usage.name}_tool_calls"
    for usage in usages:
        usage.tool_calls += granted
    return granted, stop
