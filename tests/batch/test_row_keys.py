"""Rows with images share computation only where their images are equal too, although all placeholders have equal ids.

The policies of these tests ignore images: keys of placeholders are compared with an oracle, ids in which each
placeholder of each image is another token.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import agents
import dice
import errors
import numpy as np
import PIL.Image
import pytest
import torch

import agentfly_kit as af
from agentfly_kit.batch.batch import join
from agentfly_kit.engines.local import images as prompts
from agentfly_kit.images import row_keys
from agentfly_kit.policy.prefix_tree import build_prefix_trees
from agentfly_kit.samples import TurnRequest
from agentfly_kit.types import ImageSpan

PAD, FIRST = 7, 200  # the id of all placeholders, and the first id of the oracle
IMAGES = [af.Image(PIL.Image.new("RGB", (8, 8), colour)) for colour in ("red", "green", "blue")]
LENGTHS = (2, 4)


def random_row(rng: random.Random, beginnings: list[Any]) -> tuple[list[int], list[ImageSpan], list[int]]:
    """Return ids, spans and the oracle's ids, often with the beginning of another row."""
    ids, spans, oracle = (
        beginnings[rng.randrange(len(beginnings))] if beginnings and rng.random() < 0.8 else ([], [], [])
    )
    ids, spans, oracle = [*ids], [*spans], [*oracle]
    for _ in range(rng.randrange(1, 4)):
        text = [rng.randrange(8, 12) for _ in range(rng.randrange(1, 4))]
        which, length = rng.randrange(len(IMAGES)), rng.choice(LENGTHS)
        spans.append(ImageSpan(IMAGES[which], len(ids) + len(text), length))
        first = FIRST + 16 * (len(LENGTHS) * which + LENGTHS.index(length))
        ids, oracle = [*ids, *text, *[PAD] * length], [*oracle, *text, *range(first, first + length)]
        beginnings.append((ids, [*spans], oracle))
    return ids, spans, oracle


def keys_of(row: Any) -> Any:
    return row_keys(np.array(row[0], dtype=np.int64), row[1])


