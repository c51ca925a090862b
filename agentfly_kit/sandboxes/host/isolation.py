"""Isolation levels of sandboxes, the guarantees of each level, and the levels available on this machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from agentfly_kit._display import Displayable

from ...errors import IsolationError, IsolationWarning
from . import commands, seccomp
from .cgroups import Group, Hierarchy, find_hierarchy, remove_orphans
from .limits import Limits

LEVELS = ("strict", "landlock", "none")  # best first

NOT_ISOLATED: Mapping[str, tuple[str, ...]] = {
    "strict": (
        "the kernel is shared, so a vulnerability in it is a vulnerability of the sandbox",
        "/usr and the folders of this Python, with its packages, can be read",
        "CPU time is limited per call, but during a call it is not reserved for other sandboxes",
        "facts about the machine can be read: processor, memory, uptime, mount sources",
        "with network=True the whole network of this machine can be reached, including its loopback",
    ),
    "landlock": (
        "the kernel is shared, so a vulnerability in it is a vulnerability of the sandbox",
        "the code runs as your user, without capabilities; /usr and the folders of this Python can be read",
        "code that knows the path of one of your files can read the existence, size and times of the file",
        "facts about the machine can be read: processor, memory, its own control group and that group's limits, and, "
        "by guessing process ids, the number of processes",
        "disk_mb limits the size of each file, not the total size or number of files",
        "without a control group, a process that hides on purpose can outlive the sandbox",
        "with network=True the whole network of this machine can be reached, including its loopback",
        "Landlock before version 6 does not cover signals; the code then cannot send any, even to its own children",
    ),
    "none": (
        "the code runs as you: it reads and writes your files and sees your processes",
        "the network can be reached even with network=False",
        "disk_mb limits the size of each file only; files outside the working folder are not deleted",
        "without a control group, a process that hides on purpose can outlive the sandbox",
        "the code can kill or change its own zygote; its chain is then scored, as is a chain whose sandbox you kill",
    ),
}
_DESCRIPTIONS = {
    "strict": "bubblewrap: namespaces, read-only files, no capabilities, system-call filter",
    "landlock": "no namespaces: Landlock file rules, no capabilities, system-call filter without sockets and metadata",
    "none": "a process with limits; no boundary against hostile code",
}
INSTALL_BUBBLEWRAP = "`apt-get install bubblewrap`, or without root `conda install conda-forge::bubblewrap`"
_PROBE_SECONDS = 10.0
_OF_THE_MACHINE = ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/swappiness", "/proc/cpuinfo", "/dev/null")


@dataclass(frozen=True, repr=False)
class LevelReport(Displayable):
    """Availability and guarantees of one isolation level on this machine.

    Attributes:
        name: "strict", "landlock" or "none".
        available: True if the level can be used.
        reason: description of the level if it is available; otherwise the reason why it is not, and how to fix that.
        limits: dict from the name of each limit to a description of how it is enforced.
        not_isolated: aspects of the host that the level does not isolate.
    """

    name: str
    available: bool
    reason: str
    limits: Mapping[str, str]
    not_isolated: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class SandboxReport(Displayable):
    """Isolation levels of this machine and their guarantees.

    Attributes:
        best: the level selected by isolation=None; "" if no level is available.
        levels: one report per level, strongest first.
    """

    best: str
    levels: tuple[LevelReport, ...]

    def __repr__(self) -> str:
        best = f"the best available level is {self.best!r}" if self.best else "no level is available"
        lines = [f"sandboxes on this machine: {best}"]
        for level in self.levels:
            lines.append(f"  {level.name:<8} {'yes' if level.available else 'no':<4} {level.reason}")
            lines += [f"            {name}: {how}" for name, how in level.limits.items() if level.available]
            lines += [f"            not isolated: {text}" for text in level.not_isolated if level.available]
        return "\n".join(lines)


def sandbox_report(limits: Limits | None = None) -> SandboxReport:
    """Report the available isolation levels, how they enforce limits, and what they do not isolate.

    The first call takes about 0.1 s.

    Args:
        limits: the limits to report on; by default those of `Limits()`.
    """
    limits = limits or Limits()
    levels = []
    for name in LEVELS:
        reason = unavailable_reason(name)
        how = limit_mechanisms(name, limits, hierarchy())
        levels.append(LevelReport(name, not reason, reason or _DESCRIPTIONS[name], how, NOT_ISOLATED[name]))
    return SandboxReport(best(), tuple(levels))


def resolve_level(isolation: str | None, limits: Limits) -> str:
    """Return the level to use. Raises IsolationError if the named level is unavailable with these limits."""
    if isolation is None and (level := best()):
        return level
    isolation = isolation or "none"  # best() found no level, so report why "none" is unavailable
    if reason := unavailable_reason(isolation):
        raise IsolationError(f"isolation={isolation!r} is not available: {reason}")
    if isolation != "none" and limits.processes is not None and hierarchy() is None and _is_root():
        raise IsolationError(
            f"isolation={isolation!r} with processes={limits.processes} is not available: RLIMIT_NPROC does not apply "
            "to root, and no control group is writable here; run as another user, or pass processes=None"
        )
    return isolation


def best() -> str:
    """Return the level selected by isolation=None; "" if sandboxes cannot run on this system."""
    return next((level for level in LEVELS if not unavailable_reason(level)), "")


@functools.cache
def warn_below_strict(level: str) -> None:
    """Warn once per process that isolation=None selected a level below "strict", and say how to change that."""
    warnings.warn(
        f"sandboxes run at isolation={level!r} ({_DESCRIPTIONS[level]}), "
        f"because 'strict' is not available: {strict_unavailable_reason()}. "
        f"af.sandbox_report() lists what is not isolated; pass isolation={level!r} to accept this without a warning",
        IsolationWarning,
        stacklevel=3,
    )


def unavailable_reason(level: str) -> str:
    """Return the reason why a level is unavailable and how to fix that, or "" if it is available. Cached."""
    if level == "strict":
        return strict_unavailable_reason()
    if level == "landlock":
        return landlock_unavailable_reason()
    if hasattr(os, "fork"):
        return ""
    return f"sandboxes need os.fork, which {sys.platform} does not have; run Python in WSL 2 or on Linux or macOS"


def limit_mechanisms(level: str, limits: Limits, groups: Hierarchy | None) -> dict[str, str]:
    """Return a description of how an isolation level enforces each limit; "not limited" if it does not."""
    group = f"control group ({groups.version}), all processes together" if groups else None
    strict = level == "strict"
    if group is not None or _is_root() or level == "none":
        processes = group or "not limited"
    elif strict or own_user_namespace():
        processes = "RLIMIT_NPROC in its own user namespace"
    else:
        processes = "RLIMIT_NPROC, in addition to the processes that the user has at the start"
    network = {"strict": "only its own loopback interface", "landlock": "no sockets", "none": "not limited"}[level]
    return limits.describe(
        {
            "memory_mb": group or ("RLIMIT_DATA, each process" if sys.platform == "linux" else "not limited"),
            "processes": processes,
            "cpu_seconds": "control group's clock, all processes together" if group else "RLIMIT_CPU, each process",
            "disk_mb": "size of its own /tmp" if strict else "RLIMIT_FSIZE, each file",
            "network": "allowed, as requested" if limits.network else network,
        }
    )


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@functools.cache
def hierarchy() -> Hierarchy | None:
    """Return the folders in which this process can create control groups, or None. The result is cached."""
    found = find_hierarchy()
    if found is None:
        return None
    remove_orphans(found)
    try:
        Group.create(found, Limits()).remove()
    except OSError:
        return None
    return found


def strict_unavailable_reason() -> str:
    """Return the reason why "strict" is unavailable and how to fix that, or "" if it is available. Cached."""
    if sys.platform != "linux":
        return f"needs Linux namespaces; this is {sys.platform}"
    program = shutil.which("bwrap")
    if program is None:
        return f"bubblewrap is not installed: {INSTALL_BUBBLEWRAP}"
    return _probe_strict(program)


def landlock_unavailable_reason() -> str:
    """Return the reason why "landlock" is unavailable and how to fix that, or "" if it is available. Cached."""
    if sys.platform != "linux":
        return f"needs Linux's Landlock; this is {sys.platform}"
    if seccomp.program(landlock=6) is None:
        return f"no system-call filter has been written for {platform.machine()}"
    if commands.landlock_version() < 1:
        return "this kernel has no Landlock, which needs Linux 5.13 or newer and `landlock` in the boot option `lsm=`"
    return _probe_landlock(own_user=False)


@functools.cache
def _probe_landlock(own_user: bool) -> str:
    calls = seccomp.program(landlock=commands.landlock_version(), network=False) or b""
    rules = commands.landlock_rules("/nonexistent", Limits())
    settings = json.dumps({"landlock": rules, "filter": calls.hex(), "own_user": own_user})
    with commands.program_file() as file:
        return _probe(commands.run_zygote(file.fileno(), "probe", settings), {}, (file.fileno(),))


def own_user_namespace() -> bool:
    """Return True if a sandbox can have its own user namespace, so that RLIMIT_NPROC counts only its processes."""
    if sys.platform != "linux" or _is_root() or not _kernel_is_at_least(5, 14) or commands.landlock_version() < 1:
        return False
    return not _probe_landlock(own_user=True)


def _kernel_is_at_least(*wanted: int) -> bool:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and tuple(map(int, found.groups())) >= wanted


def _probe(command: list[str], environment: dict[str, str], passed: tuple[int, ...]) -> str:
    """Run a command that should print 42. Return "" if that succeeds, otherwise an error message."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            pass_fds=passed,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.stdout == "42\n":
        return ""
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


