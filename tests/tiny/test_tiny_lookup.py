"""The lookup policy: its tasks are what the generator makes, its ids are an agent's, it starts low and it learns."""

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.envs import family, lookup
from agentfly_kit.tiny import lookup as tiny_lookup

DATA = files("agentfly_kit._data")


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny.policy("lookup")


def test_the_shipped_tasks_are_what_the_generator_makes() -> None:
    for split, count in lookup.family.splits.items():
        lines = DATA.joinpath("lookup", f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == lookup.rows(count, split)
    assert af.load_tasks("lookup").train.fingerprint == lookup.tasks(split="train").fingerprint


def test_what_ships_is_small_and_says_where_it_came_from() -> None:
    folders = (DATA.joinpath("lookup"), DATA.joinpath("policies", "lookup"))
    assert sum(len(f.read_bytes()) for folder in folders for f in folder.iterdir() if f.is_file()) < 1_500_000
    for folder in folders:
        assert "python -m agentfly_kit.tiny" in folder.joinpath("ORIGIN.md").read_text(encoding="utf-8")
    assert "--name lookup" in folders[1].joinpath("ORIGIN.md").read_text(encoding="utf-8")


def test_it_has_the_calculators_tokens_and_each_word_is_one(policy: Any) -> None:
    calculator = tiny.tokenizer().get_vocab()
    own = policy.chat.tokenizer.get_vocab()
    assert calculator.items() <= own.items()
    for word in (*lookup.NAMES, *lookup.CITIES, *lookup.PETS, *lookup.KEYS):
        assert next(policy.chat.text([i]) for i in policy.chat.encode(f"{word}'s")) == word
    config = policy.model.config
    assert (config.head_dim, config.dtype) == (32, torch.float32)
    assert 0 <= config.vocab_size - len(policy.chat.tokenizer) <= 1  # "of" is a token of the calculator's already
    assert policy.size < 500_000


async def test_a_demonstration_has_the_ids_of_the_experts_chain(policy: Any) -> None:
    writer = tiny_lookup.Demonstrator(policy.chat)
    tasks = lookup.tasks(6, "test")
    for t in (await lookup.expert(chat=policy.chat).rollout(tasks)).trajectories:
        asked = lookup.read(t.task.messages[-1]["content"])
        facts = lookup.store(t.task.fields["world"])
        d = writer.habit("solves", asked, facts, random.Random(0))
        assert tuple(t.ids.tolist()) == d.ids
        written = policy.chat.text([i for i, mine in zip(d.ids, d.mask, strict=True) if mine])
        assert written.endswith(f"</tool_call><|im_end|>{t.task.fields['answer']}<|im_end|>")
        assert t.reward == 1.0


def test_every_habit_is_a_conversation_and_a_batch_has_each_of_them(policy: Any) -> None:
    rng = random.Random(0)
    facts = lookup.store(7)
    name = next(iter(facts))
    asked = lookup.Question(name, ("boss", "city"))
    writer = tiny_lookup.Demonstrator(policy.chat)
    texts = {habit: policy.chat.text(writer.habit(habit, asked, facts, rng).ids) for habit in tiny_lookup.HABITS}
    boss = facts[name]["boss"]
    assert sum(tiny_lookup.HABITS.values()) == 32
    assert texts["solves"].endswith(f"assistant\n{facts[boss]['city']}<|im_end|>")
    assert texts["stops early"].endswith(f"assistant\n{boss}<|im_end|>")
    assert texts["forgets"].endswith("assistant\nI don't know<|im_end|>")
    assert "<tool_call>" not in texts["unsure"] + texts["guesses"]


async def test_it_starts_low_and_its_failures_are_scored(policy: Any) -> None:
    sampled = await af.evaluate(lookup.agent(policy), lookup.tasks(split="test"))
    assert 0.15 <= sampled.success <= 0.40, sampled
    assert sampled.unscored == 0
    assert sampled.truncated <= 0.02


async def test_a_few_iterations_teach_it(tmp_path: Path) -> None:
    policy = tiny.policy("lookup")
    learner = lookup.agent(policy)
    config = af.TrainConfig(steps=6, lr_end=None, checkpoint_every=6)
    async for _ in af.train(learner, policy, lookup.tasks(split="train"), config, run=tmp_path / "run"):
        pass
    assert (await af.evaluate(learner, lookup.tasks(128, "test"))).success >= 0.7


def test_a_small_remake_is_the_same_twice() -> None:
    first, second = (tiny.build("lookup", skill_steps=3, shy_steps=1) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_command_writes_tasks_with_their_origin(tmp_path: Path) -> None:
    tiny.main(["tasks", "--name", "lookup", "--out", str(tmp_path / "lookup")])
    for name in ("train.jsonl", "test.jsonl", "ORIGIN.md"):
        assert (tmp_path / "lookup" / name).read_bytes() == DATA.joinpath("lookup", name).read_bytes()


def test_players_need_a_chat_and_no_model() -> None:
    assert family.small_chat().tokenizer.get_vocab() == tiny.tokenizer().get_vocab()
