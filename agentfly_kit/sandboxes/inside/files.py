"""The part of a FileSandbox that runs inside: read, write, edit and search files within one folder.

This file runs after base.py in the same namespace. Only files in the folder are accessible: a path is first resolved,
and then opened component by component from the folder's descriptor without following links, so that no concurrent
process can insert a link between check and use. Error messages are shown to the model.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import stat
from collections import deque
from typing import Any

from .base import CALLS, Refused, work_folder, write_new

UNDO_BYTES = 8 * 2**20
# Path and previous content of each changed file; the content is None if the file did not exist.
UNDO: deque[tuple[str, bytes | None]] = deque()
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def relative_path(path: str) -> str:
    """Resolve a path and return it relative to the working folder. Raises Refused if the path leaves this folder."""
    root = work_folder()
    if "\0" in path:
        raise Refused("a path cannot contain the character NUL")
    try:
        real = os.path.realpath(os.path.join(root, path))
    except OSError as error:
        raise Refused(f"{path!r}: {error.strerror}") from None
    if real != root and not real.startswith(root + "/"):
        raise Refused(f"{path!r} is outside the working folder; paths must be relative to it, such as 'src/main.py'")
    return os.path.relpath(real, root)


def open_parent(inside: str, make: bool = False) -> int:
    """Open the parent folder of a path and return its descriptor. If `make` is True, create missing folders."""
    try:
        here = os.open(work_folder(), OPEN_FOLDER)
    except OSError as error:
        raise Refused(f"the folder cannot be used: {error.strerror}") from None
    for name in inside.split("/")[:-1]:
        try:
            if make:
                try:
                    os.mkdir(name, dir_fd=here)
                except FileExistsError:
                    pass
            there = os.open(name, OPEN_FOLDER, dir_fd=here)
        except FileNotFoundError:
            raise Refused(f"{inside!r} does not exist") from None
        except OSError as error:
            raise Refused(f"{inside!r}: {name!r} is not a folder ({error.strerror})") from None
        finally:
            os.close(here)
        here = there
    return here


def read_bytes(path: str) -> tuple[str, bytes]:
    """Read a file. Return the file's path relative to the working folder, and its content."""
    inside = relative_path(path)
    above = open_parent(inside)
    try:
        file = os.open(
            inside.rpartition("/")[2], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above
        )
    except FileNotFoundError:
        raise Refused(f"{path!r} does not exist{suggestion(inside)}") from None
    except OSError as error:
        raise Refused(f"{path!r} cannot be read: {error.strerror}") from None
    finally:
        os.close(above)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise Refused(f"{path!r} is a folder; list it instead")
        if not stat.S_ISREG(mode):
            raise Refused(f"{path!r} is a device, a pipe or a socket, not a file")
        with open(file, "rb", closefd=False) as opened:
            return inside, opened.read()
    finally:
        os.close(file)


def suggestion(inside: str) -> str:
    names = [name for name in list_folder(".", 8)["names"] if not name.endswith("/")]
    close = [name for name in names if name.rpartition("/")[2] == inside.rpartition("/")[2]]
    close = close or difflib.get_close_matches(inside, names, 3)
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def read_text(path: str) -> tuple[str, str]:
    inside, data = read_bytes(path)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise Refused(f"{path!r} is not text ({len(data)} bytes)")
    return inside, text


