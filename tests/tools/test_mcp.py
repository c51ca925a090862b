"""Tools of a real MCP server, over stdio and over streamable HTTP."""

import asyncio
import inspect
import random
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import dice
import errors
import mcp_types
import psutil
import pytest
import pytest_asyncio
from cancelling import tasks_left
from mcp.server.mcpserver import MCPServer
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.tools import builtin as toolbox

FILE = str(Path(__file__).with_name("mcp_server.py"))
SERVER = [sys.executable, FILE]


@pytest_asyncio.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    agents.shipped()  # imports transformers, which on a slow machine takes longer than a session waits
    before = children()
    yield
    await until(lambda: not tasks_left() and children() <= before)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_results_errors_and_pictures_of_a_server() -> None:
    async with toolbox.mcp(SERVER, timeout=GUARD) as tools:
        assert tools.names == (
            "add",
            "no_te",
            "picture",
            "fail",
            "flood",
            "hang",
            "die",
            "forget",
            "change",
            "chatter",
        )
        assert tools["add"].schema["function"]["description"] == "Add two integers."
        assert (await tools["add"].try_(a=2)).observation == "3"
        assert "was not run" in (await tools["add"].try_(a="two")).observation
        assert [(await tools["no_te"].try_(text="hi")).observation for _ in range(2)] == ["hi 1", "hi 2"]
        assert await notes(tools) == ["hi 3", "hi 4", "hi 5", "hi 6"], "chains share the session"
        assert (await tools["picture"].try_()).observation == "[image image/png, 69 bytes, not shown]"
        async with toolbox.mcp(SERVER, timeout=GUARD, images=True) as showing:
            shown = await showing["picture"].try_()
        assert shown.observation == "[image 1]" and [image.size for image in shown.images] == [(1, 1)]
        failed = await tools["fail"].try_()
        assert not failed.ok and failed.error is None and "fail" in failed.observation
        flood = await tools["flood"].try_()
        assert flood.truncated and len(flood.observation) < 9000
        assert (await tools["chatter"].try_()).observation == "done", "many messages arrived before the answer"


async def test_content_of_every_type_becomes_text() -> None:
    server, uri = MCPServer("in this process"), "file:///a.txt"
    hidden = mcp_types.BlobResourceContents(uri=uri, blob="aGk=", mime_type="x/y")
    content: list[Any] = [
        mcp_types.TextContent(type="text", text="a"),
        mcp_types.EmbeddedResource(type="resource", resource=mcp_types.TextResourceContents(uri=uri, text="b")),
        mcp_types.EmbeddedResource(type="resource", resource=hidden),
        mcp_types.ResourceLink(type="resource_link", name="c", uri=uri),
    ]

    @server.tool()
    def give(empty: bool) -> mcp_types.CallToolResult:
        """Return content of every type, or only structured content."""
        return mcp_types.CallToolResult(content=[] if empty else content, structured_content={"n": 1})

    async with toolbox.mcp(server, timeout=GUARD) as tools:
        shown = [(await tools["give"].try_(empty=empty)).observation for empty in (False, True)]
    assert shown == ["a\nb\n[resource x/y, 3 bytes, not shown]\n[link file:///a.txt]", '{"n":1}']


async def test_a_tool_that_the_server_changes_or_removes_fails_as_an_observation() -> None:
    async with toolbox.mcp(SERVER, timeout=GUARD) as tools:
        before = tools["add"].fingerprint
        assert (await tools["change"].try_()).observation == "changed"
        other = await tools["add"].try_(a=1)
        assert not other.ok and other.error is None and "left" in other.observation
        assert tools["add"].fingerprint == before, "the set stays as it was listed"
        await tools["forget"].try_()
        gone = await tools["add"].try_(a=1)
        assert not gone.ok and "add" in gone.observation and gone.error is None


async def test_a_server_that_hangs_or_dies() -> None:
    async with toolbox.mcp(SERVER, timeout=GUARD) as tools:
        session = inspect.getclosurevars(tools["hang"].function).nonlocals["session"]
        session._timeout = 0.2  # only for the call that never ends
        hanging = await tools["hang"].try_()
        assert not hanging.ok and "hang took longer than" in hanging.observation
        session._timeout = GUARD
        assert (await tools["add"].try_(a=1)).ok, "the session is still usable"
        for name in ("die", "add"):
            died = await tools[name].try_(**({"a": 1} if name == "add" else {}))
            assert died.error is not None and died.error.host, "the chain must not be scored"


test_a_server_that_does_not_start = errors.rejected(
    *((lambda server=server, timeout=timeout: toolbox.mcp(server, timeout=timeout).__aenter__(),
       af.errors.SandboxError, message)
      for server, timeout, message in (
        ("false", GUARD, "could not be used"),
        ("no-such-program-at-all", GUARD, "FileNotFoundError"),
        ("sleep 3600", 0.3, "did not answer"),
      )),
)  # fmt: skip


