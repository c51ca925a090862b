"""code: grading, the interpreter, generated tasks, and MBPP's files."""

import json
import re
from pathlib import Path
from typing import Any

import errors
import pyarrow
from pyarrow import parquet

import agentfly_kit as af

TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4", "assert f(-1) == 0"]
GOOD = "def f(x):\n    return x + 1"


def task(**fields: Any) -> af.Task:
    return af.Task("t", ({"role": "user", "content": "?"},), {"test_list": TESTS, **fields})


def submitting(*sources: str, last: str = "") -> af.ScriptedEngine:
    """Return a script in which each chain submits its source with the tool."""

    def script(task: af.Task, turn: int) -> str:
        call = json.dumps({"name": "submit", "arguments": {"code": sources[int(task.id)]}})
        return f"<tool_call>{call}</tool_call>"

    return af.ScriptedEngine(script)


async def graded(*sources: str, tests: list[str] = TESTS, **more: Any) -> list[Any]:
    agent = af.envs.code.agent(submitting(*sources), chat=af.envs.family.small_chat(), size=2, **more)
    tasks = [af.Task(str(i), ({"role": "user", "content": "?"},), {"test_list": tests}) for i in range(len(sources))]
    return list((await agent.rollout(tasks)).trajectories)


async def test_the_reward_is_the_fraction_of_tests_that_pass() -> None:
    sources = [
        GOOD,
        "def f(x):\n    return 3 if x == 2 else 2 if x == 1 else 9",
        "def f(x): return 5",
        "",
        "  \n",
        "def f(x:",
        "g = 1",
    ]
    for t, (reward, loads) in zip(
        await graded(*sources), [(1, 1), (0.5, 1), (0, 1), (0, 0), (0, 0), (0, 0), (0, 1)], strict=True
    ):
        assert (t.reward, t.metrics["loads"], t.success) == (reward, loads, reward == 1), (t.error, t.metrics)
        assert t.stop == "env_done"
    assert [t.reward for t in await graded(*sources[:2], options={"partial": False})] == [1, 0]


async def test_submissions_that_cheat_or_never_answer_are_not_rewarded() -> None:
    """More kinds of cheating are in test_grader.py."""
    hostile = (
        "raise SystemExit(0)",
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "def f(x):\n    while True: pass",
    )
    for t in await graded(*hostile, tests=TESTS[:2], options={"seconds": 0.7}):
        assert (t.error, t.reward) == (None, 0.0)


async def test_the_last_code_block_of_the_answer_is_a_submission() -> None:
    block = "```python\n{}\n```"
    bad = "def f(x): return 5"
    good = block.format(GOOD)
    answers = [
        good, GOOD, f"First\n{block.format(bad)}\nno,\n{good}\nis it.", f"{good}\n{block.format(bad)}",
        "\n\n".join(block.format(GOOD.replace("1", str(n))) for n in range(200)),  # spam: one of them is right
        "I don't know", "", "```python\n```", f"Well:\n```py\n{GOOD}",
    ]  # fmt: skip
    agent = af.envs.code.agent(
        af.ScriptedEngine(lambda task, turn: answers[int(task.id)]), chat=af.envs.family.small_chat(), size=2
    )
    tasks = [af.Task(str(i), ({"role": "user", "content": "?"},), {"test_list": TESTS}) for i in range(len(answers))]
    assert [t.reward for t in (await agent.rollout(tasks)).trajectories] == [1, 1, 1, 0, 0, 0, 0, 0, 1]


def python(source: str) -> str:
    """Return a tool call that runs Python."""
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': source}})}</tool_call>"


async def test_limits_of_the_interpreter_are_observations(never_killed: None) -> None:
    endless = af.ScriptedEngine([python("while True: pass"), GOOD])
    agent = af.envs.code.agent(
        endless, chat=af.envs.family.small_chat(), size=1, options={"seconds": 0.1}, max_turns=8
    )
    (t,) = (await agent.rollout([task()])).trajectories
    assert "KeyboardInterrupt" in t.tool_calls[0].result.observation

    engine = af.ScriptedEngine(
        [*map(python, ["import os; os._exit(3)", "print('x' * 10**7)", "1 / 0", "2 + 2"]), GOOD]
    )
    agent = af.envs.code.agent(engine, chat=af.envs.family.small_chat(), size=1, max_turns=8)
    (t,) = (await agent.rollout([task()])).trajectories
    shown = [c.result.observation for c in t.tool_calls if c.result is not None]
    assert "restarted" in shown[0] and "truncated" in shown[1] and "ZeroDivisionError" in shown[2] and shown[3] == "4"
    assert (t.reward, t.metrics["runs"]) == (1, 4)


