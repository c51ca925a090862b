"""Buffers through which another process reads a policy's weights.

A buffer is located in host memory (a file in /dev/shm), on a GPU that both processes use (CUDA IPC), or in the memory
of the sender, from which the receiver fetches each chunk over HTTP. The receiver gets a handle that consists of
numbers, strings and bytes, but no pickled objects. It calls `open_buffer` and, for HTTP, `fetch_chunk`.
"""

from __future__ import annotations

import http.client
import inspect
import mmap
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentfly_kit.policy.policy import Policy

# Part of a tensor in the buffer: [name, dtype, shape, byte offset in tensor, byte offset in buffer, size in bytes].
TensorSlice = list[Any]
# Seconds without any data after which a receiver stops waiting for a chunk.
_FETCH_TIMEOUT = 30.0
_SHM_DIR = "/dev/shm"
# Arguments of torch's rebuild_cuda_tensor that the sender provides. The receiver provides the other arguments.
_CUDA_HANDLE_FIELDS = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


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


class CudaMemory:
    """Buffer on a GPU that one other process may open.

    torch counts references across processes, so memory that the other process still uses is not reused even after
    `close`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Create a buffer of `size` bytes.

        Raises:
            RuntimeError: If the driver cannot share memory (WSL, some containers and virtual machines).
        """
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        self.tensor = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        # Call reduce_tensor once per delivery: each call adds a reference that the receiver releases with the buffer.
        _, arguments = reduce_tensor(self.tensor)
        named = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
        self.handle: dict[str, Any] = {
            "transport": "ipc",
            "gpu_uuid": gpu_uuid(device),
            "size": self.tensor.numel(),
            "offset": self.tensor.storage_offset(),
        } | {name: named[name] for name in _CUDA_HANDLE_FIELDS}

    def close(self) -> None:
        """Release the buffer."""
        import torch

        del self.tensor
        torch.cuda.ipc_collect()


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
        self.handle: dict[str, Any] = {"transport": "http", "size": self.tensor.numel(), "path": secret, "ports": ports}

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
                    raise OSError(f"{address.netloc} closed the connection {len(rest)} bytes before the end of a chunk")
                rest = rest[count:]
    except OSError as error:
        raise OSError(f"cannot read from {address.netloc}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def open_buffer(handle: dict[str, Any], device: torch.device | None = None) -> torch.Tensor:
    """Open the buffer of another process as a uint8 tensor; deleting the tensor closes the buffer.

    For HTTP, the tensor is a new buffer in this process, into which `fetch_chunk` reads each chunk.

    Args:
        handle: Handle of the buffer.
        device: The GPU that contains the buffer, as a device of this process; not needed for host memory.

    Raises:
        OSError, RuntimeError, ValueError: If the buffer cannot be opened from this process.
    """
    import torch

    if handle["transport"] == "shm":
        return _map_file(Path(handle["path"]))
    if handle["transport"] == "http":
        return torch.empty(handle["size"], dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = gpu_uuid(device) if device is not None else ""
    if device is None or here != handle["gpu_uuid"]:
        raise ValueError(f"the buffer is on GPU {handle['gpu_uuid']}, but this process uses {here or 'no GPU'}")
    found: torch.Tensor = rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([handle["size"]]),
        tensor_stride=(1,),
        tensor_offset=handle["offset"],
        storage_cls=torch.UntypedStorage,
        dtype=torch.uint8,
        storage_device=device.index,  # the same GPU may have a different index in the sender
        requires_grad=False,
        **{name: handle[name] for name in _CUDA_HANDLE_FIELDS},
    )
    return found


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in all processes; "" for other devices."""
    import torch

    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def ipc_unavailable_reason(policy: Policy, gpu_uuids: Sequence[str]) -> str:
    """Return the reason why CUDA IPC cannot send the policy to workers on these GPUs (one each), or "" if it can."""
    devices = {tensor.device for tensor in policy.model.state_dict().values()}
    if len(devices) > 1:
        return f"the policy is on {len(devices)} devices, {', '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    if device.type != "cuda":
        return f"the policy is on {device}, not on a CUDA device"
    if not all(gpu_uuids):
        return "vLLM does not run on a CUDA device"
    if len(gpu_uuids) > 1:
        return f"vLLM runs in {len(gpu_uuids)} workers, but only one worker can open a buffer"
    if gpu_uuid(device) != gpu_uuids[0]:
        return f"the policy is on GPU {gpu_uuid(device)}, but vLLM is on {gpu_uuids[0]}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in setting:
            return f"{name} has expandable_segments:True, and such memory cannot be shared between processes"
    return ""
