"""`FileSandbox`, a folder in which a model works with file operations and a shell.

This module runs on the host. inside/files.py carries out the operations in the sandbox's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import check_count
from .hosted import Files, seed_entries
from .settings import forward_signature
from .shell import ShellSandbox


class GrepMatch(NamedTuple):
    """A line found by `grep`. `str()` formats it as "path:line: text".

    Attributes:
        path: path of the file, relative to the sandbox's folder.
        line: line number, from 1.
        text: the line, without its newline.
    """

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@forward_signature(ShellSandbox)
class FileSandbox(ShellSandbox):
    """Sandbox with a folder, file operations (read, write, edit, list, grep, undo), and a shell (`run(command)`).

    Args:
        files: initial content of the folder, restored by each reset: a dict from paths to text or bytes, or a folder on
            this machine, which is copied and never modified. `await seed(...)` adds files for one task.

    Other arguments are those of ShellSandbox. A pool of FileSandbox also serves tools that request a ShellSandbox; a
    chain's file and shell tools then share one folder. `agentfly_kit.toolbox` provides such tools.

    Paths are relative to the folder. Paths that lead out of the folder, for example through links, are rejected. A
    failed operation raises ToolError with a message for the model.
    """

    _inside_files = ("base", "processes", "shell", "files")
    _folder = "work"

    def __init__(self, *, files: Files | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._seed_entries = [] if files is None else seed_entries(files, self._folder)

    async def _setup(self) -> None:
        await self._put(self._seed_entries)

    async def seed(self, files: Files) -> None:
        """Add files for the current task, overwriting existing ones. A reset removes these files; `undo` does not.

        Args:
            files: a dict from paths to text or bytes, or a folder on this machine.

        Raises:  SettingsError for invalid `files`; SandboxError if the files do not fit in the sandbox.
        """
        await self._seed(files)

    async def read(self, path: str, start: int = 1, end: int | None = None, *, numbers: bool = False) -> str:
        """Return the text of a file, or its lines from `start` (counted from 1) to `end`, inclusive.

        Args:
            path: path of the file, relative to the folder.
            start: first line.
            end: last line, by default the last line of the file.
            numbers: prefix each line with its number.

        Raises:  ToolError if the file does not exist or is not text, or if the requested lines have more than
                 `max_output` characters, because the result is never truncated.
        """
        return str(
            await self._request("read", path=path, start=start, end=end, numbers=numbers, max_chars=self.max_output)
        )

    async def write(self, path: str, text: str) -> str:
        """Create or overwrite a file, creating its parent folders, and return a summary. The write is atomic."""
        return str(await self._request("write", path=path, text=text))

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace `old`, which must occur exactly once, with `new`, and return the new lines with their context.

        Raises:  ToolError if `old` is missing or occurs more than once. The message shows the closest match or the
                 lines.
        """
        return str(await self._request("edit", path=path, old=old, new=new))

    async def list(self, path: str = ".", depth: int = 2) -> tuple[str, ...]:
        """List the paths below a folder, with a trailing slash for folders.

        At most 1000 paths are listed. If there are more, the last entry states how many are omitted.

        Args:
            path: the folder to list.
            depth: number of levels to descend.
        """
        check_count("depth", depth)
        reply = await self._request("list", path=path, depth=depth)
        return (*map(str, reply["names"]), *([f"... and {reply['more']} more"] if reply["more"] else []))

    async def grep(self, pattern: str, path: str = ".", max_matches: int = 100) -> tuple[GrepMatch, ...]:
        """Return the lines that match a Python regular expression, in one file or in all text files below a folder.

        Args:
            pattern: the regular expression.
            path: a file or a folder.
            max_matches: maximum number of lines to return.
        """
        reply: dict[str, Any] = await self._request("grep", pattern=pattern, path=path, max_matches=max_matches)
        return tuple(GrepMatch(str(name), int(line), str(text)) for name, line, text in reply["found"])

    async def undo(self, path: str | None = None) -> str:
        """Undo the last write or edit, of `path` if it is given, and return a summary. The history holds up to 8 MB."""
        return str(await self._request("undo", path=path))
