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

_A_CHAIN = 250
"""Objects more for each chain that runs, before young objects are looked through. A chain of three turns makes about
that many that outlive a moment, and holds 60 to 90 of them while it waits."""
_RARELY = 100
"""Collections of the middle generation between two full ones; Python's own is 10."""
_lock = threading.Lock()
_inside = 0
_chains = 0
_before: tuple[int, int, int] = (0, 0, 0)
_ours: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def few_collections(chains: int) -> Iterator[None]:
    """Collections are rare until the last one who asked for it is done: young ones by the number of all their
    ``chains``, full ones a tenth as frequent. What somebody sets in the meantime stays; a collector that is off stays
    off."""
    _enter(chains)
    try:
        yield
    finally:
        _leave(chains)


def _enter(chains: int) -> None:
    global _inside, _chains, _before, _ours
    with _lock:
        if _inside == 0:
            _before = _ours = gc.get_threshold()
        _inside += 1
        _chains += chains
        _set()


def _leave(chains: int) -> None:
    global _inside, _chains
    with _lock:
        _inside -= 1
        _chains -= chains
        _set()


def _set() -> None:
    global _ours
    if gc.get_threshold() != _ours:
        return  # somebody else's, since: theirs
    if _inside == 0 or _before[0] == 0:  # 0 is off
        _ours = _before
    else:
        _ours = (max(_before[0], _A_CHAIN * _chains), _before[1], max(_before[2], _RARELY))
    gc.set_threshold(*_ours)
