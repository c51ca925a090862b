"""Client for a pool served by server.py, with the interface of a local pool.

All network traffic goes through one background thread with its own event loop. The pool can therefore be used from
several notebook event loops in turn, and its heartbeats continue while a notebook cell runs. An unanswered request is
retried with the same request id, so that no sandbox is leased twice and no code runs twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import secrets
import ssl
import threading
import time
import urllib.parse
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import httpx2

from agentfly_kit._display import Displayable

from ..._async.interrupts import keep_interruptible
from ..._async.listeners import Listeners
from ..._async.threads import Worker
from ...errors import LeaseRevoked, PoolClosed, RemotePoolError, SettingsError
from ...pool.base import BasePool, Lease
from ...pool.records import PoolEvent, PoolSnapshot
from ...sandboxes.python import PythonSandbox
from . import wire

S = TypeVar("S")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_LONG_POLL_SECONDS = 10.0  # maximum time the server may hold a request open before the client repeats it
_CONNECT_SECONDS = 2.0  # maximum time `snapshot()` waits for the first connection


class RemoteSandbox:
    """A sandbox of a remote pool. All public methods of the server's sandbox class can be called, as coroutines."""

    def __init__(
        self, link: _Link, lease: str, sandbox_type: str, methods: frozenset[str], isolation: str | None
    ) -> None:
        self._link, self._lease, self._sandbox_type, self._methods = link, lease, sandbox_type, methods
        self.isolation = isolation

    @property
    def alive(self) -> bool:
        """True while this client holds the sandbox, according to the server's last reply."""
        return self._lease in self._link.held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(
                f"a remote {self._sandbox_type} has no {name}, only {', '.join(sorted(self._methods))}"
            )

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._link.run_and_wait(self._link.call(self._lease, name, args, kwargs))

        call.__name__ = name
        return call

    def __repr__(self) -> str:
        return f"<remote {self._sandbox_type} at {self._link.url}{'' if self.alive else ', ended'}>"


