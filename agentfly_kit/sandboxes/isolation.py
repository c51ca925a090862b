"""How far the code in a sandbox is kept from the machine: the levels, what each holds, and which are to be had here.

Knows how to write the command that starts a zygote at a level; starts nothing but its own probe. A level is never
lowered in silence: one that was asked for by name and cannot be had raises IsolationError; `None` takes the best and
says which.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import IsolationError, SettingsError
from . import seccomp
from .limits import Group, Hierarchy, Limits, find_hierarchy, sweep

LEVELS = ("strict", "none")  # best first

NOT_ISOLATED: Mapping[str, tuple[str, ...]] = {
    "strict": (
        "the kernel is shared: a hole in it is a hole in the sandbox",
        "/usr and the folders of this Python (its packages too) can be read",
        "processor time is bounded for a call, but not kept from other sandboxes while it lasts",
        "facts about the machine can be read: processor, memory, uptime, mount sources",
        "with network=True the whole network of this machine can be reached, its loopback too",
    ),
    "none": (
        "the code runs as you: it reads and writes your files and sees your processes",
        "the network can be reached, whatever network= says",
        "disk_mb bounds each file, not their sum; what is written outside the working folder stays",
        "a process that hides on purpose can outlive the sandbox where no control group is to be had",
        "the code can kill or change its own zygote; then the sandbox dies and is replaced",
    ),
}
WORKER = Path(__file__).with_name("worker.py")
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class LevelReport:
    """One level: whether it can be had here, why not, how each limit is held, and what it does not keep apart."""

    name: str
    available: bool
    why: str
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
            lines.append(f"  {level.name:<7} {'yes' if level.available else 'no':<4} {level.why}")
            lines += [f"           {name}: {how}" for name, how in level.limits.items() if level.available]
            lines += [f"           not kept apart: {text}" for text in level.not_isolated if level.available]
        return "\n".join(lines)


def sandbox_report(limits: Limits | None = None) -> SandboxReport:
    """Which isolation levels there are here, how limits are held, and what is not isolated. Takes about 30 ms once."""
    limits = limits or Limits()
    trouble = strict_trouble()
    levels = (
        LevelReport(
            "strict", not trouble, trouble or "bubblewrap: namespaces, read-only files, no capabilities, call filter",
            applied("strict", limits, hierarchy()), NOT_ISOLATED["strict"],
        ),
        LevelReport(
            "none", True, "a bare process with limits; no boundary against hostile code",
            applied("none", limits, hierarchy()), NOT_ISOLATED["none"],
        ),
    )  # fmt: skip
    return SandboxReport("none" if trouble else "strict", levels)


def known(isolation: str | None) -> None:
    """Raises SettingsError for a level that does not exist."""
    if isolation is not None and isolation not in LEVELS:
        names = ", ".join(map(repr, LEVELS))
        raise SettingsError(f"isolation={isolation!r}: want one of {names}, or None for the best there is here")


def choose(isolation: str | None, limits: Limits) -> str:
    """The level to use.

    Raises:  SettingsError for an unknown name, IsolationError if the named level cannot be had with these limits.
    """
    known(isolation)
    if isolation is None:
        return "none" if strict_trouble() else "strict"
    if isolation == "strict":
        if trouble := strict_trouble():
            raise IsolationError(f"isolation='strict' cannot be had here: {trouble}")
        if limits.processes is not None and hierarchy() is None and os.geteuid() == 0:
            raise IsolationError(
                f"isolation='strict' with processes={limits.processes}: the kernel's own process limit does not hold "
                "for root, and no control group is writable here; run as another user, or say processes=None"
            )
    return isolation


def applied(level: str, limits: Limits, groups: Hierarchy | None) -> dict[str, str]:
    """How each limit is held at a level, in words; "not limited" where nothing holds it."""
    group = f"control group ({groups.version}), all processes together" if groups else None
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    linux = sys.platform == "linux"
    memory = group or ("RLIMIT_DATA, each process" if linux else "not limited")
    processes = group or ("RLIMIT_NPROC in its own user namespace" if level == "strict" and not root else "not limited")
    disk = "size of its own /tmp" if level == "strict" else "RLIMIT_FSIZE, each file"
    cpu = "control group's clock, all processes together" if groups else "RLIMIT_CPU, each process"
    network = "no interface but its own loopback" if level == "strict" else "not limited"
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
    sweep(found)
    try:
        Group(found, Limits()).remove()
    except OSError:
        return None
    return found


def strict_trouble() -> str:
    """Why there is no strict level here, and what to type; empty if there is one. Tried once, with the real command."""
    if sys.platform != "linux":
        return f"needs Linux namespaces; this is {sys.platform}"
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed: `apt-get install bubblewrap`, or your system's word for it"
    return _try(program)


@functools.cache
def _try(program: str) -> str:
    """Run the interpreter at the strict level. Cached by program: one that is installed later is tried."""
    filter_ = seccomp_file()
    if filter_ is None:
        return f"no system-call filter has been written for {platform.machine()}"
    with filter_:
        command, environment = strict_command(Limits(), filter_.fileno(), program)
        try:
            done = subprocess.run(
                [*command, python(), "-s", "-S", "-c", "print(6 * 7)"],
                env=environment, pass_fds=[filter_.fileno()], capture_output=True, text=True,
                timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"bubblewrap did not run: {error}"
    if done.stdout != "42\n":
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        if "unknown option" in said.lower():
            return f"bubblewrap is too old (0.8 or newer is wanted): {said}"
        if "uid map" in said or "namespace" in said.lower() or "not permitted" in said.lower():
            return (
                f"user namespaces are refused here ({said}); on Ubuntu 24.04: `sudo sysctl "
                "kernel.apparmor_restrict_unprivileged_userns=0`; a container must be allowed them from outside"
            )
        return f"bubblewrap did not run: {said}"
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


def python() -> str:
    """The interpreter itself, past the links of virtual environments: it finds its own library from where it lies."""
    return os.path.realpath(sys.executable)


def shown_python() -> str:
    """What `sys.executable` says inside: the virtual environment's, so that a child Python has its packages."""
    folder = os.path.realpath(os.path.dirname(sys.executable)) if sys.executable else ""
    return os.path.join(folder, os.path.basename(sys.executable)) if folder else python()


