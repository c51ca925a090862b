"""Base class of all sandboxes, which starts, calls, resets and closes a confined Python interpreter.

This module runs on the host and communicates with inside/zygote.py and inside/interpreter.py in the sandbox.
Between calls, nothing is bound to an event loop, so successive calls may come from different loops.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Self

from agentfly_kit._display import Displayable

from ..errors import SandboxError, SettingsError, check_count, check_instance, checks_keywords
from .call import CONTROL_SECONDS, ENDED_BY_CODE, GRACE_SECONDS, OUT_OF_MEMORY, Call, JSONLines, Watch, death_message
from .host import container, process
from .host import isolation as levels
from .host.cgroups import LimitHits
from .host.container import Container
from .host.limits import Limits
from .inside.frames import ERR, OUT
from .result import SandboxResult
from .settings import forward_signature

_START_SECONDS = 30.0


class Startable(Displayable, ABC):
    """Base class of async context managers that call `start` on entry and `close` on exit."""

    # A cancelled call does not continue in the background, so a pool can reset the sandbox and use it again.
    ends_cancelled_calls = True

    @classmethod
    def validate_options(cls, **options: Any) -> None:
        """Raise an error for invalid settings. A new pool calls this method before it starts a sandbox."""
        cls(**options)

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


@checks_keywords
@forward_signature(Limits)
class Sandbox(Startable):
    """Base class of sandboxes: a confined Python interpreter to which subclasses make calls.

    `async with` starts and closes the sandbox. The settings are described in PythonSandbox.

    Raises:  SettingsError for an invalid setting.
    """

    # Symbolic links at level "strict", from absolute paths to their targets
    _links: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        isolation: str | Container | None = None,
        packages: bool = True,
        preload: Sequence[str] = (),
        max_output: int = 65536,
        **limits: Any,
    ) -> None:
        if isinstance(preload, str) or preload is None:
            raise SettingsError(f"preload must be a list of module names, got {preload!r}")
        check_count("max_output", max_output, 256)
        check_instance("packages", packages, bool, "True or False")
        if not isinstance(isolation, Container) and isolation not in (None, *levels.LEVELS):
            raise SettingsError(
                f"isolation must be one of {levels.LEVELS}, None, or an af.Container, got {isolation!r}"
            )
        self.limits = Limits(**limits)
        # The level in use; before `start`, the requested level.
        self.isolation: str | None = str(isolation) if isinstance(isolation, Container) else isolation
        self.max_output = max_output
        self._requested_isolation = isolation
        self._preload = tuple(preload)
        self._packages = packages
        self._last: asyncio.Future[None] | None = None  # done when the last call in the queue has ended
        self._closed = False
        # Calls since the start or the last reset; if not 0, the sandbox may contain state
        self._call_count = 0
        self._handle: process.SandboxProcess | None = None
        self._finalizer: weakref.finalize[..., Sandbox] | None = None
        self._control: JSONLines | None = None
        self._replies: JSONLines | None = None
        self._watches: set[Watch] = set()
        self._serial = 0  # number of the current interpreter
        self._questions = itertools.count(1)  # serial numbers of `count` and `sync` requests
        self._nonce = 0  # id of the running call
        self._own_seconds = 0.0  # sum of `Call.own` over all calls
        self._has_interpreter = False  # True while an interpreter is running
        # Result that reports an exit of the interpreter between two calls; the next call returns it
        self._unreported: SandboxResult | None = None
        # Unsent part of a call that was cancelled while it ran
        self._abandoned: bytes | None = None
        self._interrupted = False  # True if an interrupt may not have been delivered yet
        self._limit_hits = LimitHits()

    # --- lifecycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start and set up the sandbox, which takes about 30 ms. Has no effect if it is already running.

        Raises:  IsolationError if the isolation level is unavailable, SandboxError if the process does not start.
        """
        async with self._locked():
            await self._start()

    async def _start(self) -> None:
        if self._closed:
            raise SandboxError(f"this {type(self).__name__} is closed; create a new one")
        if self.alive:
            return
        self._drop()
        spawner = process.container_spawner if self._in_container else process.spawner
        future = spawner.submit(self._launch)
        try:
            level, handle = await asyncio.wrap_future(future)
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: the event loop was closed
            future.add_done_callback(_end_launched)  # the launch may be in progress on the other thread
            raise
        self._adopt(level, handle)
        try:
            if self._requested_isolation is None and level != "strict":
                levels.warn_below_strict(level)
            if self._in_container:
                await self._expect("ready", 0, _START_SECONDS)
            # A local zygote processes commands in order, so the host need not wait for its "ready" message.
            await self._new_interpreter(wipe=False, within=_START_SECONDS)
            await self._set_up()
        except SandboxError as error:
            handle.stop()
            stderr_line = handle.last_error_line()
            self._drop()
            raise SandboxError(
                f"{error}; last line of its stderr: {stderr_line}" if stderr_line else str(error)
            ) from None
        except BaseException:
            self._drop()
            raise

    def _launch(self) -> tuple[str, process.SandboxProcess]:
        isolation, options = self._requested_isolation, (self._preload, self.max_output, self._packages)
        if isinstance(isolation, Container):
            return str(isolation), container.launch(isolation, self.limits, *options)
        level = levels.resolve_level(isolation, self.limits)
        return level, process.launch(level, self.limits, *options, self._links)

    def _adopt(self, level: str, handle: process.SandboxProcess) -> None:
        if self._closed:
            handle.kill()
            raise SandboxError(f"this {type(self).__name__} was closed while it started")
        assert handle.control is not None
        self.isolation = level
        self._handle = handle
        self._finalizer = weakref.finalize(self, handle.kill)
        self._control = JSONLines(handle.control)

    async def _set_up(self) -> None:
        """Prepare a fresh interpreter. Drop the sandbox if the preparation fails or is cancelled."""
        try:
            await self._setup()
        except BaseException:
            self._drop()
            raise
        self._call_count = 0

    async def _setup(self) -> None:
        """Prepare a fresh interpreter. Subclasses override this method, which is called while the lock is held."""

    async def reset(self) -> None:
        """Kill all processes inside, empty the folders and set up a new interpreter, which takes about 2 ms.

        Raises:  SandboxError if the reset fails; the sandbox is then dead.
        """
        async with self._locked():
            if not self.alive:
                raise SandboxError(f"a dead or closed {type(self).__name__} cannot be reset; create a new one")
            self._call_count = 0
            if self._is_writable_container:
                self._drop()
                return await self._start()
            await self._new_interpreter(wipe=True)
            await self._set_up()

    @property
    def alive(self) -> bool:
        """True if the sandbox can be used or reset. The value stays True if only the interpreter dies."""
        if self._closed or self._handle is None or self._control is None or self._control.ended:
            return False
        return self._handle.alive

    @property
    def _in_container(self) -> bool:
        return isinstance(self._requested_isolation, Container)

    @property
    def _is_writable_container(self) -> bool:
        return isinstance(self._requested_isolation, Container) and self._requested_isolation.writable

    @property
    def limit_mechanisms(self) -> Mapping[str, str]:
        """Dict from the name of each limit to a description of how it is enforced, or "not limited"."""
        if isinstance(self._requested_isolation, Container):
            return self._requested_isolation.limit_mechanisms(self.limits)
        return levels.limit_mechanisms(self.isolation or levels.best(), self.limits, levels.hierarchy())

    @property
    def pid(self) -> int | None:
        """Process id, on the host, of the sandbox's outermost process."""
        return None if self._handle is None or self._handle.process is None else self._handle.process.pid

    async def close(self) -> None:
        """End a running call and close the sandbox, leaving no process and no file behind. Idempotent."""
        self._closed = True
        handle = self._handle
        if handle is None:
            return
        self._stop_watching()
        ending = asyncio.get_running_loop().run_in_executor(None, handle.destroy)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # Wait a few ms for the thread, because no process may outlive the event loop.
            handle.destroy()
            raise

    def kill(self) -> None:
        """Close the sandbox immediately, without an event loop. Do not call this in another thread during a call."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self._call_count = 0
        self._stop_watching()
        if self._handle is not None:
            self._handle.dropped = True
        if self._finalizer is not None:
            self._finalizer()

    def _stop_watching(self) -> None:
        """Unregister all file descriptors from event loops, before they are closed and their numbers reused."""
        self._has_interpreter = False
        self._abandoned = None
        for watch in list(self._watches):
            watch.stop()

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._handle is None:
            state = "not started"
        elif not self.alive:
            state = "dead"
        else:
            state = f"{self._call_count} call{'' if self._call_count == 1 else 's'}"
        return f"<{type(self).__name__} {self.isolation or 'best available isolation'}, {state}>"

    # --- calls -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the lock: calls, resets and forks run one at a time, in order of arrival, on any event loop."""
        loop = asyncio.get_running_loop()
        before, mine = self._last, loop.create_future()
        if before is not None and (before.done() or before.get_loop() is not loop):
            before = None
        self._last = mine
        try:
            if before is not None:
                await asyncio.wait([before])
            yield
        finally:
            if before is not None and not before.done():
                # This caller was cancelled while waiting. The next caller must still wait for the previous one.
                before.add_done_callback(lambda _: mine.set_result(None))
            else:
                mine.set_result(None)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Hold the lock for one call by the user. If the code inside has ended the sandbox, restart it first."""
        async with self._locked():
            if not self.alive:
                was_killed = self._check_not_ended_from_outside()
                await self._start()
                self._unreported = ENDED_BY_CODE if was_killed else None
            self._call_count += 1
            yield

    def _check_not_ended_from_outside(self) -> bool:
        """Return True if the code ended its own sandbox. Raise SandboxError if it was ended from outside.

        Code can end its sandbox only with isolation="none" and in a writable container, where it is root. The cause of
        an exit is then unknown and is attributed to the code, at level "none" unless the machine ran out of memory.
        Otherwise a policy could escape a bad reward by killing its sandbox.
        """
        handle = self._handle
        if not self._call_count or handle is None or handle.dropped or self._closed:
            return False
        hits = handle.usage.limit_hits()
        out_of_memory = hits.killed > self._limit_hits.killed and hits.memory == self._limit_hits.memory
        if self._is_writable_container or (self.isolation == "none" and not out_of_memory):
            return True
        raise SandboxError(
            f"{OUT_OF_MEMORY if out_of_memory else 'the sandbox was ended from outside'}, and the variables and files "
            "of its chain are lost; `await sandbox.start()` starts it from scratch"
        )

    async def _execute(self, code: str, timeout: float) -> SandboxResult:
        """Run code in the interpreter. The caller must hold the lock, and the sandbox must be running."""
        if not self.alive:
            if self._check_not_ended_from_outside():
                self._drop()
                return ENDED_BY_CODE
            raise SandboxError(f"this {type(self).__name__} is {'closed' if self._closed else 'dead'}")
        if self._abandoned is not None and self._has_interpreter:
            # Wait for an earlier call, which was cancelled and interrupted, to end. Kill it if it keeps running.
            earlier = await self._outcome(Call(self, self._abandoned, GRACE_SECONDS))
            if earlier.died:
                why = "a cancelled call was killed, because it did not stop" if earlier.timed_out else earlier.error
                self._unreported = SandboxResult(error=why, died=True, files_lost=earlier.files_lost)
        if self._interrupted and self._has_interpreter:
            # Wait until the zygote has delivered the interrupt. Otherwise, if the interrupted call answers first, a
            # late interrupt could hit the next call.
            serial = next(self._questions)
            if self._command("sync", serial=serial):
                await self._expect("sync", serial, CONTROL_SECONDS)
            self._interrupted = False
        if self._unreported is not None:
            result, self._unreported = self._unreported, None
            return result
        if not self._has_interpreter:
            await self._new_interpreter(wipe=False)
        # The id must be unpredictable: a thread left by an earlier call could otherwise forge the next reply.
        self._nonce = secrets.randbits(62)
        request = json.dumps({"id": self._nonce, "code": code}).encode() + b"\n"
        return await self._outcome(Call(self, request, timeout))

    async def _outcome(self, call: Call) -> SandboxResult:
        """Return the result of a call. If the caller is cancelled, interrupt the code and keep the unsent part."""
        self._abandoned = None
        try:
            return await call.outcome()
        except asyncio.CancelledError:
            if not self._closed and not call.answered:
                self._abandoned = call.request
                self._interrupt()
            raise

    def _interpreter_ended(self, status: int) -> None:
        """Record that the interpreter has exited. The exit is reported by the current or the next call."""
        self._has_interpreter = False
        self._unreported = SandboxResult(error=death_message(None, status), died=True)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._command("interrupt")

    # --- the zygote ------------------------------------------------------------------------------

    def _command(self, op: str, descriptors: Sequence[int] = (), **message: object) -> bool:
        """Send a command. Never blocks, because the zygote always reads. Return False if the zygote has exited."""
        handle = self._handle
        if handle is None or handle.control is None or handle.control.fileno() < 0:
            return False
        data = json.dumps({"op": op, **message}).encode() + b"\n"
        try:
            if descriptors:
                socket.send_fds(handle.control, [data], list(descriptors))
            else:
                handle.control.send(data)
        except OSError:
            return False
        return True

    async def _new_interpreter(self, wipe: bool, within: float | None = None) -> None:
        """Start an interpreter on new channels, which no process of the previous interpreter can write to."""
        handle = self._handle
        assert handle is not None
        self._has_interpreter, self._unreported = False, None
        self._abandoned = None
        # A pending interrupt reaches the previous interpreter, as commands run in order.
        self._interrupted = False
        self._serial += 1
        handle.close_channels()
        handle.data, data = socket.socketpair()
        handle.data.setblocking(False)
        out, out_inside = os.pipe()
        err, err_inside = os.pipe()
        handle.pipes = {out: OUT, err: ERR}
        for pipe in handle.pipes:
            os.set_blocking(pipe, False)
        with data:
            self._command("fresh", (data.fileno(), out_inside, err_inside), serial=self._serial, wipe=wipe)
        os.close(out_inside)
        os.close(err_inside)
        try:
            reply = await self._expect("fresh", self._serial, within or CONTROL_SECONDS)
            if reply.get("error"):
                raise SandboxError(f"the sandbox could not start a new interpreter: {reply['error']}")
        except BaseException:
            handle.stop()  # a partly reset sandbox must not be used again
            handle.dropped = True
            raise
        self._replies = JSONLines(handle.data, max_bytes=16 * self.max_output + 4096)
        self._limit_hits = handle.usage.limit_hits()
        self._has_interpreter = True

    async def count_processes(self) -> int | None:
        """Return the number of processes inside, including the interpreter; None if the kernel does not list them.

        Raises:  SandboxError if the sandbox is dead or does not answer.
        """
        serial = next(self._questions)
        self._command("count", serial=serial)
        processes = (await self._expect("count", serial, CONTROL_SECONDS)).get("processes")
        return None if processes is None else int(processes)

    async def _expect(self, op: str, serial: int, timeout: float) -> dict[str, Any]:
        """Wait for one message from the zygote, skipping messages about earlier interpreters."""
        control = self._control
        if control is None or control.socket.fileno() < 0:
            raise SandboxError("the sandbox has died")
        watch = Watch(self._watches)

        def read() -> None:
            try:
                for message in control.read():
                    if message.get("op") == op and message.get("serial", 0) == serial:
                        watch.finish(message)
                    elif message.get("op") == "exit" and message.get("serial") == self._serial:
                        self._interpreter_ended(int(message["status"]))
            except EOFError:
                watch.stop()

        watch.on_readable(control.socket.fileno(), read)
        watch.after(timeout, watch.stop)
        try:
            message = await watch.done
        finally:
            watch.stop()
        if message is None:
            raise SandboxError(
                f"no answer from the sandbox in {timeout:g} s" if self.alive else "the sandbox has died"
            )
        return message


def _end_launched(future: Future[tuple[str, process.SandboxProcess]]) -> None:
    """Kill a sandbox whose start has completed after the waiting caller was cancelled."""
    if not future.cancelled() and future.exception() is None:
        future.result()[1].kill()
