"""Start the process of a sandbox from the host, and end it without leaving anything behind.

All functions here may block briefly, so they are called on separate threads or at exit, never on an event loop.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from ...errors import SandboxError
from ..inside import processes
from ..inside.frames import Channels
from . import commands, isolation, reaper, seccomp
from .cgroups import Group, Usage
from .limits import Limits

_EXIT_SECONDS = 0.5  # a zygote that has not exited after this time is killed
_PRELUDE = 'for file in $JOIN; do echo 0 > "$file" || exit 97; done; unset JOIN; exec "$@"'


spawner: concurrent.futures.ThreadPoolExecutor
container_spawner: concurrent.futures.ThreadPoolExecutor


def _make_executors() -> None:
    # PR_SET_PDEATHSIG kills a sandbox when the thread that started it ends, so sandboxes are started on a thread that
    # outlives all event loops. Containers are started on other threads, several at a time.
    global spawner, container_spawner
    spawner = concurrent.futures.ThreadPoolExecutor(1, "agentfly-spawner")
    container_spawner = concurrent.futures.ThreadPoolExecutor(8, "agentfly-container")


_make_executors()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_executors)  # threads do not survive a fork


class SandboxProcess(Channels):
    """A started zygote and its resources: process, sockets, control group, scratch folder. `destroy` releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.owner_pid = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.group: Group | None = None
        self.usage = Usage()
        self.scratch: str | None = None
        self.errors: BinaryIO | None = None
        self.dropped = False  # True if this host ended the sandbox deliberately
        self._lock = threading.Lock()
        self._destroyed = False

    @property
    def alive(self) -> bool:
        """True if the process is running and has not been destroyed."""
        return not self._destroyed and self.process is not None and self.process.poll() is None

    def disconnect(self) -> None:
        """Close the host's ends of all channels, so that the zygote kills its children and exits. Never blocks."""
        self.close_channels()
        if self.control is not None:
            self.control.close()
        if self.errors is not None:
            self.errors.close()
            self.errors = None

    def last_error_line(self) -> str:
        """Return the last line that the process wrote to stderr, usually the reason why it failed to start."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read(65536).decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def destroy(self) -> None:
        """End the process and release all resources. Blocks for about 2 ms, at most a few seconds."""
        # ExitStack runs every step, even if SIGINT raises KeyboardInterrupt during an earlier one.
        with self._lock, contextlib.ExitStack() as last_first:
            if self._destroyed:
                return
            self._destroyed = True
            owned = os.getpid() == self.owner_pid  # a fork of the host process does not own the sandbox
            if owned and self.scratch is not None:
                last_first.callback(shutil.rmtree, self.scratch, ignore_errors=True)
            if owned and self.group is not None:
                last_first.callback(self.group.remove)
                last_first.callback(self.group.kill)
            if owned and self.process is not None:
                last_first.callback(self._end_process, self.process)
            last_first.callback(self.disconnect)

    def _end_process(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
        if process.poll() is None:
            self._kill(process)

    def stop(self) -> None:
        """Kill the process and wait for it to exit. `destroy` releases the other resources."""
        if self.process is not None and self.process.poll() is None and os.getpid() == self.owner_pid:
            self._kill(self.process)

    def kill(self) -> None:
        """Like `destroy`, but without a grace period."""
        try:
            if not self._destroyed:
                self.stop()
        finally:
            self.destroy()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its descendants, which would survive it at isolation levels without namespaces."""
        try:
            processes.send(signal.SIGSTOP, process.pid)  # a stopped process still adopts orphaned descendants
            for _ in range(100):
                pids = [pid for pid in processes.descendants(process.pid) if not processes.is_dead(pid)]
                processes.send(signal.SIGKILL, *pids)
                if not pids:
                    break
                time.sleep(0.001)
        finally:
            process.kill()
            process.wait()


# Deletes the scratch folders left behind by host processes that were killed. Only the first call has an effect.
_reap_once = functools.cache(reaper.reap_folders)


def settings_line(limits: Limits, preload: Sequence[str], max_output: int, **more: Any) -> bytes:
    """Return the first message to a zygote, which contains its settings; see `Zygote.handle`."""
    settings: dict[str, Any] = {
        "op": "settings",
        "rlimits": limits.rlimits(),
        "cpu_seconds": limits.cpu_seconds,
        "max_output": max_output,
        "preload": list(preload),
        "path": [],
        "pdeathsig": False,
        "scratch": None,
        "landlock": None,
        "filter": "",
        "user": None,
    }
    return json.dumps(settings | more).encode() + b"\n"


