"""OpenTelemetry traces: the spans of every chain, exported in this process and to an OTLP receiver."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from agents import agent, call, played, tasks
from test_agent import ODD
from test_trainer import SMALL, learner, small, start
from waiting import GUARD

import agentfly_kit as af

pytest.importorskip("opentelemetry.sdk", reason='needs the extra: pip install -e ".[otel]"')

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, StaticSampler
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

Spans = list[ReadableSpan]


class Recorder:
    """A tracer whose finished spans are kept in memory."""

    def __init__(self, *, content: bool = False) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.watch = af.traces.opentelemetry(provider.get_tracer("test"), content=content)

    def traces(self) -> dict[str, Spans]:
        """Return the spans of each chain by its id, the root span last."""
        by_trace: dict[int, Spans] = {}
        for span in self.exporter.get_finished_spans():
            by_trace.setdefault(span.context.trace_id, []).append(span)
        return {str(spans[-1].attributes["gen_ai.conversation.id"]): spans for spans in by_trace.values()}


@pytest.fixture(params=[False, True], ids=["without", "with content"])
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return Recorder(content=request.param)


def named(spans: Spans, prefix: str) -> Spans:
    return sorted((s for s in spans if s.name.startswith(prefix)), key=lambda s: s.start_time)


async def test_spans_repeat_the_trajectories(recorder: Recorder) -> None:
    """One trace per chain; its spans nest and have the numbers of the turns, calls and rewards."""
    traced = agent(watch=recorder.watch, name="solver")
    plain = await agent(name="solver").rollout(tasks(4), 2)
    rollout = await traced.rollout(tasks(4), 2)
    assert [t.ids.tolist() for t in rollout] == [t.ids.tolist() for t in plain]
    traces = recorder.traces()
    assert sorted(traces) == sorted(t.id for t in rollout)
    assert sum(len(t.tool_calls) for t in rollout) > 0
    for t in rollout:
        *inside, root = traces[t.id]
        assert root.name == "invoke_agent solver" and root.parent is None
        assert root.attributes["agentfly.stop"] == t.stop and root.attributes["agentfly.reward"] == t.reward
        for span in inside:
            assert span.parent == root.context
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        turns = named(inside, "chat solver")
        assert [s.attributes["gen_ai.usage.output_tokens"] for s in turns] == [a.num_tokens for a in t.actions]
        assert [s.attributes["gen_ai.request.seed"] for s in turns] == [a.seed for a in t.actions]
        assert turns[0].attributes["gen_ai.usage.input_tokens"] == t.turns[0].num_tokens
        calls = named(inside, "execute_tool calculator")
        assert sorted(s.attributes["gen_ai.tool.call.id"] for s in calls) == sorted(c.id for c in t.tool_calls)
        (scored,) = named(inside, "reward")
        scores = {e.attributes["gen_ai.evaluation.name"]: e.attributes for e in scored.events}
        assert scores["reward"]["gen_ai.evaluation.score.value"] == t.reward and set(scores) == {"reward", *t.metrics}
        assert len(inside) == len(turns) + len(calls) + 1


async def test_names_are_those_of_the_conventions(recorder: Recorder) -> None:
    await agent(watch=recorder.watch).rollout(tasks(2))
    spans = recorder.exporter.get_finished_spans()
    known = {
        v for module in (gen_ai_attributes, error_attributes) for v in vars(module).values() if isinstance(v, str)
    }
    names = {key for span in spans for key in span.attributes}
    names |= {key for span in spans for event in span.events for key in event.attributes}
    assert len(names) > 10
    assert {name for name in names if not name.startswith("agentfly.")} <= known
    operations = {value.value for value in gen_ai_attributes.GenAiOperationNameValues}
    assert {s.attributes.get("gen_ai.operation.name", "chat") for s in spans} <= operations


async def test_a_trace_that_the_sampler_drops_costs_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    sampler = StaticSampler(Decision.DROP)
    decide = sampler.should_sample
    monkeypatch.setattr(sampler, "should_sample", lambda *given: asked.append(given[2]) or decide(*given))
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    await agent(watch=af.traces.opentelemetry(provider.get_tracer("test")), name="solver").rollout(tasks(2), 2)
    assert asked == ["invoke_agent solver"] * 4


async def test_content_is_recorded_only_on_request() -> None:
    without, recorded = Recorder(), Recorder(content=True)
    script = [call(), "2"]
    await played(script, watch=without.watch).rollout(tasks(1))
    (spans,) = without.traces().values()
    assert not any("messages" in key or "arguments" in key for span in spans for key in span.attributes)
    (trajectory,) = await played(script, watch=recorded.watch, system="Be brief.").rollout(tasks(1))
    (spans,) = recorded.traces().values()
    last = named(spans, "chat")[-1].attributes
    given, sampled = json.loads(last["gen_ai.input.messages"]), json.loads(last["gen_ai.output.messages"])
    assert [m["role"] for m in given + sampled] == [m["role"] for m in trajectory.messages]
    assert given[0] == {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}
    assert sampled[0]["parts"][0]["content"] == trajectory.final and sampled[0]["finish_reason"] == "stop"
    for span, made in zip(named(spans, "execute_tool"), trajectory.tool_calls, strict=True):
        assert json.loads(span.attributes["gen_ai.tool.call.arguments"]) == made.arguments
        assert made.result is not None and span.attributes["gen_ai.tool.call.result"] == made.result.observation


async def test_evaluations_and_training_runs_are_traced(recorder: Recorder) -> None:
    given = agent(watch=recorder.watch)
    await af.evaluate(given, tasks(2), seeds=(0, 1))
    assert len(recorder.traces()) == 4
    recorder.exporter.clear()
    config = SMALL.replace(steps=2, evaluate_every=2)
    policy = given.engine.policy.copy()  # type: ignore[attr-defined]
    learner = given.replace(engine=af.LocalEngine(policy), sampling=af.Sampling(max_tokens=8))
    await start(agent=learner, policy=policy, config=config, eval_tasks=tasks(3))
    groups = [name.partition(":")[0] for name in recorder.traces()]
    assert {name: groups.count(name) for name in groups} == {"train-0": 12, "train-1": 12, "evaluate-0": 3}


@af.tool
def flaky(expression: str) -> str:
    """Fail in two ways.

    Args:
        expression: "model" or "host".
    """
    raise af.ToolError("wrong") if expression == "model" else KeyError("bug")


async def test_failed_calls_have_their_error(recorder: Recorder) -> None:
    script = [call("model", "flaky"), call("host", "flaky"), "done"]
    await played(script, tools=[flaky], watch=recorder.watch).rollout(tasks(1))
    (spans,) = recorder.traces().values()
    assert [s.attributes["error.type"] for s in named(spans, "execute_tool")] == ["ToolError", "KeyError"]
    assert all(s.status.status_code.name == "UNSET" for s in (spans[-1], *named(spans, "chat")))


async def test_an_engine_failure_ends_the_spans_with_the_error(recorder: Recorder) -> None:
    await played([call(), af.errors.EngineError("out of memory")], watch=recorder.watch).rollout(tasks(1))
    (spans,) = recorder.traces().values()
    first, second = named(spans, "chat")
    assert "gen_ai.request.seed" in first.attributes and first.status.status_code.name == "UNSET"
    for span in (second, spans[-1]):
        assert span.status.status_code.name == "ERROR" and span.attributes["error.type"] == "EngineError"
        assert "out of memory" in str(span.status.description)


async def test_a_chain_that_fails_before_its_prompt_has_a_trace(recorder: Recorder) -> None:
    def before_chain(chain: Any) -> str:
        raise ValueError("no view")

    await played(["x"], watch=recorder.watch, before_chain=before_chain).rollout(tasks(1))
    ((root,),) = recorder.traces().values()
    assert root.attributes["error.type"] == "ValueError" and "no view" in str(root.status.description)


async def test_a_task_that_the_template_rejects_has_a_trace(recorder: Recorder) -> None:
    await played(["x"], watch=recorder.watch).rollout([*tasks(1), ODD])
    (root,) = recorder.traces()[f"rollout-0:{ODD.id}/0"]
    assert root.attributes["error.type"] == "ChatTemplateError"


async def test_cancelled_chains_are_exported(recorder: Recorder) -> None:
    """If a chain is cancelled during a tool call, the spans of the chain and of the call end with an error."""
    started = asyncio.Event()

    @af.tool
    async def wait(expression: str) -> str:
        """Wait for ever.

        Args:
            expression: ignored.
        """
        started.set()
        await asyncio.sleep(3600)
        return ""

    handle = played([call("1", "wait")], tools=[wait], watch=recorder.watch).rollout(tasks(1))
    running = asyncio.ensure_future(handle)
    await started.wait()
    handle.stop()
    assert len(await running) == 0
    ((tool, turn, root),) = recorder.traces().values()
    assert tool.name == "execute_tool wait" and turn.attributes["gen_ai.usage.output_tokens"] > 0
    assert tool.attributes["error.type"] == root.attributes["error.type"] == "cancelled"
    assert turn.status.status_code.name == "UNSET"


async def test_forks_have_their_own_turns(recorder: Recorder) -> None:
    rollout = await played(
        lambda task, turn: call() if turn == 0 else "2",
        watch=recorder.watch,
        after_observation=lambda chain: 1 if not chain.key.fork else None,
    ).rollout(tasks(1))
    traces = recorder.traces()
    parent, fork = rollout
    assert (len(parent.actions), len(fork.actions)) == (2, 2)
    assert len(named(traces[parent.id], "chat")) == 2 and len(named(traces[parent.id], "execute_tool")) == 1
    (turn,) = named(traces[fork.id], "chat")
    assert turn.attributes["gen_ai.request.seed"] == fork.actions[1].seed
    assert not named(traces[fork.id], "execute_tool")


@pytest.mark.parametrize("fails", ["start_span", "watch"])
async def test_an_error_of_the_tracer_costs_no_chain(fails: str) -> None:
    class Broken(Recorder):
        def __call__(self, rollout: Any) -> None:
            raise OSError("no collector")

    from opentelemetry.trace import NoOpTracer

    class BrokenTracer(NoOpTracer):
        def start_span(self, *given: Any, **more: Any) -> Any:
            raise OSError("no collector")

    watch = Broken() if fails == "watch" else af.traces.opentelemetry(BrokenTracer())
    with pytest.warns(UserWarning, match=r"raised OSError: no collector") as warned:
        rollout = await played([call(), "2"], watch=watch).rollout(tasks(3))
    assert len(warned) == 1, "not one warning per chain"
    assert [t.stop for t in rollout] == ["answered"] * 3


async def test_a_run_started_without_traces_continues_with_them(tmp_path: Path) -> None:
    recorder = Recorder()
    config = SMALL.replace(steps=2)
    async for _ in start(tmp_path, config=config):
        break
    await start(tmp_path, agent=small(policy := learner(), watch=recorder.watch), policy=policy, config=config)
    assert {name.partition(":")[0] for name in recorder.traces()} == {"train-1"}


# --- a real receiver -----------------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """A server on loopback that decodes the requests of the OTLP exporter; its address and the requests."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.append(service.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_an_otlp_receiver_gets_the_traces(receiver: tuple[str, list[Any]]) -> None:
    exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    address, received = receiver
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter(address, timeout=GUARD)))
    rollout = await agent(watch=af.traces.opentelemetry(provider.get_tracer("kit"), content=True)).rollout(
        tasks(4), 4
    )
    provider.shutdown()
    spans = [s for r in received for of in r.resource_spans for scope in of.scope_spans for s in scope.spans]
    assert len({s.trace_id for s in spans}) == 16
    turns = sum(s.name == "chat policy" for s in spans)
    tools = sum(s.name == "execute_tool calculator" for s in spans)
    assert (turns, tools) == (sum(len(t.actions) for t in rollout), sum(len(t.tool_calls) for t in rollout))
    assert len(spans) == 16 + turns + tools + 16
