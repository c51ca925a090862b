"""TrainView without a browser: curves of runs and folders, and buttons."""

import asyncio
import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import errors
import numpy as np
import pytest
from agentfly_kit.widgets._curves import intervals
from views import NASTY, FakeRun, ask, check_static, click, sent, show, started, unpack
from waiting import until

import agentfly_kit as af
from agentfly_kit import widgets as w


def test_train_view_follows_a_run() -> None:
    run = FakeRun()
    view = w.TrainView(run)
    assert repr(view) == "TrainView(0 of 20 steps)" and "No steps have been recorded yet" in check_static(view).text
    for _ in range(5):
        run.step(eval_success=0.5, eval_low=0.4, eval_high=0.6)
    view._repr_mimebundle_()  # displaying the view refreshes it immediately
    assert view.steps == (1, 2, 3, 4, 5)
    run.step(eval_success=0.5, eval_low=0.4, eval_high=0.6)
    asyncio.run(until(lambda: len(view.steps) == 6))
    run.records.pop()
    view.refresh()
    assert repr(view) == "TrainView(5 of 20 steps)"
    columns = view._buffers["runs"][0]["columns"]
    np.testing.assert_allclose(unpack(columns["success"]), np.float32([0.05, 0.1, 0.15, 0.2, 0.25]))
    assert np.isnan(unpack(columns["entropy"])).all()
    page = check_static(view)
    assert len(page.images) == 5
    assert "not recorded: clip fraction, entropy, loss, tokens, turns" in page.text
    view.close()
    assert run.listeners == []


def test_train_view_of_a_folder(tmp_path: Path) -> None:
    run = FakeRun(4)
    lines = [json.dumps(r) for r in run.records]
    (tmp_path / "steps.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 4, "success": 0.9}), '{"step": 5, "succ'])
    )
    for path in (tmp_path, str(tmp_path), tmp_path / "steps.jsonl"):
        view = w.TrainView(path)
        assert view.steps == (1, 2, 3, 4)
        assert view.to_frame()["success"][4] == np.float32(0.9)  # after a resume, the last record of a step is used
        assert math.isnan(view.to_frame()["reward"][4])
    view.set_state({"step": 2})
    assert view.step == 2
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines, '{"step": 5, "success": 0.75}\n']))
    show(view)
    assert view.steps == (1, 2, 3, 4, 5)
    (tmp_path / "steps.jsonl").write_text("\n".join([lines[0], "broken", lines[1]]))
    errors.check(lambda: w.TrainView(tmp_path), ValueError, "line 2")


def test_train_view_with_odd_numbers() -> None:
    run = FakeRun(3)
    run.step(grad_norm=math.inf, success=math.nan, loss=-1.0)
    run.step(grad_norm=math.nan)
    for _ in range(2):
        run.step()
    view = w.TrainView(run)
    panel = next(p for p in view._about["panels"] if p["label"] == "grad norm")
    assert (panel["odd"], panel["n"]) == (1, 5)
    (drawn,) = re.findall('base64,([^"]*)" alt="grad norm', view._static())
    assert base64.b64decode(drawn).count(b"<polyline") == 2, "the curve has a gap"
    assert math.isfinite(panel["lo"]) and math.isfinite(panel["hi"])
    check_static(view)
    check_static(w.TrainView(FakeRun(1)))


def test_metrics_of_rewards_are_charted_and_the_others_listed() -> None:
    run = FakeRun()
    names = ["exact", *(f"m{i}" for i in range(8)), NASTY[0]]
    run.step()
    for step in range(3):
        run.step(metric_success=0.5, **{f"metric_{name}": step / 4 for name in names})
    view = w.TrainView(run)
    charted = [p["label"] for p in view._about["panels"] if p["points"].startswith("eval_metric_")]
    assert charted == names[:6]
    assert [row[0] for row in view._about["metrics"]] == ["success", *names[6:]]
    assert view._about["metrics"][1][2:] == ["0", "0.5"]
    columns = view._buffers["runs"][0]["columns"]
    np.testing.assert_array_equal(unpack(columns["metric_exact"]), np.float32([math.nan, 0, 0.25, 0.5]))
    assert "metric_m7" not in columns and view.to_frame()["metric_m7"][4] == 0.5
    page = check_static(view)
    assert "exact" in page.text and "m7" in page.text
    both = w.TrainView(run, FakeRun(2), panels=["metric_m7"], names=["a", "b"])
    assert [p["label"] for p in both._about["panels"]] == ["m7"]
    assert ["exact", "b", "–", "–"] in both._about["metrics"]
    alike = FakeRun()
    alike.step(success=0.5, metric_first=0.5)
    assert "first" not in [p["label"] for p in w.TrainView(alike)._about["panels"]]
    check_static(both)


@pytest.mark.parametrize(
    ("key", "values", "axis"),
    [
        ("truncated", [0.0, 0.0, 0.0], (0.0, 1.0)),  # the axis of a fraction does not go below 0
        ("clip_fraction", [0.0, 0.0, 0.0], (0.0, 1.0)),
        ("loss", [0.0, 0.0, 0.0], (0.0, 1.0)),
        ("clip_fraction", [0.5, 1.0, 0.98], (0.0, 1.0)),
        ("clip_fraction", [0.97, 1.0, 0.98], (0.9688, 1.0)),
        ("turns", [2.0, 2.0, 2.0], (0.0, 2.08)),
        ("loss", [-1.0, -1.0, -1.0], (-1.04, 0.0)),
        ("truncated", [1.5, 1.5, 1.5], (0.0, 1.5)),  # impossible values are drawn too
    ],
)
def test_the_axis_of_a_chart(key: str, values: list[float], axis: tuple[float, float]) -> None:
    run = FakeRun()
    for value in values:
        run.step(**{key: value})
    panel = next(p for p in w.TrainView(run)._about["panels"] if [line["key"] for line in p["lines"]] == [key])
    assert (panel["lo"], panel["hi"]) == pytest.approx(axis, abs=1e-4)
    assert panel["lo"] <= min(values) and panel["hi"] >= max(values)


