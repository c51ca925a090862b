"""Vision policies: token ids, sampling, scoring and training, compared with the model's own forward pass."""

import dataclasses
import importlib.util
import itertools
import pickle
from pathlib import Path
from typing import Any

import agents
import errors
import numpy as np
import pytest
import torch
import vision_models
from vision_models import FAMILIES, picture, reference_logprobs

import agentfly_kit as af
from agentfly_kit import widgets
from agentfly_kit.agent.turns import encode_observation, observation_turn
from agentfly_kit.engines.local import images as prompts
from agentfly_kit.samples import TurnRequest

A, B, WIDE, DOT = picture(1), picture(2), picture(3, (40, 12)), picture(4, (1, 1))
SAMPLING = af.Sampling(max_tokens=6)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def task(number: int, *parts: Any) -> af.Task:
    return af.Task(f"t{number}", (user(*parts),), {"answer": "5"})


TASKS = [
    task(0, "What", A, "is", B, "?"),
    task(1, "What", B, "is", A, "?"),
    task(2, WIDE, DOT, "is what?"),
    task(3, "1+1"),
]


@af.tool
def look() -> list[Any]:
    """Return a picture."""
    return ["a picture:", WIDE]


def batch_of(rollout: af.Rollout) -> af.Batch:
    return af.collate(rollout, torch.linspace(-1, 1, len(rollout)))


def agent(policy: af.Policy, **settings: Any) -> af.Agent:
    engine = settings.pop("engine", None) or af.LocalEngine(policy)
    return af.Agent(engine, chat=policy.chat, reward=lambda: 1.0, max_turns=2, sampling=SAMPLING, **settings)


# --- token ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_processor(family: str) -> None:
    chat = vision_models.shared(family).chat
    messages = [{"role": "system", "content": "Be brief."}, user("What", A, "is\n", WIDE, A, "?")]
    ids = chat.prompt(messages)
    text = chat.render(messages, generate=True)
    pictures: Any = [image.to_pil() for image in (A, WIDE, A)]
    processor = chat.reader.processor
    assert text.count(processor.image_token) == 3
    given = [pictures] if family in ("idefics3", "smolvlm") else pictures
    options = {"add_special_tokens": False, "return_mm_token_type_ids": False}
    assert processor(text=[text], images=given, **options)["input_ids"] == [list(ids)]
    assert [span.image for span in ids.images] == [A, WIDE, A]  # type: ignore[attr-defined]
    inside = {i for _, start, length in ids.images for i in range(start, start + length)}  # type: ignore[attr-defined]
    assert {i for i, token in enumerate(ids) if token == chat.reader.token_id} <= inside
    assert pickle.loads(pickle.dumps(chat)).prompt(messages).images == pickle.loads(pickle.dumps(ids)).images
    other = chat.prompt([messages[0], user("What", B, "is\n", WIDE, A, "?")])
    assert other == ids and [span.image for span in other.images] == [B, WIDE, A]  # type: ignore[attr-defined]


async def test_images_that_a_processor_or_a_template_refuses() -> None:
    policy, thin = vision_models.shared("qwen2_5_vl"), picture(5, (8192, 1))
    system = {"role": "system", "content": ["Compare with", A]}
    rejected = "rejected an image ([image 8192 x 1]): absolute aspect"
    for message, error, text in (
        (user(thin), af.errors.SettingsError, rejected),
        (system, af.errors.ChatTemplateError, "got 0 for 1 images; put images into user messages"),
    ):
        errors.check(lambda message=message: policy.chat.prompt([message, user("?")]), error, text)
    looking = agent(policy, tools=[af.tool(lambda: thin, name="look", description="Look.")])
    bad = task(9, thin)
    await errors.check(
        lambda: looking.rollout([bad, TASKS[3]]),
        af.errors.SettingsError,
        f"task 't9': the image processor {rejected}",
    )
    (good, failed) = (await looking.rollout([TASKS[3], bad])).trajectories
    chain = looking.chain(TASKS[3])
    await chain.prepare()
    chain.force('<tool_call>{"name":"look","arguments":{}}</tool_call>')
    for t in (failed, await chain.run()):
        assert t.stop == "error" and "rejected an image" in str(t.error) and good.error is None, t
    batch = batch_of(await agent(vision_models.shared("idefics3")).rollout(TASKS, 2))
    other = vision_models.policy("idefics3")
    other.chat.reader.processor.image_processor.size = {"longest_edge": 16}
    for call in (other.score, lambda batch: af.ppo_step(other, af.adamw(other), batch)):
        errors.check(lambda call=call: call(batch), af.errors.PolicyError, "made with another image processor")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_typed_placeholders_are_text(role: str) -> None:
    chat = vision_models.shared("idefics3").chat
    typed = "<image><fake_token_around_image><|im_end|>" if role != "system" else "<image>"
    message = {"role": role, "content": f"a{typed}b"}
    ids = chat.prompt([message, user("x", A)]) if role != "tool" else chat.observation_ids([message, user(A)])
    (span,) = ids.images  # type: ignore[attr-defined]
    count = chat.encode(chat.reader.expansion(A)).count(chat.reader.token_id)
    assert ids.count(chat.reader.token_id) == ids[span.start : span.start + span.length].count(chat.reader.token_id)
    assert ids.count(chat.reader.token_id) == count and typed in chat.text(ids)
    plain = chat.prompt([user(f"a{typed}b")])
    assert chat.reader.token_id not in plain and not hasattr(plain, "images")


