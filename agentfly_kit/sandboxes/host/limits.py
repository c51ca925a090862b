"""Resource limits of a sandbox, and the control groups that enforce them.

A limit is either enforced or reported as not enforced.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import SettingsError
from . import reaper


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox between two resets. None means no limit.

    Units: memory_mb and disk_mb in MB of 2**20 bytes; processes counts threads too; cpu_seconds is CPU time per call.

    Whether a limit applies in total or to each process or file depends on the isolation level and the machine; see
    `PythonSandbox.limit_mechanisms`.

    Attributes:
        memory_mb: memory that the code inside can use.
        processes: number of processes and threads.
        cpu_seconds: CPU time per call.
        disk_mb: size of the files written inside.
        network: True to allow network access.
    """

    memory_mb: int | None = 256
    processes: int | None = 32
    cpu_seconds: float | None = 10.0
    disk_mb: int | None = 64
    network: bool = False

    def __post_init__(self) -> None:
        least = {"memory_mb": 32, "processes": 1, "cpu_seconds": 0.1, "disk_mb": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= low):
                raise SettingsError(f"{name}={value!r}: want at least {low}, or None for no limit")


_MEBIBYTE = 2**20
# Allowance for bwrap's own process and the zygote, in addition to the code inside.
_OWN_PROCESSES = 2
_OWN_MEMORY = 24 * _MEBIBYTE
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Places for control groups. `roots` maps each controller to the folder in which this process can create groups."""

    version: str  # "v1" or "v2"
    roots: Mapping[str, Path]


def find_hierarchy(mounts: str | None = None, own: str | None = None) -> Hierarchy | None:
    """Find where this process can create control groups; None if nowhere. The arguments replace /proc in tests."""
    try:
        mounts = Path("/proc/self/mounts").read_text() if mounts is None else mounts
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    except OSError:
        return None
    paths: dict[str, str] = {}  # controller ("" for v2) -> path of this process below the mount
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
        # A group that contains processes cannot delegate controllers, so usually only a sibling of our own group works.
        for root in (here, here.parent):
            if root.is_relative_to(unified) and os.access(root, os.W_OK) and os.access(root / "cgroup.procs", os.W_OK):
                try:
                    handed_down = set((root / "cgroup.subtree_control").read_text().split())
                except OSError:
                    continue
                if {"memory", "pids"} <= handed_down:
                    return Hierarchy("v2", {"": root})
    return None


def _own_group(mount: Path, path: str) -> Path:
    """Return the folder of this process's group: the mount itself if `path` is a host path, as in some containers."""
    place = mount / path.lstrip("/")
    return place if place.is_dir() else mount


class Group:
    """The control group of one sandbox (one folder for v2, one per controller for v1).

    Raises:  OSError if the kernel refuses; then nothing is left behind.
    """

    def __init__(self, hierarchy: Hierarchy, limits: Limits) -> None:
        self.version = hierarchy.version
        self.name = f"agentfly-{reaper.owner_tag()}-{next(_numbers)}"
        self.folders = {controller: root / self.name for controller, root in hierarchy.roots.items()}
        try:
            for folder in self.folders.values():
                folder.mkdir()
            self._limit(limits)
        except OSError:
            self.remove()
            raise

    def _limit(self, limits: Limits) -> None:
        memory = None if limits.memory_mb is None else limits.memory_mb * _MEBIBYTE + _OWN_MEMORY
        processes = None if limits.processes is None else limits.processes + _OWN_PROCESSES
        if self.version == "v1":
            if memory is not None:
                _write(self.folders["memory"] / "memory.limit_in_bytes", memory)
                # Otherwise the group would swap. Kernels without swap accounting do not have this file.
                _write(self.folders["memory"] / "memory.memsw.limit_in_bytes", memory, optional=True)
            if processes is not None:
                _write(self.folders["pids"] / "pids.max", processes)
        else:
            folder = self.folders[""]
            if memory is not None:
                _write(folder / "memory.max", memory)
                _write(folder / "memory.swap.max", 0, optional=True)
            if processes is not None:
                _write(folder / "pids.max", processes)

    @property
    def procs_files(self) -> list[str]:
        """Files to which a process writes 0 to enter the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders.values()]

    def enter(self, pid: int) -> None:
        """Move another process into the group.

        The first move after a pause takes 10 to 20 ms, because taking the kernel's `cgroup_threadgroup_rwsem` starts
        with an RCU grace period.
        """
        for file in self.procs_files:
            Path(file).write_text(str(pid))

    def cpu_seconds(self) -> float | None:
        """Return the CPU time used so far by all processes of the group, including ended ones; None if unknown."""
        if "cpuacct" in self.folders:
            text = _read(self.folders["cpuacct"] / "cpuacct.usage")
            return int(text) / 1e9 if text else None
        if "" in self.folders:
            used = _fields(self.folders[""] / "cpu.stat").get("usage_usec")
            return None if used is None else used / 1e6
        return None

    def limit_hits(self) -> tuple[int, int]:
        """Return the number of out-of-memory kills and the number of refused forks."""
        if self.version == "v1":
            memory = _fields(self.folders["memory"] / "memory.oom_control").get("oom_kill", 0)
            return memory, _fields(self.folders["pids"] / "pids.events").get("max", 0)
        folder = self.folders[""]
        return _fields(folder / "memory.events").get("oom_kill", 0), _fields(folder / "pids.events").get("max", 0)

    def processes(self) -> list[int]:
        folder = self.folders.get("pids") or self.folders[""]
        return [int(pid) for pid in (_read(folder / "cgroup.procs") or "").split()]

    def kill(self, patience: float = 2.0) -> bool:
        """Kill every process in the group. Return True if it is empty, False after `patience` seconds."""
        deadline = time.monotonic() + patience
        while pids := self.processes():
            for folder in self.folders.values():
                if (folder / "cgroup.kill").exists():
                    _write(folder / "cgroup.kill", 1, optional=True)
            for pid in pids:
                try:
                    os.kill(pid, 9)
                except (ProcessLookupError, PermissionError):
                    pass
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def remove(self, patience: float = 1.0) -> bool:
        """Remove the group's empty folders, retrying for `patience` seconds while the kernel keeps them busy.

        Returns:  True if they are gone.
        """
        deadline = time.monotonic() + patience
        for folder in self.folders.values():
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() < deadline:
                        time.sleep(0.001)
                        continue
                    return False
                break
        return True


def remove_orphans(hierarchy: Hierarchy) -> None:
    """Remove the groups whose owner was killed, and kill the processes left in them."""
    for root in hierarchy.roots.values():
        for folder in root.glob("agentfly-*"):
            if reaper.is_gone(folder.name.removeprefix("agentfly-").rpartition("-")[0]):
                left = Group.__new__(Group)
                left.version, left.folders = hierarchy.version, {"": folder}
                left.kill(0.5)
                left.remove(0.1)


def _write(file: Path, value: int, optional: bool = False) -> None:
    try:
        file.write_text(str(value))
    except OSError:
        if not optional:
            raise


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _fields(file: Path) -> dict[str, int]:
    """Parse a file of "name number" lines."""
    found = {}
    for line in (_read(file) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found
