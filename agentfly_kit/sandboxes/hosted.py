"""Base class of sandboxes that load a program into their interpreter and call its functions.

The program consists of files in `inside/`, whose source is sent to the interpreter when a call first needs it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import SandboxError, SettingsError, ToolError, check_value
from .host.commands import INSIDE
from .result import SandboxResult
from .sandbox import Sandbox

Files = Mapping[str, str | bytes] | str | os.PathLike[str]  # a dict from paths to contents, or a folder
G = TypeVar("G", bound="HostedSandbox")

_CHUNK_BYTES = 256 * 1024  # bytes of a file sent in one call
COPY_SECONDS = 60.0
_MAX_ANSWER = 2**27  # maximum length of an answer in characters; answers from inside are untrusted
_PROGRAM_MISSING = "name '_agentfly' is not defined"


@functools.cache
def _program_cell(names: tuple[str, ...], folder: str) -> str:
    """Return code that loads the program's files into the namespace `_agentfly`, unless it is already defined."""
    body = ""
    for name in names:
        lines = (INSIDE / f"{name}.py").read_text(encoding="utf-8").splitlines()
        # All files share one namespace, so their imports of each other are removed.
        part = "\n".join("" if line.startswith("from .") else line for line in lines)
        body += f"    exec(compile({part!r}, {name!r}, 'exec', dont_inherit=True), _space)\n"
    body += f"    _space['WORK_FOLDER'] = {folder!r}\n"
    # `_agentfly` is bound last, because a cancelled call may interrupt this code.
    return (
        f"if '_agentfly' not in globals():\n    _space = {{'__name__': '_agentfly'}}\n{body}    _agentfly = _space\n"
    )


class HostedSandbox(Sandbox):
    """Base class of sandboxes that load a program into the interpreter. The settings are those of PythonSandbox.

    A subclass sets `_inside_files`, and overrides `_setup` to prepare a fresh sandbox. A subclass calls the program
    with `_call`, which also returns the results of failed calls, or with `_request`, which raises ToolError for them.
    """

    _inside_files: tuple[str, ...] = ("base",)
    _folder: str = ""  # subfolder of the sandbox's folder in which the program works

    # --- calls -----------------------------------------------------------------------------------

    async def _call(self, name: str, timeout: float, **given: object) -> tuple[SandboxResult, dict[str, Any]]:
        """Call the program's function `name`. Return the result, and {"answer": return value} or, on failure, {}."""
        check_value("timeout", timeout, limit="above 0")
        async with self._exclusive():
            return await self._send(name, timeout, **given)

    async def _request(self, name: str, timeout: float = 10.0, **given: object) -> Any:
        """Call the loaded program's function `name` and return its answer. Raises ToolError if the call fails."""
        return _answer(name, timeout, *await self._call(name, timeout, **given))

    async def _request_locked(self, name: str, **given: object) -> Any:
        """Like `_request`, but the caller must hold the sandbox's lock."""
        return _answer(name, COPY_SECONDS, *await self._send(name, COPY_SECONDS, **given))

    async def _send(self, name: str, timeout: float, **given: object) -> tuple[SandboxResult, dict[str, Any]]:
        """Like `_call`, but the caller must hold the sandbox's lock."""
        size = self.max_output - 16
        call = f"_agentfly['handle']({name!r}, {json.dumps(given)!r}, {size})"
        result = await self._execute(call, timeout)
        if result.error_type == "NameError" and (result.error or "").endswith(_PROGRAM_MISSING):
            await self._execute(_program_cell(self._inside_files, self._folder), COPY_SECONDS)
            result = await self._execute(call, timeout)
        total, text = _parse_chunk(result.value)
        while total is not None and len(text) < total:
            more = await self._execute(f"_agentfly['REPLY'].chunk({len(text)}, {size})", COPY_SECONDS)
            again, part = _parse_chunk(more.value)
            if again != total or not part:
                total = None
            text += part
        if total is None or len(text) > total:
            return result, {}
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            return result, {}
        if not isinstance(reply, dict):
            return result, {}
        if "refused" in reply:
            raise ToolError(str(reply["refused"]))
        return result, reply

    # --- the folder ------------------------------------------------------------------------------

    async def _seed(self, files: Files) -> None:
        entries = seed_entries(files, self._folder)
        async with self._exclusive():
            await self._put(entries)

    async def _put(self, entries: Iterable[dict[str, Any]]) -> None:
        """Write files, batching small ones into one call. The caller must hold the lock."""
        batch: list[dict[str, Any]] = []
        size = 0
        try:
            for entry in entries:
                batch.append(entry)
                size += len(entry.get("data", "")) + 200
                if size > 2 * _CHUNK_BYTES:
                    await self._request_locked("put", entries=batch)
                    batch, size = [], 0
            if batch:
                await self._request_locked("put", entries=batch)
        except ToolError as error:
            raise SandboxError(f"the files of this {type(self).__name__} could not be written: {error}") from None

    async def _copy_home(self, into: HostedSandbox) -> None:
        """Copy this sandbox's folder to another sandbox. The caller must hold the locks of both sandboxes."""
        for path, kind, mode, size, mtime, link in await self._request_locked("list_home"):
            if kind == "other":
                raise SandboxError(f"this {type(self).__name__} cannot fork: {path!r} is a pipe, socket or device")
            entry: dict[str, Any] = {"path": path, "kind": kind, "mode": mode, "link": link}
            if kind != "file":
                await into._request_locked("put", entries=[entry])
                continue
            for offset in range(0, max(1, size), _CHUNK_BYTES):
                data = await self._request_locked("read_chunk", path=path, offset=offset, size=_CHUNK_BYTES)
                piece = entry | {"data": data, "more": offset > 0, "mtime": mtime}
                await into._request_locked("put", entries=[piece])

    @asynccontextmanager
    async def _copying(self: G, into: G) -> AsyncIterator[None]:
        """Hold the locks of both sandboxes during a copy. Empty `into` first, and reset it if the copy fails."""
        if not isinstance(into, type(self)) or into is self:
            raise SandboxError(f"into must be another {type(self).__name__}, got {into!r}")
        if self._is_writable_container:
            raise SandboxError(f"a {type(self).__name__} in a writable container cannot fork")
        try:
            async with self._exclusive(), into._exclusive():
                try:
                    # Do not call `_setup`, because the initial files are copied too, in their current state.
                    await into._new_interpreter(wipe=True)
                    yield
                except ToolError as error:
                    raise SandboxError(f"this {type(self).__name__} cannot fork: {error}") from None
        except BaseException:
            if into.alive:
                await into.reset()
            raise


