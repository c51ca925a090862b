"""Recorded curves and state of a training run, read from its handle or its folder."""

from __future__ import annotations

import json
import math
import numbers
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly_kit.errors import list_neighbours

from ._chain_code import _named
from ._format import sendable

Columns = dict[str, npt.NDArray[np.float32]]
# States in which a run can be paused and stopped.
_CONTROLLED = ("running", "paused", "stopping")


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records in a run's folder, oldest first.

    An incomplete last line is skipped, because the run may still be writing it. Any other malformed line raises an
    error.
    """
    folder = Path(path)
    file = folder / "steps.jsonl" if folder.is_dir() else folder
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; pass a run, a run folder, or its steps.jsonl; {list_neighbours(file)}"
        )
    lines = file.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if i == len(lines):
                break
            raise ValueError(f"{file}, line {i}: {error}") from error
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError(f"{file}, line {i}: each line must be an object with 'step', got {line[:80]!r}")
        records.append(record)
    return records


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.int32], Columns]:
    """Convert records to an array of steps (N,) and one float32 column (N,) per numeric field.

    Missing values are NaN. If a step has several records, the last one is used. The columns `success_low`,
    `success_high`, `reward_low` and `reward_high` contain the results of `intervals`.
    """
    by_step = {int(r["step"]): r for r in records}
    order = sorted(by_step)
    out: Columns = {}
    for i, step in enumerate(order):
        record = by_step[step]
        success, reward = intervals(record)
        ends = {
            "success_low": success[0],
            "success_high": success[1],
            "reward_low": reward[0],
            "reward_high": reward[1],
        }
        for key, value in (*record.items(), *ends.items()):
            if isinstance(value, numbers.Real) and key != "step":
                out.setdefault(sendable(key), np.full(len(order), np.nan, np.float32))[i] = value
    return np.asarray(order, np.int32), out


def intervals(record: Mapping[str, Any], z: float = 1.96) -> tuple[tuple[float, float], tuple[float, float]]:
    """Compute 95 % confidence intervals of a step's success rate (Wilson) and mean reward (normal).

    The scored chains are treated as independent. The bounds are NaN if the record lacks the number of chains or the
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


class Source:
    """A training run, given by the path of its folder or by its handle. Only a weak reference to the handle is kept.

    Attributes:
        steps: Array of the recorded step numbers, (N,).
        columns: One array (N,) per field of the records; see the function `columns`.
        total: Number of steps of the run; None if unknown.
        gone: True if the handle has been garbage-collected.
        state: State of the run, as in `TrainRun.state`; "" if unknown.
        word: A description of the state in a few words.
        detail: Further information on the state, such as how to continue the run.
        finding: The first serious finding of `diagnose`; "" if there is none.
    """

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
        self.state = self.word = self.detail = self.finding = ""
        self._diagnosed = 0  # number of steps at the last call of `diagnose`
        self._resumed = 0  # the run's `resumed_from` at the last call of `read`
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
        self.state, self._resumed = getattr(run, "state", ""), getattr(run, "resumed_from", 0)
        self.word, self.detail = (self.state, "") if self.path is not None else self._describe(run)
        if self.state and len(self.steps) != self._diagnosed and hasattr(run, "diagnose"):
            self._diagnosed = len(self.steps)
            serious = run.diagnose().serious
            self.finding = f"{serious[0].sentence} {serious[0].remedy}" if serious else ""

    @property
    def changed(self) -> bool:
        """True if the run's state has changed since it was last read, or the run has resumed from a checkpoint."""
        run = self.run()
        return (
            (self.path is None and (run is None) != self.gone)
            or getattr(run, "state", self.state) != self.state
            or getattr(run, "resumed_from", self._resumed) != self._resumed
        )

    @property
    def finished(self) -> bool:
        """True if no further step will be recorded by this run."""
        return self.gone or (self.total is not None and len(self.steps) >= self.total)

    def _describe(self, run: Any) -> tuple[str, str]:
        last, resumed = int(self.steps[-1]) if len(self.steps) else 0, getattr(run, "resumed_from", 0)
        resume = f"`await {_named(run) or 'run'}`"
        if self.state == "not started":
            if self.finished:
                return "finished earlier", f"{resume} replays its steps and trains nothing."
            return "not started", f"{resume} {f'continues after step {last}' if last else 'starts it'}."
        if self.state == "running" and resumed:
            return "running", f"Continued after step {resumed}."
        if self.state == "stopping":
            return f"stopping after step {last + 1}", ""
        if self.state == "done":
            if self.total and resumed >= self.total:
                return "already finished", "All steps were already complete, so nothing was trained."
            return "finished", f"Continued after step {resumed}." if resumed else ""
        if self.state not in ("stopped", "interrupted", "failed"):
            return self.state, ""
        word = f"{self.state} after step {last}"
        error = getattr(run, "error", None)
        if error is not None:
            word += f": {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        kept = run.describe_kept()
        return word, f"{kept[:1].upper()}{kept[1:]}. To continue, run {resume}, or the cell that created the run."

    def to_frame(self) -> Any:
        """Return a data frame with a row for each step and a column for each field."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns), index=pd.Index(self.steps, name="step"))

    def column(self, key: str) -> npt.NDArray[np.float32]:
        """Return a column. All its values are NaN if the run did not record the field."""
        return self.columns.get(key, np.full(len(self.steps), np.nan, np.float32))

    @property
    def control(self) -> dict[str, bool]:
        """Flags for the buttons: `can` (True if the run can be controlled), `ended`, `paused` and `stopping`."""
        run = self.run()
        has_methods = all(callable(getattr(run, name, None)) for name in ("pause", "resume", "stop"))
        can = not self.finished and (not self.state or self.state in _CONTROLLED)
        return {
            "can": has_methods and can,
            "ended": has_methods and not can,
            "paused": bool(getattr(run, "paused", False)),
            "stopping": bool(getattr(run, "stopping", False)),
        }
