"""Tables of invalid calls and the errors they raise, one table for each package of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

Row = tuple[Callable[[], Any], type[BaseException], str]


def table(*rows: Row) -> pytest.MarkDecorator:
    """Parametrize a test over rows of a call, the class of its error, and a part of the error's text."""
    return pytest.mark.parametrize(("call", "error", "text"), rows, ids=[row[2][:60] for row in rows])


async def check(call: Callable[[], Any], error: type[BaseException], text: str) -> None:
    """Assert that a call, or the awaitable that it returns, raises an error with a text."""

    async def awaited() -> None:
        result = call()
        if inspect.isawaitable(result):
            await result

    with pytest.raises(error) as caught:
        await awaited()
    assert text in str(caught.value)
