"""Tools of servers that implement the Model Context Protocol (MCP)."""

from __future__ import annotations

import asyncio
import json
import operator
import re
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentfly_kit.errors import SandboxError, SettingsError, ToolSchemaError
from agentfly_kit.pool.pool import Pool
from agentfly_kit.tools.tool import Tool, ToolSet
from agentfly_kit.types import ToolResult

# Maximum number of pages in a server's list of tools. An endless list raises an error.
_PAGES = 100


class MCPTools(ToolSet):
    """Tools of one MCP server.

    Attributes:
        pool: Pool of sessions, for `Agent(pools=[tools.pool])`; None if all chains share one session.
    """

    pool: Pool[Any] | None = None


@asynccontextmanager
async def mcp(
    server: str | Sequence[str] | Any,
    *,
    sessions: int = 0,
    timeout: float = 60.0,
    max_chars: int | None = 8192,
    images: bool = False,
) -> AsyncIterator[MCPTools]:
    """Connect to an MCP server and return its tools: `async with af.toolbox.mcp("python server.py") as tools`.

    The tools are listed once, when the connection is opened. For content that is not text, the model sees only the type
    and size, except for images with `images=True`. If the server reports an error, the model sees the error message. If
    the connection is lost, the chain is left unscored.

    A server started by a command runs outside any sandbox with the permissions of this process, and its descriptions
    and results become part of the prompts. Use only servers that you trust like an installed package. Requests from the
    server, for example to sample from the model, are refused.

    Args:
        server: URL of a server (streamable HTTP), command that starts a server (stdio) as a string or a list of
            arguments, or another object that `mcp.Client` accepts.
        sessions: Size of a pool from which each chain leases its own session. Pass this pool to the agent:
            `Agent(tools=tools, pools=[tools.pool])`. If 0, all chains share one session.
        timeout: time limit in seconds for connecting and for each call.
        max_chars: maximum length of an observation in characters, or None.
        images: whether images in results are shown to the model. With an engine that reads no images, the chain then
            ends with an error.

    Raises:
        SettingsError: if the package `mcp` is not installed.
        SandboxError: if the server cannot be started or does not answer.
        ToolSchemaError: if the schema of a tool is invalid.
    """
    connect, label = _connector(server)

    class MCPSession(_Session):
        """Session with one server. Pools are looked up by sandbox class, so each server needs its own class."""

        def __init__(self) -> None:
            super().__init__(connect, label, timeout, images)

    first = MCPSession()
    await first.start()
    try:
        listed = await first.list_tools()
        tools = MCPTools(_tool(each, MCPSession if sessions else first, timeout, max_chars) for each in listed)
        if not sessions:
            yield tools
            return
        await first.close()
        async with Pool(MCPSession, size=sessions) as pool:
            tools.pool = pool
            yield tools
    finally:
        await first.close()


def _connector(server: Any) -> tuple[Callable[[Any], Any], str]:
    """Return (connect, name). `connect(errors)` creates the argument of `mcp.Client` and sends stderr to `errors`."""
    try:
        from mcp import StdioServerParameters, stdio_client
    except ImportError as error:
        raise SettingsError("af.toolbox.mcp needs the package mcp; type: pip install 'agentfly_kit[mcp]'") from error
    if isinstance(server, str) and re.match(r"https?://", server):
        return lambda _: server, server
    if isinstance(server, str) or (isinstance(server, Sequence) and all(isinstance(part, str) for part in server)):
        command, *arguments = shlex.split(server) if isinstance(server, str) else server
        server = StdioServerParameters(command=command, args=arguments)
    if isinstance(server, StdioServerParameters):
        return lambda errors: stdio_client(server, errlog=errors), " ".join([server.command, *server.args])
    return lambda _: server, type(server).__name__