def test_a_thousand_steps_stay_small() -> None:
    view = w.TrainView(FakeRun(3000))
    assert sum(len(p["values"]) for p in view._buffers["runs"][0]["columns"].values()) < 400_000
    check_static(view)


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    long, short = FakeRun(12), FakeRun(3)
    lines = [json.dumps({"step": i, "success": 0.5, "trajectories": 64, "seconds_update": 0.1}) for i in range(4, 9)]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "steps.jsonl").write_text("\n".join(lines) + "\n")
    view = w.TrainView(long, short, tmp_path / "saved", names=["long", "short", "<b>saved</b>"])
    assert repr(view) == "TrainView(3 runs, 20 steps)"
    frame = view.to_frame()
    assert list(frame.loc["<b>saved</b>"].index) == [4, 5, 6, 7, 8]
    assert math.isnan(frame.loc[("long", 1), "success_low"])  # the record lacks the number of chains
    assert frame.loc[("<b>saved</b>", 4), "success_low"] == pytest.approx(0.3808, abs=1e-3)  # Wilson, 32 of 64
    panel = {p["lines"][0]["key"]: p for p in view._about["panels"]}
    assert panel["reward"]["hi"] >= 1.2  # all runs share the range
    assert "seconds_update" in panel and "kl_reference" not in panel
    short.step()
    asyncio.run(until(lambda: len(view.to_frame().loc["short"]) == 4))
    view.step = 11  # a step of only one run
    assert "<b>saved</b>" in check_static(view).text
    view.close()
    assert long.listeners == short.listeners == []


def test_intervals() -> None:
    (low, high), (below, above) = intervals(
        {"trajectories": 110, "unscored": 1 / 11, "success": 1.0, "reward": 2.0, "reward_std": 0.5}
    )
    assert (low, high) == pytest.approx((0.963, 1.0), abs=1e-3)
    assert (below, above) == pytest.approx((1.902, 2.098), abs=1e-3)
    for record in ({}, {"trajectories": 0}, {"trajectories": 8, "unscored": 1.0}):
        assert all(math.isnan(x) for pair in intervals(record) for x in pair)


async def test_a_run_is_paused_and_stopped_from_its_view(tmp_path: Path) -> None:
    run = started(tmp_path / "run", 60, save_rollouts=True)
    view = w.TrainView(run)
    assert view._about["control"] == {"can": False, "ended": True, "paused": False, "stopping": False}

    running = asyncio.ensure_future(run)
    await until(lambda: view._about["control"]["can"])
    await ask(view, "pause")
    await until(lambda: view._about["control"]["paused"])
    before = len(run.records)
    await asyncio.sleep(0.1)
    assert len(run.records) <= before + 1  # an update that had begun when the run was paused
    run.subscribe(lambda record: click(view, "stop"))
    await ask(view, "resume")
    await running
    done = len(run.records)
    assert before < done < 60
    view.refresh()
    assert view._about["control"] == {"can": False, "ended": True, "paused": False, "stopping": False}
    assert view._about["runs"][0]["word"] == f"stopped after step {done}"
    await ask(view, "open", {"step": 1, "run": 0})
    assert [t.id for t in view.rollout] == [row[0] for row in view._list["rows"]]
    assert len(view._list["rows"]) == 4
    await ask(view, "chain_tokens", view._list["rows"][2][0])
    assert view.opened.trajectories[0].id == view._list["rows"][2][0] == view.selection.ids[0]
    sent(view)
    assert len(view.selection.to_frame()) == 1
    await ask(view, "chain_stepper")
    assert view.opened.chain.origin is next(iter(view.selection))
    await ask(view, "chain_code")
    cell: dict[str, Any] = {"af": af, "agent": run.agent}
    exec(view._cell["text"], cell)
    assert cell["trajectory"].id == view.selection.ids[0]
    assert cell["chain"].turns == cell["trajectory"].turns
    shown = view.opened
    await ask(view, "open", {"step": 99, "run": 0})
    assert len(view.selection) == 0 and view.rollout is None
    assert "does not exist" in view._list["note"]
    assert shown.comm is None  # closed together with the list
    view.refresh()
    low, high = view.to_frame().loc[1, ["success_low", "success_high"]]
    assert 0 <= low <= view.to_frame().loc[1, "success"] <= high <= 1
    folder = w.TrainView(tmp_path / "run")  # without a handle, from the folder only
    assert folder._about["control"]["can"] is False
    assert len(await folder.open_step(1)) == 4 and folder.step == 1
    folder.pick(folder.rollout.trajectories[0])
    assert folder._chain["agent"] is False
    await ask(view, "stop")
    bare = w.TrainView(FakeRun(2))
    assert await bare.open_step(1) is None
    assert "did not save its rollouts" in bare._list["note"]
