"""Budgets shared by several chains, and the stop reasons of chains that reach a limit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentfly_kit._display import Displayable
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.errors import check_settings
from agentfly_kit.types import ToolCall, ToolResult, Turn


@dataclass(frozen=True)
class Budget(Displayable):
    """Limits shared by several chains, given as `budget` or `group_budget` to `agent.rollout`.

    By default, nothing is limited. Limits on a single chain are settings of the agent, such as `max_tokens`.
    The limits on tokens, turns and tool calls are never exceeded. A chain that would exceed a limit is truncated and
    scored, with a stop reason such as `run_tokens` or `group_tool_calls`. Chains that have not started when a limit is
    reached are listed in `rollout.not_run`. The choice of chains that are truncated or do not start is deterministic
    only with `max_concurrency=1` and without `seconds`.

    Args:
        tokens: Maximum number of sampled tokens. While an action runs, it reserves the maximum number of tokens that it
            may sample. An action for which too few tokens remain waits until running actions release some. If no action
            is running, the new action receives the remaining tokens.
        turns: Maximum number of actions.
        tool_calls: Maximum number of calls that reach a tool. Malformed calls and calls of unknown tools do not count.
        seconds: Time limit in seconds from the start of the rollout or, for `group_budget`, of the first chain of the
            group. Chains that are still running at the limit are cancelled.

    Raises:
        SettingsError: if a limit is not positive.
    """

    tokens: int | None = None
    turns: int | None = None
    tool_calls: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_settings(
            self, {**dict.fromkeys(("tokens", "turns", "tool_calls"), "of at least 1"), "seconds": "above 0"}
        )


class BudgetUsage:
    """Usage of a budget so far. `name`, "group" or "run", is the prefix of the stop reasons."""

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.tokens = self.turns = self.tool_calls = 0
        # Deadline as a value of `loop.time()`, set by `start`.
        self.deadline: float | None = None
        # `running` is the number of running actions, and `reserved` the number of tokens that they reserve.
        self.reserved = 0
        self.running = 0
        # Set when a reservation is released, and then replaced by a new event.
        self.released = asyncio.Event()

    def start(self) -> None:
        """Start the time limit. Only the first call has an effect."""
        if self.deadline is None and self.budget.seconds is not None:
            self.deadline = asyncio.get_running_loop().time() + self.budget.seconds

    def exhausted(self, limits: Sequence[str] = ("tokens", "turns", "tool_calls")) -> str | None:
        """Return the stop reason of the first limit that has been reached, or None. The time limit is checked last."""
        for name in limits:
            limit = getattr(self.budget, name)
            if limit is not None and getattr(self, name) >= limit:
                return f"{self.name}_{name}"
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            return f"{self.name}_seconds"
        return None

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens that are neither used nor reserved; None if there is no limit."""
        return None if self.budget.tokens is None else self.budget.tokens - self.tokens - self.reserved


@dataclass
class TokenReservation:
    """Tokens granted to one action.

    When the action has finished, set `used` to the number of sampled tokens; if `used` remains None, the action is not
    counted. `stop` is the stop reason if the action must not start. `limited_by` is the stop reason of the budget that
    reduced the number of granted tokens.
    """

    tokens: int
    stop: str | None = None
    limited_by: str | None = None
    used: int | None = None


@asynccontextmanager
async def reserve_tokens(usages: Sequence[BudgetUsage], wanted: int) -> AsyncIterator[TokenReservation]:
    """Reserve up to `wanted` tokens of every budget for one action, and yield the reservation."""
    reservation = TokenReservation(wanted)
    while True:
        # The limit on tool calls is not checked, because the action may answer without calling a tool.
        reservation.stop = next((stop for usage in usages if (stop := usage.exhausted(("tokens", "turns")))), None)
        if reservation.stop is not None:
            yield reservation
            return
        # Wait while a budget has too few tokens left and a running action may still release some.
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


