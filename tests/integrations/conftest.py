"""Time limits of sandboxes that a slow machine does not reach."""

from collections.abc import Iterator

import patience
import pytest


@pytest.fixture(autouse=True)
def raised_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patience.raise_limits(patch)
        yield
