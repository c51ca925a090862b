"""Resource limits of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import check_settings

_MEBIBYTE = 2**20
_OPEN_FILES = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox. None means no limit.

    Whether a limit applies in total or to each process or file depends on the isolation level and the machine; see
    `PythonSandbox.limit_mechanisms`. Two limits are fixed: each process can have 512 open files, and no process dumps
    core.

    Attributes:
        memory_mb: memory available to the code in the sandbox, in MB (2**20 bytes).
        processes: number of processes and threads.
        cpu_seconds: CPU time per call.
        disk_mb: size of the files written inside, in MB (2**20 bytes).
        network: True to allow network access.
    """

    memory_mb: int | None = 256
    processes: int | None = 32
    cpu_seconds: float | None = 10.0
    disk_mb: int | None = 64
    network: bool = False

    def __post_init__(self) -> None:
        check_settings(
            self,
            {
                "memory_mb": "of at least 32",
                "processes": "of at least 1",
                "cpu_seconds": "of at least 0.1",
                "disk_mb": "of at least 1",
            },
        )

    def rlimits(self) -> dict[str, int]:
        """Return the limits of each process, keyed by their names in the module `resource`."""
        found = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": _OPEN_FILES}
        if self.memory_mb is not None:
            # A process that reaches this limit gets a MemoryError and keeps its variables. The control group's limit,
            # which is higher, would kill the process.
            found["RLIMIT_DATA"] = self.memory_mb * _MEBIBYTE
        if self.disk_mb is not None:
            found["RLIMIT_FSIZE"] = self.disk_mb * _MEBIBYTE
        return found

    def describe(self, mechanisms: Mapping[str, str]) -> dict[str, str]:
        """Return the mechanism that enforces each limit; "not limited" for a limit that is None."""
        return {
            **{name: how if getattr(self, name) is not None else "not limited" for name, how in mechanisms.items()},
            "open_files": f"RLIMIT_NOFILE, {_OPEN_FILES} in each process",
        }
