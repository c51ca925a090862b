"""Files about failed tests for `.ci/run`, one for each, written as soon as it fails in case that the run is stopped."""

import os
from pathlib import Path

import pytest


class Failures:
    """Plugin that writes the name of each failed test and its output to a file. The traceback is at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.folder.mkdir(parents=True, exist_ok=True)
            output = [f"{title}:\n{text}" for title, text in report.sections]
            text = "\n".join([f"{report.nodeid} ({report.when})", *output, report.longreprtext])
            (self.folder / f"{len(list(self.folder.iterdir())):04d}").write_text(text, encoding="utf-8")

    pytest_collectreport = pytest_runtest_logreport


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if the environment names a folder; with pytest-xdist, in the main process."""
    folder = os.environ.get("AGENTFLY_TEST_FAILURES")
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(folder)))
