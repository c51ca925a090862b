"""The curves of a training run, live or from its folder. Computes no statistic: it draws the numbers of the records."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import traitlets

from ._base import LiveView, escape, number, pack, sendable, tag


@dataclass(frozen=True)
class Panel:
    """One small chart: a line a step, and points with an interval where the run was evaluated."""

    key: str
    label: str
    unit: str = ""
    points: str = ""
    low: str = ""
    high: str = ""
    fixed: tuple[float, float] | None = None


PANELS = (
    Panel("success", "success", "share", "eval_success", "eval_low", "eval_high", (0.0, 1.0)),
    Panel("reward", "reward", "mean"),
    Panel("approx_kl", "approx KL", "nats a token"),
    Panel("clip_fraction", "clip fraction", "share"),
    Panel("entropy", "entropy", "nats a token"),
    Panel("grad_norm", "grad norm", "before clipping"),
    Panel("loss", "loss"),
    Panel("tokens", "tokens", "a step"),
    Panel("turns", "turns", "a chain"),
    Panel("seconds", "seconds", "a step"),
)
_KEYS = tuple(dict.fromkeys(key for p in PANELS for key in (p.key, p.points, p.low, p.high) if key))


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a run's folder, oldest first.

    A last line without its end is a write in progress: it is left out. Any other broken line is an error.
    """
    folder = Path(path)
    file = folder / "steps.jsonl" if folder.is_dir() else folder
    if not file.is_file():
        raise FileNotFoundError(f"no {file}: give a run, a run's folder, or its steps.jsonl")
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
            raise ValueError(f"{file}, line {i}: want an object with 'step'; got {line[:80]!r}")
        records.append(record)
    return records


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.int32], dict[str, npt.NDArray[np.float32]]]:
    """Steps (N,) and a float32 (N,) for each key, NaN where a record lacks it. A step's last record counts."""
    by_step = {int(r["step"]): r for r in records}
    order = sorted(by_step)
    out = {}
    for key in _KEYS:
        values = np.full(len(order), np.nan, np.float32)
        for i, step in enumerate(order):
            value = by_step[step].get(key)
            if value is not None and not isinstance(value, str):
                values[i] = value
        out[key] = values
    return np.asarray(order, np.int32), out


class TrainView(LiveView):
    """Curves of a run: `run.records` and `run.subscribe(callback)`, or the path of a run's folder.

    Pointing at a chart, or the arrow keys, show every number of a step; Enter or a click keeps it in `view.step`.
    At most 10 updates a second. A folder is read when the view is made, when a page opens it, and by `view.refresh()`.
    """

    stem: ClassVar[str] = "train_view"
    settable: ClassVar[frozenset[str]] = frozenset({"step"})

    step = traitlets.Int(None, allow_none=True).tag(sync=True)
    """The step that was picked in the browser; None when none is."""
    _about = traitlets.Dict().tag(sync=True)
    _buffers = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Any) -> None:
        self._path = Path(run) if isinstance(run, str | os.PathLike) else None
        subscribe: Callable[..., Any] | None = None
        if self._path is None:
            if not hasattr(run, "records"):
                raise TypeError(
                    "TrainView shows a run (something with records and subscribe), or the path of its folder; "
                    f"got {type(run).__name__}"
                )
            subscribe = getattr(run, "subscribe", None)
        self._steps, self._columns = columns(
            self._records(run)
        )  # a path that is none is refused before anything is made
        super().__init__(None if self._path is not None else run, subscribe)
        self._show(run)

    def _records(self, run: Any) -> Sequence[Mapping[str, Any]]:
        return read_steps(self._path) if self._path is not None else list(run.records)

    def refresh(self) -> None:
        """Read the records again and send them."""
        run = self.record
        if run is None and self._path is None:
            self._about = {**self._about, "gone": True}
            return
        self._steps, self._columns = columns(self._records(run))
        self._show(run)

    def _show(self, run: Any) -> None:
        steps, data = self._steps, self._columns
        total = getattr(run, "total", None) if self._path is None else None
        path = self._path if self._path is not None else getattr(run, "path", None)
        with self.hold_sync():
            self._buffers = {"steps": steps.astype("<i4").tobytes(), "columns": {k: pack(v) for k, v in data.items()}}
            self._about = {
                "name": sendable(Path(path).name) if path is not None else "",
                "n": len(steps),
                "last": int(steps[-1]) if len(steps) else None,
                "total": int(total) if isinstance(total, int) else None,
                "gone": False,
                "panels": [_panel(p, data) for p in PANELS],
            }

    @traitlets.validate("step")
    def _known(self, proposal: Any) -> int | None:
        value = proposal["value"]
        if value is not None and value not in self._steps:
            raise ValueError(f"step={value}: the run has {_range(self._steps)}")
        return None if value is None else int(value)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(int(step) for step in self._steps)

    def to_frame(self) -> Any:
        """The numbers that are drawn: a row a step; NaN is missing."""
        import pandas as pd

        return pd.DataFrame(dict(self._columns), index=pd.Index(self._steps, name="step"))

    def __repr__(self) -> str:
        total = self._about.get("total")
        of = f" of {total}" if total else ""
        return f"TrainView({len(self._steps)}{of} steps)"

    def _static(self) -> str:
        return _page(self._about, self._steps, self._columns, repr(self))