def replace_file(inside: str, data: bytes | None) -> None:
    """Replace the content of a file atomically, or delete the file if `data` is None."""
    above = open_parent(inside, make=data is not None)
    name = inside.rpartition("/")[2]
    new = f".{name[:100]}.{secrets.token_hex(4)}"
    try:
        if data is None:
            os.unlink(name, dir_fd=above)
            return
        mode = 0o644
        try:
            status = os.stat(name, dir_fd=above, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{inside!r} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'not a file'}")
            mode = stat.S_IMODE(status.st_mode)
        except FileNotFoundError:
            pass
        try:
            write_new(new, mode, data, above)
            os.rename(new, name, src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            try:
                os.unlink(new, dir_fd=above)
            except OSError:
                pass
            raise
    except OSError as error:
        raise Refused(f"{inside!r} cannot be written: {error.strerror}") from None
    finally:
        os.close(above)


def change_file(inside: str, before: bytes | None, after: bytes | None) -> None:
    replace_file(inside, after)
    UNDO.append((inside, before))
    while sum(len(data or b"") for _, data in UNDO) > UNDO_BYTES:
        UNDO.popleft()


# --- the calls -----------------------------------------------------------------------------------


def read(path: str, start: int, end: int | None, numbers: bool, max_chars: int) -> str:
    _, text = read_text(path)
    lines = text.splitlines(keepends=True)
    if start < 1 or (end is not None and end < start):
        raise Refused(f"the first line must be at least 1 and at most the last line, got {start} and {end}")
    if start > max(1, len(lines)):
        raise Refused(f"{path!r} has {len(lines)} lines; there is no line {start}")
    shown = [f"{i:6}\t{line}" if numbers else line for i, line in enumerate(lines[start - 1 : end], start)]
    size, fit = 0, 0
    for line in shown:
        size += len(line)
        fit += size <= max_chars
    if size > max_chars:
        hint = f"read a part: lines {start} to {start + fit - 1}" if fit else "its first line alone is longer"
        raise Refused(f"{path!r}: got {size} characters, more than the maximum of {max_chars} per call; {hint}")
    return "".join(shown)


def write(path: str, text: str) -> str:
    inside = relative_path(path)
    if inside == "." or path.endswith("/"):
        raise Refused(f"{path!r} is a folder; give the path of a file")
    try:
        before: bytes | None = read_bytes(path)[1]
    except Refused:
        before = None
    change_file(inside, before, text.encode("utf-8", "surrogateescape"))
    count = len(text.splitlines())
    return f"{inside}: {'written' if before is None else 'overwritten'}, {count} line{'' if count == 1 else 's'}"


def edit(path: str, old: str, new: str) -> str:
    inside, text = read_text(path)
    if not old:
        raise Refused("the text to replace must not be empty; write the file instead to create or overwrite it")
    if old == new:
        raise Refused("the new text must differ from the text to replace, or nothing would change")
    if old not in text and "\r\n" in text and "\r" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    places = [found.start() for found in re.finditer(re.escape(old), text)]
    if not places:
        raise Refused(
            f"the text to replace is not in {inside}; even whitespace must match exactly{closest_match(old, text)}"
        )
    numbers = [text.count("\n", 0, place) + 1 for place in places]
    if len(places) > 1 or text.count(old, places[0] + 1):
        at = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
        raise Refused(
            f"the text to replace is in {inside} {len(places)} times (lines {at}); "
            "include more of the surrounding lines, so that it occurs once"
            if len(places) > 1
            else f"the text to replace overlaps itself in {inside}; include more of the surrounding lines"
        )
    after = text[: places[0]] + new + text[places[0] + len(old) :]
    change_file(inside, text.encode(), after.encode("utf-8", "surrogateescape"))
    first = max(1, numbers[0] - 2)
    lines = after.splitlines()[first - 1 : min(numbers[0] + new.count("\n") + 2, first + 30)]
    shown = "\n".join(f"{number:6}\t{line[:200]}" for number, line in enumerate(lines, first))
    return f"{inside}: replaced at line {numbers[0]}. It now reads:\n{shown}"


def closest_match(old: str, text: str) -> str:
    """Return a hint about where `old` may be: lines that differ only in whitespace, or else the most similar line."""
    lines = text.splitlines()
    wanted = [line.strip() for line in old.strip("\r\n").splitlines()]
    bare = [line.strip() for line in lines]
    for at in range(len(bare) - len(wanted) + 1):
        if bare[at : at + len(wanted)] == wanted:
            there = "\n".join(lines[at : at + min(len(wanted), 20)])
            return f". A text that differs only in whitespace is at line {at + 1}:\n{there}"
    key = max(wanted, key=len, default="")
    close = [line for line in bare if key and key in line] or (
        difflib.get_close_matches(key, bare[:20000], 1, 0.6) if len(key) > 3 else []
    )
    if close:
        at = bare.index(close[0])
        return f". The most similar line is {at + 1}:\n{lines[at][:500]}"
    return ""


def list_folder(path: str, depth: int, max_names: int = 1000) -> dict[str, Any]:
    """List a folder. Return {"names": paths, with a trailing slash for folders, "more": number of omitted paths}."""
    inside = relative_path(path)
    top = os.path.join(work_folder(), inside)
    names: list[str] = []
    more = 0
    if not os.path.isdir(top):
        raise Refused(f"{path!r} {'is not a folder; read it instead' if os.path.exists(top) else 'does not exist'}")
    pending = [("" if inside == "." else inside, depth)]
    while pending:
        here, left = pending.pop()
        try:
            entries = sorted(os.scandir(os.path.join(work_folder(), here)), key=lambda entry: entry.name)
        except OSError:
            continue
        below = []
        for entry in entries:
            name = os.path.join(here, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if len(names) < max_names:
                names.append(name + "/" if is_folder else name)
            else:
                more += 1
            if is_folder and left > 1 and entry.name != ".git":
                below.append((name, left - 1))
        pending += reversed(below)
    return {"names": sorted(names), "more": more}


def grep(pattern: str, path: str, max_matches: int) -> dict[str, Any]:
    """Search files. Return {"found": [path, line number, line] per match, "more": True if there are more matches}."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise Refused(
            f"{pattern!r} is not a regular expression: {error}; put a \\ before special characters that are literal"
        ) from None
    inside = relative_path(path)
    if os.path.isdir(os.path.join(work_folder(), inside)):
        names = [name for name in list_folder(path, 64, 100_000)["names"] if not name.endswith("/")]
    else:
        names = [inside]
    found: list[list[Any]] = []
    for name in names:
        try:
            _, text = read_text(name)
        except Refused:
            if name == path:
                raise
            continue  # the file is not text, or was deleted in the meantime
        for number, line in enumerate(text.splitlines(), 1):
            if wanted.search(line):
                if len(found) == max_matches:
                    return {"found": found, "more": True}
                found.append([name, number, line[:500]])
    return {"found": found, "more": False}


def undo(path: str | None) -> str:
    inside = None if path is None else relative_path(path)
    for at in range(len(UNDO) - 1, -1, -1):
        name, before = UNDO[at]
        if inside in (None, name):
            replace_file(name, before)
            del UNDO[at]
            return f"{name}: {'deleted' if before is None else 'restored to its state before the last change'}"
    raise Refused("there is nothing to undo" if path is None else f"there is no change to {path!r} to undo")


CALLS |= {"read": read, "write": write, "edit": edit, "list": list_folder, "grep": grep, "undo": undo}
