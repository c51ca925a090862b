"""First file of the programs that hosted.py sends to the interpreter of a sandbox as source code.

This file imports only the standard library. The other files of a program run after it in the same namespace and add
their functions to CALLS. A call consists of a function name and JSON arguments, and its answer is JSON; long answers
are fetched in chunks. Functions of this file write a sandbox's initial files and copy its folder to another sandbox.
"""

from __future__ import annotations

import base64
import json
import linecache
import os
import stat
from collections.abc import Callable
from typing import Any

WORK_FOLDER = (
    # Subfolder of the sandbox's folder in which a shell starts and file operations work; set by the host
    ""
)
CALLS: dict[str, Callable[..., Any]] = {}


class Refused(Exception):
    """Raised when a request cannot be carried out. The message is shown to the caller."""


class RawRepr:
    """Text whose repr is the text itself, because the interpreter returns the repr of a cell's value."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class ReplyBuffer:
    """The last answer, kept until it has been fetched completely."""

    text = ""

    def chunk(self, offset: int, size: int) -> RawRepr:
        piece = RawRepr(f"{len(self.text)} {self.text[offset : offset + size]}")
        if offset + size >= len(self.text):
            self.text = ""
        return piece


REPLY = ReplyBuffer()


def handle(name: str, arguments: str, size: int) -> RawRepr:
    """Call the function `name` in CALLS. Return the length of its answer and the answer's first `size` characters."""
    # The interpreter caches the source of every cell, which may contain whole files.
    linecache.clearcache()
    answer: dict[str, Any]
    try:
        answer = {"answer": CALLS[name](**json.loads(arguments))}
    except Refused as refusal:
        answer = {"refused": str(refusal)}
    REPLY.text = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace").decode()
    return REPLY.chunk(0, size)


def home() -> str:
    return os.path.realpath(os.environ["HOME"])


def work_folder() -> str:
    """Return the path of the working folder, creating it if necessary."""
    path = os.path.join(home(), WORK_FOLDER) if WORK_FOLDER else home()
    os.makedirs(path, exist_ok=True)
    return path


# --- the sandbox's folder -------------------------------------------------------------------------


def list_home() -> list[list[Any]]:
    """List the sandbox's folder. Return [path, kind, mode, size, mtime in ns, target of a link] for each entry."""
    top, found = home(), []
    device = os.stat(top).st_dev
    unseen = [""]
    while unseen:
        folder = unseen.pop()
        for entry in sorted(os.scandir(os.path.join(top, folder)), key=lambda entry: entry.name):
            path = os.path.join(folder, entry.name)
            status = entry.stat(follow_symlinks=False)
            if status.st_dev != device:
                continue  # skip read-only mounts of the host's Python
            row: list[Any] = [path, "other", stat.S_IMODE(status.st_mode), status.st_size, status.st_mtime_ns, ""]
            if entry.is_symlink():
                row[1], row[5] = "link", os.readlink(entry.path)
            elif entry.is_dir():
                row[1] = "folder"
                unseen.append(path)
            elif entry.is_file():
                row[1] = "file"
            found.append(row)
    return found


def read_chunk(path: str, offset: int, size: int) -> str:
    with open(os.path.join(home(), path), "rb") as file:
        file.seek(offset)
        return base64.b64encode(file.read(size)).decode()


def put(entries: list[dict[str, Any]]) -> None:
    """Create files, folders and links in the sandbox's folder. Entries with "more": True append to existing files."""
    os.umask(0o022)
    for entry in entries:
        path = os.path.join(home(), entry["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if entry["kind"] == "folder":
            make_folder(path, entry["mode"])
        elif entry["kind"] == "link":
            os.symlink(entry["link"], path)
        else:
            data = base64.b64decode(entry["data"])
            if entry.get("more"):
                with open(path, "ab") as file:
                    file.write(data)
            else:
                write_new(path, entry["mode"], data)
            if entry.get("mtime") is not None:
                try:
                    os.utime(path, ns=(entry["mtime"], entry["mtime"]))
                except PermissionError:
                    pass  # the level "landlock" forbids changing times


def make_folder(path: str, mode: int) -> None:
    """Create a folder with the given permissions, or try to set the permissions of an existing folder."""
    before = os.umask(0)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        try:
            os.chmod(path, mode)
        except PermissionError:
            pass  # the level "landlock" forbids changing permissions
    finally:
        os.umask(before)


def write_new(path: str, mode: int, data: bytes, folder: int | None = None) -> None:
    """Create a file with its final permissions, because an isolation level may forbid changing them later."""
    before = os.umask(0)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(path, flags, mode, dir_fd=folder)
        except FileExistsError:
            if folder is not None:
                raise
            os.unlink(path)
            file = os.open(path, flags, mode)
    finally:
        os.umask(before)
    with open(file, "wb") as opened:
        opened.write(data)


CALLS |= {"list_home": list_home, "read_chunk": read_chunk, "put": put}
