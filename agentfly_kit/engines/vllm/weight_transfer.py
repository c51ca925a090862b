"""A policy's weights on their way into another process: chunks of bounded size, in a buffer that both processes map.

The buffer lies in the machine's memory (a file in /dev/shm), or on the GPU that both use (CUDA IPC); only how it is
made and opened differs. What says where it is and what lies in it is numbers, texts and bytes, never a pickle. The
sender's half is `Delivery`, the receiver's is `open_buffer` and `ChunkReader`; neither knows an engine.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import mmap
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentfly_kit.policy.policy import Policy

WeightTransport = Literal["ipc", "shm"]
"""CUDA IPC, or shared memory of the machine."""
TensorSlice = list[Any]
"""What lies at one place of the buffer: [name, dtype, shape, its first byte in the tensor and in the buffer, bytes]."""
WeightSource = tuple[str, "torch.Tensor", "Callable[[], torch.Tensor]"]
"""A name, a tensor of the right dtype and shape, and the values: an adapter is merged only when they are asked for."""

CHUNK: dict[WeightTransport, int] = {"shm": 64 << 20, "ipc": 512 << 20}
"""Bytes of the buffer at most: what a delivery takes beside the weights themselves, whatever the model's size. In the
machine's memory small ones are the faster; each costs a message."""
_ALIGN = 64
"""Where a tensor may begin, so that its bytes can be seen as any dtype."""
_SHM_DIR = "/dev/shm"
_CUDA_HANDLE_FIELDS = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""The arguments of torch's rebuild_cuda_tensor that only the sender knows: bytes and integers. The others are ours."""


# --- what is sent -------------------------------------------------------------------------------------------


def weight_sources(policy: Policy) -> list[WeightSource]:
    """The model's weights by the names of transformers: without the value head, tied ones once, an adapter merged one
    layer at a time, so that no second model is made. Hold `policy.lock` while the values are read."""
    model: Any = policy.model.get_base_model() if policy.has_adapter else policy.model
    state = model.state_dict()
    merged: dict[str, Callable[[], torch.Tensor]] = {}
    if policy.has_adapter:
        layers = _adapter_layers(model)
        if layers is None:  # of a kind that cannot be merged layer by layer
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
    """The layers that carry an adapter, by their path; None unless each can be merged alone."""
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
        return None  # tied: merging one changes the other
    return layers


class _MergedLayer:
    """One layer with its adapter added, made when it is asked for, from a copy of the layer."""

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
    """Chunks of slices, in the given order. A tensor that does not fit goes over several chunks; none is empty.

    limit: bytes of a chunk at most.
    """
    if limit < _ALIGN:
        raise ValueError(f"limit={limit}: give a chunk at least {_ALIGN} bytes")
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
            if room <= 0 or (room < size <= limit):  # only what must be is divided
                chunks.append([])
                used = 0
                continue
            part = min(size - done, room)
            chunks[-1].append([*what, done, start, part])
            used, done = start + part, done + part
    return chunks


def pack(values: dict[str, Callable[[], torch.Tensor]], slices: Iterable[TensorSlice], buffer: torch.Tensor) -> None:
    """Write the slices into the buffer, uint8[bytes], and wait until they are there."""
    import torch

    for name, _, _, done, start, part in slices:
        if part:
            flat = values[name]().contiguous().view(-1).view(torch.uint8)
            if flat.is_cpu and buffer.is_cpu:
                # torch would start a team of threads for this one, which is new in each delivery: 20 ms.
                buffer[start : start + part].numpy()[:] = flat[done : done + part].numpy()
            else:
                buffer[start : start + part].copy_(flat[done : done + part])
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


class ChunkReader:
    """Reads chunks in their order. What it gives is a copy: the sender writes the next chunk over this one."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[torch.Tensor, int]] = {}

    def read(self, slices: Iterable[TensorSlice], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are whole with this chunk, by name, on the buffer's device.

        Raises:  ValueError for a piece that does not follow the one before, or that does not lie in the buffer.
        """
        import torch

        for name, kind, shape, done, start, part in slices:
            dtype = getattr(torch, kind)
            size = torch.Size(shape).numel() * dtype.itemsize
            whole, have = self._parts.pop(name, (None, 0))
            if done != have or done + part > size or start + part > buffer.numel():
                raise ValueError(
                    f"{name} has {have} of {size} bytes, and got those from {done} to {done + part}, which lie at "
                    f"{start} in a buffer of {buffer.numel()}"
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
        """Names of which only a part has come."""
        return list(self._parts)


# --- where it lies ------------------------------------------------------------------------------------------


class SharedMemory:
    """A buffer in the machine's memory: a file that is mapped. It goes with `close`; who has it mapped keeps it."""

    def __init__(self, size: int) -> None:
        """Raises:  OSError where there is no room, in /dev/shm or for temporary files."""
        size = max(size, 1)
        roomy = os.path.isdir(_SHM_DIR) and shutil.disk_usage(_SHM_DIR).free > 2 * size
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"agentfly-weights-{os.getpid()}-", dir=_SHM_DIR if roomy else None)
        )
        path = self._folder / "buffer"
        try:
            with path.open("w+b") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would be a signal, not an error
                else:
                    file.truncate(size)
        except BaseException:
            self.close()
            raise
        self.handle: dict[str, Any] = {"transport": "shm", "path": str(path)}
        self.tensor = _map_file(path)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _map_file(path: Path) -> torch.Tensor:
    import torch

    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class CudaMemory:
    """A buffer on a GPU that one other process may open. torch counts whether that one still has it: memory that is
    in use there is not given to anybody here, even after `close`."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Raises:  RuntimeError where the driver does not share memory (WSL, some containers and virtual machines)."""
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        self.tensor = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        # Once for the whole delivery: each call is a count that the other side takes back by closing it.
        _, arguments = reduce_tensor(self.tensor)
        named = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
        self.handle: dict[str, Any] = {
            "transport": "ipc",
            "gpu_uuid": gpu_uuid(device),
            "size": self.tensor.numel(),
            "offset": self.tensor.storage_offset(),
        } | {name: named[name] for name in _CUDA_HANDLE_FIELDS}

    def close(self) -> None:
        import torch

        del self.tensor
        torch.cuda.ipc_collect()


