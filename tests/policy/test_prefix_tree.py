"""Rows that begin alike, run as trees: the same numbers and gradients as the rows, for fewer tokens."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import random_policy
from test_decoder import model
from test_ppo import batch_of

from agentfly_kit.policy.policy import Policy
from agentfly_kit.policy.prefix_tree import PackedTrees, build_prefix_trees
from agentfly_kit.ppo import PPOConfig, ppo_step


def branching(seed: int, count: int = 12, vocabulary: int = 400) -> Any:
    """Rows that begin alike, as the chains of groups do: some twice the same, some the beginning of others."""
    g = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    texts: list[list[int]] = []
    for i in range(count):
        kind = pick(0, 4) if texts else 0
        other = texts[pick(0, len(texts))] if texts else []
        tail = torch.randint(7, vocabulary, (pick(2, 9),), generator=g).tolist()
        texts.append(tail if kind == 0 else other if kind == 1 else other[: pick(1, len(other) + 1)] + tail)
        texts[-1] = texts[-1] if len(texts[-1]) > 1 else [*texts[-1], 7 + i]
    lengths = torch.tensor([len(t) for t in texts])
    ids = torch.zeros(count, int(lengths.max()), dtype=torch.int64)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
    mask = (torch.rand(ids.shape, generator=g) < 0.4) & (torch.arange(ids.shape[1])[None] < lengths[:, None])
    mask[:, 0] = False
    mask[torch.arange(count), lengths - 1] = True
    return SimpleNamespace(ids=ids, mask=mask, lengths=lengths, temperatures=torch.ones(count))


def alone(policy: Policy) -> Policy:
    """The same policy, which runs every row by itself."""
    policy._trees_supported = False
    return policy


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [1.0, 1e9])
def test_every_row_stands_in_its_tree_and_sees_itself_alone(seed: int, scale: float) -> None:
    rows = branching(seed)
    lengths = rows.lengths.tolist()
    trees = build_prefix_trees(rows.ids, lengths, scale=scale, max_tokens=100)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(len(lengths)))
    packed = PackedTrees.build(trees, rows.ids, lengths)
    sees, width = packed.mask()[:, 0], packed.ids.shape[1]
    for i, n in enumerate(lengths):
        places = packed.token_index[i, :n].tolist()
        assert packed.ids.flatten()[places].tolist() == rows.ids[i, :n].tolist()
        assert packed.positions.flatten()[places].tolist() == list(range(n))
        tree = places[0] // width
        for k, place in enumerate(places):
            seen = sees[tree, place - tree * width].nonzero()[:, 0] + tree * width
            assert seen.tolist() == places[: k + 1], "itself and what stands before it in its row, and nothing else"
    if scale == 1e9:
        distinct = {tuple(rows.ids[i, :k].tolist()) for i, n in enumerate(lengths) for k in range(1, n + 1)}
        assert sum(tree.width for tree in trees) == len(distinct)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7, 1.3)], ids=["one", "several"])
@pytest.mark.parametrize("head", [True, "separate"])
def test_a_forward_of_trees_is_the_forward_of_the_rows(seed: int, temperatures: Any, head: Any) -> None:
    rows = branching(seed)
    rows.temperatures = torch.tensor([temperatures[i % len(temperatures)] for i in range(len(rows.ids))])
    found = []
    for own in (False, True):
        policy = random_policy(seed)
        policy = Policy(policy.model, policy.chat, value_head=head)
        with torch.no_grad():
            for p in policy.value_head.parameters():  # type: ignore[union-attr]
                p.add_(0.1)
        if own:
            alone(policy)
        got = policy.forward(rows.ids, rows.mask, rows.temperatures, entropy=True, value=True)
        weigh = torch.linspace(-1, 1, len(got.logprob))
        (got.logprob * weigh + got.entropy * weigh.flip(0) + got.value * weigh.square()).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        found.append((got.logprob, got.entropy, got.value, got.hidden, gradient))
        assert policy._trees_supported is not own
    for grown, plain in zip(*found, strict=True):
        torch.testing.assert_close(grown, plain, atol=2e-5 * max(1.0, float(plain.detach().abs().max())), rtol=0)


def test_only_distinct_tokens_are_run_and_their_logits_made_once() -> None:
    policy, rows = random_policy(0), branching(1, count=20)
    seen: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, given, out: seen.append(given[0].numel()))
    policy.score(rows, {"logprob"})
    seen.clear()  # the trial is over
    for part in policy.micro_batches(rows):
        policy.forward(rows.ids[part], rows.mask[part], rows.temperatures[part])
    assert sum(seen) < 0.7 * int(rows.lengths.sum()), (seen, rows.lengths)


@pytest.mark.parametrize("micro", [1, 30, 60, 10**6])
def test_micro_batches_hold_every_row_once_and_few_tokens(micro: int) -> None:
    policy, rows = random_policy(0), branching(2, count=24)
    some = torch.arange(0, 24, 2)
    parts = policy.micro_batches(rows, some, micro)
    assert sorted(torch.cat(parts).tolist()) == some.tolist()
    for part in parts:
        lengths = rows.lengths[part].tolist()
        distinct = {
            tuple(rows.ids[i, :k].tolist()) for i, n in zip(part, lengths, strict=True) for k in range(1, n + 1)
        }
        assert len(distinct) <= max(micro, *lengths), "a row that is too long goes alone, and nothing else does"


@pytest.mark.parametrize(
    ("family", "attention", "grows"),
    [
        ("llama", "sdpa", True),
        ("qwen3", "eager", True),
        ("gemma2", "eager", False),  # soft caps and sliding windows
        ("qwen2", "flash_attention_2", False),
        ("bloom", "eager", False),  # where a token stands it counts from its mask
    ],
)
def test_a_model_that_runs_trees_otherwise_is_given_rows(family: str, attention: str, grows: bool) -> None:
    shape = {"n_layer": 2, "n_head": 4, "hidden_size": 48} if family == "bloom" else {}
    made = model(family, **shape)
    made.config._attn_implementation = attention
    policy = Policy(made, random_policy(0).chat)
    assert policy._supports_trees() is grows


@pytest.mark.parametrize("micro", [None, 8])
def test_an_engine_that_computes_otherwise_is_found_before_the_first_update(micro: int | None) -> None:
    """In a batch of eight rows or fewer each is probed: whichever it shows in, all are scored again."""
    policy = random_policy(0)
    batch = batch_of(policy)
    assert len(batch) <= 8
    shortest = int(batch.lengths.argmin())
    wrong = batch.logprobs.clone()
    wrong[shortest] -= 0.01
    other = dataclasses.replace(batch, logprobs=wrong)

    def after(batch: Any, **options: Any) -> Any:
        twin = policy.copy()
        stats = ppo_step(
            twin, torch.optim.SGD(list(twin.parameters()), lr=1.0), batch, PPOConfig(micro_tokens=micro, **options)
        )
        return stats, torch.cat([p.detach().flatten() for p in twin.parameters()])

    wanted, weights = after(other, old_logprobs="recompute")
    stats, got = after(other)
    assert stats.sampler_gap == pytest.approx(0.01, abs=1e-4) == wanted.sampler_gap
    assert torch.equal(got, weights)
    exact, _ = after(batch)
    assert 0 < exact.sampler_gap < 1e-4
    quiet, _ = after(batch.replace(advantages=torch.where(batch.mask, 0.0, math.nan)))
    assert 0 < quiet.sampler_gap < 1e-4, "rows without advantage are probed too"
