"""Comparison of several runs."""

from pathlib import Path
from typing import Any

import errors
import pytest

import agentfly_kit as af


def write_run(folder: Path, success: list[float], **config: Any) -> None:
    run = af.Run(folder)
    settings = {"steps": 2, "seed": 0, **config}
    reward = {"exact": {"source": "def exact(): ...", "fingerprint": "0123456789"}}
    run.claim({"config": settings, "agent": {"max_turns": 8}, "reward": reward, "policy": "ab"}, resume=True)
    for step, value in enumerate(success, start=1):
        run.append({"step": step, "success": value, "reward": value / 2, "seconds": 1.5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", [0.75, 0.5], lr=1e-3)
    write_run(tmp_path / "sweep" / "b", [0.25], lr=1e-4, tags=["<b>"])
    write_run(tmp_path / "empty", [], lr=1e-4)
    (tmp_path / "plots").mkdir()
    for name, text in (("torn", "{"), ("foreign", '{"format": "other"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    write_run(tmp_path / "damaged", [0.5, 0.5])
    (tmp_path / "damaged" / "steps.jsonl").write_text("{\n{}\n")
    return tmp_path


def test_settings_and_results_of_all_runs(folder: Path) -> None:
    runs = af.runs(folder)
    assert repr(runs) == "Runs(a, empty, sweep/b, 4 unreadable)"
    assert runs.different == ("lr", "tags")
    frame = runs.frame
    assert list(frame.columns[:4]) == ["lr", "tags", "state", "step"]
    assert frame[["lr", "state"]].values.tolist() == [[1e-3, "finished"], [1e-4, "unfinished"], [1e-4, "unfinished"]]
    results = {
        "success": 0.5, "best success": 0.75, "reward": 0.25, "seconds": 3.0, "agent.max_turns": 8,
        "reward.exact": "01234567",
    }  # fmt: skip
    assert dict(frame.loc["a", list(results)]) == results
    reasons = {
        "damaged": "steps.jsonl:1 is damaged", "plots": "holds no run", "torn": "is missing or damaged",
        "foreign": "/foreign/run.json does not describe a training run; use an empty or new folder",
    }  # fmt: skip
    assert runs.unreadable.keys() == reasons.keys()
    assert all(reason in runs.unreadable[name] for name, reason in reasons.items())
    page = runs._repr_html_()
    assert "sweep/b" in page and "holds no run" in page and "&lt;b&gt;" in page and "max_turns" not in page


def test_runs_are_a_sequence(folder: Path) -> None:
    runs = af.runs(folder)
    assert [len(run.records) for run in runs] == [2, 0, 1]
    assert runs["sweep/b"].path == runs[-1].path == folder / "sweep" / "b"
    assert repr(runs[:1]) == repr(af.runs(folder / "a")) == "Runs(a)"
    assert len(af.runs(folder / "plots")) == 0 and "no run" in af.runs(folder / "plots")._repr_html_()
    errors.check(
        lambda: af.runs(folder / "none"), af.errors.RunError, "folder must be an existing folder with runs, got "
    )


def test_curves_of_all_runs_in_one_figure(folder: Path) -> None:
    runs = af.runs(folder)
    figure = runs.figure("success", "reward")
    traces = [(t.name, list(t.y), t.showlegend) for t in figure.data]
    assert traces == [
        ("a", [0.75, 0.5], True),
        ("a", [0.375, 0.25], False),
        ("sweep/b", [0.25], True),
        ("sweep/b", [0.125], False),
    ]
    panels = {trace[1][0]: t.yaxis for trace, t in zip(traces, figure.data, strict=True)}
    assert panels[0.75] == panels[0.25] != panels[0.375] == panels[0.125]
    assert len({t.line.color for t in figure.data if t.name == "a"}) == 1
    errors.check(
        lambda: runs.figure("loss"),
        af.errors.RunError,
        "names must be metrics of the runs, got 'loss'; recorded: reward, seconds, step",
    )
    assert not [t for t in af.runs(folder / "plots").figure().data if len(t.y)]
    assert [(t.name, list(t.x), list(t.y)) for t in runs["a"].figure().data] == [
        ("success", [1, 2], [0.75, 0.5]),
        ("reward", [1, 2], [0.375, 0.25]),
    ]
