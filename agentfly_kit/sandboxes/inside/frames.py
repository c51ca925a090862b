"""Frames that carry the channels of a container's interpreters over its standard input and output.

A frame, in either direction, consists of the channel (1 byte), the serial number of the interpreter (4 bytes), the
length of the data (4 bytes) and the data. CONTROL is one JSON message of the zygote's protocol; DATA is a chunk of an
interpreter's socket, and an empty chunk means that the socket was closed; OUT and ERR are printed output; USAGE is JSON
with the counters of the container's control group; TUNNEL is a chunk of a connection to the port that an agent uses,
with the number of the connection in place of the serial number, and an empty chunk means that it was closed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

CONTROL, DATA, OUT, ERR, USAGE, TUNNEL = range(6)
HEAD = struct.Struct("!BII")
MOST_TUNNELS = 32
_MOST_UNSENT = 2**22  # a tunnel with more unsent bytes is closed
_CHUNK = 65536


def frame(channel: int, serial: int, data: bytes) -> bytes:
    return HEAD.pack(channel, serial, len(data)) + data


def frames(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Remove complete frames from the front of a buffer and yield them."""
    while len(buffer) >= HEAD.size:
        channel, serial, length = HEAD.unpack_from(buffer)
        if len(buffer) < HEAD.size + length:
            return
        data = bytes(buffer[HEAD.size : HEAD.size + length])
        del buffer[: HEAD.size + length]
        yield channel, serial, data


def received(end: _socket.socket) -> bytes | None:
    """Return the data that a socket has received, b"" if it was closed, or None if no data has arrived."""
    try:
        return end.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Channels:
    """Ends of an interpreter's channels in another process: the data socket, and the pipes of printed output."""

    def __init__(self) -> None:
        self.data: _socket.socket | None = None
        self.pipes: dict[int, int] = {}  # descriptor -> OUT or ERR

    def close_channels(self) -> None:
        pipes, self.pipes = self.pipes, {}
        for pipe in pipes:
            os.close(pipe)
        if self.data is not None:
            self.data.close()
            self.data = None


class Tunnel:
    """One end of a tunnelled connection: a non-blocking socket, and the data not yet sent to it."""

    def __init__(self, end: _socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self.unsent = bytearray()
        self.ended = False  # the other end of the tunnel was closed

    def write(self, data: bytes) -> bool:
        """Add the data of a frame and call `flush`. Empty data closes the tunnel once the rest has been sent."""
        self.unsent += data
        self.ended = self.ended or not data
        return self.flush()

    def flush(self) -> bool:
        """Send as much data as the socket accepts. Return False if the tunnel must be closed."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent[:_CHUNK])]
        except BlockingIOError:
            return len(self.unsent) <= _MOST_UNSENT
        except OSError:
            return False
        return not self.ended


class Tunnels(dict[int, Tunnel]):
    """Tunnelled connections by number. `send` sends a frame to the other end."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        super().__init__()
        self.send = send

    def write(self, number: int, data: bytes) -> None:
        """Pass on the data of a frame."""
        if not self[number].write(data):
            self.drop(number)

    def relay(self, ready: dict[int, int]) -> None:
        """Send and receive data on the sockets that are ready according to `select.poll`."""
        for number, tunnel in list(self.items()):
            if tunnel.socket.fileno() in ready:
                data = received(tunnel.socket) if tunnel.flush() else b""
                if data:
                    self.send(frame(TUNNEL, number, data))
                elif data is not None:
                    self.drop(number)

    def drop(self, number: int) -> None:
        """Close a connection and report this to the other end."""
        self.pop(number).socket.close()
        self.send(frame(TUNNEL, number, b""))

    def close(self) -> None:
        """Close all connections without a report."""
        for tunnel in self.values():
            tunnel.socket.close()
        self.clear()
