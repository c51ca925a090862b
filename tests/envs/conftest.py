"""Environments that are closed after a test, and time limits that a slow machine does not reach."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from patience import never_killed, raised_limits  # noqa: F401  (fixtures)
from waiting import GUARD

import agentfly_kit as af

GRADES = (
    af.envs.code.Code.__init__,
    af.envs.competition.Contest.__init__,
    af.envs.repo.Repo.__init__,
    af.envs.repo.grade,
    af.envs.sql.SQL.__init__,
)


@pytest.fixture(autouse=True)
def more_seconds(raised_limits: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Raise the time limits that environments have for a program, a test, or all tests."""
    for call in GRADES:
        defaults: Any = call.__kwdefaults__
        for name in {"seconds", "total"} & defaults.keys():
            raised_limits.setitem(defaults, name, GUARD)


@pytest.fixture
async def closed_later() -> AsyncIterator[Callable[[Any], Any]]:
    """Return a function that returns an environment and closes it after the test."""
    async with AsyncExitStack() as stack:

        def register(environment: Any) -> Any:
            stack.push_async_callback(environment.close)
            return environment

        yield register
