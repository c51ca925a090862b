"""Names and settings that the functions for tiny policies reject."""

from __future__ import annotations

from typing import Any

import errors
import recipes

from agentfly_kit import tiny
from agentfly_kit.errors import SettingsError


@errors.table(
    (lambda: tiny.policy("maze"), SettingsError, "name must be one of 'calculator', "),
    (lambda: recipes.build("maze"), SettingsError, "'maze'"),
    (
        lambda: tiny.learner(("a",), lambda rng: [], steps=0),
        SettingsError,
        "an integer of at least 1, got 0",
    ),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)
