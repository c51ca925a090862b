"""Python's collector of cycles, kept from looking through everything again and again while many chains run.

A full collection walks every object there is, those of torch and transformers among them, and thousands of chains at
once make one due every few hundred chains: it was nearly half of what a chain cost. Young objects are looked through
as ever.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_RARELY = 100
"""Collections of the middle generation between two full ones; Python's own is 10."""
_lock = threading.Lock()
_inside = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Full collections are a tenth as frequent until the last one who asked for it is done. What somebody sets in the
    meantime stays; a collector that is off stays off."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(_before[0], _before[1], max(_before[2], _RARELY))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold() == (_before[0], _before[1], max(_before[2], _RARELY)):
                gc.set_threshold(*_before)
