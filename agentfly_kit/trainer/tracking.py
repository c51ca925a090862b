"""Trackers, objects that copy the records of a training run to another tool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agentfly_kit.errors import SettingsError, check_accepts
from agentfly_kit.trainer.run_dir import Run


class Tracker:
    """Base class of trackers; see `TrainRun.track`. Any object with the same methods is a tracker, too.

    The methods are called in the event loop and should be fast.
    """

    def begin(self, run: Run) -> int | None:
        """Start tracking a run, or continue after an interrupt.

        Args:
            run: Folder of the run. `run.id` does not change when a run is continued. `run.flat_settings()` returns its
                hyperparameters. `run.records` contains the records of the completed steps.

        Returns:
            Number of the last step that was already tracked. None means all completed steps. The method `step` is
            called with each later record.
        """
        return len(run.records)

    def step(self, record: dict[str, float]) -> None:
        """Track the record of a step."""

    def end(self, outcome: str) -> None:
        """Stop tracking. `outcome` is "done", "stopped", "interrupted" or "failed"."""


@dataclass(frozen=True)
class _FunctionTracker(Tracker):
    """Tracker that calls a function with each record."""

    function: Callable[[dict[str, float]], object]

    def step(self, record: dict[str, float]) -> None:
        self.function(record)

    def __repr__(self) -> str:
        return repr(self.function)


class TrackerSet:
    """Trackers of one run. If a tracker raises, it is removed with a warning, so that the run is not interrupted."""

    def __init__(self) -> None:
        self._trackers: list[Any] = []  # instances of Tracker, or objects with the same methods
        # Last tracked step, by id(tracker); None unless a run is in progress.
        self._last: dict[int, int] | None = None

    def add(self, trackers: Iterable[Any]) -> None:
        for tracker in trackers:
            complete = all(callable(getattr(tracker, method, None)) for method in ("begin", "step", "end"))
            if isinstance(tracker, type) or not (complete or callable(tracker)):
                raise SettingsError(
                    "a tracker must be a function of a record, or an object with the methods begin, step and end such "
                    f"as af.trackers.TensorBoard(), got {tracker!r}"
                )
            if not complete:
                check_accepts("a tracker", tracker, "record")
                tracker = _FunctionTracker(tracker)
            if tracker in self._trackers:
                raise SettingsError(f"trackers must be different objects, got {tracker!r} twice")
            if self._last is not None:
                raise SettingsError("trackers must be added before the run is awaited")
            self._trackers.append(tracker)

    def begin(self, run: Run) -> None:
        """Start the trackers if necessary, and send each one the records that it has not received."""
        if self._last is not None:
            return
        self._last = {}
        for tracker in list(self._trackers):
            try:
                last = tracker.begin(run)
                self._last[id(tracker)] = len(run.records) if last is None else int(last)
            except Exception as error:
                self._remove(tracker, error)
        for record in run.records:
            self.step(record)

    def step(self, record: dict[str, float]) -> None:
        """Send a record to the trackers that have not received it."""
        for tracker in list(self._trackers) if self._last is not None else ():
            assert self._last is not None
            if record["step"] <= self._last[id(tracker)]:
                continue
            try:
                tracker.step(dict(record))
                self._last[id(tracker)] = int(record["step"])
            except Exception as error:
                self._remove(tracker, error)

    def end(self, outcome: str) -> None:
        """Call `end` on all trackers if `begin` was called before."""
        started, self._last = self._last is not None, None
        for tracker in list(self._trackers) if started else ():
            try:
                tracker.end(outcome)
            except Exception as error:
                self._remove(tracker, error)

    def _remove(self, tracker: Any, error: Exception) -> None:
        self._trackers.remove(tracker)
        warnings.warn(
            f"{tracker!r} raised {type(error).__name__}: {error}; the run continues without it", stacklevel=3
        )
