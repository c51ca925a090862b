"""Trackers: every step once, also after a kill; a tracker that fails does not stop the run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_trainer import SMALL, start
from waiting import GUARD, blocking_until

import agentfly_kit as af
from agentfly_kit.trainer.tracking import Tracker

CONFIG = SMALL.replace(steps=3)


class Log(Tracker):
    """Record the calls. `fail` is the name of a method that raises."""

    def __init__(self, held: int = 0, fail: str = "") -> None:
        self.held, self.fail = held, fail
        self.calls: list[Any] = []

    def _log(self, name: str, value: Any) -> None:
        if name == self.fail:
            raise OSError("no network")
        self.calls.append(value)

    def begin(self, run: af.Run) -> int:
        self._log("begin", (run.id, len(run.records), run.flat_settings()["lr"]))
        return self.held

    def step(self, record: dict[str, float]) -> None:
        self._log("step", record["step"])
        record.clear()  # a copy

    def end(self, outcome: str) -> None:
        self._log("end", outcome)


@pytest.mark.filterwarnings("ignore:the run in .* is complete")
def test_steps_are_sent_once_over_interrupts(tmp_path: Path) -> None:
    async def train() -> tuple[Log, Log, str]:
        run, log = start(tmp_path / "run", config=CONFIG), Log()
        assert run.track(log) is run
        async for step in run:
            if step.step == 2:
                run.stop()
        log.held = 2
        await run
        later = Log()  # a new tracker receives all steps of a run that is complete
        await start(tmp_path / "run", config=CONFIG).track(later)
        return log, later, run.run.id

    log, later, name = asyncio.run(train())
    assert log.calls == [(name, 0, 1e-3), 1, 2, "stopped", (name, 2, 1e-3), 3, "done"]
    assert later.calls == [(name, 3, 1e-3), 1, 2, 3, "done"]
    again = start(tmp_path / "run", config=CONFIG, resume=False)
    asyncio.run(again.track(Log())._wait())
    assert again.run.id != name, "a run that starts over is another run for its tracker"


@pytest.mark.parametrize(("method", "calls"), [("begin", 0), ("step", 1), ("end", 4)])
def test_a_tracker_that_raises_is_removed(method: str, calls: int) -> None:
    failing, log = Log(fail=method), Log()
    run = start(config=CONFIG).track(failing, log)
    with pytest.warns(UserWarning, match="raised OSError: no network; the run continues without it") as warned:
        asyncio.run(run._wait())
    assert (len(warned), len(failing.calls), len(run.records)) == (1, calls, 3)
    assert log.calls[1:] == [1, 2, 3, "done"]


def test_functions_and_objects_with_the_methods_of_a_tracker_are_trackers() -> None:
    class Callable(list[float]):
        def __call__(self, record: dict[str, float]) -> None:
            self.append(record["step"])

    # A tracker of another package is no subclass of Tracker.
    other, called = type("Other", (), dict(vars(Log)))(), Callable()
    records: list[dict[str, float]] = []
    run = start(config=CONFIG).track(records.append, other, called)
    asyncio.run(run._wait())
    assert [record["step"] for record in records] == called == [1, 2, 3]
    assert other.calls == [(run.run.id, 0, 1e-3), 1, 2, 3, "done"]


# --- TensorBoard and trackio ---------------------------------------------------------------------

KILLED = """
import asyncio, sys, time
from test_trainer import start
from waiting import GUARD
from test_tracking import CONFIG, both, Path
from agentfly_kit.trainer.tracking import Tracker

class Slow(Tracker):
    def step(self, record):
        if record["step"] == 2:
            Path(sys.argv[1], "now").touch()
            time.sleep(GUARD)

asyncio.run(start(Path(sys.argv[1], "run"), config=CONFIG).track(*both(), Slow())._wait())
"""


def both() -> list[Tracker]:
    return [af.trackers.TensorBoard(), af.trackers.Trackio("agentfly-test", "one")]


def tensorboard_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_curves_equal_the_records_after_kill_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        blocking_until(lambda: (tmp_path / "now").exists() or child.poll() is not None)
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    program = KILLED.replace(", Slow()", "")  # in a new process, because trackio chooses its folder when imported
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=GUARD)
    run = af.Run(tmp_path / "run")
    curves = tensorboard_curves(run.path / "tensorboard")
    read = "import json, trackio; print(json.dumps(trackio.SQLiteStorage.get_logs('agentfly-test', 'one')))"
    out = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True).stdout
    logged = json.loads(out.splitlines()[-1])
    assert [row["step"] for row in logged] == [1, 2, 3]
    for number, record in enumerate(run.records, start=1):
        expected = af.trackers.prefixed(record)
        assert {k: logged[number - 1][k] for k in expected} == pytest.approx(expected, rel=1e-6)
        for name, value in expected.items():
            assert [v for step, v in curves[name] if step == number] == pytest.approx([value], rel=1e-6)
