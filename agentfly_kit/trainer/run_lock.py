"""Lock for the folder of a training run, so that only one run at a time trains in it."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol

from agentfly_kit.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


class Trainer(Protocol):
    """Protocol of objects that train in the folder of a run. `iterating` is True during an iteration."""

    @property
    def iterating(self) -> bool: ...


class _Held(NamedTuple):
    file: int
    trainer: weakref.ref[Trainer]


# Locks held by this process, keyed by the resolved path of the folder
_held: dict[Path, _Held] = {}


def _close_inherited() -> None:
    """Close the lock files in a forked process, which would otherwise keep the locks if its parent dies."""
    for held in _held.values():
        os.close(held.file)
    _held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_inherited)


class RunLock:
    """Lock for the folder of a run. Also detects whether another run has changed the folder.

    The operating system releases the lock if the process dies. On Windows and on file systems without locks, other
    processes are not prevented from training in the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: object = None  # state of the folder after the last iteration of its trainer

    def acquire(self, trainer: Trainer) -> bool:
        """Acquire the lock, so that no other process can train in the folder until `release` is called.

        Within this process, another trainer can take over the lock while the current one is not iterating.

        Returns:
            False if the folder must be read again, because the lock was newly acquired and the folder has changed since
            `mark_read`.

        Raises:
            RunError: If another run is training in the folder.
        """
        key = self.path.resolve()
        if fcntl is None or (self._seen is not None and not self.path.is_dir()):
            return True  # do not create a deleted folder again
        held = _held.get(key)
        other = None if held is None else held.trainer()
        if other is trainer:
            return True
        if other is not None and other.iterating:
            raise RunError(
                f"another run of this process is training in {self.path}; wait for it, or use another folder"
            )
        file = self._lock_file() if held is None else held.file
        if file is None:
            return True
        _held[key] = _Held(file, weakref.ref(trainer))
        return self._seen is None or self._seen == self._state()

    def _lock_file(self) -> int | None:
        """Open and lock the lock file. Return None if the file system does not support locks."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(f"{self.path} cannot be prepared for a run ({error})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(file, 0)
            os.write(file, str(os.getpid()).encode())
            return file
        except OSError as error:
            holder = os.read(file, 20).decode(errors="replace")
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return None
            raise RunError(
                f"another process{f' ({holder})' if holder else ''} is training in {self.path}; wait for it, or use "
                "another folder"
            ) from None

    def release(self, trainer: Trainer) -> None:
        """Let other runs train in the folder. Does nothing if this trainer does not hold the lock."""
        key = self.path.resolve()
        held = _held.get(key)
        if held is not None and held.trainer() is trainer:
            del _held[key]
            os.close(held.file)

    def mark_read(self) -> None:
        """Record the current state of the folder, for comparison by the next call of `acquire`."""
        self._seen = self._state()

    def _state(self) -> object:
        """Return a value that changes if another process trains in the folder."""
        found = []
        for name in ("run.json", "steps.jsonl"):
            with contextlib.suppress(OSError):
                status = (self.path / name).stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found
