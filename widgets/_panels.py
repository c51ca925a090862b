"""Panels of a TrainView: the curves and the axis range of each chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly_kit.errors import suggest_keyword
from agentfly_kit.integrations.html import escape_control_chars

from ._curves import Source
from ._format import SUCCESS_RULE, sendable


@dataclass(frozen=True)
class Panel:
    """Specification of a chart with lines over all steps, and points with intervals at the evaluated steps.

    Attributes:
        lines: The columns of the lines.
        label: The chart's title.
        unit: The unit shown next to the title.
        points: The column of the evaluation points.
        low: The column of the lower ends of the evaluation intervals.
        high: The column of the upper ends of the evaluation intervals.
        fixed: The range of the y axis, if it does not depend on the data.
        band: The columns of the lower and upper ends of the interval around the line.
        extra: True to show the chart only if a run recorded one of its columns.
        hint: Explanation of the numbers, shown as a tooltip of the title.
        function: A function of the records that computes the lines.
        more: True to hide the chart until the reader asks for the remaining charts.
    """

    lines: tuple[str, ...]
    label: str
    unit: str = ""
    points: str = ""
    low: str = ""
    high: str = ""
    fixed: tuple[float, float] | None = None
    band: tuple[str, str] = ("", "")
    extra: bool = False
    hint: str = ""
    function: Callable[[Any], Any] | None = None
    more: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(key for key in (*self.lines, self.points, self.low, self.high, *self.band) if key)


PANELS = (
    Panel(
        ("success",), "success", "share", "eval_success", "eval_low", "eval_high", (0.0, 1.0),
        ("success_low", "success_high"), hint=SUCCESS_RULE,
    ),
    Panel(("reward",), "reward", "mean", band=("reward_low", "reward_high")),
    Panel(("approx_kl",), "approx KL", "nats", hint="Change of the policy in this step, per action token."),
    Panel(("clip_fraction",), "clip fraction", "share"),
    Panel(("entropy",), "entropy", "nats", hint="Mean entropy of the distributions of action tokens."),
    Panel(
        ("equal_groups",), "equal groups", "share", fixed=(0.0, 1.0), extra=True,
        hint="Groups whose chains have equal rewards. If rewards are compared within groups, they have no effect.",
    ),
    Panel(("grad_norm",), "grad norm", "before clipping"),
    Panel(("loss",), "loss"),
    Panel(("tokens",), "tokens", "per chain", hint="Mean number of action tokens of a chain."),
    Panel(("turns",), "turns", "per chain", hint="Mean number of actions of a chain."),
    Panel(("seconds",), "seconds", "per step"),
    Panel(("seconds_rollout",), "rollout", "seconds", extra=True),
    Panel(("seconds_update",), "update", "seconds", extra=True),
    Panel(("kl_reference",), "KL to reference", "nats", extra=True, hint="Mean over action tokens."),
    Panel(("value_loss",), "value loss", extra=True),
    Panel(("explained_variance",), "explained variance", "of the values", extra=True),
    Panel(("sampler_gap",), "sampler gap", "largest, nats", extra=True),
    Panel(("calls",), "tool calls", "per chain", extra=True),
    Panel(("truncated",), "truncated", "share", extra=True),
    Panel(("unscored",), "unscored", "share", extra=True),
)  # fmt: skip
_STANDARD = {panel.lines[0]: panel for panel in PANELS}
# Fields that `af.train` records, except those that are named after a metric or a drop reason.
FIELDS = (
    *dict.fromkeys(key for panel in PANELS for key in panel.columns), "advantage_mean", "dropped", "dropped_groups",
    "effective_sample_size", "kl_coef", "lag", "lr", "not_run", "policy_loss", "ratio_max", "reward_max", "reward_std",
    "rows", "success_se", "trajectories", "updates", "version",
)  # fmt: skip
# Prefixes of the names of recorded reward metrics, in training and in evaluations.
METRIC, EVAL_METRIC = "metric_", "eval_metric_"
# Maximum number of metrics that have a chart by default.
_CHARTED = 6
# Maximum number of lines per chart, equal to the number of line styles.
_MAX_LINES = 6


def metric_names(sources: Iterable[Source]) -> list[str]:
    """Return the names of the recorded metrics without their prefixes."""
    keys = [key for source in sources for key in source.columns]
    return list(
        dict.fromkeys(
            key.removeprefix("eval_").removeprefix(METRIC) for key in keys if key.startswith((METRIC, EVAL_METRIC))
        )
    )


def default_panels(sources: Sequence[Source]) -> list[Panel]:
    """Return panels for success, reward, the first `_CHARTED` metrics and the KL, and the other standard panels.

    Metrics that always equal the reward or the success rate are omitted.
    """

    def equals(name: str, other: str) -> bool:
        return all(np.allclose(s.column(METRIC + name), s.column(other), equal_nan=True) for s in sources)

    chosen = [
        name for name in metric_names(sources)
        if not (name == "success" or equals(name, "success") or equals(name, "reward"))
    ][:_CHARTED]  # fmt: skip
    first, rest = PANELS[:2], (replace(panel, more=True) for panel in PANELS[3:])
    return [*first, *(_panel_of(METRIC + name) for name in chosen), PANELS[2], *rest]


def make_panels(given: Any, sources: Sequence[Source]) -> list[Panel]:
    """Validate the `panels=` argument of a TrainView and return the panels.

    Raises:
        ValueError: If a name is unknown, or a list has too many names.
    """
    recorded = list(dict.fromkeys(key for source in sources for key in source.columns))
    # A run that has not finished may record further metrics, whose names are not yet known.
    may_follow = any(not source.finished and (source.total or not len(source.steps)) for source in sources)
    panels: list[Panel] = []
    for entry in given:
        if callable(entry):
            name = getattr(entry, "__name__", "<lambda>")
            label = f"panel {len(panels) + 1}" if name == "<lambda>" else name.replace("_", " ")
            panels.append(Panel((), label, function=entry))
            continue
        names = (entry,) if isinstance(entry, str) else tuple(entry)
        if len(names) > _MAX_LINES:
            raise ValueError(f"a panel must have at most {_MAX_LINES} lines, got {len(names)}: {list(names)!r}")
        for name in names:
            if (
                sendable(name) in recorded
                or name in FIELDS
                or (may_follow and name.startswith((METRIC, EVAL_METRIC)))
            ):
                continue
            hint = suggest_keyword(name, [*recorded, *FIELDS])
            raise ValueError(f"panels: no field is called {name!r}{hint}; recorded: {', '.join(recorded)}")
        names = tuple(sendable(name) for name in names)
        if len(names) == 1:
            panels.append(_panel_of(names[0]))
        else:
            panels.append(Panel(names, ", ".join(line_label(name) for name in names)))
    return panels


def _panel_of(field: str) -> Panel:
    if field in _STANDARD:
        return replace(_STANDARD[field], extra=False)
    if field.startswith(METRIC):
        return Panel(
            (field,), line_label(field), "mean", points=f"eval_{field}", hint=f"Metric of the reward: {field}"
        )
    return Panel((field,), line_label(field))


def line_label(field: str) -> str:
    if field in _STANDARD:
        return _STANDARD[field].label
    if field.startswith(METRIC):
        return escape_control_chars(field.removeprefix(METRIC), 40)
    return escape_control_chars(field.replace("_", " ", field.count("_") if field in FIELDS else 0), 40)


def compute(panel: Panel, sources: Sequence[Source]) -> tuple[Panel, str]:
    """Compute the lines of a panel with the panel's function, and add them to the columns of the sources.

    Return the panel with its lines, and an error message, which is "" unless the function failed.
    """
    import pandas as pd

    if panel.function is None:
        return panel, ""
    lines: dict[str, None] = {}
    try:
        for source in sources:
            if not len(source.steps):
                continue
            frame = source.to_frame()
            result = panel.function(frame)
            if not isinstance(result, pd.DataFrame):
                result = pd.DataFrame({panel.label: result}, index=frame.index)
            if len(result) != len(frame):
                raise ValueError(
                    f"a panel function must return {len(frame)} numbers, one per step, got {len(result)}"
                )
            for name in result.columns[:_MAX_LINES]:
                key = f"{panel.label}()" if len(result.columns) == 1 else f"{panel.label}(): {name}"
                source.columns[sendable(key)] = np.asarray(result[name], np.float32)
                lines[sendable(key)] = None
    except Exception as error:
        return replace(panel, lines=()), sendable(f"{type(error).__name__}: {error}")
    return replace(panel, lines=tuple(lines)), ""


def describe(panel: Panel, sources: Sequence[Source], error: str = "") -> dict[str, Any]:
    """Return the labels, lines and y range of a chart, without its data, for the static HTML and the live page."""
    values = [source.columns[key] for source in sources for key in panel.columns if key in source.columns]
    together: npt.NDArray[np.float32] = np.concatenate([np.zeros(0, np.float32), *values])
    finite = together[np.isfinite(together)]
    low, high = _domain(finite, panel.fixed, (0.0, 1.0) if panel.unit == "share" else (-math.inf, math.inf))
    names = [key.partition("(): ")[2] if panel.function is not None else line_label(key) for key in panel.lines]
    return {
        "lines": [{"key": key, "label": name} for key, name in zip(panel.lines, names, strict=True)],
        "label": panel.label, "unit": panel.unit, "hint": panel.hint, "points": panel.points, "low": panel.low,
        "high": panel.high, "lo": low, "hi": high, "n": len(finite), "odd": int(np.isinf(together).sum()),
        "bandLow": panel.band[0], "bandHigh": panel.band[1], "error": error, "more": panel.more,
    }  # fmt: skip


def _domain(
    finite: npt.NDArray[np.float32],
    fixed: tuple[float, float] | None,
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """Choose the limits of a chart's axis. They lie within `possible` unless the data exceeds that range."""
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
