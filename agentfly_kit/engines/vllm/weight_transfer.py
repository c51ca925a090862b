"""Transfer of a policy's weights to another process, in chunks of bounded size through a shared buffer.

`Delivery` is the sender and `ChunkReader` the receiver. The contents of the buffer are described by numbers and
strings, never by pickled objects.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from agentfly_kit.engines.vllm.buffers import ServedMemory, SharedMemory, TensorSlice
from agentfly_kit.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentfly_kit.policy.policy import Policy

# Shared host memory, or HTTP.
WeightTransport = Literal["shm", "http"]
# A weight's name, a tensor with its dtype and shape, and a function that returns its values, with any adapter merged.
WeightSource = tuple[str, "torch.Tensor", "Callable[[], torch.Tensor]"]

# Maximum size of the transfer buffer in bytes, for models of any size. Small chunks are copied faster in host memory,
# but each chunk requires its own message.
CHUNK = 64 << 20
# Settings that must be equal in the sending and the receiving model.
_ARCHITECTURE = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
# Alignment of tensors in the buffer in bytes, so that they can be viewed as any dtype.
_ALIGN = 64


def architecture(config: Any) -> dict[str, Any]:
    """Return the settings of a transformers config that must be equal for sender and receiver of weights."""
    text = config.get_text_config()
    return {"model_type": config.model_type} | {name: getattr(text, name, None) for name in _ARCHITECTURE}


def check_architecture(engine: str, served: dict[str, Any], policy: Any) -> None:
    """Raise EngineError unless `served`, the architecture of an engine's model, equals that of the policy."""
    from agentfly_kit.policy.policy import Policy

    if not isinstance(policy, Policy):
        raise EngineError(f"update needs a Policy, got a {type(policy).__name__}")
    for name, wanted in architecture(policy.model.config).items():
        if served.get(name) != wanted:
            raise EngineError(
                f"{engine} has {name}={served.get(name)!r}, but the policy has {wanted!r}; weights can be changed, but "
                "the architecture cannot"
            )


# --- weights and chunks -------------------------------------------------------------------------------------------


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
            whole: Any = copy.deepcopy(policy.model)
            whole = whole.merge_and_unload()
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
    """Return the layers that have an adapter, keyed by path; None if adapters cannot be merged layer by layer."""
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
    own = Counter(tensor.data_ptr() for tensor in model.state_dict().values())
    if any(own[p.data_ptr()] > 1 for layer in layers.values() for p in layer.get_base_layer().parameters()):
        return None  # tied weights: merging one layer would change the other
    return layers


class _MergedLayer:
    """Callable that merges the adapter of a layer into a copy of the layer and returns one of the merged weights."""

    def __init__(self, layer: Any, name: str) -> None:
        self._layer, self._name = layer, name

    def __call__(self) -> torch.Tensor:
        import torch

        with torch.no_grad():
            layer = copy.deepcopy(self._layer)
            layer.merge()
            found: torch.Tensor = layer.get_base_layer().state_dict()[self._name]
        return found


def layout(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> list[list[TensorSlice]]:
    """Divide tensors into chunks of slices, in the given order.

    Args:
        tensors: Names and tensors; only dtype and shape are used.
        limit: Maximum size of a chunk in bytes. A larger tensor is split over several chunks.

    Returns:
        The slices of each chunk; a chunk is empty only if there are no tensors.
    """
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
    """Write slices of the weights `values` into the uint8 tensor `buffer`, which is in host memory."""
    import torch

    for name, _, _, done, start, part in slices:
        if part:
            flat = values[name]().contiguous().view(-1).view(torch.uint8)
            if flat.is_cpu:
                # Copy with numpy; torch would start a thread pool, which takes 20 ms per delivery.
                buffer[start : start + part].numpy()[:] = flat[done : done + part].numpy()
            else:
                buffer[start : start + part].copy_(flat[done : done + part])


class ChunkReader:
    """Reader that copies successive chunks into new tensors, because the sender reuses the buffer for each chunk."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[torch.Tensor, int]] = {}

    def read(self, slices: Iterable[TensorSlice], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and values of the tensors completed by this chunk.

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
                whole = torch.empty(size, dtype=torch.uint8)
            whole[done : done + part].copy_(buffer[start : start + part])
            if done + part == size:
                yield name, whole.view(dtype).view(shape)
            else:
                self._parts[name] = (whole, done + part)

    @property
    def unfinished(self) -> list[str]:
        """Names of tensors that have been received only partially."""
        return list(self._parts)


# --- delivery ---------------------------------------------------------------------------------------------------


class BufferNotOpened(Exception):
    """Raised when a worker cannot open the buffer."""


class Delivery:
    """Async context manager that transfers a policy's weights to the workers of an engine.

    `policy.lock` is held until the last chunk is written or, after an error, until exit. The buffer is released on
    exit. For each chunk, `send` awaits `call("agentfly_receive", handle, slices, number, last)`. `call` must return
    only when the workers no longer need the chunk. It must return one result per worker: None, or the reason why the
    worker could not open the buffer.
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
        # A single thread ensures that the buffer is released after all other work, even on an error or a cancellation.
        self._thread = ThreadPoolExecutor(1, "agentfly-weights")
        self._locked = False
        self._buffer: SharedMemory | ServedMemory | None = None
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
        if self.transport == "http":
            try:
                self._buffer = ServedMemory(size, self._addresses)
            except OSError as error:
                raise EngineError(f"the weights cannot be served at {self._addresses}: {error}") from error
        else:
            self._buffer = SharedMemory(size)
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
