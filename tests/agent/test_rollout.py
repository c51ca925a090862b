"""Rollouts: saved files, frames, rescoring and comparison. Run folders: no failure loses recorded data."""

import dataclasses
import datetime
import errno
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import errors
import numpy as np
import pandas as pd
import pytest
from agents import agent, call, played, shipped, tasks

import agentfly_kit as af
from agentfly_kit.agent.rollout_io import atomic_write

MESSAGES = ({"role": "user", "content": "?"},)


def nasty(half: bool = True) -> af.Rollout:
    """Return a rollout with every kind of field; with `half`, texts contain a lone surrogate."""
    text = 'été 🎉 "quoted" \\ \n\r\x00\x85\u2028\u2029 </script> ' + "\ud800 half a pair" * half
    task = af.Task(
        text, ({"role": "user", "content": text, "extra": [1, {"a": None}]},), {"answer": text, "n": 0, "x": []}
    )
    failure = af.Failure("tool f", "KeyError", text, "Traceback\n  " + text)
    calls = (
        af.ToolCall(
            "call-0",
            "f",
            {"x": text, "y": [1.5, None, True]},
            af.ToolResult(True, text, reward=0.0, done=True),
            raw=text,
        ),
        af.ToolCall(
            "call-1",
            "",
            {},
            af.ToolResult(False, "", failure, 0.5, True, -1.0, False, {"m": 0.0}),
            error="unreadable",
        ),
        af.ToolCall("call-2", "g", {}, error=""),
    )
    prompt = af.Turn("prompt", "task", (1, 2), text=text, token_texts=("a", "\n"), messages=task.messages)
    action = af.Turn(
        "action",
        "policy",
        (3, 4),
        True,
        (-0.1, -1e-30),
        (0.0, 2.5),
        (0.5, 1.0),
        (0, 7),
        text,
        ("c", "d"),
        ({"role": "assistant", "content": "", "tool_calls": []},),
        calls,
        "string",
        0.0,
        2**63 - 1,
        0.1,
        "turn 1 of 2",
        prompt,
    )
    silent = af.Turn("action", "policy", (), True, (), (), (), (), parent=action)
    seen = af.Turn("observation", "", (), text=text, tool_calls=calls, reward=-0.5, parent=silent)
    unseen = af.Turn("forced", "person", None, text=text, parent=seen)
    turns = (prompt, action, silent, seen)
    return af.Rollout.from_trajectories(
        [
            af.Trajectory(
                "g/0",
                task,
                "g",
                0,
                turns,
                "answered",
                0.0,
                {"m": -1.5},
                None,
                5,
                af.Sampling(0.7, 3, 0.9, 5, 0.1, ("x",)),
            ),
            af.Trajectory(
                "g/1", task, "g", 1, (prompt,), "error", None, {}, failure, 0, tools=({"type": "function"},)
            ),
            af.Trajectory("h/0", task, "h", 0, (*turns, unseen), "timeout", -1.0),
            af.Trajectory("i/0", task, "i", 0, (), "error"),
        ],
        1.5,
    )


# --- a rollout -----------------------------------------------------------------------------------


def same(a: af.Rollout, b: af.Rollout) -> None:
    assert a == b
    for x, y in zip(a, b, strict=True):
        for p, q in zip(x.turns, y.turns, strict=True):
            assert dataclasses.replace(p, parent=None) == dataclasses.replace(q, parent=None)
            # Not compared, but kept.
            assert (p.seconds, p.label, p.parent is None) == (q.seconds, q.label, q.parent is None)


@pytest.mark.parametrize("half", [True, False])
def test_a_saved_rollout_is_loaded_unchanged(tmp_path: Path, half: bool) -> None:
    rollout = nasty(half)
    back = af.Rollout.load(rollout.save(tmp_path / "deep" / "er" / "r.jsonl"))
    same(rollout, back)
    assert back.seconds == 1.5
    assert back.trajectories[0].turns[-1].path == back.trajectories[0].turns
    assert not list((tmp_path / "deep" / "er").glob(".*"))
    assert af.Rollout.load(af.Rollout().save(tmp_path / "empty.jsonl")) == af.Rollout()


async def test_real_chains_are_loaded_unchanged(tmp_path: Path) -> None:
    one = await agent(max_turns=2, engine=af.LocalEngine(shipped(), alternatives=3)).rollout(tasks(4), group_size=3)
    assert one.trajectories[0].turns[1].alternatives is not None
    two = await played([call("1+1"), "<tool_call>{</tool_call>", "5"], max_turns=2).rollout(tasks(2))
    one.trajectories[5].annotate("wrong tool")
    for rollout in (one, two):
        back = af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))
        same(rollout, back)
        assert [t.note for t in back] == [t.note for t in rollout] == list(back.to_frame()["note"])
        for x, y in zip(rollout, back, strict=True):
            assert (x.token_texts, x.logprobs.tobytes()) == (y.token_texts, y.logprobs.tobytes())


