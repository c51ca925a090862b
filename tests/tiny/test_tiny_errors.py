"""Names and settings that the functions for tiny policies reject."""

import errors
import recipes

import agentfly_kit as af

test_errors = errors.rejected(
    (lambda: af.tiny.policy("maze"), af.errors.SettingsError, "name must be one of 'calculator', "),
    (lambda: recipes.build("maze"), af.errors.SettingsError, "'maze'"),
)
