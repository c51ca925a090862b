"""Result of one call to a sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentfly_kit._display import Displayable

Limit = Literal["time", "memory", "processes", "cpu", "disk", "output"]


@dataclass(frozen=True, slots=True, repr=False)
class SandboxResult(Displayable):
    """The result of one `run`. Exceptions of the code, exceeded limits and crashes are reported here, never raised.

    Attributes:
        stdout: Standard output, up to `max_output` bytes.
        stderr: Standard error, up to `max_output` bytes.
        value: `repr` of the last expression's value; None if there is no expression or the value is None.
        error: Traceback of the code's exception, or a description of what stopped the code.
        error_type: Name of the exception's class; None if there was no exception, for example after a kill.
        seconds: Wall time of the call, measured on the host.
        truncated: True if part of stdout, stderr, value or error was cut off.
        timed_out: True if the code was interrupted after the timeout; its variables survive unless it also `died`.
        died: True if the interpreter ended and its variables are lost; the next call gets a new interpreter.
        limit: The limit that the code exceeded, if any.
        files_lost: True if the code ended the whole sandbox, so that its files are lost too. Files survive if only the
            interpreter is killed.
    """

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    error_type: str | None = field(default=None, repr=False)
    seconds: float = field(default=0.0, repr=False)
    truncated: bool = False
    timed_out: bool = False
    died: bool = False
    limit: Limit | None = None
    files_lost: bool = False

    @property
    def ok(self) -> bool:
        """True if the code neither raised an error, nor timed out, nor ended the interpreter."""
        return self.error is None and not self.timed_out and not self.died

    @property
    def text(self) -> str:
        """Output, error and value as one string, as on a terminal, with notes on truncation and restarts."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), self.error or "", self.value or ""]
        if self.truncated:
            parts.append("[output truncated]")
        if self.died:
            lost = "the sandbox was restarted: variables and files are lost"
            parts.append(f"[{lost}]" if self.files_lost else "[the interpreter was restarted: variables are lost]")
        return "\n".join(part for part in parts if part)
