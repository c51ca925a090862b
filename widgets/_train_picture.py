"""The static form of a TrainView."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._curves import Source
from ._format import escape, number, sparkline, tag

_INKS = ("#0b5fa5", "#a8430a", "#17683f", "#74369a", "#57606a", "#b3261e")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
# Line styles that distinguish lines without colour.
_MARKS = ("━", "╍", "┅", "╺╸", "┈", "╌")
_WIDTH, _HEIGHT = 230, 132
# Upper bound on the width of a character, relative to the font size. The font depends on the reader's system.
_CHARACTER = 0.65


def page(about: dict[str, Any], runs: Sequence[Source], title: str) -> str:
    """Return the HTML of the charts in `about`, with the states of the runs and a table of the numbers."""
    names = [each.name for each in runs if each.name]
    name = f" · {', '.join(names)}" if names else ""
    out = [tag("div", tag("b", escape(title)), escape(f"{name} (when this was saved)"), style="margin:2px 0 6px")]
    for each in runs:
        of = f" of {each.name}" if len(runs) > 1 else ""
        if each.word:
            own = f"{each.name}: " if len(runs) > 1 else ""
            detail = f". {each.detail}" if each.detail else ""
            out.append(tag("div", escape(own), tag("b", escape(each.word)), escape(detail), style="margin:0 0 6px"))
        if each.finding:
            out.append(tag("div", tag("b", escape(f"Finding{of}: ")), escape(each.finding), style="margin:0 0 6px"))
    steps = np.unique(np.concatenate([each.steps for each in runs]))
    if not len(steps):
        return tag("div", *out, tag("div", "No steps have been recorded yet."))
    left, more = 78_000, list[str]()
    for panel in about["panels"]:
        if panel["error"]:
            out.append(tag("div", escape(f"{panel['label']}: {panel['error']}")))
        if not panel["n"]:
            continue
        svg = _svg(panel, steps, runs)
        picture = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        left -= len(picture) + 700
        if left < 0:
            out.append(tag("div", "Further charts are left out of this static view. Run the cell to see all."))
            break
        hint = _describe(panel, steps, runs)
        (more if panel["more"] else out).append(
            f'<img src="{picture}" alt="{escape(hint)}" title="{escape(hint)}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" style="margin:3px">'
        )
    if more:
        out.append(f"<details><summary>{len(more)} more charts</summary>{''.join(more)}</details>")
    if len(runs) > 1:
        keys = [f"{_MARKS[i % len(_MARKS)]} {each.name or f'run {i + 1}'}" for i, each in enumerate(runs)]
        out.append(tag("div", escape(" · ".join(keys))))
    if any(panel["points"] and _last_of(runs, panel["points"]) for panel in about["panels"]):
        out.append(tag("div", "Circles show evaluations, with their intervals if recorded."))
    if any(panel["bandLow"] and _last_of(runs, panel["bandLow"]) for panel in about["panels"]):
        out.append(
            tag(
                "div", "Bands show 95 % intervals for the mean of a step, computed as if the chains were independent."
            )
        )
    shown = [(line["label"] or p["label"], line["key"]) for p in about["panels"] if p["n"] for line in p["lines"]]
    shown += [(f"{p['label']} (evaluation)", p["points"]) for p in about["panels"] if _last_of(runs, p["points"])]
    cells = [
        (label, each.name, number(first_number(each.column(key))), number(last_number(each.column(key))),
         sparkline(each.column(key)), str(int(np.isfinite(each.column(key)).sum())))
        for label, key in shown
        for each in runs
    ]  # fmt: skip
    cells += [(label, name, first, last, "", "") for label, name, first, last in about["metrics"]]
    rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in cells)
    out.append(
        "<details><summary>numbers</summary><table><thead><tr><th></th><th>run</th><th>first</th><th>last</th>"
        f"<th>curve</th><th>steps recorded</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )
    missing = [p["label"] for p in about["panels"] if not p["n"] and not p["error"]]
    if missing:
        out.append(tag("div", escape(f"not recorded: {', '.join(missing)}")))
    return tag("div", *out)


def step_range(steps: npt.NDArray[np.int32]) -> str:
    if not len(steps):
        return "no step yet"
    return f"steps {steps[0]} to {steps[-1]}" if steps[-1] > steps[0] else f"step {steps[0]}"


def _describe(panel: dict[str, Any], steps: npt.NDArray[np.int32], runs: Sequence[Source]) -> str:
    """Describe a chart in words. The text includes the last number of each line, with its confidence interval."""
    last = []
    for run in runs:
        for line in panel["lines"]:
            text = number(last_number(run.column(line["key"])))
            low, high = (last_number(run.column(panel[end])) for end in ("bandLow", "bandHigh"))
            text += f" [{number(low)}, {number(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
            own = (run.name if len(runs) > 1 else "", line["label"] if len(panel["lines"]) > 1 else "")
            last.append(" ".join(part for part in (*own, text) if part))
        if panel["points"] and math.isfinite(value := last_number(run.column(panel["points"]))):
            low, high = (last_number(run.column(panel[end])) for end in ("low", "high"))
            interval = f" [{number(low)}, {number(high)}]" if math.isfinite(low) and math.isfinite(high) else ""
            last.append(f"evaluation {number(value)}{interval}")
    unit = f" ({panel['unit']})" if panel["unit"] else ""
    hint = f". {panel['hint']}" if panel["hint"] else ""
    return f"{panel['label']}{unit} over {step_range(steps)}, last {', '.join(last)}{hint}"


def first_number(values: npt.NDArray[np.float32]) -> float:
    there = values[~np.isnan(values)]
    return float(there[0]) if len(there) else math.nan


def last_number(values: npt.NDArray[np.float32]) -> float:
    return first_number(values[::-1])


def _last_of(runs: Sequence[Source], key: str) -> bool:
    """Return True if any run has a number in the column `key`."""
    return any(math.isfinite(last_number(run.column(key))) for run in runs)


def _svg(panel: dict[str, Any], steps: npt.NDArray[np.int32], runs: Sequence[Source]) -> str:
    """Draw a chart as SVG, on a white background because an image cannot follow the page's theme."""
    right, top, bottom, width, height = 8, 24, 20, _WIDTH, _HEIGHT
    x0, x1 = float(steps[0]), float(steps[-1])
    lo, hi = panel["lo"], panel["hi"]
    ticks = [_tick(value, lo, hi) for value in (lo, hi)]
    left = max(20.0, 8 + max(len(text) for text in ticks) * 10 * _CHARACTER)

    def x(step: float) -> float:
        return float(left + (width - left - right) * ((step - x0) / (x1 - x0) if x1 > x0 else 0.5))

    def y(value: float) -> float:
        return float(top + (height - top - bottom) * (1 - (value - lo) / (hi - lo)))

    def line(a: float, b: float, c: float, d: float, ink: str) -> str:
        return f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{ink}"/>'

    def text(a: float, b: float, anchor: str, content: str, rest: str = 'font-size="10" fill="#57606a"') -> str:
        return f'<text x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}" {rest}>{escape(content)}</text>'

    several = len(panel["lines"]) > 1
    value = number(last_number(runs[0].column(panel["lines"][0]["key"]))) if len(runs) == 1 and not several else ""
    room = int((width - 18 - len(value) * 12 * _CHARACTER) / (12 * _CHARACTER))
    label = panel["label"] if len(panel["label"]) <= room else panel["label"][: room - 1] + "…"
    body = [
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
        text(10, 16, "start", label, 'font-weight="600" fill="#1f2328"'),
        text(width - 8, 16, "end", value, 'fill="#1f2328"'),
    ]  # fmt: skip
    for value, tick in zip((lo, hi), ticks, strict=True):
        body += [line(left, y(value), width - right, y(value), "#d8dee4"), text(left - 4, y(value) + 4, "end", tick)]
    if x1 > x0:
        body += [
            text(left, height - 6, "start", str(steps[0])),
            text(width - right, height - 6, "end", str(steps[-1])),
        ]
    else:
        body.append(text(x(x0), height - 6, "middle", str(steps[0])))
    # Draw at most about 300 points in total, because more would not be visible at this image width.
    total = len(runs) * max(1, len(panel["lines"]))
    for k, run in enumerate(runs):
        stride = max(1, math.ceil(len(run.steps) * total / 300))
        for j, each in enumerate(panel["lines"]):
            ink = _INKS[(j if several else k) % len(_INKS)]
            dash = _DASHES[(j if several and len(runs) == 1 else k) % len(_DASHES)]
            if panel["bandLow"]:
                for part in _pieces(run.steps, (run.column(panel["bandLow"]), run.column(panel["bandHigh"])), stride):
                    edge = [(x(s), y(v)) for s, _, v in part] + [(x(s), y(v)) for s, v, _ in reversed(part)]
                    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
                    body.append(f'<polygon points="{path}" fill="{ink}" fill-opacity="0.14"/>')
            for part in _pieces(run.steps, (run.column(each["key"]),), stride):
                if len(part) > 1:
                    path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in part)
                    body.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.6" '
                                f'stroke-dasharray="{dash}"/>')  # fmt: skip
                else:
                    body.append(f'<circle cx="{x(part[0][0]):.1f}" cy="{y(part[0][1]):.1f}" r="2" fill="{ink}"/>')
        if panel["points"]:
            columns = [run.column(panel[name]) for name in ("points", "low", "high")]
            dots = "#a8430a" if len(runs) == 1 else _INKS[k % len(_INKS)]
            evaluated = zip(run.steps, *columns, strict=True)
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
    """Take every `stride`-th point (step, one value per column), and split the curve at missing or infinite values."""
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
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or size < 1e-4:
        return number(float(f"{value:.3g}"))
    digits = max(0, min(6, 1 - math.floor(math.log10(size)))) if size > 0 else 2
    return str(f"{value:.{digits}f}").replace("-", "−")
