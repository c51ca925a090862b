"""The isolation level of most tests of sandboxes."""

import pytest
from levels import few


@pytest.fixture(params=few("strict"))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)
