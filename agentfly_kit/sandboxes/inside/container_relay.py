"""The zygote of a container, whose only way to the host is the container's standard input and output.

Runs inside, as the container's first process: zygote.py's zygote, with the channels of its interpreters carried as
frames over that one stream. It imports only the standard library and knows neither the package nor the host;
host/container.py sends both files in as text.

A frame, in both directions: channel (1 byte), serial of the interpreter (4), length (4), then as many bytes. CONTROL is
one JSON message of the zygote's protocol; DATA is a piece of an interpreter's own socket, an empty one its end; OUT and
ERR are what was printed; USAGE is JSON, what the container's control group has counted.
"""

from __future__ import annotations

import _socket
import ctypes
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from .zygote import Zygote, prctl

CONTROL, DATA, OUT, ERR, USAGE = range(5)
HEAD = struct.Struct("!BII")
_CHUNK = 65536  # also what a pipe holds
_FULL = 4 * _CHUNK  # as much waits to be sent; what prints more waits itself
_USAGE_SECONDS = 0.2
_PR_NO_NEW_PRIVS, _PR_SECCOMP, _FILTER = 38, 22, 2


def frame(channel: int, serial: int, data: bytes) -> bytes:
    return HEAD.pack(channel, serial, len(data)) + data


def frames(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Take the whole frames from the front of a buffer."""
    while len(buffer) >= HEAD.size:
        channel, serial, length = HEAD.unpack_from(buffer)
        if len(buffer) < HEAD.size + length:
            return
        data = bytes(buffer[HEAD.size : HEAD.size + length])
        del buffer[: HEAD.size + length]
        yield channel, serial, data


class Relay(Zygote):
    """A zygote that stands between its interpreter and the stream. One thread; nothing in it waits for the stream."""

    def __init__(self) -> None:
        super().__init__(_socket.socket(_socket.AF_UNIX))  # never used: frames stand for it
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.unsent = bytearray()  # for the interpreter
        self.data: _socket.socket | None = None  # our ends of the interpreter's channels
        self.pipes: dict[int, int] = {}  # descriptor -> OUT or ERR
        self.wake_pipe: tuple[int, ...] = ()
        self.counts: tuple[int, int] | None = None
        self.call_running = False  # a call is under way
        self.usage_read = 0.0
        os.register_at_fork(after_in_child=self.close_in_child)

    def serve(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        wake, waker = self.wake_pipe = os.pipe()
        for descriptor in (wake, waker, 1):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            poll.register(wake, select.POLLIN)
            if self.outbox:
                poll.register(1, select.POLLOUT)
            room = len(self.outbox) < _FULL
            if self.data is not None:
                events = (select.POLLIN if room else 0) | (select.POLLOUT if self.unsent else 0)
                if events:
                    poll.register(self.data, events)
            for pipe in self.pipes if room else ():
                poll.register(pipe, select.POLLIN)
            ready = dict(poll.poll(_USAGE_SECONDS * 1e3 if self.call_running else None))
            if self.call_running and time.monotonic() - self.usage_read > _USAGE_SECONDS:
                self.usage(always=True)
            if wake in ready:
                try:
                    os.read(wake, 4096)
                except BlockingIOError:
                    pass
                self.reap()
            for pipe in [pipe for pipe in self.pipes if pipe in ready]:
                self.read_pipe(pipe)
            if self.data is not None and self.data.fileno() in ready:
                self.relay_data(ready[self.data.fileno()])
            if 0 in ready and not self.receive():
                return
            self.flush()

    # --- the stream

    def receive(self) -> bool:
        data = os.read(0, _CHUNK)
        self.inbox += data
        for channel, serial, piece in frames(self.inbox):
            if channel == CONTROL:
                self.handle(json.loads(piece))
            elif channel == DATA and serial == self.serial and self.data is not None:
                self.call_running = True
                self.unsent += piece
                self.forward()
        return bool(data)

    def flush(self) -> None:
        while self.outbox:
            try:
                sent = os.write(1, self.outbox[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.outbox.clear()  # nobody listens: the end of the input says so
                return
            del self.outbox[:sent]

    def send(self, channel: int, data: bytes) -> None:
        self.outbox += frame(channel, self.serial, data)

    def send_message(self, **message: object) -> None:
        if message["op"] == "exit":
            self.drain()
            self.call_running = False
        if message["op"] in ("exit", "fresh"):
            self.usage(always=True)
        self.send(CONTROL, json.dumps(message).encode())

    def handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "settings":
            message["executable"] = sys.executable
            message["wipe"] = writable(message["keep"])
            restrict(bytes.fromhex(message["restrict"]))
        elif message["op"] == "fresh":
            self.close_ends()
            self.call_running = False
            self.data, data = _socket.socketpair()
            self.data.setblocking(False)
            (out, out_inside), (err, err_inside) = os.pipe(), os.pipe()
            self.pipes = {out: OUT, err: ERR}
            for pipe in self.pipes:
                os.set_blocking(pipe, False)
            self.descriptors = [data.detach(), out_inside, err_inside]
        super().handle(message)

    # --- the interpreter

    def close_in_child(self) -> None:
        """In a forked child: what is ours must not be the interpreter's."""
        self.close_ends()
        for descriptor in self.wake_pipe:
            os.close(descriptor)
        self.wake_pipe = ()

    def close_ends(self) -> None:
        if self.data is not None:
            self.data.close()
            self.data = None
        pipes, self.pipes = self.pipes, {}
        for pipe in pipes:
            os.close(pipe)
        self.unsent.clear()

    def forward(self) -> None:
        assert self.data is not None
        try:
            while self.unsent:
                del self.unsent[: self.data.send(self.unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # it died: the zygote's word follows

    def read_pipe(self, pipe: int) -> bool:
        """One piece of what was printed; True if there was one."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.send(self.pipes[pipe], data)
            return True
        del self.pipes[pipe]
        os.close(pipe)
        return False

    def drain(self) -> None:
        """What is in the pipes now, which is all that was printed before the answer or the death that comes next."""
        for pipe in list(self.pipes):
            left = _CHUNK
            while left > 0 and pipe in self.pipes:
                before = len(self.outbox)
                if not self.read_pipe(pipe):
                    break
                left -= len(self.outbox) - before

    def relay_data(self, events: int) -> None:
        assert self.data is not None
        if events & select.POLLOUT:
            self.forward()
        if not events & ~select.POLLOUT:
            return
        try:
            data = self.data.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.drain()
        if b"\n" in data:
            self.call_running = False
            self.usage()
        self.send(DATA, data)
        if not data:
            self.data.close()
            self.data = None

    def usage(self, always: bool = False) -> None:
        self.usage_read = time.monotonic()
        counts = (
            cgroup_counter("memory/memory.oom_control", "memory.events", "oom_kill"),
            cgroup_counter("pids/pids.events", "pids.events", "max"),
        )
        if counts != self.counts or always:
            self.counts = counts
            self.send(USAGE, json.dumps({"hits": counts, "cpu": processor_seconds()}).encode())


def cgroup_counter(first: str, second: str, name: str) -> int:
    """A counter of this container's control group, where it can be seen; v1's file, v2's file."""
    for path in (first, second):
        try:
            with open(f"/sys/fs/cgroup/{path}") as file:
                for line in file:
                    if line.startswith(f"{name} "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0


def processor_seconds() -> float | None:
    """Of all processes of this container so far."""
    for path in ("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage"):
        try:
            with open(f"/sys/fs/cgroup/{path}") as file:
                return int(file.read()) / 1e9
        except (OSError, ValueError):
            continue
    used = cgroup_counter("cpu.stat", "cpu.stat", "usage_usec")
    return used / 1e6 if used else None


def writable(keep: list[str]) -> list[str]:
    """Every mounted folder that can be written, but the user's own: whatever the engine left open is emptied too."""
    found = []
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, place, kind, options, *_ = line.split(" ")
            inside = any(place == kept or place.startswith(kept + "/") for kept in keep)
            if (
                (
                    "rw" in options.split(",")
                    and kind not in ("proc", "sysfs", "devpts", "cgroup", "cgroup2")
                    and not inside
                )
                and os.path.isdir(place)
                and os.access(place, os.W_OK)
            ):
                found.append(place)
    return found


def restrict(program: bytes) -> None:
    """A system-call filter beside the engine's own, from here on and for all that is started from here."""
    prctl(_PR_NO_NEW_PRIVS, 1)
    if not program:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    text = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and where they are
    head = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(text))
    none = ctypes.c_long(0)
    if libc.prctl(_PR_SECCOMP, ctypes.c_long(_FILTER), head, none, none):
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")


def main() -> None:
    relay = Relay()
    try:
        relay.serve()
    except Exception:
        import traceback

        traceback.print_exc()  # for the host, which waits for an answer
        sys.stderr.flush()
    finally:
        try:
            relay.kill_all()
        finally:
            os._exit(0)