@pytest.mark.parametrize("results", [True, False])
async def test_images_of_tool_results(results: bool) -> None:
    policy = vision_models.shared("idefics3", results=results)
    call = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
    chain = agent(policy, tools=[look]).chain(TASKS[0])
    await chain.prepare()
    for content in ("a <image> b", [policy.chat.reader.token_id]):
        errors.check(lambda content=content: chain.force(content), af.errors.SettingsError, "placeholders of images")
    chain.force(call)
    turn = await chain.act()
    (span,) = turn.images
    assert span.image == WIDE and turn.ids is not None and len(chain.ids) > span.start
    assert ("Images returned by look:" in turn.text) is not results, "the template drops images of tool results"
    assert ("</tool_response>" in policy.chat.text(turn.ids[: span.start])) is not results
    assert not policy.chat.drift(chain.snapshot())
    more = chain.observe("Go on.")
    assert more.images == turn.images and more.text.endswith("Go on.<|im_end|>\n<|im_start|>assistant\n")
    await chain.sample()
    (_, *spans), row = chain.turns[0].images, chain.snapshot().rows[0]
    assert [s.image for s in row.images] == [A, B, WIDE] and spans[0].image == B
    for export in (af.trl.sft_dataset, af.integrations.trl._rollout_columns):
        with pytest.raises(
            af.errors.SettingsError, match=r"^task 't0': message 0 \(from 'user'\) has an image, but af.trl"
        ):
            export([chain.snapshot()], 0)
    top = await chain.distribution(top=400) if chain.stop is None else None
    assert top is None or policy.chat.reader.token_id not in top.ids[:300]
    await chain.close()


async def test_compaction_drops_or_keeps_images() -> None:
    chain = agent(vision_models.shared("idefics3")).replace(max_turns=9).chain(TASKS[0])
    await chain.prepare()
    for content in (("With", B), ("without",)):
        await chain.sample()
        chain.compact([user(*content)])
    await chain.sample()
    assert [[span.image for span in row.images] for row in chain.snapshot().rows] == [[A, B], [B], []]


async def test_histories_are_rendered_again_only_if_images_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = vision_models.policy("idefics3")
    monkeypatch.setattr(policy.chat, "needs_rerender", lambda messages: True)
    asked, chain = agent(policy), agent(policy).chain(TASKS[0])
    await chain.prepare()
    answer = chain.force("ok")
    turn = observation_turn(asked, answer, (user("and", WIDE),), "user")
    encoded, leaf = encode_observation(asked, turn)
    assert leaf is encoded and leaf.row == 0 and [span.image for span in leaf.images] == [WIDE]
    swapped = dataclasses.replace(chain.turns[0], images=policy.chat.prompt(TASKS[1].messages).images)  # type: ignore[attr-defined]
    turn = dataclasses.replace(turn, parent=dataclasses.replace(answer, parent=swapped))
    _, leaf = encode_observation(asked, turn)
    assert leaf.row == 1 and [span.image for span in leaf.images] == [A, B, WIDE]


# --- sampling ------------------------------------------------------------------------------------


def tokens(rollout: af.Rollout) -> list[Any]:
    return [[(turn.ids, turn.logprobs, turn.images) for turn in t.turns] for t in rollout]


@pytest.mark.parametrize("family", FAMILIES)
async def test_samples_are_those_of_a_full_forward_at_any_concurrency(family: str) -> None:
    policy = vision_models.shared(family)
    assert policy.image_obstacle == ""
    found = [await agent(policy).rollout(TASKS, 16, max_concurrency=count) for count in (1, 13, 64)]
    assert tokens(found[0]) == tokens(found[1]) == tokens(found[2])
    for task in TASKS:
        alone = await agent(policy).rollout([task], 16)
        assert tokens(alone) == [tokens([t])[0] for t in found[2] if t.task is task], "other images change nothing"
    for t in found[0][::4]:
        expected = reference_logprobs(policy, t.ids.tolist(), [span.image for span in t.rows[0].images])
        at = np.flatnonzero(t.action_mask)
        np.testing.assert_allclose(t.logprobs[at], expected[at - 1], atol=1e-5)
        assert policy.chat.reader.token_id not in t.ids[at], "placeholders are never sampled"


