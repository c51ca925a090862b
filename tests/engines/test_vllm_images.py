"""VLLMEngine with images: the same ids, pixels and logprobs as the policy, and updates of the vision tower."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import agents
import errors
import pytest
import torch
import vision_models
from test_engine_vllm import GAP, UPDATED_GAP, gaps, installed
from test_vision import TASKS, agent, batch_of, look

import agentfly_kit as af
from agentfly_kit.engines.vllm.images import make_prompt, use_processor
from agentfly_kit.samples import TurnRequest

pytestmark = pytest.mark.filterwarnings("ignore")


async def test_which_engines_read_images_and_what_they_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = vision_models.shared("idefics3")
    reader, ids = policy.chat.reader, policy.chat.prompt(TASKS[0].messages)
    for engine in (af.VLLMEngine(policy), af.VLLMEngine(policy.save(tmp_path))):
        assert engine.images == 16 and engine.chat.prompt(TASKS[0].messages) == ids
        assert engine._logit_bias == {reader.token_id: -torch.inf}
    prompt = make_prompt(ids, ids.images, reader)  # type: ignore[attr-defined]
    assert prompt["prompt_token_ids"].count(reader.token_id) == len(prompt["multi_modal_data"]["image"]) == 2
    monkeypatch.setattr("agentfly_kit.chat.images.load_processor", lambda *given: 1 / 0)
    unsupported = af.VLLMEngine(tmp_path)
    assert (unsupported.images, unsupported.chat.reader, unsupported._logit_bias) == (0, None, None)
    assert unsupported.image_obstacle.endswith("(ZeroDivisionError: division by zero)")
    text = af.VLLMEngine(agents.random_policy())
    assert text.images == 0 and text._logit_bias is None
    await errors.check(lambda: agent(policy, engine=text).rollout(TASKS), af.errors.SettingsError, "reads no images")
    used = SimpleNamespace(image_processor="another")
    info = SimpleNamespace(get_hf_processor=lambda: used)
    llm = SimpleNamespace(renderer=SimpleNamespace(get_mm_processor=lambda: SimpleNamespace(info=info)))
    assert use_processor(llm, reader) == "" and used.image_processor is reader.processor.image_processor
    info.get_image_processor = lambda: "another"
    assert "does not use the image processor of the chat" in use_processor(llm, reader)


@installed
@pytest.mark.real
async def test_images_are_those_of_the_policy_before_and_after_an_update_of_its_tower() -> None:
    policy = af.tiny.policy("shapes")
    engine = af.VLLMEngine(policy)
    sampler = agent(policy, engine=engine, tools=[look])
    try:
        for allowed in (GAP, UPDATED_GAP):
            batch = batch_of(await sampler.rollout(TASKS, 4))
            assert max(gaps(policy, batch)) <= allowed and set(batch.versions[batch.mask].tolist()) == {
                policy.version
            }
            chain = sampler.chain(TASKS[0])
            there = await chain.distribution(top=400)
            here = await sampler.replace(engine=af.LocalEngine(policy)).chain(TASKS[0]).distribution(top=400)
            assert abs(there.entropy - here.entropy) <= allowed and there.ids[:99] == here.ids[:99]
            assert not {*policy.placeholders} & {*there.ids}
            chain.force('<tool_call>{"name":"look","arguments":{}}</tool_call>')
            await chain.act()
            await chain.sample()
            shown = replace(chain.snapshot(), reward=1.0)
            assert shown.turns[2].images and max(gaps(policy, af.collate([shown], [1.0]))) <= allowed
            await chain.close()
            with torch.no_grad():
                for name, weight in policy.model.named_parameters():
                    if "vision" in name or "connector" in name:
                        weight.mul_(1.5)
            policy.version += 1
            await engine.update(policy)
        ids = policy.chat.prompt(TASKS[0].messages)
        (first, second) = ids.images  # type: ignore[attr-defined]
        wrong = TurnRequest(TASKS[0], 0, "s", images=(first, second._replace(length=second.length - 1)))
        error = af.errors.EngineError
        await errors.check(lambda: engine.sample(ids, af.Sampling(), 0, request=wrong), error, "vLLM must give")
        await errors.check(lambda: engine.score(ids), error, "got placeholders of images")
    finally:
        await engine.close()