@functools.cache
def _probe_strict(program: str) -> str:
    """Return the reason why the bwrap at `program` cannot run Python, or "" if it can. Cached for each path."""
    calls = seccomp.program()
    if calls is None:
        return f"no system-call filter has been written for {platform.machine()}"
    settings = commands.strict_settings() | {
        "visible": [os.__file__, *map(commands.inside_path, commands.python_folders())],
        "unchangeable": _OF_THE_MACHINE,
    }
    with commands.anonymous_file(calls) as file, commands.program_file() as zygote:
        command, environment, passed = commands.strict_command(Limits(), file.fileno(), program)
        command += commands.run_zygote(zygote.fileno(), "probe", json.dumps(settings))
        failure = _probe(command, environment, (*passed, zygote.fileno()))
    if not failure:
        return ""
    if failure.endswith("can be read by root only"):
        return f"code inside runs as an unprivileged user, but {failure}; `chmod -R o+rX` it"
    if failure.startswith("code inside could change"):
        return f"{failure}, because this process is root and may not run code as another user; run as another user"
    if "unknown option" in failure.lower():
        return f"bubblewrap must be version 0.8 or newer: {failure}"
    if "uid map" in failure or "namespace" in failure.lower() or "not permitted" in failure.lower():
        return (
            f"user namespaces are not allowed here ({failure}); on Ubuntu 24.04: `sudo sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0`; in a container, allow them when starting the container"
        )
    return f"bubblewrap did not run: {failure}"
