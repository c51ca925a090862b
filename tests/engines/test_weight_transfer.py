"""Weight transfer to another process: layout, writing, reading, assembly, and locking until the weights are sent."""

import asyncio
import copy
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agents
import errors
import pytest
import torch
from waiting import until

import agentfly_kit as af
from agentfly_kit.engines.vllm import buffers
from agentfly_kit.engines.vllm.buffers import SharedMemory, TensorSlice, open_buffer
from agentfly_kit.engines.vllm.weight_transfer import (
    BufferNotOpened,
    ChunkReader,
    Delivery,
    layout,
    pack,
    weight_sources,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]


class Receiver:
    """Worker side without vLLM: assembles tensors from the arguments of `agentfly_receive`."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[int, bool]] = []
        self.folder = Path()
        self._unpacking = ChunkReader()

    async def call(
        self, method: str, handle: dict[str, Any], slices: list[TensorSlice], number: int, last: bool
    ) -> Any:
        assert method == "agentfly_receive"
        handle, slices = json.loads(json.dumps([handle, slices]))  # a server receives plain JSON types
        self.folder = Path(handle["path"]).parent
        self.calls.append((number, last))
        self.tensors |= dict(self._unpacking.read(slices, open_buffer(handle)))
        return [None]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the tensors are bitwise equal, so that NaN equals NaN."""
    whole = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*whole)