VALUES = {
    "date": datetime.date(2026, 1, 2), "time": datetime.time(1, 2, 3, 4), "span": -datetime.timedelta(1, 2, 3),
    "zone": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    "frame": pd.Timestamp("2026-01-02 03:04:05.123456789"), "path": Path("a/b"), "id": uuid.UUID(int=5),
    "price": Decimal("1.10"), "bytes": b"\xff", "inf": -math.inf, "$type": "date", "value": [], "": {"$type": 1},
    "sets": [{frozenset({(1, (2,))})}, {datetime.date(2026, 1, 2)}], "pairs": [(1, [2]), ()], "keys": {1: {None: "a"}},
}  # fmt: skip


def test_values_that_json_lacks_are_loaded_unchanged(tmp_path: Path) -> None:
    """Also looked at: messages, metrics, arguments and results of tools, which are JSON when they are made."""
    task = af.Task("t", ({"role": "user", "content": "?", "when": VALUES["date"]},), VALUES)
    path = af.Rollout.from_trajectories([af.Trajectory("g/0", task, "g", 0, (), "answered")]).save(
        tmp_path / "r.jsonl"
    )
    (back,) = af.Rollout.load(path).tasks
    assert back == task and repr(back.fields) == repr(task.fields)
    path.write_text(path.read_text(encoding="utf-8").replace('"Decimal"', '"object"'), encoding="utf-8")
    errors.check(lambda: af.Rollout.load(path), af.errors.RunError, re.compile(r"r\.jsonl:2 is damaged"))


