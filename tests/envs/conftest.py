"""Environments that are closed after a test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest


@pytest.fixture
async def closed_later() -> AsyncIterator[Callable[[Any], Any]]:
    """Return a function that returns an environment and closes it after the test."""
    async with AsyncExitStack() as stack:

        def register(environment: Any) -> Any:
            stack.push_async_callback(environment.close)
            return environment

        yield register
