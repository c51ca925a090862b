"""The file through which weights reach another process: its contents, the lock of the policy, and lack of space."""

import asyncio
import copy
import random
import re
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
from agentfly_kit.engines.vllm import weight_transfer
from agentfly_kit.engines.vllm.weight_transfer import (
    WeightFile,
    open_weights,
    read_weights,
    serve_file,
    weight_sources,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
LOOPBACK = ("127.0.0.1", 0)


def read(address: str, weights: WeightFile) -> dict[str, torch.Tensor]:
    with open_weights(address) as stream:
        return dict(read_weights(stream, weights.tensors))


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
def test_the_same_bytes_come_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(rng.randint(1, 30)):
        shape = [rng.choice([0, 1, 2, 3, 7, 31]) for _ in range(rng.randint(0, 3))]
        dtype = rng.choice(DTYPES)
        tensor = torch.empty(shape, dtype=dtype)
        tensor = torch.randint(0, 2 if dtype is torch.bool else 256, (tensor.nbytes,), dtype=torch.uint8)
        tensor = tensor.view(dtype).view(shape)
        tensors[f"t{i}"] = tensor.mT if rng.random() < 0.3 and len(shape) >= 2 else tensor
    sources = [(name, tensor, lambda tensor=tensor: tensor) for name, tensor in tensors.items()]
    monkeypatch.setattr(weight_transfer, "weight_sources", lambda policy: sources)
    weights = WeightFile(agents.fresh())
    with serve_file(weights.path, [LOOPBACK]) as (path, ports):
        for address in (weights.path.as_uri(), f"http://127.0.0.1:{ports[LOOPBACK]}{path}"):
            got = read(address, weights)
            assert list(got) == list(tensors)
            assert all(same(got[name], tensor) for name, tensor in tensors.items())


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


@pytest.mark.parametrize("make", [agents.fresh, lora])
def test_a_file_has_the_merged_weights_until_it_is_closed(make: Callable[[], af.Policy]) -> None:
    policy = make()
    policy.version = 9
    weights = WeightFile(policy)
    assert weights.version == 9 and not policy.lock.locked()
    with open_weights(weights.path.as_uri()) as stream:
        weights.close()
        assert not weights.path.parent.exists()
        got = dict(read_weights(stream, weights.tensors))
        errors.check(lambda: list(read_weights(stream, [["more", "int8", [1]]])), OSError, "before the end of more")
    wanted = policy.merged().model.state_dict()
    assert got.keys() == wanted.keys() - {"lm_head.weight"}
    assert all(same(tensor, wanted[name]) for name, tensor in got.items())
    errors.check(lambda: open_weights(weights.path.as_uri()), OSError, "No such file")


def test_a_served_file_is_read_by_those_who_know_its_path() -> None:
    weights = WeightFile(agents.fresh())
    with serve_file(weights.path, [LOOPBACK, LOOPBACK]) as (path, ports):
        server = f"http://127.0.0.1:{ports[LOOPBACK]}"
        read(server + path, weights)
        for wrong in ("", "/", path[:-2], f"{path}/"):
            errors.check(lambda: open_weights(server + wrong), OSError, "404")
    errors.check(lambda: open_weights(server + path), OSError, "Connection refused")
    with pytest.raises(af.errors.EngineError, match=r"cannot be served at .*192\.0\.2\.1"):
        with serve_file(weights.path, [LOOPBACK, ("192.0.2.1", 0)]):
            pytest.fail("it is served")


def test_without_room_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = agents.fresh()
    monkeypatch.setattr(weight_transfer, "_SHM_DIR", str(tmp_path / "no"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    errors.check(
        lambda: WeightFile(policy),
        af.errors.EngineError,
        re.compile(r"no space for 1\.\d MiB of weights in .*/no or .*/nothing: .*; free space"),
    )
    assert not policy.lock.locked()


async def test_cancelled_while_it_waits_for_the_policy_it_leaves_no_lock_and_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = agents.fresh()
    monkeypatch.setattr(weight_transfer, "_SHM_DIR", str(tmp_path / "no"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with policy.lock, pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.to_thread(WeightFile, policy), 0.05)
    await until(lambda: not policy.lock.locked() and not list(tmp_path.iterdir()))