def lora(**options: Any) -> af.Policy:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    base = agents.fresh()
    options = {"target_modules": "all-linear"} | options
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return af.Policy(get_peft_model(base.model, config), base.chat, version=3)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_chunk_the_same_bytes_come_out(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    limit = rng.choice([64, 65, 100, 1000, 4096, 1 << 40])
    print(f"seed {seed}, limit {limit}")
    tensors: dict[str, torch.Tensor] = {}
    for i in range(rng.randint(1, 30)):
        shape = [rng.choice([0, 1, 2, 3, 7, 31]) for _ in range(rng.randint(0, 3))]
        dtype = rng.choice(DTYPES)
        tensor = torch.empty(shape, dtype=dtype)
        tensor = torch.randint(0, 2 if dtype is torch.bool else 256, (tensor.nbytes,), dtype=torch.uint8)
        tensor = tensor.view(dtype).view(shape)
        tensors[f"t{i}"] = tensor.mT if rng.random() < 0.3 and len(shape) >= 2 else tensor
    chunks = layout(tensors.items(), limit)
    got: dict[str, torch.Tensor] = {}
    unpacking = ChunkReader()
    buffer = torch.empty(max((s + n for c in chunks for *_, s, n in c), default=0), dtype=torch.uint8)
    assert buffer.numel() <= limit
    for number, slices in enumerate(chunks):
        assert slices or len(chunks) == 1
        spans = sorted((start, start + part) for *_, start, part in slices if part)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        pack({name: lambda t=t: t for name, t in tensors.items()}, slices, buffer)
        come = dict(unpacking.read(slices, buffer))
        assert all(tensors[name].nbytes <= limit or number for name in come)
        got |= come
        buffer.fill_(255)  # the next chunk overwrites the buffer
    assert got.keys() == tensors.keys() and not unpacking.unfinished
    assert all(same(got[name], tensor) for name, tensor in tensors.items())
    names = [name for chunk in chunks for name, *_ in chunk]
    assert {name for name in names if names.count(name) > 1} <= {n for n, t in tensors.items() if t.nbytes > limit}


def test_weights_leave_merged_once_and_without_the_value_head() -> None:
    plain = agents.fresh(value_head=True)
    found = weight_sources(plain)
    names = [name for name, _, _ in found]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names  # tied weights are sent once
    assert set(names) == set(plain.model.state_dict()) - {"lm_head.weight"}
    # Empty tensors all have address 0, but are not tied.
    plain.model.register_buffer("nothing", torch.empty(0))
    plain.model.register_buffer("nothing_more", torch.empty(0))
    assert {"nothing", "nothing_more"} <= {name for name, _, _ in weight_sources(plain)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["norm"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_is_merged_as_peft_merges_a_whole_model(options: dict[str, Any]) -> None:
    policy = lora(**options)
    before = copy.deepcopy(policy.model.state_dict())
    wanted = policy.merged().model.state_dict()
    found = weight_sources(policy)
    got = {name: values() for name, _, values in found}
    assert got.keys() == wanted.keys() - ({"lm_head.weight"} - got.keys())
    assert all(same(got[name], wanted[name]) for name in got)
    assert all(like.dtype == got[name].dtype and like.shape == got[name].shape for name, like, _ in found)
    assert all(same(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


def test_shared_memory_is_seen_by_both_and_outlives_its_name() -> None:
    memory = SharedMemory(100)
    other = open_buffer(json.loads(json.dumps(memory.handle)))
    memory.tensor[:3] = torch.tensor([1, 2, 3])
    assert other[:3].tolist() == [1, 2, 3] and other.numel() == 100
    memory.close()
    assert not Path(memory.handle["path"]).exists()
    errors.check(lambda: open_buffer(memory.handle), FileNotFoundError)
    assert not Path(memory.handle["path"]).exists()
    assert other[:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("limit", [4096, 1 << 29])
@pytest.mark.parametrize("make", [agents.fresh, lora])
async def test_a_delivery_is_whole_and_leaves_nothing(limit: int, make: Callable[[], af.Policy]) -> None:
    policy = make()
    policy.version = 9
    receiver = Receiver()
    free = []

    async def call(*args: Any) -> Any:
        free.append(not policy.lock.locked())
        return await receiver.call(*args)

    async with Delivery(policy, "shm", limit) as delivery:
        assert not delivery.has_sent
        await delivery.send(call)
        assert delivery.has_sent and delivery.version == 9 and receiver.folder.exists()
    assert not receiver.folder.exists() and not policy.lock.locked()
    wanted = policy.merged().model.state_dict()
    assert receiver.tensors.keys() == wanted.keys() - {"lm_head.weight"}
    assert all(same(tensor, wanted[name]) for name, tensor in receiver.tensors.items())
    count = len(receiver.calls)
    assert receiver.calls == [(i, i == count - 1) for i in range(count)] and (
        count > 9 if limit == 4096 else count == 1
    )
    # The policy is locked until the last chunk is written, and free afterwards.
    assert free == [False] * (count - 1) + [True]


@pytest.mark.parametrize("how", ["fails", "is cancelled", "cannot open"])
async def test_a_delivery_that_ends_early_frees_the_lock_and_the_buffer(how: str) -> None:
    policy = agents.fresh()
    receiver = Receiver()
    reached = asyncio.Event()

    async def call(*args: Any) -> Any:
        await receiver.call(*args)
        if how == "cannot open":
            return ["RuntimeError: no"]
        if args[3] == 2:
            reached.set()
            if how == "fails":
                raise ConnectionError("lost")
            await asyncio.sleep(600)
        return [None]

    begun = []

    async def deliver() -> None:
        async with Delivery(policy, "shm", 4096) as delivery:
            try:
                await delivery.send(call)
            finally:
                begun.append(delivery.has_sent)

    task = asyncio.ensure_future(deliver())
    if how == "cannot open":
        await errors.check(lambda: task, BufferNotOpened, "RuntimeError: no")
    elif how == "fails":
        await errors.check(lambda: task, ConnectionError)
    else:
        await reached.wait()
        task.cancel()
        await errors.check(lambda: task, asyncio.CancelledError)
    assert begun == [how != "cannot open"]
    assert not policy.lock.locked() and not receiver.folder.exists()


async def test_without_room_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = agents.fresh()
    monkeypatch.setattr(buffers, "_SHM_DIR", str(tmp_path / "no"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    with pytest.raises(
        af.errors.EngineError, match=r"no space for 1\.\d MiB of weights in .*/no or .*/nothing: .*; free space"
    ):
        async with Delivery(policy, "shm", 1 << 26):
            pytest.fail("it was held")
    await until(lambda: not policy.lock.locked())


async def test_cancelled_while_it_waits_for_the_policy_it_takes_no_lock_with_it() -> None:
    policy = agents.fresh()
    with policy.lock:
        task = asyncio.ensure_future(Delivery(policy, "shm", 4096).__aenter__())
        await asyncio.sleep(0.05)  # for it to reach the lock; cancelling it earlier is easier
        assert not task.done()
        task.cancel()
        await errors.check(lambda: task, asyncio.CancelledError)
    await until(lambda: not policy.lock.locked())
