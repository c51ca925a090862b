"""One sandbox's process on the host's side: started, held, and ended without a trace.

Knows nothing of event loops or of Python code: everything here blocks for a moment, and runs on a thread of its own
or at exit. A `SandboxProcess` owns all that must not be left behind: process, control socket,
control group, scratch folder.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
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

from ...errors import SandboxError
from ..inside import zygote
from . import isolation, reaper, seccomp
from .limits import Group, Limits

T = TypeVar("T")

_MEBIBYTE = 2**20
_EXIT_SECONDS = 0.5  # s: how long an ending zygote may take before it is killed
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


class SandboxProcess:
    """A started zygote and all that belongs to it. Made by `launch`, ended by `destroy`, which may be called twice."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.group: Group | None = None
        self.scratch: str | None = None
        self.errors: BinaryIO | None = None
        self.data: socket.socket | None = None  # the host's ends of the interpreter's channels
        self.pipes: tuple[int, ...] = ()
        self.dropped = False  # ended by its own host, which knows why
        self._lock = threading.Lock()
        self._destroyed = False

    @property
    def alive(self) -> bool:
        return not self._destroyed and self.process is not None and self.process.poll() is None

    def disconnect(self) -> None:
        """Close the host's ends; the zygote then kills all and exits. Never blocks."""
        self.close_channels()
        if self.control is not None:
            self.control.close()
        if self.errors is not None:
            self.errors.close()
            self.errors = None

    def close_channels(self) -> None:
        """Close the channels to the interpreter."""
        pipes, self.pipes = self.pipes, ()
        for pipe in pipes:
            os.close(pipe)
        if self.data is not None:
            self.data.close()
            self.data = None

    def last_error_line(self) -> str:
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
            self.disconnect()
            if os.getpid() != self.owner_pid:
                return  # a forked copy of the host process: the sandbox is not its own
            process = self.process
            if process is not None:
                try:
                    process.wait(_EXIT_SECONDS)
                except subprocess.TimeoutExpired:
                    self._kill(process)
            if self.group is not None:
                self.group.kill()
                self.group.remove()
            if self.scratch is not None:
                shutil.rmtree(self.scratch, ignore_errors=True)

    def stop(self) -> None:
        """Kill it where it stands, and wait for that; what is left of it is `destroy`'s."""
        if self.process is not None and self.process.poll() is None and os.getpid() == self.owner_pid:
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
            pids = [pid for pid in zygote.descendants(process.pid) if not zygote.is_dead(pid)]
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.001)
        process.kill()
        process.wait()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


@functools.cache
def _reap() -> None:
    """Once, before the first start: what killed processes left here. Control groups: see isolation.hierarchy."""
    reaper.reap_folders()


