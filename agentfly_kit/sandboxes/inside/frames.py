"""Frames that carry the channels of a container's interpreters over its standard input and output.

A frame, in either direction, consists of the channel (1 byte), the serial number of the interpreter (4 bytes), the
length of the data (4 bytes) and the data. CONTROL is one JSON message of the zygote's protocol; DATA is a chunk of an
interpreter's socket, and an empty chunk means that the socket was closed; OUT and ERR are printed output; USAGE is JSON
with the counters of the container's control group; TUNNEL is a chunk of a connection to the port that an agent uses,
with the number of the connection in place of the serial number, and an empty chunk means that it was closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

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

    def read(self) -> bytes | None:
        """Return received data, b"" if the connection was closed, or None if no data has arrived."""
        try:
            return self.socket.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""
