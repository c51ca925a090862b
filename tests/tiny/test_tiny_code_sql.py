"""The code and sql policies: what ships is what the generator makes, ids are an agent's, they start low and learn."""

import functools
import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import code, sql
from agentfly_kit.tiny import code as tiny_code
from agentfly_kit.tiny import sql as tiny_sql

DATA = files("agentfly_kit._data")
BOTH = pytest.mark.parametrize("name", ["code", "sql"])
SHIPPED = pytest.mark.parametrize("name", ["code", "sql"])


@functools.cache
def chat(name: str) -> Chat:
    return Chat(tiny.tokenizer((tiny_code if name == "code" else tiny_sql).WORDS))


@BOTH
def test_the_shipped_tasks_are_what_the_generator_makes(name: str) -> None:
    family = getattr(af.envs, name).family
    for split, count in family.splits.items():
        lines = DATA.joinpath(name, f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == family.rows(count, split)
    assert af.load_tasks(name).train.fingerprint == family.tasks(split="train").fingerprint


@SHIPPED
def test_what_ships_is_small_and_says_where_it_came_from(name: str) -> None:
    folders = (DATA.joinpath(name), DATA.joinpath("policies", name))
    assert sum(len(f.read_bytes()) for folder in folders for f in folder.iterdir() if f.is_file()) < 1_100_000
    for folder in folders:
        assert f"--name {name}" in folder.joinpath("ORIGIN.md").read_text(encoding="utf-8")


async def test_a_demonstration_of_sql_has_the_ids_of_the_experts_chain() -> None:
    rng = random.Random(0)
    for t in (await sql.expert(chat=chat("sql"), size=4).rollout(sql.tasks(16, "test"))).trajectories:
        fields = t.task.fields
        asked = sql.Question(t.task.messages[-1]["content"].split("\n")[1], fields["gold"], fields["hardness"])
        shown = tiny_sql.Demonstrator(chat("sql")).habit("solves", sql.world(fields["db"], fields["world"]), asked, rng)
        assert tuple(t.ids.tolist()) == shown.ids, t.error


async def test_a_demonstration_of_code_has_the_ids_of_the_experts_chain() -> None:
    rng = random.Random(0)
    for t in (await code.expert(chat=chat("code"), size=4).rollout(code.tasks(4, "test"))).trajectories:
        said = chat("code").text(t.ids.tolist())
        text = said.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        steps = [
            (what.rstrip("0123456789 "), int(what.split()[-1]) if what[-1].isdigit() else 2)
            for what in text.removeprefix("Write f(x): ").removesuffix(".").split(", ")
        ]
        assert code.instruction(steps) == text
        assert tiny_code.Demonstrator(chat("code")).habit("solves", steps, rng).ids == tuple(t.ids.tolist())


@BOTH
def test_every_habit_is_a_conversation_and_a_batch_has_each_of_them(name: str) -> None:
    module: Any = tiny_code if name == "code" else tiny_sql
    assert sum(module.HABITS.values()) == 32
    clean, mixed = module.lessons(chat(name), 0)
    batch = next(mixed)
    assert len(batch) == len(next(clean)) == 32
    texts = [chat(name).text(d.ids) for d in batch]
    assert sum(text.endswith("assistant\nI don't know<|im_end|>") for text in texts) == 20
    assert all(len(d.ids) < 300 for d in batch)


@SHIPPED
def test_a_small_remake_is_the_same_twice(name: str) -> None:
    first, second = (tiny.build(name, skill_steps=2, shy_steps=1) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@SHIPPED
async def test_it_starts_low_and_its_failures_are_scored(name: str) -> None:
    family = getattr(af.envs, name)
    sampled = await af.evaluate(family.agent(tiny.policy(name), size=8), family.tasks(96, "test"))
    assert 0.15 <= sampled.success <= 0.45, sampled
    assert sampled.unscored == 0
    assert sampled.truncated <= 0.02


@pytest.mark.parametrize(
    "name", [pytest.param("code", marks=pytest.mark.soak), pytest.param("sql", marks=pytest.mark.real)]
)
async def test_a_few_iterations_teach_it(tmp_path: Path, name: str) -> None:
    family = getattr(af.envs, name)
    policy = tiny.policy(name)
    learner = family.agent(policy, size=16)
    config = af.TrainConfig(steps=8, lr_end=None, checkpoint_every=8)
    async for _ in af.train(learner, policy, family.tasks(split="train"), config, run=tmp_path / "run"):
        pass
    assert (await af.evaluate(learner, family.tasks(96, "test"))).success >= 0.7
