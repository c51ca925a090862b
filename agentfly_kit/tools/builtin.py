"""Built-in tools that run code or edit files, and `mcp`, which connects to the tools of an MCP server.

Use them as `Agent(tools=[af.toolbox.python])` or `Agent(tools=af.toolbox.code)`, with a pool for the sandbox class that
each tool requires. They use only the public API, so you can copy a tool and change its description.
"""

from __future__ import annotations

from agentfly_kit.sandboxes.files import FileSandbox
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.sandboxes.shell import ShellResult, ShellSandbox
from agentfly_kit.sandboxes.sql import SQLResult, SQLSandbox
from agentfly_kit.tools.mcp import mcp as mcp
from agentfly_kit.tools.tool import tool


@tool(timeout=120.0)
async def python(code: str, sandbox: PythonSandbox) -> SandboxResult:
    """Run Python code. Variables persist between calls. The value of the last expression is shown.

    Args:
        code: one or more statements.
    """
    return await sandbox.run(code, timeout=10.0)


@tool(timeout=120.0)
async def shell(command: str, sandbox: ShellSandbox) -> ShellResult:
    """Run a command in a bash shell. Its working folder, variables and background jobs persist between calls.

    Args:
        command: one or more lines, for example "ls -l | head".
    """
    return await sandbox.run(command, timeout=30.0)


@tool(timeout=120.0)
async def sql(query: str, sandbox: SQLSandbox) -> SQLResult:
    """Run SQL on the database. Changes persist between calls. The rows of the last statement are shown.

    Args:
        query: one or more statements, for example "SELECT name FROM people LIMIT 5".
    """
    return await sandbox.run(query, timeout=10.0)


@tool(timeout=120.0)
async def read_file(path: str, sandbox: FileSandbox, first_line: int = 1, last_line: int | None = None) -> str:
    """Show a file with line numbers.

    Args:
        path: relative to the working folder, for example "src/main.py".
        first_line: the first line to show; 1 is the beginning.
        last_line: the last line to show; by default the last line of the file.
    """
    return await sandbox.read(path, first_line, last_line, numbers=True)


@tool(timeout=120.0)
async def write_file(path: str, text: str, sandbox: FileSandbox) -> str:
    """Create a file, or replace its content.

    Args:
        path: relative to the working folder; missing folders are created.
        text: the whole content of the file.
    """
    return await sandbox.write(path, text)


@tool(timeout=120.0)
async def edit_file(path: str, old: str, new: str, sandbox: FileSandbox) -> str:
    """Replace a part of a file.

    Args:
        path: relative to the working folder.
        old: the text to replace, exactly as it is in the file, without line numbers; it must occur only once.
        new: the text that replaces it.
    """
    return await sandbox.edit(path, old, new)


@tool(timeout=120.0)
async def list_files(sandbox: FileSandbox, path: str = ".") -> str:
    """List the files in a folder and in its subfolders.

    Args:
        path: relative to the working folder.
    """
    return "\n".join(await sandbox.list(path)) or "(empty)"


@tool(timeout=120.0)
async def search_files(pattern: str, sandbox: FileSandbox, path: str = ".") -> str:
    """Find lines that match a regular expression, in a file or in all files below a folder.

    Args:
        pattern: a Python regular expression.
        path: relative to the working folder.
    """
    found = [str(each)[:300] for each in await sandbox.grep(pattern, path, max_matches=50)]
    if len(found) == 50:
        found.append("[only the first 50 matching lines are shown]")
    return "\n".join(found) or "no matching lines"


@tool(timeout=120.0)
async def undo_edit(sandbox: FileSandbox) -> str:
    """Undo the last change to a file."""
    return await sandbox.undo()


# Tools that read and edit files; they require `af.Pool(FileSandbox)`.
files = (read_file, write_file, edit_file, list_files, search_files, undo_edit)

# Tools for editing a repository and running its tests. In each chain, all of them share one FileSandbox.
code = (*files, shell)
