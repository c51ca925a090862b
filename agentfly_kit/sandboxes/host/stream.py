"""The stream between the host and the zygote of a container, and the counters that the zygote reports."""

from __future__ import annotations

import _socket
import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..inside.frames import (
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
from .cgroups import LimitHits, Usage

_CHUNK = 65536
_DRAIN_SECONDS = 1.0  # maximum wait for the last output after the container has ended


class ContainerUsage(Usage):
    """Counters of a container's control group, as last reported by its zygote."""

    killed_is_own = True

    def __init__(self) -> None:
        self.hits = LimitHits()
        self.seconds: float | None = None
        self.used = 0.0  # CPU time summed over the listed processes, in steps of 10 ms
        self.states = ""
        self.is_new = False  # True if the zygote has reported since the last call of `activity`

    def limit_hits(self) -> LimitHits:
        return self.hits

    def cpu_seconds(self) -> float | None:
        return self.seconds

    def activity(self, pid: int) -> tuple[float | None, str] | None:
        is_new, self.is_new = self.is_new, False
        return (self.used if self.seconds is None else self.seconds, self.states) if is_new else None


class Stream(Channels):
    """A thread that tunnels a zygote's protocol through a connection to the container's standard input and output.

    As with a local zygote, the host sends commands and the channels of each new interpreter over the socket `control`.
    """

    def __init__(self, connection: socket.socket, control: socket.socket, usage: ContainerUsage) -> None:
        super().__init__()
        self.connection, self.control, self.usage = connection, control, usage
        control.setblocking(False)
        self.thread = threading.Thread(target=self._serve, name="agentfly-stream", daemon=True)
        self.ended = False
        self.stderr_tail = bytearray()
        self._serial = 0
        self._commands = b""
        self._received_fds: list[int] = []
        self._raw = bytearray()  # received bytes, with the container engine's headers
        self._inbox = bytearray()
        self._outgoing: deque[tuple[int, bytes]] = deque()  # (channel, data still to be delivered), in order
        # Called on this thread with each connection to the port of an agent in the container.
        self.accept: Callable[[socket.socket], object] | None = None
        self._tunnels = Tunnels(connection.sendall)
        self._known_tunnels: set[int] = set()

    def boot(self, files: Sequence[Path]) -> None:
        """Send the source files of the program that runs inside the sandbox."""
        for file in files:
            source = file.read_bytes()
            self.connection.sendall(b"%d\n" % len(source) + source)

    def _serve(self) -> None:
        try:
            self._relay()
        except OSError:
            pass  # one of the two ends was closed
        finally:
            self.ended = True
            self._tunnels.close()
            self.close_channels()
            for each in (self.connection, self.control):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _relay(self) -> None:
        over = False
        while not over or self._outgoing:
            events = {self.control.fileno(): select.POLLIN}
            blocked = self._blocked()
            if blocked is None and not over:
                events[self.connection.fileno()] = select.POLLIN
            if self.data is not None and not over:
                events[self.data.fileno()] = select.POLLIN
            if blocked is not None:
                events[blocked] = events.get(blocked, 0) | select.POLLOUT
            for tunnel in () if over else self._tunnels.values():
                events[tunnel.socket.fileno()] = select.POLLIN | (select.POLLOUT if tunnel.unsent else 0)
            poll = select.poll()
            # Register each file once, because a second registration would replace the events of the first.
            for file, wanted in events.items():
                poll.register(file, wanted)
            ready = dict(poll.poll(_DRAIN_SECONDS * 1e3 if over else None))
            if over and not ready:
                return
            if ready.get(self.control.fileno(), 0) & ~select.POLLOUT and not self._command():
                return
            if self.data is not None and self.data.fileno() in ready and not over:
                self._forward()
            self._tunnels.relay(ready)
            if self.connection.fileno() in ready:
                over = not self._receive()
            self._deliver()

    # --- to the container

    def _command(self) -> bool:
        """Forward commands from the host to the zygote. Return False if the host has closed the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, _CHUNK, 16)
        except ConnectionError:
            return False
        self._received_fds += descriptors
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["op"] == "fresh":
                self._tunnels.close()
                self.close_channels()
                given, self._received_fds = self._received_fds[:3], self._received_fds[3:]
                self.data = socket.socket(fileno=given[0])
                self.data.setblocking(False)
                self.pipes = {given[1]: OUT, given[2]: ERR}
                for pipe in self.pipes:
                    os.set_blocking(pipe, False)
                self._serial = message["serial"]
                # Drop unread data of the previous interpreter; keep messages from the zygote.
                self._outgoing = deque(each for each in self._outgoing if each[0] == CONTROL)
            elif message["op"] == "unlisten":
                self._tunnels.close()
            self.connection.sendall(frame(CONTROL, self._serial, line))
        return bool(data)

    def _forward(self) -> None:
        assert self.data is not None
        data = received(self.data)
        if data is None:
            return
        if data:
            self.connection.sendall(frame(DATA, self._serial, data))
        else:
            self.data.close()
            self.data = None

    # --- from the container

    def _receive(self) -> bool:
        """Read from the container. Return False when the container has ended."""
        data = self.connection.recv(_CHUNK)
        self._raw += data
        while len(self._raw) >= 8:
            kind, length = self._raw[0], struct.unpack_from("!I", self._raw, 4)[0]
            if len(self._raw) < 8 + length:
                break
            piece = bytes(self._raw[8 : 8 + length])
            del self._raw[: 8 + length]
            if kind == 1:
                self._inbox += piece
            else:
                self.stderr_tail = (self.stderr_tail + piece)[-4096:]
        for channel, serial, piece in frames(self._inbox):
            if channel == USAGE:
                usage = json.loads(piece)
                self.usage.hits = LimitHits(*map(int, usage["hits"]))
                self.usage.seconds, self.usage.used = usage["cpu"], float(usage["used"])
                self.usage.states = str(usage["states"])
                self.usage.is_new = True
            elif channel == CONTROL:
                self._outgoing.append((CONTROL, piece + b"\n"))
            elif channel == TUNNEL:
                self._receive_tunnel(serial, piece)
            elif serial == self._serial:
                self._outgoing.append((channel, piece))
        return bool(data)

    # --- the port of an agent

    def _receive_tunnel(self, number: int, piece: bytes) -> None:
        accept = self.accept  # another thread may set `self.accept` to None
        if number not in self._known_tunnels:  # data may arrive in another order than connections were opened
            self._known_tunnels.add(number)
            if accept is None or len(self._tunnels) >= MOST_TUNNELS:
                self.connection.sendall(frame(TUNNEL, number, b""))
                return
            own, other = socket.socketpair()
            self._tunnels[number] = Tunnel(own)
            try:
                accept(other)
            except RuntimeError:  # the event loop is closed
                other.close()
        if number in self._tunnels:
            self._tunnels.write(number, piece)

    def _target(self, channel: int) -> int | _socket.socket | None:
        if channel == CONTROL:
            return self.control
        if channel == DATA:
            return self.data
        return next((pipe for pipe, printed in self.pipes.items() if printed == channel), None)

    def _blocked(self) -> int | None:
        """Return the file descriptor that must become writable before more data can be delivered."""
        if not self._outgoing:
            return None
        target = self._target(self._outgoing[0][0])
        return target if isinstance(target, int) or target is None else target.fileno()

    def _deliver(self) -> None:
        while self._outgoing:
            channel, piece = self._outgoing[0]
            target = self._target(channel)
            try:
                if target is None:
                    sent = len(piece)
                elif isinstance(target, int):
                    sent = os.write(target, piece)
                elif piece:
                    sent = target.send(piece)
                else:  # the interpreter closed its end
                    target.shutdown(socket.SHUT_WR)
                    sent = 0
            except BlockingIOError:
                return
            except OSError:
                sent = len(piece)  # the reader has closed this channel
            if sent < len(piece):
                self._outgoing[0] = (channel, piece[sent:])
            else:
                self._outgoing.popleft()