def _range(steps: npt.NDArray[np.int32]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no step yet"


def _panel(p: Panel, data: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
    """What a chart needs beside the numbers; the y range is chosen here so that the static form and the page agree."""
    values = [data[key] for key in (p.key, p.points, p.low, p.high) if key]
    finite = np.concatenate([v[np.isfinite(v)] for v in values])
    odd = int(sum(np.isinf(v).sum() for v in values))
    low, high = _domain(finite, p.fixed)
    return {
        "key": p.key, "label": p.label, "unit": p.unit, "points": p.points, "low": p.low, "high": p.high,
        "lo": low, "hi": high, "n": len(finite), "odd": odd,
    }  # fmt: skip


def _domain(finite: npt.NDArray[np.float32], fixed: tuple[float, float] | None) -> tuple[float, float]:
    if fixed is not None:
        low, high = fixed
        return (min(low, float(finite.min())), max(high, float(finite.max()))) if len(finite) else fixed
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    # From 0 unless the curve lives far from it: a small wobble must not look like a cliff.
    if 0 <= low <= 0.6 * high:
        low = 0.0
    elif 0 >= high >= 0.6 * low:
        high = 0.0
    if high == low:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    room = 0.04 * (high - low)
    return (low if low == 0 else low - room), (high if high == 0 else high + room)


# --- the static form -----------------------------------------------------------------------------


def _page(
    about: dict[str, Any], steps: npt.NDArray[np.int32], data: Mapping[str, npt.NDArray[np.float32]], title: str
) -> str:
    name = f" · {about['name']}" if about.get("name") else ""
    out = [tag("div", tag("b", escape(title)), escape(f"{name} (when this was drawn)"), style="margin:2px 0 6px")]
    if not len(steps):
        return tag("div", *out, tag("div", "No step is recorded yet."))
    for panel in about["panels"]:
        if not panel["n"]:
            continue
        svg = _svg(panel, steps, data)
        picture = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        last = _last(data[panel["key"]])
        hint = f"{panel['label']} over {_range(steps)}, last {number(last)}"
        out.append(
            f'<img src="{picture}" alt="{escape(hint)}" title="{escape(hint)}" '
            'width="230" height="132" style="margin:3px">'
        )
    rows = "".join(
        f"<tr><td>{escape(p['label'])}</td><td>{number(_first(data[p['key']]))}</td><td>{number(_last(data[p['key']]))}</td>"
        f"<td>{int(np.isfinite(data[p['key']]).sum())}</td></tr>"
        for p in about["panels"]
        if p["n"]
    )
    out.append(
        "<details><summary>numbers</summary><table><thead><tr><th></th><th>first</th><th>last</th>"
        f"<th>steps with it</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )
    missing = [p["label"] for p in about["panels"] if not p["n"]]
    if missing:
        out.append(tag("div", escape(f"not recorded: {', '.join(missing)}")))
    return tag("div", *out)


def _first(values: npt.NDArray[np.float32]) -> float:
    there = values[~np.isnan(values)]
    return float(there[0]) if len(there) else math.nan


def _last(values: npt.NDArray[np.float32]) -> float:
    there = values[~np.isnan(values)]
    return float(there[-1]) if len(there) else math.nan


def _svg(panel: dict[str, Any], steps: npt.NDArray[np.int32], data: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """A chart as an image: it has its own white ground, because an image cannot know the page's theme."""
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

    # At most about 400 points a line: a picture is no wider.
    stride = max(1, math.ceil(len(steps) / 400))
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in list(zip(steps.tolist(), data[panel["key"]].tolist(), strict=True))[::stride]:
        if math.isfinite(value):
            runs[-1].append((x(step), y(value)))
        elif runs[-1]:
            runs.append([])
    body = [
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
        text(10, 16, "start", panel["label"], 'font-weight="600" fill="#1f2328"'),
        text(width - 8, 16, "end", number(_last(data[panel["key"]])), 'fill="#1f2328"'),
    ]
    for value in (lo, hi):
        body.append(line(left, y(value), width - right, y(value), "#d8dee4"))
        body.append(text(left - 4, y(value) + 4, "end", _tick(value, lo, hi)))
    for step, anchor in ((steps[0], "start"), (steps[-1], "end")):
        body.append(text(x(step), height - 6, anchor, str(step)))
    for points in runs:
        if len(points) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            body.append(f'<polyline points="{path}" fill="none" stroke="#0b5fa5" stroke-width="1.6"/>')
        elif points:
            body.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" fill="#0b5fa5"/>')
    if panel["points"]:
        evaluated = zip(steps, data[panel["points"]], data[panel["low"]], data[panel["high"]], strict=True)
        for step, value, low, high in [each for each in evaluated if math.isfinite(each[1])]:
            if math.isfinite(low) and math.isfinite(high):
                body.append(line(x(step), y(low), x(step), y(high), "#a8430a"))
            body.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="#ffffff" stroke="#a8430a"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">{"".join(body)}</svg>'
    )


def _tick(value: float, lo: float, hi: float) -> str:
    """An end of the axis, with no more digits than tell the two apart."""
    size = hi - lo
    if abs(value) >= 10_000:
        return number(float(f"{value:.3g}"))
    digits = max(0, min(6, 1 - math.floor(math.log10(size)))) if size > 0 else 2
    return str(f"{value:.{digits}f}").replace("-", "−")
