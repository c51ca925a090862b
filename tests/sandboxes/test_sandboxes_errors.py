"""Invalid settings of sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import errors

from agentfly_kit.errors import SettingsError
from agentfly_kit.sandboxes import Container, FileSandbox, PythonSandbox, ShellSandbox, SQLSandbox

PATHS = ("", "/abs", "../out", "a/../../b", "a/", "a\0")


@errors.table(
    (lambda: PythonSandbox(memory_mb=1), SettingsError, "memory_mb must be at least"),
    (lambda: PythonSandbox(processes=0), SettingsError, "processes must be at least"),
    (lambda: PythonSandbox(cpu_seconds=float("nan")), SettingsError, "cpu_seconds must be a number"),
    (lambda: PythonSandbox(disk_mb=-1), SettingsError, "disk_mb must be at least"),
    (lambda: PythonSandbox(max_output=3), SettingsError, "max_output must be at least"),
    (lambda: PythonSandbox(isolation="docker"), SettingsError, "isolation must be one of 'strict', 'landlock', 'none'"),
    (lambda: PythonSandbox(isolation="container"), SettingsError, "or a container such as af.Container"),
    (lambda: ShellSandbox().run("true", timeout=0), SettingsError, "timeout must be a positive"),
    (lambda: FileSandbox(files={"a": 1}), SettingsError, "must be str or bytes, got int"),  # type: ignore[dict-item]
    (lambda: FileSandbox(files="/nowhere/at/all"), SettingsError, "must be an existing folder"),
    *((lambda path=path: FileSandbox(files={path: "x"}), SettingsError, "must have paths within") for path in PATHS),
    (lambda: SQLSandbox(engine="mysql"), SettingsError, "engine must be 'sqlite' or 'duckdb', got 'mysql'"),
    (lambda: SQLSandbox(database="/nowhere.db"), SettingsError, "must be an existing file"),
    (lambda: SQLSandbox(max_rows=0), SettingsError, "max_rows must be an integer of at least 1"),
    (lambda: Container(""), SettingsError, "image must be the name"),
    (lambda: Container("x", cpus=0), SettingsError, "cpus must be between"),
    (lambda: Container("x", mounts={"data": "/data"}), SettingsError, "absolute paths to absolute paths"),
)
async def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    await errors.check(call, error, text)
