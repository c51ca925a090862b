"""Tools of a real MCP server, over stdio and over streamable HTTP."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agents
import psutil
import pytest

from agentfly_kit.agent.agent import Agent
from agentfly_kit.engines.scripted import ScriptedEngine
from agentfly_kit.errors import SandboxError, SettingsError
from agentfly_kit.tools import builtin as toolbox
from agentfly_kit.types import ToolCall

FILE = str(Path(__file__).with_name("mcp_server.py"))
SERVER = [sys.executable, FILE]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "a server was left"


def tasks_left() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_results_errors_and_pictures_of_a_server() -> None:
    async with toolbox.mcp(SERVER, timeout=20) as tools:
        assert tools.names == ("add", "no_te", "picture", "fail", "flood", "hang", "die", "forget", "change", "chatter")
        assert tools["add"].schema["function"]["description"] == "Add two integers."
        assert (await tools["add"].try_(a=2)).observation == "3"
        assert "was not run" in (await tools["add"].try_(a="two")).observation
        assert [(await tools["no_te"].try_(text="hi")).observation for _ in range(2)] == ["hi 1", "hi 2"]
        assert (await tools["picture"].try_()).observation == "[image image/png, 102 bytes, not shown]"
        failed = await tools["fail"].try_()
        assert not failed.ok and failed.error is None and "fail" in failed.observation
        flood = await tools["flood"].try_()
        assert flood.truncated and len(flood.observation) < 9000
    assert not tasks_left()


async def test_tools_that_the_server_removes_fail_as_observations() -> None:
    async with toolbox.mcp(SERVER, timeout=20) as tools:
        await tools["forget"].try_()
        gone = await tools["add"].try_(a=1)
        assert not gone.ok and "add" in gone.observation and gone.error is None


async def test_a_tool_whose_schema_the_server_changes_fails_as_an_observation() -> None:
    async with toolbox.mcp(SERVER, timeout=20) as tools:
        before = tools["add"].fingerprint
        assert (await tools["change"].try_()).observation == "changed"
        other = await tools["add"].try_(a=1)
        assert not other.ok and other.error is None and "left" in other.observation
        assert tools["add"].fingerprint == before, "the set stays as it was listed"
    assert not tasks_left()


async def test_a_server_that_sends_many_messages_still_answers() -> None:
    async with toolbox.mcp(SERVER, timeout=60) as tools:
        assert (await tools["chatter"].try_()).observation == "done"
        assert (await tools["add"].try_(a=1)).observation == "2"
    assert not tasks_left()


async def test_a_server_that_hangs_or_dies() -> None:
    async with toolbox.mcp(SERVER, timeout=3) as tools:
        hanging = await tools["hang"].try_()
        assert not hanging.ok and "took longer than 3 s" in hanging.observation
        assert (await tools["add"].try_(a=1)).ok, "the session is still usable"
        for name in ("die", "add"):
            died = await tools[name].try_(**({"a": 1} if name == "add" else {}))
            assert died.error is not None and died.error.host, "the chain must not be scored"
    assert not tasks_left()


@pytest.mark.parametrize(
    ("server", "timeout", "message"),
    [
        ("false", 20, "could not be used"),
        ("no-such-program-at-all", 20, "FileNotFoundError"),
        ("sleep 60", 0.3, "did not answer"),
    ],
)
async def test_a_server_that_does_not_start(server: str, timeout: float, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        async with toolbox.mcp(server, timeout=timeout):
            pass
    assert not tasks_left()


@pytest.mark.parametrize("given", [None, "", [], 3, {"command": "x"}])
async def test_what_is_not_a_server_is_rejected(given: Any) -> None:
    with pytest.raises(SettingsError, match="server must be"):
        async with toolbox.mcp(given):
            pass


async def test_other_bad_settings_are_rejected() -> None:
    for settings in ({"sessions": -1}, {"sessions": True}, {"timeout": 0}):
        with pytest.raises(SettingsError, match="must be"):
            async with toolbox.mcp(SERVER, **settings):
                pass


async def test_the_message_of_a_server_that_fails_to_start_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("raise SystemExit('the index is missing')")
    with pytest.raises(SandboxError, match="the index is missing"):
        async with toolbox.mcp([sys.executable, str(file)], timeout=20):
            pass


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
    async with toolbox.mcp([sys.executable, str(file)], timeout=20) as tools:
        result = await tools["count"].try_()
        assert not result.ok and result.error is not None and "structured content" in result.error.message


def _agent(tools: Any, **settings: Any) -> Agent:
    chat = agents.shipped().chat
    call = chat.format.render_call(ToolCall("call-0", "no_te", {"text": "hi"}))
    return Agent(ScriptedEngine([call, call, "done"]), chat=chat, tools=tools, reward=agents.exact, **settings)


async def test_chains_share_a_session_or_have_their_own() -> None:
    for sessions, last in ((0, {"hi 3", "hi 4"}), (2, {"hi 2"})):
        async with toolbox.mcp(SERVER, sessions=sessions, timeout=20) as tools:
            agent = _agent(tools, pools=[tools.pool] if tools.pool is not None else [])
            rollout = await agent.rollout(agents.tasks(2))
            seen = {t.tool_calls[-1].result.observation for t in rollout if t.tool_calls[-1].result is not None}
            assert seen == last
    assert not tasks_left()


async def test_chains_cancelled_at_random_leave_no_session_process_or_task() -> None:
    rng = random.Random(0)
    async with toolbox.mcp(SERVER, timeout=20) as tools:

        async def chain(number: int) -> None:
            await tools["no_te"].try_(text=str(number))
            await tools["hang" if number % 2 else "add"].try_(**({} if number % 2 else {"a": number}))

        running = [asyncio.create_task(chain(number)) for number in range(64)]
        for task in rng.sample(running, 64):
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert len(tasks_left()) < 12, tasks_left()
        assert (await tools["add"].try_(a=1)).ok
    assert not tasks_left()


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


async def test_chains_of_an_agent_cancelled_at_random_leave_no_session_process_or_task() -> None:
    async with toolbox.mcp(SERVER, timeout=20) as tools:
        assert await _cancel_chains(tools, random.Random(1)) < 64
        assert (await tools["add"].try_(a=1)).ok, "the shared session is still usable"
    assert not tasks_left()


@pytest.mark.real  # every session is a process that imports the package mcp
async def test_cancelled_chains_with_sessions_of_their_own_leave_nothing() -> None:
    async with toolbox.mcp(SERVER, sessions=4, timeout=60) as tools:
        assert tools.pool is not None
        assert await _cancel_chains(tools, random.Random(2), pools=[tools.pool]) < 64
        assert tools.pool.snapshot().leased == 0
        (again,) = await _agent(tools, pools=[tools.pool]).rollout(agents.tasks(1))
        assert again.stop == "answered"
    assert not tasks_left()


async def test_a_cancelled_block_ends_its_server() -> None:
    entered = asyncio.Event()

    async def use() -> None:
        async with toolbox.mcp(SERVER, timeout=20):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not tasks_left()


async def test_streamable_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*SERVER, str(port), stderr=asyncio.subprocess.DEVNULL)
    try:
        for _ in range(400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            await asyncio.sleep(0.05)
        async with toolbox.mcp(f"http://127.0.0.1:{port}/mcp", timeout=20) as tools:
            assert (await tools["add"].try_(a=2, b=5)).observation == "7"
    finally:
        process.kill()
        await process.wait()
    assert not tasks_left()
