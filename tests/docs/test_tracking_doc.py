"""The recipes of docs/tracking.md, executed with the real packages."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from test_trainer import SMALL, start

import agentfly_kit as af

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8"), re.DOTALL)


def recipe(package: str) -> Any:
    """Execute the recipe for a package, and return its class."""
    pytest.importorskip(package)
    (code,) = (block for block in BLOCKS if f"import {package}" in block or f"from {package}" in block)
    names: dict[str, Any] = {"af": af}
    exec(code, names)
    return next(v for v in names.values() if isinstance(v, type) and issubclass(v, af.trackers.Tracker))


def train(folder: Path, tracker: Any, steps: int) -> list[dict[str, float]]:
    """Run the first steps of three, and return the records."""

    async def go() -> None:
        async for step in start(folder, config=SMALL.replace(steps=3)).track(tracker):
            if step.step == steps:
                break

    asyncio.run(go())
    return [af.trackers.prefixed(r) for r in af.Run(folder).records]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_mlflow_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLflow = recipe("mlflow")
    store = (tmp_path / "store").as_uri()
    train(tmp_path / "run", MLflow("test", store), 2)
    tracker = MLflow("test", store)
    records = train(tmp_path / "run", tracker, 3)
    for name in ("train/reward", "time/seconds"):
        history = [(m.step, m.value) for m in tracker.client.get_metric_history(tracker.id, name)]
        assert history == [(i, pytest.approx(r[name])) for i, r in enumerate(records, start=1)]
    assert tracker.client.get_run(tracker.id).data.params["steps"] == "3"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_wandb_receives_the_steps_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    WandB = recipe("wandb")
    found: dict[str, Any] = {}

    class Read(WandB):  # type: ignore[misc, valid-type]
        def end(self, outcome: str) -> None:
            found.update(self.run.summary, config=dict(self.run.config))  # before `finish`
            super().end(outcome)

    tracker = Read("test", mode="offline", dir=str(tmp_path))
    records = train(tmp_path / "run", tracker, 3)
    assert found["_step"] == 3 and found["config"]["steps"] == 3
    assert {k: found[k] for k in records[-1]} == pytest.approx(records[-1])
