"""What every test stands on: one thread, no network to a model hub, and an empty folder to work in."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: a second spinning thread makes a tiny model slower, and how sums are split over
# threads changes their last digits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import sys
import textwrap
from collections.abc import Generator
from typing import Any

import browser
import hypothesis
import pytest

# A worker of pytest-xdist ignores interrupts, and so does whatever a shell starts in the background. Children would
# inherit that, and no test could interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machines are shared: a slow example is no failure. The dice are the same everywhere, unless TEST_SEED is given.
hypothesis.settings.register_profile("kit", deadline=None, derandomize="TEST_SEED" not in os.environ)
hypothesis.settings.load_profile("kit")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run from an empty folder: what ships is found from anywhere, and no test leaves a file in the tree."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call":
        discard_leftovers()
    return report


def discard_leftovers() -> None:
    """End every sandbox and lease after a failed test, whose traceback keeps them alive.

    Their processes would fail the tests that look for leftovers, and their leases whichever test they are collected in.
    """
    if "agentfly_kit.pool.pool" not in sys.modules:
        return
    from agentfly_kit.pool.pool import Lease
    from agentfly_kit.sandboxes.hosted import HostedSandbox
    from agentfly_kit.sandboxes.python import PythonSandbox

    for found in gc.get_objects():
        if issubclass(type(found), Lease):  # not isinstance, which calls what proxies say of themselves
            found.released = True
        elif issubclass(type(found), PythonSandbox | HostedSandbox):
            found.kill()


# --- JupyterLab in a browser: one server for all files, one browser a file -------------------------


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Lab]:
    server = browser.Lab(tmp_path_factory.mktemp("jupyter") / "lab")
    yield server
    server.close()


@pytest.fixture(scope="module")
def lab(server: browser.Lab) -> Iterator[browser.Lab]:
    server.start_browser()
    yield server
    server.stop_browser()


@pytest.fixture
def notebook(lab: browser.Lab, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens notebooks; at the end no page may have complained. `browser.both` runs a test in Notebook 7 as well."""
    opened: list[browser.Notebook] = []

    def open(*cells: str, **more: Any) -> browser.Notebook:
        name = "".join(c if c.isalnum() else "-" for c in request.node.name)
        more.setdefault("app", getattr(request, "param", "lab"))
        opened.append(lab.open(f"{name}-{len(opened)}", [textwrap.dedent(cell).strip() for cell in cells], **more))
        return opened[-1]

    yield open
    errors = [error for each in opened for error in each.errors]
    for each in opened:
        each.close()
    assert errors == []
