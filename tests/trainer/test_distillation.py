"""On-policy distillation and estimators whose inputs `train` computes, against computations by hand."""

import math
from typing import Any

import torch
from agents import assert_same_gradient, fresh, random_policy
from test_trainer import SMALL, TASKS, digits, short, small, start

import agentfly_kit as af
from agentfly_kit.trainer.batch_builder import BatchBuilder, distilled

DISTIL = SMALL.replace(advantage="none", teacher_coef=1.0, steps=1)


async def sampled(policy: af.Policy, **settings: Any) -> Any:
    return await small(policy, **settings).rollout(TASKS[:3], 4)


# --- distillation


def test_the_expected_gradient_is_that_of_the_kl_over_the_vocabulary() -> None:
    """The policy gradients of all next tokens, weighted by their probabilities, sum to that of the reverse KL."""
    student, teacher = random_policy(1), random_policy(2)
    vocabulary = student.vocab_size
    prompt = torch.tensor([5, 17, 40, 8])

    states = torch.log_softmax(student.logits(student.hidden(prompt[None])[0, -1:]), -1)[0]
    with torch.no_grad():
        target = torch.log_softmax(teacher.logits(teacher.hidden(prompt[None])[0, -1:]), -1)[0]
    (states.exp() * (states - target)).sum().backward()
    wanted = torch.cat([p.grad.flatten().clone() for p in student.model.parameters() if p.grad is not None])
    student.model.zero_grad()

    # One row per next token, through the forward pass and the estimator of a training step.
    ids = torch.cat([prompt.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, -1] = True
    ours = student.forward(ids, mask, torch.ones(vocabulary)).logprob
    with torch.no_grad():
        theirs = teacher.forward(ids, mask, torch.ones(vocabulary)).logprob
    gap = af.advantages.distillation(theirs[:, None], ours.detach()[:, None], torch.ones(vocabulary, 1))[:, 0]
    (ours.detach().exp() * -gap * ours).sum().backward()
    got = torch.cat([p.grad.flatten() for p in student.model.parameters() if p.grad is not None])
    assert_same_gradient(got, wanted)


async def test_the_advantage_is_the_gap_of_logprobs_alone_or_added() -> None:
    policy, teacher = fresh(), af.tiny.policy("calculator")
    torch.manual_seed(0)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.01)
    rollout = await sampled(policy)
    plain = af.collate(rollout, af.advantages.grpo)
    gap = teacher.score(plain, {"logprob"})["logprob"] - plain.logprobs
    alone = await distilled(BatchBuilder(policy, DISTIL, small(policy).reward).build(rollout, 0.0), teacher, DISTIL)
    assert torch.allclose(alone.advantages[alone.mask], gap[plain.mask])
    both = await distilled(plain, teacher, DISTIL.replace(advantage="grpo", teacher_coef=0.5))
    assert torch.allclose(both.advantages[both.mask], (plain.advantages + 0.5 * gap)[plain.mask])
    same = await distilled(plain, policy.copy(), DISTIL)
    assert float((same.advantages - plain.advantages)[plain.mask].abs().max()) < 1e-4


async def test_distillation_needs_no_reward_and_moves_the_policy_to_the_teacher() -> None:
    policy = fresh()
    teacher = policy.copy()
    with torch.no_grad():  # a teacher that never says "I don't know"
        never = policy.chat.encode("I")[0]
        teacher.model.get_output_embeddings().weight[never] *= -1
    run = start(None, policy, DISTIL.replace(steps=3, tasks_per_step=6), reward=None, teacher=teacher)
    gaps = []
    async for step in run:
        batch = af.collate([t.replace(reward=0.0) for t in step.rollout or ()])
        scored = teacher.score(batch, {"logprob"})["logprob"]
        gaps.append(float((batch.logprobs - scored)[batch.mask].mean()))
    assert gaps[-1] < gaps[0]
    assert run.fingerprint["teacher"] == teacher.fingerprint()


# --- inputs of estimators


async def built(name: str, **options: Any) -> tuple[Any, af.Batch]:
    policy = fresh()
    agent = small(policy, reward=[digits, short])
    rollout = await agent.rollout(TASKS[:3], 4)
    builder = BatchBuilder(policy, SMALL.replace(advantage=name), agent.reward)
    return rollout, builder.build(rollout, 0.0, **options)


def firsts(batch: af.Batch) -> torch.Tensor:
    """Return the advantage of each row, which all of its tokens share."""
    return torch.stack([a[m][0] for a, m in zip(batch.advantages, batch.mask, strict=True)])


async def test_opo_weighs_by_sampled_tokens() -> None:
    rollout, batch = await built("opo")
    lengths = [int(t.action_mask.sum()) for t in rollout]
    wanted = af.advantages.opo(batch.rewards, batch.groups, lengths=lengths)
    assert torch.allclose(firsts(batch), wanted.float())
    assert not torch.allclose(wanted, af.advantages.dr_grpo(batch.rewards, batch.groups))


async def test_remax_subtracts_the_reward_of_the_greedy_chain() -> None:
    baselines = {task.id: 0.1 * i for i, task in enumerate(TASKS[:3])}
    rollout, batch = await built("remax", baselines=baselines)
    wanted = [(t.reward or 0.0) - baselines[t.task.id] for t in rollout]
    assert torch.allclose(firsts(batch), torch.tensor(wanted))
    run = start(None, fresh(), SMALL.replace(advantage="remax"))
    greedy = await run._sampler.greedy_rewards(rollout)
    agent = run.agent.replace(sampling=run.agent.sampling.replace(temperature=0.0))
    assert greedy == {t.task.id: t.reward for t in await agent.rollout(TASKS[:3])}
    unscored = BatchBuilder(fresh(), SMALL.replace(advantage="remax"), agent.reward).build(
        rollout, 0.0, dict.fromkeys(baselines, math.nan)
    )
    assert (firsts(unscored) == 0).all()


async def test_gdpo_normalizes_each_reward() -> None:
    rollout, batch = await built("gdpo")
    columns = [[t.metrics["digits"], t.metrics["short"]] for t in rollout]
    assert torch.allclose(firsts(batch), af.advantages.gdpo(columns, batch.groups, weights=[1.0, 0.5]))


async def test_the_optimal_token_baseline_gets_the_probabilities_of_all_tokens() -> None:
    _, batch = await built("optimal_token_baseline")
    policy = fresh()
    logits = policy.model(input_ids=batch.ids).logits.float()
    squares = torch.softmax(logits, -1).square().sum(-1)
    squares = torch.nn.functional.pad(squares[:, :-1], (1, 0))
    scored = policy.score(batch, {"sum_squared_probs"})["sum_squared_probs"]
    assert torch.allclose(scored[batch.mask], squares[batch.mask], atol=1e-5)
    wanted = af.advantages.optimal_token_baseline(
        torch.where(batch.mask, batch.token_rewards, 0.0),
        batch.mask,
        groups=batch.groups,
        logprobs=batch.logprobs,
        sum_squared_probs=squares,
        trajectory_index=batch.trajectory_index,
    )
    assert torch.allclose(batch.advantages[batch.mask], wanted[batch.mask], atol=1e-5)