def open_buffer(handle: dict[str, Any], device: torch.device | None = None) -> torch.Tensor:
    """The buffer of another process, uint8[bytes]; dropping it closes it.

    device: the GPU of this process that is the one of the handle, for memory of a GPU.
    Raises:  OSError, RuntimeError or ValueError if it cannot be reached from here.
    """
    import torch

    if handle["transport"] == "shm":
        return _map_file(Path(handle["path"]))
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = gpu_uuid(device) if device is not None else ""
    if device is None or here != handle["gpu_uuid"]:
        raise ValueError(f"the buffer is on GPU {handle['gpu_uuid']}, and this process uses {here or 'none'}")
    found: torch.Tensor = rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([handle["size"]]),
        tensor_stride=(1,),
        tensor_offset=handle["offset"],
        storage_cls=torch.UntypedStorage,
        dtype=torch.uint8,
        storage_device=device.index,  # the same card may have another number there
        requires_grad=False,
        **{name: handle[name] for name in _CUDA_HANDLE_FIELDS},
    )
    return found


def gpu_uuid(device: torch.device) -> str:
    """The GPU's own name, the same in every process; "" for what is no CUDA device."""
    import torch

    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def ipc_unavailable_reason(policy: Policy, gpu_uuids: Sequence[str]) -> str:
    """Why these weights cannot go over CUDA IPC to workers on these GPUs (`gpu_uuid`, one a worker); "" if they can."""
    devices = {tensor.device for tensor in policy.model.state_dict().values()}
    if len(devices) > 1:
        return f"the policy lies on {len(devices)} devices, {', '.join(sorted(map(str, devices)))}"
    device = devices.pop()
    if device.type != "cuda":
        return f"the policy is on {device}, not on a CUDA device"
    if not all(gpu_uuids):
        return "vLLM does not run on a CUDA device"
    if len(gpu_uuids) > 1:
        return f"vLLM runs in {len(gpu_uuids)} workers, and one buffer is opened by one"
    if gpu_uuid(device) != gpu_uuids[0]:
        return f"the policy is on GPU {gpu_uuid(device)}, and vLLM on {gpu_uuids[0]}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in setting:
            return f"{name} has expandable_segments:True, and such memory is not shared between processes"
    return ""


# --- the delivery -------------------------------------------------------------------------------------------


class BufferNotOpened(Exception):
    """The other side could not open the buffer; nothing there has changed."""


class Delivery:
    """One delivery of a policy's weights. `async with` holds them still, under `policy.lock`, until the last chunk is
    written; on leaving it the buffer goes, and the lock is free however it ended.

    call: `await call("agentfly_receive", handle, slices, number, last)` is answered by each worker, with None or with
        the reason why it could not open the buffer, once it needs this chunk no more.
    """

    def __init__(self, policy: Policy, transport: WeightTransport, limit: int) -> None:
        self.transport: WeightTransport = transport
        self.version = policy.version
        self.has_sent = False
        """Whether the other side may have taken something already."""
        self._policy = policy
        self._limit = limit
        # One thread: what it was given last, the release, comes after all else, however this ends.
        self._thread = ThreadPoolExecutor(1, "agentfly-weights")
        self._locked = False
        self._buffer: SharedMemory | CudaMemory | None = None
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
        else:
            try:
                self._buffer = SharedMemory(size)
            except OSError as error:
                raise EngineError(
                    f"no room for {size / 2**20:.1f} MiB of weights in {_SHM_DIR} or {tempfile.gettempdir()}: {error}; "
                    "make room, or set TMPDIR to a folder that has some"
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
        """Send every chunk. A chunk is written only after each worker has answered for the one before.

        Raises:  BufferNotOpened, with the workers as they were; whatever `call` raises, with `has_sent` telling
            how far it got.
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
