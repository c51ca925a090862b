"""Rich display of records in notebooks."""

from __future__ import annotations


class Displayable:
    """Base of classes that a notebook shows as HTML.

    The HTML of all classes is made in `agentfly_kit.integrations.html`, imported when an object is first displayed, so
    that records and stages are free of markup.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        from agentfly_kit.integrations.html import to_html

        return to_html(self)