def test_numpy_values_are_converted_and_other_types_rejected(tmp_path: Path) -> None:
    def one(value: Any) -> af.Rollout:
        return af.Rollout.from_trajectories(
            [af.Trajectory("g/0", af.Task("t", MESSAGES, {"x": value}), "g", 0, (), "answered")]
        )

    back = af.Rollout.load(one({"a": np.float32(0.5), "b": np.arange(3.0)}).save(tmp_path / "r.jsonl"))
    assert back.trajectories[0].task.fields["x"] == {"a": 0.5, "b": [0, 1, 2]}
    before = (tmp_path / "r.jsonl").read_bytes()
    for value, says in ((object(), "a object"), ({1: [print]}, "a builtin_function")):
        errors.check(
            lambda: one(value).save(tmp_path / "r.jsonl"),
            af.errors.RunError,
            re.compile(f"trajectory 'g/0' cannot be saved as JSON: .*{says}"),
        )
    assert (tmp_path / "r.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"r\.jsonl:1 is damaged"),
        (b"hello\n", r"r\.jsonl:1 is damaged"),
        (b"[" * 200_000, r"r\.jsonl:1 is damaged"),
        (b"\xff\xfe\x00", r"r\.jsonl(:1)? (is damaged|cannot be read)"),
        (b"[]\n", "must be a file written by|damaged"),
        (b'{"format": "other"}\n', "must be a file written by Rollout.save"),
        (b'{"format": "agentfly_kit.rollout", "version": 99}\n', r"newer version \(99 > 4\); upgrade agentfly_kit"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "r.jsonl").write_bytes(content)
    errors.check(lambda: af.Rollout.load(tmp_path / "r.jsonl"), af.errors.RunError, re.compile(says))


def test_a_damaged_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = nasty(False).save(tmp_path / "r.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, broken in ((3, lines[2][:40]), (2, "{}"), (4, '{"turns": 3}'), (5, "[1]")):
        path.write_text("\n".join([*lines[: number - 1], broken, *lines[number:]]), encoding="utf-8")
        errors.check(lambda: af.Rollout.load(path), af.errors.RunError, re.compile(rf"r\.jsonl:{number} is damaged"))


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def failing(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = nasty().save(tmp_path / "r.jsonl")
    before = path.read_bytes()
    # The folder is a file.
    errors.check(lambda: af.Rollout().save(path / "r.jsonl"), af.errors.RunError, "could not be written")

    def interrupted_write() -> None:
        with atomic_write(path) as file:
            file.write("new")
            raise ZeroDivisionError

    errors.check(interrupted_write, ZeroDivisionError)
    monkeypatch.setattr(os, name, failing)
    errors.check(
        lambda: af.Rollout().save(path),
        af.errors.RunError,
        re.compile(r"r\.jsonl could not be written \(.*No space left.*an existing file is"),
    )
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"r.jsonl": before}


# --- frames, scores, differences -----------------------------------------------------------------


async def test_frames_have_nan_where_nothing_was_sampled() -> None:
    pytest.importorskip("pandas")
    rollout = await agent().rollout(tasks(2), group_size=2)
    frame = rollout.to_frame("tokens")
    first = rollout.trajectories[0]
    assert len(frame) == sum(len(t.ids) for t in rollout)
    assert (frame["logprob"].isna() == ~frame["mask"]).all()
    assert "".join(frame[frame["trajectory"] == first.id]["text"]) == "".join(first.token_texts)
    assert list(rollout.to_frame()["trajectory"]) == [t.id for t in rollout]
    assert len(rollout.to_frame("turns")) == sum(len(t.turns) for t in rollout)
    assert nasty(False).to_frame()["reward"].isna().tolist() == [False, True, False, True]


async def test_rescore_scores_all_chains_except_failed_ones() -> None:
    @af.reward
    def length(final: str | None) -> float:
        return float(len(final or ""))

    rollout = await played(["5"]).rollout(tasks(2), group_size=2)
    broken = rollout.trajectories[0].replace(id="x", stop="error", reward=None)
    again = await af.Rollout.from_trajectories([*rollout, broken]).rescore(length)
    assert {t.id: t.reward for t in again} == {t.id: 1.0 for t in rollout} | {"x": None}
    assert [t.ids.tolist() for t in rollout] == [t.ids.tolist() for t in again if t.id != "x"]
    assert again.trajectories[0].metrics == {"length": 1.0}


class Board:
    async def run(self, move: str) -> str:
        return move

    async def close(self) -> None: ...


async def test_rescore_rejects_a_reward_that_requires_a_sandbox() -> None:
    @af.reward
    def won(board: Board) -> float:
        return 1.0

    rollout = await played(["5"]).rollout(tasks(2))
    await errors.check(
        lambda: rollout.rescore([won]),
        af.errors.SettingsError,
        re.compile(r"'won' requires a Board, .* released theirs; .*won\.try_\(trajectory\)"),
    )
    assert {t.reward for t in rollout} <= {0.0, 1.0}


async def test_diff_pairs_each_chain_with_itself() -> None:
    some = tasks(3)
    wrong, right = played(["no"]), played(lambda task, turn: task.fields["answer"])
    before, after = await wrong.rollout(some, group_size=2), await right.rollout(some, group_size=2)
    diff = before.diff(after)
    assert (diff.success, len(diff.gained), diff.lost) == ((0.0, 1.0), 6, ())
    assert [(a.id, b.id) for a, b in diff.pairs] == [(a.id, b.id) for a, b in zip(before, after, strict=True)]
    # The p-value is that of three tasks, whatever the number of chains.
    assert diff.p_value == 0.25 and "success 0.000 -> 1.000, p = 0.25, 6 gained, 0 lost" in repr(diff)
    first, *others = after
    unscored = before.diff(af.Rollout.from_trajectories([first.replace(reward=None), *others]))
    assert (unscored.success, len(unscored.gained)) == ((0.0, 1.0), 5)
    assert repr(unscored).startswith("RolloutDiff(6 pairs, 1 unscored: ")
    twice = await wrong.rollout([some[0], some[0], some[1]])
    assert len(twice.diff(await right.rollout([some[0], some[0], some[1]])).pairs) == 3
    assert len(twice.diff(after).pairs) == 2


async def test_unscored_chains_are_named_and_can_run_again() -> None:
    def broken(final: str | None) -> float:
        return {"5": 1.0}[final or ""]

    def length(final: str | None) -> float | None:
        return None if final == "55" else broken(final)

    some = tasks(4)
    rollout = await played(lambda task, turn: ["5", "6", "7", "55"][some.index(task)], reward=length).rollout(some)
    assert [t.task for t in rollout.failed] == some[1:] == list(rollout.failed.tasks)
    assert "success 1.000, 3 unscored (most often reward length: KeyError: '6')" in repr(rollout)
    again = await played(["5"], reward=length).rollout(rollout.failed.tasks)
    assert [t.reward for t in again] == [1.0] * 3 and len(again.failed) == 0
    none = await played(["6"], reward=broken).rollout(some)
    for text in (repr(none), none._repr_html_().replace("&#x27;", "'")):
        assert "Rollout(4 tasks, 4 chains, 4 unscored (reward broken: KeyError: '6'))" in text
    assert "unscored (no reward)" in repr(await played(["6"], reward=None).rollout(some))
    assert len(af.Rollout((*none.groups, *none.groups)).tasks) == 4


async def test_drop_reasons_keep_the_chains_that_did_not_run() -> None:
    rollout = dataclasses.replace(await played(["5"]).rollout(tasks(1)), not_run={"x": "run_turns"})
    reason = SimpleNamespace(trajectory=rollout.trajectories[0].id, row=None, reason="short")
    marked = rollout.with_drop_reasons([reason])
    assert (marked.trajectories[0].dropped, marked.not_run) == ("short", rollout.not_run)


# --- a run ---------------------------------------------------------------------------------------


def printed(config: dict[str, Any], returned: int) -> dict[str, Any]:
    function = {"source": f"def f():\n    return {returned}\n", "fingerprint": str(returned)}
    return {"config": config, "reward": {"f": function}}


PRINT = printed({"lr": 0.1, "steps": 3}, 1)


@pytest.fixture
def run(tmp_path: Path) -> af.Run:
    run = af.Run(tmp_path / "r")
    run.claim(PRINT, resume=True)
    return run


def test_a_run_is_created_continued_or_rejected(tmp_path: Path) -> None:
    run = af.Run(tmp_path / "run")
    assert not run.check(PRINT, resume=True)
    assert not (tmp_path / "run").exists(), "check must not create the folder"
    assert not run.claim(PRINT, resume=True)
    run.append({"step": 1, "loss": 0.5})
    again = af.Run(tmp_path / "run")
    assert again.claim(PRINT, resume=True) and again.records == [{"step": 1, "loss": 0.5}]
    other = printed({"lr": 0.2, "steps": 3, "clip": 0.1}, 2)
    with pytest.raises(af.RunMismatch) as told:
        af.Run(tmp_path / "run").claim(other, resume=True)
    for line in (
        "config.lr: was 0.1, now 0.2", "config.clip: not in the folder's run, now 0.1", "reward.f.source changed:",
        "-    return 1", "+    return 2", "resume=False to replace",
    ):  # fmt: skip
        assert line in str(told.value)
    assert "steps" not in str(told.value) and "fingerprint" not in str(told.value)
    assert not again.claim(other, resume=False)
    assert (af.Run(tmp_path / "run").records, again.claim(other, resume=True)) == ([], True)
    af.Run(tmp_path / "numpy").claim({"config": {"steps": 3, "lr": np.float32(0.5)}}, resume=True)
    assert af.Run(tmp_path / "numpy").claim({"config": {"steps": 3, "lr": 0.5}}, resume=True)


def test_what_is_not_json_is_not_recorded(tmp_path: Path, run: af.Run) -> None:
    errors.check(
        lambda: af.Run(tmp_path / "s").claim({"lr": object()}, resume=True),
        af.errors.RunError,
        "the run's fingerprint cannot be saved as JSON",
    )
    assert not (tmp_path / "s").exists()
    errors.check(
        lambda: run.append({"step": 1, "loss": math.nan}), af.errors.RunError, "step 1 cannot be saved as JSON"
    )
    assert run.records == []


def test_a_folder_with_other_contents_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "mine.txt").write_text("precious")
    for resume in (True, False):
        errors.check(
            lambda: af.Run(folder).claim(PRINT, resume=resume), af.errors.RunError, "holds something other than a run"
        )
    (folder / "run.json").write_text('{"name": "another tool"}')
    for resume in (True, False):
        errors.check(lambda: af.Run(folder).claim(PRINT, resume=resume), af.errors.RunError, "run.json")
    assert (folder / "rollouts" / "mine.txt").read_text() == "precious"


def test_damaged_and_newer_runs(tmp_path: Path, run: af.Run) -> None:
    (tmp_path / "f").write_text("x")
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        errors.check(lambda: af.Run(path).claim(PRINT, resume=True), af.errors.RunError)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ".run.json.123.tmp").write_text("{")  # left by an interrupted `claim`
    assert not af.Run(tmp_path / "cut").claim(PRINT, resume=True)
    assert not list((tmp_path / "cut").glob(".*"))
    about = json.loads((tmp_path / "r" / "run.json").read_text())
    (tmp_path / "r" / "run.json").write_text(json.dumps(about | {"version": 99}))
    for resume in (True, False):
        errors.check(lambda: af.Run(tmp_path / "r").claim(PRINT, resume=resume), af.errors.RunError, "newer")
    (tmp_path / "r" / "run.json").write_text('{"format": "agentfly')
    errors.check(
        lambda: af.Run(tmp_path / "r").claim(PRINT, resume=True),
        af.errors.RunError,
        re.compile(r"run\.json is damaged .*resume=False to start over"),
    )
    assert not af.Run(tmp_path / "r").claim(PRINT, resume=False)
    (tmp_path / "r" / "steps.jsonl").write_text('{"step":1}\n{"st\n{"step":3}\n')
    errors.check(lambda: af.Run(tmp_path / "r").records, af.errors.RunError, "steps.jsonl:2 is damaged")


