"""Run command-line agents that reach the policy through a port on the loopback interface of their sandbox.

The sandbox's zygote process opens the port. A local zygote passes the listening socket to this process. A socket stays
in the network namespace in which it was created, so this process accepts connections made inside the sandbox.
Connections in a container are tunnelled through the container's standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import IsolationError, SandboxError, SettingsError
from .call import CONTROL_SECONDS
from .host.container import ContainerProcess

if TYPE_CHECKING:
    from .host.stream import Stream
    from .shell import ShellResult, ShellSandbox

Accept = Callable[[socket.socket], object]


class Reachable(Protocol):
    """The part of `af.Endpoint` that sandboxes use."""

    def for_sandbox(self) -> Any: ...


async def run_agent(
    sandbox: ShellSandbox,
    command: Sequence[str],
    endpoint: Reachable,
    timeout: float,
) -> ShellResult:
    """Run an agent in a sandbox, as described in `ShellSandbox.run_agent`."""
    if isinstance(command, str) or not command:
        raise SettingsError(f"command must be a list such as ['mini', '--task', question], got {command!r}")
    async with endpoint.for_sandbox() as server, _port(sandbox, server.accept) as port:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in server.env(port).items())
        return await sandbox.run(f"{variables} {shlex.join(command)}", timeout)


@asynccontextmanager
async def _port(sandbox: ShellSandbox, accept: Accept) -> AsyncIterator[int]:
    """Open a port on the sandbox's loopback interface, and pass every connection to `accept`."""
    async with AsyncExitStack() as stack:
        async with sandbox._exclusive():
            if sandbox.isolation == "landlock":
                raise IsolationError(
                    "isolation must be 'strict' or an af.Container to run an agent, got 'landlock', which allows no "
                    "sockets; af.sandbox_report() says how to make 'strict' available"
                )
            handle = sandbox._handle
            if isinstance(handle, ContainerProcess) and handle.stream is not None:
                opened = _tunnelled(sandbox, handle.stream, accept)
            else:
                opened = _passed(sandbox, accept)
            port = await stack.enter_async_context(opened)
        yield port


@asynccontextmanager
async def _passed(sandbox: ShellSandbox, accept: Accept) -> AsyncIterator[int]:
    channel, inside = socket.socketpair()
    with channel, inside:
        port = await _listen(sandbox, inside.fileno())
        channel.setblocking(False)
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=descriptors[0]) as listener:
        listener.setblocking(False)

        def ready() -> None:
            with contextlib.suppress(OSError):  # the process inside has already closed its connection
                accept(listener.accept()[0])

        loop.add_reader(listener, ready)
        try:
            yield port
        finally:
            loop.remove_reader(listener)


@asynccontextmanager
async def _tunnelled(sandbox: ShellSandbox, stream: Stream, accept: Accept) -> AsyncIterator[int]:
    if stream.accept is not None:
        raise SandboxError("another agent is already running in this container")
    loop = asyncio.get_running_loop()
    stream.accept = lambda connection: loop.call_soon_threadsafe(accept, connection)
    try:
        yield await _listen(sandbox)
    finally:
        stream.accept = None
        sandbox._command("unlisten")


async def _listen(sandbox: ShellSandbox, *descriptors: int) -> int:
    serial = next(sandbox._questions)
    sandbox._command("listen", descriptors, serial=serial)
    answer = await sandbox._expect("listen", serial, CONTROL_SECONDS)
    if answer["error"]:
        raise SandboxError(f"the sandbox could not open a port for its agent: {answer['error']}")
    return int(answer["port"])
