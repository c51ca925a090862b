"""Isolation levels of sandboxes, as parameters of tests."""

import shutil

import pytest

from agentfly_kit.sandboxes.host import commands, isolation

# Levels that are not installed are skipped. A level that is installed but does not work fails its tests.
STRICT = isolation.strict_unavailable_reason() if shutil.which("bwrap") is None else ""
LANDLOCK = "" if commands.landlock_version() else isolation.landlock_unavailable_reason()
MARKS = {
    "strict": [pytest.mark.skipif(bool(STRICT), reason=STRICT)],
    "landlock": [pytest.mark.skipif(bool(LANDLOCK), reason=LANDLOCK)],
    "none": [],
}
LEVELS = [pytest.param(level, marks=marks) for level, marks in MARKS.items()]


def few(*fast: str):
    """Return all levels; those that are not named run in `make test-all` only, because they take minutes.

    Without bubblewrap, landlock is tested instead of strict.
    """
    fast = (*fast, "landlock") if STRICT else fast
    return [
        pytest.param(level, marks=[*marks, *([] if level in fast else [pytest.mark.long])])
        for level, marks in MARKS.items()
    ]
