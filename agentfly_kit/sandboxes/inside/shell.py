"""The shell of a ShellSandbox, from inside: one bash that reads a command, runs it in itself, and tells its status.

It follows base.py in one namespace. The bash is interactive without a terminal, because only such a one drops what
it runs when it is interrupted and goes on to the next command with its variables. It writes straight into the
interpreter's own stdout and stderr, so that output survives whatever is killed.
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

from .base import CALLS, Refused, base, home

# Together less than what the host waits between its interrupt and its kill (0.5 s).
INTERRUPT_SECONDS, KILL_SECONDS = 0.2, 0.2
# Options first (a function's text may need extglob), `set` last (with errexit a failing line would end the shell). The
# lines for variables that nobody may set fail, and are meant to.
DUMP = (
    "{ builtin shopt -p; builtin declare -p; builtin declare -f; builtin alias -p; builtin trap -p; builtin umask -p; "
    "builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin set +o; } >"
)


def quoted(text: str) -> str:
    """One line that bash reads as this text: no newline in it, so that no prompt for more lines is written."""
    plain = b'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 /.,_-=+:;|&<>(){}[]$"#@%^*~`?!'
    return "$'" + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode("utf-8", "surrogateescape")) + "'"


def descendants(root: int) -> set[int]:
    """Every living process that descends from `root`; empty where the kernel keeps no list of children."""
    found: set[int] = set()
    unseen = [root]
    while unseen:
        pid = unseen.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as lines:
                    children = [int(child) for child in lines.read().split()]
                found |= set(children)
                unseen += children
        except OSError:
            continue
    return {pid for pid in found if not is_dead(pid)}


def is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Shell:
    """One bash."""

    def __init__(self, folder: str) -> None:
        program = shutil.which("bash")
        if program is None:
            raise Refused("there is no bash in this sandbox; install bash")
        commands, self.commands = os.pipe()
        self.statuses, statuses = os.pipe()
        errors = os.dup(2)
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
        environment |= {"PS1": "", "PS2": "", "SHELL": program}
        self.status_number = statuses
        self.process = subprocess.Popen(
            [program, "--norc", "--noprofile", "--noediting", "-i"], stdin=commands, stderr=subprocess.DEVNULL,
            pass_fds=[statuses, errors], start_new_session=True, env=environment, cwd=folder,
        )  # fmt: skip
        for descriptor in (commands, statuses, errors):
            os.close(descriptor)
        # What it said until here was that there is no terminal.
        self.send(f"exec 2>&{errors} {errors}>&-; set +o history +o histexpand; unset HISTFILE PS1 PS2")
        self.seen = b""
        self.known: set[int] = set()
        self.running = ""

    def send(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(self.commands, data) :]

    def begin(self, command: str) -> None:
        """Let it run a command. Status and commands travel on files that the command itself does not have."""
        self.known = descendants(self.process.pid)
        self.running = secrets.token_hex(8)
        line = f"eval {quoted(command)} </dev/null {self.status_number}>&-"
        self.send(f"{line}\nbuiltin printf '%s %s\\n' {self.running} \"$?\" >&{self.status_number}")

    def status(self, seconds: float | None) -> int | None:
        """The command's exit status; None if there is none in time, or ever, because the shell has ended."""
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
                    return None
                self.seen += data

    def stop(self) -> int | None:
        """Interrupt what runs, as Ctrl-C would; kill what does not care. The shell and older jobs live on.

        Where no process can be seen (the level "landlock") nothing is killed here, and the host kills all.
        """
        self.signal(signal.SIGINT)
        status = self.status(INTERRUPT_SECONDS)
        deadline = time.monotonic() + KILL_SECONDS
        while status is None and time.monotonic() < deadline:
            for pid in descendants(self.process.pid) - self.known:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            status = self.status(0.02)
        return status

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except OSError:
            pass

    def raise_cpu_limit(self, cpu_seconds: float | None) -> None:
        """Processor time for one more command: the shell's own runs on from call to call."""
        if cpu_seconds is None or not hasattr(resource, "prlimit"):
            return
        try:
            with open(f"/proc/{self.process.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            hard = resource.prlimit(self.process.pid, resource.RLIMIT_CPU)[1]
            resource.prlimit(self.process.pid, resource.RLIMIT_CPU, (int(used + cpu_seconds) + 1, hard))
        except OSError:
            pass  # it has ended, or hides: the next lines see it

    def end(self) -> int:
        """Kill it if it lives; its exit status, as a shell counts: 128 + the signal."""
        if self.process.poll() is None:
            try:
                self.process.wait(0.05)  # it may be on its way out
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        for descriptor in (self.commands, self.statuses):
            os.close(descriptor)
        return 128 - code if code < 0 else code


class Current:
    """Where the one shell is kept."""

    shell: Shell | None = None


def get_shell(folder: str) -> Shell:
    if Current.shell is None or Current.shell.process.poll() is not None:
        if Current.shell is not None:
            Current.shell.end()  # a background job of the model's killed it
        Current.shell = None
        Current.shell = Shell(base(folder))
    return Current.shell


def run(command: str, folder: str, cpu_seconds: float | None) -> dict[str, Any]:
    """{"exit": its status or None, "ended": the shell is gone with it}"""
    if "\0" in command:
        raise Refused("a command cannot hold the character NUL")
    began = False
    status: int | None = None
    try:
        shell = get_shell(folder)
        shell.raise_cpu_limit(cpu_seconds)
        shell.begin(command)
        began = True
        status = shell.status(None)
    except Refused:
        raise
    except BaseException:  # the time is up (KeyboardInterrupt, the processor's), or the shell died under our hands
        if Current.shell is not None and began and status is None:
            status = Current.shell.stop()
    ended = status is None
    if status is None and Current.shell is not None:
        status = Current.shell.end()
        Current.shell = None
    return {"exit": status, "ended": ended}


def dump() -> str | None:
    """The shell's folder, variables, functions and options, as commands; None if no shell is running."""
    if Current.shell is None or Current.shell.process.poll() is not None:
        return None
    path = os.path.join(home(), ".agentfly-shell-state")
    try:
        run(f"{DUMP}{quoted(path)} 2>/dev/null", "", None)
        with open(path, errors="surrogateescape") as file:
            return file.read()
    finally:
        if os.path.exists(path):
            os.unlink(path)


def load(state: str, old: str, folder: str) -> None:
    """Bring a new shell into the state that `dump` told. `old`: the home it comes from."""
    path = os.path.join(home(), ".agentfly-shell-state")
    with open(path, "w", errors="surrogateescape") as file:
        file.write(state if old == home() else state.replace(old, home()))
    run(f"builtin source {quoted(path)} 2>/dev/null", folder, None)
    os.unlink(path)


CALLS |= {"run": run, "dump": dump, "load": load, "home": home}
