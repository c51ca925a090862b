"""Isolation levels of sandboxes: what each level guarantees, which are available here, and the commands to start them.

This module builds the command that starts a zygote at a given level, but runs only its own probes. A level is never
lowered silently: a level requested by name that is unavailable raises IsolationError; `None` selects the best
available level and reports it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import marshal
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import IsolationError, IsolationWarning, SettingsError
from . import seccomp
from .limits import Group, Hierarchy, Limits, find_hierarchy, remove_orphans

LEVELS = ("strict", "landlock", "none")  # best first

NOT_ISOLATED: Mapping[str, tuple[str, ...]] = {
    "strict": (
        "the kernel is shared: a hole in it is a hole in the sandbox",
        "/usr and the folders of this Python (its packages too) can be read",
        "processor time is bounded for a call, but not kept from other sandboxes while it lasts",
        "facts about the machine can be read: processor, memory, uptime, mount sources",
        "with network=True the whole network of this machine can be reached, its loopback too",
    ),
    "landlock": (
        "the kernel is shared: a hole in it is a hole in the sandbox",
        "the code runs as your user, without capabilities; /usr and the folders of this Python can be read",
        "whether a file of yours exists, its size and its times can be looked at where its path is known",
        "facts about the machine can be read: processor, memory, its own control group and that group's limits, the "
        "number of processes by guessing process ids",
        "disk_mb bounds each file, not their sum or number",
        "a process that hides on purpose can outlive the sandbox where no control group is to be had",
        "with network=True the whole network of this machine can be reached, its loopback too",
        "Landlock before version 6 does not know signals: there the code may send none, not even to its own children",
    ),
    "none": (
        "the code runs as you: it reads and writes your files and sees your processes",
        "the network can be reached, whatever network= says",
        "disk_mb bounds each file, not their sum or number; what is written outside the working folder stays",
        "a process that hides on purpose can outlive the sandbox where no control group is to be had",
        "the code can kill or change its own zygote; then the sandbox is replaced, and its chain is not scored",
    ),
}
_DESCRIPTIONS = {
    "strict": "bubblewrap: namespaces, read-only files, no capabilities, call filter; one for each sandbox",
    "landlock": "no namespaces: the kernel's file rules, no capabilities, a call filter that leaves no sockets",
    "none": "a bare process with limits; no boundary against hostile code",
}
INSTALL_BUBBLEWRAP = "`apt-get install bubblewrap`, or without root `conda install conda-forge::bubblewrap`"
WORKER = Path(__file__).parent.parent / "inside" / "zygote.py"
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class LevelReport:
    """Availability and guarantees of one isolation level on this machine.

    Attributes:
        name: "strict", "landlock" or "none".
        available: True if the level can be used on this machine.
        reason: why the level is unavailable and how to fix it; if it is available, a description of it.
        limits: for each limit, how it is enforced.
        not_isolated: aspects of the host that the level does not isolate.
    """

    name: str
    available: bool
    reason: str
    limits: Mapping[str, str]
    not_isolated: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class SandboxReport:
    """Isolation levels of this machine and what they guarantee.

    Attributes:
        best: the level that isolation=None selects.
        levels: one report per level, strongest first.
    """

    best: str
    levels: tuple[LevelReport, ...]

    def __repr__(self) -> str:
        lines = [f"sandboxes on this machine: the best level is {self.best!r}"]
        for level in self.levels:
            lines.append(f"  {level.name:<8} {'yes' if level.available else 'no':<4} {level.reason}")
            lines += [f"            {name}: {how}" for name, how in level.limits.items() if level.available]
            lines += [f"            not kept apart: {text}" for text in level.not_isolated if level.available]
        return "\n".join(lines)


def sandbox_report(limits: Limits | None = None) -> SandboxReport:
    """Report which isolation levels are available, how limits are enforced, and what is not isolated.

    Takes about 0.1 s the first time.

    Args:
        limits: the limits to report on. None: the defaults of Limits.
    """
    limits = limits or Limits()
    levels = []
    for name in LEVELS:
        reason = unavailable_reason(name)
        how = limit_mechanisms(name, limits, hierarchy())
        levels.append(LevelReport(name, not reason, reason or _DESCRIPTIONS[name], how, NOT_ISOLATED[name]))
    return SandboxReport(best(), tuple(levels))


def check_level(isolation: str | None) -> None:
    """Raise SettingsError if the level does not exist."""
    if isolation is not None and isolation not in LEVELS:
        names = ", ".join(map(repr, LEVELS))
        raise SettingsError(
            f"isolation={isolation!r}: want one of {names}, or None for the best there is here, or a container: "
            'isolation=af.Container("python:3.12-slim")'
        )


def resolve_level(isolation: str | None, limits: Limits) -> str:
    """Return the level to use.

    Raises:  SettingsError for an unknown level, IsolationError if the named level is unavailable with these limits.
    """
    check_level(isolation)
    if isolation is None:
        return best()
    if reason := unavailable_reason(isolation):
        raise IsolationError(f"isolation={isolation!r} cannot be had here: {reason}")
    root = os.geteuid() == 0 if hasattr(os, "geteuid") else False
    if isolation != "none" and limits.processes is not None and hierarchy() is None and root:
        raise IsolationError(
            f"isolation={isolation!r} with processes={limits.processes}: the kernel's own process limit does not hold "
            "for root, and no control group is writable here; run as another user, or say processes=None"
        )
    return isolation


def best() -> str:
    """Return the level that isolation=None selects."""
    return next(level for level in LEVELS if not unavailable_reason(level))


@functools.cache
def warn_below_strict(level: str) -> None:
    """Warn, once per process, that isolation=None selected a level below "strict", and how to change that."""
    warnings.warn(
        f"sandboxes run at isolation={level!r} ({_DESCRIPTIONS[level]}), "
        f"because 'strict' is not available: {strict_unavailable_reason()}. "
        f"af.sandbox_report() lists what is not isolated; isolation={level!r} accepts it without this warning",
        IsolationWarning,
        stacklevel=3,
    )


def unavailable_reason(level: str) -> str:
    """Return why a level is unavailable and how to fix it; empty if available. Probed once, by starting a process."""
    if level == "strict":
        return strict_unavailable_reason()
    return landlock_unavailable_reason() if level == "landlock" else ""


def limit_mechanisms(level: str, limits: Limits, groups: Hierarchy | None) -> dict[str, str]:
    """Describe how a level enforces each limit; "not limited" for a limit that is not enforced."""
    group = f"control group ({groups.version}), all processes together" if groups else None
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    linux = sys.platform == "linux"
    memory = group or ("RLIMIT_DATA, each process" if linux else "not limited")
    strict = level == "strict"
    processes = group or "not limited"
    if group is None and not root and strict:
        processes = "RLIMIT_NPROC in its own user namespace"
    elif group is None and not root and level == "landlock":
        processes = "RLIMIT_NPROC, beyond the processes that the same user has when it starts"
        if own_user_namespace():
            processes = "RLIMIT_NPROC in its own user namespace"
    disk = "size of its own /tmp" if strict else "RLIMIT_FSIZE, each file"
    cpu = "control group's clock, all processes together" if groups else "RLIMIT_CPU, each process"
    network = "no interface but its own loopback" if strict else "not limited"
    if level == "landlock":
        network = "no sockets"
    return {
        "memory_mb": "not limited" if limits.memory_mb is None else memory,
        "processes": "not limited" if limits.processes is None else processes,
        "cpu_seconds": "not limited" if limits.cpu_seconds is None else cpu,
        "disk_mb": "not limited" if limits.disk_mb is None else disk,
        "network": "open, as asked" if limits.network else network,
    }


@functools.cache
def hierarchy() -> Hierarchy | None:
    """Return where this process can create control groups, or None if it cannot. Probed once."""
    found = find_hierarchy()
    if found is None:
        return None
    remove_orphans(found)
    try:
        Group(found, Limits()).remove()
    except OSError:
        return None
    return found


def strict_unavailable_reason() -> str:
    """Return why "strict" is unavailable and how to fix it; empty if available. Probed once, with the real command."""
    if sys.platform != "linux":
        return f"needs Linux namespaces; this is {sys.platform}"
    program = shutil.which("bwrap")
    if program is None:
        return f"bubblewrap is not installed: {INSTALL_BUBBLEWRAP}"
    return _probe_strict(program)


def landlock_unavailable_reason() -> str:
    """Return why "landlock" is unavailable and how to fix it; empty if available. Probed once."""
    if sys.platform != "linux":
        return f"needs Linux's Landlock; this is {sys.platform}"
    if seccomp.program(landlock=6) is None:
        return f"no system-call filter has been written for {platform.machine()}"
    if landlock_version() < 1:
        return "this kernel has no Landlock: 5.13 or newer is wanted, with `landlock` among its `lsm=` modules"
    return _probe_landlock()


@functools.cache
def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, or 0. It covers files from 1, truncation from 3, TCP 4, signals 6."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


@functools.cache
def _probe_landlock() -> str:
    calls = seccomp.program(landlock=landlock_version(), network=False) or b""
    settings = {"landlock": landlock_rules("/nonexistent", Limits()), "filter": calls.hex()}
    with worker_file() as file:
        return _probe(run_worker(file.fileno(), "probe", json.dumps(settings)), {}, (file.fileno(),))


@functools.cache
def own_user_namespace() -> bool:
    """Return True if processes of this user can enter a user namespace of their own, with its own RLIMIT_NPROC count.

    Otherwise RLIMIT_NPROC counts all processes of the user, so one sandbox can use up the quota of another. Root is
    never counted.
    """
    if sys.platform != "linux" or os.geteuid() == 0 or not _kernel_is_at_least(5, 14) or landlock_version() < 1:
        return False
    calls = seccomp.program(landlock=landlock_version(), network=False) or b""
    rules = landlock_rules("/nonexistent", Limits())
    settings = {"landlock": rules, "filter": calls.hex(), "own_user": True}
    with worker_file() as file:
        return not _probe(run_worker(file.fileno(), "probe", json.dumps(settings)), {}, (file.fileno(),))


def _kernel_is_at_least(*wanted: int) -> bool:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and tuple(map(int, found.groups())) >= wanted


def _probe(command: list[str], environment: dict[str, str], passed: tuple[int, ...]) -> str:
    """Run a command that must print 42. Return an empty string, or its error message if it does not."""
    try:
        done = subprocess.run(
            command, env=environment, pass_fds=passed, capture_output=True, text=True, timeout=_PROBE_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.stdout == "42\n":
        return ""
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


@functools.cache
def _probe_strict(program: str) -> str:
    """Try the interpreter at the strict level. Cached per path of bwrap, so that a later installation is noticed."""
    filter_ = seccomp_file()
    if filter_ is None:
        return f"no system-call filter has been written for {platform.machine()}"
    with filter_:
        command, environment = strict_command(Limits(), filter_.fileno(), program)
        failure = _probe([*command, host_python(), "-s", "-S", "-c", "print(6 * 7)"], environment, (filter_.fileno(),))
    if failure:
        if "unknown option" in failure.lower():
            return f"bubblewrap is too old (0.8 or newer is wanted): {failure}"
        if "uid map" in failure or "namespace" in failure.lower() or "not permitted" in failure.lower():
            return (
                f"user namespaces are refused here ({failure}); on Ubuntu 24.04: `sudo sysctl "
                "kernel.apparmor_restrict_unprivileged_userns=0`; a container must be allowed them from outside"
            )
        return f"bubblewrap did not run: {failure}"
    return ""


def seccomp_file() -> BinaryIO | None:
    """Return the system-call filter in an anonymous file, positioned at its start; None if there is no filter."""
    program = seccomp.program()
    if program is None:
        return None
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(program)
    file.seek(0)
    return file


# The worker is passed as bytecode in an anonymous file, because compiling it takes longer than starting Python and
# costs memory. The empty entry of sys.path is removed, so that nothing is imported from the working directory.
_BOOT = (
    "import sys, marshal; sys.path[:] = filter(None, sys.path); __file__ = '/sandbox/zygote.py'\n"
    "with open(int(sys.argv.pop(1)), 'rb') as program: program = program.read()\n"
    "exec(marshal.loads(program))"
)


def run_worker(program_fd: int, *arguments: str) -> list[str]:
    """Return the command that runs the worker from a `worker_file`."""
    return [host_python(), "-s", "-S", "-c", _BOOT, str(program_fd), *arguments]


def worker_file() -> BinaryIO:
    """Return the compiled worker in an anonymous file, positioned at its start."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(_compiled(WORKER))
    file.seek(0)
    return file


