"""A persistent Python interpreter: variables survive from call to call and are discarded with the chain.

This is the host's side of the protocol with a zygote and its interpreter (inside/zygote.py). Between calls, nothing is
bound to an event loop, so successive calls may come from different loops.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, cast

from ..errors import SandboxError, SettingsError
from .fifo_lock import FifoLock
from .host import container, process
from .host import isolation as levels
from .host.container import Container
from .host.limits import Limits
from .result import Limit, SandboxResult

_START_SECONDS = 30.0
_CONTROL_SECONDS = 5.0  # a sandbox whose reset takes longer is considered broken
_GRACE_SECONDS = 0.5  # between the interrupt, which keeps the variables, and the kill
_CPU_POLL_SECONDS = 0.25  # how often the CPU time of a running call is checked
_MAX_OUTPUT_FACTOR = 256  # stop a call once it has printed this many times max_output
_CHUNK = 65536


class PythonSandbox:
    """A persistent, confined Python interpreter.

    Call `await start()`, then `await run(code)` any number of times, `await reset()` for a clean interpreter (new
    process, empty folder), and finally `await close()`. `async with PythonSandbox() as sandbox` starts and closes it.

    Args:
        isolation: "strict" (bubblewrap), "landlock" (no namespaces), "none" (a bare process with limits), a Container,
            or None for the best level available on this machine. `start` raises IsolationError if the named level is
            unavailable. `sandbox_report()` lists what each level does not isolate.
        memory_mb, processes, cpu_seconds, disk_mb, network: see Limits. `limit_mechanisms` describes how each limit is
            enforced.
        packages: make the packages installed for this Python importable (read-only). If False, only the standard
            library is available.
        preload: modules to import before interpreters are forked, so that every interpreter already has them (numpy:
            0.1 s once instead of once per chain).
        max_output: bytes to keep of each of stdout, stderr, value and error, per call.

    Raises:  SettingsError for an invalid setting; SandboxError only for failures of the host.
    """

    def __init__(
        self,
        *,
        isolation: str | Container | None = None,
        memory_mb: int | None = 256,
        processes: int | None = 32,
        cpu_seconds: float | None = 10.0,
        disk_mb: int | None = 64,
        network: bool = False,
        packages: bool = True,
        preload: Sequence[str] = (),
        max_output: int = 65536,
    ) -> None:
        if isinstance(preload, str):
            raise SettingsError(f"preload={preload!r}: want a list of module names")
        if max_output < 256:
            raise SettingsError(f"max_output={max_output}: want at least 256 bytes")
        if not isinstance(isolation, Container):
            levels.check_level(isolation)
        self.limits = Limits(memory_mb, processes, cpu_seconds, disk_mb, network)
        # The level in use; before `start`, the requested one.
        self.isolation: str | None = str(isolation) if isinstance(isolation, Container) else isolation
        self.max_output = max_output
        self._requested_isolation = isolation
        self._preload = tuple(preload)
        self._packages = packages
        self._handle: process.SandboxProcess | None = None
        self._finalizer: weakref.finalize[..., PythonSandbox] | None = None
        self._control: _JSONLines | None = None
        self._replies: _JSONLines | None = None
        self._serial = 0  # number of the current interpreter
        self._call_count = 0  # calls made, over all interpreters
        self._nonce = 0  # id of the running call
        self._counts = 0  # serial number of `count` requests
        self._has_interpreter = False  # an interpreter is running
        self._has_state = False  # a call was made since the last reset, so there may be state to lose
        self._abandoned: bytes | None = None  # unsent part of a call cancelled while it ran
        self._interrupted = False  # an interrupt may not have been delivered yet
        self._limit_hits = (0, 0)
        self._watches: set[_Watch] = set()
        self._lock = FifoLock()
        self._closed = False
        self._history: list[tuple[str, float, bytes | None]] = []  # code, timeout, digest of the result (None: stopped)

    # --- lifecycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the zygote and the first interpreter (about 30 ms). Does nothing if the sandbox is running.

        Raises:  IsolationError if the isolation level is unavailable, SandboxError if the process does not start.
        """
        if self._closed:
            raise SandboxError("this PythonSandbox is closed; make a new one")
        if self.alive:
            return
        self._drop()
        self._has_state = False
        inside = isinstance(
            self._requested_isolation, Container
        )  # started by the container engine; several can start concurrently
        future = container.launch_executor.submit(self._launch) if inside else process.spawner.submit(self._launch)
        try:
            level, handle = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_end_launched)  # the launch may be in progress on the other thread
            raise
        self._adopt(level, handle)
        try:
            if self._requested_isolation is None and level != "strict":
                levels.warn_below_strict(level)
            if inside:
                await self._expect("ready", 0, _START_SECONDS)
            await self._new_interpreter(
                wipe=False, within=_START_SECONDS
            )  # commands are processed in order: "ready" need not be awaited
        except SandboxError as error:
            handle.stop()
            stderr_line = handle.last_error_line()
            self._drop()
            raise SandboxError(f"{error}; its last words: {stderr_line}" if stderr_line else str(error)) from None
        except BaseException:
            self._drop()
            raise

    def _adopt(self, level: str, handle: process.SandboxProcess) -> None:
        if self._closed:
            handle.kill()
            raise SandboxError("this PythonSandbox was closed while it started")
        assert handle.control is not None
        self.isolation = level
        self._handle = handle
        self._finalizer = weakref.finalize(self, handle.kill)
        self._control = _JSONLines(handle.control)

    def _launch(self) -> tuple[str, process.SandboxProcess]:
        if isinstance(self._requested_isolation, Container):
            return str(self._requested_isolation), container.launch(
                self._requested_isolation, self.limits, self._preload, self.max_output, self._packages
            )
        level = levels.resolve_level(self._requested_isolation, self.limits)
        return level, process.launch(level, self.limits, self._preload, self.max_output, self._packages)

    @property
    def alive(self) -> bool:
        """True if the sandbox can be used or reset. A sandbox outlives the death of its interpreter."""
        if self._closed or self._handle is None or self._control is None or self._control.ended:
            return False
        return self._handle.alive

    @property
    def limit_mechanisms(self) -> Mapping[str, str]:
        """Mechanism that enforces each limit, as text; "not limited" if there is none."""
        if isinstance(self._requested_isolation, Container):
            return self._requested_isolation.limit_mechanisms(self.limits)
        level = self.isolation or levels.resolve_level(None, self.limits)
        return levels.limit_mechanisms(level, self.limits, levels.hierarchy())

    @property
    def pid(self) -> int | None:
        """Process id, on the host, of the sandbox's outermost process."""
        return None if self._handle is None or self._handle.process is None else self._handle.process.pid

    async def reset(self) -> None:
        """Kill all processes inside, empty the folders and start a new interpreter (about 2 ms).

        Raises:  SandboxError if that fails; the sandbox is then dead.
        """
        async with self._lock.acquire():
            if not self.alive:
                raise SandboxError("a dead or closed PythonSandbox cannot be reset; make a new one")
            self._history.clear()
            self._has_state = False
            await self._new_interpreter(wipe=True)

    async def fork(self, into: PythonSandbox) -> None:
        """Copy this sandbox's state to another, fresh sandbox by replaying every call there.

        Raises:  SandboxError if a call was stopped, or if its replay gives a different result (time, randomness), so
                 that the state cannot be copied faithfully. `into` is then reset.
        """
        if not into.alive:
            await into.start()
        calls = tuple(self._history)
        for position, (code, timeout, digest) in enumerate(calls, 1):
            if digest is not None and _digest(await into.run(code, timeout=timeout)) == digest:
                continue
            await into.reset()
            why = "was stopped on its way" if digest is None else "gave something else when it was replayed"
            raise SandboxError(f"this PythonSandbox cannot fork: call {position} of {len(calls)} {why}")

    async def count_processes(self) -> int | None:
        """Return the number of processes inside, including the interpreter; None if the kernel does not list them.

        Raises:  SandboxError if the sandbox is dead or does not answer.
        """
        self._counts += 1
        if not self._command("count", serial=self._counts):
            raise SandboxError("the sandbox has died")
        reply = await self._expect("count", self._counts, _CONTROL_SECONDS)
        processes = reply.get("processes")
        return None if processes is None else int(processes)

    async def close(self) -> None:
        """Close the sandbox, leaving no process and no file behind. Idempotent. A running call is ended."""
        self._closed = True
        handle = self._handle
        if handle is None:
            return
        self._stop_watching()
        ending = asyncio.get_running_loop().run_in_executor(None, handle.destroy)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            handle.destroy()  # blocks for a few ms until the thread is done: nothing may outlive the event loop
            raise

    def kill(self) -> None:
        """Close the sandbox immediately, without an event loop. Not safe from another thread while a call runs."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
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

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._handle is None:
            state = "not started"
        elif not self.alive:
            state = "dead"
        else:
            state = f"{self._call_count} call{'' if self._call_count == 1 else 's'}"
        return f"<PythonSandbox {self.isolation or 'best isolation there is'}, {state}>"

    # --- a call ----------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float = 5.0) -> SandboxResult:
        """Run code in the interpreter. The result's `value` is the repr of the last expression.

        After `timeout` seconds the code receives a KeyboardInterrupt, which preserves its variables. If it is still
        running half a second later, it is killed, and the next call gets a new interpreter with the same files.

        Raises:  SandboxError if the sandbox is closed, cannot be restarted, or was killed from outside during this call
                 or since the last one (its variables are lost; `start()` starts it from scratch). Failures of the code
                 itself are never raised.
        """
        if not 0 < timeout < float("inf"):
            raise SettingsError(f"timeout={timeout!r}: want a positive number of seconds")
        async with self._lock.acquire():
            if self._closed:
                raise SandboxError("this PythonSandbox is closed")
            if not self.alive:
                self._raise_if_ended()
                await self.start()
            if self._abandoned is not None:
                await self._finish_abandoned(self._abandoned)
            if self._interrupted and self._has_interpreter:
                await self._await_interrupt()
            if not self._has_interpreter:
                await self._new_interpreter(wipe=False)
            self._call_count += 1
            self._has_state = True
            self._history.append((code, timeout, None))  # final if this call is cancelled
            # The id must be unpredictable: a thread left by an earlier call could otherwise forge the next reply.
            self._nonce = secrets.randbits(62)
            request = json.dumps({"id": self._nonce, "code": code}).encode() + b"\n"
            call = _Call(self, request, timeout)
            try:
                result = await call.outcome()
            except asyncio.CancelledError:
                if not self._closed:
                    self._abandoned = call.request
                    self._interrupt()
                raise
            finally:
                call.watch.stop()
            stopped = result.timed_out or result.died or result.limit == "output"
            self._history[-1] = (code, timeout, None if stopped else _digest(result))
            return result

    def _raise_if_ended(self) -> None:
        """Raise SandboxError if the sandbox was killed from outside and state that a chain relies on was lost."""
        handle = self._handle
        if self._has_state and handle is not None and not handle.dropped and not self._closed:
            raise SandboxError(
                "the sandbox was ended from outside, and with it the variables and files of its chain; "
                "`await sandbox.start()` begins anew"
            )

    async def _finish_abandoned(self, unsent: bytes) -> None:
        """Wait for a cancelled call, which was interrupted when it was cancelled; kill it if it keeps running."""
        call = _Call(self, unsent, _GRACE_SECONDS)
        try:
            await call.outcome()
        finally:
            call.watch.stop()
        self._abandoned = None

    def _interrupt(self) -> None:
        self._interrupted = True
        self._command("interrupt")

    async def _await_interrupt(self) -> None:
        """Wait until the zygote has delivered a pending interrupt.

        Otherwise, if the interrupted call answers first, a late interrupt could hit the next call.
        """
        if self._command("sync", serial=self._call_count):
            await self._expect("sync", self._call_count, _CONTROL_SECONDS)
        self._interrupted = False

    # --- the zygote ------------------------------------------------------------------------------

    def _command(self, op: str, descriptors: Sequence[int] = (), **message: object) -> bool:
        """Send a command to the zygote without waiting for an answer. Return False if the zygote is gone.

        The send does not block: messages are small and the zygote always reads.
        """
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
        self._has_interpreter = False
        self._abandoned = None
        self._interrupted = False  # commands run in order: a pending interrupt can only reach the previous interpreter
        self._serial += 1
        handle.close_channels()
        handle.data, data = socket.socketpair()
        handle.data.setblocking(False)
        out, out_inside = os.pipe()
        err, err_inside = os.pipe()
        handle.pipes = (out, err)
        for pipe in handle.pipes:
            os.set_blocking(pipe, False)
        with data:
            inside = (data.fileno(), out_inside, err_inside)
            sent = self._command("fresh", inside, serial=self._serial, wipe=wipe)
        os.close(out_inside)
        os.close(err_inside)
        try:
            if not sent:
                raise SandboxError("the sandbox has died")
            reply = await self._expect("fresh", self._serial, within or _CONTROL_SECONDS)
            if reply.get("error"):
                raise SandboxError(f"the sandbox could not be made fresh: {reply['error']}")
        except BaseException:
            handle.stop()  # a partly reset sandbox must not be used again
            handle.dropped = True
            raise
        self._replies = _JSONLines(handle.data, max_bytes=16 * self.max_output + 4096)
        if handle.group is not None:
            self._limit_hits = handle.group.limit_hits()
        self._has_interpreter = True

    async def _expect(self, op: str, serial: int, timeout: float) -> dict[str, Any]:
        """Wait for one message from the zygote, skipping those about earlier interpreters."""
        control = self._control
        if control is None or control.socket.fileno() < 0:
            raise SandboxError("the sandbox has died")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[str, Any] | None] = loop.create_future()

        def read() -> None:
            try:
                for message in control.read():
                    if message.get("op") == op and message.get("serial", 0) == serial and not found.done():
                        found.set_result(message)
                    elif message.get("op") == "exit" and message.get("serial") == self._serial:
                        self._has_interpreter = False  # the interpreter exited in the meantime
            except EOFError:
                watch.stop()

        watch = _Watch(self, found)
        watch.add(control.socket.fileno(), read)
        late = SandboxError(f"no answer from the sandbox in {timeout:g} s")
        watch.timers.append(loop.call_later(timeout, lambda: None if found.done() else found.set_exception(late)))
        try:
            message = await found
        finally:
            watch.stop()
        if message is None:
            raise SandboxError("the sandbox has died")
        return message


class _Watch:
    """File descriptors and timers registered with an event loop for one wait. `stop` removes them and ends the wait."""

    def __init__(self, sandbox: PythonSandbox, done: asyncio.Future[dict[str, Any] | None]) -> None:
        self.sandbox, self.done = sandbox, done
        self.loop = asyncio.get_running_loop()
        self.files: list[int] = []
        self.writer: int | None = None
        self.timers: list[asyncio.TimerHandle] = []
        sandbox._watches.add(self)

    def add(self, file: int, call: Callable[[], object]) -> None:
        self.loop.add_reader(file, call)
        self.files.append(file)

    def add_writer(self, file: int, call: Callable[[], object]) -> None:
        self.loop.add_writer(file, call)
        self.writer = file

    def remove_writer(self) -> None:
        if self.writer is not None:
            self.loop.remove_writer(self.writer)
            self.writer = None

    def remove(self, file: int) -> None:
        if file in self.files:
            self.loop.remove_reader(file)
            self.files.remove(file)

    def stop(self) -> None:
        self.sandbox._watches.discard(self)
        files, self.files = self.files, []
        if not self.loop.is_closed():
            for file in files:
                self.loop.remove_reader(file)
            self.remove_writer()
            for timer in self.timers:
                timer.cancel()
            if not self.done.done():
                self.done.set_result(None)


class _JSONLines:
    """Reader of JSON objects, one per line, from a non-blocking socket. Input may be untrusted; its size is bounded."""

    def __init__(self, source: socket.socket, max_bytes: int = 2**20) -> None:
        self.socket = source
        self.max_bytes = max_bytes
        self.buffer = bytearray()
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """Return the messages received so far.

        Raises:  EOFError at the end of the stream, ValueError if the data violates the protocol.
        """
        while True:
            try:
                data = self.socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            self.buffer += data
            if len(self.buffer) > self.max_bytes:
                raise ValueError("a message is too long")
            if len(data) < _CHUNK:
                break
        *lines, rest = self.buffer.split(b"\n")
        if self.ended and not lines:
            raise EOFError
        self.buffer = bytearray(rest)
        messages = []
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")
            messages.append(message)
        return messages


class _Call:
    """One running call: sends the request and collects output until there is an answer, a limit is hit, or it dies."""

    def __init__(self, sandbox: PythonSandbox, request: bytes, timeout: float) -> None:
        handle, control, replies = sandbox._handle, sandbox._control, sandbox._replies
        assert handle is not None and control is not None and replies is not None and handle.data is not None
        self.sandbox, self.control, self.replies = sandbox, control, replies
        self.number = sandbox._nonce
        self.request = request
        self.timeout = timeout
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[dict[str, Any] | None] = self.loop.create_future()
        self.pipes = handle.pipes
        self.printed = (bytearray(), bytearray())
        self.discarded = 0
        self.truncated = self.timed_out = False
        self.limit: Limit | None = None
        self.status: int | None = None
        self.group = handle.group
        self.cpu_before: float | None = None
        self.began = time.perf_counter()
        self.watch = _Watch(sandbox, self.done)
        self.watch.add(replies.socket.fileno(), self.read_reply)
        self.watch.add(control.socket.fileno(), self.read_control)
        for pipe, kept in zip(self.pipes, self.printed, strict=True):
            self.watch.add(pipe, functools.partial(self.read_pipe, pipe, kept))
        self.after(timeout, self.on_timeout)
        if self.group is not None and sandbox.limits.cpu_seconds is not None:
            self.cpu_before = self.group.cpu_seconds()
        self.after(
            _CPU_POLL_SECONDS, self.check_cpu
        )  # also without a CPU limit, because it wakes the event loop (see _async/interrupts.py)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self.watch.timers.append(self.loop.call_later(seconds, call))

    def finish(self, reply: dict[str, Any] | None) -> None:
        if not self.done.done():
            self.done.set_result(reply)

    # --- input and output

    def send(self) -> None:
        try:
            while self.request:
                sent = self.replies.socket.send(self.request[: 4 * _CHUNK])
                self.request = self.request[sent:]
        except (BlockingIOError, InterruptedError):
            self.watch.add_writer(self.replies.socket.fileno(), self.send)
            return
        except OSError:
            self.request = b""  # it died: the readers will notice
        self.watch.remove_writer()

    def read_reply(self) -> None:
        try:
            for message in self.replies.read():
                if message.get("id") == self.number:
                    self.finish(message)
                    return
        except (EOFError, ValueError):
            # The interpreter died (the zygote will report it), closed the socket, or violated the protocol.
            self.watch.remove(self.replies.socket.fileno())
            self.kill()

    def read_control(self) -> None:
        try:
            for message in self.control.read():
                if message.get("op") == "exit" and message.get("serial") == self.sandbox._serial:
                    self.status = int(message["status"])
                    self.finish(None)
        except EOFError:
            self.watch.remove(self.control.socket.fileno())
            self.finish(None)

    def read_pipe(self, pipe: int, kept: bytearray) -> bool:
        """Read one chunk. Return True if there was one."""
        try:
            data = os.read(pipe, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self.watch.remove(pipe)
            return False
        room = self.sandbox.max_output - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.truncated = True
            self.discarded += len(data)
            if self.discarded > _MAX_OUTPUT_FACTOR * self.sandbox.max_output and self.limit is None:
                self.limit = "output"
                self.stop()
        return True

    # --- timers

    def on_timeout(self) -> None:
        if self.limit is None:
            self.timed_out = True
            self.limit = "time"
            self.stop()

    def check_cpu(self) -> None:
        budget = self.sandbox.limits.cpu_seconds
        now = self.group.cpu_seconds() if self.group else None
        spent = 0.0 if now is None or self.cpu_before is None else now - self.cpu_before
        if self.limit is None and budget is not None and spent > budget:
            self.limit = "cpu"
            self.stop()
            return
        self.after(_CPU_POLL_SECONDS, self.check_cpu)

    def stop(self) -> None:
        """Interrupt the code now, and kill it after a grace period."""
        self.sandbox._interrupt()
        self.after(_GRACE_SECONDS, self.kill)

    def kill(self) -> None:
        if self.sandbox._command("kill"):
            self.after(_CONTROL_SECONDS, self.on_kill_timeout)
        else:
            self.finish(None)

    def on_kill_timeout(self) -> None:
        if not self.done.done():
            self.sandbox._drop()

    # --- the result

    async def outcome(self) -> SandboxResult:
        self.send()
        reply = await self.done
        sandbox = self.sandbox
        if not sandbox._closed and sandbox.alive:
            for pipe, kept in zip(self.pipes, self.printed, strict=True):
                # Everything printed before the answer is in the pipe by now: at most 16 pages, at least one per read.
                for _ in range(16):
                    if not self.read_pipe(pipe, kept):
                        break
        seconds = time.perf_counter() - self.began
        if reply is None:
            sandbox._has_interpreter = False
        hits = before = sandbox._limit_hits
        if self.group is not None and (reply is None or seconds > 0.002 or reply.get("error")):
            hits = sandbox._limit_hits = self.group.limit_hits()
        limit = self.limit
        if limit is None:
            reported = reply.get("limit") if reply else None
            if hits[0] > before[0]:
                limit = "memory"
            elif reported in ("memory", "cpu", "disk", "processes"):
                limit = cast(Limit, reported)
            elif hits[1] > before[1]:
                limit = "processes"
        value = error = error_type = None
        if reply is None and limit is None and self.status is None and not sandbox._closed:
            sandbox._raise_if_ended()
        if reply is None:
            error = _death_message(limit, self.status, self.timeout, sandbox._closed)
        else:
            value, error, error_type = (_encodable(reply.get(name)) for name in ("value", "error", "type"))
        max_chars = 4 * sandbox.max_output  # already cut by the interpreter, unless the code inside forged the reply
        return SandboxResult(
            stdout=self.printed[0].decode("utf-8", "replace"),
            stderr=self.printed[1].decode("utf-8", "replace"),
            value=None if value is None else value[:max_chars],
            error=None if error is None else error[-max_chars:],
            error_type=error_type,
            seconds=seconds,
            truncated=self.truncated or bool(reply and reply.get("truncated")),
            timed_out=self.timed_out,
            died=reply is None,
            limit=limit,
        )


def _end_launched(future: Future[tuple[str, process.SandboxProcess]]) -> None:
    """Kill the sandbox started by a launch whose caller was cancelled."""
    if not future.cancelled() and future.exception() is None:
        future.result()[1].kill()


def _digest(result: SandboxResult) -> bytes:
    """Hash the parts of a result that a replay must reproduce."""
    same = (result.stdout, result.stderr, result.value, result.error, result.limit, result.truncated)
    return hashlib.sha256(repr(same).encode()).digest()


def _encodable(text: object) -> str | None:
    """Return untrusted text with lone surrogates replaced, so that it can be encoded; None if it is not a string."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def _death_message(limit: Limit | None, status: int | None, timeout: float, closed: bool) -> str:
    if closed:
        return "the sandbox was closed"
    if limit == "time":
        return f"killed: it ran for more than {timeout:g} s and did not stop when it was interrupted"
    if limit is not None:
        return f"killed: it ran into the {limit} limit"
    if status is None:
        return "the sandbox died"
    if status < 0:
        return f"the interpreter was ended by signal {-status}"
    return f"the interpreter exited with status {status}"