def refuse_calls(
    agent: AgentSettings, action: Turn, calls: Sequence[ToolCall], usages: Sequence[BudgetUsage]
) -> tuple[dict[int, ToolResult], str | None]:
    """Return failed results for the calls that exceed a limit, keyed by index, and the stop reason or None."""
    valid = [i for i, call in enumerate(calls) if _reaches_tool(agent, call)]
    limits: list[tuple[int, str | None]] = [(len(valid), None)]
    if agent.max_tool_calls is not None:
        made = sum(_reaches_tool(agent, c) for t in action.path if t.author == "tool" for c in t.tool_calls)
        limits.append((agent.max_tool_calls - made, "chain_tool_calls"))
    limits += [
        (usage.budget.tool_calls - usage.tool_calls, f"{usage.name}_tool_calls")
        for usage in usages
        if usage.budget.tool_calls is not None
    ]
    left, stop = min(limits, key=lambda limit: limit[0])
    granted = max(0, left)
    for usage in usages:
        usage.tool_calls += granted
    return {
        i: ToolResult(False, f"{calls[i].name} was not run: there are no tool calls left ({stop})", ran=False)
        for i in valid[granted:]
    }, stop


def stop_after_action(agent: AgentSettings, turn: Turn, limit: int, limited_by: str | None) -> str | None:
    """Return the stop reason if the chain ends with this action, or None if it continues.

    `limit` is the maximum number of tokens that was requested from the engine. `limited_by` is the stop reason of the
    shared budget that determined `limit`, or None.
    """
    if turn.stop == "abort":
        return "cancelled"
    if turn.stop == "length":
        if turn.ids is not None and turn.num_tokens < limit:
            return "context_full"
        return limited_by or (
            "turn_tokens" if agent.max_tokens is None or action_tokens(turn) < agent.max_tokens else "chain_tokens"
        )
    stop = stop_of_complete_action(agent, turn)
    return None if stop == "answered" and nudge_after(agent, turn) is not None else stop


def stop_of_complete_action(agent: AgentSettings, action: Turn) -> str | None:
    """Return the stop reason that follows from the content of a complete action, or None if the chain continues.

    Nudges are not considered. The result is the same for sampled and forced actions, and when a chain is rewound to the
    action.
    """
    user_replies = agent.user is not None and action.actions < agent.max_turns
    return None if action.tool_calls or user_replies else "answered"


def nudge_after(agent: AgentSettings, action: Turn) -> str | None:
    """Return the user message to append after an action without a tool call, or None if the action is the answer."""
    nudges = sum(turn.kind == "observation" and turn.author == "nudge" for turn in action.path)
    return agent.nudge if nudges < agent.max_nudges and action.actions < agent.max_turns else None


def stop_after_calls(
    agent: AgentSettings, action: Turn, results: Sequence[ToolResult], over_limit: str | None
) -> str | None:
    """Return the stop reason if the chain ends after these tool results, or None if it continues."""
    if any(result.env_done for result in results):
        return "env_done"
    if any(result.done for result in results):
        return "tool_stopped"
    if over_limit is not None:
        return over_limit
    if _invalid_streak(agent, action) >= agent.max_invalid_calls:
        return "invalid_call"
    return "max_turns" if action.actions >= agent.max_turns else None


def action_tokens(leaf: Turn) -> int:
    """Return the total number of tokens of the actions from the first turn up to `leaf`."""
    return sum(turn.num_tokens for turn in leaf.path if turn.kind == "action")


def _reaches_tool(agent: AgentSettings, call: ToolCall) -> bool:
    return call.error is None and call.name in agent.tools


def _invalid_streak(agent: AgentSettings, action: Turn) -> int:
    """Return the number of consecutive actions, ending with `action`, that made only malformed or unknown calls."""
    actions = [turn for turn in reversed(action.path) if turn.completes_action]
    invalid = (turn.tool_calls and not any(_reaches_tool(agent, c) for c in turn.tool_calls) for turn in actions)
    return sum(1 for _ in itertools.takewhile(bool, invalid))
