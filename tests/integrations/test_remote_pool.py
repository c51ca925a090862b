"""A pool over HTTP: real servers and clients on loopback, in one process and in two, with lost responses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import errors
import httpx2
import pytest
import pytest_asyncio
from agents import played, tasks
from hypothesis import given
from hypothesis import strategies as st
from waiting import GUARD, blocking_until, until

import agentfly_kit as af
from agentfly_kit.integrations.remote_pool import wire
from agentfly_kit.integrations.remote_pool.server import PoolServer
from agentfly_kit.pool.records import PoolEvent

TOKEN = "a token of the tests"


def call(code: str) -> str:
    """Return the text of a tool call whose argument is code."""
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


class Notes:
    """Sandbox that stores the texts received and counts the calls."""

    runs = 0
    ended = 0

    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def run(self, *what: Any, pause: float = 0.0) -> list[Any]:
        type(self).runs += 1
        self.kept += what
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            type(self).ended += 1
            raise
        return self.kept

    def count(self) -> int:
        return len(self.kept)

    async def fail(self, how: str) -> None:
        raise {"tool": af.ToolError, "file": FileNotFoundError, "odd": json.JSONDecodeError}[how](
            *(("broken", "{", 1) if how == "odd" else ("broken",))
        )

    async def odd(self) -> object:
        return object()

    async def fork(self, into: Notes) -> None:
        into.kept = list(self.kept)

    async def reset(self) -> None:
        self.kept.clear()

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    Notes.runs = Notes.ended = 0
    yield
    if links():
        gc.collect()  # the traceback of a failed test keeps its pools alive
    blocking_until(lambda: not links())


def links() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "agentfly-remote"]


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[af.Pool[Notes]]:
    async with af.Pool(Notes, size=2) as pool:
        yield pool


@pytest_asyncio.fixture
async def server(pool: af.Pool[Notes]) -> AsyncIterator[PoolServer]:
    async with af.serve_pool(pool, token=TOKEN, heartbeat=20.0) as server:
        yield server


def client(server: PoolServer, **settings: Any) -> af.RemotePool[Notes]:
    return af.RemotePool(server.url, token=server.token, sandbox_type=Notes, **{"patience": GUARD, **settings})


# --- used like any pool --------------------------------------------------------------------------


async def test_python_from_afar_is_python():
    async with af.Pool(af.PythonSandbox, size=2, isolation="none") as near, af.serve_pool(near) as server:
        async with af.RemotePool(server.url, token=server.token) as pool:
            async with pool.lease("me") as sandbox:
                result = await sandbox.run("print('out')\nx = 6\nx * 7")
                assert isinstance(result, af.SandboxResult)
                assert (result.stdout, result.value, result.ok) == ("out\n", "42", True)
                assert (await sandbox.run("x / 0")).error_type == "ZeroDivisionError"
                assert (await sandbox.run("while True: pass", timeout=0.1)).timed_out
                await errors.check(
                    lambda: sandbox.run("1", timeout=-1), af.errors.SettingsError, "timeout must be a positive"
                )
                assert sandbox.isolation == "none"
                async with pool.lease("twin") as twin:
                    await sandbox.reset()
                    await sandbox.run("y = 5")
                    await sandbox.fork(twin)
                    assert (await twin.run("y")).value == "5"
                errors.check(lambda: sandbox.kill, AttributeError, "a remote PythonSandbox has no kill")
            assert not sandbox.alive
            await errors.check(lambda: sandbox.run("1"), af.errors.RemotePoolError, "has ended")
            async with pool.lease() as again:
                assert (await again.run("'x' in globals()")).value == "False"


async def test_an_agent_rolls_out_on_it():
    @af.tool
    async def python(code: str, sandbox: af.PythonSandbox) -> str:
        """Run Python.

        Args:
            code: what to run.
        """
        return (await sandbox.run(code)).text

    @af.reward
    async def reward(final: str | None, sandbox: af.PythonSandbox) -> float:
        return float((await sandbox.run("x")).value == "41")

    async with af.Pool(af.PythonSandbox, size=2, isolation="none") as near, af.serve_pool(near) as server:
        async with af.RemotePool(server.url, token=server.token) as pool:
            assert (await python.try_(code="6*7", pool=pool)).observation == "42"
            texts = [call("x = 41"), call("x + 1"), "done"]
            rollout = await played(texts, tools=[python], reward=reward, pools=[pool]).rollout(tasks(3), group_size=2)
            assert [t.reward for t in rollout.trajectories] == [1.0] * 6
            assert {t.tool_calls[1].result.observation for t in rollout.trajectories} == {"42"}
        await until(lambda: near.snapshot().leased == 0)


async def test_other_kinds_and_what_they_refuse_from_afar(tmp_path: Path):
    (tmp_path / "secret").write_text("of the server's machine")
    async with af.Pool(af.FileSandbox, size=1, isolation="none") as near, af.serve_pool(near) as server:
        async with (
            af.RemotePool(server.url, token=server.token, sandbox_type=af.FileSandbox) as pool,
            pool.lease() as files,
        ):
            await files.seed({"a.txt": "one\ntwo\n", "b.bin": b"\x00"})
            assert "two" in await files.read("a.txt", start=2)
            assert await files.list() == ("a.txt", "b.bin")
            (found,) = await files.grep("tw")
            assert (found.path, found.line) == ("a.txt", 2)
            await errors.check(lambda: files.read("nothing.txt"), af.ToolError, "nothing")
            for way in (files.seed(str(tmp_path)), files.seed(files=str(tmp_path))):
                await errors.check(lambda: way, af.errors.SettingsError, "in a remote call of seed")


async def test_repr_and_snapshot_and_turns(server: PoolServer, pool: af.Pool[Notes]):
    far = client(server)
    assert [each for each in af.pools() if each in (pool, far)] == [pool, far], "oldest first"
    assert repr(far) == f"<RemotePool Notes at {server.url}, not connected>"
    await client(server).close()  # was never connected
    await far.refresh()
    assert repr(far) == f"<RemotePool Notes at {server.url}, 0 leased, 0 idle, 0 starting, 0 waiting, size 2>"
    lease = await far.acquire("chain 3")
    assert repr(far) == f"<RemotePool Notes at {server.url}, 1 leased, 0 idle, 0 starting, 0 waiting, size 2>"
    assert re.fullmatch(rf"<PoolServer {server.url}, 1 client, <Pool Notes 1 leased, .*>>", repr(server))
    lease.turn = 4
    await lease.sandbox.run("x")
    s = await far.refresh()
    for leases in (s.leases, pool.snapshot().leases):
        assert [(lease.owner, lease.turn) for lease in leases] == [("chain 3", 4)]
    assert s.time - s.leases[0].since >= 0
    assert (far.size, far.sandbox_type, far.closed) == (2, Notes, False)
    await lease.release()
    await lease.release()
    await far.close()
    assert repr(far) == f"<RemotePool Notes at {server.url}, closed>"
    assert far not in af.pools()
    await errors.check(far.acquire, af.errors.PoolClosed)


async def test_values_and_failures_travel(server: PoolServer):
    async with client(server) as far, far.lease() as notes:
        value = [1, 2.5, "é\ud83d", None, True, b"\x00\xff", (1, (2,)), {"a": [1]}, {1: "one"}, {3}, {"$x": 1}]
        assert await notes.run(*value) == value
        assert await notes.count() == len(value), "a method without async is awaited from afar"
        await errors.check(lambda: notes.fail("tool"), af.ToolError, "broken")
        await errors.check(lambda: notes.fail("file"), FileNotFoundError, "broken")
        await errors.check(lambda: notes.fail("odd"), af.errors.SandboxError, "JSONDecodeError: broken")
        await errors.check(notes.odd, TypeError, "a object cannot be sent")
        await errors.check(lambda: notes.run(object()), TypeError, "a object cannot be sent")
        await errors.check(notes.fail, TypeError, "missing 1 required positional argument")


async def test_events_arrive_in_order(server: PoolServer):
    async with client(server) as far, client(server) as other:
        heard: list[PoolEvent] = []
        unsubscribe = far.subscribe(heard.append)
        await until(lambda: far._link.sequence is not None)
        async with other.lease("the other"):
            pass
        await until(lambda: [e.kind for e in heard][-2:] == ["resetting", "idle"])
        assert [e.kind for e in heard] == ["waiting", "starting", "idle", "leased", "resetting", "idle"]
        assert [e.sequence for e in heard] == list(range(heard[0].sequence, heard[0].sequence + 6))
        unsubscribe()
        later: list[PoolEvent] = []
        far.subscribe(lambda event: 1 / 0)
        far.subscribe(later.append)
        async with other.lease("again"):
            pass
        await until(lambda: [e.kind for e in later][-1:] == ["idle"])
        assert len(heard) == 6
        async with far.lease():
            pass


async def test_first_come_first_served_over_all_clients(server: PoolServer):
    async with client(server) as one, client(server) as two:
        held = [await one.acquire("a"), await two.acquire("b")]
        await errors.check(
            lambda: one.acquire("c", timeout=0.1),
            af.errors.PoolTimeout,
            re.compile(r"no Notes free after 0\.1 s \(2 of 2 leased.*held by a .*, b "),
        )
        await errors.check(lambda: one.acquire("c", queue=False), af.errors.PoolTimeout, "no Notes is free")
        waiting = []
        for number in range(4):
            waiting.append(asyncio.ensure_future((one, two)[number % 2].acquire(f"w{number}")))
            await until(lambda: server.pool.snapshot().waiting == len(waiting))
        waiting[1].cancel()
        await until(lambda: server.pool.snapshot().waiters == ("w0", "w2", "w3"))
        await held[0].release()
        first = await waiting[0]
        await held[1].release()
        second = await waiting[2]
        assert not waiting[3].done()
        await first.release()
        third = await waiting[3]
        await second.release()
        await third.release()
        assert server.pool.snapshot().leased == 0


async def test_a_cancelled_call_is_cancelled_there(server: PoolServer):
    async with client(server) as far, far.lease() as notes:
        running = asyncio.ensure_future(notes.run("x", pause=1000))
        await until(lambda: Notes.runs == 1)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: Notes.ended == 1)
        assert await notes.run("y") == ["x", "y"]


async def test_closing_wakes_and_gives_back(server: PoolServer, pool: af.Pool[Notes]):
    far = client(server)
    leases = [await far.acquire("a"), await far.acquire("b")]
    waiting = asyncio.ensure_future(far.acquire("c"))
    await until(lambda: pool.snapshot().waiting == 1)
    await far.close()
    await errors.check(lambda: waiting, af.errors.PoolClosed)
    await until(lambda: (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0))
    for lease in leases:
        await lease.release()


def test_one_loop_after_another_and_a_cell_that_computes():
    """Heartbeats are sent from a separate thread, so a blocked or closed event loop does not lose leases."""

    async def serve() -> None:
        async with af.Pool(Notes, size=1) as pool, af.serve_pool(pool, token=TOKEN, heartbeat=1.0) as server:
            where.append(server)
            await asyncio.to_thread(done.wait)
            assert pool.snapshot().leased == 0

    where: list[PoolServer] = []
    done = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        blocking_until(lambda: where)
        far, server = client(where[0]), where[0]

        async def take() -> Any:
            lease = await far.acquire()
            await lease.sandbox.run("kept")
            server.heartbeat = GUARD  # the client keeps its interval
            (known,) = server._clients.values()
            seen = {known.last_seen}
            blocking_until(lambda: seen.add(known.last_seen) or len(seen) > 3)
            return lease

        lease = asyncio.run(take())
        assert asyncio.run(lease.sandbox.run("x")) == ["kept", "x"]
        server.heartbeat = 1.0
        with pytest.warns(ResourceWarning, match="was garbage-collected without a release"):
            del lease
        lease = asyncio.run(far.acquire())
        server.heartbeat = GUARD
        assert asyncio.run(lease.sandbox.run("y")) == ["y"]
        asyncio.run(lease.release())
        far._finalizer()  # as when the client is garbage-collected; tells the server
    finally:
        done.set()
        thread.join()


# --- authorization -------------------------------------------------------------------------------


async def test_a_second_close_waits_for_one_that_was_cancelled(server: PoolServer):
    pool = client(server)
    await pool.refresh()
    first = asyncio.ensure_future(pool.close())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await pool.close()
    assert links() == []


async def test_a_wrong_token_is_refused_and_told_nothing(server: PoolServer):
    async with httpx2.AsyncClient(timeout=GUARD) as http:
        for given in (None, "Bearer", f"Bearer {TOKEN}x", TOKEN):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/v2/pool", "/v2/acquire", "/v2/beat"):
                answer = await http.post(server.url + path, headers=headers)
                assert answer.status_code == 401, (headers, path)
                assert "Notes" not in answer.text
    far = af.RemotePool(server.url, token="not the token at all", sandbox_type=Notes)
    await errors.check(far.acquire, af.errors.RemotePoolError, "the token is wrong or missing")
    await far.close()
    assert server.clients == {}


async def test_what_cannot_be_served(pool: af.Pool[Notes]):
    async with af.serve_pool(pool) as one, af.serve_pool(pool, max_body=2000) as two:
        assert one.token != two.token and len(one.token) >= 32
        other = af.RemotePool(one.url, token=one.token)
        await errors.check(
            other.acquire,
            af.errors.SettingsError,
            re.compile(r"must be Notes, the class of the pool at .*, got Python"),
        )
        await other.close()
        async with client(two) as far, far.lease() as notes:
            await errors.check(
                lambda: notes.run("x" * 3000),
                af.errors.RemotePoolError,
                re.compile(r"the request is too large .*\(see max_body="),
            )


async def test_one_client_cannot_touch_what_another_holds(server: PoolServer):
    async with client(server) as one, client(server) as two, one.lease("mine") as mine:
        await mine.run("secret")
        two._link.held[mine._lease] = None
        await errors.check(
            lambda: two._link.run_and_wait(two._link.call(mine._lease, "run", (), {})),
            af.errors.RemotePoolError,
            "has ended",
        )
        await two._link.run_and_wait(two._link.release(mine._lease, True))
        assert await mine.run() == ["secret"]


async def test_only_the_methods_of_the_kind(server: PoolServer):
    async with client(server) as far, far.lease() as notes:
        for name in ("close", "start", "kill", "__init__", "_x", "kept", "nothing"):
            await errors.check(
                lambda: far._link.run_and_wait(far._link.call(notes._lease, name, (), {})),
                af.errors.SandboxError,
                "for remote calls",
            )


def test_tls_with_a_certificate_of_its_own(tmp_path: Path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-days", "2", "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)

    async def use() -> None:
        async with af.Pool(Notes, size=1) as pool, af.serve_pool(pool, token=TOKEN, tls=(certificate, key)) as server:
            assert server.url.startswith("https://")
            async with client(server, verify=certificate) as far, far.lease() as notes:
                assert await notes.run("x") == ["x"]
            stranger = client(server, patience=0.1)
            await errors.check(stranger.acquire, af.errors.RemotePoolError, "certificate verify failed")
            await stranger.close()

    asyncio.run(use())


# --- losses --------------------------------------------------------------------------------------


class LossyProxy:
    """Proxy that forwards bytes between clients and a server, and loses some responses by disconnecting."""

    def __init__(self, port: int, chance: random.Random, loss: float) -> None:
        self.to, self.chance, self.loss, self.lost = port, chance, loss, 0

    async def __aenter__(self) -> LossyProxy:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)

        async def back() -> None:
            while data := await far_reader.read(65536):
                if self.chance.random() < self.loss:
                    self.lost += 1
                    break
                writer.write(data)
            writer.close()

        answering = asyncio.ensure_future(back())
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                far_writer.write(data)
        far_writer.close()
        answering.cancel()
        await asyncio.wait([answering])
        writer.close()


async def test_lost_answers_lease_nothing_twice_and_run_nothing_twice(server: PoolServer, pool: af.Pool[Notes]):
    print("seed 0")
    async with LossyProxy(server.port, random.Random(0), 0.3) as proxy:
        far = af.RemotePool(proxy.url, token=TOKEN, sandbox_type=Notes, patience=GUARD)
        for number in range(12):
            async with far.lease(f"chain {number}") as notes:
                assert await notes.run(1) == [1]
                assert await notes.run(2) == [1, 2]
                assert pool.snapshot().leased == 1
        assert Notes.runs == 24
        assert proxy.lost > 5
        await far.close()
    await until(lambda: pool.snapshot().leased == 0)


async def test_what_a_client_never_heard_of_goes_back(pool: af.Pool[Notes]):
    # The server looks for lost clients at a fifth of this interval, and waits on if it was itself late by as much.
    async with af.serve_pool(pool, token=TOKEN, heartbeat=2.0) as server, httpx2.AsyncClient(timeout=GUARD) as http:
        headers = {"Authorization": f"Bearer {TOKEN}"}

        async def post(path: str, **body: Any) -> Any:
            return (await http.post(f"{server.url}/v2/{path}", json={"client": "c", **body}, headers=headers)).json()

        await asyncio.sleep(0)  # until the server has read the interval at which it looks
        for _ in range(2):
            server.heartbeat = GUARD
            told = await post("acquire", request="r", wait=1)
            assert (await post("acquire", request="r", wait=1))["lease"] == told["lease"], (
                "the same name, the same lease"
            )
            assert pool.snapshot().leased == 1
            server.heartbeat = 0.1
            while pool.snapshot().leased:  # heartbeats without the lease: the client never received it
                await post("beat", leases={}, requests=[])
                await asyncio.sleep(0.01)
            assert "ended" in (await post("release", lease=told["lease"])).get("error", {"message": "ended"})["message"]
            await until(lambda: server.clients == {})  # no more heartbeats arrive


SERVER = """
import asyncio, sys
import agentfly_kit as af
async def main():
    async with af.Pool(af.PythonSandbox, size=2, isolation="none") as pool:
        server = await af.serve_pool(pool, token=sys.argv[1], heartbeat=3.0)
        print(server.url, flush=True)
        await server.forever()
