"""Less frequent garbage collection while many chains run.

Thousands of waiting chains keep hundreds of thousands of objects alive. With Python's default thresholds, traversing
them took a quarter of the running time. Full collections, which also traverse the objects of PyTorch, took nearly half.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Young-generation threshold per running chain. A chain with three turns allocates about this number of objects.
_OBJECTS_PER_CHAIN = 250
# Number of collections of the middle generation per full collection; Python's default is 10.
_FULL_COLLECTION_INTERVAL = 100
_lock = threading.Lock()
_users = 0
_chains = 0
_original_thresholds: tuple[int, int, int] = (0, 0, 0)
_our_thresholds: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def relaxed_gc(chains: int) -> Iterator[None]:
    """Raise Python's garbage-collection thresholds while `chains` chains run. Overlapping contexts add their chains.

    If other code changes the thresholds in the meantime, the new values are kept. A disabled collector stays disabled.
    """
    _change(1, chains)
    try:
        yield
    finally:
        _change(-1, -chains)


def _change(users: int, chains: int) -> None:
    global _users, _chains, _original_thresholds, _our_thresholds
    with _lock:
        if _users == 0:
            _original_thresholds = _our_thresholds = gc.get_threshold()
        _users += users
        _chains += chains
        if gc.get_threshold() != _our_thresholds:
            return  # other code has changed the thresholds; keep its values
        young, middle, full = _original_thresholds
        if _users > 0 and young > 0:  # a threshold of 0 disables the collector
            young, full = max(young, _OBJECTS_PER_CHAIN * _chains), max(full, _FULL_COLLECTION_INTERVAL)
        _our_thresholds = (young, middle, full)
        gc.set_threshold(*_our_thresholds)