class RemotePool(Displayable, BasePool[S]):
    """A pool served by `serve_pool`, usable in place of a Pool: `Agent(pools=[RemotePool(url, token=token)])`.

    The pool connects when its first sandbox is leased. `await pool.close()` releases all leases. If the client process
    dies without closing the pool, its heartbeats stop, and the server reclaims the sandboxes.

    Args:
        sandbox_type: The sandbox class that tools request. The server's pool must hold this class or a subclass of it.
            Leased sandboxes are RemoteSandbox objects with the methods of the server's class.
        acquire_timeout: Seconds to wait for a lease if the caller passes no timeout.
        patience: Seconds for which unanswered requests are retried before RemotePoolError is raised.
        verify: For https, whether to verify the server's certificate, or the path of the certificates to trust.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        sandbox_type: type[S] = PythonSandbox,  # type: ignore[assignment]
        acquire_timeout: float = 120.0,
        patience: float = 10.0,
        verify: bool | str = True,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"url must be an address such as http://127.0.0.1:8123, got {url!r}")
        super().__init__(sandbox_type, acquire_timeout)
        self.url = url.rstrip("/")
        self._link = _Link(self.url, token, sandbox_type, patience, verify, self._listeners)
        self._finalizer = weakref.finalize(self, self._link.stop)
        self._register()

    # --- inspection

    @property
    def closed(self) -> bool:
        """True after `close()`."""
        return self._link.stopped

    @property
    def size(self) -> int:
        """Maximum number of sandboxes in the server's pool; 0 before the first connection."""
        return self._link.snapshot.size

    @property
    def isolation(self) -> str | None:
        """The isolation level of the server's sandboxes; None before the first connection."""
        return self._link.snapshot.isolation

    def snapshot(self) -> PoolSnapshot:
        """Return the last known state of the server's pool, which includes the leases of all clients.

        The snapshot is at most one third of the server's heartbeat interval old.
        """
        if not self._link.connected.is_set() and not self.closed:
            self._link.start()
            self._link.connected.wait(_CONNECT_SECONDS)
        return self._link.snapshot

    async def refresh(self) -> PoolSnapshot:
        """Request the current state of the server's pool and return it.

        Raises:  RemotePoolError if the server does not respond or uses another version of the protocol;
                 SettingsError if its pool does not hold `sandbox_type`.
        """
        await self._link.run_and_wait(self._link.fetch_info())
        return self._link.snapshot

    def subscribe(self, callback: Callable[[PoolEvent], object]) -> Callable[[], None]:
        unsubscribe = super().subscribe(callback)
        self._link.start()
        self._link.wake()
        return unsubscribe

    def __repr__(self) -> str:
        link = self._link
        if link.stopped:
            return f"<RemotePool {self.name} at {self.url}, closed>"
        if not link.connected.is_set():
            return f"<RemotePool {self.name} at {self.url}, not connected>"
        s = link.snapshot
        counts = f"{s.leased} leased, {s.idle} idle, {s.starting} starting, {s.waiting} waiting, size {s.size}"
        return f"<RemotePool {self.name} at {self.url}, {counts}{', no response' if link.failure else ''}>"

    # --- leases

    async def acquire(
        self, owner: str = "unnamed", timeout: float | None = None, *, run: str = "", queue: bool = True
    ) -> Lease[S]:
        """Lease a sandbox until `release` is called; see `Pool.acquire` for the arguments.

        Requests of all clients are served in order of arrival, except that rollouts (see `run`) waiting at the same
        time take turns.

        Raises:  the errors of `Pool.acquire` on the server; RemotePoolError if the server does not respond or rejects
                 this client.
        """
        timeout = self.acquire_timeout if timeout is None else timeout
        link = self._link
        reply: dict[str, Any] = await link.run_and_wait(
            link.acquire(owner, timeout, run, queue), on_unclaimed=link.release_unclaimed
        )
        link.held[reply["lease"]] = None
        sandbox: Any = RemoteSandbox(link, reply["lease"], self.name, link.methods, reply.get("isolation"))
        lease = link.leases[reply["lease"]] = Lease(self, reply["sandbox"], sandbox, owner, Worker())
        return lease

    async def release(self, lease: Lease[S], *, reusable: bool = True) -> None:
        """Return a sandbox to the server, which resets it.

        Idempotent. If the server cannot be reached, a warning is logged, and the server later reclaims the sandbox.
        """
        name = _lease_key(lease)
        if self._begin_release(lease) and self._link.stop_holding(name) and not self.closed:
            # Release the lease even if the caller is cancelled; otherwise it would last until the server reclaims it.
            await self._link.run_and_wait(self._link.release(name, reusable and self._is_reusable(lease)), keep=True)

    def _on_turn_changed(self, lease: Lease[S]) -> None:
        name = _lease_key(lease)
        if name in self._link.held:
            self._link.held[name] = lease.turn  # sent with the next call or heartbeat

    def _on_lease_collected(self, lease: Lease[S]) -> None:
        name = _lease_key(lease)
        if self._link.stop_holding(name):
            self._link.submit(self._link.release(name, True))
            warnings.warn(f"{lease!r} was garbage-collected without a release", ResourceWarning, stacklevel=3)

    async def close(self) -> None:
        """Release all leases and disconnect. Pending `acquire` calls raise PoolClosed."""
        await asyncio.to_thread(self._link.stop)  # also waits for an earlier call that was cancelled

    async def __aenter__(self) -> Self:
        await self.refresh()
        return self


