"""Buffers through which another process reads a policy's weights.

A buffer is a file in /dev/shm that both processes map, or memory of the sender, from which the receiver fetches each
chunk over HTTP. The receiver gets a handle that consists of numbers and strings, but no pickled objects. It calls
`open_buffer` and, for HTTP, `fetch_chunk`.
"""

from __future__ import annotations

import http.client
import mmap
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

# Part of a tensor in the buffer: [name, dtype, shape, byte offset in tensor, byte offset in buffer, size in bytes].
TensorSlice = list[Any]
# Seconds without any data after which a receiver stops waiting for a chunk.
_FETCH_TIMEOUT = 30.0
_SHM_DIR = "/dev/shm"


class SharedMemory:
    """Buffer in a memory-mapped file. `close` deletes the file; existing mappings stay valid."""

    def __init__(self, size: int) -> None:
        """Create a buffer of `size` bytes.

        Raises:
            EngineError: If neither /dev/shm nor the folder for temporary files has enough space.
        """
        size = max(size, 1)
        self._folder: Path | None = None
        try:
            roomy = os.path.isdir(_SHM_DIR) and shutil.disk_usage(_SHM_DIR).free > 2 * size
            self._folder = Path(
                tempfile.mkdtemp(prefix=f"agentfly-weights-{os.getpid()}-", dir=_SHM_DIR if roomy else None)
            )
            path = self._folder / "buffer"
            with path.open("w+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # otherwise a full disk causes SIGBUS on access
                else:
                    file.truncate(size)
        except OSError as error:
            self.close()
            raise EngineError(
                f"no space for {size / 2**20:.1f} MiB of weights in {_SHM_DIR} or {tempfile.gettempdir()}: {error}; "
                "free space, or set TMPDIR to a folder with enough space"
            ) from error
        self.handle: dict[str, Any] = {"transport": "shm", "path": str(path)}
        self.tensor = _map_file(path)

    def close(self) -> None:
        """Delete the file of the buffer."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _map_file(path: Path) -> torch.Tensor:
    import torch

    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class ServedMemory:
    """Buffer in host memory that processes on this or other machines fetch over HTTP.

    The connection is not encrypted. Only clients that know a secret path can read the buffer.
    """

    def __init__(self, size: int, addresses: Iterable[tuple[str, int]]) -> None:
        """Create a buffer of `size` bytes, served at the given (interface, port) addresses; port 0 selects a free port.

        Raises:
            OSError: If an address does not belong to this machine, or the port is in use.
        """
        import http.server

        import torch

        self.tensor = torch.empty(max(size, 1), dtype=torch.uint8)
        secret, content = f"/{secrets.token_urlsafe(24)}/", memoryview(self.tensor.numpy())  # type: ignore[arg-type]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                count = self.path.removeprefix(secret)
                if self.path == count or not count.isdecimal() or int(count) > len(content):
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", count)
                self.end_headers()
                self.wfile.write(content[: int(count)])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._servers: list[http.server.ThreadingHTTPServer] = []
        ports = {}
        try:
            for address in dict.fromkeys(addresses):
                server = http.server.ThreadingHTTPServer(address, Handler)
                self._servers.append(server)
                ports[address] = server.server_port
                threading.Thread(
                    target=server.serve_forever, args=(0.02,), name="agentfly-weights", daemon=True
                ).start()
        except BaseException:
            self.close()
            raise
        self.handle: dict[str, Any] = {
            "transport": "http",
            "size": self.tensor.numel(),
            "path": secret,
            "ports": ports,
        }

    def close(self) -> None:
        """Stop serving the buffer."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


def fetch_chunk(url: str, slices: Iterable[TensorSlice], buffer: torch.Tensor) -> None:
    """Read the bytes of these slices from the `ServedMemory` of another process into a buffer in host memory.

    Raises:
        OSError, http.client.HTTPException: If the other process cannot be reached or refuses the request.
    """
    size = max((start + part for *_, start, part in slices), default=0)
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_FETCH_TIMEOUT)
    try:
        connection.request("GET", f"{address.path}{size}")
        with connection.getresponse() as response:  # closing the connection does not close an unread response
            if response.status != 200:
                raise OSError(f"{address.netloc} answered {response.status} {response.reason}")
            rest = memoryview(buffer.numpy())[:size]  # type: ignore[arg-type]
            while rest:
                count = response.readinto(rest)
                if not count:
                    raise OSError(
                        f"{address.netloc} closed the connection {len(rest)} bytes before the end of a chunk"
                    )
                rest = rest[count:]
    except OSError as error:
        raise OSError(f"cannot read from {address.netloc}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def open_buffer(handle: dict[str, Any]) -> torch.Tensor:
    """Open the buffer of another process as a uint8 tensor; deleting the tensor closes the buffer.

    For HTTP, the tensor is a new buffer in this process, into which `fetch_chunk` reads each chunk.

    Raises:
        OSError, ValueError: If the buffer cannot be opened from this process.
    """
    import torch

    if handle["transport"] == "shm":
        return _map_file(Path(handle["path"]))
    return torch.empty(handle["size"], dtype=torch.uint8)
