"""What a group of chains, or a whole rollout, may spend together, and the meter that counts it.

Knows no chains and no engines. A meter belongs to one rollout and to one event loop.
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


class Meter:
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
    def used_up(self) -> str | None:
        """The stop reason, if there is nothing left of something."""
        for what in ("tokens", "turns", "tool_calls"):
            limit = getattr(self.budget, what)
            if limit is not None and getattr(self, what) >= limit:
                return f"{self.name}_{what}"
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return f"{self.name}_seconds"
        return None

    @property
    def left(self) -> int | None:
        """Tokens that are neither spent nor promised; None is no limit."""
        return None if self.budget.tokens is None else self.budget.tokens - self.tokens - self._reserved

    def changes(self) -> asyncio.Future[None]:
        """Done when something that was promised has been spent or given back."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def _tell(self) -> None:
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
            self._changed = None


class Action:
    """One action's share of some meters: `async with Action(meters, 64) as it`, then sample at most `it.tokens`.

    stop     why there may be no action, or None
    cut_by   the stop reason of the budget that made `tokens` less than was wanted
    used     set it to the number of tokens that were sampled; without it nothing was spent
    """

    def __init__(self, meters: Sequence[Meter], wanted: int) -> None:
        self._meters = meters
        self.tokens = self._wanted = wanted
        self.stop: str | None = None
        self.cut_by: str | None = None
        self.used: int | None = None
        self._promised = False

    async def __aenter__(self) -> Action:
        while True:
            if (stop := next((why for m in self._meters if (why := _over(m))), None)) is not None:
                self.stop = stop
                return self
            short = [m for m in self._meters if _short(m, self._wanted)]
            if not short:
                break
            await asyncio.wait([m.changes() for m in short], return_when=asyncio.FIRST_COMPLETED)
        for meter in self._meters:
            if meter.left is not None and meter.left < self.tokens:
                self.tokens, self.cut_by = meter.left, f"{meter.name}_tokens"
        for meter in self._meters:
            meter._reserved += self.tokens
            meter._running += 1
            meter.turns += 1
        self._promised = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._promised:
            return
        for meter in self._meters:
            meter._reserved -= self.tokens
            meter._running -= 1
            meter.tokens += self.used or 0
            meter.turns -= self.used is None
            meter._tell()


def _over(meter: Meter) -> str | None:
    """Why no further action may begin. Tool calls are not asked for here: an answer needs none."""
    why = meter.used_up
    if why is None or not why.endswith("_tool_calls"):
        return why
    turns = meter.budget.turns
    return f"{meter.name}_turns" if turns is not None and meter.turns >= turns else None


def _short(meter: Meter, wanted: int) -> bool:
    """Whether to wait for what others may give back: too little is left, and somebody runs."""
    return meter.left is not None and meter.left < wanted and meter._running > 0


def take_calls(meters: Sequence[Meter], wanted: int) -> tuple[int, str | None]:
    """Spend up to `wanted` tool calls. Returns how many may run, and the stop reason if that is fewer."""
    granted, stop = wanted, None
    for meter in meters:
        limit = meter.budget.tool_calls
        if limit is not None and limit - meter.tool_calls < granted:
            granted, stop = max(0, limit - meter.tool_calls), f"{meter.name}_tool_calls"
    for meter in meters:
        meter.tool_calls += granted
    return granted, stop
