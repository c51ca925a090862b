"""Arguments and selections that the views reject."""

import dataclasses
from typing import Any

import errors
import numpy as np
from test_widgets_forms import saved, weather
from views import FakeRun, batch_of, stats_of, trajectory

import agentfly_kit as af
from agentfly_kit import widgets as w

RUN = FakeRun(3)
RUN.step(metric_exact=0.5)


def odd_stats() -> af.Stats:
    return dataclasses.replace(stats_of(batch_of([trajectory()])), detail={"odd": np.zeros((1, 1))})


def selected(*spans: list[int]) -> None:
    w.TokenView(trajectory()).set_state({"_selected": list(spans)})


def charts(*panels: Any) -> w.TrainView:
    return w.TrainView(RUN, panels=list(panels))


@af.reward
def by_colour(colour: str) -> float:
    return 1.0


def untyped(x):  # type: ignore[no-untyped-def]
    return x


test_errors = errors.rejected(
    (lambda: w.TokenView(7), TypeError, "source must be"),
    (lambda: w.TokenView([1]), TypeError, "source must be"),
    (lambda: w.TokenView({"a": 1}), TypeError, "source must be"),
    (lambda: w.TokenView(af.Stats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), ValueError, "detail=True"),
    (lambda: selected([1, 0, 1]), ValueError, "do not exist"),
    (lambda: selected([0, 3, 3]), ValueError, "do not exist"),
    (lambda: selected([0, 0, 999]), ValueError, "do not exist"),
    (lambda: selected([0, -1, 2]), ValueError, "do not exist"),
    (lambda: w.TrajectoryView(3), TypeError, "source must be a Rollout"),
    (lambda: w.TrajectoryView("abc"), TypeError, "source must be a Rollout"),
    (lambda: w.TrajectoryView([1, 2]), TypeError, "source must be a Rollout"),
    (lambda: w.TrajectoryView([trajectory("a"), trajectory("a")]), ValueError, "must be unique within a view"),
    (lambda: w.TrajectoryView([trajectory("a")]).select("x"), ValueError, "trajectory 'x' does not exist"),
    (lambda: w.ChainStepper(3), TypeError, "must be a Chain, got int; with an Agent, pass a task"),
    (lambda: w.PoolView(7), TypeError, "pool must be a Pool"),
    (lambda: w.RolloutView(af.Rollout()), TypeError, "TrajectoryView"),
    (lambda: w.TrainView("nothing"), FileNotFoundError, "pass a run"),
    (lambda: w.TrainView(7), TypeError, "runs must be training runs"),
    (lambda: w.TrainView(RUN, 7), TypeError, "runs must be training runs"),
    (lambda: setattr(w.TrainView(RUN), "step", 9), ValueError, "steps 1 to 4"),
    (lambda: w.TrainView(RUN).pick("nobody"), LookupError, "trajectory nobody is not listed"),
    (
        lambda: charts("exact"),
        ValueError,
        "did you mean 'metric_exact'?; recorded: success",
    ),
    (lambda: charts(["success", "rewrd"]), ValueError, "no field is called 'rewrd'; did you mean 'reward'"),
    (lambda: w.TrainView(FakeRun(20), panels=["metric_later"]), ValueError, "no field is called 'metric_later'"),
    (lambda: charts(["success"] * 7), ValueError, "at most 6 lines, got 7"),
    (
        lambda: charts(lambda rows: rows["tokenz"]),
        ValueError,
        "'panel 1' failed: KeyError: 'tokenz'; columns: success",
    ),
    (lambda: charts(lambda rows: [1, 2]), ValueError, "failed: ValueError"),
    (lambda: w.ToolForm(weather, pool=7), TypeError, "must be an af.Pool"),
    (lambda: w.ToolForm(weather, task={"id": 1}), TypeError, "must be a Task"),
    (lambda: w.ToolForm(untyped), af.errors.ToolSchemaError, "'x' must have a type"),
    (lambda: w.ToolForm(weather).select(1), ValueError, "call 1 does not exist"),
    (lambda: w.RewardForm(by_colour, saved()), af.errors.TaskError, "requires the field 'colour'"),
)
