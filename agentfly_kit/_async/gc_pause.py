"""Less frequent garbage collection while many chains run.

By default, Python's cyclic garbage collector runs after every 700 net allocations and visits surviving objects twice.
Thousands of waiting chains keep hundreds of thousands of objects alive, and visiting them took a quarter of the time of
a chain. Full collections visit every object in the process, including those of torch and transformers, and took nearly
half of the time. The thresholds are therefore raised in proportion to the number of running chains, to about the number
of objects that they allocate during their lifetime.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Additional allocations per running chain before the young generation is collected.
#
# A chain of three turns allocates about this many objects that are not freed immediately, and keeps 60 to 90 of them
# while it waits.
_OBJECTS_PER_CHAIN = 250
# Number of collections of the middle generation between two full collections; Python's default is 10.
_FULL_COLLECTION_INTERVAL = 100
_lock = threading.Lock()
_users = 0
_chains = 0
_original_thresholds: tuple[int, int, int] = (0, 0, 0)
_our_thresholds: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def relaxed_gc(chains: int) -> Iterator[None]:
    """Raise the garbage collection thresholds in proportion to the number of running chains.

    Calls may overlap: the number of chains is summed over all of them, and the last to exit restores the original
    thresholds. Full collections become ten times less frequent. Thresholds that other code sets in the meantime are
    kept, and a disabled collector stays disabled.
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