def padded(rows: list[Any]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def test_keys_are_unique_per_image_index_and_length() -> None:
    rng, seen = random.Random(dice.seed()), {}
    for _ in range(200):
        ids, spans, oracle = random_row(rng, [])
        for i, key, known in zip(ids, keys_of((ids, spans)).tolist(), oracle, strict=True):
            assert seen.setdefault(known, key) == key and (key == i if i != PAD else 2**40 <= key < 2**62)
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("number", range(20))
def test_trees_share_exactly_the_tokens_before_the_first_other_image(number: int) -> None:
    rng, beginnings = random.Random(dice.seed() * 1000 + number), []
    rows = [random_row(rng, beginnings) for _ in range(rng.randrange(2, 12))]
    lengths = [len(row[0]) for row in rows]
    trees = build_prefix_trees(padded([keys_of(row).tolist() for row in rows]), lengths, scale=1e9, max_tokens=4096)
    prefixes = {tuple(row[2][: n + 1]) for row in rows for n in range(len(row[2]))}
    assert sum(tree.width for tree in trees) == len(prefixes)
    for tree in trees:
        for a, b, shared in zip(tree.rows, tree.rows[1:], tree.shared[1:], strict=False):
            assert rows[a][2][:shared] == rows[b][2][:shared]


async def prefilled(policy: af.Policy, rows: list[Any], *, together: bool) -> tuple[list[Any], int]:
    """Return the samples of rows (ids, spans) in sessions of their own, and the number of computed context tokens."""
    engine, task = af.LocalEngine(policy), agents.tasks(1)[0]
    sampling = af.Sampling(max_tokens=2)
    calls = [
        engine.sample(ids, sampling, 0, request=TurnRequest(task, 0, f"s{i}", images=tuple(spans)))
        for i, (ids, spans) in enumerate(rows)
    ]
    got = await asyncio.gather(*calls) if together else [await call for call in calls]
    return list(got), engine.prefilled


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines with policies that read text accept spans, which they ignore."""
    monkeypatch.setattr(af.LocalEngine, "images", 16)
    monkeypatch.setattr(prompts, "PromptImages", lambda *_: None)


@pytest.mark.parametrize("together", [True, False])
async def test_the_cache_shares_what_the_oracle_shares(together: bool, blind: None) -> None:
    rng, policy = random.Random(dice.seed()), agents.random_policy(5)
    for _ in range(4):
        beginnings: list[Any] = []
        rows = [random_row(rng, beginnings) for _ in range(8)]
        ours, count = await prefilled(policy, [row[:2] for row in rows], together=together)
        _, expected = await prefilled(policy, [(row[2], ()) for row in rows], together=together)
        assert count == expected
        plain, _ = await prefilled(policy, [(row[0], ()) for row in rows], together=together)
        assert [s.ids for s in ours] == [s.ids for s in plain], "this model ignores the images"


def chain(number: int, *spans: tuple[Any, int]) -> af.Trajectory:
    """Return a chain with a span of two placeholders for each image, at an index of the prompt."""
    prompt = af.Turn("prompt", "task", (5, 6, 8, *[PAD] * 4, 9), images=tuple(ImageSpan(x, n, 2) for x, n in spans))
    turn = af.Turn(
        "action", "policy", (11, 12), True, (-1.0, -1.0), versions=(0, 0), seed=3, parent=prompt, stop="stop",
        messages=({"role": "assistant", "content": ""},),
    )  # fmt: skip
    task = af.Task("t", ({"role": "user", "content": "?"},))
    return af.Trajectory(f"g/{number}", task, "g", number, (prompt, turn), "answered", reward=float(number))


def test_batches_states_and_files_tell_images_apart(tmp_path: Path) -> None:
    a, b, _ = IMAGES
    chains = [chain(0, (a, 3), (b, 5)), chain(1, (b, 3), (a, 5)), chain(2, (a, 3), (b, 5)), chain(3)]
    batch = af.collate(chains, af.advantages.grpo)
    keys = batch.row_keys
    assert keys is not None and (keys == batch.ids)[3].all() and torch.equal(keys[0], keys[2])
    same = (keys[0] == keys[1]).tolist()
    assert same == [True] * 3 + [False] * 4 + [True] * 3
    states = af.turn_data(chains).states
    assert states[0] == states[2] != states[1] and states[3] not in (states[0], states[1])
    ids = af.turn_data([t.replace(chain=0) for t in chains]).turn_ids
    assert len({*ids}) == 4
    policy = agents.random_policy(5)
    policy._row_images = lambda *_: None
    shared = [tree.shared for tree in policy._build_trees(keys, batch.mask, 4096)]
    assert shared == [(0, 3, 9, 3)], "the text, all context tokens of the equal row, the text"
    parts = policy.micro_batches(batch)
    assert sorted(i for part in parts for i in part.tolist()) == [0, 1, 2, 3]
    text = af.collate([chain(4)], [1.0])
    assert text.row_keys is None
    joined = join([text, batch])
    assert joined.row_keys is not None and torch.equal(joined.row_keys[1:], keys)
    assert torch.equal(joined.select(torch.tensor([2])).row_keys[0], keys[1])  # type: ignore[index]
    whole = policy.score(batch, {"logprob"})["logprob"]
    plain = policy.score(batch.replace(row_keys=None), {"logprob"})["logprob"]
    torch.testing.assert_close(whole, plain, equal_nan=True, atol=1e-5, rtol=1e-5)
    errors.check(lambda: af.ppo_step(policy, af.adamw(policy), batch), af.errors.BatchError, "must contain text only")
    file = af.Rollout.from_trajectories(chains).save(tmp_path / "a.jsonl")
    assert [t.turns for t in af.Rollout.load(file)] == [t.turns for t in chains]
    errors.check(lambda: chain(0, (a, 7)), af.errors.AlignmentError, "must lie within the 8 ids of the turn")


async def test_an_engine_without_images_refuses_spans() -> None:
    engine, task = af.LocalEngine(agents.random_policy(5)), agents.tasks(1)[0]
    request = TurnRequest(task, 0, "s", images=(ImageSpan(IMAGES[0], 0, 2),))
    call = engine.sample([PAD, PAD, 9], af.Sampling(), 0, request=request)
    await errors.check(lambda: call, af.errors.EngineError, "reads no images")
