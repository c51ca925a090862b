"""HTTP server for a pool: `async with serve_pool(pool) as server: print(server.url, server.token)`.

Requests can be retried safely: each request for a lease or a call carries an id chosen by the client, and a repeated id
returns the result of the first request. A client that stops sending heartbeats loses its leases. The pool belongs to
the caller: closing the server ends all leases but keeps the sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import secrets
import ssl
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar

import pydantic

from ...errors import LeaseRevoked, RemotePoolError, SandboxError, SettingsError
from ...pool.base import Lease
from ...pool.calls import call as call_method
from ...pool.pool import Pool
from ...pool.records import PoolEvent
from . import wire

_log = logging.getLogger(__name__)
_KEPT_CALLS = 32  # results kept per lease in case the client retries
_KEPT_REQUESTS = 256
_KEPT_EVENTS = 5000
_LONGEST_WAIT = 30.0  # maximum time in seconds for which a request is held open
_NOT_REMOTE = frozenset({"start", "close", "kill", "validate_remote_options"})  # clients may not call these


# --- requests ------------------------------------------------------------------------------------

Name = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=80)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=1e6, allow_inf_nan=False)]


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=False)
    client: Name


class _Acquire(_Message):
    request: Name
    owner: Annotated[str, pydantic.StringConstraints(max_length=1000)] = "unnamed"
    timeout: Seconds | None = None
    run: Annotated[str, pydantic.StringConstraints(max_length=1000)] = ""
    queue: bool = True
    wait: Seconds = 0.0


class _Abandon(_Message):
    request: Name


class _Release(_Message):
    lease: Name
    reusable: bool = True


class _Call(_Message):
    request: Name
    lease: Name
    method: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    turn: Any = None
    wait: Seconds = 0.0


class _Beat(_Message):
    # Current turn of the chain that holds each lease, by lease id.
    leases: dict[Name, Any] = {}
    # Ids of pending acquire requests.
    requests: list[Name] = []
    # Sequence number of the last event received; None if the client has no listeners.
    after: Annotated[int, pydantic.Field(ge=0)] | None = None
    wait: Seconds = 0.0


M = TypeVar("M", bound=_Message)
V = TypeVar("V")


class _HTTPError(Exception):
    def __init__(self, status: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


# --- client state --------------------------------------------------------------------------------


class _Recent(OrderedDict[str, V]):
    """A dictionary that keeps only the most recent entries."""

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > _KEPT_REQUESTS:
            self.popitem(last=False)


@dataclass
class _HeldLease:
    lease: Lease[Any]
    since: float
    calls: OrderedDict[str, asyncio.Task[Any]] = field(default_factory=OrderedDict)


@dataclass
class _Request:
    task: asyncio.Task[str]
    asked_at: float


@dataclass
class _Client:
    last_seen: float
    leases: dict[str, _HeldLease] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)
    given_up: _Recent[None] = field(default_factory=_Recent)
    releasing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    # Leases revoked by the pool, kept so that the client can be notified.
    ended: _Recent[_HeldLease] = field(default_factory=_Recent)


class PoolServer:
    """Serve a pool's sandboxes over HTTP to `RemotePool(server.url, token=server.token)`.

    Use `server = await serve_pool(pool)` and later `await server.close()`, or `async with serve_pool(pool) as server`.
    The pool remains usable locally; close it after the server. Requests are handled by the event loop that started the
    server and are delayed while a notebook cell of the same process runs, so serve from a separate process.

    A client may call every public method of the sandbox class. If arguments can refer to files or other resources of
    this machine, the sandbox class checks them in a class method `validate_remote_options(method, args, kwargs)`, which
    raises for values that are not allowed; FileSandbox and Grader define it.

    Args:
        pool: The pool to serve.
        host: The address to listen on. Any address other than loopback requires both `token` and `tls`.
        port: The port to listen on; 0 selects a free port.
        token: The secret that clients must present. None generates a token, available as `server.token`; a server
            always requires a token.
        tls: Paths of the certificate chain and its private key.
        heartbeat: Seconds without a message after which a client loses its leases; their sandboxes are reset.
        max_body: Maximum size of a request in bytes, including uploaded code and files.

    Raises:  SettingsError for an address that is not loopback without `token` and `tls`, or an invalid setting.
    """

    def __init__(
        self,
        pool: Pool[Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: tuple[str, str] | None = None,
        heartbeat: float = 15.0,
        max_body: int = 16 * 2**20,
    ) -> None:
        if not _is_loopback(host) and (token is None or tls is None):
            raise SettingsError(
                f"token and tls=(certificate file, key file) must be given for host={host!r}, because anyone "
                "who can connect can run code in the sandboxes. Or serve on 127.0.0.1 and forward the port (ssh -L)"
            )
        if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable()):
            raise SettingsError("token must be at least 16 printable characters, such as secrets.token_urlsafe()")
        if not 0.1 <= heartbeat <= 3600:
            raise SettingsError(f"heartbeat must be between 0.1 and 3600 seconds, got {heartbeat!r}")
        if max_body < 1:
            raise SettingsError(f"max_body must be at least 1, got {max_body}")
        self.pool = pool
        self.host = host
        # The requested port; once the server is running, the actual port.
        self.port = port
        self.token = token or secrets.token_urlsafe(24)
        self.heartbeat = heartbeat
        self.max_body = max_body
        self._tls = tls
        self._clients: dict[str, _Client] = {}
        self._runner: Any = None
        self._work: set[asyncio.Task[Any]] = set()
        self._events: deque[PoolEvent] = deque(maxlen=_KEPT_EVENTS)
        self._new_events: asyncio.Event = asyncio.Event()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._closing = False
        self._ended = asyncio.Event()
        self._name = secrets.token_hex(8)  # lets clients detect a restart at the same address

    # --- lifecycle

    @property
    def url(self) -> str:
        """The server's address, for `RemotePool`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    @property
    def clients(self) -> dict[str, int]:
        """Number of leases held by each client."""
        return {name: len(client.leases) for name, client in self._clients.items()}

    async def start(self) -> Self:
        """Start listening. Does nothing if the server is already running.

        Raises:  SettingsError if aiohttp is missing; OSError if the TLS files are unusable or the address is not
                 available; RemotePoolError if the server was closed.
        """
        if self._runner is not None:
            return self
        if self._closing:
            raise RemotePoolError("this server is closed; create a new one with serve_pool")
        try:
            from aiohttp import web
        except ImportError as error:
            raise SettingsError(f'serve_pool needs aiohttp ({error}): pip install "agentfly_kit[remote]"') from error
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._tls)
        application = web.Application(client_max_size=self.max_body)
        for name, message_type, answer in (
            ("pool", _Message, self._describe), ("acquire", _Acquire, self._acquire),
            ("abandon", _Abandon, self._abandon), ("call", _Call, self._call), ("release", _Release, self._release),
            ("beat", _Beat, self._beat), ("bye", _Message, self._bye),
        ):  # fmt: skip
            application.router.add_post(f"{wire.PATH}/{name}", self._handler(message_type, answer))
        from agentfly_kit.endpoint.server import http_logger

        runner = web.AppRunner(
            application, access_log=None, logger=http_logger(), handle_signals=False, shutdown_timeout=0.5
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port, ssl_context=context)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = runner.addresses[0][1]
        loop = asyncio.get_running_loop()

        def record(event: PoolEvent) -> None:
            self._events.append(event)
            with contextlib.suppress(RuntimeError):  # the server's loop is closed
                loop.call_soon_threadsafe(self._wake)

        self._unsubscribe = self.pool.subscribe(record)
        self._spawn(self._reap())
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every lease, return the sandboxes to the pool, and stop listening."""
        self._closing = True
        self._unsubscribe()
        self._wake()
        runner, self._runner = self._runner, None
        for name in list(self._clients):
            await self._end(name)
        for task in list(self._work):
            task.cancel()
        if self._work:
            await asyncio.wait(self._work)
        if runner is not None:
            await runner.cleanup()
        self._ended.set()

    async def forever(self) -> None:
        """Serve until `close` is called or this coroutine is cancelled. Intended for processes that do nothing else."""
        await self.start()
        try:
            await self._ended.wait()
        finally:
            await self.close()

    def __repr__(self) -> str:
        if self._runner is None:
            return f"<PoolServer {'closed' if self._closing else 'not started'}, {self.pool!r}>"
        count = len(self._clients)
        return f"<PoolServer {self.url}, {count} client{'' if count == 1 else 's'}, {self.pool!r}>"

    # --- request handling

    def _handler(
        self, message_type: type[M], answer: Callable[..., Awaitable[dict[str, Any]]]
    ) -> Callable[[Any], Awaitable[Any]]:
        from aiohttp import web

        async def handle(request: Any) -> Any:
            try:
                self._check(request.headers.get("Authorization", ""))
                message = await self._read(request, message_type)
                reply = await answer(message, self._client(message.client))
                if message_type is not _Call:  # too frequent to send a snapshot with each
                    reply["snapshot"] = self._snapshot()
                return web.json_response(reply, status=202 if reply.get("state") == "waiting" else 200)
            except _HTTPError as refused:
                return web.json_response({"error": wire.encode_exception(refused.error)}, status=refused.status)
            except (web.HTTPException, ConnectionError):  # a body over the limit, or a client that disconnected
                raise
            except Exception as error:
                _log.exception("a request to a pool's server failed")
                return web.json_response(
                    {"error": wire.encode_exception(SandboxError(f"the server failed: {error!r}"))}, status=500
                )

        return handle

    def _check(self, header: str) -> None:
        scheme, _, token = header.partition(" ")
        # Compare the token first and in constant time, so that timing reveals nothing about the token.
        same = hmac.compare_digest(token.strip().encode(), self.token.encode())
        if not same or scheme.lower() != "bearer":
            raise _HTTPError(401, RemotePoolError("the token is wrong or missing"))
        if self._closing:
            raise _HTTPError(503, RemotePoolError("the server is closing"))

    async def _read(self, request: Any, message_type: type[M]) -> M:
        raw = await request.read()
        try:
            return message_type.model_validate(json.loads(raw))
        except (ValueError, RecursionError) as error:
            text = (
                "; ".join(str(e["msg"]) for e in error.errors())
                if isinstance(error, pydantic.ValidationError)
                else error
            )
            raise _HTTPError(400, SettingsError(f"the request is invalid: {text}")) from None

    def _client(self, name: str) -> _Client:
        now = asyncio.get_running_loop().time()
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(now)
        client.last_seen = now
        self._collect_revoked(client)
        return client

    @staticmethod
    def _collect_revoked(client: _Client) -> None:
        """Move revoked leases to `client.ended` and cancel their calls."""
        for name, held in list(client.leases.items()):
            if held.lease.revoked:
                client.ended[name] = client.leases.pop(name)
                for call in held.calls.values():
                    call.cancel()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _wake(self) -> None:
        news, self._new_events = self._new_events, asyncio.Event()
        news.set()

    # --- responses

    async def _describe(self, message: _Message, client: _Client) -> dict[str, Any]:
        sandbox_type = self.pool.sandbox_type
        methods = [
            n
            for n in dir(sandbox_type)
            if not n.startswith("_") and callable(getattr(sandbox_type, n, None)) and n not in _NOT_REMOTE
        ]
        return {
            "version": wire.VERSION, "server": self._name, "sandbox_type": sandbox_type.__name__,
            "methods": methods,
            "is": [f"{each.__module__}:{each.__qualname__}" for each in sandbox_type.__mro__[:-1]],
            "heartbeat": self.heartbeat
        }  # fmt: skip

    def _snapshot(self) -> Any:
        snapshot = self.pool.snapshot()
        boxes = tuple(dataclasses.replace(box, turn=wire.turn(box.turn)) for box in snapshot.sandboxes)
        return wire.encode(dataclasses.replace(snapshot, sandboxes=boxes))

    async def _acquire(self, message: _Acquire, client: _Client) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        request = client.requests.get(message.request)
        if request is None:
            if message.request in client.given_up:
                raise _HTTPError(409, RemotePoolError("this request was cancelled"))
            task = self._spawn(self._lease(client, message))
            request = client.requests[message.request] = _Request(task, now)
        request.asked_at = now
        if not await _done(request.task, message.wait):
            return {"state": "waiting"}
        lease = _result(request.task)
        held = client.leases.get(lease)
        if held is None:
            raise _HTTPError(404, _lease_is_over(lease))
        return {
            "state": "leased", "lease": lease, "sandbox": held.lease.id,
            "isolation": getattr(held.lease.sandbox, "isolation", None)
        }  # fmt: skip

    async def _lease(self, client: _Client, message: _Acquire) -> str:
        timeout = self.pool.acquire_timeout if message.timeout is None else message.timeout
        run = (
            f"{message.client} {message.run}" if message.run else ""
        )  # runs of different clients are distinct even if they have the same name
        lease = await self.pool.acquire(message.owner, timeout, run=run, queue=message.queue)
        name = secrets.token_hex(16)
        client.leases[name] = _HeldLease(lease, asyncio.get_running_loop().time())
        return name

    async def _abandon(self, message: _Abandon, client: _Client) -> dict[str, Any]:
        self._give_up(client, message.request)
        for held in client.leases.values():
            call = held.calls.get(message.request)
            if call is not None:
                call.cancel()
        return {}

    def _give_up(self, client: _Client, name: str) -> None:
        client.given_up[name] = None  # the request itself may still be in transit
        request = client.requests.pop(name, None)
        if request is None:
            return
        if not request.task.done():
            request.task.cancel()
        elif not request.task.cancelled() and request.task.exception() is None:
            self._return(client, request.task.result(), True)

    async def _call(self, message: _Call, client: _Client) -> dict[str, Any]:
        held = client.leases.get(message.lease)
        if held is None:
            raise self._lease_over_error(client, message.lease)
        if message.turn is not None:
            held.lease.turn = wire.turn(message.turn)
        # A repeated request gets the result of the call that the first one started.
        call = held.calls.get(message.request)
        if call is None:
            method = message.method
            known = callable(getattr(type(held.lease.sandbox), method, None))
            if method.startswith("_") or method in _NOT_REMOTE or not known:
                raise _HTTPError(400, SandboxError(f"a {self.pool.name} has no method {method}() for remote calls"))
            if sum(not each.done() for each in held.calls.values()) >= _KEPT_CALLS:
                raise _HTTPError(429, RemotePoolError(f"{_KEPT_CALLS} calls of this lease are already running"))
            module = self.pool.sandbox_type.__module__
            try:
                args = wire.decode(message.args, module, lambda name: self._sibling(client, name))
                kwargs = wire.decode(message.kwargs, module, lambda name: self._sibling(client, name))
            except (ValueError, RecursionError) as error:
                raise _HTTPError(400, SandboxError(f"{method}(): {error}")) from None
            check = getattr(self.pool.sandbox_type, "validate_remote_options", None)
            if check is not None:
                try:
                    check(method, args, kwargs)
                except Exception as error:
                    raise _HTTPError(409, error) from None
            call = held.calls[message.request] = self._spawn(_perform(held.lease, method, args, kwargs))
            # Forget the oldest results. Calls that still run are kept.
            while len(held.calls) > _KEPT_CALLS:
                oldest = next((name for name, each in held.calls.items() if each.done()), None)
                if oldest is None:
                    break
                del held.calls[oldest]
        done = await _done(call, message.wait)
        client.last_seen = asyncio.get_running_loop().time()
        if not done:
            return {"state": "waiting"}
        # The result of a sandbox that was closed meanwhile is not reliable.
        self._collect_revoked(client)
        if message.lease in client.ended:
            raise self._lease_over_error(client, message.lease)
        return {"state": "done", "value": _result(call)}

    @staticmethod
    def _lease_over_error(client: _Client, name: str) -> _HTTPError:
        held = client.ended.get(name)
        if held is None:
            return _HTTPError(404, _lease_is_over(name))
        return _HTTPError(409, LeaseRevoked(f"the pool revoked the {held.lease.pool.name}: {held.lease.revoked}"))

    def _sibling(self, client: _Client, name: str) -> Any:
        """Return the client's sandbox with a given lease id, for calls that take a sandbox, such as `fork`."""
        if name not in client.leases:
            raise ValueError("an argument is a sandbox whose lease has ended")
        return client.leases[name].lease.sandbox

    async def _release(self, message: _Release, client: _Client) -> dict[str, Any]:
        self._return(client, message.lease, message.reusable)
        task = client.releasing.get(message.lease)
        if task is not None:
            await asyncio.wait([task])
        return {}

    def _return(self, client: _Client, name: str, reusable: bool) -> None:
        held = client.leases.pop(name, None)
        if held is None:
            return
        task = self._spawn(_give_back(self.pool, held, reusable))
        client.releasing[name] = task
        task.add_done_callback(lambda _: client.releasing.pop(name, None))

    @staticmethod
    def _revoked(client: _Client) -> dict[str, str]:
        return {name: held.lease.revoked for name, held in client.ended.items()}

    async def _beat(self, message: _Beat, client: _Client) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        for name, turn in message.leases.items():
            held = client.leases.get(name)
            if held is not None and turn is not None and held.lease.turn != wire.turn(turn):
                held.lease.turn = wire.turn(turn)
        # If the response to a request was lost, the client does not know that it holds the lease. Release the lease.
        for name, held in list(client.leases.items()):
            if name not in message.leases and now - held.since > self.heartbeat:
                self._return(client, name, True)
        for name, request in list(client.requests.items()):
            if name not in message.requests and now - request.asked_at > self.heartbeat:
                if request.task.done():
                    del client.requests[name]
                else:
                    self._give_up(client, name)
        events: list[PoolEvent] = []
        if message.after is not None:
            after = message.after
            if message.wait and not any(event.sequence > after for event in self._events):
                news = self._new_events
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(message.wait, _LONGEST_WAIT, self.heartbeat / 2)):
                        await news.wait()
            events = [event for event in list(self._events) if event.sequence > after]
        return {
            "server": self._name, "leases": list(client.leases), "revoked": self._revoked(client),
            "events": wire.encode(events),
            "sequence": self.pool._state.sequence
        }  # fmt: skip

    async def _bye(self, message: _Message, client: _Client) -> dict[str, Any]:
        await self._end(message.client)
        return {}

    # --- ending clients

    async def _end(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is None:
            return
        pending = [request.task for request in client.requests.values() if not request.task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        client.ended.clear()
        for lease in list(client.leases):
            self._return(client, lease, True)
        if client.releasing:
            await asyncio.wait(list(client.releasing.values()))

    async def _reap(self) -> None:
        """End the leases of clients whose heartbeats have stopped."""
        loop = asyncio.get_running_loop()
        pause = self.heartbeat / 5
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            late = loop.time() - began - pause
            if late > pause:
                # This loop was blocked, for example by a notebook cell, and read no heartbeats. Extend all deadlines.
                for client in self._clients.values():
                    client.last_seen += late
                continue
            for name, client in list(self._clients.items()):
                self._collect_revoked(client)
                if loop.time() - client.last_seen > self.heartbeat:
                    _log.warning("no heartbeat from client %s; its %d leases end", name, len(client.leases))
                    await self._end(name)


async def _done(task: asyncio.Task[Any], seconds: float) -> bool:
    await asyncio.wait([task], timeout=min(seconds, _LONGEST_WAIT))
    return task.done()


def _result(task: asyncio.Task[Any]) -> Any:
    if task.cancelled():
        raise _HTTPError(409, RemotePoolError("the request was cancelled, or its lease ended"))
    error = task.exception()
    if error is not None:
        raise _HTTPError(409, error)
    return task.result()


async def _perform(lease: Lease[Any], method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return wire.encode(await call_method(lease.worker, getattr(lease.sandbox, method), *args, **kwargs))


async def _give_back(pool: Pool[Any], held: _HeldLease, reusable: bool) -> None:
    running = [call for call in held.calls.values() if not call.done()]
    for call in running:
        call.cancel()
    if running:
        held.lease.worker.discard()
        await asyncio.wait(running)
    for call in held.calls.values():
        if not call.cancelled():
            call.exception()  # mark as retrieved, though the client may not have fetched it
    await pool.release(held.lease, reusable=reusable)


def _lease_is_over(lease: str) -> RemotePoolError:
    return RemotePoolError(f"the lease {lease[:8]} has ended: it was released, or its client sent no heartbeat")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


serve_pool = PoolServer
