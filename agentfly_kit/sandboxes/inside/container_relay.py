"""The zygote of a container, which communicates with the host over the container's standard input and output.

`Relay` runs as the container's first process. `Relay` extends `Zygote` (zygote.py) by multiplexing the channels of
interpreters as frames (frames.py), which host/stream.py sends and receives on the host.
"""

from __future__ import annotations

import _socket
import json
import os
import select
import sys
import time
from typing import Any

from .frames import (
    CONTROL,
    DATA,
    ERR,
    MOST_TUNNELS,
    OUT,
    TUNNEL,
    USAGE,
    Channels,
    Tunnel,
    Tunnels,
    frame,
    frames,
    received,
)
from .kernel import PR_SET_NO_NEW_PRIVS, filter_calls, prctl
from .processes import activity, descendants
from .zygote import Zygote, listening_socket, run

_CHUNK = 65536  # equal to the capacity of a pipe
_FULL = 4 * _CHUNK  # number of unsent bytes above which code that prints is blocked
_USAGE_SECONDS = 0.2


class Relay(Zygote, Channels):
    """A zygote that relays data between its interpreter and the host on one thread, without blocking on the host."""

    def __init__(self) -> None:
        super().__init__(_socket.socket(_socket.AF_UNIX))  # never used: messages are sent as frames
        Channels.__init__(self)
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.unsent = bytearray()  # data not yet sent to the interpreter
        self.counts: tuple[int, ...] | None = None
        self.call_running = False
        self.usage_read = 0.0
        self.listener: _socket.socket | None = None  # listens on the port of an agent
        self.tunnels = Tunnels(self.outbox.extend)
        self.last_tunnel = 0

    def serve(self) -> None:
        wake = self.wake_on_signals()
        os.set_blocking(1, False)
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
            if self.listener is not None:
                poll.register(self.listener, select.POLLIN)
            for tunnel in self.tunnels.values():
                events = (select.POLLIN if room and not tunnel.ended else 0) | (
                    select.POLLOUT if tunnel.unsent else 0
                )
                if events:
                    poll.register(tunnel.socket, events)
            ready = dict(poll.poll(_USAGE_SECONDS * 1e3 if self.call_running else None))
            if self.call_running and time.monotonic() - self.usage_read > _USAGE_SECONDS:
                self.usage(always=True)
            if wake in ready:
                self.woken()
            for pipe in [pipe for pipe in self.pipes if pipe in ready]:
                self.read_pipe(pipe)
            if self.data is not None and self.data.fileno() in ready:
                self.relay_data(ready[self.data.fileno()])
            self.tunnels.relay(ready)
            if self.listener is not None and self.listener.fileno() in ready:
                self.accept(self.listener)
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
            elif channel == TUNNEL and serial in self.tunnels:
                self.tunnels.write(serial, piece)
        return bool(data)

    def flush(self) -> None:
        while self.outbox:
            try:
                sent = os.write(1, self.outbox[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.outbox.clear()  # the host has disconnected; the read loop will see EOF
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
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            if message["restrict"]:
                filter_calls(bytes.fromhex(message["restrict"]))  # in addition to the container engine's own filter
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
        elif message["op"] == "unlisten":
            self.close_port()
        super().handle(message)

    # --- the port of an agent

    def listen(self) -> int:
        self.close_port()
        self.listener = listening_socket()
        self.listener.setblocking(False)
        return int(self.listener.getsockname()[1])

    def accept(self, listener: _socket.socket) -> None:
        try:
            connection = _socket.socket(fileno=listener._accept()[0])  # type: ignore[attr-defined]
        except OSError:
            return  # the agent has already closed its connection
        if len(self.tunnels) >= MOST_TUNNELS:
            connection.close()
            return
        self.last_tunnel += 1
        self.tunnels[self.last_tunnel] = Tunnel(connection)

    def close_port(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.tunnels.close()

    # --- the interpreter

    def close_in_child(self) -> None:
        super().close_in_child()
        self.close_ends()

    def close_ends(self) -> None:
        self.close_port()
        self.close_channels()
        self.unsent.clear()

    def forward(self) -> None:
        assert self.data is not None
        try:
            while self.unsent:
                del self.unsent[: self.data.send(self.unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # the interpreter died; its exit is reported separately

    def read_pipe(self, pipe: int) -> bool:
        """Read and forward one chunk of printed output. Return True if there was output."""
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
        """Forward the content of the pipes, so that output is sent before the answer or exit that follows it."""
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
        data = received(self.data)
        if data is None:
            return
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
        # The order is that of LimitHits in host/cgroups.py. cgroup v1 does not report which limit was exceeded.
        killed = cgroup_counter("memory/memory.oom_control", "memory.events", "oom_kill")
        own = killed if os.path.exists("/sys/fs/cgroup/memory") else cgroup_counter("", "memory.events", "oom")
        counts = own, killed, cgroup_counter("pids/pids.events", "pids.events", "max")
        if counts != self.counts or always:
            self.counts = counts
            used, states = activity(descendants(os.getpid()))
            used += activity([os.getpid()])[0]  # includes the time of processes that have ended
            report = {"hits": counts, "cpu": processor_seconds(), "used": used, "states": states}
            self.send(USAGE, json.dumps(report).encode())


def cgroup_counter(first: str, second: str, name: str) -> int:
    """Read a counter of this container's control group from the cgroup v1 or v2 file; 0 if neither is visible."""
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
    """Return the CPU time used so far by all processes of this container; None if unknown."""
    for path in ("cpuacct/cpuacct.usage", "cpu,cpuacct/cpuacct.usage"):
        try:
            with open(f"/sys/fs/cgroup/{path}") as file:
                return int(file.read()) / 1e9
        except (OSError, ValueError):
            continue
    used = cgroup_counter("cpu.stat", "cpu.stat", "usage_usec")
    return used / 1e6 if used else None


def writable(keep: list[str]) -> list[str]:
    """Return all writable mount points, including those added by the container engine, except those in `keep`."""
    found = []
    with open("/proc/self/mounts", errors="replace") as mounts:
        for line in mounts:
            _, place, kind, options, *_ = line.split(" ")
            if "rw" not in options.split(",") or kind in ("proc", "sysfs", "devpts", "cgroup", "cgroup2"):
                continue
            if any(place == kept or place.startswith(kept + "/") for kept in keep):
                continue
            if os.path.isdir(place) and os.access(place, os.W_OK):
                found.append(place)
    return found


def main() -> None:
    run(Relay())
