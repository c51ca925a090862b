"""Base class of sandboxes built on a Python interpreter: a program that runs in it, and calls to that program.

PythonSandbox provides isolation, limits, timeouts, cancellation and cleanup. A subclass adds files from inside/*.py,
whose source is sent to the interpreter when it is first needed, and again after a restart of the interpreter.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from ..errors import SandboxError, SettingsError, ToolError
from .fifo_lock import FifoLock
from .host.container import Container
from .host.limits import Limits
from .python import PythonSandbox
from .result import SandboxResult

G = TypeVar("G", bound="HostedSandbox")

_HERE = Path(__file__).parent / "inside"
_CHUNK_BYTES = 256 * 1024  # bytes of a file sent in one call
_COPY_SECONDS = 60.0
_MAX_ANSWER = 2**27  # maximum length of an answer in characters; answers from inside are untrusted
_PROGRAM_MISSING = "name '_agentfly' is not defined"


@functools.cache
def _program_cell(names: tuple[str, ...]) -> str:
    """Return a cell that defines `_agentfly`, the namespace of the program, unless it is already defined."""
    parts = []
    for name in names:
        lines = (_HERE / f"{name}.py").read_text(encoding="utf-8").splitlines()
        parts.append("\n".join("" if line.startswith("from .base import") else line for line in lines))
    body = "".join(
        f"    exec(compile({part!r}, {name!r}, 'exec', dont_inherit=True), _space)\n"
        for name, part in zip(names, parts, strict=True)
    )
    # `_agentfly` is bound last, because a cancelled call may interrupt this cell.
    return f"if '_agentfly' not in globals():\n    _space = {{'__name__': '_agentfly'}}\n{body}    _agentfly = _space\n"


class HostedSandbox:
    """Base class of sandboxes that run a program in a PythonSandbox. The settings are those of PythonSandbox.

    A subclass sets `_inside_files` and makes calls with `_call` (always returns a result) or `_request` (returns an
    answer or raises ToolError). It overrides `_setup` to prepare a fresh sandbox before the first call.
    """

    _inside_files: ClassVar[tuple[str, ...]] = ("base",)

    def __init__(
        self,
        *,
        isolation: str | Container | None = None,
        memory_mb: int | None = 256,
        processes: int | None = 32,
        cpu_seconds: float | None = 10.0,
        disk_mb: int | None = 64,
        network: bool = False,
        packages: bool = True,
        preload: Sequence[str] = (),
        max_output: int = 65536,
    ) -> None:
        self._python = PythonSandbox(
            isolation=isolation, memory_mb=memory_mb, processes=processes, cpu_seconds=cpu_seconds, disk_mb=disk_mb,
            network=network, packages=packages, preload=preload, max_output=max_output,
        )  # fmt: skip
        self.max_output = max_output
        self._ready = False
        self._closed = False
        self._calls = 0
        self._lock = FifoLock()

    # --- lifecycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start and set up the sandbox. Does nothing if it is running.

        Raises:  IsolationError if the isolation level is unavailable, SandboxError if the process does not start.
        """
        async with self._lock.acquire():
            await self._start()

    async def _start(self) -> None:
        if self._closed:
            raise SandboxError(f"this {type(self).__name__} is closed; make a new one")
        if self._python.alive and self._ready:
            return
        self._ready = False
        self._calls = 0
        await self._python.start()
        await self._setup()
        self._ready = True

    async def _setup(self) -> None:
        """Prepare a fresh sandbox. The default does nothing."""

    async def reset(self) -> None:
        """Kill all processes inside, empty the folders and set the sandbox up again.

        Raises:  SandboxError if that fails; the sandbox is then dead.
        """
        async with self._lock.acquire():
            if not self.alive:
                raise SandboxError(f"a dead or closed {type(self).__name__} cannot be reset; make a new one")
            self._ready = False
            self._calls = 0
            await self._python.reset()
            await self._setup()
            self._ready = True

    @property
    def alive(self) -> bool:
        """True if the sandbox can be used or reset."""
        return self._python.alive

    @property
    def isolation(self) -> str | None:
        """The isolation level in use; before `start`, the requested one."""
        return self._python.isolation

    @property
    def limits(self) -> Limits:
        """The resource limits of the sandbox."""
        return self._python.limits

    @property
    def limit_mechanisms(self) -> Mapping[str, str]:
        """Mechanism that enforces each limit, as text; "not limited" if there is none."""
        return self._python.limit_mechanisms

    @property
    def pid(self) -> int | None:
        """Process id, on the host, of the sandbox's outermost process."""
        return self._python.pid

    async def close(self) -> None:
        """Close the sandbox, leaving no process and no file behind. Idempotent. A running call is ended."""
        self._closed = True
        await self._python.close()

    def kill(self) -> None:
        """Close the sandbox immediately, without an event loop. Not safe from another thread while a call runs."""
        self._closed = True
        self._python.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self.pid is None:
            state = "not started"
        elif not self.alive:
            state = "dead"
        else:
            state = f"{self._calls} call{'' if self._calls == 1 else 's'}"
        return f"<{type(self).__name__} {self.isolation or 'best isolation there is'}, {state}>"

    # --- calls -----------------------------------------------------------------------------------

    async def _call(self, name: str, timeout: float, **given: object) -> tuple[SandboxResult, dict[str, Any] | None]:
        """Call the program under the lock.

        Returns:  the interpreter's result, and {"answer": ...}, {"refused": ...} or None.
        """
        if not 0 < timeout < float("inf"):
            raise SettingsError(f"timeout={timeout!r}: want a positive number of seconds")
        async with self._lock.acquire():
            if self._calls and not self._python.alive:
                self._python._raise_if_ended()
            await self._start()
            self._calls += 1
            return await self._send(name, timeout, **given)

    async def _request(self, name: str, timeout: float = 10.0, **given: object) -> Any:
        """Call the program under the lock and return its answer.

        Raises:  ToolError, for a model to read, if the call is refused, times out, or the interpreter dies.
        """
        return _answer(name, timeout, *await self._call(name, timeout, **given))

    async def _request_locked(self, name: str, **given: object) -> Any:
        """Like `_request`, for callers that hold the lock."""
        return _answer(name, _COPY_SECONDS, *await self._send(name, _COPY_SECONDS, **given))

    async def _send(self, name: str, timeout: float, **given: object) -> tuple[SandboxResult, dict[str, Any] | None]:
        size = self.max_output - 16
        call = f"_agentfly['handle']({name!r}, {json.dumps(given)!r}, {size})"
        try:
            result = await self._python.run(call, timeout=timeout)
            if result.error_type == "NameError" and (result.error or "").endswith(_PROGRAM_MISSING):
                await self._python.run(_program_cell(self._inside_files), timeout=_COPY_SECONDS)
                result = await self._python.run(call, timeout=timeout)
            total, text = _parse_chunk(result.value)
            while total is not None and len(text) < total:
                more = await self._python.run(f"_agentfly['REPLY'].chunk({len(text)}, {size})", timeout=_COPY_SECONDS)
                again, part = _parse_chunk(more.value)
                if again != total or not part:
                    total = None
                text += part
        finally:
            self._python._history.clear()  # these calls are never replayed, and they contain whole files
        if total is None or len(text) > total:
            return result, None
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        return result, answer if isinstance(answer, dict) else None

    # --- its folder ------------------------------------------------------------------------------

    async def _put(self, entries: Iterator[dict[str, Any]], folder: str) -> None:
        """Write files, batching small ones into one call. The caller holds the lock."""
        batch: list[dict[str, Any]] = []
        size = 0
        try:
            for entry in entries:
                batch.append(entry)
                size += len(entry.get("data", "")) + 200
                if size > 2 * _CHUNK_BYTES:
                    await self._request_locked("put", entries=batch, folder=folder)
                    batch, size = [], 0
            if batch:
                await self._request_locked("put", entries=batch, folder=folder)
        except ToolError as error:
            raise SandboxError(f"the files of a {type(self).__name__} could not be put in place: {error}") from None

    async def _copy_home(self, into: HostedSandbox) -> None:
        """Copy the sandbox's folder to another sandbox. The caller holds the locks of both."""
        for path, kind, mode, size, mtime, link in await self._request_locked("list_home"):
            if kind == "other":
                raise SandboxError(
                    f"this {type(self).__name__} cannot fork: {path!r} is a pipe, a socket or a device: it has no copy"
                )
            entry: dict[str, Any] = {"path": path, "kind": kind, "mode": mode, "link": link}
            if kind != "file":
                await into._request_locked("put", entries=[entry], folder="")
                continue
            for offset in range(0, max(1, size), _CHUNK_BYTES):
                data = await self._request_locked("read_chunk", path=path, offset=offset, size=_CHUNK_BYTES)
                piece = entry | {"data": data, "more": offset > 0, "mtime": mtime}
                await into._request_locked("put", entries=[piece], folder="")

    @asynccontextmanager
    async def _copying(self: G, into: G) -> AsyncIterator[None]:
        """Hold the locks of both sandboxes during a copy. `into` is emptied first, and reset if the copy fails.

        Raises:  SandboxError, with the reason, for a state that cannot be copied.
        """
        if not isinstance(into, type(self)) or into is self:
            raise SandboxError(f"a {type(self).__name__} forks into another of its kind, not into {into!r}")
        try:
            async with self._lock.acquire(), into._lock.acquire():
                await self._start()
                await into._start()
                try:
                    await into._python.reset()  # the copy includes the seeded files, in their current state
                    yield
                except ToolError as error:
                    raise SandboxError(f"this {type(self).__name__} cannot fork: {error}") from None
        except BaseException:
            if into.alive:
                await into.reset()
            raise


