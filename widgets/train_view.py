"""View of the recorded curves of training runs, live or read from run folders."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import traitlets

from ._base import SUCCESS_RULE, LiveView, escape, escape_control_chars, number, pack, sendable, shared_prefix, tag
from ._chains import ChainsView


@dataclass(frozen=True)
class Panel:
    """Specification of a chart: a line over all steps, and points with intervals at the evaluated steps.

    Attributes:
        key: The column of the line.
        label: The chart's title.
        unit: The unit shown next to the title.
        points: The column of the evaluation points.
        low: The column of the lower ends of the evaluation intervals.
        high: The column of the upper ends of the evaluation intervals.
        fixed: The range of the y axis, if it does not depend on the data.
        band: The columns of the lower and upper ends of the interval around the line.
        extra: True to show the chart only if a run recorded the column `key`.
        hint: Explanation of the numbers, shown as a tooltip of the title.
    """

    key: str
    label: str
    unit: str = ""
    points: str = ""
    low: str = ""
    high: str = ""
    fixed: tuple[float, float] | None = None
    band: tuple[str, str] | None = None
    extra: bool = False
    hint: str = ""


PANELS = (
    Panel(
        "success", "success", "share", "eval_success", "eval_low", "eval_high", (0.0, 1.0),
        ("success_low", "success_high"), hint=SUCCESS_RULE,
    ),
    Panel("reward", "reward", "mean", band=("reward_low", "reward_high")),
    Panel("approx_kl", "approx KL", "nats per token"),
    Panel("clip_fraction", "clip fraction", "share"),
    Panel("entropy", "entropy", "nats per token"),
    Panel("grad_norm", "grad norm", "before clipping"),
    Panel("loss", "loss"),
    Panel("tokens", "tokens", "per step"),
    Panel("turns", "turns", "per chain"),
    Panel("seconds", "seconds", "per step"),
    Panel("seconds_rollout", "rollout", "seconds", extra=True),
    Panel("seconds_update", "update", "seconds", extra=True),
    Panel("kl_reference", "KL to reference", "nats per token", extra=True),
    Panel("value_loss", "value loss", extra=True),
    Panel("explained_variance", "explained variance", "of the values", extra=True),
    Panel("sampler_gap", "sampler gap", "largest, nats", extra=True),
    Panel("calls", "tool calls", "per chain", extra=True),
    Panel("truncated", "truncated", "share", extra=True),
    Panel("unscored", "unscored", "share", extra=True),
)  # fmt: skip
_KEYS = tuple(dict.fromkeys(key for p in PANELS for key in (p.key, p.points, p.low, p.high, *(p.band or ())) if key))
# Prefix of the column names of reward metrics.
_METRIC = "metric_"
# Maximum number of metrics with a chart, and maximum number of rows in the table of other metrics.
_CHARTED, _LISTED = 6, 100
# Maximum number of trajectories listed for a step; `view.rollout` holds all of them.
_ROWS = 200


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records in a run's folder, oldest first.

    An incomplete last line is skipped, because the run may still be writing it. Any other malformed line raises an
    error.
    """
    folder = Path(path)
    file = folder / "steps.jsonl" if folder.is_dir() else folder
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; pass a run, a run folder, or its steps.jsonl")
    lines = file.read_bytes().split(b"\n")
    if lines[-1]:
        try:
            json.loads(lines[-1])
        except ValueError:
            lines.pop()
    records: list[dict[str, Any]] = []
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {i}: {error}") from error
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{file}, line {i}: each line must be an object with 'step', got {line[:80]!r}")
        records.append(record)
    return records


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.int32], dict[str, npt.NDArray[np.float32]]]:
    """Convert records to an array of steps (N,) and one float32 column (N,) per key.

    Missing values are NaN. If a step has several records, the last one is used.
    """
    by_step = {int(r["step"]): r for r in records}
    order = sorted(by_step)
    out = {}
    metrics = dict.fromkeys(key for record in by_step.values() for key in record if key.startswith(_METRIC))
    for key in (*_KEYS, *metrics):
        values = np.full(len(order), np.nan, np.float32)
        for i, step in enumerate(order):
            value = by_step[step].get(key)
            if value is not None and not isinstance(value, str):
                values[i] = value
        out[sendable(key)] = values
    for i, step in enumerate(order):
        for (low, high), ends in zip((("success_low", "success_high"), ("reward_low", "reward_high")),
                                     intervals(by_step[step]), strict=True):  # fmt: skip
            out[low][i], out[high][i] = ends
    return np.asarray(order, np.int32), out