class _Session:
    """Connection to an MCP server. A separate asyncio task opens and closes it, because one task must do both."""

    def __init__(self, connect: Callable[[Any], Any], label: str, timeout: float, images: bool) -> None:
        self._connect, self._label, self._timeout, self._images = connect, label, timeout, images
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        if self._task is not None:
            return
        self._stop = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready), name=f"MCP session with {self._label}")
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(ready)
        except TimeoutError:
            await self._abort()
            raise SandboxError(f"the MCP server {self._label} did not answer within {self._timeout:g} s") from None
        except BaseException:
            await self._abort()
            raise

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with Client(self._connect(errors), read_timeout_seconds=self._timeout) as self._client:
                    if not ready.done():
                        ready.set_result(None)
                    await self._stop.wait()
            except Exception as error:
                errors.seek(0)
                output = " ".join(errors.read()[-500:].split())
                if not ready.done():
                    inner = _innermost(error)
                    what = f"{type(inner).__name__}: {inner}" + (f"; it wrote: {output}" if output else "")
                    ready.set_exception(SandboxError(f"the MCP server {self._label} could not be used ({what})"))
            finally:
                self._client = None
                if not ready.done():
                    ready.cancel()

    async def _abort(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """End the session, even if the caller is cancelled. A server that was started by a command is stopped."""
        task, self._task = self._task, None
        self._stop.set()
        if task is not None:
            await asyncio.wait([task])

    async def reset(self) -> None:
        await self.close()
        await self.start()

    @property
    def alive(self) -> bool:
        return self._client is not None

    async def list_tools(self) -> list[Any]:
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._request(operator.methodcaller("list_tools", cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
        raise SandboxError(f"the MCP server {self._label} lists its tools on more than {_PAGES} pages")

    async def run(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        result = await self._request(lambda client: client.call_tool(name, arguments))
        urls = [f"data:image/png;base64,{b.data}" for b in result.content if b.type == "image" and self._images]
        return ToolResult(not result.is_error, _text(result, len(urls)), images=tuple(urls))

    async def _request(self, request: Callable[[Any], Any]) -> Any:
        """Send a request and return its result. Other messages from the server do not extend the time limit."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if self._client is None:
            raise SandboxError(f"the session with the MCP server {self._label} has ended")
        try:
            async with asyncio.timeout(self._timeout):
                return await request(self._client)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError from error
            if error.code == CONNECTION_CLOSED:
                raise SandboxError(f"the MCP server {self._label} ended: {error}") from error
            raise


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _tool(listed: Any, session: Any, timeout: float, max_chars: int | None) -> Tool[..., Any]:
    """Create a tool that calls the server's tool `listed`. `session` is a session or the class of sessions to lease."""
    its_name = listed.name  # may contain characters that are not allowed in the name of a `Tool`
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", its_name)[:64]
    name = name if re.match(r"[a-zA-Z_]", name) else f"_{name}"[:64]

    async def run(of: _Session, arguments: dict[str, Any]) -> ToolResult:
        try:
            return await of.run(its_name, arguments)
        except TimeoutError:
            return ToolResult(False, f"{name} took longer than {timeout:g} s and was cancelled.")

    if isinstance(session, type):

        async def call(session_of_chain: Any, **arguments: Any) -> ToolResult:
            return await run(session_of_chain, arguments)

        call.__annotations__["session_of_chain"] = session
    else:

        async def call(**arguments: Any) -> ToolResult:  # type: ignore[misc]
            return await run(session, arguments)

    try:
        # The tool needs no timeout, because the session limits the time of each request.
        return Tool.from_schema(
            name, listed.input_schema, call, description=listed.description or listed.title or "", timeout=None,
            max_chars=max_chars,
        )  # fmt: skip
    except ToolSchemaError as error:
        raise ToolSchemaError(f"tool {its_name!r} of the MCP server: {error}") from None


def _text(result: Any, images: int) -> str:
    """Return the content of a result as text. Structured content is used only if there is nothing else.

    `images` is the number of images that the model sees. The text marks their positions.
    """
    parts, numbers = [], iter(range(1, images + 1))
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "image" and images:
            parts.append(f"[image {next(numbers)}]")
        elif block.type == "resource_link":
            parts.append(f"[link {block.uri}]")
        else:
            held = getattr(block, "resource", block)
            data, kind = str(getattr(held, "data", "") or getattr(held, "blob", "")), getattr(held, "mime_type", None)
            parts.append(f"[{block.type} {kind}, {len(data) * 3 // 4} bytes, not shown]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False, separators=(",", ":"))
    return "\n".join(parts)
