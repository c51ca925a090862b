"""Environments that are closed after a test, and time limits that a slow machine does not reach."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import patience
import pytest
from waiting import GUARD

from agentfly_kit.envs import code, competition, repo, sql


@pytest.fixture(autouse=True)
def raised_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patience.raise_limits(patch)
        for call in (
            code.Code.__init__,
            competition.Contest.__init__,
            repo.Repo.__init__,
            repo.grade,
            sql.SQL.__init__,
        ):
            patch.setitem(call.__kwdefaults__, "seconds", GUARD)
        yield


@pytest.fixture
async def closed_later() -> AsyncIterator[Callable[[Any], Any]]:
    """Return a function that returns an environment and closes it after the test."""
    async with AsyncExitStack() as stack:

        def register(environment: Any) -> Any:
            stack.push_async_callback(environment.close)
            return environment

        yield register
