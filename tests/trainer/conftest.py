"""The uninterrupted run with which the tests of several files compare."""

import pytest
from test_trainer import Whole, uninterrupted


@pytest.fixture(scope="session")
def whole() -> Whole:
    return uninterrupted()
