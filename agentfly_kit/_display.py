"""Rich display of records in notebooks."""

from __future__ import annotations

import sys
from typing import Any


class Displayable:
    """Base of classes that a notebook shows as HTML.

    The HTML of all classes is made in `agentfly_kit.integrations.html`, imported when an object is first displayed, so
    that records and stages are free of markup.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        from agentfly_kit.integrations.html import to_html

        return to_html(self)


def user_traceback(error: BaseException) -> list[str]:
    """Return the traceback of an error as IPython shows it, with the frames of the user's code only.

    `%xmode Verbose` shows all frames, as do programs outside of IPython.
    """
    import asyncio
    import types
    from pathlib import Path

    import IPython

    modules = (sys.modules["agentfly_kit"], asyncio, IPython)
    hidden = ("<string>", *(str(Path(module.__file__).parent) for module in modules if module.__file__))
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(step)
        step = step.tb_next
    formatter: Any = IPython.get_ipython().InteractiveTB
    kept = None
    for frame in reversed(frames):
        if formatter.mode == "Verbose" or not frame.tb_frame.f_code.co_filename.startswith(hidden):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    lines: list[str] = formatter.structured_traceback(type(error), error, kept, tb_offset=0)
    return lines
