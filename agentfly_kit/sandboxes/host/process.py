"""The process of one sandbox, seen from the host: starting it, and ending it without leaving anything behind.

Everything here may block briefly, so it is called on threads of its own or at exit, not on an event loop. A
`SandboxProcess` owns all resources that must be cleaned up: process, control socket, control group, scratch folder.
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
_EXIT_SECONDS = 0.5  # s: grace period for a zygote to exit before it is killed
_PRELUDE = 'for file in $JOIN; do echo 0 > "$file" || exit 97; done; unset JOIN; exec "$@"'


class Spawner:
    """A single thread that starts all sandboxes and lives as long as the process.

    PR_SET_PDEATHSIG takes effect when the parent *thread* ends, so a sandbox started from a thread of a thread pool
    would die with that thread.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Schedule a call on the spawner's thread."""
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
    spawner = Spawner()  # threads do not survive a fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SandboxProcess:
    """A started zygote and its resources. Created by `launch` and released by `destroy`, which is idempotent."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.group: Group | None = None
        self.scratch: str | None = None
        self.errors: BinaryIO | None = None
        self.data: socket.socket | None = None  # host's ends of the channels to the interpreter
        self.pipes: tuple[int, ...] = ()
        self.dropped = False  # ended on purpose by this host
        self._lock = threading.Lock()
        self._destroyed = False

    @property
    def alive(self) -> bool:
        """True if the process is running and was not destroyed."""
        return not self._destroyed and self.process is not None and self.process.poll() is None

    def disconnect(self) -> None:
        """Close the host's ends of all channels, so that the zygote kills its children and exits. Never blocks."""
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
        """Return the last line on the stderr of the starting process: the reason why it failed."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read(65536).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def destroy(self) -> None:
        """End the process and release all resources. Blocks for about 2 ms, at most a few seconds."""
        with self._lock:
            if self._destroyed:
                return
            self._destroyed = True
            self.disconnect()
            if os.getpid() != self.owner_pid:
                return  # a fork of the host process does not own the sandbox
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
        """Kill the process and wait for it to exit. `destroy` releases its other resources."""
        if self.process is not None and self.process.poll() is None and os.getpid() == self.owner_pid:
            self._kill(self.process)

    def kill(self) -> None:
        """Like `destroy`, but without a grace period."""
        if not self._destroyed:
            self.stop()
        self.destroy()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its descendants. Without namespaces, descendants would survive a dead zygote."""
        _signal(process.pid, signal.SIGSTOP)  # a stopped process still adopts orphaned descendants
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
    """Delete folders left by killed processes, once per process. `isolation.hierarchy` does so for control groups."""
    reaper.reap_folders()


def launch(
    level: str, limits: Limits, preload: Sequence[str], max_output: int, packages: bool = True
) -> SandboxProcess:
    """Start a zygote; must be called on the spawner's thread. Takes 2 ms, or up to 20 ms with a control group.

    Returns before the zygote is ready. It processes commands sent on the control socket as soon as it is.

    Raises:  SandboxError if the process cannot be started.
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
            # The group's limit kills the process. This one raises a MemoryError first, which preserves variables.
            rlimits["RLIMIT_DATA"] = limits.memory_mb * _MEBIBYTE
        if limits.disk_mb is not None:
            rlimits["RLIMIT_FSIZE"] = limits.disk_mb * _MEBIBYTE
        own_user = level == "landlock" and groups is None and isolation.own_user_namespace()
        if limits.processes is not None and groups is None and level != "none":
            # In its own user namespace the zygote counts too; otherwise all processes of this user do.
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
            # A shell enters the group and then execs the sandbox. A preexec_fn would run Python between fork and exec,
            # where a lock held by another thread could deadlock, and would make fork copy a large host process.
            environment = {**environment, "JOIN": " ".join(handle.group.procs_files)}
            command = ["/bin/sh", "-c", _PRELUDE, "sandbox", *command]
        handle.process = subprocess.Popen(
            command, env=environment, cwd=folder or "/", pass_fds=passed, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=handle.errors,
        )  # fmt: skip
        if handle.group is not None and _lists_children():
            _confine(handle.group, handle.process)
        with contextlib.suppress(BrokenPipeError):  # it has exited already; waiting for its answer reports why
            host.sendall(line)  # the zygote starts nothing before it has the settings
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
    """Move a process that was just started, and its descendants, into its control group.

    This is done while the process starts, not before, because the first move after a pause waits for a kernel grace
    period of 10 to 20 ms, during which bubblewrap and Python can start.

    Raises:  OSError if the kernel refuses.
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
    """Return True if the kernel lists the children of a process; otherwise some could escape their limits."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _processes_of_this_user() -> int:
    """Count the processes of this user, including threads, as RLIMIT_NPROC does."""
    uid, count = os.getuid(), 0
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += len(os.listdir(f"{folder.path}/task"))
            except OSError:
                continue  # it has ended in the meantime
    return count
