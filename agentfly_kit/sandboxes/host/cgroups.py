"""Control groups, which enforce the limits on memory and processes, and the resource usage of a sandbox."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..inside import processes
from . import reaper
from .limits import Limits

# Number of processes and bytes allowed for bwrap and the zygote, in addition to the limits on sandboxed code.
_OWN_PROCESSES = 2
_OWN_MEMORY = 24 * 2**20
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Folders for new control groups. `roots` maps each controller to a folder; for v2, the only key is ""."""

    version: str  # "v1" or "v2"
    roots: Mapping[str, Path]


def find_hierarchy(mounts: str | None = None, own: str | None = None) -> Hierarchy | None:
    """Find the folders for control groups. `mounts` and `own` replace the text of /proc/self/mounts and .../cgroup."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace") if mounts is None else mounts
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    except OSError:
        return None
    # Controller ("" for v2) -> path of this process's group below the mount
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    roots: dict[str, Path] = {}
    unified: Path | None = None
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            unified = Path(place)
        elif kind == "cgroup":
            for controller in {"memory", "pids", "cpuacct"} & set(options.split(",")):
                root = _own_group(Path(place), paths.get(controller, "/"))
                if os.access(root, os.W_OK):
                    roots[controller] = root
    if {"memory", "pids"} <= roots.keys():
        return Hierarchy("v1", roots)
    if unified is not None:
        here = _own_group(unified, paths.get("", "/"))
        # A group that contains processes cannot delegate controllers, so new groups are usually siblings of this one.
        for root in (here, here.parent):
            if (
                root.is_relative_to(unified)
                and os.access(root, os.W_OK)
                and os.access(root / "cgroup.procs", os.W_OK)
                and {"memory", "pids"} <= set((_read(root / "cgroup.subtree_control") or "").split())
            ):
                return Hierarchy("v2", {"": root})
    return None


def _own_group(mount: Path, path: str) -> Path:
    """Return a control group's folder: `path` below `mount`, or `mount` if there is no such folder, as in
    containers."""
    place = mount / path.lstrip("/")
    return place if place.is_dir() else mount


class LimitHits(NamedTuple):
    """Counters of exceeded limits. If only `killed` rises, a parent group or the machine has run out of memory."""

    memory: int = 0  # number of kills caused by the sandbox's own memory limit
    killed: int = 0  # number of processes killed by an out-of-memory killer
    processes: int = 0  # number of forks refused by the sandbox's own process limit


class Usage:
    """Resource counters of a sandbox. Without a control group, only the machine's out-of-memory kills are counted."""

    killed_is_own = False  # True if `killed` counts processes of this sandbox only

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far by all processes, including ended ones; None if unknown."""
        return None

    def activity(self, pid: int) -> tuple[float | None, str] | None:
        """Return the CPU time used so far (None if unknown) and the states of all threads.

        The result is None if there is no new report.

        Args:
            pid: id of the sandbox's outermost process. If this process is stopped, the states contain "!", because code
                inside cannot stop it.
        """
        seconds, states = processes.activity([pid, *self.members(pid)])
        counted = self.cpu_seconds()
        return seconds if counted is None else counted, states + ("!" if states[:1] == "T" else "")

    def members(self, pid: int) -> list[int]:
        """Return the ids of the processes inside, given the id of the outermost process."""
        return processes.descendants(pid)

    def limit_hits(self) -> LimitHits:
        return LimitHits(killed=_fields(Path("/proc/vmstat")).get("oom_kill", 0))


class Group(Usage):
    """The control group of one sandbox, with one folder under cgroup v2 or one per controller under v1."""

    killed_is_own = True

    def __init__(self, version: str, folders: Mapping[str, Path]) -> None:
        self.version = version
        self.folders = folders
        # For cgroup v1: all kills, and kills by this group's limit
        self._killed = self._own_kills = 0

    @classmethod
    def create(cls, hierarchy: Hierarchy, limits: Limits) -> Group:
        """Create a control group with limits. Raises OSError, leaving nothing behind, if the kernel refuses."""
        name = f"agentfly-{reaper.owner_tag()}-{next(_numbers)}"
        group = cls(hierarchy.version, {controller: root / name for controller, root in hierarchy.roots.items()})
        try:
            for folder in group.folders.values():
                folder.mkdir()
            group._limit(limits)
        except OSError:
            group.remove()
            raise
        return group

    def _limit(self, limits: Limits) -> None:
        v1 = self.version == "v1"
        if limits.memory_mb is not None:
            memory = limits.memory_mb * 2**20 + _OWN_MEMORY
            folder = self.folders["memory" if v1 else ""]
            (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(memory))
            # Disable swap for the group: v1 limits the sum of memory and swap. Kernels without swap accounting lack the
            # file written here.
            name, size = ("memory.memsw.limit_in_bytes", memory) if v1 else ("memory.swap.max", 0)
            with contextlib.suppress(OSError):
                (folder / name).write_text(str(size))
        if limits.processes is not None:
            (self.folders["pids" if v1 else ""] / "pids.max").write_text(str(limits.processes + _OWN_PROCESSES))

    @property
    def procs_files(self) -> list[str]:
        """Paths of the files to which a process writes 0 to join the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders.values()]

    def enter(self, pid: int) -> None:
        for file in self.procs_files:
            Path(file).write_text(str(pid))

    def cpu_seconds(self) -> float | None:
        if "" in self.folders:
            used = _fields(self.folders[""] / "cpu.stat").get("usage_usec")
            return None if used is None else used / 1e6
        text = "cpuacct" in self.folders and _read(self.folders["cpuacct"] / "cpuacct.usage")
        return int(text) / 1e9 if text else None

    def limit_hits(self) -> LimitHits:
        v1 = self.version == "v1"
        refused = _fields(self.folders["pids" if v1 else ""] / "pids.events").get("max", 0)
        if not v1:
            events = _fields(self.folders[""] / "memory.events")
            return LimitHits(events.get("oom", 0), events.get("oom_kill", 0), refused)
        folder = self.folders["memory"]
        killed = _fields(folder / "memory.oom_control").get("oom_kill", 0)
        if killed > self._killed:
            # cgroup v1 does not reliably count the kills caused by this group's own limit, but records the peak usage.
            highest, limit = (_read(folder / f"memory.{name}_in_bytes") for name in ("max_usage", "limit"))
            self._own_kills += int(highest or 0) > int(limit or 0) - 2**20
            self._killed = killed
            with contextlib.suppress(OSError):
                # This resets the recorded peak to the current usage.
                (folder / "memory.max_usage_in_bytes").write_text("0")
        return LimitHits(self._own_kills, killed, refused)

    def members(self, pid: int = 0) -> list[int]:
        folder = self.folders.get("pids") or self.folders[""]
        return [int(pid) for pid in (_read(folder / "cgroup.procs") or "").split()]

    def kill(self, patience: float = 2.0) -> bool:
        """Kill every process in the group. Return False if a process is still alive after `patience` seconds."""
        deadline = time.monotonic() + patience
        while pids := self.members():
            for folder in self.folders.values():
                if (folder / "cgroup.kill").exists():
                    with contextlib.suppress(OSError):
                        (folder / "cgroup.kill").write_text("1")
            processes.send(9, *pids)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def remove(self, patience: float = 1.0) -> bool:
        """Remove the folders of an empty group, retrying for `patience` seconds. Return False if one still exists."""
        deadline = time.monotonic() + patience
        for folder in self.folders.values():
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.001)
        return True


def remove_orphans(hierarchy: Hierarchy) -> None:
    """Remove the control groups left by killed host processes, and kill the processes in them."""
    for root in hierarchy.roots.values():
        for folder in root.glob("agentfly-*"):
            if reaper.is_gone(folder.name.removeprefix("agentfly-").rpartition("-")[0]):
                left = Group(hierarchy.version, {"": folder})
                left.kill(0.5)
                left.remove(0.1)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _fields(file: Path) -> dict[str, int]:
    """Parse a file with lines of the form "name number"."""
    found = {}
    for line in (_read(file) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found
