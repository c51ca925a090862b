"""A persistent shell: working directory, variables and functions survive from command to command.

This module runs on the host: it sends commands and interprets results. inside/shell.py runs the commands in the
sandbox's interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SandboxError
from .hosted import HostedSandbox
from .result import Limit, SandboxResult

# Output of bash when it is interrupted: an empty line, or sometimes two on a busy machine.
_INTERRUPTED = re.compile(r"(?:^|(?<=\n))\n+\Z")
# A message that bash prints when a command is killed.
_NO_TERMINAL = re.compile(r"^bash: \[\d+: [^\]]*\] tcsetattr: [^\n]*\n", re.MULTILINE)
_SIGNALS: dict[int, Limit] = {128 + 24: "cpu", 128 + 25: "disk"}  # SIGXCPU, SIGXFSZ


@dataclass(frozen=True, slots=True, repr=False)
class ShellResult(SandboxResult):
    """The result of one command. `value` is always None; `error` describes what stopped the command, if anything.

    Attributes:
        exit_code: Exit status of the command, or 128 + n if signal n ended it; None if the shell ended before it could
            report one.
    """

    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        """True if the command ended in time with exit status 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """The output as on a terminal, with the exit status if it is not 0, and notes on errors and truncation."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.truncated:
            parts.append("[output truncated]")
        if self.error:
            parts.append(f"[{self.error}]")
        elif self.exit_code:
            parts.append(f"[exit status {self.exit_code}]")
        if self.files_lost:
            parts.append("[the sandbox was restarted: shell variables and all files are lost]")
        elif self.died:
            parts.append("[the shell exited; the next command runs in a new shell with the same files]")
        return "\n".join(part for part in parts if part)


class ShellSandbox(HostedSandbox):
    """A persistent, confined bash. The shell starts in an empty folder, and the sandbox's Python is first in its PATH.

    Call `await start()`, then `await run(command)` any number of times, `await reset()` for a clean shell, and finally
    `await close()`; or use `async with ShellSandbox() as sandbox`. The settings are those of PythonSandbox; the limit
    `processes` also counts the shell and the process that controls it.

    Background jobs keep running between commands until the sandbox is reset or closed.
    """

    _inside_files: tuple[str, ...] = ("base", "processes", "shell")

    async def run(self, command: str, timeout: float = 10.0) -> ShellResult:
        """Run one or more lines of commands in the shell. Standard input is empty.

        After `timeout` seconds the command receives SIGINT and, if it is still running 0.2 s later, SIGKILL. The shell,
        its variables and the background jobs of earlier commands survive. If the command still does not end, all
        processes in the sandbox are killed, and the next command gets a new shell with the same files.

        Raises:  SandboxError if the sandbox is closed or cannot be restarted. Failures of a command are not raised.
        """
        result, reply = await self._call("run", timeout, command=command, cpu_seconds=self.limits.cpu_seconds)
        answer = reply.get("answer")
        answer = answer if isinstance(answer, dict) else {}
        code = answer.get("exit")
        code = code if type(code) is int and -(2**31) <= code < 2**31 else None
        ended = code is None or bool(answer.get("ended"))
        limit = _SIGNALS.get(code) if result.limit is None and code is not None else result.limit
        error = None if code is not None else result.error or "the shell exited unexpectedly"
        if result.timed_out and code is not None:
            error = f"stopped: time limit of {timeout:g} s exceeded"
        elif limit is not None and code is not None and code != 0:
            error = f"{limit} limit exceeded; exit status {code}"
        stderr = _NO_TERMINAL.sub("", result.stderr)
        if ended:
            stderr = stderr.removesuffix("exit\n")  # bash prints this when it exits
        elif result.limit is not None:
            stderr = _INTERRUPTED.sub("", stderr)
        return ShellResult(
            stdout=result.stdout,
            stderr=stderr,
            error=error,
            seconds=result.seconds,
            truncated=result.truncated,
            timed_out=result.timed_out,
            died=ended,
            limit=limit,
            files_lost=result.files_lost,
            exit_code=code,
        )

    async def run_agent(self, command: Sequence[str], endpoint: Any, timeout: float = 3600.0) -> ShellResult:
        """Run a command-line agent, which reaches the policy through an endpoint.

        The agent gets the variables of `endpoint.env`, such as OPENAI_BASE_URL, with the address of a port on the
        sandbox's own loopback interface. The port exists while the command runs, and serves only the endpoint's chain.
        To set further variables, let the command begin with "env", as in ["env", "DEBUG=1", "mini", "-t", question].

        Args:
            command: program and arguments. The program must be visible in the sandbox, for example because it is
                installed next to this Python.
            endpoint: the endpoint of the chain, a parameter of the harness.
            timeout: time limit in seconds, including the time in which the policy samples.

        Raises:  IsolationError with isolation="landlock", which allows no sockets; SandboxError as for `run`.
        """
        from .agents import run_agent

        return await run_agent(self, command, endpoint, timeout)

    async def fork(self, into: ShellSandbox) -> None:
        """Copy the files and the shell's state (directory, variables, functions, options) to another sandbox.

        With isolation="landlock" or "none", the folder of the copy has another path; paths in files are not adjusted.
        Modification times are preserved except with isolation="landlock", which forbids setting them.

        Raises:  SandboxError if a background process is running, because it cannot be copied, or if the kernel does not
                 list processes, so that background processes cannot be ruled out. `into` is then reset.
        """
        async with self._copying(into):
            state = await self._request_locked("dump")
            await self._check_background(shells=0 if state is None else 1)
            await self._copy_home(into)
            if state is not None:
                await into._request_locked("load", state=state, old=await self._request_locked("home"))

    async def _check_background(self, shells: int) -> None:
        """Raise SandboxError if processes other than the interpreter and `shells` shells are running in the sandbox."""
        processes = await self.count_processes()
        if processes is None:
            raise SandboxError(f"this {type(self).__name__} cannot fork: this kernel does not list its processes")
        if (others := processes - 1 - shells) > 0:
            raise SandboxError(
                f"this {type(self).__name__} cannot fork while background processes are running, got {others}"
            )