def _parse_chunk(value: str | None) -> tuple[int | None, str]:
    """Parse a chunk of an answer. Return the answer's total length and the chunk, or (None, "") for invalid data."""
    number, _, text = (value or "").partition(" ")
    if not (number.isascii() and number.isdigit()) or len(number) > 12 or int(number) > _MAX_ANSWER:
        return None, ""
    return int(number), text


def _answer(name: str, timeout: float, result: SandboxResult, reply: dict[str, Any]) -> Any:
    if "answer" in reply:
        return reply["answer"]
    lost = "; the sandbox was restarted with its initial files" if result.files_lost else ""
    if result.limit == "time":
        raise ToolError(f"{name} exceeded the time limit of {timeout:g} s{lost}")
    if result.limit is not None:
        raise ToolError(f"{name} exceeded the {result.limit} limit{lost}")
    last = (result.error or "no valid result was returned").splitlines()[-1]
    raise ToolError(f"{name} failed: {last}{lost}")


# --- initial files ------------------------------------------------------------------------------


def seed_entries(files: Files, folder: str) -> list[dict[str, Any]]:
    """Convert files (a mapping from paths to contents, or a folder of the host) to entries for `_put`."""
    found: list[dict[str, Any]] = []
    if isinstance(files, Mapping):
        for path, content in files.items():
            parts = path.split("/") if isinstance(path, str) else [".."]
            if not path or path.startswith("/") or path.endswith("/") or ".." in parts or "\0" in path:
                raise SettingsError(
                    f"files must have paths within the sandbox's folder, such as 'src/main.py', got {path!r}"
                )
            data = content.encode() if isinstance(content, str) else content
            found += file_chunks(os.path.join(folder, path), 0o644, data)
        return found
    top = Path(files)
    if not top.is_dir():
        raise SettingsError(f"files must be an existing folder or a dict from paths to text, got {str(files)!r}")
    for here, folders, names in os.walk(top):
        for name in sorted([*folders, *names]):
            file = Path(here, name)
            inside = os.path.join(folder, file.relative_to(top).as_posix())
            mode = stat.S_IMODE(file.lstat().st_mode)
            if file.is_symlink():
                found.append({"path": inside, "kind": "link", "mode": mode, "link": os.readlink(file)})
            elif file.is_dir():
                found.append({"path": inside, "kind": "folder", "mode": mode | 0o700})
            elif file.is_file():
                found += file_chunks(inside, mode | 0o600, file.read_bytes())
    return found


def file_chunks(path: str, mode: int, data: bytes) -> list[dict[str, Any]]:
    return [
        {
            "path": path,
            "kind": "file",
            "mode": mode,
            "more": offset > 0,
            "data": base64.b64encode(data[offset : offset + _CHUNK_BYTES]).decode(),
        }
        for offset in range(0, max(1, len(data)), _CHUNK_BYTES)
    ]