@pytest.mark.parametrize("cut", [1, 5, None])
def test_an_incomplete_last_line_is_overwritten(tmp_path: Path, run: af.Run, cut: int | None) -> None:
    for step in (1, 2):
        run.append({"step": step})
    file = tmp_path / "r" / "steps.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[-1][:cut])  # with cut=None, only the line end is missing
    again = af.Run(tmp_path / "r")
    kept = 3 if cut is None else 2
    assert len(again.records) == kept
    again.truncate(kept)
    again.append({"step": 9})
    assert [r["step"] for r in af.Run(tmp_path / "r").records] == [*([1, 2, 2][:kept]), 9]
    for steps in (1, 0):
        again.truncate(steps)
        assert (
            [r["step"] for r in again.records] == [r["step"] for r in af.Run(tmp_path / "r").records] == [1][:steps]
        )


# --- checkpoints ---------------------------------------------------------------------------------


def save(run: af.Run, text: str) -> None:
    with run.new_checkpoint() as folder:
        (folder / "state").write_text(text)


def held(run: af.Run) -> str | None:
    return None if run.checkpoint is None else (run.checkpoint / "state").read_text()


class Killed(BaseException):
    """The process ended here."""


OPERATIONS: list[tuple[Any, str]] = [
    (os, "replace"), (shutil, "rmtree"), (Path, "mkdir"), (os, "fsync"), (Path, "open"),
]  # fmt: skip


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, work: Callable[[], None]) -> bool:
    """Run `work`, whose file operations raise from number `at` on. Return whether `work` made that many operations."""
    calls = 0
    with monkeypatch.context() as patch:
        for module, name in OPERATIONS:
            real = getattr(module, name)

            def failing(*args: Any, _real: Any = real, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls >= at:
                    if options.get("ignore_errors") and isinstance(error, OSError):
                        return None
                    raise error
                return _real(*args, **options)

            patch.setattr(module, name, failing)
        try:
            work()
        except (Killed, af.errors.RunError):
            return True
    return calls >= at


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "full")], ids=["killed", "full"])
@pytest.mark.parametrize("first", [True, False])
def test_an_interrupted_checkpoint_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, first: bool
) -> None:
    at = 0
    while True:
        at += 1
        folder = tmp_path / f"{first} {at}"
        run = af.Run(folder)
        run.claim(PRINT, resume=True)
        if not first:
            save(run, "one")
        more = interrupted(monkeypatch, at, error, lambda run=run: save(run, "two"))  # type: ignore[misc]
        assert held(af.Run(folder)) in ((None, "two") if first else ("one", "two")), f"operation {at}"
        save(af.Run(folder), "three")
        assert held(af.Run(folder)) == "three"
        left = {p.name for p in folder.iterdir()}
        assert {"run.json", "checkpoint"} <= left <= {"run.json", "checkpoint", "checkpoint.before"}
        if not more:
            break
    assert at > 5


@pytest.mark.parametrize("known", [True, False])
def test_an_interrupted_claim_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    at = 0
    while True:
        at += 1
        folder = tmp_path / f"{known} {at}"
        if known:
            old = af.Run(folder)
            old.claim({"old": 1}, resume=True)
            save(old, "one")
            old.append({"step": 1})
        work = lambda f=folder: af.Run(f).claim(PRINT, resume=not known) and None  # type: ignore[misc]  # noqa: E731
        more = interrupted(monkeypatch, at, Killed(), work)
        run = af.Run(folder)
        assert not run.claim(PRINT, resume=False) or not known
        assert (run.records, held(run)) == ([], None)
        if not more:
            break
    assert at > 3


def test_reprs(run: af.Run) -> None:
    run.append({"step": 1, "success": 0.25})
    assert repr(run).endswith("r', 1 steps, success 0.250 (step 1))")
    assert repr(nasty()).startswith("Rollout(3 tasks, 4 chains, success 0.000 (rewards reach 0, success needs 1")
    assert "\n" not in repr(nasty()) and "\r" not in repr(nasty())
    assert "<script" not in nasty()._repr_html_()
    nasty().rescore(None).close()
