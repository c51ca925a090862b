"""The part of a ShellSandbox that runs inside: a bash process that evaluates commands and reports exit statuses.

This file runs after base.py and processes.py in the same namespace. Bash runs in interactive mode, though without a
terminal, because only an interactive bash abandons the current command on an interrupt and continues with its variables
intact. Bash writes directly to the interpreter's stdout and stderr, so that output survives any kill.
"""

from __future__ import annotations

import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from .base import CALLS, Refused, home, work_folder
from .processes import descendants, is_dead, send

# The sum of both times must be less than 0.5 s, after which the host kills an interrupted interpreter.
INTERRUPT_SECONDS, KILL_SECONDS = 0.2, 0.2
# These commands print the shell's state as a script. Options come first, because functions may need extglob; `set`
# comes last, because errexit would end the shell at the first error, such as assigning a read-only variable.
DUMP = (
    "{ builtin shopt -p; builtin declare -p; builtin declare -f; builtin alias -p; builtin trap -p; builtin umask -p; "
    "builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin set +o; } >"
)


def quoted(text: str) -> str:
    """Quote text for bash on a single line, so that bash does not print a continuation prompt."""
    plain = b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 /.,_-=+:;|&<>(){}[]$"#@%^*~`?!'
    return (
        "$'" + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode("utf-8", "surrogateescape")) + "'"
    )


