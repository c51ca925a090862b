"""The seed of tests that throw dice: the same everywhere, until somebody asks for another by TEST_SEED."""

from __future__ import annotations

import os


def seed() -> int:
    """TEST_SEED, or 0. It is printed, so that a failure says what to ask for."""
    chosen = int(os.environ.get("TEST_SEED", "0"))
    print(f"seed {chosen} (TEST_SEED={chosen})")
    return chosen
