"""The shipped vision policy: its folder, its token ids, and how well it starts and learns."""

import dataclasses
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import shapes as recipe

import agentfly_kit as af
from agentfly_kit.envs import shapes

FOLDER = Path(str(files("agentfly_kit._data"))) / "policies" / "shapes"


async def success(policy: af.Policy, count: int) -> dict[str, float]:
    """Return the success on test tasks by kind of question."""
    rewards = defaultdict(list)
    for t in (await af.evaluate(shapes.agent(policy), shapes.tasks(count, "test"))).rollout:
        rewards[t.task.fields["kind"]].append(t.reward)
    return {kind: sum(some) / len(some) for kind, some in rewards.items()}


async def test_it_is_small_and_starts_at_half_of_the_questions_of_each_kind() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_000_000
    assert "python -m recipes policy" in (FOLDER / "ORIGIN.md").read_text(encoding="utf-8")
    policy = af.tiny.policy("shapes")
    assert not policy.image_obstacle
    found = await success(policy, 256)
    assert all(0.35 < found[kind] < 0.65 for kind in shapes.KINDS), found


async def test_a_policy_sees_the_image_that_the_tool_returns() -> None:
    crop = "crop", {"left": 0, "top": 0, "right": 16, "bottom": 16}

    def play(task: af.Task, messages: Any, rng: Any) -> Any:
        return "red" if messages[-1]["role"] == "tool" else crop

    family = dataclasses.replace(shapes.family, expert_player=play)
    (t,) = (await family.expert(af.tiny.policy("shapes")).rollout(shapes.tasks(1, "test"))).trajectories
    assert t.stop == "answered" and t.tool_calls[0].result is not None
    whole, part = t.rows[0].images
    assert part.image == t.tool_calls[0].result.images[0] != whole.image
    assert part.length == whole.length == len(shapes.POSITIONS) + 3


def test_transformers_and_the_recipe_give_the_token_ids_of_the_chat() -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = AutoModelForImageTextToText.from_pretrained(FOLDER), AutoProcessor.from_pretrained(FOLDER)
    made = recipe.Pretraining(model, processor)
    chat, schemas = af.tiny.policy("shapes").chat, [tool.schema for tool in shapes.family.tools]
    for task in shapes.tasks(8, "test"):
        image, text = task.messages[0]["content"]
        messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        prompt = processor.apply_chat_template(messages, tools=schemas, add_generation_prompt=True)
        ids = processor(text=prompt, images=[image.to_pil()])["input_ids"][0]
        before, after = made.encode(text)
        assert tuple(ids) == chat.prompt(task.messages, schemas) == (*before, *after)
        assert len(ids) < 45, "each word of a question is a token"


def test_questions_that_share_the_computation_of_an_image_have_the_loss_of_separate_rows() -> None:
    made = recipe.Pretraining(*recipe.untrained())
    scene = shapes.scene(2, made.rng)
    said = [*recipe.questions(scene)]
    features = made.features([scene])
    together = made.answer_loss(features, [said])
    alone = made.answer_loss(features.expand(len(said), -1, -1), [[one] for one in said])
    torch.testing.assert_close(together, alone)


def test_a_short_build_is_reproducible_and_rounded_as_it_ships(tmp_path: Path) -> None:
    (first, _), (second, _) = recipe.build(tmp_path, steps=(1, 1, 1)), recipe.build(steps=(1, 1, 1))
    loaded = af.Policy.load(tmp_path).model
    for a, b, c in zip(first.parameters(), second.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in FOLDER.iterdir()} - {"ORIGIN.md"}


@pytest.mark.long
async def test_iterations_of_grpo_improve_each_kind(tmp_path: Path) -> None:
    policy = af.tiny.policy("shapes")
    before = await success(policy, 256)
    config = af.TrainConfig(steps=40, checkpoint_every=40, lr_end=3e-5)
    await af.train(shapes.agent(policy), policy, shapes.tasks(512, "train"), config, run=tmp_path / "run")
    after = await success(policy, 256)
    assert min(after[kind] - before[kind] for kind in shapes.KINDS) > 0 and min(after.values()) > 0.8, after
