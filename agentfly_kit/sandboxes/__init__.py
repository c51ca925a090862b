"""Sandboxes that run code written by a model. Each kind of sandbox is a class; a pool leases instances to chains."""

from __future__ import annotations

from .files import FileSandbox
from .grader import Grade, Grader, Verdict
from .host.container import Container
from .host.isolation import LevelReport, SandboxReport, sandbox_report
from .host.limits import Limits
from .python import PythonSandbox
from .result import SandboxResult
from .shell import ShellResult, ShellSandbox
from .sql import SQLResult, SQLSandbox

__all__ = [
    "Container",
    "FileSandbox",
    "Grade",
    "Grader",
    "LevelReport",
    "Limits",
    "PythonSandbox",
    "SQLResult",
    "SQLSandbox",
    "SandboxReport",
    "SandboxResult",
    "ShellResult",
    "ShellSandbox",
    "Verdict",
    "sandbox_report",
]
