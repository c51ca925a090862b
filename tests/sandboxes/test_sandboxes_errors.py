"""Invalid settings of sandboxes."""

import errors

import agentfly_kit as af

PATHS = ("", "/abs", "../out", "a/../../b", "a/", "a\0")


test_errors = errors.rejected(
    (lambda: af.PythonSandbox(memory_mb=1), af.errors.SettingsError, "memory_mb must be an integer of at least 32"),
    (lambda: af.PythonSandbox(processes=0), af.errors.SettingsError, "processes must be an integer of at least 1"),
    (
        lambda: af.PythonSandbox(cpu_seconds=float("nan")),
        af.errors.SettingsError,
        "cpu_seconds must be a finite number",
    ),
    (lambda: af.PythonSandbox(disk_mb=-1), af.errors.SettingsError, "disk_mb must be an integer of at least 1"),
    (
        lambda: af.PythonSandbox(max_output=3),
        af.errors.SettingsError,
        "max_output must be an integer of at least 256",
    ),
    (
        lambda: af.PythonSandbox(isolation="docker"),
        af.errors.SettingsError,
        "isolation must be one of ('strict', 'landlock', 'none')",
    ),
    (lambda: af.PythonSandbox(isolation="container"), af.errors.SettingsError, "or an af.Container, got"),
    (lambda: af.ShellSandbox().run("true", timeout=0), af.errors.SettingsError, "must be a finite number above 0"),
    (lambda: af.FileSandbox(files="/nowhere/at/all"), af.errors.SettingsError, "must be an existing folder"),
    *(
        (lambda path=path: af.FileSandbox(files={path: "x"}), af.errors.SettingsError, "must have paths within")
        for path in PATHS
    ),
    (
        lambda: af.SQLSandbox(engine="mysql"),
        af.errors.SettingsError,
        "engine must be one of 'sqlite', 'duckdb', got 'mysql'",
    ),
    (lambda: af.SQLSandbox(database="/nowhere.db"), af.errors.SettingsError, "must be an existing file"),
    (lambda: af.SQLSandbox(max_rows=0), af.errors.SettingsError, "max_rows must be an integer of at least 1"),
    (
        lambda: af.Container("x", mounts={"data": "/data"}),
        af.errors.SettingsError,
        "absolute paths to absolute paths",
    ),
)