def _parse_chunk(value: str | None) -> tuple[int | None, str]:
    """Return the length of the whole answer and this chunk of it; (None, "") for invalid data."""
    number, _, text = (value or "").partition(" ")
    if not (number.isascii() and number.isdigit()) or len(number) > 12 or int(number) > _MAX_ANSWER:
        return None, ""
    return int(number), text


def _answer(name: str, timeout: float, result: SandboxResult, answer: dict[str, Any] | None) -> Any:
    if answer is not None and "refused" in answer:
        raise ToolError(str(answer["refused"]))
    if answer is not None and "answer" in answer:
        return answer["answer"]
    if result.limit == "time":
        raise ToolError(f"{name} took more than {timeout:g} s and was stopped")
    if result.limit is not None:
        raise ToolError(f"{name} ran into the {result.limit} limit")
    last = (result.error or "it gave no readable answer").splitlines()[-1]
    raise ToolError(f"{name} failed: {last}")


# --- initial files ------------------------------------------------------------------------------


def seed_entries(files: Mapping[str, str | bytes] | str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read files into entries for `_put`, from a mapping of paths to contents or from a folder of the host.

    Raises:  SettingsError for a path that leaves the sandbox's folder, a folder that does not exist, or content that is
             neither str nor bytes.
    """
    found: list[dict[str, Any]] = []
    if isinstance(files, Mapping):
        for path, content in files.items():
            parts = path.split("/") if isinstance(path, str) else [".."]
            if not path or path.startswith("/") or path.endswith("/") or ".." in parts or "\0" in path:
                raise SettingsError(f"files: {path!r} is no path within the sandbox's folder, such as 'src/main.py'")
            if not isinstance(content, str | bytes):
                raise SettingsError(f"files: {path!r} is {type(content).__name__}; want str or bytes")
            data = content.encode() if isinstance(content, str) else content
            found += _file_chunks(path, 0o644, data)
        return found
    top = Path(files)
    if not top.is_dir():
        raise SettingsError(f"files={str(files)!r}: there is no such folder; give a folder or a dict of path: text")
    for here, folders, names in os.walk(top):
        for name in sorted([*folders, *names]):
            file = Path(here, name)
            inside = file.relative_to(top).as_posix()
            status = file.lstat()
            mode = stat.S_IMODE(status.st_mode)
            if file.is_symlink():
                found.append({"path": inside, "kind": "link", "mode": mode, "link": os.readlink(file)})
            elif file.is_dir():
                found.append({"path": inside, "kind": "folder", "mode": mode | 0o700})
            elif file.is_file():
                found += _file_chunks(inside, mode | 0o600, file.read_bytes())
    return found


def _file_chunks(path: str, mode: int, data: bytes) -> list[dict[str, Any]]:
    return [
        {
            "path": path, "kind": "file", "mode": mode, "more": offset > 0,
            "data": base64.b64encode(data[offset : offset + _CHUNK_BYTES]).decode(),
        }
        for offset in range(0, max(1, len(data)), _CHUNK_BYTES)
    ]  # fmt: skip
