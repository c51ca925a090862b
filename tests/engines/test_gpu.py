"""Tests that need a CUDA device, run by `make test-gpu`. Without a device they are skipped ("no CUDA device").

`AGENTFLY_GPU_TESTS_ON=cpu make test-gpu` runs the same functions on the CPU. This checks the test code, but not CUDA.
"""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path

import agents
import pytest
import pytest_asyncio
import torch
from test_engine_vllm import batch_of

import agentfly_kit as af

DEVICE = torch.device(os.environ.get("AGENTFLY_GPU_TESTS_ON", "cuda:0"))
CUDA = DEVICE.type == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM here; the extra [vllm]")
FLOAT32_GAP, BFLOAT16_GAP = 1e-3, 0.1
"""nats at most, and in the mean: bounds for any card, not figures that were measured on one."""


def policy_on(dtype: torch.dtype, device: torch.device = DEVICE) -> af.Policy:
    policy = agents.fresh()
    return af.Policy(policy.model.to(device, dtype), policy.chat)


def nudged(policy: af.Policy, seed: int) -> af.Policy:
    """Change the weights of every tensor so much that the samples differ, increment the version, return the policy."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.model.parameters():
            tensor.add_((0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor))
    policy.version += 1
    return policy


def gaps(policy: af.Policy, batch: af.Batch) -> torch.Tensor:
    """Return |engine logprob - logprob of a full forward pass of the policy| per sampled token, in nats."""
    return (policy.score(batch, {"logprob"})["logprob"] - batch.logprobs)[batch.mask].abs()


# --- this process --------------------------------------------------------------------------------


async def test_the_local_engine_gives_the_logprobs_of_a_full_forward_in_float32() -> None:
    policy = policy_on(torch.float32)
    assert float(gaps(policy, await batch_of(af.LocalEngine(policy), policy)).max()) <= FLOAT32_GAP


async def test_the_local_engine_gives_those_of_a_full_forward_in_bfloat16_about() -> None:
    policy = policy_on(torch.bfloat16)
    assert float(gaps(policy, await batch_of(af.LocalEngine(policy), policy)).mean()) <= BFLOAT16_GAP


async def test_scores_and_an_update_are_those_of_the_cpu() -> None:
    cpu, device = policy_on(torch.float32, torch.device("cpu")), policy_on(torch.float32)
    batch = await batch_of(af.LocalEngine(cpu), cpu)
    for step in range(2):
        there, here = (policy.score(batch, {"logprob"})["logprob"].cpu()[batch.mask] for policy in (device, cpu))
        assert float((there - here).abs().max()) <= FLOAT32_GAP, step
        for policy in (cpu, device):
            af.ppo_step(policy, af.adamw(policy, 1e-4), batch, af.PPOConfig(old_logprobs="recompute", max_lag=None))


@pytest.mark.parametrize("lora", [None, 4])
async def test_all_weights_or_an_adapter_are_trained_in_bfloat16(lora: int | None, tmp_path: Path) -> None:
    policy = af.Policy.load(agents.fresh().save(tmp_path), dtype="bfloat16", device=DEVICE, lora=lora)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    batch = await batch_of(af.LocalEngine(policy), policy)
    stats = af.ppo_step(policy, af.adamw(policy, 1e-4), batch)
    assert stats.grad_norm > 0 and any(not torch.equal(p, q) for p, q in zip(trained, before, strict=True))


async def test_a_short_training_moves_the_weights() -> None:
    policy = policy_on(torch.float32)
    agent = agents.agent(policy, engine=af.LocalEngine(policy))
    before = [tensor.detach().clone() for tensor in policy.model.parameters()]
    config = af.TrainConfig(steps=2, tasks_per_step=16, group_size=8)
    steps = [step async for step in af.train(agent, policy, agents.tasks(64), config)]
    assert all(step.stats is not None and step.stats.sampler_gap <= FLOAT32_GAP for step in steps)
    assert policy.device.type == DEVICE.type and policy.version > 0
    pairs = zip(before, policy.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


# --- vLLM ----------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[af.VLLMEngine]:
    made = af.VLLMEngine(policy_on(torch.bfloat16), max_num_seqs=64, kv_cache_memory_bytes=256 << 20)
    yield made
    await made.close()


@vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_new_weights_go_to_vllm_and_it_samples_from_them(engine: af.VLLMEngine) -> None:
    old = policy_on(torch.bfloat16)
    assert float(gaps(old, await batch_of(engine, old)).mean()) <= BFLOAT16_GAP
    for seed in (1, 2, 3):
        policy = nudged(policy_on(torch.bfloat16), seed)
        policy.version = seed
        await engine.update(policy)
        batch = await batch_of(engine, policy)
        assert set(batch.versions[batch.mask].tolist()) == {seed}
        gap = float(gaps(policy, batch).mean())
        assert gap <= BFLOAT16_GAP and float(gaps(old, batch).mean()) >= 5 * gap


@vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_updates_give_their_memory_back(engine: af.VLLMEngine) -> None:
    policy = nudged(policy_on(torch.bfloat16), 6)
    await engine.update(policy)
    before = torch.cuda.memory_allocated() if CUDA else 0
    for _ in range(20):
        await engine.update(policy)
    assert (torch.cuda.memory_allocated() if CUDA else 0) <= before


@vllm
@pytest.mark.skipif(not CUDA, reason="CUDA IPC needs a CUDA device")
async def test_vllm_takes_weights_over_cuda_ipc_as_documented() -> None:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    policy, settings = policy_on(torch.bfloat16), {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    async with af.serve_vllm(
        policy,
        weight_transfer_config={"backend": "ipc"},
        environment=environment,
        enable_prefix_caching=False,
        **settings,
    ) as server:
        client, source = HTTPVLLMWeightSyncClient(server.url.removesuffix("/v1")), ModuleSource(policy.model)
        sender = WeightTransferTrainerFactory.trainer_init(IPCTrainerInitInfo(rank=0), client=client, source=source)
        nudged(policy, 7)
        await asyncio.to_thread(sender.send_weights)
        assert float(gaps(policy, await batch_of(server.engine(), policy)).mean()) <= BFLOAT16_GAP
