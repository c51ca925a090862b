"""Places in which code from a model runs. Kinds of sandbox are classes; a pool lends them to chains."""

from __future__ import annotations

from .container import Container
from .isolation import LevelReport, SandboxReport, sandbox_report
from .limits import Limits
from .python import PythonSandbox
from .result import SandboxResult

__all__ = ["Container", "LevelReport", "Limits", "PythonSandbox", "SandboxReport", "SandboxResult", "sandbox_report"]
