"""How far the code in a sandbox is kept from the machine: the levels, what each holds, and which are to be had here.

Knows how to write the command that starts a zygote at a level; starts nothing but its own probe. A level is never
lowered in silence: one that was asked for by name and cannot be had raises IsolationError; `None` takes the best and
says which.
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
    """One level: whether it can be had here, why not, how each limit is held, and what it does not keep apart."""

    name: str
    available: bool
    reason: str
    limits: Mapping[str, str]
    not_isolated: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class SandboxReport:
    """What sandboxes can promise on this machine. `best` is the level that isolation=None takes."""

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
    """Which isolation levels there are here, how limits are held, and what is not isolated. Takes about 0.1 s once."""
    limits = limits or Limits()
    levels = []
    for name in LEVELS:
        reason = unavailable_reason(name)
        how = limit_mechanisms(name, limits, hierarchy())
        levels.append(LevelReport(name, not reason, reason or _DESCRIPTIONS[name], how, NOT_ISOLATED[name]))
    return SandboxReport(best(), tuple(levels))


def check_level(isolation: str | None) -> None:
    """Raises SettingsError for a level that does not exist."""
    if isolation is not None and isolation not in LEVELS:
        names = ", ".join(map(repr, LEVELS))
        raise SettingsError(
            f"isolation={isolation!r}: want one of {names}, or None for the best there is here, or a container: "
            'isolation=af.Container("python:3.12-slim")'
        )


def resolve_level(isolation: str | None, limits: Limits) -> str:
    """The level to use.

    Raises:  SettingsError for an unknown name, IsolationError if the named level cannot be had with these limits.
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
    """The level that isolation=None takes."""
    return next(level for level in LEVELS if not unavailable_reason(level))


@functools.cache
def warn_below_strict(level: str) -> None:
    """Warn, once per process, that isolation=None chose a level below "strict", and say what would change that."""
    warnings.warn(
        f"sandboxes run at isolation={level!r} ({_DESCRIPTIONS[level]}), "
        f"because 'strict' is not available: {strict_unavailable_reason()}. "
        f"af.sandbox_report() lists what is not isolated; isolation={level!r} accepts it without this warning",
        IsolationWarning,
        stacklevel=3,
    )


def unavailable_reason(level: str) -> str:
    """Why a level cannot be had here, and what to type; empty if it can. Tried once, with the real thing."""
    if level == "strict":
        return strict_unavailable_reason()
    return landlock_unavailable_reason() if level == "landlock" else ""


def limit_mechanisms(level: str, limits: Limits, groups: Hierarchy | None) -> dict[str, str]:
    """How each limit is held at a level, in words; "not limited" where nothing holds it."""
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
    """Where control groups can be made here; looked up once, and tried once."""
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
    """Why there is no strict level here, and what to type; empty if there is one. Tried once, with the real command."""
    if sys.platform != "linux":
        return f"needs Linux namespaces; this is {sys.platform}"
    program = shutil.which("bwrap")
    if program is None:
        return f"bubblewrap is not installed: {INSTALL_BUBBLEWRAP}"
    return _probe_strict(program)


def landlock_unavailable_reason() -> str:
    """As `strict_unavailable_reason`, for the level that needs no namespaces."""
    if sys.platform != "linux":
        return f"needs Linux's Landlock; this is {sys.platform}"
    if seccomp.program(landlock=6) is None:
        return f"no system-call filter has been written for {platform.machine()}"
    if landlock_version() < 1:
        return "this kernel has no Landlock: 5.13 or newer is wanted, with `landlock` among its `lsm=` modules"
    return _probe_landlock()


