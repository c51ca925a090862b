"""Constraints on actions, from the tool choice and the response format of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly_kit._async import threads
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.endpoint.reply import ReplyOptions, RequestError
from agentfly_kit.samples import Constraint


async def find_constraint(
    agent: AgentSettings, tools: Sequence[dict[str, Any]], options: ReplyOptions, warn: Callable[[str, str], None]
) -> Constraint | None:
    """Return the constraint that a request demands. Warn if the constraint cannot be enforced."""
    try:
        constraint = make_constraint(agent, tools, options)
    except NotImplementedError as error:
        warn("constraint", f"the harness asked for a tool call or JSON, which is not enforced, because {error}")
        return None
    await threads.call(agent.engine.check_constraint, constraint)
    return constraint


def make_constraint(agent: AgentSettings, tools: Sequence[dict[str, Any]], options: ReplyOptions) -> Constraint:
    """Return a constraint to one call of an allowed tool or, unless a call is required, a JSON reply.

    Raises:
        RequestError: if no tool can be called.
        NotImplementedError: if the engine or the format of tool calls cannot be constrained. The message states why.
    """
    functions = [tool["function"] for tool in tools]
    body: dict[str, Any] = {}
    if options.must_call is not None:
        functions = [function for function in functions if options.must_call in ("", function["name"])]
        if not tools:
            raise RequestError("'tools' must have at least one tool, because 'tool_choice' requires a call")
        if not functions:
            raise RequestError(f"'tool_choice' must name one of 'tools', got {options.must_call!r}")
        named = {"type": "function", "function": {"name": options.must_call}}
        body["tool_choice"] = named if options.must_call else "required"
    if options.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": options.schema}}
    if reason := agent.engine.constraint_obstacle():
        raise NotImplementedError(reason)
    choices: list[tuple[str, ...]] = []
    if agent.exact:
        for function in functions:
            if not isinstance(function["parameters"], Mapping):
                raise RequestError(f"the parameters of {function['name']!r} must be a JSON schema of an object")
            if (pattern := agent.chat.call_pattern(function["name"])) is None:
                raise NotImplementedError(f"arguments in the format {agent.chat.format.name!r} are not JSON")
            choices.append((pattern[0], json.dumps(function["parameters"]), pattern[1]))
        if options.must_call is None:
            choices.append(("", json.dumps(options.schema)))
    # A prompt given as text or ids bypasses the chat template, which may end with an opening tag of a thought.
    thinking_end = agent.chat.thinking_end if agent.exact and options.prompt is None else ""
    return Constraint(tuple(choices), thinking_end, json.dumps(body))
