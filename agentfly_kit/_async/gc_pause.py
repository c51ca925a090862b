"""Python's collector of cycles, kept from looking through everything again and again while many chains run.

It begins after every 700 objects more, and what lives it looks through twice. Thousands of chains that wait are
hundreds of thousands of objects that live: looking through them was a quarter of what a chain cost. A full collection
walks every object there is, those of torch and transformers among them, and was nearly half of it. So the collector
waits in proportion to the chains that run: for as many objects more as they make in about one life.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_OBJECTS_PER_CHAIN = 250
"""Objects more for each chain that runs, before young objects are looked through. A chain of three turns makes about
that many that outlive a moment, and holds 60 to 90 of them while it waits."""
_FULL_COLLECTION_INTERVAL = 100
"""Collections of the middle generation between two full ones; Python's own is 10."""
_lock = threading.Lock()
_entered = 0
_chains = 0
_original_thresholds: tuple[int, int, int] = (0, 0, 0)
_our_thresholds: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def relaxed_gc(chains: int) -> Iterator[None]:
    """Collections are rare until the last one who asked for it is done: young ones by the number of all their
    ``chains``, full ones a tenth as frequent. What somebody sets in the meantime stays; a collector that is off stays
    off."""
    _enter(chains)
    try:
        yield
    finally:
        _leave(chains)


def _enter(chains: int) -> None:
    global _entered, _chains, _original_thresholds, _our_thresholds
    with _lock:
        if _entered == 0:
            _original_thresholds = _our_thresholds = gc.get_threshold()
        _entered += 1
        _chains += chains
        _apply_thresholds()


def _leave(chains: int) -> None:
    global _entered, _chains
    with _lock:
        _entered -= 1
        _chains -= chains
        _apply_thresholds()


def _apply_thresholds() -> None:
    global _our_thresholds
    if gc.get_threshold() != _our_thresholds:
        return  # somebody else's, since: theirs
    if _entered == 0 or _original_thresholds[0] == 0:  # 0 is off
        _our_thresholds = _original_thresholds
    else:
        _our_thresholds = (
            max(_original_thresholds[0], _OBJECTS_PER_CHAIN * _chains),
            _original_thresholds[1],
            max(_original_thresholds[2], _FULL_COLLECTION_INTERVAL),
        )
    gc.set_threshold(*_our_thresholds)
