"""Reprs of all public objects, even partly filled ones, are bounded, escaped, and free of tensor values."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import agents
import PIL.Image
import pytest
import torch

import agentfly_kit as af
from agentfly_kit import _display
from agentfly_kit.agent.progress import RolloutEvent, RolloutSnapshot
from agentfly_kit.batch.batch import Dropped
from agentfly_kit.batch.turn_data import TurnData
from agentfly_kit.engines.fleet import FleetMember
from agentfly_kit.envs.judge.judging import Criterion, Judge, Judgement, Ranking, Rubric
from agentfly_kit.pool.records import PoolEvent, PoolSnapshot, SandboxInfo
from agentfly_kit.samples import Distribution, TurnRequest
from agentfly_kit.sandboxes.grader import Grade, Verdict

EVIL = "<script>alert(1)</script>" + "\u202e\ud800\x00\x1b[31m" + "x" * 10_000
MANY = 20_000
TAGS = {
    "div",
    "p",
    "b",
    "code",
    "pre",
    "details",
    "summary",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "span",
    "img",
}


def task(**fields: Any) -> af.Task:
    return af.Task("t" + EVIL, ({"role": "user", "content": EVIL},) * 200, {EVIL: EVIL, **fields})


def turns(count: int = 400, tokens: int = 2_500) -> tuple[af.Turn, ...]:
    """Return the turns of a chain of a million tokens."""
    out = [af.Turn("prompt", "task", tuple(range(tokens)), text=EVIL)]
    ids, ones = tuple(range(tokens)), (0.5,) * tokens
    for _ in range(count - 1):
        made = af.Turn("action", EVIL, ids, True, ones, ones, versions=(1,) * tokens, text=EVIL, parent=out[-1])
        out.append(made)
    return tuple(out)


def failure() -> af.Failure:
    return af.Failure(EVIL, EVIL, EVIL, EVIL * 10)


def result(**settings: Any) -> af.ToolResult:
    return af.ToolResult(False, EVIL, error=failure(), metrics={f"m{i}{EVIL}": 1.0 for i in range(99)}, **settings)


def call() -> af.ToolCall:
    arguments = {f"a{i}": EVIL for i in range(200)}
    return af.ToolCall(EVIL, EVIL, arguments, result=result(), error=EVIL, raw=EVIL)


def trajectory() -> af.Trajectory:
    metrics = {f"m{i}": 1.0 for i in range(300)}
    end = af.Turn("observation", "tool", (1,), text=EVIL, tool_calls=(call(),) * 30)
    path = (*turns(), end)
    return af.Trajectory(EVIL, task(answer=EVIL), EVIL, 0, path, "error", 0.5, metrics=metrics, error=failure())


def rollout(reward: float = 0.5) -> af.Rollout:
    one = trajectory().replace(reward=reward)
    rows = [one.replace(id=f"{i}", turns=one.turns[:2]) for i in range(300)]
    groups = tuple(af.Group(f"{i}{EVIL}", tuple(rows)) for i in range(30))
    return af.Rollout(groups, not_run={f"{i}": EVIL for i in range(500)})


def batch(rows: int = 2_000) -> af.Batch:
    prompt = af.Turn("prompt", "task", (1, 2), text="?")
    action = af.Turn("action", "policy", (3,), True, (-0.5,), (0.1,), versions=(0,), text="x", parent=prompt)
    one = af.Trajectory("a", af.Task("t", ({"role": "user", "content": "?"},)), "g", 0, (prompt, action), "answered")
    many = [one.replace(id=f"{i}", chain=i, group=f"{i // 2}", reward=float(i % 2)) for i in range(rows)]
    drop = Dropped(EVIL, EVIL)
    return af.collate(many).replace(dropped=(drop,) * 500)


def stats(**values: Any) -> af.Stats:
    detail = {"ratio": torch.zeros(300, 300).numpy()}
    return af.Stats(0.1, 0.2, math.nan, math.inf, 1.0, 2.0, dropped={EVIL: 3}, phases={EVIL: 0.1}, detail=detail)


def broken_tool() -> Any:
    def shout(text: str) -> str:
        return text

    shout.__doc__ = f"Say it. {EVIL[:5000]}\n\nArgs:\n    text: what, {EVIL[:5000]}"
    return af.tool(shout)


@af.reward
def evil(final: str) -> float:
    """<script>alert(1)</script>"""
    return 1.0


def evaluation() -> af.Evaluation:
    many = dict.fromkeys(range(1, MANY), 0.5)
    values: dict[str, Any] = {"pass_at_k": many, "tasks_at_k": dict.fromkeys(many, 1), "rollout": rollout()}
    values |= {"metrics": {f"m{i}{EVIL}": 0.5 for i in range(900)}, "greedy": True}
    return af.Evaluation(**{f.name: values.get(f.name, 0.5) for f in dataclasses.fields(af.Evaluation)})


def infos(count: int) -> tuple[SandboxInfo, ...]:
    return tuple(SandboxInfo(i, "idle", EVIL, 1, 0.5) for i in range(count))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": EVIL, **{f"f{i}": EVIL for i in range(99)}} for _ in range(count)]


OBJECTS: dict[str, Callable[[], Any]] = {
    "Image": lambda: af.Image(PIL.Image.new("RGB", (8, 8))),
    "Agent": lambda: agents.agent(system=EVIL[:40], name=EVIL),
    "Batch": batch,
    "Branch": lambda: af.Branch(initial=8),
    "Budget": lambda: af.Budget(tokens=3),
    "Chat": agents.chat,
    "Chain": lambda: agents.agent().chain(af.Task("a", ({"role": "user", "content": EVIL[:25]},), {"answer": "5"})),
    "Container": lambda: af.Container(EVIL),
    "Context": lambda: af.Context(task()),
    "Failure": failure,
    "Evaluation": lambda: evaluation(),
    "Fleet": lambda: af.Fleet([af.OpenAIEngine("http://<script>/v1", EVIL)]),
    "FleetMember": lambda: FleetMember("http://<script>", af.LocalEngine(agents.shipped()), reason=EVIL),
    "FileSandbox": lambda: af.FileSandbox(),
    "Finding": lambda: af.Finding(EVIL, EVIL, math.nan, EVIL, EVIL, 0.5),
    "Findings": lambda: af.Findings([af.Finding(EVIL, EVIL, math.nan, EVIL, EVIL, 0.5)] * 300),
    "Grader": lambda: af.Grader(),
    "Group": lambda: af.Group(EVIL, (trajectory(),) * 300),
    "LocalEngine": lambda: af.LocalEngine(agents.shipped()),
    "OpenAIEngine": lambda: af.OpenAIEngine("http://localhost:1/v1", EVIL, api_key="secret-key"),
    "PPOConfig": af.PPOConfig,
    "Policy": agents.shipped,
    "Pool": lambda: af.Pool(af.PythonSandbox, size=500),
    "PythonSandbox": lambda: af.PythonSandbox(),
    "Rollout": rollout,
    "Row": lambda: trajectory().rows[0],
    "Run": lambda: af.Run("runs/<script>"),
    "SQLSandbox": lambda: af.SQLSandbox(),
    "Sample": lambda: af.Sample((1,) * MANY, (0.5,) * MANY, (0.5,) * MANY, "stop", (1,) * MANY, text=EVIL),
    "Sampling": lambda: af.Sampling(stop=("<script>",)),
    "ScriptedEngine": lambda: af.ScriptedEngine([EVIL] * 500),
    "ShellSandbox": lambda: af.ShellSandbox(),
    "Stats": stats,
    "Task": task,
    "Tasks": lambda: af.tasks_from(rows(100)),
    "ToolCall": call,
    "ToolResult": result,
    "ToolSet": lambda: af.ToolSet([broken_tool()]),
    "TrainConfig": af.TrainConfig,
    "TrainRun": lambda: af.train(agents.agent(), agents.shipped(), agents.tasks(2), run="run"),
    "Trajectory": trajectory,
    "Turn": lambda: turns()[-1],
    # objects that public functions return
    "ChatReport": lambda: af.chat.check(agents.chat()),
    "Criterion": lambda: Criterion("a", EVIL),
    "Diagnosis": af.doctor,
    "Distribution": lambda: Distribution((1,) * MANY, (EVIL,) * MANY, (-1.0,) * MANY, 0.5),
    "Drift": lambda: af.chat.Drift("other", 0, 3, EVIL, (EVIL,), (EVIL,), EVIL, EVIL),
    "Dropped": lambda: Dropped(EVIL, EVIL),
    "Grade": lambda: Grade((Verdict(False, EVIL, stdout=EVIL),) * 500, EVIL),
    "Judge": lambda: Judge(af.ScriptedEngine(["1"]), rubric={"a": EVIL}),
    "Judgement": lambda: Judgement(0.5, {f"{i}{EVIL}": 1.0 for i in range(99)}, EVIL, (EVIL,) * 99),
    "PoolEvent": lambda: PoolEvent(1, "idle", 1, EVIL, 0.5, EVIL),
    "PoolSnapshot": lambda: PoolSnapshot(EVIL, EVIL, 3, 0, False, 0.5, (EVIL,) * 900, infos(900), EVIL),
    "Ranking": lambda: Ranking((0.5,) * 9_000, why=EVIL),
    "Reward": lambda: evil,
    "RewardSet": lambda: agents.agent().reward,
    "RolloutDiff": lambda: rollout().diff(rollout(1.0)),
    "RolloutHandle": lambda: agents.agent().rollout(agents.tasks(3)),
    "Rubric": lambda: Rubric(tuple(Criterion(f"c{i}", EVIL) for i in range(99))),
    "SQLResult": lambda: af.SQLResult(columns=(EVIL,) * 90, rows=((EVIL, None, 1.5, b"x") * 20,) * MANY, value=EVIL),
    "SandboxInfo": lambda: infos(1)[0],
    "SandboxReport": af.sandbox_report,
    "SandboxResult": lambda: af.SandboxResult(EVIL, EVIL, EVIL, EVIL),
    "Score": lambda: af.Score(0.5, arguments={EVIL: EVIL}, metrics={EVIL: 1.0}, extras={EVIL: EVIL}, name=EVIL),
    "Tensors": lambda: agents.shipped().score(batch(4), ["logprob", "hidden"]),
    "Tool": broken_tool,
    "TrainStep": lambda: af.TrainStep(3, {EVIL: 0.5}, stats(), rollout()),
    "TurnData": lambda: TurnData(((1.0,) * MANY,) * 99, ((EVIL,) * MANY,) * 99, ((1,) * MANY,) * 99),
    "TurnRequest": lambda: TurnRequest(task(), 0, EVIL, ({"role": "user", "content": EVIL},) * 99),
    "Verdict": lambda: Verdict(False, EVIL, stdout=EVIL),
}
# Public classes that are created in their own tests or are not displayed.
ELSEWHERE = {
    "Endpoint": "belongs to the event loop of a chain; its repr is short",
    "Engine": "an abstract base class",
    "VLLMEngine": "needs vLLM; its repr is tested with it",
    "serve_vllm": "a server; its repr is tested with it",
    "RunMismatch": "an exception",
    "ToolError": "an exception",
}


def test_all_public_classes_are_displayed() -> None:
    classes = {name for name in af.__all__ if inspect.isclass(getattr(af, name))}
    assert classes - OBJECTS.keys() == ELSEWHERE.keys() & classes
    for cls in (RolloutEvent, RolloutSnapshot, af.RolloutDiff, af.chat.ChatReport):
        assert issubclass(cls, _display.Displayable)


@pytest.mark.parametrize("name", OBJECTS)
def test_reprs_are_bounded_and_escaped(name: str) -> None:
    made = OBJECTS[name]()
    text, html = repr(made), made._repr_html_()
    assert len(text) < 4_000 and text.count("\n") < 40
    for shown in (text, str(made)):  # a terminal obeys control characters
        assert all(ch.isprintable() or ch == "\n" for ch in shown), ascii(shown)
    assert not re.search(r"0x[0-9a-f]{6,}|tensor\(|secret-key", text + html)
    assert len(html) < 300_000
    assert set(re.findall(r"<(\w+)", html)) <= TAGS
    assert set(re.findall(r"<\w+ (\w+)", html)) <= {"style", "title", "open"}
    assert "<table" in html or "<p>" in html or "<div" in html
    html.encode()
    assert "\u202e" not in html
    if name in ("Trajectory", "Task", "ToolCall", "Group", "Rollout", "RolloutDiff"):
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "‹U+D800›" in html
    assert "background:#fff" not in html and "color:black" not in html


@pytest.mark.parametrize("name", OBJECTS)
def test_reprs_of_partly_filled_objects(name: str) -> None:
    """An object has no attributes in a debugger at the start of `__init__`."""
    cls = type(OBJECTS[name]())
    empty = cls.__new__(cls)
    assert cls.__name__ in repr(empty) or "Agent" in repr(empty) or issubclass(cls, dict | tuple)
    assert empty._repr_html_()


def test_values_that_cannot_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    shown = af.ToolCall("c", "f", {"x": Broken()})
    for text in (repr(af.SandboxResult(value=Broken())), _display.short_repr([Broken()]), repr(shown)):
        assert "Broken" in text
    assert "f" in shown._repr_html_()
    assert len(repr(af.ToolResult(True, "y" * 100))) < 120
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    assert len(_display.short_repr(deep)) < 50
    assert _display.short_repr({"a": torch.zeros(3, 4), "b": torch.tensor(2.0)}) == "{'a': float32 (3, 4), 'b': 2}"


def test_sql_results_are_tables() -> None:
    html = af.SQLResult(columns=("name", "n"), rows=(("<b>", 1), (None, 2)))._repr_html_()
    assert "&lt;b&gt;" in html and "2 rows" in html and "–" in html
    assert "no such table" in af.SQLResult(error="no such table: x", error_type="SQLError")._repr_html_()
    assert repr(af.SQLResult(columns=("n",), rows=((1,),))) == "SQLResult(columns=('n',), rows=((1,),))"


def test_chains_of_rollouts_and_groups_by_index() -> None:
    one = trajectory().replace(turns=turns(2, 3))
    many = af.Rollout.from_trajectories([one.replace(id=f"{i}", group=f"{i // 2}") for i in range(4)])
    assert (many[0].id, many[-1].id, many.groups[1][1].id) == ("0", "3", "3")
    assert [t.id for t in many[1:3]] == ["1", "2"]
    assert isinstance(many[1:3], af.Rollout) and len(many[1:3].groups) == 2


def test_keys_are_completed() -> None:
    assert agents.agent().tools._ipython_key_completions_() == ["calculator"]
    assert af.Context(
        af.Task("a", ({"role": "user", "content": "?"},), {"x": 1})
    ).fields._ipython_key_completions_() == ["x"]
    scores = agents.shipped().score(batch(4))
    assert sorted(scores) == ["entropy", "logprob"] and "float32 (4, 3)" in repr(scores)