class _Link:
    """Background thread with an event loop and the connection to a server.

    It holds no reference to the pool, so that an unused pool can be garbage-collected.
    """

    def __init__(
        self,
        url: str,
        token: str,
        sandbox_type: type,
        patience: float,
        verify: bool | str,
        listeners: Listeners[PoolEvent],
    ) -> None:
        self.url, self.token, self.patience = url, token, patience
        self.verify = _ssl_context(verify)
        self.name = sandbox_type.__name__
        self.type_name = f"{sandbox_type.__module__}:{sandbox_type.__qualname__}"
        self.module = sandbox_type.__module__
        self.client = secrets.token_hex(16)
        self.held: dict[str, object] = {}  # lease -> turn
        self.leases: weakref.WeakValueDictionary[str, Lease[Any]] = weakref.WeakValueDictionary()
        self.revoked: dict[str, str] = {}  # leases revoked by the server's pool -> reason
        self.waiting: set[str] = set()  # ids of pending requests
        self.listeners = listeners
        self.methods: frozenset[str] = frozenset()
        self.snapshot = PoolSnapshot(
            sandbox_type=self.name, isolation=None, size=0, dead=0, closed=False, time=time.monotonic(),
            waiters=(), sandboxes=(), error=None,
        )  # fmt: skip
        self.connected = threading.Event()
        self.stopped = False
        self.failure = ""
        self.heartbeat = 15.0
        self.server = ""
        self.sequence: int | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx2.AsyncClient | None = None
        self._connecting = asyncio.Lock()  # binds to the background thread's loop on first use
        self._nudge = asyncio.Event()
        self._abandoning: set[asyncio.Task[None]] = set()

    # --- the thread

    def start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self.stopped:
                raise PoolClosed(f"the remote pool at {self.url} is closed; create a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="agentfly-remote", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            with contextlib.suppress(asyncio.CancelledError):
                runner.run(self._main())

    async def _main(self) -> None:
        local = urllib.parse.urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        async with httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self.token}"}, verify=self.verify, trust_env=not local,
            timeout=httpx2.Timeout(_LONG_POLL_SECONDS + 20.0, connect=5.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        ) as self._http:  # fmt: skip
            while not self.stopped:
                await self._beat()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._http.post(f"{self.url}{wire.PATH}/bye", json={"client": self.client}), 3.0)
            # End the requests before the client closes: a connection that is made later would never be closed.
            requests = asyncio.all_tasks() - {asyncio.current_task()}
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    def stop(self) -> None:
        """Disconnect from the server and stop the background thread. May be called from any other thread."""
        with self._lock:
            self.stopped = True
        self.held.clear()
        if self._loop is None or self._thread is None:
            return
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(8.0)

    def wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._nudge.set)

    def submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R] | None:
        """Schedule a coroutine on the background thread. Return its future, or None if the pool is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.start())
        except (PoolClosed, RuntimeError):
            work.close()
            return None

    async def run_and_wait(
        self, work: Coroutine[Any, Any, R], *, keep: bool = False, on_unclaimed: Callable[[R], None] | None = None
    ) -> R:
        """Run a coroutine on the background thread and wait for it in the current event loop.

        Args:
            keep: Let the coroutine finish even if the caller is cancelled.
            on_unclaimed: Called with the result if it arrives after the caller was cancelled.
        """
        future = self.submit(work)
        if future is None:
            raise PoolClosed(f"the remote pool at {self.url} is closed; create a new one")
        waiting = asyncio.wrap_future(future)
        try:
            with keep_interruptible():
                return await (asyncio.shield(waiting) if keep else waiting)
        except RemotePoolError as error:
            if self.stopped:
                raise PoolClosed(f"the remote pool at {self.url} was closed") from error
            raise
        except asyncio.CancelledError:
            if future.cancelled() and self.stopped:
                raise PoolClosed(f"the remote pool at {self.url} was closed") from None
            if on_unclaimed is not None:
                future.add_done_callback(
                    lambda done: None if done.cancelled() or done.exception() else on_unclaimed(done.result())
                )
            raise

    # --- requests

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send a request, retrying until the server responds or `patience` seconds pass. Return the decoded reply.

        Raises:  the error that the server reports; RemotePoolError if the server does not respond in time.
        """
        deadline, pause = time.monotonic() + self.patience, 0.02
        # json.dumps escapes non-ASCII characters, so that lone surrogates can be sent too.
        content = json.dumps({"client": self.client, **body}).encode()
        while True:
            assert self._http is not None
            try:
                response = await self._http.post(
                    f"{self.url}{wire.PATH}/{path}", content=content, headers={"Content-Type": "application/json"}
                )
                is_json = response.headers.get("content-type", "").startswith("application/json")
                reply = response.json() if is_json else None
                break
            except (httpx2.TransportError, ValueError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                if time.monotonic() + pause > deadline:
                    raise RemotePoolError(
                        f"the pool at {self.url} does not respond ({self.failure}; tried for {self.patience:g} s); the "
                        "leases end unless it responds within the heartbeat interval"
                    ) from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
        self.failure = ""
        if response.status_code == 413:
            raise RemotePoolError(f"the request is too large for the pool at {self.url} (see max_body= of serve_pool)")
        if response.is_success and isinstance(reply, dict):
            self._update_snapshot(reply)
            return reply
        error_reply = reply.get("error") if isinstance(reply, dict) else None
        if error_reply is None:
            raise RemotePoolError(
                f"{self.url} is not the server of a pool: it responded with status {response.status_code}"
            )
        raise wire.decode_exception(error_reply)

    def _update_snapshot(self, reply: dict[str, Any]) -> None:
        if reply.get("snapshot") is None:
            return
        seen: PoolSnapshot = wire.decode(reply["snapshot"])
        shift = time.monotonic() - seen.time  # the server has a different monotonic clock
        self.snapshot = dataclasses.replace(
            seen,
            time=seen.time + shift,
            sandboxes=tuple(dataclasses.replace(each, since=each.since + shift) for each in seen.sandboxes),
        )

    async def fetch_info(self) -> None:
        reply = await self.post("pool")
        if reply["version"] != wire.VERSION:
            raise RemotePoolError(f"the protocol version of {self.url} must be {wire.VERSION}, got {reply['version']}")
        if self.type_name not in reply["is"]:
            raise SettingsError(
                f"sandbox_type must be {reply['sandbox_type']}, the class of the pool at {self.url}, got {self.name}"
            )
        self.methods = frozenset(reply["methods"])
        self.heartbeat = float(reply["heartbeat"])
        self.server = reply["server"]
        self.connected.set()
        self.wake()

    async def connect(self) -> None:
        """Fetch the description of the server's pool, unless it has been fetched already."""
        async with self._connecting:
            if not self.connected.is_set():
                await self.fetch_info()

    async def acquire(self, owner: str, timeout: float, run: str, queue: bool) -> dict[str, Any]:
        await self.connect()
        return await self.post_and_poll("acquire", owner=owner[:1000], run=run[:1000], timeout=timeout, queue=queue)

    async def post_and_poll(self, path: str, **body: Any) -> dict[str, Any]:
        """Repeat a request until the server returns a result. If cancelled, cancel the request on the server."""
        request = secrets.token_hex(16)
        self.waiting.add(request)
        try:
            while True:
                wait = min(_LONG_POLL_SECONDS, self.heartbeat / 2)
                reply = await self.post(path, request=request, wait=wait, **body)
                if reply["state"] != "waiting":
                    return reply
        except (asyncio.CancelledError, RemotePoolError):
            task = asyncio.get_running_loop().create_task(self._abandon(request))
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)
            raise
        finally:
            self.waiting.discard(request)

    async def _abandon(self, request: str) -> None:
        """Cancel a request. If this fails, the server cancels it when heartbeats no longer list it."""
        with contextlib.suppress(Exception):
            await self.post("abandon", request=request)

    def stop_holding(self, lease: str) -> bool:
        """Forget a lease. Return False if the lease had already ended."""
        return self.held.pop(lease, self) is not self

    def release_unclaimed(self, reply: dict[str, Any]) -> None:
        self.submit(self.release(reply["lease"], True))

    async def release(self, lease: str, reusable: bool) -> None:
        try:
            await self.post("release", lease=lease, reusable=reusable)
        except RemotePoolError as error:
            _log.warning("a lease was not released: %s", error)  # reclaimed once heartbeats no longer list it

    def _forget_revoked(self, revoked: dict[str, str]) -> None:
        self.revoked.update(revoked)
        for name, reason in revoked.items():
            self.held.pop(name, None)
            if (lease := self.leases.get(name)) is not None:
                lease.revoked, lease.released = reason, True

    async def call(self, lease: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if lease in self.revoked:
            raise LeaseRevoked(f"the pool revoked the {self.name}: {self.revoked[lease]}")
        if lease not in self.held:
            raise RemotePoolError(f"the lease of this sandbox, from the pool at {self.url}, has ended")
        try:
            reply = await self.post_and_poll(
                "call",
                lease=lease,
                method=method,
                turn=wire.turn(self.held.get(lease)),
                args=wire.encode(list(args), _lease_name),
                kwargs=wire.encode(kwargs, _lease_name),
            )
        except LeaseRevoked as error:
            self._forget_revoked({lease: str(error).partition(": ")[2] or str(error)})
            raise
        return wire.decode(reply["value"], self.module)

    # --- heartbeat

    async def _beat(self) -> None:
        """Send a heartbeat with the leases held, process the reply, and sleep until the next heartbeat is due."""
        self._nudge.clear()
        # Time until the next heartbeat. If there are listeners, the server waits that long for an event, then replies.
        rest = self.heartbeat / 4
        try:
            if not self.connected.is_set():
                await self._interruptible(self.connect())
                return
            after = self.sequence if self.listeners else None
            held = dict(self.held)
            reply = await self._interruptible(
                self.post(
                    "beat",
                    leases={name: wire.turn(turn) for name, turn in held.items()},
                    requests=list(self.waiting),
                    after=after,
                    wait=rest if after is not None else 0.0,
                )
            )
            if reply is None:
                return
            self._forget_revoked(reply["revoked"])
            for name in set(held) - set(reply["leases"]):
                self.held.pop(name, None)
            if reply["server"] != self.server:  # the server was restarted and numbers its events from 1 again
                self.sequence = None
                self.connected.clear()
                return
            if self.listeners:
                self._deliver_events(wire.decode(reply["events"]), after, reply["sequence"])
                if after is not None:
                    return  # no sleep: the server has already held this request open
            else:
                self.sequence = None
        except Exception as error:  # the next acquire or call reports the error to its caller
            self.failure = self.failure or str(error)
            rest = min(rest, 0.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                0.0 if self.listeners and self.sequence is not None and not self.failure else rest
            ):
                await self._nudge.wait()

    async def _interruptible(self, work: Coroutine[Any, Any, R]) -> R | None:
        """Run a coroutine and return its result, or None if `wake` is called first."""
        request = asyncio.ensure_future(work)
        nudge = asyncio.ensure_future(self._nudge.wait())
        try:
            await asyncio.wait([request, nudge], return_when=asyncio.FIRST_COMPLETED)
            return request.result() if request.done() else None
        finally:
            for each in (request, nudge):
                each.cancel()
            await asyncio.wait([request, nudge])
            if not request.cancelled():
                request.exception()

    def _deliver_events(self, events: list[PoolEvent], after: int | None, sequence: int) -> None:
        if after is None:  # first heartbeat with listeners: deliver only later events
            self.sequence = sequence
            return
        for event in events:
            self.sequence = event.sequence
            self.listeners.notify(event)


def _ssl_context(verify: bool | str) -> bool | ssl.SSLContext:
    if isinstance(verify, bool):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:  # also raised for a file without a certificate
        raise SettingsError(f"verify must be True, False or a file of certificates, got {verify!r}: {error}") from error


def _lease_key(lease: Lease[Any]) -> str:
    """Return the id that identifies a lease on the server."""
    return str(lease.sandbox._lease)


def _lease_name(value: Any) -> str | None:
    return value._lease if isinstance(value, RemoteSandbox) else None
