"""Transfer of a policy's weights to another process, in chunks of bounded size through a shared buffer.

The buffer is in host memory (a file in /dev/shm), on a GPU that both processes use (CUDA IPC), or in the sender, from
which the receiver fetches each chunk over HTTP; the three differ only in how it is created and opened. The buffer and
its contents are described by numbers, strings and bytes, never by pickled objects. `Delivery` is the sender;
`open_buffer`, `fetch_chunk` and `ChunkReader` are used by the receiver.
"""

from __future__ import annotations

import asyncio
import copy
import http.client
import inspect
import mmap
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentfly_kit.policy.policy import Policy

# CUDA IPC, shared host memory, or HTTP.
WeightTransport = Literal["ipc", "shm", "http"]
# Part of a tensor in the buffer: [name, dtype, shape, offset in the tensor, offset in the buffer, size], in bytes.
TensorSlice = list[Any]
# A weight's name, a tensor with its dtype and shape, and a function that returns its values, with any adapter merged.
WeightSource = tuple[str, "torch.Tensor", "Callable[[], torch.Tensor]"]

# Maximum size of the buffer in bytes, the only additional memory of a delivery, independent of the model's size.
#
# In host memory small chunks are faster, but each chunk costs a message.
CHUNK: dict[WeightTransport, int] = {"shm": 64 << 20, "ipc": 512 << 20, "http": 64 << 20}
# Seconds without any data after which a receiver stops waiting for a chunk.
_FETCH_TIMEOUT = 30.0
# Settings of a model that must agree before weights are sent.
_ARCHITECTURE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
# Alignment of tensors in the buffer in bytes, so that they can be viewed as any dtype.
_ALIGN = 64
_SHM_DIR = "/dev/shm"
# Arguments of torch's rebuild_cuda_tensor, bytes and integers, set by the sender; the receiver sets the rest.
_CUDA_HANDLE_FIELDS = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


def architecture(config: Any) -> dict[str, Any]:
    """Return the settings of a transformers config that must agree before weights are sent."""
    return {name: getattr(config, name, None) for name in _ARCHITECTURE}


def check_architecture(engine: str, served: dict[str, Any], policy: Any) -> None:
    """Raise EngineError if an engine that serves a model with this `architecture` cannot load the policy's weights."""
    from agentfly_kit.policy.policy import Policy

    if not isinstance(policy, Policy):
        raise EngineError(f"update needs a Policy, got a {type(policy).__name__}")
    for name, wanted in architecture(policy.model.config).items():
        if served.get(name) != wanted:
            raise EngineError(
                f"{engine} has {name}={served.get(name)!r}, but the policy has {wanted!r}; weights can be changed, the "
                "architecture cannot"
            )


# --- contents -------------------------------------------------------------------------------------------


def weight_sources(policy: Policy) -> list[WeightSource]:
    """Return the model's weights under their transformers names, without the value head or duplicates of tied weights.

    An adapter is merged layer by layer, so that no second model is needed. The caller must hold `policy.lock` while it
    reads the values.
    """
    model: Any = policy.model.get_base_model() if policy.has_adapter else policy.model
    state = model.state_dict()
    merged: dict[str, Callable[[], torch.Tensor]] = {}
    if policy.has_adapter:
        layers = _adapter_layers(model)
        if layers is None:  # this adapter cannot be merged layer by layer
            whole = _merged_copy(policy)
            state = whole.state_dict()
        else:
            plain = {}
            for name, tensor in state.items():
                layer = next((path for path in layers if name.startswith(f"{path}.")), None)
                if layer is None:
                    plain[name] = tensor
                elif name.startswith(f"{layer}.base_layer."):
                    short = name.removeprefix(f"{layer}.base_layer.")
                    plain[f"{layer}.{short}"] = tensor
                    merged[f"{layer}.{short}"] = _MergedLayer(layers[layer], short)
            state = plain
    seen: set[tuple[Any, ...]] = set()
    found: list[WeightSource] = []
    for name, tensor in state.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found.append((name, tensor.detach(), merged.get(name, tensor.detach)))
    return found


