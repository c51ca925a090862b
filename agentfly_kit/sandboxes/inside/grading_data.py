"""Data exchanged between a Grader's two interpreters, that of the submission and that of the tests.

This file runs after base.py in the same namespace, in each of the two. The host relays requests and answers between
them as JSON, which contains only data or references to objects in the submission's process. Therefore no code of the
submission, such as its `==`, ever runs in the process of the tests.
"""

from __future__ import annotations

import json
import linecache
import traceback
from typing import Any

LONGEST = 2**22  # maximum characters of one request or answer


def dump_json(message: Any) -> str:
    text = json.dumps(message)
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters of data; at most {LONGEST} cross at once")
    return text


def format_traceback(error: BaseException, text: str, own: str) -> str:
    """Format a traceback, starting at the first frame of the given source text."""
    linecache.cache[own] = (len(text), None, text.splitlines(keepends=True), own)
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != own:
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip("\n")[-4000:]
