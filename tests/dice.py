"""The seed of randomized tests, which is constant unless TEST_SEED is set."""

import os


def seed() -> int:
    """Return TEST_SEED, or 0. The seed is printed, so that a failure can be reproduced."""
    chosen = int(os.environ.get("TEST_SEED", "0"))
    print(f"seed {chosen} (TEST_SEED={chosen})")
    return chosen
