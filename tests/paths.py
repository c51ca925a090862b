"""Paths of the repository and the tests, for tests in any folder."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
"""The helpers that tests import by name lie here; a child process needs it on its path."""

ROOT = TESTS.parent
"""The repository."""