def intervals(record: Mapping[str, Any], z: float = 1.96) -> tuple[tuple[float, float], tuple[float, float]]:
    """Compute 95 % confidence intervals of a step's success rate (Wilson) and mean reward (normal).

    The scored chains are treated as independent. The ends are NaN if the record lacks the number of chains or the
    standard deviation of the rewards.
    """
    n = record.get("trajectories", math.nan) * (1 - record.get("unscored", 0.0))
    none = (math.nan, math.nan)
    if not n >= 1:
        return none, none
    p, mean, std = (record.get(key, math.nan) for key in ("success", "reward", "reward_std"))
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), math.nan
    if 0 <= p <= 1:
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    error = z * std / math.sqrt(n)
    return (middle - half, middle + half), (mean - error, mean + error)


class _Source:
    """A training run, given by the path of its folder or by a handle, which is held by a weak reference."""

    def __init__(self, run: Any, name: str | None) -> None:
        self.path = Path(run) if isinstance(run, str | os.PathLike) else None
        self.run: Callable[[], Any] = lambda: None
        if self.path is None:
            if not hasattr(run, "records"):
                raise TypeError(
                    "runs must be training runs (objects with records and subscribe) or paths of run folders, "
                    f"got {type(run).__name__}"
                )
            self.run = weakref.ref(run)
            where = getattr(run, "path", None)
            self.folder = Path(where) if where is not None else None
        else:
            self.folder = self.path if self.path.is_dir() else self.path.parent
        self.name = name if name is not None else (self.folder.name if self.folder is not None else "")
        self.total: int | None = None
        self.gone = False
        self.steps, self.columns = columns([])
        self.read()

    def read(self) -> None:
        run = self.run()
        if self.path is None and run is None:
            self.gone = True
            return
        self.steps, self.columns = columns(read_steps(self.path) if self.path is not None else list(run.records))
        total = getattr(run, "total", None)
        self.total = int(total) if isinstance(total, int) else None

    @property
    def control(self) -> dict[str, bool]:
        """Flags for the buttons: `can` (True if the run can be controlled), `paused` and `stopping`."""
        run = self.run()
        can = all(callable(getattr(run, name, None)) for name in ("pause", "resume", "stop"))
        done = self.total is not None and len(self.steps) >= self.total
        return {
            "can": bool(can and not done),
            "paused": bool(getattr(run, "paused", False)),
            "stopping": bool(getattr(run, "stopping", False)),
        }