def launch(
    level: str, limits: Limits, preload: Sequence[str], max_output: int, packages: bool = True
) -> SandboxProcess:
    """Start a zygote, on the spawner's thread. Takes 2 ms, up to 20 where it is moved into its control group; what it
    is told on the control socket from then on it does once it is up.

    Raises:  SandboxError if it cannot be started at all.
    """
    _reap()
    handle = SandboxProcess()
    passed: list[int] = []
    opened: list[socket.socket | BinaryIO] = []
    strict = level == "strict"
    try:
        groups = isolation.hierarchy()
        if groups is not None:
            handle.group = Group(groups, limits)
        host, inside = socket.socketpair()
        opened.append(inside)
        handle.control = host
        host.setblocking(False)
        folders = isolation.python_folders(packages)
        passed.append(inside.fileno())
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 512}
        if limits.memory_mb is not None:
            # Beside the group's limit, which kills: this one gives a MemoryError, and the variables live.
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MEBIBYTE
        if limits.disk_mb is not None:
            rlimits["RLIMIT_FSIZE"] = limits.disk_mb * _MEBIBYTE
        own_user = level == "landlock" and groups is None and isolation.own_user_namespace()
        if limits.processes is not None and groups is None and level != "none":
            # In a user namespace of its own the zygote is counted too; without one, all that this user has.
            rlimits["RLIMIT_NPROC"] = limits.processes + (1 if strict or own_user else _processes_of_this_user() + 1)
        folder = None
        if not strict:
            handle.scratch = folder = tempfile.mkdtemp(prefix=f"{reaper.SCRATCH}{reaper.owner_tag()}-")
        home = folder or isolation.STRICT_HOME
        place = isolation.inside_path if strict else str
        version = isolation.landlock_version() if level == "landlock" else None
        program = b""
        if level == "landlock":
            program = seccomp.program(landlock=version, network=limits.network) or b""
        settings = {
            "op": "settings", "rlimits": rlimits, "cpu_seconds": limits.cpu_seconds, "max_output": max_output,
            "wipe": ["/tmp", "/dev/shm"] if strict else [folder],
            "keep": [place(path) for path in folders],
            "path": [place(path) for path in isolation.packages()] if packages else [],
            "preload": list(preload),
            "own_user": own_user,
            "pdeathsig": not strict, "scratch": folder, "executable": place(isolation.inside_python(packages)),
            "filter": program.hex(),
            "landlock": isolation.landlock_rules(home, limits, packages) if level == "landlock" else None,
        }  # fmt: skip
        line = json.dumps(settings).encode() + b"\n"
        handle.errors = tempfile.TemporaryFile()  # noqa: SIM115
        program_file = isolation.worker_file()
        opened.append(program_file)
        passed.append(program_file.fileno())
        command: list[str] = []
        if strict:
            filter_ = isolation.seccomp_file()
            assert filter_ is not None, "strict without a call filter: the probe must have refused it"
            opened.append(filter_)
            passed.append(filter_.fileno())
            command, environment = isolation.strict_command(limits, filter_.fileno(), packages=packages)
        else:
            environment = isolation.environment(home, os.environ.get("PATH", os.defpath))
        command += isolation.run_worker(program_file.fileno(), "zygote", str(inside.fileno()))
        if handle.group is not None and not _lists_children():
            # A shell enters the group and becomes the sandbox: no code of ours runs between fork and exec, where
            # another thread's lock could hang it, and a big host process is not copied.
            environment = {**environment, "JOIN": " ".join(handle.group.procs_files)}
            command = ["/bin/sh", "-c", _PRELUDE, "sandbox", *command]
        handle.process = subprocess.Popen(
            command, env=environment, cwd=folder or "/", pass_fds=passed, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=handle.errors,
        )  # fmt: skip
        if handle.group is not None and _lists_children():
            _confine(handle.group, handle.process)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and whoever waits for its answer says why
            host.sendall(line)  # until it has this, the zygote starts nothing
    except BaseException as error:
        handle.destroy()
        if isinstance(error, OSError):
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        raise
    finally:
        for each in opened:
            each.close()
    return handle


def _confine(group: Group, process: subprocess.Popen[bytes]) -> None:
    """Put what has just been started under its limits, and what it has started meanwhile.

    Beside it, not before: after any pause the kernel makes whoever moves a process wait for all processors, 10 to 20
    ms, in which bubblewrap and Python start.
    Raises:  OSError if it is refused.
    """
    for _ in range(100):
        outside = {process.pid, *zygote.descendants(process.pid)} - set(group.processes())
        if not outside or process.poll() is not None:
            return
        for pid in outside:
            with contextlib.suppress(ProcessLookupError):
                group.enter(pid)
    raise OSError(f"{len(outside)} of its processes did not enter their control group")


@functools.cache
def _lists_children() -> bool:
    """Whether the kernel tells a process's children. One that does not could hide some from their limits."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _processes_of_this_user() -> int:
    """With their threads, as the kernel counts them."""
    uid, count = os.getuid(), 0
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += len(os.listdir(f"{folder.path}/task"))
            except OSError:
                continue  # it ended meanwhile
    return count
