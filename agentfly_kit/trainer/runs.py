"""Comparison of training runs by settings, results and curves."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, overload

from agentfly_kit._display import Displayable
from agentfly_kit.errors import RunError
from agentfly_kit.trainer.run_dir import Run


def runs(folder: str | Path) -> Runs:
    """Read all training runs in a folder and its subfolders.

    Raises:
        RunError: If the folder does not exist.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise RunError(f"folder must be an existing folder with runs, got {str(folder)!r}")
    found: dict[str, Run] = {}
    unreadable: dict[str, str] = {}
    for file in sorted(root.rglob("run.json")):
        name = file.parent.relative_to(root).as_posix() if file.parent != root else root.resolve().name
        run = Run(file.parent)
        try:
            run.settings()
            _ = run.records
            found[name] = run
        except (RunError, OSError, ValueError) as error:
            unreadable[name] = str(error)
    if root.resolve().name not in found:
        for child in sorted(path for path in root.iterdir() if path.is_dir()):
            if not any(name == child.name or name.startswith(f"{child.name}/") for name in (*found, *unreadable)):
                unreadable[child.name] = "holds no run"
    return Runs(found, unreadable)


class Runs(Displayable, Sequence[Run]):
    """Sequence of training runs, indexed by position or name. The name of a run is its path relative to the folder.

    Attributes:
        unreadable: Error messages for folders that could not be read as runs, keyed by name.
    """

    RESULTS = ("state", "step", "success", "best success", "reward", "best reward", "eval_success", "best eval_success",
               "seconds", "written")  # fmt: skip

    def __init__(self, found: Mapping[str, Run], unreadable: Mapping[str, str]) -> None:
        self._runs = dict(found)
        self.unreadable = dict(unreadable)

    @functools.cached_property
    def frame(self) -> Any:
        """Table with one row per run. Columns are the settings that differ, the results, and the other settings."""
        import pandas

        settings = {name: run.flat_settings() for name, run in self._runs.items()}
        rows = {}
        for name, run in self._runs.items():
            first = {key: settings[name].get(key) for key in self.different} | _results(run)
            rows[name] = first | {key: value for key, value in settings[name].items() if key not in first}
        return pandas.DataFrame.from_dict(rows, orient="index")

    @functools.cached_property
    def different(self) -> tuple[str, ...]:
        """Names of the settings that differ between the runs."""
        every = [run.flat_settings() for run in self._runs.values()]
        names = dict.fromkeys(name for settings in every for name in settings)
        return tuple(n for n in names if any(s.get(n, ...) != every[0].get(n, ...) for s in every))

    def figure(self, *names: str) -> Any:
        """Plot recorded metrics of all runs with plotly, one panel per metric and one colour per run.

        Args:
            names: Metrics to plot; by default success, reward and eval_success, if recorded.
        """
        import pandas
        import plotly.express

        records = [{"run": label, **record} for label, run in self._runs.items() for record in run.records]
        recorded = {name for record in records for name in record} - {"run"}
        wanted = names or tuple(n for n in ("success", "reward", "eval_success") if n in recorded)
        if unknown := [name for name in wanted if name not in recorded]:
            raise RunError(
                f"names must be metrics of the runs, got {unknown[0]!r}; recorded: {', '.join(sorted(recorded))}"
            )
        table = pandas.DataFrame(records, columns=["run", "step", *wanted]).melt(["run", "step"], var_name="metric")
        options: Any = {"x": "step", "y": "value", "color": "run", "facet_row": "metric", "template": "plotly_white"}
        figure = plotly.express.line(table.dropna(), **options, height=120 + 200 * len(wanted))
        return figure.update_yaxes(matches=None)

    @overload
    def __getitem__(self, key: int | str) -> Run: ...
    @overload
    def __getitem__(self, key: slice) -> Runs: ...
    def __getitem__(self, key: int | str | slice) -> Run | Runs:
        if isinstance(key, str):
            return self._runs[key]
        names = list(self._runs)[key]
        return self._runs[names] if isinstance(names, str) else Runs({n: self._runs[n] for n in names}, {})

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        unreadable = f", {len(self.unreadable)} unreadable" if self.unreadable else ""
        return f"Runs({', '.join(self._runs) or 'none'}{unreadable})"


def _results(run: Run) -> dict[str, Any]:
    """Return the last and best results of a run. `seconds` is the total duration of all steps."""
    records, total = run.records, run.flat_settings().get("steps")
    out: dict[str, Any] = {"state": "finished" if records and len(records) == total else "unfinished"}
    out |= {"step": len(records), "seconds": sum(r.get("seconds", 0.0) for r in records)}
    for name in ("success", "reward", "eval_success"):
        values = [r[name] for r in records if name in r]
        if values:
            out |= {name: values[-1], f"best {name}": max(values)}
    steps = run.path / "steps.jsonl"
    out["written"] = (
        datetime.fromtimestamp(steps.stat().st_mtime).isoformat(" ", "minutes") if steps.exists() else None
    )
    return out
