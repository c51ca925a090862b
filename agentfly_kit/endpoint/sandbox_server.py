"""HTTP server for the processes of one sandbox, which answers the requests of one chain only."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from agentfly_kit._async.pending_call import wait_all
from agentfly_kit.endpoint.server import Server, import_web

if TYPE_CHECKING:
    from agentfly_kit.endpoint.endpoint import Endpoint

_MOST_CONNECTIONS = 64


class SandboxServer(Server):
    """Server without a port of its own. `accept` receives each connection made by a process in the sandbox.

    The data that the processes send is untrusted. New connections are closed at once while `_MOST_CONNECTIONS` are
    open, and one request at a time is read and answered, so that a sandbox can use up neither the file descriptors nor
    the memory of this process.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._handlers = {endpoint.api_key: endpoint.handle}
        self._runner: Any = None
        self._reading = asyncio.Lock()
        self._pending: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def __aenter__(self) -> SandboxServer:
        # Use a thread, because the first import would block the event loop for too long.
        self._web = await asyncio.to_thread(import_web)
        await self._set_up(handler_cancellation=True)  # a request must not outlive its command
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        for connection in self._runner.server.connections:
            connection.force_close()  # at once, because this task may be cancelled again
        for task in self._pending:
            task.cancel()
        try:
            await wait_all(tuple(self._pending))
        finally:
            await self._runner.cleanup()

    def env(self, port: int) -> dict[str, str]:
        """Return the environment variables for an agent that reaches this server at a port of its loopback
        interface."""
        return self._endpoint.variables(f"http://127.0.0.1:{port}/{self._endpoint.api_key}/v1")

    def accept(self, connection: socket.socket) -> None:
        """Serve the requests of a connection. Must be called in the event loop."""
        open_now = 0 if self._closed else len(self._runner.server.connections) + len(self._pending)
        if self._closed or open_now >= _MOST_CONNECTIONS:
            connection.close()
            return
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._runner.server, connection))
        self._pending.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._pending.discard(task)
            if task.cancelled() or task.exception() is not None:
                connection.close()

        task.add_done_callback(done)

    async def _answer(self, request: Any) -> Any:
        async with self._reading:
            return await super()._answer(request)
