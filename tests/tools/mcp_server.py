"""MCP server for the tests, over stdio or, with a port as argument, over streamable HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("test server")
calls = {"count": 0}
# One red pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9"
    "fe92ef0000000049454e44ae426082"
)


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two integers."""
    return a + b


@server.tool(name="no.te")
def note(text: str) -> str:
    """Count the notes of this server process, and repeat the text."""
    calls["count"] += 1
    return f"{text} {calls['count']}"


@server.tool()
def picture() -> Image:
    """Return a picture."""
    return Image(data=PNG, format="png")


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no such city")


@server.tool()
def flood() -> str:
    """Return five million characters."""
    return "x" * 5_000_000


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """End the server process."""
    os._exit(3)


@server.tool()
def forget() -> str:
    """Remove the tool add."""
    server.remove_tool("add")
    return "forgotten"


@server.tool()
async def change(context: Context) -> str:
    """Replace the tool add by one that needs other arguments, and announce it."""
    server.remove_tool("add")

    @server.tool(name="add")
    def other(left: str, right: str) -> str:
        """Join two texts."""
        return left + right

    await context.session.send_tool_list_changed()
    return "changed"


@server.tool()
async def chatter(context: Context) -> str:
    """Send two thousand messages and a megabyte of errors before the answer."""
    sys.stderr.write("noise\n" * 200_000)
    for i in range(2000):
        await context.report_progress(i, 2000)
    return "done"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
