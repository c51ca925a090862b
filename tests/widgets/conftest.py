"""Widgets are closed after each test."""

from collections.abc import Iterator

import pytest
from ipywidgets.widgets import widget as ipywidget


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close all widgets, because displayed widgets live until they are closed."""
    yield
    for view in list(ipywidget._instances.values()):
        view.close()
