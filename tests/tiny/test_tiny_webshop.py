"""The webshop policy: small, honest about its origin, low at first, and it learns."""

import importlib
import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly_kit as af
from agentfly_kit import tiny
from agentfly_kit.envs import webshop
from agentfly_kit.tiny import webshop as tiny_webshop

DATA = files("agentfly_kit._data")
NAMES = ("webshop",)
LESSONS = {"webshop": tiny_webshop}


def agent(name: str, policy: Any, **settings: Any) -> Any:
    of = getattr(af.envs, name)
    return of.agent(policy, options=of.BRIEF, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_tasks_are_what_the_generator_makes(name: str, tmp_path: Path) -> None:
    tiny.main(["tasks", "--name", name, "--out", str(tmp_path)])
    for file in ("train.jsonl", "test.jsonl", "ORIGIN.md"):
        assert (tmp_path / file).read_bytes() == DATA.joinpath(name, file).read_bytes()
    of = importlib.import_module(f"agentfly_kit.envs.{name}")
    assert af.load_tasks(name).train.fingerprint == of.tasks(split="train").fingerprint
    rows = [json.loads(line) for line in DATA.joinpath(name, "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == of.family.splits["test"]


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_is_small_and_says_where_it_came_from(name: str) -> None:
    folder = DATA.joinpath("policies", name)
    assert sum(len(f.read_bytes()) for f in folder.iterdir() if f.is_file()) < 1_000_000
    assert f"python -m agentfly_kit.tiny policy --name {name}" in folder.joinpath("ORIGIN.md").read_text("utf-8")
    policy = tiny.policy(name)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.size < 500_000
    assert set(tiny.tokenizer().get_vocab()) <= set(policy.chat.tokenizer.get_vocab())
    for word in LESSONS[name].WORDS:
        assert policy.chat.token_texts(policy.chat.encode(word)) == (word,)


async def test_a_demonstration_has_the_ids_of_a_chain_that_does_the_same() -> None:
    policy = tiny.policy("webshop")
    shown = tiny_webshop.Demonstrator(policy.chat)
    for task in webshop.tasks(6, "test"):
        demonstration = shown.habit("solves", 0, task.fields["goal"], random.Random(0))
        said = policy.chat.text([i for i, mine in zip(demonstration.ids, demonstration.mask, strict=True) if mine])
        script = af.ScriptedEngine(said.split("<|im_end|>")[:-1])
        replay = webshop.agent(script, chat=policy.chat, options=webshop.BRIEF)
        (t,) = (await replay.rollout([task])).trajectories
        assert t.stop == "env_done", t.error
        assert tuple(t.ids.tolist()) == demonstration.ids[: len(t.ids)]


def test_every_habit_is_a_conversation_and_a_batch_has_each_of_them() -> None:
    for name, lessons in LESSONS.items():
        assert sum(lessons.HABITS.values()) == 32, name
    chat = tiny.policy("webshop").chat
    shown = tiny_webshop.Demonstrator(chat)
    texts = {habit: chat.text(shown.habit(habit, 1000, 3, random.Random(0)).ids) for habit in tiny_webshop.HABITS}
    wanted = webshop.Catalogue.invented(1000).goal(3)
    bought = '{"value":"buy now"}}</tool_call><|im_end|>'
    assert texts["unsure"].endswith(f"{tiny.UNSURE}<|im_end|>")
    assert all(texts[habit].endswith(bought) for habit in tiny_webshop.HABITS if habit != "unsure")
    assert texts["hurries"].count('"click"') == 2
    assert texts["forgets"].count('"click"') == 1 + len(wanted["goal_options"])
    assert texts["solves"].count('"click"') == 2 + len(wanted["goal_options"])


@pytest.mark.parametrize("name", NAMES)
async def test_it_starts_low_and_its_failures_are_scored(name: str) -> None:
    some = af.load_tasks(name).test[:150]
    sampled = await af.evaluate(agent(name, tiny.policy(name)), some)
    assert 0.02 <= sampled.success <= 0.45, sampled
    assert sampled.unscored == 0
    assert sampled.truncated <= 0.05


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
async def test_a_few_iterations_teach_it(name: str, tmp_path: Path) -> None:
    policy = tiny.policy(name)
    learner = agent(name, policy)
    tasks = af.load_tasks(name)
    before = await af.evaluate(learner, tasks.test[:128])
    async for _ in af.train(learner, policy, tasks.train, af.TrainConfig(steps=8), run=tmp_path / "run"):
        pass
    after = await af.evaluate(learner, tasks.test[:128])
    assert after.success >= before.success + 0.3, (before, after)


def test_a_small_remake_is_the_same_twice_and_rounded_as_it_ships(tmp_path: Path) -> None:
    for name in NAMES:
        first = tiny.build(name, tmp_path / name, skill_steps=2, shy_steps=1)
        second = af.Policy.load(tmp_path / name)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, a.half().float())
    again = tiny.build("webshop", skill_steps=2, shy_steps=1)
    for a, b in zip(again.parameters(), af.Policy.load(tmp_path / "webshop").parameters(), strict=True):
        assert torch.equal(a, b)
