"""View of the recorded curves of training runs, live or read from run folders."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import traitlets

from agentfly_kit.integrations.html import escape_control_chars
from agentfly_kit.types import text_of

from ._base import LiveView
from ._chains import ChainsView, find_in
from ._curves import Source
from ._format import number, pack, sendable, shared_prefix
from ._panels import EVAL_METRIC, METRIC, compute, default_panels, describe, make_panels, metric_names
from ._train_picture import first_number, last_number, page, step_range

# Maximum number of rows in the table of metrics without a chart.
_LISTED = 100
# Maximum number of trajectories listed for a step; `view.rollout` contains all of them.
_ROWS = 200
# Interval in seconds between checks whether the states of runs have changed.
_POLL_SECONDS = 0.4


class TrainView(ChainsView, LiveView):
    """Curves and states of live or finished training runs, given by handles of `af.train` or paths of run folders.

    Point at a chart or use the arrow keys to show all numbers of a step. Press Enter or click to pick a step, which
    sets `view.step`. If the run saved its trajectories (`TrainConfig(save_rollouts=True)`), picking a step also lists
    them and sets `view.rollout`. `view.selection` is the clicked trajectory. The pause and stop buttons control the
    first run that supports them, even while a cell awaits the run. If a run ends early, the view shows how to continue.

    By default, the view has charts of the success rate, the reward, the first six reward metrics and the KL, with
    circles for evaluations; a button shows the remaining charts, and a table lists the other metrics. `panels=`
    replaces these charts. Each entry specifies one chart: the name of a column of `view.to_frame()`, such as "reward"
    or "metric_exact", a list of such names, or a function that takes this data frame and returns a series, or a data
    frame with one column per line::

        w.TrainView(run, panels=["success", ["entropy", "approx_kl"], "metric_exact", tokens_per_second])

    An unknown name is rejected with a list of the available names. While a run is unfinished, names that begin with
    "metric_" or "eval_metric_" are accepted before they are recorded.

    If `run.diagnose()` finds serious reasons why a live run does not learn, the first is shown above the charts.

    The view updates at most 10 times per second. A folder is read when the view is created, when a page opens the view,
    and when `view.refresh()` is called.

    Args:
        names: One name per run.
        panels: The charts; None for the default.
        agent: The agent used to open a listed trajectory in the stepper; a live run provides its own.

    Attributes:
        step: The step picked in the browser, or None.
    """

    stem: ClassVar[str] = "train_view"
    settable: ClassVar[frozenset[str]] = frozenset({"step"})
    actions: ClassVar[frozenset[str]] = frozenset({"pause", "resume", "stop", "open"}) | ChainsView.picking

    step = traitlets.Int(None, allow_none=True).tag(sync=True)
    _about = traitlets.Dict().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)
    # The trajectories of the picked step.
    _list = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        run: Any,
        *others: Any,
        names: Sequence[str] | None = None,
        panels: Sequence[str | Sequence[str] | Callable[[Any], Any]] | None = None,
        agent: Any = None,
    ) -> None:
        runs = [run, *others]
        given = list(names) if names is not None else [None] * len(runs)
        self._sources = [Source(each, name) for each, name in zip(runs, given, strict=True)]
        self._panels = None if panels is None else make_panels(panels, self._sources)
        for panel in self._panels or ():
            error = compute(panel, self._sources)[1]
            if error:
                fields = ", ".join(dict.fromkeys(key for source in self._sources for key in source.columns))
                raise ValueError(f"panels: the function for {panel.label!r} failed: {error}; columns: {fields}")
        live = [each for each in runs if not isinstance(each, str | os.PathLike) and hasattr(each, "subscribe")]
        # Rollout with the trajectories of the step opened last; None before a step is opened.
        self.rollout: Any = None
        self._agent = agent
        self._polling = False
        super().__init__(run if self._sources[0].path is None else None, _together(live) if live else None)
        self._show()

    def refresh(self) -> None:
        """Re-read the records of all runs and send them to the page."""
        for each in self._sources:
            each.read()
        self._show()

    def _show(self) -> None:
        # All runs share the axis range of a chart, so that their curves can be compared.
        panels = default_panels(self._sources) if self._panels is None else self._panels
        computed = [compute(panel, self._sources) for panel in panels]
        shown = [(p, about) for p, e in computed if (about := describe(p, self._sources, e))["n"] or not p.extra]
        sent = dict.fromkeys(key for panel, _ in shown for key in panel.columns)
        listed = [
            f"{prefix}{name}" for name in metric_names(self._sources) for prefix in (METRIC, EVAL_METRIC)
            if f"{prefix}{name}" not in sent
        ]  # fmt: skip
        with self.hold_sync():
            self._buffers = {
                "runs": [
                    {
                        "steps": each.steps.astype("<i4").tobytes(),
                        "columns": {key: pack(each.column(key)) for key in sent},
                    }
                    for each in self._sources
                ]
            }
            self._about = {
                "runs": [
                    {
                        "name": sendable(each.name), "n": len(each.steps), "total": each.total, "gone": each.gone,
                        "last": int(each.steps[-1]) if len(each.steps) else None, "state": each.state,
                        "word": sendable(each.word), "detail": sendable(each.detail),
                        "finding": sendable(each.finding),
                    }
                    for each in self._sources
                ],
                "control": self._controlled()[1],
                "panels": [about for _, about in shown],
                "metrics": [
                    [
                        escape_control_chars(key.replace(EVAL_METRIC, "evaluation: ").removeprefix(METRIC), 40),
                        sendable(each.name), number(first_number(each.column(key))),
                        number(last_number(each.column(key))),
                    ]
                    for key in listed if any(key in each.columns for each in self._sources)
                    for each in self._sources
                ][:_LISTED],
            }  # fmt: skip
        self._poll()

    def _poll(self) -> None:
        """Poll the states of the runs, which the records do not contain, until all runs have ended."""
        loop, view_ref = self._loop, weakref.ref(self)
        if self._polling or loop is None or loop.is_closed():
            return
        # A run still writes a checkpoint after its last record.
        if not any(each.control["can"] or each.state in ("not started", "running") for each in self._sources):
            return
        self._polling = True

        def check() -> None:
            view = view_ref()
            if view is None or view.comm is None:
                return
            view._polling = False
            if view._has_changed():
                view._throttle.schedule()
            view._poll()

        loop.call_soon_threadsafe(loop.call_later, _POLL_SECONDS, check)

    def _has_changed(self) -> bool:
        return any(each.changed for each in self._sources) or self._about["control"] != self._controlled()[1]

    def _update_picture(self) -> None:
        if self.comm is not None and self._has_changed():
            self._refresh_safely()
        super()._update_picture()

    def _controlled(self) -> tuple[Any, dict[str, bool]]:
        """Return the run that the buttons control, and the flags of the buttons."""
        controls = [(each, each.control) for each in self._sources]
        for flag in ("can", "ended"):
            for each, control in controls:
                if control[flag]:
                    return each.run(), control
        return None, {"can": False, "ended": False, "paused": False, "stopping": False}

    # --- buttons ---

    def _control(self, method: str, _: Any) -> None:
        run, control = self._controlled()
        if not control["can"]:
            raise RuntimeError("no run in this view can currently be paused or stopped")
        getattr(run, method)()
        self.refresh()

    _do_pause = functools.partialmethod(_control, "pause")
    _do_resume = functools.partialmethod(_control, "resume")
    _do_stop = functools.partialmethod(_control, "stop")

    async def _do_open(self, value: Any) -> None:
        await self._list_step(int(value["step"]), int(value.get("run", 0)))

    async def open_step(self, step: int, run: int = 0) -> Any:
        """Pick a step and list its trajectories.

        Args:
            step: The step to open.
            run: Index of the run.

        Returns:
            The Rollout, which is also stored in `view.rollout`; None if the run did not save it.
        """
        if step in self._sources[run].steps:
            self.step = step
        return await self._list_step(step, run)

    async def _list_step(self, step: int, run: int) -> Any:
        from agentfly_kit.trainer.run_dir import Run

        source = self._sources[run]
        self.pick(None)
        self.rollout = None
        file = Run(source.folder).rollout_path(f"step-{step:05d}") if source.folder is not None else None
        note, rows = "", []
        if step not in source.steps:
            note = f"step {step} does not exist in {source.name or 'this run'}, which has {step_range(source.steps)}"
        elif file is None or not file.is_file():
            note = "This run did not save its rollouts. TrainConfig(save_rollouts=True) saves them in the run folder."
        else:
            self.rollout = await asyncio.to_thread(Run(file.parent.parent).rollout, step)
            rows = [_row(t) for t in self.rollout.trajectories[:_ROWS]]
        self._list = {
            "step": step,
            "run": run,
            "note": sendable(note),
            "rows": rows,
            "total": len(self.rollout or ()),
            "prefix": shared_prefix([row[0] for row in rows]),
        }
        return self.rollout

    def _trajectory(self, id: str) -> Any:
        found = next((t for t in self.rollout or () if sendable(t.id) == id), None)
        if found is None:
            raise LookupError(f"trajectory {id} is not listed; open a step with saved rollouts")
        return found

    def _agent_for(self) -> Any:
        if self._agent is not None:
            return self._agent
        return getattr(self._sources[int(self._list.get("run", 0))].run(), "agent", None)

    def _expression(self, id: str) -> str:
        folder = self._sources[int(self._list.get("run", 0))].folder
        return find_in(f"af.Run({str(folder)!r}).rollout({self._list.get('step')})", id)

    @traitlets.validate("step")
    def _known(self, proposal: Any) -> int | None:
        value = proposal["value"]
        if value is not None and not any(value in each.steps for each in self._sources):
            raise ValueError(f"step {value} does not exist; the run has {step_range(self._sources[0].steps)}")
        return None if value is None else int(value)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the first run."""
        return tuple(int(step) for step in self._sources[0].steps)

    def to_frame(self) -> Any:
        """Return the recorded fields as a data frame with one row per step. Missing values are NaN.

        With several runs, the index is (run, step).
        """
        import pandas as pd

        frames = [each.to_frame() for each in self._sources]
        return (
            frames[0] if len(frames) == 1 else pd.concat(frames, keys=[s.name for s in self._sources], names=["run"])
        )

    def __repr__(self) -> str:
        if len(self._sources) > 1:
            return f"TrainView({len(self._sources)} runs, {sum(len(s.steps) for s in self._sources)} steps)"
        run = self._sources[0]
        of = f" of {run.total}" if run.total else ""
        state = f", {run.state}" if run.state in ("stopped", "interrupted", "failed") else ""
        return f"TrainView({len(run.steps)}{of} steps{state})"

    def _static(self) -> str:
        return page(self._about, self._sources, repr(self))


def _together(runs: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[[], Any]]:
    def subscribe(callback: Callable[..., None]) -> Callable[[], Any]:
        ends = [run.subscribe(callback) for run in runs]
        return lambda: [end() for end in ends]

    return subscribe


def _row(t: Any) -> list[Any]:
    question, final = (" ".join(str(text).split()) for text in (text_of(t.task.messages[-1]), t.final))
    return [
        sendable(t.id), sendable(question[:120]), number(t.reward), t.stop, len(t.actions),
        sum(int(row.action_mask.sum()) for row in t.rows) if t.exact else None,
        None if t.final is None else sendable(final[:120]),
    ]  # fmt: skip
