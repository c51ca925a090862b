"""When the limits of an agent end a chain, and with which stop reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agentfly_kit.agent.budget import BudgetUsage, reserve_tool_calls
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.types import ToolCall, ToolResult, Turn


def stop_after_action(agent: AgentSettings, turn: Turn, limit: int, limited_by: str | None) -> str | None:
    """Return the stop reason of a chain that ends with this action, else None.

    Args:
        agent: settings of the agent.
        turn: the action.
        limit: maximum number of tokens that was requested.
        limited_by: stop reason of the shared budget that set `limit`, if one did.
    """
    if turn.stop == "abort":
        return "cancelled"
    if turn.stop == "length":
        if turn.ids is not None and turn.num_tokens < limit:
            return "context_full"
        at_limit = agent.max_tokens is not None and action_tokens(turn) >= agent.max_tokens
        return limited_by or ("chain_tokens" if at_limit else "turn_tokens")
    return None if turn.tool_calls else "answered"


def stop_after_calls(
    agent: AgentSettings, action: Turn, results: Sequence[ToolResult], over_limit: str | None
) -> str | None:
    """Return the stop reason of a chain that ends with the results of an action's calls, else None."""
    if any(result.env_done for result in results):
        return "env_done"
    if any(result.done for result in results):
        return "tool_stopped"
    if over_limit is not None:
        return over_limit
    if _invalid_streak(agent, action) >= agent.max_invalid_calls:
        return "invalid_call"
    return "max_turns" if action.actions >= agent.max_turns else None


def refuse_calls(
    agent: AgentSettings, action: Turn, calls: Sequence[ToolCall], usages: Sequence[BudgetUsage]
) -> tuple[dict[int, ToolResult], str | None]:
    """Return results for the calls that exceed a limit, by position, and the stop reason (None if all may run)."""
    valid = [i for i, call in enumerate(calls) if _reaches_tool(agent, call)]
    granted, over_limit = len(valid), None
    if agent.max_tool_calls is not None:
        made = sum(_reaches_tool(agent, c) for t in action.path if t.author == "tool" for c in t.tool_calls)
        left = max(0, agent.max_tool_calls - made)
        if left < granted:
            granted, over_limit = left, "chain_tool_calls"
    granted, shared_limit = reserve_tool_calls(usages, granted)
    over_limit = shared_limit or over_limit
    return {
        i: ToolResult(False, f"{calls[i].name} was not run: there are no tool calls left ({over_limit})")
        for i in valid[granted:]
    }, over_limit


def action_tokens(leaf: Turn) -> int:
    """Return the number of tokens of the actions up to and including `leaf`."""
    return sum(turn.num_tokens for turn in leaf.path if turn.kind == "action")


def _reaches_tool(agent: AgentSettings, call: ToolCall) -> bool:
    return call.error is None and call.name in agent.tools


def _invalid_streak(agent: AgentSettings, action: Turn) -> int:
    """Return the number of latest consecutive actions whose tool calls were all malformed or unknown."""
    actions = [turn for turn in reversed(action.path) if turn.completes_action]
    invalid = (turn.tool_calls and not any(_reaches_tool(agent, c) for c in turn.tool_calls) for turn in actions)
    return sum(1 for _ in itertools.takewhile(bool, invalid))
