"""Whose a thing is that can outlive its process, and what the killed ones left: control groups, folders, containers.

A name carries its owner's number, when that process started, and where numbers like it are given: the pid namespace and
the boot of the machine. A number alone is soon another process's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from ..inside import zygote

SCRATCH = "agentfly-sandbox-"


def start_time(pid: int) -> str:
    """When a process started, in ticks since the boot.

    Raises:  OSError if there is none of this number.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@functools.cache
def _namespace_and_boot() -> tuple[str, str]:
    """The pid namespace and the boot; empty where the kernel does not tell."""
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
    """This process: `pid-start-namespace-boot`."""
    return _owner_tag(os.getpid())


def is_gone(tag: str) -> bool:
    """Whether the process of a mark has ended. False for one that cannot be seen from here, or for no mark at all."""
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
    """Delete the scratch folders of processes that were killed together with their sandboxes."""
    mine = os.getuid() if hasattr(os, "getuid") else -1
    with contextlib.suppress(OSError), os.scandir(top or tempfile.gettempdir()) as entries:
        for entry in entries:
            owner = entry.name.removeprefix(SCRATCH).rpartition("-")[0]
            if not entry.name.startswith(SCRATCH) or not is_gone(owner):
                continue
            # Others may write to this place: only a real folder of our own, never what a link leads to.
            with contextlib.suppress(OSError):  # another process may be at it too
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == mine:
                    zygote.wipe(entry.path, [])
                    os.rmdir(entry.path)
