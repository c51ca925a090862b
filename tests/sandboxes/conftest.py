"""The isolation level of most tests of sandboxes, and time limits that a slow machine does not reach."""

from collections.abc import Iterator

import patience
import pytest
from levels import few


@pytest.fixture(params=few("strict"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def raised_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patience.raise_limits(patch)
        yield


@pytest.fixture
def never_killed() -> Iterator[None]:
    """Interrupted code ends by itself, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patience.never_kill(patch)
        yield
