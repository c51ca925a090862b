"""Trackers for TensorBoard and trackio; see `TrainRun.track`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfly_kit.errors import SettingsError
from agentfly_kit.trainer.run_dir import Run
from agentfly_kit.trainer.tracking import Tracker

__all__ = ["TensorBoard", "Tracker", "Trackio", "prefixed"]


def prefixed(record: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a training step, with the prefix `train/`, `eval/` or `time/` added to each name."""
    out = {}
    for name, value in record.items():
        group = "eval" if name.startswith("eval_") else "time" if name.startswith("seconds") else "train"
        out[f"{group}/{name.removeprefix('eval_')}"] = value
    return out


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SettingsError(f'{package} is not installed: pip install "agentfly_kit[trackers]"')


@dataclass
class TensorBoard(Tracker):
    """Tracker that writes TensorBoard event files.

    Args:
        folder: Folder of the event files; by default `tensorboard` in the folder of the run.

    Raises:
        SettingsError: If TensorBoard is not installed.
    """

    folder: str | Path | None = None
    _writer: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require("tensorboard")

    def begin(self, run: Run) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.folder) if self.folder is not None else run.path / "tensorboard"
        # Rewrite the last step in the files, because it may be incomplete, and all steps that a resumed run repeats.
        last = max(min(_last_step(folder) - 1, len(run.records)), 0)
        self._writer = SummaryWriter(str(folder), purge_step=last + 1)
        if last == 0:
            settings = json.dumps(run.flat_settings(), indent=2)
            self._writer.add_text("settings", "\n".join(f"    {line}" for line in settings.splitlines()))
        return last

    def step(self, record: dict[str, float]) -> None:
        for name, value in prefixed(record).items():
            self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()

    def end(self, outcome: str) -> None:
        self._writer.close()


def _last_step(folder: Path) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir() or not any(folder.glob("events.out.tfevents.*")):
        return 0
    events = EventAccumulator(str(folder), size_guidance={"scalars": 1})
    events.Reload()
    return max((events.Scalars(tag)[-1].step for tag in events.Tags()["scalars"]), default=0)


class Trackio(Tracker):
    """Tracker that logs to a trackio project, locally or in a Hugging Face Space.

    Args:
        project: Name of the project.
        name: Name of the run in the project; by default, the training run's folder name and the start of its id.
        settings: Further arguments of `trackio.init`, such as `space_id`.

    Raises:
        SettingsError: If trackio is not installed.
    """

    def __init__(self, project: str, name: str | None = None, **settings: Any) -> None:
        _require("trackio")
        self.project, self.name = project, name
        self._settings = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False} | settings
        self._run: Any = None

    def __repr__(self) -> str:
        return f"Trackio({self.project!r}{'' if self.name is None else f', {self.name!r}'})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trackio) and (other.project, other.name) == (self.project, self.name)

    __hash__ = None  # type: ignore[assignment]

    def begin(self, run: Run) -> int:
        import trackio

        name = self.name or f"{run.path.name}-{run.id[:6]}"
        self._run = trackio.init(
            self.project, name=name, config=run.flat_settings(), resume="allow", **self._settings
        )
        # trackio has no public attribute for the last step of a resumed run.
        return int(self._run._next_step) - 1

    def step(self, record: dict[str, float]) -> None:
        self._run.log(prefixed(record), step=int(record["step"]))

    def end(self, outcome: str) -> None:
        self._run.finish()
