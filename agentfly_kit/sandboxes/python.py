"""A Python interpreter that a chain keeps: variables live from call to call, and are gone with the chain.

Knows how to talk to a zygote and its interpreter (worker.py) from whatever event loop is running; nothing of pools, tools or
models. Between calls nothing of it is bound to a loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, cast

from ..errors import SandboxError, SettingsError
from . import isolation as levels
from . import process
from .limits import Limits
from .result import Limit, SandboxResult

_START_SECONDS = 30.0
_CONTROL_SECONDS = 5.0  # a reset that takes longer is a broken sandbox
_GRACE_SECONDS = 0.5  # between the interrupt, which keeps the variables, and the kill
_CLOCK_SECONDS = 0.25  # how often the processor time of a running call is looked at
_FLOOD_FACTOR = 256  # a call may print this many times what is kept of it, then it is stopped
_CHUNK = 65536


class PythonSandbox:
    """A persistent, confined Python interpreter.

    `await start()`, `await run(code)` as often as wanted, `await reset()` for an interpreter that knows nothing of the last
    one (new process, empty folder), `await close()`. `async with PythonSandbox() as sandbox` does the first and the last.

    isolation   "strict" (bubblewrap), "none" (a bare process with limits), or None: the best there is here. A level that was
                named and cannot be had raises IsolationError at `start`. `sandbox_report()` says what each keeps apart.
    memory_mb, processes, cpu_seconds, disk_mb, network     see Limits; `applied` says how each one is held.
    preload     modules that every interpreter has loaded already (numpy: 0.1 s once instead of in each chain).
    max_output  bytes kept of each of stdout, stderr, value and error of a call.

    Raises:  SettingsError for a setting that cannot be; SandboxError only for failures of the host.
    """

    def __init__(
        self,
        *,
        isolation: str | None = None,
        memory_mb: int | None = 256,
        processes: int | None = 32,
        cpu_seconds: float | None = 10.0,
        disk_mb: int | None = 64,
        network: bool = False,
        preload: Sequence[str] = (),
        max_output: int = 65536,
    ) -> None:
        if isinstance(preload, str):
            raise SettingsError(f"preload={preload!r}: want a list of module names")
        if max_output < 256:
            raise SettingsError(f"max_output={max_output}: want at least 256 bytes")
        if isolation is not None and isolation not in levels.LEVELS:
            levels.choose(isolation, Limits())  # raises, with the names that there are
        self.limits = Limits(memory_mb, processes, cpu_seconds, disk_mb, network)
        self.isolation = isolation
        """The level in use; before `start`, the one asked for."""
        self.max_output = max_output
        self._asked = isolation
        self._preload = tuple(preload)
        self._vessel: process.Vessel | None = None
        self._finalizer: weakref.finalize[..., PythonSandbox] | None = None
        self._control: _Lines | None = None
        self._data: socket.socket | None = None
        self._pipes: tuple[int, int] = (-1, -1)
        self._serial = 0  # of the interpreter
        self._call = 0  # of the call, over all interpreters
        self._worker = False  # an interpreter runs
        self._unanswered = False  # a call was abandoned while its code ran
        self._tail: asyncio.Future[None] | None = None
        self._closed = False
        self._history: list[tuple[str, float, SandboxResult]] = []

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
        future = process.spawner.submit(self._launch)
        try:
            self.isolation, vessel = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.cancel()
            future.add_done_callback(_destroy_result)
            raise
        self._vessel = vessel
        self._finalizer = weakref.finalize(self, vessel.kill)
        assert vessel.control is not None
        self._control = _Lines(vessel.control)
        try:
            await self._expect("ready", 0, _START_SECONDS)
            await self._fresh(wipe=False)
        except SandboxError as error:
            process_ = vessel.process
            if process_ is not None and process_.poll() is None:
                process_.kill()
            said = vessel.said()
            await self._end(vessel)
            raise SandboxError(f"{error}; it said: {said}" if said else str(error)) from None
        except BaseException:
            vessel.kill()
            raise

    def _launch(self) -> tuple[str, process.Vessel]:
        level = levels.choose(self._asked, self.limits)
        return level, process.launch(level, self.limits, self._preload, self.max_output)

    @property
    def alive(self) -> bool:
        """It can be used, or reset. An interpreter that died does not make its sandbox dead."""
        return not self._closed and self._vessel is not None and self._vessel.alive

    @property
    def applied(self) -> Mapping[str, str]:
        """How each limit is held, in words; "not limited" where nothing holds it."""
        level = self.isolation or levels.choose(None, self.limits)
        return levels.applied(level, self.limits, levels.hierarchy())

    @property
    def pid(self) -> int | None:
        """The host's process id of the sandbox's outermost process."""
        started = self._vessel is not None and self._vessel.process is not None
        return self._vessel.process.pid if started else None  # type: ignore[union-attr]

    async def reset(self) -> None:
        """Kill all that runs inside, empty its folders, start a new interpreter (about 2 ms).

        Raises:  SandboxError if that fails; the sandbox is then dead.
        """
        async with self._turn():
            if not self.alive:
                raise SandboxError("a dead or closed PythonSandbox cannot be reset; make a new one")
            self._history.clear()
            await self._fresh(wipe=True)

    async def fork(self, into: PythonSandbox) -> None:
        """Bring another, fresh sandbox into this one's state by replaying every call there.

        Raises:  SandboxError if a call was ended by a limit or replays differently (time, randomness): then this state
                 cannot be copied, and pretending would be worse. `into` is reset.
        """
        history = list(self._history)
        if not into.alive:
            await into.start()
        for position, (code, timeout, result) in enumerate(history, 1):
            again: SandboxResult | None = None
            if not (result.timed_out or result.died):
                again = await into.run(code, timeout=timeout)
                if _outcome(again) == _outcome(result):
                    continue
            await into.reset()
            why = "was ended by a limit" if again is None else "gave something else when it was replayed"
            raise SandboxError(f"this PythonSandbox cannot fork: call {position} of {len(history)} {why}")

    async def close(self) -> None:
        """End it: no process and no file is left. May be called twice, and while a call runs."""
        self._closed = True
        vessel = self._vessel
        if vessel is not None:
            await self._end(vessel)

    def kill(self) -> None:
        """As `close`, at once and without an event loop."""
        self._closed = True
        self._drop()

    async def _end(self, vessel: process.Vessel) -> None:
        self._worker = False
        self._data = None
        if self._finalizer is not None:
            self._finalizer.detach()
        ending = asyncio.get_running_loop().run_in_executor(None, vessel.destroy)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            vessel.destroy()  # waits for the thread, about 2 ms: nothing may be left when the loop is gone
            raise

    def _drop(self) -> None:
        self._worker = False
        self._data = None
        if self._finalizer is not None:
            self._finalizer()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._closed:
            state = "closed"
        elif self._vessel is None:
            state = "not started"
        elif not self.alive:
            state = "dead"
        else:
            state = f"{self._call} call{'' if self._call == 1 else 's'}"
        return f"<PythonSandbox {self.isolation or 'best isolation there is'}, {state}>"

    # --- a call ----------------------------------------------------------------------------------

    async def run(self, code: str, timeout: float = 5.0) -> SandboxResult:
        """Run code in the chain's interpreter; the last expression's value is echoed.

        When `timeout` seconds are over the code gets a KeyboardInterrupt and its variables live; if it has not ended half a
        second later it is killed, and the next call finds a new interpreter beside the same files.

        Raises:  SandboxError if the sandbox is closed or cannot be brought back to life; nothing that the code did.
        """
        if not timeout > 0 or timeout == float("inf"):
            raise SettingsError(f"timeout={timeout!r}: want a positive number of seconds")
        async with self._turn():
            if self._closed:
                raise SandboxError("this PythonSandbox is closed")
            if not self.alive:
                await self.start()
            if self._unanswered:
                await self._settle()
            if not self._worker:
                await self._fresh(wipe=False)
            result = await self._exchange(code, timeout)
            self._history.append((code, timeout, result))
            return result

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Calls on one sandbox come one after the other, in order; not an asyncio.Lock, which belongs to one loop for ever."""
        loop = asyncio.get_running_loop()
        before, mine = self._tail, loop.create_future()
        self._tail = mine
        try:
            if before is not None and not before.done() and before.get_loop() is loop:
                await asyncio.wait([before])
            yield
        finally:
            # A waiter that is cancelled must not let the next one pass before its turn has come.
            if before is not None and not before.done() and before.get_loop() is loop:
                before.add_done_callback(lambda _: mine.done() or mine.set_result(None))
            elif not mine.done():
                mine.set_result(None)

    async def _exchange(self, code: str, timeout: float) -> SandboxResult:
        self._call += 1
        call = _Call(self, self._call, code, timeout)
        try:
            return await call.outcome()
        except asyncio.CancelledError:
            self._unanswered = True
            self._command("interrupt")
            raise
        finally:
            call.detach()

    async def _settle(self) -> None:
        """Get past an abandoned call: its code was interrupted when it was abandoned; if it goes on, kill it."""
        call = _Call(self, self._call, None, _GRACE_SECONDS)
        try:
            await call.outcome()
        finally:
            call.detach()
        self._unanswered = False

    # --- the zygote ------------------------------------------------------------------------------

    def _command(self, op: str, descriptors: Sequence[int] = (), **message: object) -> bool:
        """Send to the zygote without waiting: the messages are small and it always reads."""
        vessel = self._vessel
        if vessel is None or vessel.control is None or vessel.control.fileno() < 0:
            return False
        data = json.dumps({"op": op, **message}).encode() + b"\n"
        try:
            if descriptors:
                socket.send_fds(vessel.control, [data], list(descriptors))
            else:
                vessel.control.send(data)
        except OSError:
            return False
        return True

    async def _fresh(self, wipe: bool) -> None:
        """A new interpreter, on new channels: nothing that survived the last one could speak on them."""
        vessel = self._vessel
        assert vessel is not None
        self._worker = False
        self._unanswered = False
        self._serial += 1
        old, vessel.files = vessel.files, []
        for file in old:
            os.close(file)
        host, data = socket.socketpair()
        out, out_in = os.pipe()
        err, err_in = os.pipe()
        for file in (out, err):
            os.set_blocking(file, False)
        host.setblocking(False)
        vessel.files = [host.detach(), out, err]
        with data:
            sent = self._command("fresh", (data.fileno(), out_in, err_in), serial=self._serial, wipe=wipe)
        os.close(out_in)
        os.close(err_in)
        try:
            if not sent:
                raise SandboxError("the sandbox has died")
            reply = await self._expect("fresh", self._serial, _CONTROL_SECONDS)
            if reply.get("error"):
                raise SandboxError(f"the sandbox could not be made fresh: {reply['error']}")
        except BaseException:
            # Whatever it was, half a reset is no reset: this sandbox is not used again.
            vessel.kill()
            raise
        self._pipes = (out, err)
        self._worker = True

    async def _expect(self, op: str, serial: int, timeout: float) -> dict[str, Any]:
        """Wait for one message of the zygote; its other messages are of interpreters that are gone."""
        control = self._control
        assert control is not None
        loop = asyncio.get_running_loop()
        found: asyncio.Future[dict[str, Any]] = loop.create_future()

        def read() -> None:
            if found.done():
                return
            try:
                for message in control.read():
                    if message.get("op") == op and message.get("serial", 0) == serial:
                        found.set_result(message)
                        return
            except EOFError:
                found.set_exception(SandboxError("the sandbox has died"))

        if control.socket.fileno() < 0:
            raise SandboxError("the sandbox has died")
        loop.add_reader(control.socket, read)
        timer = loop.call_later(
            timeout,
            lambda: found.done() or found.set_exception(SandboxError(f"no answer from the sandbox in {timeout:g} s")),
        )
        descriptor = control.socket.fileno()
        try:
            return await found
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)


