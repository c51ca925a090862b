"""The shipped vision policies: their folders, their token ids, and how well they start and learn."""

from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import desk as desk_recipe
from recipes import shapes as recipe

import agentfly_kit as af
from agentfly_kit.envs import desk, shapes

POLICIES = Path(str(files("agentfly_kit._data"))) / "policies"
FOLDER = POLICIES / "shapes"


async def success(of: Any, policy: af.Policy, count: int) -> dict[str, float]:
    """Return the success on test tasks by kind of task."""
    rewards = defaultdict(list)
    for t in (await af.evaluate(of.agent(policy), of.tasks(count, "test"))).rollout:
        rewards[t.task.fields["kind"]].append(t.reward)
    return {kind: sum(some) / len(some) for kind, some in rewards.items()}


@pytest.mark.parametrize(("of", "low", "high"), [(shapes, 0.35, 0.65), (desk, 0.1, 0.6)])
async def test_it_is_small_and_starts_at_a_part_of_the_tasks_of_each_kind(of: Any, low: float, high: float) -> None:
    name = of.family.name
    assert sum(file.stat().st_size for file in (POLICIES / name).iterdir()) < 1_000_000
    assert "python -m recipes policy" in (POLICIES / name / "ORIGIN.md").read_text(encoding="utf-8")
    policy = af.tiny.policy(name)
    assert not policy.image_obstacle
    found = await success(of, policy, 256)
    assert all(low < found[kind] < high for kind in of.KINDS), found


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


async def test_demonstrations_of_desk_have_the_token_ids_of_the_expert() -> None:
    made = desk_recipe.Pretraining(*desk_recipe.untrained())
    tasks = desk.tasks(8, "test")
    for t in (await desk.expert(af.tiny.policy("desk")).rollout(tasks)).trajectories:
        ids, label, screens = made.demonstration("solves", t.task.fields["world"])
        assert t.ids[: len(ids)].tolist() == ids and len(t.rows[0].images) == len(screens)
        assert sum(mark != -100 for mark in label) == sum(t.rows[0].written_by())


@pytest.mark.parametrize(("build", "phases"), [(recipe.build, 3), (desk_recipe.build, 4)])
def test_a_short_build_is_reproducible_and_rounded_as_it_ships(build: Any, phases: int, tmp_path: Path) -> None:
    (first, _), (second, _) = build(tmp_path, steps=(1,) * phases), build(steps=(1,) * phases)
    loaded = af.Policy.load(tmp_path).model
    for a, b, c in zip(first.parameters(), second.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in FOLDER.iterdir()} - {"ORIGIN.md"}


@pytest.mark.long
@pytest.mark.parametrize("of", [shapes, desk])
async def test_iterations_of_grpo_improve_each_kind(of: Any, tmp_path: Path) -> None:
    policy = af.tiny.policy(of.family.name)
    before = await success(of, policy, 256)
    config = af.TrainConfig(steps=40, checkpoint_every=40, lr_end=3e-5)
    await af.train(of.agent(policy), policy, of.tasks(512, "train"), config, run=tmp_path / "run")
    after = await success(of, policy, 256)
    assert min(after[kind] - before[kind] for kind in of.KINDS) > 0 and min(after.values()) > 0.8, after
