"""A pretrained model: SmolLM2-135M-Instruct, which `scripts/install smollm2` adds."""

import itertools

import pytest
import torch

import agentfly_kit as af
from agentfly_kit.policy.gguf import models_folder

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (models_folder() / "smollm2").exists(), reason="needs: scripts/install smollm2"),
]


async def test_a_pretrained_model_answers_and_takes_a_step_with_an_adapter():
    policy = af.Policy.load("smollm2", lora=4, device="cpu")
    numbers = itertools.count()

    @af.reward
    def alternating() -> float:
        return float(next(numbers) % 2)

    agent = af.Agent(
        af.LocalEngine(policy), chat=policy.chat, reward=alternating, sampling=af.Sampling(max_tokens=24)
    )
    tasks = af.tasks_from([{"question": "What is the capital of France?"}])
    greedy = await agent.replace(sampling=af.Sampling(temperature=0.0, max_tokens=24)).rollout(tasks)
    assert greedy.trajectories[0].final == "The capital of France is Paris."
    rollout = await agent.rollout(tasks, group_size=2)
    batch = af.collate(rollout, af.advantages.grpo)
    reference = policy.reference()
    old, frozen = (each.score(batch, {"logprob"})["logprob"] for each in (policy, reference))
    assert (old - batch.logprobs)[batch.mask].abs().max() < 1e-4
    stats = af.ppo_step(policy, af.adamw(policy, lr=1e-4), batch)
    assert stats.grad_norm > 0
    new, kept = (each.score(batch, {"logprob"})["logprob"] for each in (policy, reference))
    assert (new - old)[batch.mask].abs().max() > 1e-5
    assert torch.equal(kept[batch.mask], frozen[batch.mask])
