"""HTTP server shared by the endpoints of one event loop, which listens only on the loopback interface."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from agentfly_kit.endpoint.reply import RequestError
from agentfly_kit.errors import SettingsError

_MAX_BODY = 32 * 1024**2  # bytes
# Prefix of all keys of chains. A client may also send a framework's own key, which does not have this prefix.
KEY_PREFIX = "afk-"
_HOSTS = ("127.0.0.1", "localhost")
# Async function of (method, path, body) that returns an `Answer`.
Handler = Callable[[str, str, bytes], Awaitable[Any]]

_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Server] = weakref.WeakKeyDictionary()


def http_logger() -> logging.Logger:
    """Return a logger for aiohttp servers that ignores malformed requests, which are answered with status 400.

    By default, aiohttp logs a traceback for each such request, which would appear in the running cell of a notebook.
    """
    from aiohttp.http_exceptions import HttpProcessingError

    logger = logging.getLogger("agentfly_kit.http")
    if not logger.filters:
        logger.addFilter(lambda r: not (r.exc_info and isinstance(r.exc_info[1], HttpProcessingError)))
    return logger


def import_web() -> Any:
    """Return the module `aiohttp.web`. Raises SettingsError if aiohttp is not installed."""
    try:
        return importlib.import_module("aiohttp.web")
    except ImportError:
        raise SettingsError(
            "an endpoint over HTTP requires the package aiohttp: pip install 'agentfly_kit[agents]'; "
            "endpoint.client and endpoint.chat(messages) need no server"
        ) from None


class Server:
    """HTTP server that passes each request to the handler registered for its key. Every chain has its own key."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._web = import_web()
        self._loop = loop
        self._handlers: dict[str, Handler] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._runner: Any = None
        # The socket accepts connections from now on. Requests are answered once `_start` has finished.
        self._started = asyncio.run_coroutine_threadsafe(self._start(), loop)

    @classmethod
    def of_loop(cls, loop: asyncio.AbstractEventLoop) -> Server:
        """Return the server of an event loop, starting it if necessary. May be called from any thread."""
        server = _servers.get(loop)
        if server is None:
            server = _servers[loop] = cls(loop)
        return server

    async def _start(self) -> None:
        await self._set_up()
        await self._web.SockSite(self._runner, self._socket).start()

    async def _set_up(self, **options: Any) -> None:
        app = self._web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = self._web.AppRunner(
            app, access_log=None, logger=http_logger(), shutdown_timeout=1.0, lingering_time=1.0, **options
        )
        await self._runner.setup()

    def add(self, key: str, handler: Handler) -> None:
        self._handlers[key] = handler

    async def remove(self, key: str) -> None:
        """Remove the handler for a key. The server is stopped when no handlers remain."""
        self._handlers.pop(key, None)
        if self._handlers:
            return
        if _servers.get(self._loop) is self:
            del _servers[self._loop]
        await asyncio.wait([asyncio.wrap_future(self._started)])
        await self._runner.cleanup()
        self._socket.close()

    async def _handle(self, request: Any) -> Any:
        try:
            answer = await self._answer(request)
            return self._web.Response(status=answer.status, body=answer.body, content_type=answer.content_type)
        except RequestError as error:
            return self._web.json_response(error.body, status=error.status)

    async def _answer(self, request: Any) -> Any:
        key, _, path = request.match_info["path"].partition("/")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = [key, bearer, request.headers.get("x-api-key", "")]  # x-api-key is used by Anthropic's clients
        keys = {each for each in given if each.startswith(KEY_PREFIX)}
        if len(keys) > 1:
            text = "the URL and the headers must have the key of the same chain, got two keys"
            raise RequestError(text, status=401, code="two_keys")
        if not key.startswith(KEY_PREFIX):  # a client that accepts only a host sends the key only in a header
            path = request.match_info["path"]
        handler = self._handlers.get("".join(keys))
        if handler is None:
            text = "unknown key: its chain has ended, or never began"
            raise RequestError(text, status=404, code="unknown_key")
        if request.host.partition(":")[0].lower() not in _HOSTS:
            # The request may come from a web page whose domain name resolves to 127.0.0.1.
            text = f"the request must be for the host 127.0.0.1 or localhost, got {request.host[:200]!r}"
            raise RequestError(text, status=403, code="foreign_host")
        try:
            body = await request.read()
        except self._web.HTTPRequestEntityTooLarge as error:
            raise RequestError(f"the body is too large: {error.text}", status=413, code="too_large") from None
        return await handler(request.method, f"/{path}", body)