def launch(
    level: str, limits: Limits, preload: Sequence[str], max_output: int, packages: bool, links: Mapping[str, str]
) -> SandboxProcess:
    """Start a zygote without waiting until it is ready. Takes 2 to 20 ms. Must be called on the thread of `spawner`."""
    _reap_once()
    handle = SandboxProcess()
    try:
        with contextlib.ExitStack() as opened:  # closes the files that only the new process needs
            _launch(handle, opened, level, limits, preload, max_output, packages, links)
    except BaseException as error:
        handle.destroy()
        if isinstance(error, OSError):
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        raise
    return handle


def _launch(
    handle: SandboxProcess,
    opened: contextlib.ExitStack,
    level: str,
    limits: Limits,
    preload: Sequence[str],
    max_output: int,
    packages: bool,
    links: Mapping[str, str],
) -> None:
    strict, landlock = level == "strict", level == "landlock"
    groups = isolation.hierarchy()
    if groups is not None:
        handle.group = handle.usage = Group.create(groups, limits)
    handle.control, inside = socket.socketpair()
    opened.enter_context(inside)
    handle.control.setblocking(False)
    program = opened.enter_context(commands.program_file())
    passed = [inside.fileno(), program.fileno()]
    if strict:
        calls = seccomp.program()
        assert calls is not None, "the probe rejects 'strict' without a system-call filter"
        filter_file = opened.enter_context(commands.anonymous_file(calls))
        users = opened.enter_context(commands.anonymous_file(commands.USERS))
        command, environment, more = commands.strict_command(
            limits, filter_file.fileno(), packages=packages, links=links, users_fd=users.fileno()
        )
        passed += more
        level_settings, place = commands.strict_settings(), commands.inside_path
    else:
        handle.scratch = tempfile.mkdtemp(prefix=f"{reaper.SCRATCH}{reaper.owner_tag()}-")
        command, environment = [], commands.environment(handle.scratch, os.environ.get("PATH", os.defpath))
        level_settings, place = {"wipe": [handle.scratch]}, os.fspath
    command += commands.run_zygote(program.fileno(), "zygote", str(inside.fileno()))

    # Without a control group, RLIMIT_NPROC limits the number of processes. RLIMIT_NPROC counts the zygote and, unless
    # the zygote has its own user namespace, all other processes of this user.
    rlimits = limits.rlimits()
    own_user = landlock and groups is None and isolation.own_user_namespace()
    if limits.processes is not None and groups is None and level != "none":
        rlimits["RLIMIT_NPROC"] = limits.processes + 1 + (0 if strict or own_user else _processes_of_this_user())
    if landlock:
        calls = seccomp.program(landlock=commands.landlock_version(), network=limits.network) or b""
        rules = commands.landlock_rules(str(handle.scratch), limits, packages)
        level_settings |= {"filter": calls.hex(), "landlock": rules}
    line = settings_line(
        limits,
        preload,
        max_output,
        rlimits=rlimits,
        own_user=own_user,
        pdeathsig=not strict,
        scratch=handle.scratch,
        keep=[place(path) for path in commands.python_folders(packages)],
        path=[place(path) for path in commands.packages()] if packages else [],
        executable=place(commands.inside_python(packages)),
        **level_settings,
    )

    if handle.group is not None and not _lists_children():
        # A shell enters the control group and then execs the sandbox. A preexec_fn would run Python between fork and
        # exec, where a lock held by another thread could deadlock, and would make fork copy a large host process.
        environment = {**environment, "JOIN": " ".join(handle.group.procs_files)}
        command = ["/bin/sh", "-c", _PRELUDE, "sandbox", *command]
    handle.errors = tempfile.TemporaryFile()  # noqa: SIM115
    handle.process = subprocess.Popen(
        command,
        env=environment,
        cwd=handle.scratch or "/",
        pass_fds=passed,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=handle.errors,
    )
    if handle.group is not None and _lists_children():
        _confine(handle.group, handle.process)
    # If the zygote has already exited, the wait for its answer reports the reason.
    with contextlib.suppress(BrokenPipeError):
        handle.control.sendall(line)  # the zygote starts nothing before it has the settings


def _confine(group: Group, process: subprocess.Popen[bytes]) -> None:
    """Move a process that was just started, and its descendants, into a control group.

    A move can take 10 to 20 ms. The process may start other processes meanwhile, so its descendants are listed
    repeatedly.
    """
    for _ in range(100):
        outside = {process.pid, *processes.descendants(process.pid)} - set(group.members())
        if not outside or process.poll() is not None:
            return
        for pid in outside:
            with contextlib.suppress(ProcessLookupError):
                group.enter(pid)
    raise OSError(f"{len(outside)} processes did not enter the control group")


@functools.cache
def _lists_children() -> bool:
    """Return True if the kernel lists the children of a process, which `_confine` needs in order to move them."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _processes_of_this_user() -> int:
    """Count the processes and threads of this user, as RLIMIT_NPROC does."""
    uid, count = os.getuid(), 0
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += len(os.listdir(f"{folder.path}/task"))
            except OSError:
                continue  # the process has ended in the meantime
    return count
