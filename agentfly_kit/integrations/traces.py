"""OpenTelemetry traces of the chains of an agent."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly_kit.agent.progress import RolloutEvent
from agentfly_kit.agent.runner import RolloutHandle
from agentfly_kit.agent.settings import AgentSettings
from agentfly_kit.errors import SettingsError
from agentfly_kit.trajectories import Trajectory
from agentfly_kit.types import Message, ToolCall, Turn, text_of

__all__ = ["opentelemetry"]


def opentelemetry(tracer: Any = None, *, content: bool = False) -> Callable[[RolloutHandle], object]:
    """Return a function for `Agent(watch=...)` that records each chain as a trace.

    The root span of a chain contains one span per turn, tool call and scoring. Names follow the semantic conventions
    for generative AI. Spans are created after the chain has ended, with the recorded times, and are therefore not
    active while tools run.

    Args:
        tracer: An OpenTelemetry tracer; by default a tracer of the global provider.
        content: True to record messages, and the arguments and results of tool calls.

    Raises:
        SettingsError: If OpenTelemetry is not installed.
    """
    if importlib.util.find_spec("opentelemetry") is None:
        raise SettingsError('opentelemetry is not installed: pip install "agentfly_kit[otel]"')
    from opentelemetry import trace

    tracer = trace.get_tracer("agentfly_kit") if tracer is None else tracer
    return lambda rollout: rollout.subscribe(_RolloutTracer(tracer, content, rollout.agent))


class _RolloutTracer:
    """Listener that collects the events of each chain of a rollout and writes a trace when the chain ends."""

    def __init__(self, tracer: Any, content: bool, agent: AgentSettings) -> None:
        self._tracer, self._content, self._agent = tracer, content, agent
        self._model = getattr(agent.engine, "model", None) or agent.name
        self._began = time.time_ns()
        self._events: dict[str, list[RolloutEvent]] = {}

    def __call__(self, event: RolloutEvent) -> None:
        self._events.setdefault(event.trajectory, []).append(event)
        if event.kind == "chain" and event.phase == "end":
            self._write(self._events.pop(event.trajectory))

    def _write(self, events: Sequence[RolloutEvent]) -> None:
        """Write the trace of one chain. The first and last events are the start and end of the chain."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        trajectory = events[-1].result
        assert trajectory is not None
        name = f"invoke_agent {self._agent.name}"
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "agentfly_kit",
            "gen_ai.agent.name": self._agent.name,
            "gen_ai.conversation.id": trajectory.id,
            "agentfly.task": trajectory.task.id,
            "agentfly.group": trajectory.group,
            "agentfly.stop": trajectory.stop,
            "agentfly.reward": trajectory.reward,
        }
        root = self._start(name, SpanKind.INTERNAL, attributes, events[0], Context())
        if not root.is_recording():  # the sampler has dropped the trace
            return
        error = trajectory.error
        if error is not None or events[-1].state == "cancelled":
            _set_error(root, error.type if error else "cancelled", str(error or "the chain was cancelled"))
        inside = set_span_in_context(root, Context())
        # A fork of a chain begins with turns of its parent, which have no events. So turns and calls are matched from
        # the end.
        turns = [turn for turn in trajectory.turns if turn.kind == "action"]
        calls = list(trajectory.tool_calls)
        for start, end in reversed(_pairs(events[1:-1])):
            if start.kind == "turn":
                turn = _take_last(turns, [turn.text for turn in turns], end.detail)
                attributes = self._turn_attributes(trajectory, turn)
                span = self._start(f"chat {self._model}", SpanKind.CLIENT, attributes, start, inside)
                if turn is None:
                    _set_error(span, "cancelled" if error is None else error.type, end.detail)
            elif start.kind == "tool":
                call = _take_last(calls, [(call.id, call.name) for call in calls], (start.call, start.detail))
                attributes = self._tool_attributes(start, call)
                span = self._start(f"execute_tool {start.detail}", SpanKind.INTERNAL, attributes, start, inside)
                result = None if call is None else call.result
                if result is None:
                    _set_error(span, "cancelled", end.detail)
                elif not result.ok:
                    _set_error(span, result.error.type if result.error else "ToolError", "")
            else:
                span = self._start("reward", SpanKind.INTERNAL, {}, start, inside)
                scores = {} if trajectory.reward is None else {**trajectory.metrics, "reward": trajectory.reward}
                for metric, value in scores.items():
                    evaluation = {"gen_ai.evaluation.name": metric, "gen_ai.evaluation.score.value": value}
                    span.add_event("gen_ai.evaluation.result", evaluation, self._time(end))
            span.end(self._time(end))
        root.end(self._time(events[-1]))

    def _time(self, event: RolloutEvent) -> int:
        return self._began + int(event.time * 1e9)

    def _start(self, name: str, kind: Any, attributes: Mapping[str, Any], event: RolloutEvent, context: Any) -> Any:
        given = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, context, kind, given, start_time=self._time(event))

    def _turn_attributes(self, trajectory: Trajectory, turn: Turn | None) -> dict[str, Any]:
        sampling = trajectory.sampling
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "agentfly_kit",
            "gen_ai.conversation.id": trajectory.id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.max_tokens": sampling.max_tokens,
        }
        if turn is None:
            return attributes
        context = turn.row_path[:-1]
        attributes |= {
            "gen_ai.request.seed": turn.seed,
            "gen_ai.response.finish_reasons": None if turn.stop is None else (turn.stop,),
            "agentfly.version": max(turn.versions) if turn.versions else None,
            "agentfly.mean_logprob": statistics.fmean(turn.logprobs) if turn.logprobs else None,
            "agentfly.mean_entropy": statistics.fmean(turn.entropies) if turn.entropies else None,
        }
        if turn.ids is not None:
            attributes["gen_ai.usage.input_tokens"] = sum(t.num_tokens for t in context)
            attributes["gen_ai.usage.output_tokens"] = turn.num_tokens
        if self._content:
            attributes["gen_ai.input.messages"] = _to_json([_message(m) for t in context for m in t.messages])
            attributes["gen_ai.output.messages"] = _to_json(
                [_message(m) | {"finish_reason": turn.stop or "stop"} for m in turn.messages]
            )
        return attributes

    def _tool_attributes(self, start: RolloutEvent, call: ToolCall | None) -> dict[str, Any]:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": start.detail,
            "gen_ai.tool.call.id": start.call,
        }
        if self._content and call is not None:
            attributes["gen_ai.tool.call.arguments"] = _to_json(call.arguments)
            if call.result is not None:
                attributes["gen_ai.tool.call.result"] = call.result.observation
        return attributes


def _pairs(events: Sequence[RolloutEvent]) -> list[tuple[RolloutEvent, RolloutEvent]]:
    """Return the start and end event of each turn, tool call and scoring, in the order of the end events."""
    started: dict[tuple[str, str], RolloutEvent] = {}
    pairs = []
    for event in events:
        if event.phase == "start":
            started[event.kind, event.call] = event
        else:
            pairs.append((started.pop((event.kind, event.call)), event))
    return pairs


def _take_last(items: list[Any], keys: Sequence[Any], key: Any) -> Any:
    """Remove and return the last of `items` whose entry in `keys` equals `key`, or None."""
    found = [i for i, other in enumerate(keys) if other == key]
    return items.pop(found[-1]) if found else None


def _set_error(span: Any, error_type: str, description: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, description))


def _message(message: Message) -> dict[str, Any]:
    """Return a chat message in the format of OpenTelemetry's conventions, which divides messages into parts."""
    content = text_of(message)
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    else:
        parts = [{"type": "text", "content": content}] if content else []
    for call in message.get("tool_calls") or ():
        parts.append({"type": "tool_call", "id": call.get("id")} | dict(call["function"]))
    return {"role": message["role"], "parts": parts}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
