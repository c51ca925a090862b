"""One sandbox's process on the host's side: started, held, and ended without a trace.

Knows nothing of event loops or of Python code: everything here blocks for a moment, and runs on a thread of its own
or at exit. A `Vessel` owns all that must not be left behind: process, control socket, control group, scratch folder.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

from ..errors import SandboxError
from . import isolation, worker
from .limits import Group, Limits

T = TypeVar("T")

_MEBIBYTE = 2**20
_PATIENCE = 0.5  # s: how long an ending zygote may take before it is killed
_PRELUDE = 'for file in $JOIN; do echo 0 > "$file" || exit 97; done; unset JOIN; exec "$@"'


class Spawner:
    """One thread, alive as long as the process, from which everything is started.

    The kernel's "die with your parent" means the parent's *thread*: a sandbox started from a thread of a pool dies when
    that thread does.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="agentfly-spawner", daemon=True)
                self._thread.start()
        self._work.put(work)
        return future

    def _serve(self) -> None:
        while True:
            self._work.get()()


spawner = Spawner()


def _after_fork() -> None:
    global spawner
    spawner = Spawner()  # the thread is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Vessel:
    """A started zygote and all that belongs to it. Made by `launch`, ended by `destroy`, which may be called twice."""

    def __init__(self) -> None:
        self.maker = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.group: Group | None = None
        self.scratch: str | None = None
        self.errors: BinaryIO | None = None
        self.data: socket.socket | None = None  # the host's ends of the interpreter's channels
        self.pipes: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._destroyed = False

    @property
    def alive(self) -> bool:
        return not self._destroyed and self.process is not None and self.process.poll() is None

    def hang_up(self) -> None:
        """Close the host's ends; the zygote then kills all and exits. Never blocks."""
        self.cut()
        if self.control is not None:
            self.control.close()
        if self.errors is not None:
            self.errors.close()
            self.errors = None

    def cut(self) -> None:
        """Close the channels to the interpreter."""
        pipes, self.pipes = self.pipes, ()
        for pipe in pipes:
            os.close(pipe)
        if self.data is not None:
            self.data.close()
            self.data = None

    def said(self) -> str:
        """The last line that the starting process wrote to its stderr: why it did not start."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read(65536).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def destroy(self) -> None:
        """End it and take everything away. Blocks for about 2 ms, at most a few seconds."""
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True
            self.hang_up()
            if os.getpid() != self.maker:
                return  # a forked copy of the host process: the sandbox is not its own
            process = self.process
            if process is not None:
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    self._kill(process)
            if self.group is not None:
                self.group.kill()
                self.group.remove()
            if self.scratch is not None:
                shutil.rmtree(self.scratch, ignore_errors=True)

    def stop(self) -> None:
        """Kill it where it stands, and wait for that; what is left of it is `destroy`'s."""
        if self.process is not None and self.process.poll() is None and os.getpid() == self.maker:
            self._kill(self.process)

    def kill(self) -> None:
        """As `destroy`, without asking first."""
        if not self._destroyed:
            self.stop()
        self.destroy()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill it and all below it: without namespaces, what a dead zygote leaves behind is nobody's."""
        _signal(process.pid, signal.SIGSTOP)  # stopped, it still adopts the orphans that its children leave
        for _ in range(100):
            below = [pid for pid in worker.descendants(process.pid) if not _is_dead(pid)]
            for pid in below:
                _signal(pid, signal.SIGKILL)
            if not below:
                break
            time.sleep(0.001)
        process.kill()
        process.wait()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def launch(level: str, limits: Limits, preload: Sequence[str], max_output: int) -> Vessel:
    """Start a zygote, on the spawner's thread. Takes about 2 ms; it says "ready" on the control socket later.

    Raises:  SandboxError if it cannot be started at all.
    """
    vessel = Vessel()
    passed: list[int] = []
    opened: list[socket.socket | BinaryIO] = []
    try:
        groups = isolation.hierarchy()
        if groups is not None:
            vessel.group = Group(groups, limits)
        host, inside = socket.socketpair()
        opened.append(inside)
        vessel.control = host
        host.setblocking(False)
        passed.append(inside.fileno())
        vessel.errors = tempfile.TemporaryFile()  # noqa: SIM115
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 512}
        if limits.memory_mb is not None:
            # Beside the group's limit, which kills: this one gives a MemoryError, and the variables live.
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MEBIBYTE
        if limits.disk_mb is not None:
            rlimits["RLIMIT_FSIZE"] = limits.disk_mb * _MEBIBYTE
        if level == "strict":
            filter_ = isolation.seccomp_file()
            assert filter_ is not None, "strict without a call filter: the probe must have refused it"
            opened.append(filter_)
            passed.append(filter_.fileno())
            command, environment = isolation.strict_command(limits, filter_.fileno())
            script, home, wipes, folder = isolation.STRICT_WORKER, isolation.STRICT_HOME, ["/tmp", "/dev/shm"], None
            if limits.processes is not None and groups is None:
                rlimits["RLIMIT_NPROC"] = limits.processes + 1  # counted in its own user namespace, with the zygote
        else:
            vessel.scratch = folder = tempfile.mkdtemp(prefix=f"agentfly-sandbox-{os.getpid()}-")
            command, script, home, wipes = [], str(isolation.WORKER), folder, [folder]
            environment = isolation.environment(home, os.environ.get("PATH", os.defpath))
        place = isolation.seen if level == "strict" else str
        settings = {
            "op": "settings", "rlimits": rlimits, "cpu_seconds": limits.cpu_seconds, "max_output": max_output,
            "wipe": wipes, "keep": [place(path) for path in isolation.python_folders()],
            "path": [place(path) for path in isolation.packages()], "preload": list(preload),
            "pdeathsig": level == "none", "scratch": folder, "executable": place(isolation.shown_python()),
        }  # fmt: skip
        host.sendall(json.dumps(settings).encode() + b"\n")
        command = [*command, isolation.python(), "-s", "-S", script, str(inside.fileno())]
        if vessel.group is not None:
            # A shell enters the group and becomes the sandbox: no code of ours runs between fork and exec, where
            # another thread's lock could hang it, and a big host process is not copied.
            environment = {**environment, "JOIN": " ".join(vessel.group.joins)}
            command = ["/bin/sh", "-c", _PRELUDE, "sandbox", *command]
        vessel.process = subprocess.Popen(
            command, env=environment, cwd=folder or "/", pass_fds=passed, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=vessel.errors,
        )  # fmt: skip
    except BaseException as error:
        vessel.destroy()
        if isinstance(error, OSError):
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        raise
    finally:
        for each in opened:
            each.close()
    return vessel
