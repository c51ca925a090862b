"""Tag control groups, folders and containers with the process that owns them, and clean up after killed owners.

A tag contains the owner's pid and start time, its pid namespace and the boot id of the machine, because a pid alone may
be reused by another process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from ..inside import processes

SCRATCH = "agentfly-sandbox-"


def start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot. Raises OSError if there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]


@functools.cache
def _namespace_and_boot() -> tuple[str, str]:
    """Return the pid namespace and the boot id; empty strings if unavailable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
        return str(os.stat("/proc/self/ns/pid").st_ino), boot
    except OSError:
        return "", ""


@functools.cache
def _owner_tag(pid: int) -> str:
    try:
        return "-".join((str(pid), start_time(pid), *_namespace_and_boot()))
    except OSError:
        return f"{pid}-0--"


def owner_tag() -> str:
    """Return the tag of this process: `pid-start-namespace-boot`."""
    return _owner_tag(os.getpid())


def is_gone(tag: str) -> bool:
    """Return True if the tagged process has exited; False for invalid tags and tags of other boots or namespaces."""
    parts = tag.split("-")
    if len(parts) != 4 or not parts[0].isdigit() or not parts[1].isdigit() or parts[1] == "0":
        return False
    if tuple(parts[2:]) != _namespace_and_boot() or not parts[2]:
        return False
    try:
        return start_time(int(parts[0])) != parts[1]
    except FileNotFoundError:
        return True
    except OSError:
        return False


def reap_folders(top: str | None = None) -> None:
    """Delete the scratch folders of sandboxes that were killed together with their host process."""
    mine = os.getuid() if hasattr(os, "getuid") else -1
    with contextlib.suppress(OSError), os.scandir(top or tempfile.gettempdir()) as entries:
        for entry in entries:
            owner = entry.name.removeprefix(SCRATCH).rpartition("-")[0]
            if not entry.name.startswith(SCRATCH) or not is_gone(owner):
                continue
            # Other users can write to `top`, so delete only folders that belong to this user, and never follow links.
            with contextlib.suppress(OSError):  # another process may be deleting it too
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == mine:
                    processes.wipe(entry.path, [])
                    os.rmdir(entry.path)
