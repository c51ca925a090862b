"""Sandbox for answer checkers from other packages, which may evaluate an answer as code or never terminate."""

from __future__ import annotations

import base64
import math
import pickle
from typing import Any, ClassVar

from agentfly_kit.errors import SandboxError
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes.settings import forward_signature

# CPU and wall-clock limits per check, in seconds. The wall-clock limit is larger, because the machine may be busy.
_CPU_SECONDS, _SECONDS = 2.0, 60.0
_CODE = """
import base64, pickle
data = pickle.loads(base64.b64decode({data!r}))
try:
    exec({code!r}, globals())
except ImportError:
    raise
except Exception:
    score = 0.0
float(score)
"""


@forward_signature(PythonSandbox, memory_mb=1024, cpu_seconds=_CPU_SECONDS)
class Verifier(PythonSandbox):
    """Python sandbox that preloads the package in the class attribute `module`. Each chain gets a new interpreter.

    Args:
        **sandbox: settings of `PythonSandbox`.
    """

    module: ClassVar[str]

    def __init__(self, **sandbox: Any) -> None:
        defaults: dict[str, Any] = {"preload": (self.module,), "memory_mb": 1024, "cpu_seconds": _CPU_SECONDS}
        super().__init__(**(defaults | sandbox))

    async def score(self, code: str, data: Any) -> float:
        """Run code that reads `data` and sets `score`, and return the score.

        The score is 0 if the code raises an exception, exceeds a limit, or computes a non-finite number.

        Raises:  SandboxError if the sandbox fails or a package cannot be imported.
        """
        encoded = base64.b64encode(pickle.dumps(data)).decode()
        result = await self.run(_CODE.format(data=encoded, code=code), timeout=_SECONDS)
        if result.error_type in ("ImportError", "ModuleNotFoundError"):
            raise SandboxError(f"cannot check the answer: {(result.error or '').strip().splitlines()[-1]}")
        try:
            found = float(result.value or 0.0) if result.ok else 0.0
        except ValueError:
            return 0.0
        return found if math.isfinite(found) else 0.0
