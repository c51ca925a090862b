"""Frames that carry the channels of a container's interpreters over its standard input and output.

A frame, in either direction, consists of the channel (1 byte), the serial number of the interpreter (4 bytes), the
length of the data (4 bytes) and the data. CONTROL is one JSON message of the zygote's protocol; DATA is a chunk of an
interpreter's socket, and an empty chunk means that the socket was closed; OUT and ERR are printed output; USAGE is JSON
with the counters of the container's control group.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

CONTROL, DATA, OUT, ERR, USAGE = range(5)
HEAD = struct.Struct("!BII")


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
