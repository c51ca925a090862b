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
import select
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


class Adopted:
    """A process that is not our child, with the methods of Popen that are used here; no other can take its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file: int | None = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self.wait(0) if self._file is not None else 0

    def wait(self, timeout: float | None = None) -> int | None:
        """0 when it has ended; None when the time is up."""
        with self._lock:
            if self._file is None:
                return 0
            poll = select.poll()
            poll.register(self._file, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                return None
            os.close(self._file)
            self._file = None
            return 0

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._file is not None:
                signal.pidfd_send_signal(self._file, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]


class SandboxProcess:
    """A started zygote and all that belongs to it. Made by `launch`, ended by `destroy`, which may be called twice."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[bytes] | Adopted | None = None
        self.hub: Hub | None = None
        self.settings: bytes | None = None  # still to be sent, when a hub's child has said who it is
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

    def adopt(self, pid: int) -> None:
        """A hub's child has said its number. Raises OSError if it is gone already."""
        self.process = Adopted(pid)

    @property
    def confined(self) -> bool:
        """Whether the process stands under its limits, as far as a control group holds them."""
        return self.group is None or (self.process is not None and self.group.contains(self.process.pid))

    def confine(self) -> None:
        """Put it there. May block for 20 ms; raises OSError if it is gone already, or refused."""
        assert self.group is not None and self.process is not None
        self.group.enter(self.process.pid)

    def instruct(self) -> None:
        """Tell a hub's child what it is to be. Raises OSError if it is gone already."""
        assert self.control is not None and self.settings is not None
        self.control.sendall(self.settings)
        self.settings = None

    def last_error_line(self) -> str:
        """The last line that the starting process wrote to its stderr: why it did not start."""
        if self.hub is not None:
            return self.hub.last_error_line()
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
                    gone = process.wait(_EXIT_SECONDS) is not None
                except subprocess.TimeoutExpired:
                    gone = False
                if not gone:
                    self._kill(process)
            if self.hub is not None:
                self.hub.leave()
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
    def _kill(process: subprocess.Popen[bytes] | Adopted) -> None:
        """Kill it and all below it: without namespaces, what a dead zygote leaves behind is nobody's."""
        if isinstance(process, Adopted):  # the first of a process namespace, which ends with it
            process.kill()
            process.wait()
            return
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


class Hub(SandboxProcess):
    """A bubblewrap in which one warm Python forks a zygote for each sandbox. Ends when the last of them has."""

    open: dict[object, Hub] = {}  # noqa: RUF012  (one for all: what they share is the point)
    lock = threading.Lock()

    def __init__(self, key: object) -> None:
        super().__init__()
        self.key = key
        self.users = 0

    @classmethod
    def find(cls, limits: Limits, preload: Sequence[str], packages: bool, folders: Sequence[str]) -> Hub:
        """The one with these settings, or a new one; the caller is one more user of it, until `leave`."""
        key = (limits.network, tuple(preload), packages, tuple(folders))
        with cls.lock:
            hub = cls.open.get(key)
            if hub is None or not hub.alive or hub.owner_pid != os.getpid():
                hub = cls.open[key] = Hub(key)
                try:
                    hub.launch(limits, preload, packages)
                except BaseException:
                    del cls.open[key]
                    hub.destroy()
                    raise
            hub.users += 1
            return hub

    def launch(self, limits: Limits, preload: Sequence[str], packages: bool) -> None:
        host, inside = socket.socketpair()
        with inside, isolation.worker_file() as program:
            self.control = host
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115
            command, environment = isolation.shared_command(limits, packages=packages)
            settings = {
                "op": "settings", "path": [isolation.inside_path(path) for path in isolation.packages() if packages],
                "preload": ["traceback", *preload],
            }  # fmt: skip
            host.sendall(json.dumps(settings).encode() + b"\n")
            self.process = subprocess.Popen(
                [*command, *isolation.run_worker(program.fileno(), "hub", str(inside.fileno()))],
                env=environment, cwd="/", pass_fds=[inside.fileno(), program.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors,
            )  # fmt: skip

    def bear(self, inside: socket.socket, network: bool, group: Group | None) -> None:
        """Have a zygote forked that holds this end of its control socket, and begins in this control group."""
        assert self.control is not None
        doors = group.doors() if group is not None else []
        try:
            order = {"op": "zygote", "network": network, "doors": len(doors), "version": group and group.version}
            socket.send_fds(self.control, [json.dumps(order).encode() + b"\n"], [inside.fileno(), *doors])
        finally:
            for door in doors:
                os.close(door)

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users > 0:
                return
            if self.open.get(self.key) is self:
                del self.open[self.key]
        self.destroy()


@functools.cache
def _reap() -> None:
    """Once, before the first start: what killed processes left here. Control groups: see isolation.hierarchy."""
    reaper.reap_folders()


def launch(
    level: str, limits: Limits, preload: Sequence[str], max_output: int, packages: bool = True
) -> SandboxProcess:
    """Start a zygote, on the spawner's thread. Takes 2 ms, up to 20 where it is moved into its control group; what it
    is told on the control socket from then on it does once it is up.

    At the level "shared" it says "hello" before; then `adopt`, `confine` unless it is `confined`, and `instruct`.

    Raises:  SandboxError if it cannot be started at all.
    """
    _reap()
    handle = SandboxProcess()
    passed: list[int] = []
    opened: list[socket.socket | BinaryIO] = []
    spaces = level in ("strict", "shared")
    try:
        groups = isolation.hierarchy()
        if groups is not None:
            handle.group = Group(groups, limits)
        host, inside = socket.socketpair()
        opened.append(inside)
        handle.control = host
        host.setblocking(False)
        folders = isolation.python_folders(packages)
        if level == "shared":  # it is born while the rest of this is written
            host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            handle.hub = Hub.find(limits, preload, packages, folders)
            handle.hub.bear(inside, limits.network, handle.group)
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
            rlimits["RLIMIT_NPROC"] = limits.processes + (1 if spaces or own_user else _processes_of_this_user() + 1)
        folder = None
        if not spaces:
            handle.scratch = folder = tempfile.mkdtemp(prefix=f"{reaper.SCRATCH}{reaper.owner_tag()}-")
        home = folder or isolation.STRICT_HOME
        place = isolation.inside_path if spaces else str
        own = level != "shared"  # else its packages and preloaded modules are its hub's
        version = isolation.landlock_version() if level == "landlock" else None
        program = b""
        if level in ("shared", "landlock"):
            program = seccomp.program(landlock=version, network=limits.network) or b""
        settings = {
            "op": "settings", "rlimits": rlimits, "cpu_seconds": limits.cpu_seconds, "max_output": max_output,
            "wipe": ["/tmp", "/dev/shm"] if spaces else [folder],
            "keep": [place(path) for path in folders],
            "path": [place(path) for path in isolation.packages()] if packages and own else [],
            "preload": list(preload) if own else [],
            "own_user": own_user,
            "pdeathsig": not spaces, "scratch": folder, "executable": place(isolation.inside_python(packages)),
            "filter": program.hex(), "space": isolation.shared_space(limits) if level == "shared" else None,
            "landlock": isolation.landlock_rules(home, limits, packages) if level == "landlock" else None,
        }  # fmt: skip
        line = json.dumps(settings).encode() + b"\n"
        if level == "shared":
            handle.settings = line
            return handle
        handle.errors = tempfile.TemporaryFile()  # noqa: SIM115
        program_file = isolation.worker_file()
        opened.append(program_file)
        passed.append(program_file.fileno())
        command: list[str] = []
        if level == "strict":
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