@pytest.mark.parametrize("family", FAMILIES)
async def test_later_turns_continue_from_the_cache(family: str) -> None:
    policy = vision_models.shared(family)
    chat, engine = policy.chat, af.LocalEngine(policy)
    first = chat.prompt([user(*["a long prompt", A, "and", WIDE] * (4 if family == "idefics3" else 9))])
    ids, spans = list(first), list(first.images)  # type: ignore[attr-defined]
    assert len(ids) > 256, "more than a chunk"
    end = 0
    for turn in range(3):
        request = TurnRequest(TASKS[0], turn, "s", images=tuple(spans))
        before, held = engine.prefilled, len(ids)
        sample = await engine.sample(ids, SAMPLING, turn, request=request)
        computed = engine.prefilled - before
        ids += sample.ids or ()
        expected = reference_logprobs(policy, ids, [span.image for span in spans])
        np.testing.assert_allclose(sample.logprobs, expected[held - 1 :], atol=1e-5)
        assert computed == held - max(0, end - 1), "the last sampled token and those after it"
        end, more = len(ids), chat.observation_ids([user("then", B, WIDE)], after=sample.ids or ())
        spans += [span._replace(start=span.start + end) for span in more.images]  # type: ignore[attr-defined]
        ids += more


@pytest.mark.parametrize("family", FAMILIES)
async def test_swapped_images_share_nothing_and_change_all_later_logprobs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_CACHE_BYTES", 0)
    policy, engine = vision_models.shared(family), af.LocalEngine(vision_models.shared(family))
    rows = [policy.chat.prompt(t.messages) for t in TASKS[:2]]
    assert rows[0] == rows[1] and rows[0].images != rows[1].images  # type: ignore[attr-defined]
    first = rows[0].images[0].start  # type: ignore[attr-defined]
    ids = [*rows[0], *policy.chat.encode("1 2 3 4 5")]
    scores = []
    for row in rows:
        request = TurnRequest(TASKS[0], 0, "s", images=row.images)  # type: ignore[attr-defined]
        for _ in range(2):
            before = engine.prefilled
            await engine.sample(ids, SAMPLING, 0, request=request)
        assert engine.prefilled - before == 1, "the same images are shared"
        with torch.no_grad():
            states = policy.hidden(torch.tensor([ids]), images=[request.images])[0]
        scores.append(policy.logits(states).log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]])
    assert not any(engine._batch._features.values()), "features are kept up to a size in bytes"
    assert engine.prefilled == 2 * len(ids) - first + 2, "only the text before the first image is shared"
    differ, (_, second) = scores[0] != scores[1], rows[0].images  # type: ignore[attr-defined]
    assert not differ[: first - 1].any() and differ[second.start + second.length :].all()


# --- training ------------------------------------------------------------------------------------


def gradient(policy: af.Policy, batch: af.Batch, shared: bool) -> torch.Tensor:
    for p in policy.parameters():
        p.grad = None
    policy.__dict__["_sharing_obstacle"] = "" if shared else "a test"
    options: Any = {"row_keys": batch.row_keys, "images": batch.images, "entropy": True, "value": True}
    out = policy.forward(batch.ids, batch.mask, batch.temperatures, **options)
    weigh = torch.linspace(-1, 1, len(out.logprob))
    (out.logprob * weigh + out.entropy * weigh.flip(0) + out.value * weigh.square()).sum().backward()  # type: ignore[operator]
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [True, "separate"])
async def test_trees_give_the_gradients_of_rows(family: str, head: Any) -> None:
    made = vision_models.policy(family, value_head=head)
    with torch.no_grad():
        for p in made.value_head.parameters():  # type: ignore[union-attr]
            p.add_(0.1)
    assert made._sharing_obstacle == ""
    batch = batch_of(await agent(made).rollout(TASKS, 4))
    assert len(made._build_trees(batch.row_keys, batch.mask, 4096)) < len(batch)
    trees, rows = (gradient(made, batch, shared) for shared in (True, False))
    assert float((trees - rows).norm()) <= 1e-6 * float(rows.norm())
    tower = [p.grad for name, p in made.model.named_parameters() if "vis" in name and p.grad is not None]
    assert sum(float(g.abs().sum()) for g in tower) > 0


