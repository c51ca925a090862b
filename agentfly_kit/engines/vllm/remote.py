"""Loading a policy's weights into vLLM servers over their HTTP API. All servers receive each chunk concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from agentfly_kit.engines.http import SERVE_COMMAND, Refused
from agentfly_kit.engines.vllm.buffers import TensorSlice
from agentfly_kit.engines.vllm.weight_transfer import CHUNK, Delivery, check_architecture
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy

if TYPE_CHECKING:
    from agentfly_kit.engines.openai import OpenAIEngine


async def update_servers(policy: Policy, engines: Sequence[OpenAIEngine]) -> list[EngineError | None]:
    """Load the weights of `policy` into the servers of these engines.

    A server that fails does not affect the others. While a server loads weights, its requests wait; they continue with
    the new weights.

    Returns:
        For each engine, None if its server was updated, else the error that left the server with old or undefined
        weights.
    """
    servers = [_Server(engine) for engine in engines]
    await _each(servers, lambda server: server.check(policy))
    for transport in ("shm", "http"):
        group = [server for server in servers if server.transport == transport and server.error is None]
        if group:
            await _deliver(policy, transport, group)
    return [server.error for server in servers]


async def _deliver(policy: Policy, transport: Literal["shm", "http"], servers: list[_Server]) -> None:
    addresses = [server.listen for server in servers] if transport == "http" else []
    async with Delivery(policy, transport, CHUNK, addresses) as delivery:

        async def call(
            _: str, handle: dict[str, Any], slices: list[TensorSlice], number: int, last: bool
        ) -> list[None]:
            await _each(servers, lambda server: server.receive(handle, slices, number, last))
            return [None] if any(server.error is None for server in servers) else []

        try:
            await _each(servers, lambda server: server.pause())
            await delivery.send(call)
            await _each(servers, lambda server: server.finish(delivery.version))
        finally:
            # Resume also after a failure or a cancellation, because a paused server would block its other clients.
            await asyncio.gather(*(server.resume() for server in servers))


async def _each(servers: Sequence[_Server], step: Any) -> None:
    """Run `step` for the servers that have not failed, and set `error` of each server for which it fails."""

    async def attempt(server: _Server) -> None:
        try:
            await step(server)
        except EngineError as error:
            server.error = error

    await asyncio.gather(*(attempt(server) for server in servers if server.error is None))


class _Server:
    """State of one server during an update."""

    def __init__(self, engine: OpenAIEngine) -> None:
        self.engine = engine
        self.error: EngineError | None = None
        self._root = engine.base_url.removesuffix("/v1")
        self._paused = self._received = self._finished = False
        address = urlsplit(self._root)
        self._host, self._port = address.hostname or "", address.port or 80
        self.transport: Literal["shm", "http"] = "http"
        # Interface and port on which this process serves the weights, and host name to which the server connects.
        self.listen, self._sender = ("", 0), ""
        if engine.weights in ("auto", "shm"):
            if engine.weights == "shm" or _is_loopback(self._host):
                self.transport = "shm"
        elif engine.weights != "http":
            sender = urlsplit(engine.weights)
            self._sender = sender.hostname or ""
            # Listen on the loopback interface only for a loopback address; another address may belong to a gateway.
            self.listen = self._sender if _is_loopback(self._sender) else "", sender.port or 0

    def _request(self, path: str, body: dict[str, Any] | None = None, retries: int | None = None) -> Awaitable[Any]:
        return self.engine.http.request("POST", self._root + path, body, retries=retries)

    async def check(self, policy: Policy) -> None:
        """Raise EngineError if the server cannot load these weights."""
        if self.engine.tokens != "exact":
            raise EngineError(f"{self.engine.base_url}: updating the weights requires tokens='exact'")
        try:
            found = await self._request("/collective_rpc", {"method": "agentfly_describe"})
        except Refused as error:
            raise EngineError(
                f"the weights of this server cannot be changed ({error}); start it with VLLM_SERVER_DEV_MODE=1 "
                f"{SERVE_COMMAND} --worker-extension-cls agentfly_kit.engines.vllm.worker.WorkerExtension"
            ) from error
        check_architecture(f"the server at {self.engine.base_url}", found["results"][0], policy)
        self.engine.dtype, self.engine.vocab_size = (found["results"][0][name] for name in ("dtype", "vocab_size"))
        if self.transport == "http" and not self._sender:
            self._sender = await asyncio.to_thread(_interface, self._host, self._port)
            self.listen = self._sender, 0

    async def pause(self) -> None:
        self._paused = True
        await self._request("/pause?mode=keep&clear_cache=false")

    async def receive(self, handle: dict[str, Any], slices: list[TensorSlice], number: int, last: bool) -> None:
        if self.transport == "http":
            url = f"http://{self._sender}:{handle['ports'][self.listen]}{handle['path']}"
            handle = {"transport": "http", "size": handle["size"], "url": url}
        body = {"method": "agentfly_receive", "args": [handle, slices, number, last]}
        self._received = True
        # Do not retry: after a lost response, it is unknown whether the chunk was loaded.
        answers = (await self._request("/collective_rpc", body, retries=0))["results"]
        if reason := next((answer for answer in answers if answer), None):
            self._received = not all(answers)
            way = (
                "the server must run on this machine as this user; use weights='http'"
                if self.transport == "shm"
                else "the server must be able to connect to this process; set weights='http://<address>:<port>', an "
                "address of this machine that the server can reach"
            )
            raise EngineError(f"the server at {self.engine.base_url} cannot read the weights ({reason}); {way}")

    async def finish(self, version: int) -> None:
        await self._request("/reset_prefix_cache?reset_running_requests=true")
        self.engine._label = f"{version}-{secrets.token_hex(4)}"
        try:
            await self._request("/update_weight_version", {"new_version": self.engine._label})
        except Refused:  # older versions of vLLM have no labels
            self.engine._label = ""
        self.engine._version, self.engine._update_failure = version, ""
        self.engine.http.disconnected = False
        self._finished = True

    async def resume(self) -> None:
        """Resume a paused server, and discard an unfinished update."""
        if not self._paused:
            return
        if self._received and not self._finished:
            self.engine._update_failure = str(self.error or "it was interrupted")
            self.engine._failed_updates += 1
            with contextlib.suppress(EngineError):  # the server has stopped; the first error is reported
                await self._request("/collective_rpc", {"method": "agentfly_abort"}, retries=0)
        try:
            await self._request("/resume", retries=0 if self.error else None)
        except EngineError as error:
            self.error = self.error or error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _interface(host: str, port: int) -> str:
    """Return the address of the local interface through which `host` is reached. No packets are sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(
            f"cannot find the address of this machine that {host} can reach ({error}); set weights='http://<address>'"
        ) from error