def python_folders() -> list[str]:
    """Folders that this Python and its packages need. /usr is always there and is left out."""
    folders = {
        os.path.realpath(folder) for folder in (sys.base_prefix, sys.prefix, os.path.dirname(python()), *packages())
    }
    kept: list[str] = []
    for folder in sorted(folders):
        if not folder.startswith("/usr/") and folder not in ("/", "/usr") and not any(_inside(folder, k) for k in kept):
            kept.append(folder)
    return kept


def packages() -> list[str]:
    """Where installed packages lie, for the sandbox's `sys.path`."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib")))


def _inside(path: str, folder: str) -> bool:
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


STRICT_WORKER = "/sandbox/worker.py"
STRICT_HOME = "/tmp"
STRICT_SHM_MB = 16


def seen(path: str) -> str:
    """Where a folder of the host's Python, or a file in it, is found inside a strict sandbox: in its own place.

    Not so below /tmp, which is the sandbox's own folder and begins empty: a virtual environment there is shown
    elsewhere. The interpreter alone cannot move, for it looks for its library in its own place.
    """
    fixed = any(_inside(place, path) or _inside(path, place) for place in (os.path.realpath(sys.base_prefix), python()))
    return path if fixed or not _inside(path, STRICT_HOME) else f"/sandbox/host{path}"


def strict_command(limits: Limits, seccomp_fd: int, program: str = "bwrap") -> tuple[list[str], dict[str, str]]:
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
    command += ["--new-session", "--die-with-parent", "--disable-userns", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    if limits.network:
        for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"):
            command += ["--ro-bind-try", os.path.realpath(name), name]
    shm = STRICT_SHM_MB if limits.disk_mb is None else min(STRICT_SHM_MB, limits.disk_mb)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm * 2**20), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev"]
    if limits.disk_mb is not None:
        command += ["--size", str(limits.disk_mb * 2**20)]
    command += ["--tmpfs", STRICT_HOME]
    for folder in python_folders():
        command += ["--ro-bind", folder, seen(folder)]
    command += ["--ro-bind", str(WORKER), STRICT_WORKER]
    command += ["--chdir", STRICT_HOME, "--remount-ro", "/", "--seccomp", str(seccomp_fd), "--"]
    return command, {"PATH": "/usr/bin:/bin"}
