"""A shell that a chain keeps: folder, variables and functions live from command to command, and end with the chain.

Knows how commands and their results travel; what runs them is inside/shell.py, in the interpreter of a PythonSandbox.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..errors import SandboxError, ToolError
from .hosted import HostedSandbox
from .result import Limit, SandboxResult

_NO_TERMINAL = re.compile(r"^bash: \[\d+: [^\]]*\] tcsetattr: [^\n]*\n", re.MULTILINE)  # said when a command is killed
_SIGNALS: dict[int, Limit] = {128 + 24: "cpu", 128 + 25: "disk"}  # SIGXCPU, SIGXFSZ


@dataclass(frozen=True, slots=True, repr=False)
class ShellResult(SandboxResult):
    """The outcome of one command. `value` is always None; `error` says what stopped it, if something did.

    Attributes:
        exit_code: The status of the command, 128 + the number of the signal that ended it; None if nobody was left to
            say.
    """

    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """As on a terminal, with the status where it is not 0, and a note for what is missing."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.truncated:
            parts.append("[output cut off]")
        if self.error:
            parts.append(f"[{self.error}]")
        elif self.exit_code:
            parts.append(f"[exit status {self.exit_code}]")
        if self.died:
            parts.append("[the shell has ended: the next command begins in a new one, beside the same files]")
        return "\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name in ("stdout", "stderr") if (value := getattr(self, name))]
        said += [f"exit_code={self.exit_code}"]
        said += [name for name in ("truncated", "timed_out", "died") if getattr(self, name)]
        said += [f"limit={self.limit!r}"] if self.limit else []
        return f"ShellResult({', '.join(said)})"


class ShellSandbox(HostedSandbox):
    """A persistent, confined bash. It begins in its own, empty folder, with this Python first in its PATH.

    `await start()`, `await run(command)` as often as wanted, `await reset()` for a shell that knows nothing of the last
    one, `await close()`; or `async with ShellSandbox() as sandbox`. The settings are those of PythonSandbox: isolation,
    memory_mb, processes (the shell and the process that watches it count), cpu_seconds, disk_mb, network, max_output.

    Background jobs run on between commands, and end with the lease.
    """

    _inside_files: ClassVar[tuple[str, ...]] = ("base", "shell")
    _folder: ClassVar[str] = ""

    async def run(self, command: str, timeout: float = 10.0) -> ShellResult:
        """Run a command, or lines of them, in the chain's shell. It reads nothing from a keyboard.

        After `timeout` seconds what runs is interrupted as by Ctrl-C, 0.2 s later killed; the shell, its variables and
        older background jobs live. If even that does not help all is killed, and the next command gets a new shell
        beside the same files.

        Raises:  SandboxError if the sandbox is closed or cannot be brought back to life; nothing that a command did.
        """
        cpu = self.limits.cpu_seconds
        result, reply = await self._call("run", timeout, command=command, folder=self._folder, cpu_seconds=cpu)
        if reply is not None and "refused" in reply:
            raise ToolError(str(reply["refused"]))
        answer = reply.get("answer") if reply is not None else None
        if not isinstance(answer, dict):
            answer = {}
        code = answer.get("exit")
        code = code if type(code) is int and -(2**31) <= code < 2**31 else None
        ended = code is None or bool(answer.get("ended"))
        limit = result.limit
        if limit is None and code is not None:
            limit = _SIGNALS.get(code)
        error = None if code is not None else result.error or "the shell died"
        if result.timed_out and code is not None:
            error = f"stopped: it ran for more than {timeout:g} s"
        elif limit is not None and code is not None and code != 0:
            error = f"it ran into the {limit} limit; exit status {code}"
        stderr = _NO_TERMINAL.sub("", result.stderr)
        if ended:
            stderr = stderr.removesuffix("exit\n")  # what bash says when it is left
        elif result.limit is not None and (stderr == "\n" or stderr.endswith("\n\n")):
            stderr = stderr[:-1]  # and when it is interrupted
        return ShellResult(
            stdout=result.stdout,
            stderr=stderr,
            error=error,
            seconds=result.seconds,
            truncated=result.truncated,
            timed_out=result.timed_out,
            died=ended,
            limit=limit,
            exit_code=code,
        )

    async def fork(self, into: ShellSandbox) -> None:
        """Bring another sandbox into this one's state: a copy of its files, and of the shell's folder, variables,
        functions and options. Copies of a level without an own /tmp lie elsewhere, and files that name the old place
        are not changed.

        Raises:  SandboxError while a background process runs, which cannot be copied, or where the kernel does not list
                 processes, so that this cannot be known. `into` is reset.
        """
        async with self._copying(into):
            state = await self._request_locked("dump")
            await self._check_background(shells=0 if state is None else 1)
            await self._copy_home(into)
            if state is not None:
                await into._request_locked(
                    "load", state=state, old=await self._request_locked("home"), folder=self._folder
                )

    async def _check_background(self, shells: int) -> None:
        """Raises SandboxError unless the interpreter and so many shells are all that runs inside."""
        processes = await self._python.count_processes()
        if processes is None:
            raise SandboxError(
                "this kernel does not list a process's children, so background processes cannot be ruled out"
            )
        if (others := processes - 1 - shells) > 0:
            raise SandboxError(
                f"this {type(self).__name__} cannot fork: {others} background process{'' if others == 1 else 'es'} "
                "still running"
            )
