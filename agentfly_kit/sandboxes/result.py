"""What one call of a sandbox gave. Knows nothing of how it ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["time", "memory", "processes", "cpu", "disk", "output"]


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The outcome of one `run`. A failure of the code, a limit it hit and its death are told here, never raised.

    Units: seconds of wall time, of the call as the host saw it.

    Attributes:
        stdout: What was printed, up to `max_output` bytes.
        stderr
        value: `repr` of the last expression, None if there was none or it was None.
        error: Traceback of the code's own exception, or what ended it.
        error_type: Name of the exception's class; None when there was no exception (a killed interpreter raised none).
        seconds
        truncated: Something of stdout, stderr, value or error was cut off.
        timed_out: The time was up and the code was interrupted; its variables live unless it `died` too.
        died: The interpreter is gone and its variables with it; the next call gets a new one.
        limit: The limit that the code ran into, if any.
    """

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    error_type: str | None = None
    seconds: float = 0.0
    truncated: bool = False
    timed_out: bool = False
    died: bool = False
    limit: Limit | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and not self.timed_out and not self.died

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name in ("stdout", "stderr", "value") if (value := getattr(self, name))]
        said += [self.error_type] if self.error_type else []
        said += [name for name in ("truncated", "timed_out", "died") if getattr(self, name)]
        said += [f"limit={self.limit!r}"] if self.limit else []
        return f"SandboxResult({', '.join(said) or 'nothing said'})"

    @property
    def text(self) -> str:
        """All of it, in the order in which a reader of a terminal would see it, with a note for what is missing."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), self.error or "", self.value or ""]
        if self.truncated:
            parts.append("[output cut off]")
        if self.died:
            parts.append("[the interpreter was restarted: variables are lost]")
        return "\n".join(part for part in parts if part)
