"""LocalEngine compared with a plain forward pass of the model: numbers, seeds, caches, failures and threads."""

import asyncio
import copy
import functools
import gc
import itertools
import math
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import errors
import pytest
import torch
from agents import agent, chat, fresh, random_policy, reference_logprobs, shipped, tasks
from paths import ROOT, TESTS
from test_decoder import FAMILIES, WINDOWED, model, windowed
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.engines.local import decoder, generation
from agentfly_kit.engines.local import engine as local
from agentfly_kit.engines.local import slots as slot_table
from agentfly_kit.engines.local.decoder import FusedLlamaDecoder
from agentfly_kit.engines.local.generation import ContinuousBatch, _WeightMonitor
from agentfly_kit.errors import EngineError
from agentfly_kit.samples import TurnRequest

TASK = af.Task("t", ({"role": "user", "content": "?"},))
CLOSE = 1e-5


def request(session: str, turn: int = 0) -> TurnRequest:
    return TurnRequest(TASK, turn, session)


def prompt(n: int, seed: int = 0, size: int = 400) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, size) for _ in range(n)]


@functools.cache
def endless() -> af.Policy:
    """A random policy that never samples a stop token."""
    policy = random_policy(5, spread=0.15)
    policy.chat = type(chat())(chat().tokenizer)
    policy.chat.stop_ids = ()
    return policy


@pytest.fixture
def policy() -> af.Policy:
    return endless()


@pytest.fixture
def engine(policy: af.Policy) -> af.LocalEngine:
    return af.LocalEngine(policy)


def check(policy: af.Policy, ids: list[int], got: af.Sample, temperature: float = 1.0) -> None:
    whole = [*ids, *got.ids]
    logprobs, entropies = reference_logprobs(policy, whole, range(len(ids), len(whole)), temperature)
    assert got.logprobs == pytest.approx(logprobs, abs=CLOSE)
    assert got.entropies == pytest.approx(entropies, abs=CLOSE)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_alternatives_are_the_most_probable_tokens_of_a_full_forward(
    temperature: float, policy: af.Policy
) -> None:
    sampling = af.Sampling(temperature=temperature, max_tokens=12)
    prompts = [prompt(n, seed=n) for n in (3, 9, 40)]
    plain, engine = af.LocalEngine(policy), af.LocalEngine(policy, alternatives=7)
    got = await asyncio.gather(*(engine.sample(p, sampling, i) for i, p in enumerate(prompts)))
    for i, (p, sample) in enumerate(zip(prompts, got, strict=True)):
        without = await plain.sample(p, sampling, i)
        assert without.alternatives is None and (without.ids, without.logprobs) == (sample.ids, sample.logprobs)
        with torch.no_grad():
            hidden = policy.hidden(torch.tensor([[*p, *sample.ids]]))[0, len(p) - 1 : -1]
            logp = (policy.logits(hidden) / (temperature or 1.0)).log_softmax(-1)
        if temperature == 0:
            assert list(sample.ids) == [best[0][0] for best in sample.alternatives]
        for k, best in enumerate(sample.alternatives):
            assert [lp for _, lp in best] == pytest.approx(logp[k].topk(7).values.tolist(), abs=CLOSE)
            assert [lp for _, lp in best] == pytest.approx(logp[k][[id for id, _ in best]].tolist(), abs=CLOSE)
            if sample.ids[k] in dict(best):
                assert dict(best)[sample.ids[k]] == sample.logprobs[k]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_and_entropies_are_those_of_a_full_forward(
    temperature: float, policy: af.Policy, engine: af.LocalEngine
) -> None:
    sampling = af.Sampling(temperature=temperature, max_tokens=30)
    # Prompt lengths around all widths and capacities at which the engine rounds.
    prompts = [prompt(n, seed=n) for n in (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 129)]
    got = await asyncio.gather(*(engine.sample(p, sampling, i) for i, p in enumerate(prompts)))
    for p, sample in zip(prompts, got, strict=True):
        assert (sample.stop, len(sample.ids or ())) == ("length", 30)
        check(policy, p, sample, temperature)


