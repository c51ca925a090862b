"""Tables of invalid calls and the errors they raise, one table for each package of the library."""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

Row = tuple[Callable[[], Any], type[BaseException], str]


def table(*rows: Row) -> pytest.MarkDecorator:
    """Parametrize a test over rows of a call, the class of its error, and a part of the error's text."""
    return pytest.mark.parametrize(("call", "error", "text"), rows, ids=[row[2][:60] for row in rows])


def rejected(*rows: Row) -> Callable[..., Awaitable[None]]:
    """Return a test with rows of a call, the class of its error, and a part of the error's text."""

    @table(*rows)
    async def test(call: Callable[[], Any], error: type[BaseException], text: str) -> None:
        await check(call, error, text)

    return test


def check(call: Callable[[], Any], error: type[BaseException], text: str | re.Pattern[str] = "") -> Awaitable[None]:
    """Assert that a call raises an error, whose text contains a string or matches a pattern.

    If the call returns an awaitable, await the result of this function: the awaitable must raise the error.
    """
    __tracebackhide__ = True
    match = re.escape(text) if isinstance(text, str) else text
    try:
        result = call()
    except BaseException:
        with pytest.raises(error, match=match or None):
            raise
        return _Nothing()
    if not inspect.isawaitable(result):
        pytest.fail(f"{error.__name__} was not raised; the call returned {result!r}")
    return _awaited(result, error, match or None)


async def _awaited(result: Awaitable[Any], error: type[BaseException], match: Any) -> None:
    with pytest.raises(error, match=match):
        await result


class _Nothing:
    def __await__(self) -> Iterator[None]:
        return iter(())
