"""Less frequent garbage collection while chains run, and collection on demand.

Thousands of waiting chains keep hundreds of thousands of objects alive. With Python's default thresholds, traversing
these objects took a quarter of the running time. Full collections, which also traverse PyTorch's objects, took nearly
half of this time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

# A chain with three turns allocates about 250 objects.
_THRESHOLDS = (50_000, 10, 100)
# The lock is reentrant, because a finalizer may call `collect`.
_collecting = threading.RLock()


def collect() -> None:
    """Collect all garbage. Wait if another thread is collecting, because `gc.collect` would then do nothing."""
    with _collecting:
        gc.collect()


@contextlib.contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise Python's garbage-collection thresholds, and restore them at the end.

    Thresholds that are higher, a disabled collector, and thresholds that other code sets in the meantime are kept.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _THRESHOLDS[0]:
        yield
        return
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        if gc.get_threshold() == _THRESHOLDS:
            gc.set_threshold(*before)


def _after_fork() -> None:
    """Reset the lock in a forked child, because another thread may have held it during the fork."""
    global _collecting
    _collecting = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_after_fork)
