"""What every test stands on: one thread, no network to a model hub, and an empty folder to work in."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: a second spinning thread makes a tiny model slower, and how sums are split over
# threads changes their last digits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

hypothesis.settings.register_profile("kit", deadline=None)  # the machines are shared: a slow example is no failure
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
