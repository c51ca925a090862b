"""A Python interpreter that a chain keeps: variables live from call to call, and are gone with the chain.

Knows how to talk to a zygote and its interpreter (inside/zygote.py) from whatever event loop is running; nothing of
pools, tools or models. Between calls nothing of it is bound to a loop.
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
_CONTROL_SECONDS = 5.0  # a reset that takes longer is a broken sandbox
_GRACE_SECONDS = 0.5  # between the interrupt, which keeps the variables, and the kill
_CPU_POLL_SECONDS = 0.25  # how often the processor time of a running call is looked at
_MAX_OUTPUT_FACTOR = 256  # a call may print this many times what is kept of it, then it is stopped
_CHUNK = 65536


class PythonSandbox:
    """A persistent, confined Python interpreter.

    `await start()`, `await run(code)` as often as wanted, `await reset()` for an interpreter that knows nothing of the
    last one (new process, empty folder), `await close()`. `async with PythonSandbox() as sandbox` does the first and
    the last.

    Args:
        isolation: "strict" (one bubblewrap each), "landlock" (no namespaces), "none" (a bare process with limits), or
            None: the best there is here; or a Container, which says the image. A level that was named and cannot be had
            raises IsolationError at `start`. `sandbox_report()` says what each keeps apart.
        memory_mb, processes, cpu_seconds, disk_mb, network: see Limits; `limit_mechanisms` says how each one is held.
        packages: the packages installed for this Python can be imported inside, read-only; False: the standard library.
        preload: modules that every interpreter has loaded already (numpy: 0.1 s once instead of in each chain).
        max_output: bytes kept of each of stdout, stderr, value and error of a call.

    Raises:  SettingsError for a setting that cannot be; SandboxError only for failures of the host.
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
        # The level in use; before `start`, the one asked for.
        self.isolation: str | None = str(isolation) if isinstance(isolation, Container) else isolation
        self.max_output = max_output
        self._requested_isolation = isolation
        self._preload = tuple(preload)
        self._packages = packages
        self._handle: process.SandboxProcess | None = None
        self._finalizer: weakref.finalize[..., PythonSandbox] | None = None
        self._control: _JSONLines | None = None
        self._replies: _JSONLines | None = None
        self._serial = 0  # of the interpreter
        self._call_count = 0  # of the call, over all interpreters
        self._nonce = 0  # of the call that runs
        self._counts = 0  # requests for the number of processes
        self._has_interpreter = False  # an interpreter runs
        self._has_state = False  # a call was made since the last reset: there may be something to lose
        self._abandoned: bytes | None = None  # a call was given up while its code ran: what of it is still to be sent
        self._interrupted = False  # an interrupt may still be on its way
        self._limit_hits = (0, 0)
        self._watches: set[_Watch] = set()
        self._lock = FifoLock()
        self._closed = False
        self._history: list[tuple[str, float, bytes | None]] = []  # code, timeout, what it gave; None: was stopped

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the zygote and the first interpreter (about 30 ms). Does nothing if it runs.

        Raises:  IsolationError if the level cannot be had, SandboxError if the process does not come up.
        """
        if self._closed:
            raise SandboxError("this PythonSandbox is closed; make a new one")
        if self.alive:
            return
        self._drop()
        self._has_state = False
        inside = isinstance(
            self._requested_isolation, Container
        )  # the engine starts it: many may be on their way at once
        future = container.launch_executor.submit(self._launch) if inside else process.spawner.submit(self._launch)
        try:
            level, handle = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_end_launched)  # it may be under way on the other thread
            raise
        self._adopt(level, handle)
        try:
            if self._requested_isolation is None and level != "strict":
                levels.warn_below_strict(level)
            if inside:
                await self._expect("ready", 0, _START_SECONDS)
            await self._new_interpreter(
                wipe=False, within=_START_SECONDS
            )  # it does what it is told in the order of telling
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
        """It can be used, or reset. An interpreter that died does not make its sandbox dead."""
        if self._closed or self._handle is None or self._control is None or self._control.ended:
            return False
        return self._handle.alive

    @property
    def limit_mechanisms(self) -> Mapping[str, str]:
        """How each limit is held, in words; "not limited" where nothing holds it."""
        if isinstance(self._requested_isolation, Container):
            return self._requested_isolation.limit_mechanisms(self.limits)
        level = self.isolation or levels.resolve_level(None, self.limits)
        return levels.limit_mechanisms(level, self.limits, levels.hierarchy())

    @property
    def pid(self) -> int | None:
        """The host's process id of the sandbox's outermost process."""
        return None if self._handle is None or self._handle.process is None else self._handle.process.pid

    async def reset(self) -> None:
        """Kill all that runs inside, empty its folders, start a new interpreter (about 2 ms).

        Raises:  SandboxError if that fails; the sandbox is then dead.
        """
        async with self._lock.acquire():
            if not self.alive:
                raise SandboxError("a dead or closed PythonSandbox cannot be reset; make a new one")
            self._history.clear()
            self._has_state = False
            await self._new_interpreter(wipe=True)

    async def fork(self, into: PythonSandbox) -> None:
        """Bring another, fresh sandbox into this one's state by replaying every call there.

        Raises:  SandboxError if a call was stopped, or replays differently (time, randomness): then this state cannot
                 be copied, and pretending would be worse. `into` is reset.
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
        """The number of processes that run inside, including the interpreter; None where the kernel does not list them.

        Raises:  SandboxError if the sandbox is dead or gives no answer.
        """
        self._counts += 1
        if not self._command("count", serial=self._counts):
            raise SandboxError("the sandbox has died")
        reply = await self._expect("count", self._counts, _CONTROL_SECONDS)
        processes = reply.get("processes")
        return None if processes is None else int(processes)

    async def close(self) -> None:
        """End it: no process and no file is left. May be called twice, and while a call runs, which then ends."""
        self._closed = True
        handle = self._handle
        if handle is None:
            return
        self._stop_watching()
        ending = asyncio.get_running_loop().run_in_executor(None, handle.destroy)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            handle.destroy()  # waits for the thread, some ms: nothing may be left when the loop is gone
            raise

    def kill(self) -> None:
        """As `close`, at once and without an event loop. Not from another thread while a call runs."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self._stop_watching()
        if self._handle is not None:
            self._handle.dropped = True
        if self._finalizer is not None:
            self._finalizer()

    def _stop_watching(self) -> None:
        """No event loop may watch a file that is about to be closed: its number is soon another file's."""
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
        """Run code in the chain's interpreter; the last expression's value is echoed.

        When `timeout` seconds are over the code gets a KeyboardInterrupt and its variables live; if it has not ended
        half a second later it is killed, and the next call finds a new interpreter beside the same files.

        Raises:  SandboxError if the sandbox is closed, cannot be brought back to life, or was ended from outside, now
                 or since the last call: its variables are gone, and `start()` begins anew. Nothing that the code did.
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
            self._history.append((code, timeout, None))  # as it stays if this call is abandoned
            # A number that nobody can guess: a thread that an earlier call left could write the next reply beforehand.
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
        """Raises SandboxError if it was ended by somebody else, with variables or files that a chain relies on."""
        handle = self._handle
        if self._has_state and handle is not None and not handle.dropped and not self._closed:
            raise SandboxError(
                "the sandbox was ended from outside, and with it the variables and files of its chain; "
                "`await sandbox.start()` begins anew"
            )

    async def _finish_abandoned(self, unsent: bytes) -> None:
        """Get past an abandoned call: its code was interrupted when it was abandoned; if it goes on, kill it."""
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
        """Wait until the zygote has delivered an interrupt: on a busy machine it would hit the next call otherwise, if
        the one that it was meant for answered first."""
        if self._command("sync", serial=self._call_count):
            await self._expect("sync", self._call_count, _CONTROL_SECONDS)
        self._interrupted = False

    # --- the zygote ------------------------------------------------------------------------------

    def _command(self, op: str, descriptors: Sequence[int] = (), **message: object) -> bool:
        """Send to the zygote without waiting: the messages are small and it always reads. False if it is gone."""
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
        """A new interpreter, on new channels: nothing that survived the last one could speak on them."""
        handle = self._handle
        assert handle is not None
        self._has_interpreter = False
        self._abandoned = None
        self._interrupted = False  # commands are carried out in order: it has hit the one before, or nobody
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
            handle.stop()  # half a reset is no reset: this sandbox is not used again
            handle.dropped = True
            raise
        self._replies = _JSONLines(handle.data, max_bytes=16 * self.max_output + 4096)
        if handle.group is not None:
            self._limit_hits = handle.group.limit_hits()
        self._has_interpreter = True

    async def _expect(self, op: str, serial: int, timeout: float) -> dict[str, Any]:
        """Wait for one message of the zygote; its other messages are of interpreters that are gone."""
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
                        self._has_interpreter = False  # the interpreter ended meanwhile
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
    """The files and clocks that an event loop watches for one wait. `stop` ends them all and the wait, once."""

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
    """JSON lines from a non-blocking socket. What comes may be untrusted: bounded, and objects only."""

    def __init__(self, source: socket.socket, max_bytes: int = 2**20) -> None:
        self.socket = source
        self.max_bytes = max_bytes
        self.buffer = bytearray()
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come. Raises EOFError at the end, ValueError if it is not the protocol."""
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
    """One request on its way: sends it, gathers what is printed, watches the clocks until it is answered or dead."""

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
        self.after(_CPU_POLL_SECONDS, self.check_cpu)  # without a budget too: see _async/interrupts.py

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self.watch.timers.append(self.loop.call_later(seconds, call))

    def finish(self, reply: dict[str, Any] | None) -> None:
        if not self.done.done():
            self.done.set_result(reply)

    # --- what goes and comes

    def send(self) -> None:
        try:
            while self.request:
                sent = self.replies.socket.send(self.request[: 4 * _CHUNK])
                self.request = self.request[sent:]
        except (BlockingIOError, InterruptedError):
            self.watch.add_writer(self.replies.socket.fileno(), self.send)
            return
        except OSError:
            self.request = b""  # it died: the readers will say so
        self.watch.remove_writer()

    def read_reply(self) -> None:
        try:
            for message in self.replies.read():
                if message.get("id") == self.number:
                    self.finish(message)
                    return
        except (EOFError, ValueError):
            # It died, and the zygote's word follows; or it closed the socket, or it does not keep to the protocol.
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
        """Take one piece; True if there was one."""
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

    # --- the clocks

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
        """Interrupt now, kill soon."""
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
                # All that was printed before the answer is in the pipe by now; it holds 16 pages.
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
        max_chars = 4 * sandbox.max_output  # the interpreter has cut them already, unless the code inside speaks for it
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
    """A launch whose caller was cancelled: end what it made."""
    if not future.cancelled() and future.exception() is None:
        future.result()[1].kill()


def _digest(result: SandboxResult) -> bytes:
    """What a replay must give again, in 32 bytes."""
    same = (result.stdout, result.stderr, result.value, result.error, result.limit, result.truncated)
    return hashlib.sha256(repr(same).encode()).digest()


def _encodable(text: object) -> str | None:
    """Text from inside: it may be of any type, or hold halves of surrogate pairs that nothing later could encode."""
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