@functools.cache
def _compiled(source: Path) -> bytes:
    return marshal.dumps(compile(source.read_text(encoding="utf-8"), STRICT_WORKER, "exec", dont_inherit=True))


def host_python() -> str:
    """Return the path of the Python binary with symlinks resolved; it locates the standard library by that path."""
    return _real(sys.executable)


@functools.cache
def _real(path: str) -> str:
    """Cached `os.path.realpath`, for paths that cannot change while this process runs, such as its own Python."""
    return os.path.realpath(path)


def inside_python(packages: bool = True) -> str:
    """Return the value of `sys.executable` inside.

    With packages it is the virtual environment's Python, so that child processes find the packages too.
    """
    if not packages:
        return host_python()
    folder = os.path.realpath(os.path.dirname(sys.executable)) if sys.executable else ""
    return os.path.join(folder, os.path.basename(sys.executable)) if folder else host_python()


def python_folders(with_packages: bool = True) -> list[str]:
    """Return the folders that this Python and its packages need, except those in /usr, which is always visible."""
    places = [sys.base_prefix, os.path.dirname(host_python())]
    if with_packages:
        places += [sys.prefix, *packages()]
    folders = {os.path.realpath(folder) for folder in places}
    kept: list[str] = []
    for folder in sorted(folders):
        if (
            not folder.startswith("/usr/")
            and folder not in ("/", "/usr")
            and not any(_is_within(folder, k) for k in kept)
        ):
            kept.append(folder)
    return kept


