"""Mistakes of beginners: the message names the cause and the remedy."""

import shutil
from pathlib import Path
from typing import Any

import agents
import errors
import pytest

import agentfly_kit as af
from agentfly_kit import widgets as w


def scoring(parameter: str) -> Any:
    space: dict[str, Any] = {}
    exec(f"def score({parameter}): return 1.0", space)
    return af.reward(space["score"])


def with_self(self: Any, x: int) -> int:
    return x


def by_row(**columns: Any) -> Any:
    return af.tasks_from(columns)


def started() -> Any:
    return agents.agent().rollout(agents.tasks(2))


@errors.table(
    (
        lambda: agents.agent(reward=scoring("prediction")).rollout(agents.tasks(1)),
        af.errors.TaskError,
        "mean 'final'?",
    ),
    (
        lambda: agents.agent().rollout(af.tasks_from([{"question": "1+1", "answer": 2}])),
        af.errors.TaskError,
        "must be a str, as annotated, got 2; use str(...) when you create the tasks",
    ),
    (lambda: af.tool(with_self), af.errors.ToolSchemaError, "'self' must be a parameter of methods only; remove it"),
    (
        lambda: by_row(question=["1+1"], answer=["2"]),
        af.errors.TaskError,
        "dict of columns, got the column 'question'",
    ),
    (lambda: by_row(train=[{"question": " "}]), af.errors.TaskError, "'question' must not be empty; remove or fill"),
    (lambda: len(started()), af.errors.NotAwaited, "write `result = await run` first"),
    (lambda: started()[0], af.errors.NotAwaited, "write `result = await run` first"),
    (lambda: list(started()), af.errors.NotAwaited, "or `async for` instead of `for`"),
    (lambda: af.evaluate(agents.agent(), agents.tasks(1), samples=2), TypeError, "did you mean 'group_size'?"),  # type: ignore[call-arg]
    (
        lambda: af.Policy.load("runs/qwen"),
        af.errors.PolicyError,
        "exist; 'runs' contains 'qwen3', 'other'",
    ),
    (lambda: af.Policy.load("a/path/typo"), af.errors.PolicyError, "'.' contains 'runs'"),
    (lambda: w.TrainView("runs/qwem"), FileNotFoundError, "'runs' contains 'qwen3', 'other'"),
)
async def test_messages(call: Any, error: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    await errors.check(call, error, text)


async def test_a_run_whose_folder_is_deleted(tmp_path: Path) -> None:
    policy = agents.fresh()
    config = af.TrainConfig(steps=2, tasks_per_step=2, group_size=2)
    run = af.train(agents.agent(policy, max_turns=1), policy, agents.tasks(2), config, run=tmp_path / "run")

    async def delete() -> None:
        async for _ in run:
            shutil.rmtree(tmp_path / "run")

    await errors.check(delete, af.errors.RunError, "the folder was deleted during the run: call train again")


async def test_trajectories_have_a_short_repr() -> None:
    chains = (await started()).trajectories
    assert repr(chains) == "\n".join(map(repr, chains)) and len(chains) == 2
    assert repr(type(chains)(chains * 20)).endswith("\nand 32 more; rollout.to_frame() has one row for each")
    assert "and 32 more" in type(chains)(chains * 20)._repr_html_()


def test_the_shipped_policies_are_listed() -> None:
    shipped = af.tiny.list()
    assert tuple(shipped.index) == af.tiny.NAMES and shipped.loc["calculator", "example"].startswith("What is ")
    assert {"list", "learner", "policy"} <= {*dir(af.tiny)} and "torch" not in dir(af.tiny)
