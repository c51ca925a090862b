"""Rich display of records in notebooks."""

from __future__ import annotations

import sys
from typing import Any


class Displayable:
    """Base class of objects that are displayed as HTML in notebooks.

    The HTML is created in `agentfly_kit.integrations.html`, which is imported when an object is first displayed.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        from agentfly_kit.integrations.html import to_html

        return to_html(self)


def user_traceback(error: BaseException) -> list[str]:
    """Return the traceback of an error in the format of IPython, with only the frames of user code.

    With `%xmode Verbose`, all frames are included.
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
