"""The isolation level of most tests of sandboxes, and time limits that a slow machine does not reach."""

import pytest
from levels import few
from patience import never_killed, raised_limits  # noqa: F401  (fixtures)


@pytest.fixture(params=few("strict"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)