def packages() -> list[str]:
    """Return the folders of installed packages, for the sandbox's `sys.path`."""
    return list(_packages(sys.prefix, sys.exec_prefix))


@functools.cache
def _packages(*prefixes: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(os.path.realpath(paths[name]) for name in _PACKAGE_PATHS))


def _visible_packages() -> list[str]:
    """Return package folders below the interpreter's prefix or /usr, which are visible unless mounted over."""
    bases = (os.path.realpath(sys.base_prefix), "/usr")
    names = (
        sysconfig.get_path(name, vars={"base": base, "platbase": base}) for base in bases for name in _PACKAGE_PATHS
    )
    debian = ("/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages")
    folders = dict.fromkeys(os.path.realpath(name) for name in (*names, *packages(), *debian))
    return [path for path in folders if os.path.isdir(path) and any(_is_within(path, base) for base in bases)]


_PACKAGE_PATHS = ("purelib", "platlib")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def environment(home: str, path: str = "/usr/local/bin:/usr/bin:/bin") -> dict[str, str]:
    """Return the complete environment of the code inside. Nothing is inherited from the host."""
    return {
        "PATH": path, "HOME": home, "TMPDIR": home, "USER": "sandbox", "LOGNAME": "sandbox", "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # makes the order of a set of strings the same in every chain
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1",
        # One thread each: parallelism comes from the pool, and each thread reserves memory that counts as used.
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip


STRICT_WORKER = "/sandbox/zygote.py"
STRICT_HOME = "/tmp"
STRICT_SHM_MB = 16
_SYSTEM_FILES = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
_NETWORK_FILES = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"]


def inside_path(path: str) -> str:
    """Return the path, inside a strict sandbox, of a file or folder of the host's Python: usually the same path.

    Paths below /tmp are remapped, because there the sandbox has its own, initially empty folder; a virtual environment
    in /tmp is mounted elsewhere. The interpreter itself cannot be moved, because it finds its library by its path.
    """
    fixed = any(_is_within(place, path) or _is_within(path, place) for place in (_real(sys.base_prefix), host_python()))
    return path if fixed or not _is_within(path, STRICT_HOME) else f"/sandbox/host{path}"


def _shm_bytes(limits: Limits) -> int:
    return (STRICT_SHM_MB if limits.disk_mb is None else min(STRICT_SHM_MB, limits.disk_mb)) * 2**20


def landlock_rules(home: str, limits: Limits, packages: bool = True) -> dict[str, object]:
    """Return which paths code at the landlock level may open, and how. Landlock denies all others."""
    read = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *_SYSTEM_FILES, *python_folders(packages)]
    read += ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/version"]
    read += ["/proc/sys/kernel/pid_max", "/sys/devices/system/cpu", str(WORKER)]
    if limits.network:
        read += _NETWORK_FILES
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    paths = [(path, "read") for path in read] + [(path, "device") for path in devices] + [(home, "all")]
    return {"abi": min(7, landlock_version()), "network": limits.network, "paths": paths}