class _Lines:
    """JSON lines from a non-blocking socket. What comes may be untrusted: bounded, and objects only."""

    def __init__(self, socket_: socket.socket, longest: int = 2**20) -> None:
        self.socket = socket_
        self.longest = longest
        self.buffer = bytearray()

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come. Raises EOFError at the end, ValueError if it is not the protocol."""
        ended = False
        while True:
            try:
                data = self.socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            self.buffer += data
            if len(self.buffer) > self.longest:
                raise ValueError("a message is too long")
        *lines, rest = self.buffer.split(b"\n")
        self.buffer = bytearray(rest)
        messages = []
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")
            messages.append(message)
        if ended and not messages:
            raise EOFError
        return messages


class _Call:
    """One request on its way: sends it, gathers what is printed, and watches the clock until it is answered or dead.

    Without code it waits for the answer to a call that was abandoned.
    """

    def __init__(self, sandbox: PythonSandbox, number: int, code: str | None, timeout: float) -> None:
        vessel, control = sandbox._vessel, sandbox._control
        assert vessel is not None and control is not None and len(vessel.files) == 3
        self.sandbox, self.number, self.control = sandbox, number, control
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[dict[str, Any] | None] = self.loop.create_future()
        self.data, *self.pipes = vessel.files
        self.socket = socket.socket(fileno=os.dup(self.data))
        self.lines = _Lines(self.socket, longest=16 * sandbox.max_output + 4096)
        self.printed: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.flood = 0
        self.truncated = self.timed_out = False
        self.limit: Limit | None = None
        self.status: int | None = None
        self.timeout = timeout
        self.began = time.perf_counter()
        self.group = vessel.group
        self.used = self.group.cpu_seconds() if self.group else None
        self.hits = self.group.hits() if self.group else (0, 0)
        self.timers = [self.loop.call_later(timeout, self.interrupt)]
        if self.used is not None and sandbox.limits.cpu_seconds is not None:
            self.timers.append(self.loop.call_later(_CLOCK_SECONDS, self.look_at_clock))
        self.readers: list[int] = []
        self._read(self.socket.fileno(), self.read_reply)
        self._read(control.socket.fileno(), self.read_control)
        for pipe, kept in zip(self.pipes, self.printed, strict=True):
            self._read(pipe, lambda pipe=pipe, kept=kept: self.read_pipe(pipe, kept))
        self.request = b"" if code is None else json.dumps({"id": number, "code": code}).encode() + b"\n"

    def _read(self, descriptor: int, call: Callable[[], object]) -> None:
        self.loop.add_reader(descriptor, call)
        self.readers.append(descriptor)

    def detach(self) -> None:
        for timer in self.timers:
            timer.cancel()
        for descriptor in self.readers:
            self.loop.remove_reader(descriptor)
        self.loop.remove_writer(self.socket.fileno())
        self.readers.clear()
        self.socket.close()

    def finish(self, reply: dict[str, Any] | None) -> None:
        if not self.done.done():
            self.done.set_result(reply)

    # --- what comes back

    def send(self) -> None:
        try:
            while self.request:
                sent = self.socket.send(self.request[: 4 * _CHUNK])
                self.request = self.request[sent:]
        except (BlockingIOError, InterruptedError):
            self.loop.add_writer(self.socket.fileno(), self.send)
            return
        except OSError:
            self.request = b""  # it died: the readers will say so
        self.loop.remove_writer(self.socket.fileno())

    def read_reply(self) -> None:
        try:
            for message in self.lines.read():
                if message.get("id") == self.number:
                    self.finish(message)
                    return
        except EOFError:
            # Its own process has closed the socket: dead, or as good as. The zygote's word follows if it died.
            self.loop.remove_reader(self.socket.fileno())
            self.kill()
        except ValueError:
            self.kill()

    def read_control(self) -> None:
        try:
            for message in self.control.read():
                if message.get("op") == "exit" and message.get("serial") == self.sandbox._serial:
                    self.status = int(message["status"])
                    self.finish(None)
        except (EOFError, ValueError):
            self.finish(None)

    def read_pipe(self, pipe: int, kept: bytearray) -> bool:
        """Take one piece; True if there was one."""
        try:
            data = os.read(pipe, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self.loop.remove_reader(pipe)
            return False
        room = self.sandbox.max_output - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.truncated = True
            self.flood += len(data)
            if self.flood > _FLOOD_FACTOR * self.sandbox.max_output and self.limit is None:
                self.limit = "output"
                self.stop()
        return True

    # --- the clocks

    def interrupt(self) -> None:
        if self.limit is None:
            self.timed_out = True
            self.limit = "time"
        self.stop()

    def stop(self) -> None:
        """Interrupt now, kill soon."""
        self.sandbox._command("interrupt")
        self.timers.append(self.loop.call_later(_GRACE_SECONDS, self.kill))

    def kill(self) -> None:
        if not self.sandbox._command("kill"):
            self.finish(None)
        self.timers.append(self.loop.call_later(_CONTROL_SECONDS, self.give_up))

    def give_up(self) -> None:
        if self.sandbox._vessel is not None and not self.done.done():
            self.sandbox._vessel.kill()
        self.finish(None)

    def look_at_clock(self) -> None:
        budget = self.sandbox.limits.cpu_seconds
        now = self.group.cpu_seconds() if self.group else None
        if self.limit is None and budget is not None and now is not None and now - cast(float, self.used) > budget:
            self.limit = "cpu"
            self.stop()
        else:
            self.timers.append(self.loop.call_later(_CLOCK_SECONDS, self.look_at_clock))

    # --- the result

    async def outcome(self) -> SandboxResult:
        if self.request:
            self.send()
        reply = await self.done
        for pipe, kept in zip(self.pipes, self.printed, strict=True):
            for _ in range(16):  # all that was printed before the answer is in the pipe by now
                if not self.read_pipe(pipe, kept):
                    break
        seconds = time.perf_counter() - self.began
        if reply is None:
            self.sandbox._worker = False
        hits = (
            self.group.hits() if self.group and (reply is None or seconds > 0.005 or reply.get("error")) else self.hits
        )
        limit = self.limit
        if limit is None:
            told = reply.get("limit") if reply else None
            if hits[0] > self.hits[0]:
                limit = "memory"
            elif told in ("memory", "cpu", "disk", "processes"):
                limit = cast(Limit, told)
            elif hits[1] > self.hits[1]:
                limit = "processes"
        stdout, stderr = (_text(bytes(kept)) for kept in self.printed)
        value = error = kind = None
        if reply is None:
            error = _obituary(limit, self.status, self.timeout)
        else:
            value, error, kind = (_clean(reply.get(name)) for name in ("value", "error", "type"))
        most = 4 * self.sandbox.max_output
        return SandboxResult(
            stdout=stdout,
            stderr=stderr,
            value=value[:most] if value else value,
            error=error[-most:] if error else error,
            error_type=kind,
            seconds=seconds,
            truncated=self.truncated or bool(reply and reply.get("truncated")),
            timed_out=self.timed_out,
            died=reply is None,
            limit=limit,
        )


def _destroy_result(future: Any) -> None:
    """A launch whose caller was cancelled: end what it made."""
    if not future.cancelled() and future.exception() is None:
        future.result()[1].kill()


def _outcome(result: SandboxResult) -> tuple[object, ...]:
    return result.stdout, result.stderr, result.value, result.error_type, result.limit, result.truncated


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _clean(text: object) -> str | None:
    """Text from inside: any type, and halves of surrogate pairs that nothing later could encode."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def _obituary(limit: Limit | None, status: int | None, timeout: float) -> str:
    if limit == "time":
        return f"killed: it ran for more than {timeout:g} s and did not stop when it was interrupted"
    if limit is not None:
        return f"killed: it ran into the {limit} limit"
    if status is None:
        return "the sandbox died"
    if status < 0:
        return f"the interpreter was ended by signal {-status}"
    return f"the interpreter exited with status {status}"