asyncio.run(main())
"""
CLIENT = """
import asyncio, sys, time
import agentfly_kit as af
async def main():
    pool = af.RemotePool(sys.argv[1], token=sys.argv[2])
    leases = [await pool.acquire(f"doomed {i}") for i in range(2)]
    waiting = asyncio.ensure_future(pool.acquire("waiting"))
    running = asyncio.ensure_future(leases[0].sandbox.run("import time; time.sleep(1000)", timeout=1000))
    while not (await pool.refresh()).waiting:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await running
asyncio.run(main())
"""


async def test_a_killed_client_loses_its_leases_and_a_killed_server_is_named():
    near = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SERVER, TOKEN], stdout=subprocess.PIPE, text=True
    )
    far = None
    try:
        url = (await asyncio.to_thread(near.stdout.readline)).strip()
        far = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", CLIENT, url, TOKEN], stdout=subprocess.PIPE, text=True
        )
        assert far.stdout is not None and (await asyncio.to_thread(far.stdout.readline)) == "ready\n"
        pool = af.RemotePool(url, token=TOKEN, patience=0.5)
        s = await pool.refresh()
        assert (s.leased, s.waiting) == (2, 1)
        far.kill()
        async with pool.lease("heir", timeout=GUARD) as one, pool.lease("heir", timeout=GUARD) as two:
            assert [(await each.run("'time' in globals()", GUARD)).value for each in (one, two)] == ["False", "False"]
            assert (await pool.refresh()).waiting == 0

        @af.tool
        async def python(code: str, sandbox: af.PythonSandbox) -> str:
            """Run Python.

            Args:
                code: what to run.
            """
            if "last" in code:
                near.kill()
                near.wait()
            return (await sandbox.run(code, GUARD)).text

        texts = [call("1"), call("'last'"), "done"]
        (trajectory,) = await played(texts, tools=[python], pools=[pool]).rollout(tasks(1))
        assert (trajectory.reward, trajectory.stop, trajectory.error.type) == (None, "error", "RemotePoolError")
        assert f"the pool at {url} does not respond" in trajectory.error.message
        await errors.check(pool.acquire, af.errors.RemotePoolError, "does not respond")
        assert repr(pool).endswith("no response>")
        await pool.close()
    finally:
        for process in (near, far):
            if process is not None:
                process.send_signal(signal.SIGKILL)
                process.communicate()


LEAVER = """
import asyncio, sys
import agentfly_kit as af
pool = af.RemotePool(sys.argv[1], token=sys.argv[2])
lease = asyncio.run(pool.acquire("left"))
print(asyncio.run(lease.sandbox.run("6 * 7", 300)).value)
"""


async def test_a_python_that_ends_with_a_lease_says_good_bye():
    async with (
        af.Pool(af.PythonSandbox, size=1, isolation="none") as near,
        af.serve_pool(near, heartbeat=600) as server,
    ):
        leaver = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", LEAVER, server.url, server.token, stdout=-1, stderr=-1
        )
        assert await leaver.communicate() == (b"42\n", b"")
        assert (leaver.returncode, server.clients, near.snapshot().leased) == (0, {}, 0)


async def test_a_server_that_closes_gives_back_and_says_so(pool: af.Pool[Notes]):
    server = await af.serve_pool(pool, token=TOKEN)
    far = client(server, patience=0.3)
    lease = await far.acquire()
    waiting = [asyncio.ensure_future(far.acquire(f"w{i}")) for i in range(3)]
    await until(lambda: pool.snapshot().waiting == 2)
    running = asyncio.ensure_future(lease.sandbox.run("x", pause=1000))
    await until(lambda: Notes.runs == 1)
    await server.close()
    assert (pool.snapshot().leased, pool.snapshot().waiting) == (0, 0)
    await errors.check(lambda: running, af.errors.RemotePoolError)
    # Any one of the three had a sandbox, because requests may arrive in another order than they were sent.
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(outcome, af.errors.RemotePoolError) for outcome in outcomes) >= 2
    await lease.release()
    await far.close()
    async with pool.lease():
        pass
    await errors.check(server.start, af.errors.RemotePoolError, "closed")


async def test_failures_of_the_pool_arrive_as_they_are():
    class Broken:
        async def start(self) -> None:
            raise af.errors.IsolationError("no such level here")

        async def run(self) -> None: ...

    async with af.Pool(Broken, size=1) as pool, af.serve_pool(pool) as server:
        far = af.RemotePool(server.url, token=server.token, sandbox_type=Broken)
        await errors.check(far.acquire, af.errors.IsolationError, "no such level here")
        await pool.close()
        await errors.check(far.acquire, af.errors.PoolClosed, "the pool of Broken is closed")
        await far.close()


async def test_nonsense_never_breaks_the_server(server: PoolServer, pool: af.Pool[Notes]):
    print("seed 0")
    chance = random.Random(0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    words: list[Any] = [
        None, "", "x", -1, 0, 1e400, 1e308, [], {}, [[]], {"$record": "os:system", "fields": {}}, "é" * 50, True,
    ]  # fmt: skip
    words += [{"$bytes": "?"}, {"$lease": "x"}, {"$tuple": 3}, {"$dict": [[[], 1]]}, "a" * 200, {"a": {"$set": [[1]]}}]
    words += [{"$decimal": "x"}, {"$timedelta": [10**30]}, {"$record": "agentfly_kit.sandboxes.no:X", "fields": {}}]
    words += [{"$record": "agentfly_kit.sandboxes.result:SandboxResult", "fields": {"no": 1}}]
    names = "client request lease method args kwargs wait timeout owner leases requests after turn reusable nonsense"
    paths = ["acquire", "abandon", "call", "release", "beat", "bye", "pool", "nothing"]
    async with (
        httpx2.AsyncClient(headers=headers, timeout=GUARD) as http,
        client(server) as far,
        far.lease("good") as notes,
    ):
        own = {"client": far._link.client, "lease": notes._lease, "method": "run", "request": "r", "owner": "o"}
        for number in range(150):
            body: Any = {name: chance.choice(words) for name in chance.sample(names.split(), chance.randrange(5))}
            body |= {name: own[name] for name in chance.sample(sorted(own), chance.randrange(4)) if name != "client"}
            body.setdefault("client", f"nonsense {chance.randrange(3)}")
            raw = json.dumps(body).encode()
            if number % 5 == 0:
                raw = bytes(chance.randrange(256) for _ in range(40)) if number % 2 else b"[" * 100_000
            elif number % 7 == 0:
                raw = raw[: chance.randrange(len(raw))]
            answer = await http.post(f"{server.url}/v2/{chance.choice(paths)}", content=raw)
            assert answer.status_code in (200, 202, 400, 404, 405, 409, 413, 429), (answer.status_code, raw[:200])
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in await reader.read(100)
        writer.close()
        assert await notes.run("still here") == ["still here"], "nobody else's words end a lease"


# --- the wire ------------------------------------------------------------------------------------

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
PLAIN |= st.decimals(allow_nan=False) | st.dates() | st.times() | st.datetimes() | st.timedeltas() | st.uuids()
KEYS = st.text() | st.integers()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner)))
def test_what_is_encoded_is_decoded(value: Any):
    assert wire.decode(json.loads(json.dumps(wire.encode(value)))) == value


def test_records_come_from_where_they_may():
    result = af.SandboxResult(stdout="x", value="1", seconds=0.5, limit="time", timed_out=True)
    assert wire.decode(json.loads(json.dumps(wire.encode(result)))) == result
    ours = (f"agentfly_kit.{name}" for name in ("pool.pool:Pool", "trainer.config:TrainConfig", "sandboxes.python:os"))
    for name in ("subprocess:Popen", "builtins:int", ":", "x", *ours):
        errors.check(
            lambda: wire.decode({"$record": name, "fields": {}}),
            ValueError,
            re.compile(r"are not accepted|is not a dataclass or named tuple"),
        )
    for error in (af.errors.PoolTimeout("a"), af.errors.RemotePoolError("b"), af.ToolError("c"), ValueError("d")):
        back = wire.decode_exception(json.loads(json.dumps(wire.encode_exception(error))))
        assert (type(back), str(back)) == (type(error), str(error))
    assert type(wire.decode_exception({"type": "SystemExit", "message": "x"})) is af.errors.SandboxError
    assert type(wire.decode_exception("nonsense")) is af.errors.SandboxError


# --- leases that the pool ends -------------------------------------------------------------------


async def test_a_lease_that_is_too_old_ends_from_afar_and_counts_no_more():
    async with af.Pool(Notes, size=1, max_lease=0.3) as pool:
        async with af.serve_pool(pool, token=TOKEN, heartbeat=4.0) as server:
            async with af.RemotePool(server.url, token=TOKEN, sandbox_type=Notes) as remote:
                lease = await remote.acquire("slow")
                await errors.check(
                    lambda: lease.sandbox.run("x", pause=600.0),
                    af.errors.LeaseRevoked,
                    "the pool revoked the Notes: held for",
                )
                assert "held for" in lease.revoked
                other = await remote.acquire("next")
                await until(lambda: bool(other.revoked))
                await errors.check(lambda: other.sandbox.run("x"), af.errors.SandboxError)
                await other.release()
                await lease.release()


# --- manual leases -------------------------------------------------------------------------------


async def test_a_lease_revoked_at_the_server_ends_from_afar(server: PoolServer, pool: af.Pool[Notes]):
    async with client(server) as far:
        mine = await far.acquire("mine")
        running = asyncio.ensure_future(mine.sandbox.run("x", pause=600.0))
        await until(lambda: Notes.runs == 1)
        pool.recycle(mine.id)
        await errors.check(lambda: running, af.errors.LeaseRevoked, "the pool revoked the Notes: reset by hand")
        assert mine.revoked == "reset by hand" and not mine.sandbox.alive
        await errors.check(
            lambda: mine.sandbox.run("y"), af.errors.LeaseRevoked, "the pool revoked the Notes: reset by hand"
        )
        await mine.release()
        async with far.lease("heir") as notes:
            assert await notes.run("new") == ["new"]


async def test_a_server_that_is_started_again_is_heard_again(pool: af.Pool[Notes]):
    async with af.serve_pool(pool, token=TOKEN, heartbeat=4.0) as server:
        port = server.port
        far = client(server)
        heard: list[PoolEvent] = []
        far.subscribe(heard.append)
        await until(lambda: far._link.sequence is not None)
        for _ in range(5):
            async with far.lease("before"):
                pass
        await until(lambda: len(heard) > 20)
        lost = await far.acquire("lost")
    async with af.Pool(Notes, size=1) as other, af.serve_pool(other, token=TOKEN, port=port, heartbeat=4.0) as again:
        await errors.check(lambda: lost.sandbox.run("x"), af.errors.RemotePoolError, "has ended")
        await lost.release()
        heard.clear()
        await until(lambda: far._link.server == again._name and far._link.sequence is not None)
        async with far.lease("after") as notes:
            assert await notes.run("x") == ["x"]
        await until(lambda: "leased" in [event.kind for event in heard])
        assert far.size == 1
        await far.close()
