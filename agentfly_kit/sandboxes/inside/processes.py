"""Helpers used on the host and inside sandboxes: find the descendants of a process, and empty a folder."""

from __future__ import annotations

import os


def is_dead(pid: int) -> bool:
    """Return True if a process does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def descendants(root: int) -> list[int]:
    """Return all descendants of `root`; empty if the kernel does not list the children of a process."""
    found: list[int] = []
    unseen = [root]
    while unseen:
        pid = unseen.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as lines:
                    children = [int(child) for child in lines.read().split()]
                found += children
                unseen += children
        except OSError:
            continue  # the process has ended in the meantime
    return found


def wipe(folder: str, keep: list[str]) -> None:
    """Delete the content of a folder, whatever its permissions and depth, except the read-only mounts in `keep`."""
    # Move nested folders up into `folder` before emptying them, so that deep nesting needs no long paths or recursion.
    if os.stat(folder).st_uid == os.getuid():  # mounts of a container belong to root and are writable for all
        os.chmod(folder, 0o700)
    mark, number = os.urandom(8).hex(), 0
    while True:
        folders = []
        for entry in list(os.scandir(folder)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif entry.path in keep:
                continue
            elif any(kept.startswith(entry.path + "/") for kept in keep):
                wipe(entry.path, keep)
            else:
                folders.append(entry.path)
        if not folders:
            return
        for path in folders:
            os.chmod(path, 0o700)
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    number += 1
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, f"{folder}/{mark}-{number}")
                else:
                    os.unlink(entry.path)
            os.rmdir(path)