class TrainView(ChainsView, LiveView):
    """Curves of live or finished training runs, given by handles of `af.train` or paths of run folders.

    Point at a chart or use the arrow keys to show all numbers of a step. Press Enter or click to pick a step: this sets
    `view.step`, and if the run saved its trajectories (`TrainConfig(save_rollouts=True)`), it lists them and sets
    `view.rollout`. `view.selection` is the clicked trajectory. The pause and stop buttons control the first run that
    supports them, even while a cell awaits the run.

    The view updates at most 10 times per second. A folder is read when the view is created, when a page opens the view,
    and by `view.refresh()`.

    Args:
        names: One name per run.
        metrics: Names of the reward metrics to chart; the first six by default. A table lists the others.
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
        metrics: Sequence[str] | None = None,
        agent: Any = None,
    ) -> None:
        runs = [run, *others]
        if names is not None and len(names) != len(runs):
            raise ValueError(f"names must have one entry per run ({len(runs)}), got {list(names)!r}")
        given = list(names) if names is not None else [None] * len(runs)
        self._sources = [_Source(each, name) for each, name in zip(runs, given, strict=True)]
        live = [each for each in runs if not isinstance(each, str | os.PathLike) and hasattr(each, "subscribe")]
        # Rollout with the trajectories of the step opened last; None before a step is opened.
        self.rollout: Any = None
        self._agent = agent
        self._metrics = metrics
        super().__init__(run if self._sources[0].path is None else None, _together(live) if live else None)
        self._show()

    def refresh(self) -> None:
        """Re-read the records of all runs and send them to the page."""
        for each in self._sources:
            each.read()
        self._show()

    def _show(self) -> None:
        # All runs share the axis range of a chart, so that their curves can be compared.
        all_data = [each.columns for each in self._sources]
        metrics = list(dict.fromkeys(key for data in all_data for key in data if key.startswith(_METRIC)))
        for each in self._sources:
            for key in metrics:
                each.columns.setdefault(key, np.full(len(each.steps), np.nan, np.float32))
        chosen = [key for key in metrics if key != f"{_METRIC}success"][:_CHARTED]  # success has a separate chart
        if self._metrics is not None:
            chosen = [key for key in metrics if key.removeprefix(_METRIC) in self._metrics]
        panels = (
            *PANELS,
            *(Panel(key, escape_control_chars(key.removeprefix(_METRIC), 40), "mean", extra=True) for key in chosen),
        )
        sent = {*_KEYS, *chosen}
        with self.hold_sync():
            self._buffers = {
                "runs": [
                    {
                        "steps": each.steps.astype("<i4").tobytes(),
                        "columns": {k: pack(v) for k, v in each.columns.items() if k in sent},
                    }
                    for each in self._sources
                ]
            }
            self._about = {
                "runs": [
                    {
                        "name": sendable(each.name), "n": len(each.steps), "total": each.total, "gone": each.gone,
                        "last": int(each.steps[-1]) if len(each.steps) else None,
                    }
                    for each in self._sources
                ],
                "control": self._controlled()[1],
                "panels": [panel for p in panels if (panel := _panel(p, all_data))["n"] or not p.extra],
                "metrics": [
                    [
                        escape_control_chars(key.removeprefix(_METRIC), 40), sendable(each.name),
                        number(_first(each.columns[key])), number(_last(each.columns[key])),
                    ]
                    for key in metrics if key not in chosen
                    for each in self._sources
                ][:_LISTED],
            }  # fmt: skip

    def _controlled(self) -> tuple[Any, dict[str, bool]]:
        for each in self._sources:
            if (control := each.control)["can"]:
                return each.run(), control
        return None, {"can": False, "paused": False, "stopping": False}

    # --- buttons ---

    def _do_pause(self, value: Any) -> None:
        self._tell("pause")

    def _do_resume(self, value: Any) -> None:
        self._tell("resume")

    def _do_stop(self, value: Any) -> None:
        self._tell("stop")

    def _tell(self, what: str) -> None:
        run = self._controlled()[0]
        if run is None:
            raise RuntimeError("no run of this view can be paused or stopped any more")
        getattr(run, what)()
        self._about = {**self._about, "control": self._controlled()[1]}

    async def _do_open(self, value: Any) -> None:
        step, which = int(value["step"]), int(value.get("run", 0))
        await self.open_step(step, which)

    async def open_step(self, step: int, run: int = 0) -> Any:
        """List the trajectories of a step.

        Args:
            step: The step to open.
            run: Index of the run.

        Returns:
            The Rollout, which is also stored in `view.rollout`; None if the run did not save it.
        """
        from agentfly_kit.trainer.run_dir import Run

        if not 0 <= run < len(self._sources):
            raise ValueError(f"run must be between 0 and {len(self._sources) - 1}, got {run}")
        source = self._sources[run]
        self.pick(None)
        self.rollout = None
        file = Run(source.folder).rollout_path(f"step-{step:05d}") if source.folder is not None else None
        note, rows = "", []
        if step not in source.steps:
            note = f"step {step} is not one of {source.name or 'this run'}: it has {_range(source.steps)}"
        elif file is None or not file.is_file():
            note = "This run did not keep its rollouts. TrainConfig(save_rollouts=True) keeps them in its folder."
        else:
            self.rollout = await asyncio.to_thread(Run(file.parent.parent).rollout, step)
            rows = [_row(t) for t in self.rollout.trajectories[:_ROWS]]
        total = 0 if self.rollout is None else len(self.rollout)
        self._list = {
            "step": step,
            "run": run,
            "note": sendable(note),
            "rows": rows,
            "total": total,
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

    def _expression(self) -> str:
        folder = self._sources[int(self._list.get("run", 0))].folder
        return f"af.Run({str(folder)!r}).rollout({self._list.get('step')})"

    @traitlets.validate("step")
    def _known(self, proposal: Any) -> int | None:
        value = proposal["value"]
        if value is not None and not any(value in each.steps for each in self._sources):
            raise ValueError(f"step {value} does not exist; the run has {_range(self._sources[0].steps)}")
        return None if value is None else int(value)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the first run."""
        return tuple(int(step) for step in self._sources[0].steps)

    def to_frame(self) -> Any:
        """Return a data frame of the plotted numbers, with one row per step. Missing values are NaN.

        With several runs the index is (run, step).
        """
        import pandas as pd

        frames = [pd.DataFrame(dict(s.columns), index=pd.Index(s.steps, name="step")) for s in self._sources]
        return frames[0] if len(frames) == 1 else pd.concat(frames, keys=[s.name for s in self._sources], names=["run"])

    def __repr__(self) -> str:
        if len(self._sources) > 1:
            return f"TrainView({len(self._sources)} runs, {sum(len(s.steps) for s in self._sources)} steps)"
        of = f" of {self._sources[0].total}" if self._sources[0].total else ""
        return f"TrainView({len(self._sources[0].steps)}{of} steps)"

    def _static(self) -> str:
        return _page(self._about, self._sources, repr(self))


