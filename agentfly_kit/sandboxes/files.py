"""A folder that a chain keeps, with what a model needs to work on code in it, and a shell in the same place.

Knows what the calls mean; what does them is inside/files.py, in the interpreter of a PythonSandbox.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..errors import SettingsError
from . import hosted
from .host.container import Container
from .shell import ShellSandbox


class GrepMatch(NamedTuple):
    """A line that `grep` found. Its str is what grep would print."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class FileSandbox(ShellSandbox):
    """A private folder: read, write, edit, list, grep and undo; and `run(command)` in a shell that begins there.

    Args:
        files: what the folder holds at the beginning and after each reset: a dict of paths to text or bytes, or a
            folder of this machine, which is copied and never written. `await seed(...)` adds what one task needs.

    The other settings are those of ShellSandbox; its pool serves tools that ask for a ShellSandbox too, with the same
    folder. `agentfly_kit.toolbox` has tools for a model.

    Paths are relative to the folder, and none leads out of it, by `..`, from the root or through a link. What cannot be
    done raises ToolError with a sentence that a model can use.
    """

    _inside_files: ClassVar[tuple[str, ...]] = ("base", "shell", "files")
    _folder: ClassVar[str] = "work"

    def __init__(
        self,
        *,
        files: Mapping[str, str | bytes] | str | os.PathLike[str] | None = None,
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
        super().__init__(
            isolation=isolation, memory_mb=memory_mb, processes=processes, cpu_seconds=cpu_seconds, disk_mb=disk_mb,
            network=network, packages=packages, preload=preload, max_output=max_output,
        )  # fmt: skip
        self._seed_entries = [] if files is None else hosted.seed_entries(files)

    async def _setup(self) -> None:
        await self._put(iter(self._seed_entries), self._folder)

    @classmethod
    def validate_remote_options(cls, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A client of a server may not name files of the server's machine.

        Raises:  SettingsError if it does.
        """
        if method == "seed" and not all(isinstance(given, Mapping) for given in (*args, *kwargs.values())):
            raise SettingsError("seed(): from afar, give the files themselves: {path: text or bytes}")

    async def seed(self, files: Mapping[str, str | bytes] | str | os.PathLike[str]) -> None:
        """Put files in place, over what is there: for one task's own, gone at the reset. Not undone by `undo`.

        Raises:  SettingsError as for `files=`; SandboxError if they do not fit.
        """
        entries = hosted.seed_entries(files)
        async with self._lock.acquire():
            await self._start()
            await self._put(iter(entries), self._folder)

    async def read(self, path: str, start: int = 1, end: int | None = None, *, numbers: bool = False) -> str:
        """The text of a file, or its lines from `start` (the first is 1) to `end`, that one too.

        Raises:  ToolError if it is not there, no text, or more than `max_output` characters: nothing is cut in silence.
        """
        return str(
            await self._request(
                "read", path=path, start=start, end=end, numbers=numbers, max_chars=self.max_output, folder=self._folder
            )
        )

    async def write(self, path: str, text: str) -> str:
        """Make or overwrite a file, and the folders above it; all of it or, where there is no room, nothing."""
        return str(await self._request("write", path=path, text=text, folder=self._folder))

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace `old`, which must be in the file exactly once, by `new`; gives the lines around it as they are now.

        Raises:  ToolError that says where the nearest text is, or in which lines there are several.
        """
        return str(await self._request("edit", path=path, old=old, new=new, folder=self._folder))

    async def list(self, path: str = ".", depth: int = 2) -> tuple[str, ...]:
        """Names below a folder, those of folders with a / at their end. At most 1000, then how many more."""
        if depth < 1:
            raise SettingsError(f"depth={depth}: want at least 1")
        reply = await self._request("list", path=path, depth=depth, folder=self._folder)
        more = (f"... and {reply['more']} more",) if reply["more"] else ()
        return (*map(str, reply["names"]), *more)

    async def grep(self, pattern: str, path: str = ".", max_matches: int = 100) -> tuple[GrepMatch, ...]:
        """Lines that match a regular expression (Python's), in a file or in all files of text below a folder."""
        reply: dict[str, Any] = await self._request(
            "grep", pattern=pattern, path=path, max_matches=max_matches, folder=self._folder
        )
        return tuple(GrepMatch(str(name), int(line), str(text)) for name, line, text in reply["found"])

    async def undo(self, path: str | None = None) -> str:
        """Take back the last write or edit, or the last one of a file. Says what it did; up to 8 MB are remembered."""
        return str(await self._request("undo", path=path, folder=self._folder))
