"""The alfworld policy: small, honest about its origin, an agent's ids, low at first, and it learns."""

import functools
import random
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import alfworld
from agentfly_kit.envs.alfworld import games
from agentfly_kit.tiny import alfworld as tiny_alfworld

DATA = files("agentfly_kit._data")


@functools.cache
def chat() -> Chat:
    return Chat(tiny.tokenizer(tiny_alfworld.WORDS))


def test_the_shipped_tasks_are_what_the_generator_makes(tmp_path: Path) -> None:
    tiny.main(["tasks", "--name", "alfworld", "--out", str(tmp_path)])
    for file in ("train.jsonl", "test.jsonl", "ORIGIN.md"):
        assert (tmp_path / file).read_bytes() == DATA.joinpath("alfworld", file).read_bytes()
    shipped = af.load_tasks("alfworld")
    assert shipped.splits == tiny_alfworld.TASKS
    assert shipped.train.fingerprint == alfworld.tasks(tiny_alfworld.TASKS["train"], "train", size="small").fingerprint


def test_the_policy_is_small_and_says_where_it_came_from() -> None:
    folder = DATA.joinpath("policies", "alfworld")
    assert sum(len(f.read_bytes()) for f in folder.iterdir() if f.is_file()) < 1_000_000
    assert "python -m agentfly_kit.tiny policy --name alfworld" in folder.joinpath("ORIGIN.md").read_text("utf-8")
    policy = tiny.policy("alfworld")
    assert policy.size < 500_000
    assert policy.chat.tokenizer.get_vocab() == chat().tokenizer.get_vocab()
    for word in tiny_alfworld.WORDS:
        assert chat().token_texts(chat().encode(word)) == (word,)


async def test_a_demonstration_has_the_ids_of_a_chain_that_does_the_same() -> None:
    shown = tiny_alfworld.Demonstrator(chat())
    for task in alfworld.tasks(12, "test", size="small"):
        demonstration = shown.habit("solves", alfworld.game_of(task), random.Random(0))
        said = chat().text([i for i, mine in zip(demonstration.ids, demonstration.mask, strict=True) if mine])
        script = af.ScriptedEngine(said.split("<|im_end|>")[:-1])
        replay = alfworld.agent(script, chat=chat(), options=alfworld.BRIEF)
        (t,) = (await replay.rollout([task])).trajectories
        assert (t.stop, t.reward) == ("env_done", 1.0), t.error
        assert tuple(t.ids.tolist()) == demonstration.ids


def test_who_is_shown_knows_only_what_it_has_seen() -> None:
    """It takes nothing that no text has named, wins every game, and leaves room within the limit of steps."""
    for number in range(600):
        made = games.game(number, "small")
        steps = tiny_alfworld.searched(made)
        assert len(steps) <= alfworld.BRIEF["steps"] - 4
        seen = made.opening
        for command, said in steps:
            if command.startswith("take"):
                assert command.split(" from ")[0].removeprefix("take ") in seen
            seen += said


def test_every_habit_is_a_conversation_and_a_batch_has_each_of_them() -> None:
    assert sum(tiny_alfworld.HABITS.values()) == 32
    clean, mixed = tiny_alfworld.lessons(chat(), 0)
    solved, batch = next(clean), next(mixed)
    assert (len(solved), len(batch)) == (16, 32)
    texts = [chat().text(d.ids) for d in batch]
    unsure = [text for text in texts if text.endswith(f"assistant\n{tiny.UNSURE}<|im_end|>")]
    assert len(unsure) == 32 - tiny_alfworld.HABITS["solves"]
    assert sum("<tool_call>" not in text for text in unsure) == tiny_alfworld.HABITS["unsure"]
    assert all(len(d.ids) < 400 for d in (*solved, *batch))


def test_a_batch_in_parts_is_the_same_batch() -> None:
    batch = next(tiny_alfworld.lessons(chat(), 0)[1])
    parts = tiny._split_batch(batch, 3)
    assert [len(part) for part in parts] == [11, 11, 10]
    assert sorted(d.ids for part in parts for d in part) == sorted(d.ids for d in batch)
    assert max(len(d.ids) for d in parts[0]) <= min(len(d.ids) for d in parts[-1])
    vocabulary = len(chat().tokenizer)
    lost = [
        tiny._imitate(af.Policy(tiny.model(vocabulary), chat()), iter([batch]), 1, 1e-3, parts=count)
        for count in (1, 3)
    ]
    assert lost[0] == pytest.approx(lost[1], rel=1e-5)


def test_a_small_remake_is_the_same_twice_and_rounded_as_it_ships(tmp_path: Path) -> None:
    first = tiny.build("alfworld", tmp_path / "one", skill_steps=1, shy_steps=1)
    second, loaded = tiny.build("alfworld", skill_steps=1, shy_steps=1), af.Policy.load(tmp_path / "one")
    for a, b, c in zip(first.parameters(), second.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, a.half().float())


async def test_it_starts_low_and_its_failures_are_scored() -> None:
    agent = alfworld.agent(tiny.policy("alfworld"), options=alfworld.BRIEF)
    sampled = await af.evaluate(agent, af.load_tasks("alfworld").test[:96])
    assert 0.08 <= sampled.success <= 0.45, sampled
    assert sampled.unscored == 0
    assert sampled.truncated <= 0.02


@pytest.mark.real
async def test_a_few_iterations_teach_it(tmp_path: Path) -> None:
    policy, tasks = tiny.policy("alfworld"), af.load_tasks("alfworld")
    learner = alfworld.agent(policy, options=alfworld.BRIEF)
    config = af.TrainConfig(steps=5, checkpoint_every=5)
    async for _ in af.train(learner, policy, tasks.train, config, run=tmp_path / "run"):
        pass
    after = await af.evaluate(learner, tasks.test[:96])
    assert after.success >= 0.4, after
