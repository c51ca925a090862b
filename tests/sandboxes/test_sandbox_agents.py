"""Command-line agents in a sandbox: what they reach, how their chains end, and that nothing is left of them."""

import asyncio
import dataclasses
import json
import random
import socket
from typing import Any

import aiohttp
import dice
import errors
import pytest
from agents import Played
from patience import printed
from test_harness import TASK, harnessed
from test_sandbox_python import nothing_left  # noqa: F401  (a fixture)
from waiting import until

import agentfly_kit as af

# The beginning of an agent, with a function that sends a request and returns the status of the answer.
ASKING = """
import http.client, json, os, signal, socket, subprocess, sys, time
from urllib.parse import urlsplit
url, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
def ask(path=url.path, port=url.port, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    connection.request("POST", path + "/chat/completions", body, headers)
    return connection.getresponse().status
"""
REACHING = """
stranger = "afk-" + "0" * 32
try:
    host = ask(port=int(sys.argv[2]))
except OSError:
    host = None
print(json.dumps({
    "own": ask(), "key in the header": ask("/v1", Authorization="Bearer " + key), "no key": ask("/v1"),
    "stranger": ask(f"/{stranger}/v1"), "other chain": ask(f"/{sys.argv[1]}/v1"),
    "foreign": ask(Host="rebound.example"), "host": host,
}))
"""


def agent(harness: Any, level: Any, size: int = 1, **settings: Any) -> af.Agent:
    pool = af.Pool(af.ShellSandbox, size=size, isolation=level, processes=None if level == "none" else 32)
    return harnessed(harness, lambda task, turn: "5", pools=[pool], **settings)


def running_agent(program: str, *arguments: str) -> list[str]:
    return ["python3", "-c", ASKING + program, *arguments]


async def check_reach(level: Any, host: int | None) -> None:
    """Let two chains run, and let the agent of one send requests to both. `host` is the status from the other port."""
    endpoints: list[af.Endpoint] = []
    results: list[Any] = []
    done = asyncio.Event()

    async def reaching(endpoint: af.Endpoint, box: af.ShellSandbox) -> str:
        endpoints.append(endpoint)
        if len(endpoints) == 1:
            async with aiohttp.ClientSession() as client, client.get(f"{endpoint.base_url}/models") as got:
                assert got.status == 200
            await done.wait()
        else:
            other = endpoints[0]
            port = other.base_url.split(":")[2].split("/")[0]
            results.append(await box.run_agent(running_agent(REACHING, other.api_key, port), endpoint))
            done.set()
            results.append(await box.run("env"))
        return "5"

    reached = agent(reaching, level, 2)
    async with reached.pools[0]:
        rollout = await reached.rollout([TASK], 2)
    assert [t.stop for t in rollout] == ["answered"] * 2, [t.error for t in rollout]
    assert sorted(len(t.actions) for t in rollout) == [0, 2]
    refused = {"no key": 404, "stranger": 404, "other chain": 404, "foreign": 403, "host": host}
    assert json.loads(results[0].stdout) == {"own": 200, "key in the header": 200, **refused}, results[0]
    assert "OPENAI" not in results[1].stdout
    errors.check(endpoints[1].for_sandbox, af.errors.SettingsError, "the endpoint is closed")


async def test_an_agent_reaches_its_own_chain_only(level: str) -> None:
    if level != "landlock":
        return await check_reach(level, None if level == "strict" else 404)

    async def asking(endpoint: af.Endpoint, box: af.ShellSandbox) -> None:
        await box.run_agent(["true"], endpoint)

    refusing = agent(asking, level)
    async with refusing.pools[0]:
        (t,) = await refusing.rollout([TASK])
    assert t.stop == "error" and "'strict' or an af.Container to run an agent, got 'landlock'" in str(t.error)


async def test_invalid_commands_are_named() -> None:
    async with af.ShellSandbox(isolation="none", processes=None) as box:
        for command in ("mini", []):
            await errors.check(lambda c=command: box.run_agent(c, None), af.errors.SettingsError, "must be a list")