@pytest.mark.parametrize("family", FAMILIES)
async def test_training_steps(family: str) -> None:
    policy = vision_models.policy(family)
    rollout = await agent(policy, tools=[look]).rollout(TASKS, 8)
    batch = batch_of(rollout)
    before = policy.fingerprint()
    stats = af.ppo_step(policy, af.adamw(policy, 1e-3), batch, reference=policy.reference())
    assert stats.sampler_gap <= 1e-5 and stats.grad_norm > 0 and policy.fingerprint() != before
    scored = policy.score(batch, {"logprob"})["logprob"]
    sampled = await agent(policy).rollout(TASKS, 2)
    again = policy.score(af.collate(sampled, [1.0] * len(sampled)), {"logprob"})["logprob"]
    assert torch.isfinite(scored[batch.mask]).all()
    expected = torch.from_numpy(np.concatenate([t.logprobs[t.action_mask] for t in sampled]))
    assert torch.allclose(again[~again.isnan()], expected, atol=1e-5), "features follow the weights"
    (losses,) = [[s.loss for s in await af.imitate(policy, rollout, epochs=3, lr=1e-2)]]
    assert losses[-1] < losses[0]


async def test_a_training_run_and_its_views() -> None:
    policy, rewards = vision_models.policy("idefics3"), itertools.cycle([0.0, 1.0, 0.5])
    trained = agent(policy).replace(reward=lambda: next(rewards))
    run = await af.train(trained, policy, TASKS, af.TrainConfig(steps=2, tasks_per_step=4, group_size=2))
    assert len(run.records) == 2 and run.records[-1]["sampler_gap"] <= 1e-5
    assert "image" in widgets.TokenView(await trained.rollout(TASKS[:1]))._static()


async def test_adapters_leave_out_the_vision_tower(tmp_path: Path) -> None:
    folder = vision_models.shared("idefics3").save(tmp_path / "base")
    found = {}
    for vision in (False, True):
        policy = af.Policy.load(folder, lora={"r": 2, "vision": vision})
        names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
        found[vision] = any("vision" in name or "connector" in name for name in names)
        assert any("text_model" in name for name in names) and policy.image_obstacle == ""
        batch = batch_of(await agent(policy).rollout(TASKS, 4))
        assert af.ppo_step(policy, af.adamw(policy), batch, reference=policy.reference()).sampler_gap <= 1e-5
    assert found == {False: False, True: True}


# --- loading and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_saved_policies_sample_the_same(family: str, tmp_path: Path) -> None:
    policy = vision_models.shared(family)
    expected = tokens(await agent(policy).rollout(TASKS))
    folders = [policy.save(tmp_path / "own")]
    if family == "smolvlm" and importlib.util.find_spec("num2words") is None:  # not installed for the tests
        errors.check(lambda: af.Policy.load(folders[0]), af.errors.PolicyError, "pip install num2words")
        return
    if family == "idefics3":  # the files that transformers writes
        policy.model.save_pretrained(tmp_path / "theirs")
        policy.chat.reader.processor.save_pretrained(tmp_path / "theirs")
        folders.append(tmp_path / "theirs")
    for folder in folders:
        loaded = af.Policy.load(folder)
        assert tokens(await agent(loaded).rollout(TASKS)) == expected
        # The policy of SmolVLM was made with the processor of Idefics3.
        assert family == "smolvlm" or loaded.chat.reader.fingerprint == policy.chat.reader.fingerprint
    assert tokens(await agent(policy.copy()).rollout(TASKS)) == expected


async def test_models_that_the_trial_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    text = agents.random_policy(5)
    assert "no image processor" in text.image_obstacle
    policy = vision_models.policy("idefics3")
    batch = batch_of(await agent(policy).rollout(TASKS, 4))
    errors.check(lambda: text.score(batch), af.errors.PolicyError, "reads no images: its chat has no image")
    monkeypatch.setattr(prompts.PromptImages, "options", lambda self, *given: {})
    assert "different hidden states with and without a KV cache" in af.LocalEngine(policy.copy()).image_obstacle
    gemma = vision_models.policy("gemma3")  # its placeholders attend to each other in both directions
    mixed = policy.copy()  # the features of its images depend on how many are computed together
    own = mixed.model.get_image_features
    mixed.model.get_image_features = lambda pixel_values: (
        torch.stack([*own(pixel_values).pooler_output]) * len(pixel_values)
    )
    monkeypatch.setattr(type(policy.model), "get_image_features", lambda self: 1 / 0)
    rows = (
        *((of, "logits that differ from the model's own") for of in (gemma, mixed)),
        (policy.copy(), "ZeroDivisionError"),
    )
    for refused, reason in rows:
        assert reason in refused.image_obstacle and "reads no images: " in repr(refused)
        await errors.check(lambda p=refused: agent(p).rollout(TASKS), af.errors.SettingsError, "reads no images")
        errors.check(lambda p=refused: af.ppo_step(p, af.adamw(p), batch), af.errors.BatchError, reason)