async def test_rows_with_different_settings_are_independent(policy: af.Policy, engine: af.LocalEngine) -> None:
    settings = [
        af.Sampling(temperature=0.5, max_tokens=9), af.Sampling(temperature=0, max_tokens=5),
        af.Sampling(top_p=0.8, max_tokens=12), af.Sampling(top_k=3, temperature=1.3, max_tokens=3),
        af.Sampling(max_tokens=20),
    ]  # fmt: skip
    alone = [await af.LocalEngine(policy).sample(prompt(10), s, 3) for s in settings]
    together = await asyncio.gather(*(engine.sample(prompt(10), s, 3) for s in settings))
    for s, a, b in zip(settings, alone, together, strict=True):
        assert (a.ids, a.logprobs, a.entropies, a.kept_mass) == (b.ids, b.logprobs, b.entropies, b.kept_mass)
        check(policy, prompt(10), b, s.temperature or 1.0)


@pytest.mark.parametrize(
    ("path", "heads"),
    [
        ("fused", 2),
        ("modules", 4),
        ("packed", 2),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("fused", 4), ("modules", 2))),
    ],
)
async def test_rows_are_bitwise_equal_beside_rows_of_any_length(
    path: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "modules":
        monkeypatch.setattr(FusedLlamaDecoder, "try_build", lambda *given: None)
    if path == "packed":
        monkeypatch.setattr(decoder, "_MIN_PACKED_PARAMETERS", 0)
    policy = random_policy(heads=heads, length=1024)
    policy.chat = endless().chat
    # Kernels sum over 193 to 511 keys, and over as many beyond each 512, in an order that depends on their number.
    lengths = (60, 110, 150, 185, 200, 250, 300, 340, 370, 390, 450, 600, 700, 760, 850, 930)
    sampling = af.Sampling(max_tokens=8)

    async def sampled(engine: af.LocalEngine, length: int) -> tuple[Any, Any]:
        got = await engine.sample(prompt(length, seed=length), sampling, length)
        return got.ids, got.logprobs

    alone = [await sampled(af.LocalEngine(policy), length) for length in lengths]
    for count in (3, len(lengths)):  # a row beside rows that are a little longer, and beside much longer ones
        for at in range(0, len(lengths), count):
            engine = af.LocalEngine(policy)
            together = await asyncio.gather(*(sampled(engine, length) for length in lengths[at : at + count]))
            assert together == alone[at : at + count]


def plain_kept(p: list[float], s: af.Sampling) -> tuple[set[int], float]:
    """Apply top-k, top-p and min-p in this order, in plain Python; return the kept tokens and their mass."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: s.top_k] if s.top_k else order
    mass = math.fsum(p[i] for i in kept)
    out, before = [], 0.0
    for i in kept:
        if before >= s.top_p and s.top_p < 1:
            break
        out.append(i)
        before += p[i] / mass
    out = [i for i in out if p[i] >= s.min_p * p[order[0]]]
    return set(out), math.fsum(p[i] for i in out)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.7, "top_k": 6, "min_p": 0.05}, {"top_k": 1},
        {"top_p": 1e-9},
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_truncation_keeps_the_documented_tokens(
    options: dict[str, Any], temperature: float, policy: af.Policy, engine: af.LocalEngine
) -> None:
    s = af.Sampling(temperature=temperature, max_tokens=12, **options)
    got = await engine.sample(prompt(9), s, 11)
    check(policy, prompt(9), got, temperature)  # logprobs refer to the distribution before truncation
    ids = prompt(9)
    for token, kept in zip(got.ids, got.kept_mass, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature
        wanted, mass = plain_kept(torch.softmax(logits, -1).tolist(), s)
        assert token in wanted
        assert kept == pytest.approx(mass, abs=1e-5)
        ids.append(token)


async def test_sampled_frequencies_match_the_probabilities(policy: af.Policy, engine: af.LocalEngine) -> None:
    ids, n = prompt(6), 1500
    got = await asyncio.gather(*(engine.sample(ids, af.Sampling(max_tokens=1), seed) for seed in range(n)))
    counts = Counter((s.ids or (-1,))[0] for s in got)
    with torch.no_grad():
        p = torch.softmax(policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1).tolist()
    common = [i for i in range(len(p)) if p[i] * n >= 10]
    pairs = [(counts[i], n * p[i]) for i in common]
    pairs.append((n - sum(counts[i] for i in common), n * (1 - sum(p[i] for i in common))))  # all other tokens
    chi2 = sum((found - expected) ** 2 / expected for found, expected in pairs)
    freedom = len(common)
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)  # seeds are fixed, so this is deterministic


async def test_distribution_is_that_of_the_model(policy: af.Policy, engine: af.LocalEngine) -> None:
    ids, logprobs, entropy = await engine.distribution(prompt(20), af.Sampling(temperature=0.7), top=5)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt(20)])).logits[0, -1].double() / 0.7
    logp = torch.log_softmax(logits, -1)
    best = logp.topk(5)
    assert ids == best.indices.tolist()
    assert logprobs == pytest.approx(best.values.tolist(), abs=CLOSE)
    assert entropy == pytest.approx(float(-(logp.exp() * logp).sum()), abs=CLOSE)
    everything, _, _ = await engine.distribution(prompt(20), af.Sampling(), top=10**6)
    assert sorted(everything) == list(range(policy.vocab_size))


# --- kinds of attention --------------------------------------------------------------------------


# Families and what docs/models.md states about them.
DOCUMENTED = {
    family: outcome
    for names, outcome in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", (ROOT / "docs/models.md").read_text(), re.M
    )
    for family in re.findall(r"\w+", names)
}


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "sdpa") for family in DOCUMENTED] + [(family, "eager") for family in (*WINDOWED, "llama")],
)
async def test_every_family_has_the_logprobs_of_a_full_forward_or_is_refused(family: str, attention: str) -> None:
    """Test contexts longer than the windows during prefill, decoding, a reused history and a copied prefix."""
    changes, outcome = FAMILIES.get(family, {}), DOCUMENTED[family]
    made = windowed(family, 16, attention) if family in (*WINDOWED, "llama") else model(family, **changes)
    if "recurrent" in outcome:  # with larger weights, the rounding errors of a plain forward pass exceed 1e-4
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.1)
    policy = af.Policy(made, type(chat())(chat().tokenizer))
    policy.chat.stop_ids = ()
    if refused := outcome.partition("refused: ")[2]:
        errors.check(lambda: af.LocalEngine(policy), af.errors.AgentFlyError, refused)
        return
    engine = af.LocalEngine(policy, slots=8)
    assert engine.reproducible is ("not reproducible" not in outcome)
    first = [prompt(n, seed=1, size=90) for n in (5, 14, 30, 30, 45)]
    got = await asyncio.gather(
        *(engine.sample(ids, af.Sampling(max_tokens=9), i, request=request(str(i))) for i, ids in enumerate(first))
    )
    second = [[*ids, *(s.ids or ()), *prompt(6, seed=2, size=90)] for ids, s in zip(first, got, strict=True)]
    again = await asyncio.gather(
        *(
            engine.sample(ids, af.Sampling(max_tokens=9 + i), i, request=request(str(i), 1))
            for i, ids in enumerate(second)
        )
    )
    assert engine.prefilled < sum(map(len, first)) + 7 * len(second), "histories were computed again"
    # A history that is continued in another way, one that was replaced in its slot, and a prompt beside running rows.
    third = [second[0][:-3], *([*ids, *s.ids, 7] for ids, s in zip(second, again, strict=True)), [8], *first]
    last = await asyncio.gather(
        *(
            engine.sample(ids, af.Sampling(max_tokens=3 + i), i, request=request(str(i), 2))
            for i, ids in enumerate(third)
        )
    )
    for ids, sample in zip([*first, *second, *third], [*got, *again, *last], strict=True):
        check(policy, ids, sample)
    ids = torch.tensor([[*third[1], *last[1].ids]])
    scored = policy.forward(ids, torch.arange(ids.shape[1])[None] >= len(third[1]), torch.ones(1)).logprob
    assert last[1].logprobs == pytest.approx(scored.tolist(), abs=CLOSE)


# --- seeds ---------------------------------------------------------------------------------------


def tokens(rollout: af.Rollout) -> list[Any]:
    return [(t.id, t.ids.tolist(), t.logprobs.tobytes(), t.entropies.tobytes(), t.reward) for t in rollout]


async def test_samples_do_not_depend_on_concurrency_slots_or_earlier_requests() -> None:
    whole = await agent(fresh()).rollout(tasks(4), group_size=8, max_concurrency=1)
    assert len({len(t.turns) for t in whole}) > 1, "the chains must differ in length"
    for concurrency, slots in ((13, 64), (64, 64), (64, 8)):
        a = agent(engine=af.LocalEngine(fresh(), slots=slots))
        assert tokens(await a.rollout(tasks(4), group_size=8, max_concurrency=concurrency)) == tokens(whole)
        await a.rollout(tasks(6, seed=1), group_size=2, index=3)  # fills the slots with other rows
        assert tokens(await a.rollout(tasks(4), group_size=8)) == tokens(whole)


# --- reuse between turns ------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [6, pytest.param(20, marks=pytest.mark.long)])
async def test_chains_of_many_turns_compute_each_token_once(turns: int) -> None:
    """The observations have 200 tokens. The chains wait for each other and reach other lengths."""
    made = model("qwen3", max_position_embeddings=8192, num_hidden_layers=1, num_key_value_heads=1)
    policy = af.Policy(made, type(chat())(chat().tokenizer))
    policy.chat.stop_ids = ()
    engine, chains, observation = af.LocalEngine(policy), 2, 200

    async def chain(number: int) -> tuple[list[int], af.Sample]:
        ids, sampling = prompt(30 + number, seed=number, size=90), af.Sampling(max_tokens=4 + number)
        sample = await engine.sample(ids, sampling, 0, request=request(str(number)))
        for turn in range(1, turns):
            ids = [*ids, *(sample.ids or ()), *prompt(observation, seed=turn, size=90)]
            sample = await engine.sample(ids, sampling, turn, request=request(str(number), turn))
        return ids, sample

    last = await asyncio.gather(*map(chain, range(chains)))
    # The last token of a turn is not an input before the next turn.
    assert engine.prefilled == sum(30 + i for i in range(chains)) + chains * (turns - 1) * (observation + 1)
    for ids, sample in last:
        assert len(ids) > (turns - 1) * observation
        check(policy, ids, sample)


async def test_what_prompts_have_in_common_is_computed_once(policy: af.Policy, engine: af.LocalEngine) -> None:
    prompts = [prompt(50) + prompt(7, seed=i) for i in range(4) for _ in range(3)]
    got = await asyncio.gather(
        *(engine.sample(ids, af.Sampling(max_tokens=4), i, request=request(str(i))) for i, ids in enumerate(prompts))
    )
    assert engine.prefilled <= 50 + 4 * 7 + len(prompts)  # a request that arrives late computes the last token
    for ids, sample in zip(prompts, got, strict=True):
        check(policy, ids, sample)


async def test_requests_submitted_together_stay_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, steps, prefills = endless(), Counter[int](), []
    engine = af.LocalEngine(policy)
    decode, logits = ContinuousBatch._decode, ContinuousBatch._prompt_logits

    def counted(self: ContinuousBatch) -> None:
        steps[self.table.active] += 1
        decode(self)

    def prompted(self: ContinuousBatch, chosen: Any) -> Any:
        prefills.append(len(chosen))
        return logits(self, chosen)

    monkeypatch.setattr(ContinuousBatch, "_decode", counted)
    monkeypatch.setattr(ContinuousBatch, "_prompt_logits", prompted)
    # The last rows exceed the limit of one prefill, but only their new tokens count.
    rows = [prompt(60 + i % 3, seed=i) for i in range(32)]
    for turn in range(4):
        asked = [
            engine.sample(ids, af.Sampling(max_tokens=8), i, request=request(f"s{i}", turn))
            for i, ids in enumerate(rows)
        ]
        got = await asyncio.gather(*asked)
        rows = [[*ids, *(s.ids or ()), *prompt(20, seed=turn)] for ids, s in zip(rows, got, strict=True)]
    assert prefills == [32] * 4
    assert steps == {32: 4 * 7}


async def test_a_rewritten_history_is_recomputed_from_the_first_change(
    policy: af.Policy, engine: af.LocalEngine
) -> None:
    ids = prompt(30)
    await engine.sample(ids, af.Sampling(max_tokens=10), 1, request=request("a"))
    for turn, given in enumerate(([*ids[:20], *prompt(15, seed=9)], ids[:5], ids), 1):
        check(policy, given, await engine.sample(given, af.Sampling(max_tokens=10), 1, request=request("a", turn)))


async def test_released_sessions_free_their_slots() -> None:
    engine = af.LocalEngine(endless(), slots=8)
    for i in range(30):
        await engine.sample(prompt(5, seed=i), af.Sampling(max_tokens=2), 0, request=request(f"s{i}"))
        engine.release(f"s{i}")
    await engine.sample(prompt(5), af.Sampling(max_tokens=2), 0)
    assert not engine._batch.table.session_slot


def change(policy: af.Policy, seed: int) -> None:
    """Change the weights and the version, like an update."""
    generator = torch.Generator().manual_seed(seed)
    with policy.lock, torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
        policy.version += 1


def optimize(policy: af.Policy) -> None:
    """Step with a fused optimizer, which changes neither the policy's version nor torch's version counters."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05, fused=True)
    policy.model(input_ids=torch.tensor([prompt(30)])).logits.logsumexp(-1).sum().backward()
    optimizer.step()


@torch.no_grad()
def scale(policy: af.Policy) -> None:
    policy.model.get_input_embeddings().weight.mul_(1.1)


def edit(policy: af.Policy, name: str) -> None:
    """Change all but the first elements of a matrix or a vector through `data`."""
    policy.model.get_submodule(f"model.layers.0.{name}").weight.data[8:] *= -2


CHANGES: dict[str, Any] = {
    "new version": lambda policy: change(policy, 1),
    "other weights": lambda policy: policy.load_state(random_policy(8).state()),
    "without a new version": scale,
    "matrix": lambda policy: edit(policy, "self_attn.q_proj"),
    "vector": lambda policy: edit(policy, "self_attn.q_norm"),
    "fused optimizer": optimize,
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
async def test_changed_weights_invalidate_cached_keys(changes: Any) -> None:
    policy = random_policy(7)
    engine = af.LocalEngine(policy)
    ids, sampling = prompt(30), af.Sampling(max_tokens=8)
    first = await engine.sample(ids, sampling, 1, request=request("a"))
    assert first.versions == (0,) * len(first.ids or ())
    changes(policy)
    more = [*ids, *(first.ids or ()), *prompt(5, seed=3)]
    for session, turn, given in (("a", 1, more), ("b", 0, ids)):
        got = await engine.sample(given, sampling, 1, request=request(session, turn))
        check(policy, given, got)
        assert got.versions == (policy.version,) * len(got.ids or ())


def test_every_change_of_a_weight_is_noticed() -> None:
    summary = _WeightMonitor(random_policy(7))._summary
    for p in (torch.randn(20, 8), torch.randn(20, 8).bfloat16(), torch.randn(3, 4, 8), torch.ones(2, 2).int()):
        before = summary(p)
        p.data[0 if p.dtype == torch.int32 else -1] *= 3
        assert not torch.equal(summary(p), before)


def hold(engine: af.LocalEngine) -> tuple[threading.Event, threading.Event]:
    """Let an engine wait before its fourth decode step. Return events that it has got there and that it may go on."""
    reached, go_on = threading.Event(), threading.Event()
    decode, steps = engine._batch._decode, itertools.count(1)

    def held() -> None:
        if next(steps) == 4:
            reached.set()
            go_on.wait(GUARD)
        decode()

    engine._batch._decode = held  # type: ignore[method-assign]
    return reached, go_on


async def test_prefixes_are_not_copied_from_rows_with_old_keys() -> None:
    """A row that began before an update keeps its old keys until it ends."""
    policy = random_policy(9)
    policy.chat = endless().chat
    engine = af.LocalEngine(policy)
    ids = prompt(60)
    reached, go_on = hold(engine)
    long = asyncio.create_task(engine.sample(ids, af.Sampling(max_tokens=190), 1, request=request("old")))
    await until(reached.is_set)
    change(policy, 2)
    new = asyncio.create_task(engine.sample(ids, af.Sampling(max_tokens=4), 2, request=request("new")))
    await until(lambda: engine._inbox)  # while the old row is running
    go_on.set()
    got = await new
    assert got.versions == (1,) * 4
    check(policy, ids, got)
    assert set((await long).versions or ()) == {0, 1}


# --- stop conditions -----------------------------------------------------------------------------


async def test_a_stop_token_is_kept_and_counted() -> None:
    policy = random_policy(3)
    policy.chat = type(chat())(chat().tokenizer)
    policy.chat.stop_ids = tuple(range(0, 400, 3))
    engine = af.LocalEngine(policy)
    got = await asyncio.gather(*(engine.sample(prompt(5, seed=i), af.Sampling(max_tokens=50), i) for i in range(20)))
    assert {s.stop for s in got} == {"stop"}
    for sample in got:
        ids = sample.ids or ()
        assert ids[-1] in policy.chat.stop_ids
        assert not set(ids[:-1]) & set(policy.chat.stop_ids)


async def test_a_stop_string_ends_the_turn_after_a_whole_token(policy: af.Policy) -> None:
    whole = await af.LocalEngine(policy).sample(prompt(5), af.Sampling(max_tokens=40), 4)
    stop = policy.chat.text(whole.ids or ())[9:11]
    got = await af.LocalEngine(policy).sample(prompt(5), af.Sampling(max_tokens=40, stop=(stop,)), 4)
    assert got.ids is not None and whole.ids is not None
    assert (got.stop, got.ids) == ("string", whole.ids[: len(got.ids)])
    assert stop in policy.chat.text(got.ids) and stop not in policy.chat.text(got.ids[:-1])


async def test_the_context_limits_a_turn() -> None:
    engine = af.LocalEngine(endless())  # 256 positions
    got = await engine.sample(prompt(250), af.Sampling(max_tokens=50), 0)
    assert (got.stop, len(got.ids or ())) == ("length", 6)
    check(endless(), prompt(250), got)
    await errors.check(
        lambda: engine.sample(prompt(256), af.Sampling(), 0),
        EngineError,
        "256 ids leave no space for an action in a context of 256",
    )
    assert len((await engine.sample(prompt(255), af.Sampling(max_tokens=50), 0)).ids or ()) == 1


# --- cancelling and failing ----------------------------------------------------------------------


async def test_a_cancelled_request_frees_its_row(policy: af.Policy) -> None:
    engine = af.LocalEngine(policy, slots=8)
    reached, go_on = hold(engine)
    wanted = await af.LocalEngine(policy).sample(prompt(8), af.Sampling(max_tokens=60), 5)
    doomed = [
        asyncio.create_task(
            engine.sample(prompt(20 + i, seed=i), af.Sampling(max_tokens=200), i, request=request(f"d{i}"))
        )
        for i in range(20)
    ]
    lucky = asyncio.create_task(engine.sample(prompt(8), af.Sampling(max_tokens=60), 5))
    await until(reached.is_set)
    for task in doomed:
        task.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*doomed, return_exceptions=True))
    go_on.set()
    got = await lucky
    assert (got.ids, got.logprobs) == (wanted.ids, wanted.logprobs)
    check(policy, prompt(20), await engine.sample(prompt(20), af.Sampling(max_tokens=5), 0, request=request("d0", 1)))
    assert engine._batch.table.active == 0