class Shell:
    """A running bash process."""

    def __init__(self) -> None:
        program = shutil.which("bash")
        if program is None:
            raise Refused("bash is not installed in this sandbox")
        commands, write_commands = os.pipe()
        self.commands = os.fdopen(write_commands, "wb", buffering=0)
        self.statuses, statuses = os.pipe()
        output, errors = self.output = os.dup(1), os.dup(2)
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
        environment |= {"PS1": "", "PS2": "", "SHELL": program, "PWD": work_folder()}
        self.status_number = statuses
        self.process = subprocess.Popen(
            [program, "--norc", "--noprofile", "--noediting", "-i"],
            stdin=commands,
            stderr=subprocess.DEVNULL,
            pass_fds=[statuses, output, errors],
            start_new_session=True,
            env=environment,
            cwd=work_folder(),
        )
        for descriptor in (commands, statuses, output, errors):
            os.close(descriptor)
        # stderr is discarded up to this line, because bash complains that there is no terminal.
        self.send(f"exec 2>&{errors}; set +o history +o histexpand; unset HISTFILE PS1 PS2")
        self.seen = b""
        self.known: set[int] = set()
        self.running = ""

    def send(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self.commands.fileno(), data) :]

    def begin(self, command: str) -> None:
        """Start a command, which does not inherit the shell's descriptors for commands and exit statuses.

        Each command begins with the original stdout and stderr, even if an earlier one has redirected or closed them.
        """
        self.known = self.processes()
        self.running = secrets.token_hex(8)
        output, errors = self.output
        redirections = f"</dev/null >&{output} 2>&{errors} {output}>&- {errors}>&- {self.status_number}>&-"
        line = f"eval {quoted(command)} {redirections}"
        self.send(f"{line}\nbuiltin printf '%s %s\\n' {self.running} \"$?\" >&{self.status_number}")

    def status(self, seconds: float | None) -> int | None:
        """Wait for the command's exit status. Return None after `seconds`, or if the shell ends without a status."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            *lines, self.seen = self.seen.split(b"\n")
            for line in lines:
                token, _, number = line.decode(errors="replace").partition(" ")
                if token == self.running and number.isdigit():
                    return int(number)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if select.select([self.statuses], [], [], left)[0]:
                data = os.read(self.statuses, 4096)
                if not data:
                    self.wait_for_exit(deadline)
                    return None
                self.seen += data

    def wait_for_exit(self, deadline: float | None) -> None:
        """Wait until `deadline` for the exit of a shell that can no longer report a status."""
        # The shell is exiting, was replaced with a program by `exec`, or has lost its descriptors because the command
        # closed them. In the last case, closing its input makes the shell exit.
        self.commands.close()
        # Popen.wait() would delay an interrupt by 0.25 s.
        while self.process.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.005)

    def stop(self) -> int | None:
        """Interrupt the command. If the command keeps running, kill those of its processes that the kernel lists."""
        self.interrupt()
        status = self.status(INTERRUPT_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while status is None and self.process.poll() is None and time.monotonic() < deadline:
            send(signal.SIGKILL, *(self.processes() - self.known))
            status = self.status(0.02)
        return status

    def interrupt(self) -> None:
        """Send SIGINT to the shell and to the processes of the command."""
        if not descendants(os.getpid()):  # the kernel does not list processes
            send(signal.SIGINT, -self.process.pid)
            return
        # Do not signal the process group, because it contains the jobs of earlier commands, some of which do not ignore
        # the signal. Stop all processes until each has received the signal, because after one has ended, another could
        # exit normally, and the shell would continue with the next command.
        running = sorted(self.processes() - self.known)
        send(signal.SIGSTOP, *running)
        send(signal.SIGINT, self.process.pid, *running)
        send(signal.SIGCONT, *running)

    def processes(self) -> set[int]:
        """Return the pids of living processes that the shell has started, if the kernel lists them."""
        found: set[int] = set()
        # The kernel may leave out some processes while others exit, so list them until there are no new ones.
        while new := set(descendants(self.process.pid)) - found:
            found |= new
        return {pid for pid in found if not is_dead(pid)}

    def raise_cpu_limit(self, cpu_seconds: float | None) -> None:
        """Set the shell's CPU limit to the time used by earlier commands plus `cpu_seconds`."""
        if cpu_seconds is None or not hasattr(resource, "prlimit"):
            return
        try:
            with open(f"/proc/{self.process.pid}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            hard = resource.prlimit(self.process.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.process.pid, resource.RLIMIT_CPU, (int(used + cpu_seconds) + 1, hard))
        except OSError:
            pass  # the shell has exited, or its process is not visible from here

    def end(self) -> int:
        """Kill the shell if it is alive, and return its exit status (128 + n for signal n)."""
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self.commands.close()
        os.close(self.statuses)
        return 128 - code if code < 0 else code


class Current:
    """Holder of the sandbox's only shell."""

    shell: Shell | None = None


def get_shell() -> Shell:
    if Current.shell is None or Current.shell.process.poll() is not None:
        end()  # a background job may have killed the shell
        Current.shell = Shell()
    return Current.shell


def run(command: str, cpu_seconds: float | None) -> dict[str, Any]:
    """Run a command. Return {"exit": exit status or None, "ended": True if the shell has exited}."""
    if "\0" in command:
        raise Refused("a command cannot contain the character NUL")
    began = False
    status: int | None = None
    try:
        shell = get_shell()
        shell.raise_cpu_limit(cpu_seconds)
        # Set `began` before the command can print anything, because an interrupt may follow immediately.
        began = True
        shell.begin(command)
        status = shell.status(None)
    except Refused:
        raise
    except BaseException:  # timeout (KeyboardInterrupt), CPU limit, or death of the shell
        if Current.shell is not None and began and status is None:
            status = Current.shell.stop()
    ended = status is None
    if status is None and Current.shell is not None:
        status = Current.shell.end()
        Current.shell = None
    return {"exit": status, "ended": ended}


def end() -> None:
    """End the shell, so that the next command runs in a new one. Background jobs continue."""
    if Current.shell is not None:
        Current.shell.end()
        Current.shell = None


def dump() -> str | None:
    """Return commands that restore the shell's directory, variables, functions and options; None if no shell runs."""
    if Current.shell is None or Current.shell.process.poll() is not None:
        return None
    path = os.path.join(home(), ".agentfly-shell-state")
    try:
        run(f"{DUMP}{quoted(path)} 2>/dev/null", None)
        with open(path, errors="surrogateescape") as file:
            return file.read()
    finally:
        if os.path.exists(path):
            os.unlink(path)


def load(state: str, old: str) -> None:
    """Restore the state returned by `dump` in a new shell. `old` is the home folder of the dumped shell."""
    path = os.path.join(home(), ".agentfly-shell-state")
    with open(path, "w", errors="surrogateescape") as file:
        file.write(state if old == home() else state.replace(old, home()))
    run(f"builtin source {quoted(path)} 2>/dev/null", None)
    os.unlink(path)


CALLS |= {"run": run, "end": end, "dump": dump, "load": load, "home": home}
