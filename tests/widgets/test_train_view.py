"""TrainView without a browser: states of a run, and the choice of panels."""

import asyncio
import base64
import gc
import json
import math
import re
from pathlib import Path
from typing import Any

import agents
import errors
import numpy as np
import pytest
from agentfly_kit.widgets import train_view
from agentfly_kit.widgets._panels import FIELDS
from views import FakeRun, check_static, started, unpack
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit import widgets as w
from agentfly_kit.trainer import loop


def half() -> float:
    return 0.5


def shown(view: Any) -> tuple[str, str]:
    """Return the state and the details that the page shows, after checking that the static form has them too."""
    about = view._about["runs"][0]
    page = check_static(view)
    assert about["word"] in page.text and about["detail"] in page.text
    return about["word"], about["detail"]


# --- states ----------------------------------------------------------------------------------------


async def test_the_first_serious_finding_is_shown(tmp_path: Path) -> None:
    policy = agents.fresh()
    config = af.TrainConfig(steps=1, tasks_per_step=2, group_size=4)
    agent = agents.agent(policy).replace(reward=half)
    run = af.train(agent, policy, agents.tasks(4), config, run=tmp_path / "constant")
    view = w.TrainView(run)
    assert view._about["runs"][0]["finding"] == ""
    await run
    view.refresh()
    finding = view._about["runs"][0]["finding"]
    assert finding.startswith("All 8 scored chains have the reward 0.5")
    assert finding in check_static(view).text


