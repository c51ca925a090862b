"""Errors of pools: settings and arguments that are rejected."""

import errors

import agentfly_kit as af
from agentfly_kit.errors import SettingsError


class Plain: ...


class Waits:
    async def alive(self) -> bool:
        return True


class Kills:
    async def kill(self) -> None: ...


test_errors = errors.rejected(
    (lambda: af.Pool(Plain, size=0), SettingsError, "size must be an integer of at least 1, got 0"),
    # A limit that the class does not accept must not be ignored.
    (lambda: af.Pool(Plain, memory_mb=64), SettingsError,
     "Plain: got an unexpected keyword argument 'memory_mb'; it takes no arguments"),
    (lambda: af.Pool(Plain, max_use=3), SettingsError, "unexpected keyword argument 'max_use'"),
    (lambda: af.Pool(Plain, max_use=3), SettingsError, "did you mean 'max_uses'?"),
    (lambda: af.Pool(Plain()), SettingsError, "sandbox_type must be a class such as PythonSandbox"),
    (lambda: af.Pool(Plain, max_uses=0), SettingsError,
     "max_uses must be an integer of at least 1 or None, got 0"),
    (lambda: af.Pool(Plain, max_lease=float("inf")), SettingsError,
     "max_lease must be a finite number above 0, got inf"),
    (lambda: af.Pool(Plain, size=None), SettingsError, "size must be an integer of at least 1, got None"),
    (lambda: af.Pool(Plain, min_idle=None), SettingsError, "min_idle must be an integer of at least 0 and at most 8"),
    (lambda: af.Pool(Plain, acquire_timeout=None), SettingsError, "acquire_timeout must be"),
    (lambda: af.Pool(Plain, start_timeout=None), SettingsError, "start_timeout must be"),
    (lambda: af.Pool(Plain, max_lease=None), SettingsError, "max_lease must be"),
    (lambda: af.Pool(af.PythonSandbox, max_output=None), SettingsError, "an integer of at least 256, got None"),
    (lambda: af.Pool(af.Grader, memory_mb=1), SettingsError, "memory_mb must be an integer of at least 32 or None"),
    (lambda: af.Pool(Waits), SettingsError, "Waits.alive must not be async"),
    (lambda: af.Pool(Kills), SettingsError, "Kills.kill must not be async"),
    (lambda: af.Pool(Plain).recycle(7), SettingsError, "a sandbox in this pool (none), got 7"),
)  # fmt: skip


def test_none_is_passed_on_as_an_option() -> None:
    assert af.Pool(af.PythonSandbox, memory_mb=None).options == {"memory_mb": None}