async def test_a_fork_replays_the_calls_or_is_refused() -> None:
    chain = af.envs.code.agent(af.ScriptedEngine([GOOD]), chat=af.envs.family.small_chat(), size=2).chain(task())
    await chain.prepare()
    one = await chain.context.sandbox(af.envs.code.Code)
    await af.envs.code.Code.python.function(one, "y = 41")  # type: ignore[attr-defined]
    twin = await chain.fork()
    other = await twin.context.sandbox(af.envs.code.Code)
    await af.envs.code.Code.python.function(one, "y = 0")  # type: ignore[attr-defined]
    assert (await af.envs.code.Code.python.function(other, "y + 1")).value == "42"  # type: ignore[attr-defined]
    await af.envs.code.Code.python.function(one, "import os; os.urandom(9)")  # type: ignore[attr-defined]
    await twin.finish()
    await errors.check(chain.fork, af.errors.SandboxError, "cannot fork: call 3 of 3 gave a different result")
    await chain.finish()


# ---- its tasks


async def test_shipped_problems_are_solved_by_their_code_and_by_no_constant() -> None:
    tasks = af.envs.code.tasks(kind="problems")
    assert tasks.splits == {"train": 16, "test": 8}
    expert = await af.evaluate(af.envs.code.expert(size=4), tasks)
    assert expert.success == 1, [(t.task.id, t.error) for t in expert.rollout if not t.success]
    assert (await af.evaluate(af.envs.code.random_agent(size=4), tasks)).success == 0


MBPP = {
    "text": "Write a python function to sum a list.",
    "code": "def sum(v):\r\n    t = 0\r\n    for x in v: t += x\r\n    return t",
    "task_id": 602, "test_setup_code": "", "test_list": ["assert sum([1, 2]) == 3", "assert sum([]) == 0"],
    "challenge_test_list": [],
}  # fmt: skip


async def test_mbpps_files_load_and_are_solved(tmp_path: Path) -> None:
    file = tmp_path / "mbpp.jsonl"
    other = MBPP | {"task_id": 12, "text": "Write a python function to add one.", "code": GOOD, "test_list": TESTS}
    file.write_text("\n".join(map(json.dumps, (MBPP, other))), encoding="utf-8")
    tasks = af.envs.code.load(file)
    assert (tasks.splits, tasks.train[0].id) == ({"train": 1, "test": 1}, "mbpp-0602")
    assert tasks.train[0].messages[-1]["content"] == (
        "Write a python function to sum a list.\nIt must pass:\nassert sum([1, 2]) == 3"
    )
    assert (
        await af.evaluate(af.envs.code.expert(size=2), tasks)
    ).success == 1  # including a function named like a builtin
    assert "== 0" in af.envs.code.load(file, shown=None).train[0].messages[-1]["content"]

    table = pyarrow.Table.from_pylist([MBPP, other])  # the format on the Hugging Face hub
    parquet.write_table(table, tmp_path / "mbpp.parquet")
    assert tuple(af.envs.code.load(tmp_path / "mbpp.parquet")) == tuple(tasks)

    clean = {"task_id": 3, "prompt": "Add one.", "code": GOOD, "test_imports": ["import math"], "test_list": TESTS}
    intercode = {"query": "Add one.", "gold": GOOD, "tests": TESTS, "test_setup_code": ""}
    for row, setup in ((clean, "import math"), (intercode, "")):
        (tmp_path / "some.json").write_text(json.dumps([row]), encoding="utf-8")
        (only,) = af.envs.code.load(tmp_path / "some.json", shown=0)
        assert (only.messages[-1]["content"], only.fields["test_setup_code"]) == ("Add one.", setup)
        assert (await af.evaluate(af.envs.code.expert(size=1), [only])).success == 1


def test_invalid_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for row, words in [
        ({"text": "?", "code": "x"}, r'bad\.jsonl:1: a row must have "text" or "prompt", .*it has text, code'),
        (MBPP | {"test_list": "assert 1"}, "must have .*test_list"),
        ([1], "it has list"),
    ]:
        bad.write_text(json.dumps(row), encoding="utf-8")
        errors.check(lambda: af.envs.code.load(bad), af.errors.TaskError, re.compile(words))
    bad.write_text(json.dumps(MBPP) + "\n" + json.dumps(MBPP), encoding="utf-8")
    errors.check(lambda: af.envs.code.load(bad), af.errors.TaskError, "bad.jsonl:2: duplicate task_id 602")
    errors.check(
        lambda: af.envs.code.load(bad, shown=-1),
        af.errors.SettingsError,
        "shown must be an integer of at least 0 or None, got -1",
    )
