"""Names and settings that the functions for tiny policies reject."""

from typing import Any

import errors
import recipes

import agentfly_kit as af


@errors.table(
    (lambda: af.tiny.policy("maze"), af.errors.SettingsError, "name must be one of 'calculator', "),
    (lambda: recipes.build("maze"), af.errors.SettingsError, "'maze'"),
)
async def test_errors(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)
