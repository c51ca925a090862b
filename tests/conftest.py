"""Common test setup: one thread, no access to a model hub, an empty working folder, and browser fixtures."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported. With several threads, a tiny model is slower, and sums differ in their last digits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import sys
import textwrap
from collections.abc import Generator
from typing import Any

import browser
import failures
import forked_kernel
import hypothesis
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# Workers of pytest-xdist and background processes of a shell ignore SIGINT. Child processes would inherit this, so that
# tests could not interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline, because test machines are shared. Examples are the same everywhere unless TEST_SEED is set.
hypothesis.settings.register_profile("kit", deadline=None, derandomize="TEST_SEED" not in os.environ)
hypothesis.settings.load_profile("kit")


pytest_configure = failures.pytest_configure


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run from an empty folder, so that tests do not depend on the working folder or leave files in the repository."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)


# Files whose real tests take minutes. Workers run these files first, so that no long one is left at the end.
LONGEST = (
    "test_sandbox_container", "test_notebooks", "test_engine_vllm", "test_trl", "test_browser_pictures", "test_gallery",
    "test_trainer_failures", "test_tiny_policies", "test_packaging", "test_browser_access", "test_browser_bad",
    "test_quickstart_browser", "test_annotations",
)  # fmt: skip


# Every other file runs in one worker, so that its engine or browser is started once.
SPREAD_OVER_WORKERS = ("test_notebooks", "test_tiny_policies")


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).stem in SPREAD_OVER_WORKERS else file


@pytest.hookimpl(optionalhook=True)  # pytest -p no:xdist has no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return _ByFile(config, log) if config.option.markexpr.startswith("real") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr.startswith("real"):
        order = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    else:
        # Tests in a browser take long. At the end of a run, one worker would execute them alone.
        items.sort(key=lambda item: "lab" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    # Exclude the objects of all imported modules from garbage collection. Many tests call gc.collect().
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call":
        discard_leftovers()
    return report


def discard_leftovers() -> None:
    """Close all sandboxes and leases after a failed test, because its traceback keeps them alive.

    Otherwise, leftover processes would fail tests that check for leftovers, and leases would fail the test during which
    they are garbage-collected.
    """
    if "agentfly_kit.pool.pool" not in sys.modules:
        return
    from agentfly_kit.pool.lease import Lease
    from agentfly_kit.sandboxes.sandbox import Sandbox

    for found in gc.get_objects():
        if issubclass(type(found), Lease):  # isinstance would run code of proxy objects (`__class__`)
            found.released = True
        elif issubclass(type(found), Sandbox):
            with contextlib.suppress(AttributeError):  # its constructor raised
                found.kill()


# --- JupyterLab in a browser: one server for all files, one browser per file -----------------------


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Jupyter starts kernels that have imported the large packages."""
    with forked_kernel.server(tmp_path_factory.mktemp("forked")) as environment:
        yield environment


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[browser.Lab]:
    server = browser.Lab(tmp_path_factory.mktemp("jupyter") / "lab", forked)
    yield server
    server.close()


@pytest.fixture(scope="module")
def lab(server: browser.Lab) -> Iterator[browser.Lab]:
    server.start_browser()
    yield server
    server.stop_browser()


@pytest.fixture
def notebook(lab: browser.Lab, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a function that opens notebooks, and assert after the test that the pages reported no errors.

    Tests marked with `browser.both` also run in Notebook 7.
    """
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
