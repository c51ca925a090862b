"""Helpers used on the host and inside sandboxes: inspect processes, send signals to them, and empty a folder."""

from __future__ import annotations

import os


def is_dead(pid: int) -> bool:
    """Return True if a process does not exist or is a zombie."""
    try:
        return _status(f"/proc/{pid}/stat")[0] in "ZX"
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


def send(number: int, *pids: int) -> None:
    """Send a signal to processes, ignoring those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def activity(pids: list[int]) -> tuple[float, str]:
    """Return the CPU time of processes and their ended children in seconds, and the states of all their threads."""
    ticks, states = 0, ""
    for pid in pids:
        try:
            ticks += sum(map(int, _status(f"/proc/{pid}/stat")[11:15]))
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # the process has ended in the meantime
        for task in tasks:
            try:
                states += _status(f"/proc/{pid}/task/{task}/stat")[0]
            except OSError:
                continue
    return ticks / os.sysconf("SC_CLK_TCK"), states


def _status(file: str) -> list[str]:
    """Return the fields of a stat file that follow the name. Code can set the name to any bytes."""
    with open(file, "rb") as lines:
        return lines.read().rpartition(b")")[2].decode().split()


def wipe(folder: str, keep: list[str]) -> None:
    """Delete the content of a folder, regardless of permissions and depth, except the read-only mounts in `keep`."""
    # Move nested folders up into `folder` before emptying them, so that deep nesting needs no long paths or recursion.
    if os.stat(folder).st_uid == os.getuid():  # mounts of a container belong to root and are writable by everyone
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