def strict_command(
    limits: Limits, seccomp_fd: int, program: str = "bwrap", packages: bool = True
) -> tuple[list[str], dict[str, str]]:
    """Return the bwrap command line, up to the program to run, and the environment in which to start bwrap.

    bwrap keeps its own environment, readable inside as /proc/1/environ unless the program is pid 1. Therefore the
    environment is minimal, and the program is also pid 1. The order of mounts matters: later mounts hide earlier ones.
    """
    variables = environment(STRICT_HOME)
    command = [shutil.which(program) or program, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    if limits.network:
        command += ["--share-net"]
    command += ["--cap-drop", "ALL", "--clearenv"]
    for name, value in variables.items():
        command += ["--setenv", name, value]
    command += ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in _SYSTEM_FILES:
        command += ["--ro-bind-try", name, name]
    if limits.network:
        for name in _NETWORK_FILES:
            command += ["--ro-bind-try", os.path.realpath(name), name]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_shm_bytes(limits)), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev"]
    if limits.disk_mb is not None:
        command += ["--size", str(limits.disk_mb * 2**20)]
    command += ["--tmpfs", STRICT_HOME]
    for folder in python_folders(packages):
        command += ["--ro-bind", folder, inside_path(folder)]
    if not packages:
        for folder in _visible_packages():
            command += ["--size", "4096", "--perms", "0555", "--tmpfs", folder, "--remount-ro", folder]
    command += ["--ro-bind", str(WORKER), STRICT_WORKER, "--disable-userns"]
    command += ["--chdir", STRICT_HOME, "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--"]
    return command, {"PATH": "/usr/bin:/bin"}
