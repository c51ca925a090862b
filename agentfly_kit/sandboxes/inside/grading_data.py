"""Data exchanged between the two interpreters of a Grader: one for the submission and one for the tests.

In each interpreter, this file runs after base.py in the same namespace. The host relays requests and answers as JSON,
which contains only data and references to objects in the submission's process. Therefore no code of the submission,
such as a method `__eq__`, ever runs in the process of the tests.
"""

from __future__ import annotations

import json
import linecache
import traceback
from typing import Any

LONGEST = 2**22  # maximum number of characters in one request or answer


def dump_json(message: Any) -> str:
    text = json.dumps(message)
    if len(text) > LONGEST:
        raise ValueError(f"a request or answer must have at most {LONGEST} characters, got {len(text)}")
    return text


def format_traceback(error: BaseException, text: str, own: str) -> str:
    """Format a traceback, starting at its first frame in the file `own`, whose source is `text`."""
    linecache.cache[own] = (len(text), None, text.splitlines(keepends=True), own)
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != own:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip("\n")[-4000:]
