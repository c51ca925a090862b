"""Load a policy's weights into vLLM servers over their HTTP API. All servers receive the weights concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.engines.http import SERVE_COMMAND, Refused
from agentfly_kit.engines.vllm.weight_transfer import TRANSFER_CONFIG, WeightFile, check_architecture, serve_file
from agentfly_kit.errors import EngineError
from agentfly_kit.policy.policy import Policy

if TYPE_CHECKING:
    from agentfly_kit.engines.openai import OpenAIEngine


async def update_servers(policy: Policy, engines: Sequence[OpenAIEngine]) -> list[EngineError | None]:
    """Load the weights of `policy` into the servers of these engines.

    A server that fails does not affect the others. While a server loads weights, its requests wait, and then they
    continue with the new weights.

    Returns:
        For each engine, None if its server was updated, else the error that left the server with old or undefined
        weights.
    """
    servers = [_Server(engine) for engine in engines]
    await _each(servers, lambda server: server.check(policy))
    if all(server.error for server in servers):
        return [server.error for server in servers]
    weights = await asyncio.to_thread(WeightFile, policy)
    try:
        working = [server for server in servers if server.error is None]
        listening = [server.listen for server in working if server.transport == "http"]
        with serve_file(weights.path, listening) as (path, ports):
            await _each(servers, lambda server: server.update(weights, path, ports))
    finally:
        weights.close()
    return [server.error for server in servers]


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
            # For a loopback address, listen on it; otherwise on all interfaces, as the address may be that of a
            # gateway.
            self.listen = self._sender if _is_loopback(self._sender) else "", sender.port or 0

    def _request(self, path: str, body: dict[str, Any] | None = None, retries: int | None = 0) -> Awaitable[Any]:
        # By default, do not retry: after a lost response, it is unknown what the server has done.
        return self.engine.http.request("POST", self._root + path, body, retries=retries)

    async def check(self, policy: Policy) -> None:
        """Raise EngineError if the server cannot load these weights."""
        if self.engine.tokens != "exact":
            raise EngineError(f"{self.engine.base_url}: updating the weights requires tokens='exact'")
        try:
            answer = await self._request("/collective_rpc", {"method": "agentfly_describe"}, retries=None)
        except Refused as error:
            raise self._not_prepared(error) from error
        found = answer["results"][0]
        if found["backend"] != TRANSFER_CONFIG["backend"]:
            raise self._not_prepared(f"its backend for new weights is {found['backend']}")
        check_architecture(f"the server at {self.engine.base_url}", found, policy)
        self.engine.dtype, self.engine.vocab_size = found["dtype"], found["vocab_size"]
        if self.transport == "http" and not self._sender:
            self._sender = await asyncio.to_thread(_interface, self._host, self._port)
            self.listen = self._sender, 0

    def _not_prepared(self, reason: object) -> EngineError:
        return EngineError(
            f"the weights of this server cannot be changed ({reason}); start it with VLLM_SERVER_DEV_MODE=1 "
            f"{SERVE_COMMAND} --worker-extension-cls agentfly_kit.engines.vllm.worker.WorkerExtension "
            f"--weight-transfer-config '{json.dumps(TRANSFER_CONFIG)}'"
        )

    async def update(self, weights: WeightFile, path: str, ports: dict[tuple[str, int], int]) -> None:
        """Pause the server, replace its weights and resume it.

        Args:
            weights: The weights.
            path: Path of the URL at which this process serves the weights.
            ports: Port of each address on which this process listens.
        """
        address = weights.path.as_uri()
        way = "the server must run on this machine as this user; use weights='http'"
        if self.transport == "http":
            address = f"http://{self._sender}:{ports[self.listen]}{path}"
            way = (
                "the server must be able to connect to this process; set weights='http://<address>:<port>', an "
                "address of this machine that the server can reach"
            )
        try:
            await self._request("/pause?mode=keep&clear_cache=false", retries=None)
            try:
                await self._request("/init_weight_transfer_engine", {"init_info": {"address": address}})
            except EngineError as error:
                raise EngineError(
                    f"the server at {self.engine.base_url} cannot read the weights ({error}); {way}"
                ) from error
            await self._replace(weights)
        except BaseException:
            # A paused server would block its other clients.
            with contextlib.suppress(EngineError):  # the first error is reported
                await self._resume(retries=0)
            raise
        await self._resume(retries=None)

    async def _resume(self, retries: int | None) -> None:
        """Resume the server. A cancellation takes effect afterwards."""
        resuming = asyncio.ensure_future(self._request("/resume", retries=retries))
        await wait_all([resuming])
        await resuming

    async def _replace(self, weights: WeightFile) -> None:
        label = f"{weights.version}-{secrets.token_hex(4)}"
        try:
            try:
                await self._request("/start_weight_update")
            except EngineError:  # the sender of the previous weights was killed before it had finished
                await self._request("/finish_weight_update")
                await self._request("/start_weight_update")
            await self._request("/update_weights", {"update_info": {"tensors": weights.tensors}})
            await self._request("/finish_weight_update")
            await self._request("/reset_prefix_cache?reset_running_requests=true")
            await self._request("/reset_encoder_cache")  # features of images
            try:
                await self._request("/update_weight_version", {"new_version": label})
            except Refused:  # older versions of vLLM have no labels
                label = ""
        except BaseException as error:
            self.engine._update_failure = str(error) or "it was interrupted"
            self.engine._failed_updates += 1
            with contextlib.suppress(EngineError):  # the first error is reported
                await self._request("/finish_weight_update")
            raise
        engine = self.engine
        engine._label, engine._version = label, weights.version
        engine._update_failure = ""
        engine._verified = engine.http.disconnections


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