@functools.cache
def landlock_version() -> int:
    """Of the kernel's Landlock: 1 files, 3 truncation, 4 TCP, 6 signals; 0 where there is none."""
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
    """Whether a process of this user may enter a user namespace of its own, in which RLIMIT_NPROC counts it alone.

    Without it the limit counts all processes of the user, so that one sandbox can use up what another was allowed. Root
    is never counted.
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
    """Run something that must print 42; else what it said."""
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
    """Run the interpreter at the strict level. Cached by program: one that is installed later is tried."""
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
    """The call filter in an anonymous file, at its start; None where there is no filter."""
    program = seccomp.program()
    if program is None:
        return None
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(program)
    file.seek(0)
    return file


# The worker comes compiled, through a file that has no name: to compile it takes longer than to start Python does, and
# leaves memory behind. Nothing of the working folder may be imported by it.
_BOOT = (
    "import sys, marshal; sys.path[:] = filter(None, sys.path); __file__ = '/sandbox/zygote.py'\n"
    "with open(int(sys.argv.pop(1)), 'rb') as program: program = program.read()\n"
    "exec(marshal.loads(program))"
)


def run_worker(program_fd: int, *arguments: str) -> list[str]:
    """The command that runs the worker out of a `worker_file`."""
    return [host_python(), "-s", "-S", "-c", _BOOT, str(program_fd), *arguments]


def worker_file() -> BinaryIO:
    """The compiled worker in an anonymous file, at its start."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(_compiled(WORKER))
    file.seek(0)
    return file


@functools.cache
def _compiled(source: Path) -> bytes:
    return marshal.dumps(compile(source.read_text(encoding="utf-8"), STRICT_WORKER, "exec", dont_inherit=True))


def host_python() -> str:
    """The interpreter itself, past the links of virtual environments: it finds its own library from where it lies."""
    return _real(sys.executable)


@functools.cache
def _real(path: str) -> str:
    """For places that stay where they are as long as this process runs: its own Python's."""
    return os.path.realpath(path)


def inside_python(packages: bool = True) -> str:
    """What `sys.executable` says inside: the virtual environment's, so that a child Python has its packages."""
    if not packages:
        return host_python()
    folder = os.path.realpath(os.path.dirname(sys.executable)) if sys.executable else ""
    return os.path.join(folder, os.path.basename(sys.executable)) if folder else host_python()


def python_folders(with_packages: bool = True) -> list[str]:
    """Folders that this Python and its packages need. /usr is always there and is left out."""
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
    """Where installed packages lie, for the sandbox's `sys.path`."""
    return list(_packages(sys.prefix, sys.exec_prefix))


@functools.cache
def _packages(*prefixes: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(os.path.realpath(paths[name]) for name in _PACKAGE_PATHS))


def _visible_packages() -> list[str]:
    """Folders of packages that lie within the interpreter's own, or /usr, and so are seen unless they are covered."""
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
    """All that the code inside finds in its environment: nothing of the host's."""
    return {
        "PATH": path, "HOME": home, "TMPDIR": home, "USER": "sandbox", "LOGNAME": "sandbox", "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the order of a set of strings is then the same in every chain
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1",
        # One thread each: the pool is what runs in parallel, and thread pools reserve memory that counts.
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip


STRICT_WORKER = "/sandbox/zygote.py"
STRICT_HOME = "/tmp"
STRICT_SHM_MB = 16
_SYSTEM_FILES = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
_NETWORK_FILES = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"]


def inside_path(path: str) -> str:
    """Where a folder of the host's Python, or a file in it, is found inside a strict sandbox: in its own place.

    Not so below /tmp, which is the sandbox's own folder and begins empty: a virtual environment there is shown
    elsewhere. The interpreter alone cannot move, for it looks for its library in its own place.
    """
    fixed = any(_is_within(place, path) or _is_within(path, place) for place in (_real(sys.base_prefix), host_python()))
    return path if fixed or not _is_within(path, STRICT_HOME) else f"/sandbox/host{path}"


def _shm_bytes(limits: Limits) -> int:
    return (STRICT_SHM_MB if limits.disk_mb is None else min(STRICT_SHM_MB, limits.disk_mb)) * 2**20


def landlock_rules(home: str, limits: Limits, packages: bool = True) -> dict[str, object]:
    """What code at the landlock level may open, and how; all else is refused."""
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
    """bwrap and its options, up to the program to run, and the environment to start bwrap itself in.

    The environment is clean because bwrap keeps its own, readable inside as /proc/1/environ unless the program is
    pid 1; both doors are closed here. The order of the mounts counts: a later one hides what lies below it.
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
