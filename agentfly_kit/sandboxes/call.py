"""One call in a sandbox: sending the request, collecting output, enforcing limits and building the result."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .._async import limits
from ..errors import SandboxError
from .result import Limit, SandboxResult

if TYPE_CHECKING:
    from .sandbox import Sandbox

CONTROL_SECONDS = 5.0  # a sandbox that takes longer to reset is considered broken
GRACE_SECONDS = 0.5  # time between the interrupt, which preserves variables, and the kill
_POLL_SECONDS = 0.25  # interval between checks of a running call's CPU time
# A call whose processes are held up may take at most its time limit times `_HELD_UP_FACTOR` plus `_HELD_UP_SECONDS`. A
# longer call is stopped, and its chain is not scored.
_HELD_UP_FACTOR, _HELD_UP_SECONDS = 10, 30.0
_MAX_OUTPUT_FACTOR = 256  # stop a call that prints more than this multiple of max_output
_CHUNK = 65536
_ENDED = "the code terminated the sandbox"
ENDED_BY_CODE = SandboxResult(error=_ENDED, died=True, files_lost=True)
OUT_OF_MEMORY = "the machine ran out of memory and killed a process of the sandbox, which was below its own limit"


class JSONLines:
    """Read untrusted JSON objects, one per line and of limited size, from a non-blocking socket."""

    def __init__(self, source: socket.socket, max_bytes: int = 2**20) -> None:
        self.socket = source
        self.max_bytes = max_bytes
        self.buffer = bytearray()
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        """Return the messages received since the last call. Raises EOFError at the end, ValueError for invalid data."""
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
            try:
                message = json.loads(line)
            except RecursionError:
                raise ValueError("a message is nested too deeply") from None
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")
            messages.append(message)
        return messages


class Watch:
    """Callbacks on an event loop that wait for a message, which becomes the result of the future `done`."""

    def __init__(self, watches: set[Watch]) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[dict[str, Any] | None] = self.loop.create_future()
        self._files: set[int] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._watches = watches  # all active watches of the sandbox
        watches.add(self)

    def on_readable(self, file: int, call: Callable[[], object]) -> None:
        """Call a function whenever a file descriptor is readable."""
        self.loop.add_reader(file, call)
        self._files.add(file)

    def remove(self, file: int) -> None:
        if file in self._files:
            self._files.discard(file)
            self.loop.remove_reader(file)
            self.loop.remove_writer(file)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        self._timers.append(self.loop.call_later(seconds, call))

    def finish(self, message: dict[str, Any] | None) -> None:
        """Set the result of the future `done`, unless it already has one."""
        if not self.done.done():
            self.done.set_result(message)

    def stop(self) -> None:
        """Remove all file callbacks and timers, and set the result of `done` to None if it has none. Idempotent."""
        self._watches.discard(self)
        if self.loop.is_closed():
            return
        for file in list(self._files):
            self.remove(file)
        for timer in self._timers:
            timer.cancel()
        self.finish(None)


class Call(Watch):
    """A running call, which sends a request and collects output until the interpreter replies, exits or is killed."""

    def __init__(self, sandbox: Sandbox, request: bytes, timeout: float) -> None:
        super().__init__(sandbox._watches)
        handle, control, replies = sandbox._handle, sandbox._control, sandbox._replies
        assert handle is not None and control is not None and replies is not None
        self.sandbox, self.control, self.replies = sandbox, control, replies
        self.number = sandbox._nonce
        self.request = request  # the part of the request that has not been sent yet
        self.timeout = timeout
        self.pipes = handle.pipes
        self.printed = (bytearray(), bytearray())
        self.discarded = 0
        self.truncated = self.timed_out = False
        # True if the interpreter has replied, even if the caller was cancelled before receiving the reply
        self.answered = False
        # True if the interpreter has sent something other than replies, or closed its socket
        self.violated = False
        self.limit: Limit | None = None
        self.status: int | None = None
        self.began = time.perf_counter()
        self.usage = handle.usage
        self.cpu_before = self.usage.cpu_seconds()
        # `own` is the time in seconds that the code itself has used until `sampled_at`; `unclear` is the time during
        # which the code may have stopped itself.
        self.own, self.unclear, self.sampled_at, self.cpu_sampled = 0.0, 0.0, self.began, self.cpu_before
        # True if the call was stopped although its code had not used up its time
        self.held_up = False
        self.on_readable(replies.socket.fileno(), self.read_reply)
        self.on_readable(control.socket.fileno(), self.read_control)
        for pipe, kept in zip(self.pipes, self.printed, strict=True):
            self.on_readable(pipe, functools.partial(self.read_pipe, pipe, kept))
        self.after_own(timeout, self.on_timeout)
        # Poll even without a CPU limit: the event loop handles the interrupts of a notebook only when a timer wakes it.
        self.after(_POLL_SECONDS, self.poll)

    # --- input and output

    def send(self) -> None:
        file = self.replies.socket.fileno()
        try:
            while self.request:
                sent = self.replies.socket.send(self.request[: 4 * _CHUNK])
                self.request = self.request[sent:]
        except (BlockingIOError, InterruptedError):
            self.loop.add_writer(file, self.send)
            return
        except OSError:
            # The interpreter has exited, which is handled when the sockets are read.
            self.request = b""
        self.loop.remove_writer(file)

    def read_reply(self) -> None:
        try:
            for message in self.replies.read():
                if message.get("id") == self.number:
                    self.answered = True
                    self.finish(message)
                    return
        except (EOFError, ValueError):
            # The interpreter died (its parent, the zygote, reports it), closed the socket, or violated the protocol.
            self.remove(self.replies.socket.fileno())
            if not self.replies.ended:
                # In a container, the exit is reported only after all data from the interpreter has been read.
                self.on_readable(self.replies.socket.fileno(), self.discard_replies)
            self.violated = True
            if not self.done.done():
                self.kill()

    def discard_replies(self) -> None:
        try:
            if self.replies.socket.recv(_CHUNK):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.remove(self.replies.socket.fileno())

    def read_control(self) -> None:
        try:
            for message in self.control.read():
                if message.get("op") == "exit" and message.get("serial") == self.sandbox._serial:
                    self.status = int(message["status"])
                    self.sandbox._interpreter_ended(self.status)
                    if not self.done.done() and not self.violated and self.replies.socket.fileno() in self._files:
                        # The interpreter may have sent a valid reply before it exited.
                        self.read_reply()
                    self.finish(None)
        except EOFError:
            self.remove(self.control.socket.fileno())
            self.finish(None)

    def read_pipe(self, pipe: int, kept: bytearray, size: int = _CHUNK) -> int:
        """Read at most `size` bytes of output. Return the number of bytes read."""
        try:
            data = os.read(pipe, size)
        except (BlockingIOError, InterruptedError):
            return 0
        if not data:
            self.remove(pipe)
            return 0
        room = self.sandbox.max_output - len(kept)
        kept += data[:room]
        if len(data) > room:
            self.truncated = True
            self.discarded += len(data)
            if self.discarded > _MAX_OUTPUT_FACTOR * self.sandbox.max_output:
                self.interrupt("output")
        return len(data)

    # --- limits

    def sample(self) -> None:
        """Add the time since the last sample to `own`, or only the CPU time if the processes were held up.

        A busy machine must not turn a correct answer into a timeout. Time in which the code sleeps or waits does count.
        """
        now, report = time.perf_counter(), self.usage.activity(self.sandbox.pid or 0)
        elapsed = now - self.sampled_at
        if report is None:  # the report from a container's zygote has not arrived yet
            limits.extend(self.sampled_at + 2 * _POLL_SECONDS, now)
            return
        cpu, states = report
        if set("RDTt!") & set(states):  # ready to run, waiting for a disk, or stopped
            used = 0.0 if cpu is None or self.cpu_sampled is None else cpu - self.cpu_sampled
            passed = min(elapsed, max(0.0, used))
            self.unclear += 0.0 if set("R!") & set(states) else elapsed - passed
            limits.extend(now - (elapsed - passed), now)  # also extend the tool's time limit
        else:
            # A late sample means that this process itself was held up.
            passed = min(elapsed, 2 * _POLL_SECONDS)
        self.own += passed
        self.sampled_at, self.cpu_sampled = now, cpu

    def after_own(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function after the code has used another `seconds` seconds. Kill code that is held up for too long."""
        end, last = self.own + seconds, time.perf_counter() + _HELD_UP_FACTOR * seconds + _HELD_UP_SECONDS

        def check() -> None:
            if self.replies.socket.fileno() in self._files:
                self.read_reply()  # the reply may have arrived while this process was held up
            if self.done.done():
                return
            self.sample()
            if self.own > end - 0.001:
                call()
            elif time.perf_counter() < last:
                self.after(max(end - self.own, 0.01), check)
            else:
                # Count `unclear` as used: otherwise, a policy could avoid a bad reward by stopping its own process.
                self.held_up = self.limit is None and self.own + self.unclear < end
                self.timed_out |= self.limit is None
                self.limit = self.limit or "time"
                self.kill()

        self.after(seconds, check)

    def on_timeout(self) -> None:
        self.timed_out = self.limit is None
        self.interrupt("time")

    def poll(self) -> None:
        self.sample()
        budget, before, now = self.sandbox.limits.cpu_seconds, self.cpu_before, self.cpu_sampled
        if budget is not None and before is not None and now is not None and now - before > budget:
            self.interrupt("cpu")
        if self.limit is None:
            self.after(_POLL_SECONDS, self.poll)

    def interrupt(self, limit: Limit) -> None:
        """Interrupt the code, and kill it if it still runs after a grace period. Repeated calls have no effect."""
        if self.limit is None:
            self.limit = limit
            self.sandbox._interrupt()
            self.after_own(GRACE_SECONDS, self.kill)

    def kill(self) -> None:
        if self.sandbox._command("kill"):
            self.after(CONTROL_SECONDS, self.on_kill_timeout)
        else:
            self.finish(None)

    def on_kill_timeout(self) -> None:
        if not self.done.done():
            self.sandbox._drop()

    # --- the result

    async def outcome(self) -> SandboxResult:
        """Wait for the end of the call and return its result."""
        self.send()
        try:
            return self.result(await self.done)
        finally:
            self.stop()
            self.sandbox._own_seconds += self.own + min(time.perf_counter() - self.sampled_at, 2 * _POLL_SECONDS)

    def result(self, reply: dict[str, Any] | None) -> SandboxResult:
        """Return the result of the call. `reply` is None if the interpreter exited without a reply."""
        sandbox = self.sandbox
        if not sandbox._closed and sandbox.alive:
            for pipe, kept in zip(self.pipes, self.printed, strict=True):
                # The pipe now contains all output printed before the reply. Background processes may print more.
                left = _readable_bytes(pipe)
                while left > 0 and (read := self.read_pipe(pipe, kept, min(left, _CHUNK))):
                    left -= read
        seconds = time.perf_counter() - self.began
        reported = self.reported_limit(reply, seconds)
        limit = self.limit or reported
        files_lost = False
        if reply is None:
            sandbox._has_interpreter, sandbox._unreported = False, None
            if not sandbox._closed and not sandbox.alive:
                # The interpreter's parent, the zygote, has exited too. An exceeded limit can cause this, for example by
                # a fork bomb that could not be killed. Otherwise, the zygote may have been killed from outside.
                if limit is None:
                    sandbox._check_not_ended_from_outside()
                sandbox._drop()
                files_lost = True
            if self.held_up:
                raise SandboxError(
                    f"the code was killed after {seconds:.0f} s, before it had used its {self.timeout:g} s: its "
                    "processes were stopped, or the machine was busy"
                )
        fields = reply or {}
        value, error, error_type = (_encodable(fields.get(name)) for name in ("value", "error", "type"))
        if reply is None:
            error = death_message(limit, self.status, self.timeout, sandbox._closed)
        # The sandbox has already shortened the texts, unless the code inside forged the reply.
        max_chars = 4 * sandbox.max_output
        return SandboxResult(
            stdout=self.printed[0].decode("utf-8", "replace"),
            stderr=self.printed[1].decode("utf-8", "replace"),
            value=None if value is None else value[:max_chars],
            error=None if error is None else error[-max_chars:],
            error_type=error_type,
            seconds=seconds,
            truncated=self.truncated or bool(fields.get("truncated")),
            timed_out=self.timed_out,
            died=reply is None,
            limit=limit,
            files_lost=files_lost,
        )

    def reported_limit(self, reply: dict[str, Any] | None, seconds: float) -> Limit | None:
        """Return the exceeded limit, or None. Raises SandboxError if the machine ran out of memory."""
        hits = before = self.sandbox._limit_hits
        if reply is None or seconds > 0.002 or reply.get("error"):
            hits = self.sandbox._limit_hits = self.usage.limit_hits()
        reported = reply.get("limit") if reply else None
        if hits.killed > before.killed:
            if hits.memory > before.memory:
                return "memory"
            if self.usage.killed_is_own or (reply is None and self.status in (None, -signal.SIGKILL)):
                raise SandboxError(OUT_OF_MEMORY)
        if reported in ("memory", "cpu", "disk", "processes"):
            return cast(Limit, reported)
        return "processes" if hits.processes > before.processes else None


def _readable_bytes(pipe: int) -> int:
    import fcntl  # not available on Windows, where this module must be importable
    import termios

    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _encodable(text: object) -> str | None:
    """Replace lone surrogates, which cannot be encoded, in untrusted text. Return None if it is not a string."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def death_message(limit: Limit | None, status: int | None, timeout: float = 0.0, closed: bool = False) -> str:
    """Return the reason why the interpreter ended. `status` is its exit status, or None if unknown."""
    if closed:
        return "the sandbox was closed"
    if limit == "time":
        return f"killed: time limit of {timeout:g} s exceeded"
    if limit is not None:
        return f"killed: {limit} limit exceeded"
    if status is None:
        return _ENDED
    if status < 0:
        return f"the interpreter was terminated by signal {-status}"
    return f"the interpreter exited with status {status}"