async def test_the_message_of_a_server_that_fails_to_start_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise SystemExit('the index is missing')")
    connection = toolbox.mcp([sys.executable, str(file)], timeout=GUARD)
    await errors.check(connection.__aenter__, af.errors.SandboxError, "the index is missing")


async def test_a_result_that_breaks_the_announced_schema_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from mcp.server.lowlevel import Server\n"
        "from mcp.server.stdio import stdio_server\n"
        "import anyio, mcp_types as t\n"
        "async def tools(context, params):\n"
        "    out = {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n']}\n"
        "    tool = t.Tool(name='count', input_schema={'type': 'object'}, output_schema=out)\n"
        "    return t.ListToolsResult(tools=[tool])\n"
        "async def call(context, params):\n"
        "    return t.CallToolResult(content=[], structured_content={'n': 'many'})\n"
        "server = Server('wrong', on_list_tools=tools, on_call_tool=call)\n"
        "async def main():\n"
        "    async with stdio_server() as (read, write):\n"
        "        await server.run(read, write, server.create_initialization_options())\n"
        "anyio.run(main)\n"
    )
    async with toolbox.mcp([sys.executable, str(file)], timeout=GUARD) as tools:
        result = await tools["count"].try_()
        assert not result.ok and result.error is not None and "structured content" in result.error.message


def _agent(tools: Any, **settings: Any) -> af.Agent:
    chat = agents.shipped().chat
    call = chat.format.render_call(af.ToolCall("call-0", "no_te", {"text": "hi"}))
    return af.Agent(af.ScriptedEngine([call, call, "done"]), chat=chat, tools=tools, reward=agents.exact, **settings)


async def notes(tools: Any, **settings: Any) -> list[str]:
    """Return the sorted results of two chains of two calls each, which the server numbers in the order of arrival."""
    rollout = await _agent(tools, **settings).rollout(agents.tasks(2))
    return sorted(call.result.observation for t in rollout for call in t.tool_calls if call.result is not None)


async def test_chains_with_a_pool_have_their_own_sessions() -> None:
    async with toolbox.mcp(SERVER, sessions=1, timeout=GUARD) as tools:
        assert await notes(tools, pools=[tools.pool]) == ["hi 1", "hi 1", "hi 2", "hi 2"]


async def _cancel_chains(tools: Any, rng: random.Random, **settings: Any) -> int:
    """Run 64 chains and cancel each at a random time. Return the number of those that had ended before."""
    agent = _agent(tools, **settings)
    chains = [agent.chain(task) for task in agents.tasks(64)]
    running = [asyncio.ensure_future(chain.run()) for chain in chains]
    for i in rng.sample(range(64), 64):
        await asyncio.sleep(rng.random() * 0.03)
        running[i].cancel()
    ended = sum(not isinstance(x, BaseException) for x in await asyncio.gather(*running, return_exceptions=True))
    for chain in chains:
        await chain.close()
    return ended


async def test_calls_and_chains_cancelled_at_random_leave_no_session_process_or_task() -> None:
    rng = random.Random(dice.seed())
    async with toolbox.mcp(SERVER, timeout=GUARD) as tools:

        async def calls(number: int) -> None:
            await tools["no_te"].try_(text=str(number))
            await tools["hang" if number % 2 else "add"].try_(**({} if number % 2 else {"a": number}))

        running = [asyncio.create_task(calls(number)) for number in range(64)]
        for task in rng.sample(running, 64):
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: len(tasks_left()) < 12)  # those of the session
        assert await _cancel_chains(tools, rng) < 64
        assert (await tools["add"].try_(a=1)).ok, "the shared session is still usable"


@pytest.mark.long  # every session is a process that imports the package mcp
async def test_cancelled_chains_with_sessions_of_their_own_leave_nothing() -> None:
    async with toolbox.mcp(SERVER, sessions=4, timeout=GUARD) as tools:
        assert await _cancel_chains(tools, random.Random(dice.seed()), pools=[tools.pool]) < 64
        assert tools.pool.snapshot().leased == 0
        (again,) = await _agent(tools, pools=[tools.pool]).rollout(agents.tasks(1))
        assert again.stop == "answered"


async def test_a_cancelled_block_ends_its_server() -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with toolbox.mcp(SERVER, timeout=GUARD):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_streamable_http() -> None:
    process = await asyncio.create_subprocess_exec(*SERVER, "0", stderr=asyncio.subprocess.PIPE)
    try:
        said = await process.stderr.readuntil(b"(Press")  # type: ignore[union-attr]
        url = re.findall(r"http://127\.0\.0\.1:\d+", said.decode())[-1]
        async with toolbox.mcp(f"{url}/mcp", timeout=GUARD) as tools:
            assert (await tools["add"].try_(a=2, b=5)).observation == "7"
    finally:
        process.kill()
        await process.communicate()