def _adapter_layers(model: Any) -> dict[str, Any] | None:
    """Return the layers that have an adapter, by path; None if they cannot be merged independently."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    layers: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return None
        if isinstance(module, BaseTunerLayer):
            if any(path.startswith(f"{outer}.") for outer in layers):
                return None
            layers[path] = module
    own: dict[int, int] = {}
    for tensor in model.state_dict().values():
        own[tensor.data_ptr()] = own.get(tensor.data_ptr(), 0) + 1
    if any(own[p.data_ptr()] > 1 for layer in layers.values() for p in layer.get_base_layer().parameters()):
        return None  # tied weights: merging one layer would change the other
    return layers


class _MergedLayer:
    """Callable that returns a weight of one layer with its adapter merged into a copy of the layer."""

    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._name = layer, name

    def __call__(self) -> torch.Tensor:
        import torch

        with torch.no_grad():
            layer = copy.deepcopy(self._layer)
            layer.merge()
            found: torch.Tensor = layer.get_base_layer().state_dict()[self._name]
        return found


def _merged_copy(policy: Policy) -> Any:
    model: Any = copy.deepcopy(policy.model)
    return model.merge_and_unload()


def layout(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> list[list[TensorSlice]]:
    """Divide tensors into chunks of slices, in the given order.

    Args:
        tensors: Names and tensors; only dtype and shape are used.
        limit: Maximum size of a chunk in bytes. A larger tensor is split over several chunks.

    Returns:
        The slices of each chunk; a chunk is empty only if there are no tensors.
    """
    if limit < _ALIGN:
        raise ValueError(f"limit={limit} must be at least {_ALIGN} bytes per chunk")
    chunks: list[list[TensorSlice]] = [[]]
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        what = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if size == 0:
            chunks[-1].append([*what, 0, 0, 0])
        done = 0
        while done < size:
            start = -(-used // _ALIGN) * _ALIGN
            room = limit - start
            if room <= 0 or (room < size <= limit):  # split only tensors that exceed a whole chunk
                chunks.append([])
                used = 0
                continue
            part = min(size - done, room)
            chunks[-1].append([*what, done, start, part])
            used, done = start + part, done + part
    return chunks


def pack(values: dict[str, Callable[[], torch.Tensor]], slices: Iterable[TensorSlice], buffer: torch.Tensor) -> None:
    """Write the slices into the buffer, a uint8 tensor, and wait for the copies to finish."""
    import torch

    for name, _, _, done, start, part in slices:
        if part:
            flat = values[name]().contiguous().view(-1).view(torch.uint8)
            if flat.is_cpu and buffer.is_cpu:
                # Copy with numpy: torch would start a thread pool for this thread, 20 ms per delivery.
                buffer[start : start + part].numpy()[:] = flat[done : done + part].numpy()
            else:
                buffer[start : start + part].copy_(flat[done : done + part])
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


class ChunkReader:
    """Read chunks in order into new tensors; the sender overwrites the buffer with the next chunk."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[torch.Tensor, int]] = {}

    def read(self, slices: Iterable[TensorSlice], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of the tensors completed by this chunk, on the buffer's device.

        Raises:
            ValueError: If a slice does not continue its tensor or exceeds the buffer.
        """
        import torch

        for name, kind, shape, done, start, part in slices:
            dtype = getattr(torch, kind)
            size = torch.Size(shape).numel() * dtype.itemsize
            whole, have = self._parts.pop(name, (None, 0))
            if done != have or done + part > size or start + part > buffer.numel():
                raise ValueError(
                    f"{name} has {have} of {size} bytes, but the next slice covers bytes {done} to {done + part}, at "
                    f"offset {start} of a buffer of {buffer.numel()} bytes"
                )
            if part == size:
                yield name, buffer[start : start + part].clone().view(dtype).view(shape)
                continue
            if whole is None:
                whole = torch.empty(size, dtype=torch.uint8, device=buffer.device)
            whole[done : done + part].copy_(buffer[start : start + part])
            if done + part == size:
                yield name, whole.view(dtype).view(shape)
            else:
                self._parts[name] = (whole, done + part)

    @property
    def unfinished(self) -> list[str]:
        """Names of tensors that have been received only partially."""
        return list(self._parts)


# --- buffers ------------------------------------------------------------------------------------------------


class SharedMemory:
    """Buffer in host memory: a mapped file. `close` deletes the file; existing mappings stay valid."""

    def __init__(self, size: int) -> None:
        """Create a buffer of `size` bytes.

        Raises:
            OSError: If neither /dev/shm nor the folder for temporary files has enough space.
        """
        size = max(size, 1)
        roomy = os.path.isdir(_SHM_DIR) and shutil.disk_usage(_SHM_DIR).free > 2 * size
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"agentfly-weights-{os.getpid()}-", dir=_SHM_DIR if roomy else None)
        )
        path = self._folder / "buffer"
        try:
            with path.open("w+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # otherwise a full disk causes SIGBUS on access
                else:
                    file.truncate(size)
        except BaseException:
            self.close()
            raise
        self.handle: dict[str, Any] = {"transport": "shm", "path": str(path)}
        self.tensor = _map_file(path)

    def close(self) -> None:
        """Delete the file of the buffer."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _map_file(path: Path) -> torch.Tensor:
    import torch

    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class CudaMemory:
    """Buffer on a GPU that one other process may open.

    torch counts references across processes: memory still in use by the other process is not reused, even after
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
        # Call this once per delivery, because each call adds a reference that the receiver releases by closing.
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
    """Buffer in host memory that other processes fetch over HTTP, also from other machines.

    The connection is not encrypted, and a secret path is the only protection.
    """

    def __init__(self, size: int, addresses: Iterable[tuple[str, int]]) -> None:
        """Create a buffer of `size` bytes, served at these interfaces and ports; port 0 selects a free one.

        Raises:
            OSError: If an address is not one of this machine, or the port is taken.
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
        OSError, http.client.HTTPException: If the other process cannot be reached or refuses.
    """
    size = max((start + part for *_, start, part in slices), default=0)
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_FETCH_TIMEOUT)
    try:
        connection.request("GET", f"{address.path}{size}")
        response = connection.getresponse()
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
    """Open the buffer of another process as a uint8 tensor; deleting the tensor closes it.

    For HTTP the tensor is a buffer of this process, into which `fetch_chunk` reads each chunk.

    Args:
        handle: Handle of the buffer.
        device: For a buffer on a GPU, the device of this process with the same UUID.

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
    """Return the reason why CUDA IPC to workers on these GPUs (one UUID per worker) is impossible; "" if possible."""
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


# --- delivery -----------------------------------------------------------------------------------------------


class BufferNotOpened(Exception):
    """Raised when the receiver cannot open the buffer; its weights have not changed."""


class Delivery:
    """Async context manager that transfers a policy's weights to the workers of an engine.

    It holds `policy.lock` until the last chunk is written. On exit it releases the buffer and always the lock.
    `send` passes each chunk to a function `call`: `await call("agentfly_receive", handle, slices, number, last)`
    returns one result per worker when the workers no longer need the chunk, either None or the reason why the worker
    could not open the buffer.
    """

    def __init__(
        self, policy: Policy, transport: WeightTransport, limit: int, addresses: Iterable[tuple[str, int]] = ()
    ) -> None:
        self.transport: WeightTransport = transport
        self.version = policy.version
        # True if a worker may already have received weights.
        self.has_sent = False
        self._policy = policy
        self._limit = limit
        self._addresses = tuple(addresses)  # for HTTP
        # With a single thread, the release runs after all other work, even after an error or a cancellation.
        self._thread = ThreadPoolExecutor(1, "agentfly-weights")
        self._locked = False
        self._buffer: SharedMemory | CudaMemory | ServedMemory | None = None
        self._chunks: list[list[TensorSlice]] = []
        self._values: dict[str, Callable[[], torch.Tensor]] = {}

    async def __aenter__(self) -> Delivery:
        try:
            await self._run(self._lock_and_pack)
        except BaseException:
            self._schedule_release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.wrap_future(self._schedule_release()))

    def _schedule_release(self) -> Future[None]:
        released = self._thread.submit(self._release)
        self._thread.shutdown(wait=False)
        return released

    async def _run(self, function: Callable[..., None], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _lock_and_pack(self) -> None:
        self._policy.lock.acquire()
        self._locked = True
        self.version = self._policy.version
        found = weight_sources(self._policy)
        self._values = {name: values for name, _, values in found}
        self._chunks = layout([(name, like) for name, like, _ in found], self._limit)
        size = max((start + part for chunk in self._chunks for *_, start, part in chunk), default=0)
        if self.transport == "ipc":
            try:
                self._buffer = CudaMemory(size, found[0][1].device)
            except RuntimeError as error:
                raise BufferNotOpened(f"{type(error).__name__}: {error}") from error
        elif self.transport == "http":
            try:
                self._buffer = ServedMemory(size, self._addresses)
            except OSError as error:
                raise EngineError(f"the weights cannot be served at {self._addresses}: {error}") from error
        else:
            try:
                self._buffer = SharedMemory(size)
            except OSError as error:
                raise EngineError(
                    f"no room for {size / 2**20:.1f} MiB of weights in {_SHM_DIR} or {tempfile.gettempdir()}: {error}; "
                    "free space, or set TMPDIR to a folder with enough space"
                ) from error
        self._pack(0)

    def _pack(self, number: int) -> None:
        assert self._buffer is not None
        pack(self._values, self._chunks[number], self._buffer.tensor)
        if number == len(self._chunks) - 1:
            self._unlock()

    def _unlock(self) -> None:
        self._values = {}
        if self._locked:
            self._locked = False
            self._policy.lock.release()

    def _release(self) -> None:
        try:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None
        finally:
            self._unlock()

    async def send(self, call: Callable[..., Awaitable[Sequence[str | None]]]) -> None:
        """Send all chunks. Each chunk is written only after all workers have processed the previous one.

        Exceptions of `call` are propagated; `has_sent` is then True if a worker may have received weights.

        Raises:
            BufferNotOpened: If a worker cannot open the buffer. `has_sent` is False if no worker could.
        """
        buffer = self._buffer
        assert buffer is not None
        for number, slices in enumerate(self._chunks):
            if number:
                await self._run(self._pack, number)
            self.has_sent = True
            answers = await call("agentfly_receive", buffer.handle, slices, number, number == len(self._chunks) - 1)
            reasons = [answer for answer in answers if answer]
            if reasons:
                self.has_sent = len(reasons) < len(answers)
                raise BufferNotOpened(reasons[0])