async def test_the_states_of_a_run_that_is_paused_and_stopped(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    view = w.TrainView(run)
    assert shown(view) == ("not started", "`await run` starts it.") and not view._about["control"]["can"]
    run.pause()
    going = asyncio.create_task(run)
    await until(lambda: view._about["runs"][0]["word"] == "paused")
    run.resume()
    view.refresh()
    assert shown(view) == ("running", "")
    run.subscribe(lambda record: record["step"] == 1 and run.stop())
    await until(lambda: "stopping after step" in view._about["runs"][0]["word"] or going.done())
    await going
    done = len(run.records)
    assert done < 4 and run.state == "stopped"
    await until(lambda: shown(view)[0] == f"stopped after step {done}")
    assert not view._about["control"]["can"] and view._about["control"]["ended"]
    kept = f"{'Steps 1 to' if done > 1 else 'Step'} {done} and the checkpoint are kept in '{tmp_path / 'run'}'"
    assert shown(view)[1] == f"{kept}. To continue, run `await run`, or the cell that created the run."

    # Awaiting the same handle continues the run, because a stop applies only to the loop that it stopped.
    await run
    await until(lambda: shown(view)[0] == "finished")
    assert len(run.records) == 4
    assert repr(view) == "TrainView(4 of 4 steps)" and not view._about["control"]["can"]


async def test_a_loop_that_is_left_is_stopped_and_continues_where_it_was(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    view = w.TrainView(run)
    async for step in run:
        if step.step == 2:
            break
    gc.collect()
    await until(lambda: shown(view)[0] == "stopped after step 2")
    again = started(tmp_path / "run")
    later = w.TrainView(again)
    assert shown(later) == ("not started", "`await run` continues after step 2.")
    words = []
    async for step in again:
        if step.step == 3:
            later.refresh()
            words.append(shown(later))
    assert words == [("running", "Continued after step 2.")]
    await until(lambda: shown(later) == ("finished", "Continued after step 2."))

    finished = started(tmp_path / "run")
    assert shown(w.TrainView(finished))[0] == "finished earlier"
    with pytest.warns(UserWarning, match="nothing is trained"):
        await finished
    assert shown(w.TrainView(finished))[0] == "already finished"
    assert "nothing was trained" in shown(w.TrainView(finished))[1]


async def test_a_run_that_ends_after_its_last_record_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_view, "_POLL_SECONDS", 0.001)
    run = started(tmp_path / "run", steps=2)
    view = w.TrainView(run)
    async for step in run:
        if step.step == 2:
            await until(lambda: repr(view).startswith("TrainView(2 of 2 steps"))
            assert shown(view)[0] == "running"
            for _ in range(20):  # polls while the last checkpoint is written
                await asyncio.sleep(0.001)
    await until(lambda: shown(view)[0] == "finished")


@pytest.mark.parametrize("interrupt", [asyncio.CancelledError, KeyboardInterrupt])
async def test_an_interrupted_run(
    interrupt: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path / "run", steps=5, checkpoint_every=2)
    view = w.TrainView(run)
    if interrupt is KeyboardInterrupt:
        real = loop.make_record

        def interrupted(step: int, *given: Any) -> Any:
            if step == 4:
                raise KeyboardInterrupt
            return real(step, *given)

        monkeypatch.setattr(loop, "make_record", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            # In a task, KeyboardInterrupt would stop the event loop of the test.
            await run._wait()
        monkeypatch.undo()
    else:
        going = asyncio.create_task(run)
        run.subscribe(lambda record: record["step"] == 3 and going.cancel())
        with pytest.raises(asyncio.CancelledError) as caught:
            await going
    assert type(caught.value) is interrupt
    kept = f"teps 1 to 2 and the checkpoint are kept in '{tmp_path / 'run'}'; step 3 will run again"
    assert str(caught.value).startswith(f"training was interrupted after step 3 of 5: s{kept}")
    assert str(caught.value).endswith("To continue, run the cell again, or await the same run")
    await until(lambda: shown(view)[0] == "interrupted after step 3")
    assert shown(view)[1].startswith("S" + kept)
    assert repr(view) == "TrainView(3 of 5 steps, interrupted)"
    assert "interrupted, await it again to continue" in repr(run)
    assert view._about["control"] == {"can": False, "ended": True, "paused": False, "stopping": False}
    await run
    await until(lambda: shown(view)[0] == "finished")
    assert [record["step"] for record in run.records] == [1, 2, 3, 4, 5]


def test_a_view_notices_that_a_running_run_has_loaded_its_checkpoint() -> None:
    run = FakeRun(3)
    run.state, run.resumed_from = "running", 0  # type: ignore[attr-defined]
    view = w.TrainView(run)
    assert not view._has_changed() and shown(view) == ("running", "")
    run.resumed_from = 3  # type: ignore[attr-defined]
    assert view._has_changed()
    view.refresh()
    assert shown(view) == ("running", "Continued after step 3.")


async def test_an_interrupted_run_without_a_folder_or_a_step() -> None:
    run = started(None)
    going = asyncio.create_task(run)
    while run.rollout is None:
        await asyncio.sleep(0)
    going.cancel()
    await errors.check(
        lambda: going, asyncio.CancelledError, "after step 0 of 4: no step is kept. To continue, await"
    )
    assert "no step is kept" in run.describe_kept()
    async with asyncio.timeout(GUARD):  # only an exception of type CancelledError itself becomes a TimeoutError
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await run


async def test_a_failed_run_shows_the_first_line_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path / "run")
    view = w.TrainView(run)

    def broken(*given: Any) -> Any:
        raise OSError("No space left\non this device")

    async for step in run:
        if step.step == 2:
            monkeypatch.setattr(run, "_persist", broken)
            break
    await errors.check(lambda: run, OSError, "No space left")
    await until(lambda: shown(view)[0] == "failed after step 2: OSError: No space left")
    assert "Steps 1 to 2" in shown(view)[1]
    assert isinstance(run.error, OSError)
    monkeypatch.undo()
    await run
    assert run.error is None


# --- panels ------------------------------------------------------------------------------------------


def lines(view: Any) -> list[list[str]]:
    return [[line["key"] for line in panel["lines"]] for panel in view._about["panels"]]


async def test_every_field_of_a_run_has_a_name_and_metrics_are_drawn_with_their_evaluation(tmp_path: Path) -> None:
    run = started(tmp_path / "run", steps=2, evaluate_every=1)
    await run
    others = ("metric_", "eval_metric_", "dropped: ")
    assert {key for record in run.records for key in record if not key.startswith(others)} <= {"step", *FIELDS}
    tokens = next(panel for panel in w.TrainView(run)._about["panels"] if panel["label"] == "tokens")
    assert tokens["unit"] == "per chain"  # as in `Rollout.summary`, from which the value is recorded

    fake = FakeRun(2)
    fake.step(metric_exact=0.25, eval_metric_exact=0.5)
    view = w.TrainView(fake)
    panels = view._about["panels"]
    panel = panels[2]
    assert (panel["label"], panel["points"]) == ("exact", "eval_metric_exact")
    assert [p["label"] for p in panels if not p["more"]] == ["success", "reward", "exact", "approx KL"]
    columns = view._buffers["runs"][0]["columns"]
    np.testing.assert_array_equal(unpack(columns["eval_metric_exact"]), np.float32([math.nan, math.nan, 0.5]))
    page = check_static(view)
    assert "exact (evaluation)" in page.text and "Circles show evaluations" in page.text
    assert "2 more charts" in page.text  # the gradient norm and the seconds


def test_panels_of_names_lists_and_functions() -> None:
    run = FakeRun(3)
    run.step(metric_exact=0.5, tokens=50.0)

    def tokens_per_second(records: Any) -> Any:
        return records["tokens"] / records["seconds"]

    view = w.TrainView(
        run,
        panels=["success", ["reward", "metric_exact"], "metric_exact", tokens_per_second, "eval_metric_later", "lr"],
    )  # fmt: skip
    assert [panel["label"] for panel in view._about["panels"]] == [
        "success", "reward, exact", "exact", "tokens per second", "eval_metric_later", "lr",
    ]  # fmt: skip
    assert lines(view)[1] == ["reward", "metric_exact"]
    assert view._about["panels"][0]["bandLow"] == "success_low"
    key = lines(view)[3][0]
    np.testing.assert_array_equal(unpack(view._buffers["runs"][0]["columns"][key])[3], np.float32(25))
    run.step(tokens=80.0, eval_metric_later=0.75)
    view.refresh()
    assert unpack(view._buffers["runs"][0]["columns"][key])[4] == 40
    assert view._about["panels"][4]["n"] == 1
    assert "tokens per second" in check_static(view).text
    smooth = w.TrainView(run, FakeRun(5), panels=[lambda records: records[["reward", "success"]].rolling(2).mean()])
    assert [line["label"] for line in smooth._about["panels"][0]["lines"]] == ["reward", "success"]
    assert smooth._about["panels"][0]["label"] == "panel 1"
    check_static(smooth)


def test_a_function_that_fails_later_leaves_the_other_charts() -> None:
    run = FakeRun(0)
    view = w.TrainView(run, panels=["success", lambda records: records["tokenz"]])
    run.step()
    view.refresh()
    assert (view._about["panels"][0]["n"], view._about["panels"][1]["error"]) == (1, "KeyError: 'tokenz'")
    assert "panel 2: KeyError: 'tokenz'" in check_static(view).text


# --- the static form -----------------------------------------------------------------------------------


def drawings(view: Any) -> list[str]:
    return [base64.b64decode(x).decode() for x in re.findall(r"base64,([A-Za-z0-9+/=]+)", view._static())]


@pytest.mark.parametrize("value", [1e-7, -0.000123, 123456.0, -98765.4, 0.3333, 1e12])
def test_no_label_of_the_static_form_is_cut(value: float) -> None:
    run = FakeRun()
    for factor in (1.0, 1.00001, 1.7):
        run.step(loss=value * factor, metric_a_long_name_of_a_metric_that_does_not_fit=value)
    view = w.TrainView(run, panels=["loss", "metric_a_long_name_of_a_metric_that_does_not_fit"])
    for svg in drawings(view):
        texts = re.findall(r'<text x="([\d.-]+)" y="[\d.-]+" text-anchor="(\w+)"([^>]*)>([^<]*)</text>', svg)
        assert len(texts) >= 5
        for x, anchor, style, text in texts:
            width = len(text) * 0.65 * (10 if 'font-size="10"' in style else 12)
            left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
            assert left >= 0 and left + width <= 230, (text, left, width)
        title, number = texts[0], texts[1]
        assert float(title[0]) + len(title[3]) * 7.8 <= float(number[0]) - len(number[3]) * 7.8 + 1


def test_the_static_form_has_the_intervals_and_the_rule_of_success() -> None:
    run = FakeRun()
    run.step(trajectories=64, success=0.5)
    view = w.TrainView(run)
    page = view._static()
    assert re.search(r"success \(share\) over step 1, last 0\.5 \[0\.38\d+, 0\.61\d+\]\. A chain succeeds if", page)
    assert "Bands show 95 % intervals" in page
    (step,) = re.findall(r'text-anchor="middle" [^>]*>([^<]*)</text>', drawings(view)[0])
    assert step == "1"
    json.dumps(page)