@pytest.mark.parametrize("when", ["_forward", "_decode", "sample_tokens"])
async def test_a_failure_fails_all_requests_and_the_engine_recovers(
    when: str, monkeypatch: pytest.MonkeyPatch, engine: af.LocalEngine
) -> None:
    wanted = await engine.sample(prompt(8), af.Sampling(max_tokens=12), 5)
    where: Any = generation if when == "sample_tokens" else ContinuousBatch
    real, calls = getattr(where, when), [0]

    def failing(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == (1 if when == "_forward" else 3):
            raise RuntimeError("out of memory")
        return real(*args, **options)

    monkeypatch.setattr(where, when, failing)
    many = [
        engine.sample(prompt(10 + i, seed=i), af.Sampling(max_tokens=20), i, request=request(str(i)))
        for i in range(6)
    ]
    got = await asyncio.gather(*many, return_exceptions=True)
    failed = [g for g in got if isinstance(g, EngineError)]
    assert failed, "at least one request was running"
    assert all("LocalEngine failed while sampling: RuntimeError: out of memory" in str(e) for e in failed)
    assert all(isinstance(g, EngineError | af.Sample) for g in got)
    for _ in range(3):  # including requests of a session that failed
        again = await engine.sample(prompt(8), af.Sampling(max_tokens=12), 5, request=request("0"))
        assert (again.ids, again.logprobs) == (wanted.ids, wanted.logprobs)


async def test_concurrent_requests_of_one_session_are_rejected(engine: af.LocalEngine) -> None:
    reached, go_on = hold(engine)
    other = asyncio.create_task(engine.sample(prompt(9), af.Sampling(max_tokens=60), 1, request=request("other")))
    first = asyncio.create_task(engine.sample(prompt(8), af.Sampling(max_tokens=60), 1, request=request("a")))
    await until(reached.is_set)
    second = asyncio.create_task(engine.sample(prompt(8), af.Sampling(max_tokens=5), 1, request=request("a")))
    await until(lambda: engine._inbox)
    go_on.set()
    await errors.check(lambda: second, EngineError, "session 'a' has two concurrent requests")
    assert [len((await task).ids or ()) for task in (other, first)] == [60, 60]


async def test_dropout_stays_off_after_another_library_trained_the_model() -> None:
    """Also looked at: the trainer and imitation, which use the policy's forward pass, and gradient checkpointing."""
    policy = af.Policy(model("opt", word_embed_proj_dim=48, ffn_dim=80, dropout=0.5), chat())
    engine = af.LocalEngine(policy)
    for _ in range(2):
        check(policy, prompt(8), await engine.sample(prompt(8), af.Sampling(max_tokens=4), 3))
        policy.model.train()


async def test_logits_that_are_not_finite_raise() -> None:
    policy = random_policy(11)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(math.nan)
    await errors.check(
        lambda: af.LocalEngine(policy).sample(prompt(4), af.Sampling(max_tokens=3), 0),
        EngineError,
        "the logits are not finite; the policy's weights have diverged",
    )


# --- loops and threads ---------------------------------------------------------------------------


def test_a_closed_event_loop_does_not_block_the_engine(engine: af.LocalEngine) -> None:

    async def leave() -> None:
        task = asyncio.create_task(engine.sample(prompt(8), af.Sampling(max_tokens=200), 5))
        await until(lambda: engine.sampled >= 3)
        del task

    asyncio.run(leave())  # cancels the pending task and closes the loop
    assert len(asyncio.run(engine.sample(prompt(8), af.Sampling(max_tokens=12), 5)).ids or ()) == 12


def test_two_event_loops_at_once(engine: af.LocalEngine) -> None:
    got: list[list[af.Sample]] = []

    async def go(seed: int) -> list[af.Sample]:
        return list(
            await asyncio.gather(*(engine.sample(prompt(8), af.Sampling(max_tokens=12), seed + i) for i in range(4)))
        )

    threads = [threading.Thread(target=lambda s=s: got.append(asyncio.run(go(s)))) for s in (0, 100)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    assert sorted(len(g) for g in got) == [4, 4]


async def test_an_idle_engine_has_no_thread_and_can_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_IDLE_SECONDS", 0.02)
    engine = af.LocalEngine(endless())
    await engine.sample(prompt(4), af.Sampling(max_tokens=2), 0)
    gone = weakref.ref(engine)
    await until(lambda: gone()._thread is None)  # type: ignore[union-attr]
    assert (
        len((await engine.sample(prompt(4), af.Sampling(max_tokens=2), 0)).ids or ()) == 2
    )  # the thread is restarted
    del engine
    await until(lambda: gc.collect() < 0 or gone() is None)


SCRIPT = """
import asyncio, sys
sys.path[:0] = {tests!r}
import test_engine_local as t

async def go():
    engine = t.af.LocalEngine(t.endless())
    for i in range(8):
        asyncio.ensure_future(engine.sample(t.prompt(20, seed=i), t.af.Sampling(max_tokens=230), i))
    while engine.sampled < 80:
        await asyncio.sleep(0.001)
    globals()["kept"] = engine
    raise SystemExit(7)

asyncio.run(go())
"""


LEAVING = """
import asyncio, contextlib, sys, time
sys.path[:0] = {tests!r}
import torch
import test_engine_local as t

@contextlib.contextmanager
def slowly(policy):
    yield
    for _ in range(300):  # simulates work after the last request on a busy machine
        torch.randn(400, 400) @ torch.randn(400, 400)

t.local.single_torch_thread, t.local._IDLE_SECONDS = slowly, 0.01
engine = t.af.LocalEngine(t.endless())
asyncio.run(engine.sample(t.prompt(20), t.af.Sampling(max_tokens=3), 0))
while engine._thread is not None:
    time.sleep(0.001)
sys.exit(7)
"""


@pytest.mark.real
@pytest.mark.parametrize("program", [SCRIPT, LEAVING], ids=["forward pass", "idle thread"])
def test_the_interpreter_can_exit_while_a_thread_runs(program: str) -> None:
    script = program.format(tests=[str(TESTS), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * GUARD)
    assert done.returncode == 7, done.stderr


async def test_only_float32_on_a_cpu_is_reproducible(monkeypatch: pytest.MonkeyPatch, engine: af.LocalEngine) -> None:
    assert engine.reproducible
    with monkeypatch.context() as patch:
        patch.setattr(local, "is_batch_invariant", lambda *_: False)
        assert not engine.reproducible
    half = random_policy(2)
    half.model.to(torch.bfloat16)
    assert not af.LocalEngine(half).reproducible
    experts = af.LocalEngine(af.Policy(model("mixtral", num_local_experts=4), chat()))
    assert not experts.reproducible and "not reproducible: the rows of an expert" in repr(experts)
    few = af.LocalEngine(shipped(), slots=8)
    for session in "abcdefghi":
        assert few.reproducible
        await few.sample(prompt(9), af.Sampling(max_tokens=2), 0, request=request(session))
    assert not few.reproducible and "more unfinished chains than slots" in repr(few)
    got = await af.LocalEngine(half).sample(prompt(5), af.Sampling(max_tokens=4), 0)
    assert all(math.isfinite(x) for x in got.logprobs or (math.nan,))


# The import of agentfly_kit sets MKL_CBWR. Without a LocalEngine, transformers, which takes seconds, is not imported.
REPORT = "from agentfly_kit.engines.local.kv_cache import is_batch_invariant; print(is_batch_invariant(1, True))"


@pytest.mark.real
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch does not use MKL")
@pytest.mark.parametrize(("setting", "says"), [(None, "True"), ("AVX2,STRICT", "True"), ("COMPATIBLE", "False")])
def test_batch_invariance_is_measured(setting: str | None, says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    if setting:
        environment["MKL_CBWR"] = setting
    done = subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, timeout=GUARD
    )
    assert done.stdout.strip() == says, done.stderr


async def test_uninitialized_memory_is_never_read(monkeypatch: pytest.MonkeyPatch, policy: af.Policy) -> None:
    """Make torch fill allocated memory with NaN, which masking would not remove."""
    monkeypatch.setattr(slot_table, "_CAPACITY_STEP", 32)  # so that the cache grows more than once

    async def sampled() -> list[af.Sample]:
        engine, got = af.LocalEngine(policy), []
        for chains, length in ((3, 10), (20, 40), (9, 90)):
            wanted = [
                engine.sample(prompt(length + i, i), af.Sampling(max_tokens=30), i, request=request(f"{chains} {i}"))
                for i in range(chains)
            ]
            got += await asyncio.gather(*wanted)
        await engine.close()
        return got

    plain = await sampled()
    torch.use_deterministic_algorithms(True)  # enables fill_uninitialized_memory
    try:
        assert bool(torch.empty(3).isnan().all())
        poisoned = await sampled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [s.ids for s in poisoned] == [s.ids for s in plain]
    assert [s.logprobs for s in poisoned] == [s.logprobs for s in plain]


async def test_a_fork_has_the_same_logprobs_whether_keys_of_its_parent_are_left_or_not() -> None:
    """With few chains at once, the parent has ended, and others have taken its slot, before its fork begins."""
    ids, found = prompt(30, seed=1), []
    for others in (0, 40):
        engine = af.LocalEngine(shipped())
        parent = await engine.sample(ids, af.Sampling(max_tokens=24), 1, request=request("a"))
        engine.release("a")
        for i in range(others):
            await engine.sample(prompt(60, seed=2 + i), af.Sampling(max_tokens=1), 1)
        longer = [*ids, *(parent.ids or ()), *prompt(5, seed=9)]
        found.append((await engine.sample(longer, af.Sampling(max_tokens=24), 2, request=request("a.1", 1))).logprobs)
    assert found[0] == found[1]


async def test_a_model_is_tried_only_while_its_weights_are_locked(
    monkeypatch: pytest.MonkeyPatch, policy: af.Policy
) -> None:
    """During an update, the test forward passes would compare results of different weights."""
    locked: list[bool] = []
    build = FusedLlamaDecoder.try_build

    def watched(*given: Any) -> Any:
        locked.append(policy.lock.locked())
        return build(*given)

    monkeypatch.setattr(FusedLlamaDecoder, "try_build", watched)
    engine = af.LocalEngine(policy)
    await engine.sample(prompt(9, seed=1), af.Sampling(max_tokens=4), 1)
    monkeypatch.setattr(policy, "model", copy.deepcopy(policy.model))
    await engine.sample(prompt(9, seed=2), af.Sampling(max_tokens=4), 2)
    assert locked == [True, True]