ASKED = "\nprint('asked', flush=True)\n"
WAITING = f"ask(){ASKED}while True: time.sleep(1)"
HALF = r"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n{"
# Program of an agent -> stop reason and number of actions of its chain. An agent that prints "asked" is then cancelled.
HOSTILE = {
    "never calls": ("", "answered", 0),
    "exits with an error": ("ask(); sys.exit(3)", "answered", 1),
    "leaves a process": ("subprocess.Popen(['sleep', '1000'], start_new_session=True); ask()", "answered", 1),
    "writes much": ("ask()\nwhile True: print('x' * 9999)", "answered", 1),
    "asks without end": ("while True: ask()", "max_turns", 4),
    "retries on every error": (
        "ask()\nwhile True:\n c = http.client.HTTPConnection('127.0.0.1', url.port)\n"
        " c.request('POST', url.path + '/chat/completions', '{}'); c.getresponse().read()", "harness_failed", 1,
    ),
    "runs on": (WAITING, "answered", 1),
    "ignores signals": (f"for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n{WAITING}", "answered", 1),
    "sends half a request": (
        "ask(); half = socket.create_connection((url.hostname, url.port))\n"
        f"half.send('{HALF}'.replace('{{key}}', key).encode()){ASKED}ask()", "answered", 1,
    ),
    "sends on a later connection first": (
        "first = http.client.HTTPConnection('127.0.0.1', url.port); first.connect(); ask()\n"
        "first.request('GET', url.path + '/models'); sys.exit(first.getresponse().status != 200)", "answered", 1,
    ),
    "opens many connections": (
        "for n in range(9):\n kept = [socket.create_connection((url.hostname, url.port)) for _ in range(99)]\n"
        "for c in kept: c.close()\n"
        "while True:\n try: sys.exit(ask() != 200)\n except OSError: pass", "answered", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_agents_leave_nothing(name: str, level: str) -> None:
    if level == "landlock":
        pytest.skip("agents need sockets")
    await check_hostile(name, level)


async def check_hostile(name: str, level: Any) -> None:
    """Run a hostile agent, and check how its chain ends and that no lease and no task is left."""
    program, stop, actions = HOSTILE[name]
    goes_on = "asked" in program

    async def hosting(endpoint: af.Endpoint, box: af.ShellSandbox) -> str:
        call = asyncio.ensure_future(box.run_agent(running_agent(program), endpoint))
        try:
            if not goes_on:
                return (await call).text
            await until(lambda: printed(box))
            return "5"
        finally:
            call.cancel()
            await asyncio.wait([call])

    before = asyncio.all_tasks()
    hosted = agent(hosting, level)
    async with hosted.pools[0] as pool:
        (t,) = await hosted.rollout([TASK])
        assert (t.stop, len(t.actions)) == (stop, actions), (t, t.final)
        assert t.error is None or "100 requests in a row were refused, the last because messages must" in str(t.error)
        assert pool.snapshot().leased == 0
    await until(lambda: asyncio.all_tasks() <= before)


FILLING = """
ask()
written = 0
try:
    for n in range(1024):
        with open(f"file{n % 8}", "ab") as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print(error.strerror, written >> 20)
"""


@pytest.mark.parametrize("level", ["strict"])
async def test_an_agent_that_writes_a_gigabyte_fills_its_own_folder_only(level: str) -> None:
    programs = {"fill": FILLING, "small": "ask(); print(open('x', 'w').write('x' * 9999)); ask()"}
    texts: dict[str, str] = {}

    async def hosting(endpoint: af.Endpoint, box: af.ShellSandbox, task: af.Task) -> str:
        texts[task.id] = (await box.run_agent(running_agent(programs[task.id]), endpoint)).text.strip()
        assert (await box.run("rm -rf * && echo x > y && cat y")).stdout == "x\n"
        return "5"

    hosted = agent(hosting, level, 2)
    async with hosted.pools[0] as pool:
        rollout = await hosted.rollout([dataclasses.replace(TASK, id=name) for name in programs], 2)
        assert [(t.stop, len(t.actions)) for t in rollout] == [("answered", n) for n in (1, 1, 2, 2)], rollout
        assert pool.snapshot().leased == 0
    error, _, size = texts["fill"].rpartition(" ")
    assert (texts["small"], error) == ("9999", "No space left on device") and int(size) <= 64, texts


async def test_a_connection_accepted_just_before_the_end_is_closed() -> None:
    async def accepting(endpoint: af.Endpoint) -> None:
        own, other = socket.socketpair()
        async with endpoint.for_sandbox() as server:
            server.accept(other)
        with own:
            assert other.fileno() == -1 and own.recv(1) == b""

    (t,) = await harnessed(accepting, ["x"]).rollout([TASK])
    assert t.error is None


async def test_a_request_ends_with_the_command_that_sent_it() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Waiting(Played):
        async def sample(self, *args: Any, **options: Any) -> af.Sample:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

    async def sending(endpoint: af.Endpoint) -> str:
        own, other = socket.socketpair()
        with own:
            async with endpoint.for_sandbox() as server:
                server.accept(other)
                body = b'{"messages": [{"role": "user", "content": "a"}]}'
                head = f"POST /{endpoint.api_key}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                own.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await begun.wait()
            await until(ended.is_set)
        return "5"

    (t,) = await harnessed(sending, ["x"]).replace(engine=Waiting([])).rollout([TASK])
    assert (t.stop, t.actions) == ("answered", ()), t.error


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.long)])
async def test_agents_that_are_cancelled_at_random_leave_nothing(count: int, level: str) -> None:
    if level == "landlock":
        pytest.skip("agents need sockets")
    chance = random.Random(dice.seed())
    endpoints: list[af.Endpoint] = []

    async def hosting(endpoint: af.Endpoint, box: af.ShellSandbox) -> str:
        endpoints.append(endpoint)
        return (await box.run_agent(running_agent(WAITING), endpoint)).text

    async def rollout() -> None:
        await hosted.rollout([TASK])

    before = asyncio.all_tasks()
    hosted = agent(hosting, level, size=count)
    async with hosted.pools[0] as pool:
        running = [asyncio.ensure_future(rollout()) for _ in range(count)]
        for i, chain in enumerate(chance.sample(running, count)):
            wanted = min(i, count - i) / 2  # some are cancelled before their first request
            await until(lambda wanted=wanted: sum(each.usage.requests for each in endpoints) >= wanted)
            await asyncio.sleep(chance.random() / 20)
            chain.cancel()
        await asyncio.wait(running)
        await until(lambda: pool.snapshot().leased == 0)
    await until(lambda: asyncio.all_tasks() <= before)