def _together(runs: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[[], Any]]:
    def subscribe(callback: Callable[..., None]) -> Callable[[], Any]:
        ends = [run.subscribe(callback) for run in runs]
        return lambda: [end() for end in ends]

    return subscribe


def _row(t: Any) -> list[Any]:
    question, final = (" ".join(str(text).split()) for text in (t.task.messages[-1]["content"], t.final))
    return [
        sendable(t.id), sendable(question[:120]), number(t.reward), t.stop, len(t.actions),
        sum(int(row.action_mask.sum()) for row in t.rows) if t.exact else None,
        None if t.final is None else sendable(final[:120]),
    ]  # fmt: skip


def _range(steps: npt.NDArray[np.int32]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no step yet"


def _panel(p: Panel, runs: Sequence[Mapping[str, npt.NDArray[np.float32]]]) -> dict[str, Any]:
    """Return the description of a chart without its data, with a y range shared by the static form and the page."""
    band = p.band or ("", "")
    values = [data[key] for data in runs for key in (p.key, p.points, p.low, p.high, *band) if key]
    finite = np.concatenate([v[np.isfinite(v)] for v in values])
    odd = int(sum(np.isinf(v).sum() for v in values))
    low, high = _domain(finite, p.fixed, (0.0, 1.0) if p.unit == "share" else (-math.inf, math.inf))
    return {
        "key": p.key, "label": p.label, "unit": p.unit, "hint": p.hint, "points": p.points, "low": p.low,
        "high": p.high, "lo": low, "hi": high, "n": len(finite), "odd": odd, "bandLow": band[0],
        "bandHigh": band[1],
    }  # fmt: skip


def _domain(
    finite: npt.NDArray[np.float32],
    fixed: tuple[float, float] | None,
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Choose the lower and upper end of a chart's axis, within the range `possible` unless the data exceeds it."""
    if fixed is not None:
        low, high = fixed
        return (min(low, float(finite.min())), max(high, float(finite.max()))) if len(finite) else fixed
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    # Start the axis at 0 unless the curve is far from 0, so that small fluctuations do not look large.
    if low == high == 0:
        return 0.0, 1.0
    if 0 <= low <= 0.6 * high or 0 < low == high:
        low = 0.0
    elif 0 >= high >= 0.6 * low or low == high < 0:
        high = 0.0
    room = 0.04 * (high - low)
    low, high = (low if low == 0 else low - room), (high if high == 0 else high + room)
    least, most = min(possible[0], float(finite.min())), max(possible[1], float(finite.max()))
    return max(low, least), min(high, most)


# --- the static form -----------------------------------------------------------------------------


def _page(about: dict[str, Any], runs: Sequence[_Source], title: str) -> str:
    names = [each.name for each in runs if each.name]
    name = f" · {', '.join(names)}" if names else ""
    out = [tag("div", tag("b", escape(title)), escape(f"{name} (when this was drawn)"), style="margin:2px 0 6px")]
    steps = np.unique(np.concatenate([each.steps for each in runs]))
    if not len(steps):
        return tag("div", *out, tag("div", "No step is recorded yet."))
    left = 82_000
    for panel in about["panels"]:
        if not panel["n"]:
            continue
        svg = _svg(panel, steps, runs)
        picture = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        left -= len(picture) + 300
        if left < 0:
            out.append(tag("div", "Further charts are left out of this static form. Run the cell to see all."))
            break
        last = ", ".join(number(_last(each.columns[panel["key"]])) for each in runs)
        hint = f"{panel['label']} over {_range(steps)}, last {last}"
        out.append(
            f'<img src="{picture}" alt="{escape(hint)}" title="{escape(hint)}" '
            'width="230" height="132" style="margin:3px">'
        )
    if len(runs) > 1:
        keys = [f"{_MARKS[i % len(_MARKS)]} {each.name or f'run {i + 1}'}" for i, each in enumerate(runs)]
        out.append(tag("div", escape(" · ".join(keys))))
    rows = "".join(
        f"<tr><td>{escape(p['label'])}</td><td>{escape(each.name)}</td><td>{number(_first(each.columns[p['key']]))}</td>"
        f"<td>{number(_last(each.columns[p['key']]))}</td><td>{int(np.isfinite(each.columns[p['key']]).sum())}</td></tr>"
        for p in about["panels"]
        for each in runs
        if p["n"]
    )
    rows += "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(name)}</td><td>{first}</td><td>{last}</td><td></td></tr>"
        for label, name, first, last in about["metrics"]
    )
    out.append(
        "<details><summary>numbers</summary><table><thead><tr><th></th><th>run</th><th>first</th><th>last</th>"
        f"<th>steps with it</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )
    missing = [p["label"] for p in about["panels"] if not p["n"]]
    if missing:
        out.append(tag("div", escape(f"not recorded: {', '.join(missing)}")))
    return tag("div", *out)


_INKS = ("#0b5fa5", "#a8430a", "#17683f", "#74369a", "#57606a", "#b3261e")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
# Line styles that distinguish runs without colour.
_MARKS = ("━", "╍", "┅", "╺╸", "┈", "╌")


def _first(values: npt.NDArray[np.float32]) -> float:
    there = values[~np.isnan(values)]
    return float(there[0]) if len(there) else math.nan


def _last(values: npt.NDArray[np.float32]) -> float:
    there = values[~np.isnan(values)]
    return float(there[-1]) if len(there) else math.nan


def _svg(panel: dict[str, Any], steps: npt.NDArray[np.int32], runs: Sequence[_Source]) -> str:
    """Draw a chart as SVG, on a white background because an image cannot follow the page's theme."""
    left, right, top, bottom, width, height = 44, 8, 24, 20, 230, 132
    x0, x1 = float(steps[0]), float(steps[-1])
    lo, hi = panel["lo"], panel["hi"]

    def x(step: float) -> float:
        return float(left + (width - left - right) * ((step - x0) / (x1 - x0) if x1 > x0 else 0.5))

    def y(value: float) -> float:
        return float(top + (height - top - bottom) * (1 - (value - lo) / (hi - lo)))

    def line(a: float, b: float, c: float, d: float, ink: str) -> str:
        return f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{ink}"/>'

    def text(a: float, b: float, anchor: str, content: str, rest: str = 'font-size="10" fill="#57606a"') -> str:
        return f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}" {rest}>{escape(content)}</text>'

    body = [
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
        text(10, 16, "start", panel["label"], 'font-weight="600" fill="#1f2328"'),
    ]
    if len(runs) == 1:
        body.append(text(width - 8, 16, "end", number(_last(runs[0].columns[panel["key"]])), 'fill="#1f2328"'))
    for value in (lo, hi):
        body.append(line(left, y(value), width - right, y(value), "#d8dee4"))
        body.append(text(left - 4, y(value) + 4, "end", _tick(value, lo, hi)))
    for step, anchor in ((steps[0], "start"), (steps[-1], "end")):
        body.append(text(x(step), height - 6, anchor, str(step)))
    # Draw about 300 points in total at most, since more would not be visible at the image's width.
    for k, run in enumerate(runs):
        ink, dash = _INKS[k % len(_INKS)], _DASHES[k % len(_DASHES)]
        stride = max(1, math.ceil(len(run.steps) * len(runs) / 300))
        if panel["bandLow"]:
            for part in _pieces(run.steps, (run.columns[panel["bandLow"]], run.columns[panel["bandHigh"]]), stride):
                edge = [(x(s), y(v)) for s, _, v in part] + [(x(s), y(v)) for s, v, _ in reversed(part)]
                path = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
                body.append(f'<polygon points="{path}" fill="{ink}" fill-opacity="0.14"/>')
        for part in _pieces(run.steps, (run.columns[panel["key"]],), stride):
            if len(part) > 1:
                path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in part)
                body.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.6" '
                            f'stroke-dasharray="{dash}"/>')  # fmt: skip
            else:
                body.append(f'<circle cx="{x(part[0][0]):.1f}" cy="{y(part[0][1]):.1f}" r="2" fill="{ink}"/>')
        if panel["points"]:
            data = run.columns
            evaluated = zip(run.steps, data[panel["points"]], data[panel["low"]], data[panel["high"]], strict=True)
            dots = "#a8430a" if len(runs) == 1 else ink
            for step, value, low, high in [each for each in evaluated if math.isfinite(each[1])][-60:]:
                if math.isfinite(low) and math.isfinite(high):
                    body.append(line(x(step), y(low), x(step), y(high), dots))
                body.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="#ffffff" stroke="{dots}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">{"".join(body)}</svg>'
    )


def _pieces(
    steps: npt.NDArray[np.int32], columns: Sequence[npt.NDArray[np.float32]], stride: int
) -> list[list[tuple[float, ...]]]:
    """Take every `stride`-th point (step, one value per column), and split at missing and infinite values."""
    out: list[list[tuple[float, ...]]] = [[]]
    for point in list(zip(steps.tolist(), *(c.tolist() for c in columns), strict=True))[::stride]:
        if all(math.isfinite(v) for v in point[1:]):
            out[-1].append(point)
        elif out[-1]:
            out.append([])
    return [part for part in out if part]


def _tick(value: float, lo: float, hi: float) -> str:
    """Format an axis label with just enough digits to distinguish the two ends of the axis, `lo` and `hi`."""
    size = hi - lo
    if abs(value) >= 10_000:
        return number(float(f"{value:.3g}"))
    digits = max(0, min(6, 1 - math.floor(math.log10(size)))) if size > 0 else 2
    return str(f"{value:.{digits}f}").replace("-", "−")
