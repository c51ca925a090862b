"""Imitation: the same rows, masks and step as reinforcement learning, for actions that anybody wrote."""

import math
import re
from typing import Any

import agents
import errors
import pytest
import torch
from recipes.calculator import Expression, Recipe

import agentfly_kit as af


@pytest.fixture(scope="module")
def policy() -> Any:
    return af.Policy(af.tiny.model(seed=1), agents.chat())


def shown(policy: Any, *texts: str, habit: str = "solves") -> list[af.Trajectory]:
    writer = Recipe(policy.chat)
    return [writer.demonstrate(habit, Expression(text)) for text in texts]


def optimizer(policy: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(policy.model.parameters(), lr=lr)


def gradients(policy: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


# --- the batch


async def test_a_batch_of_scripted_actions_has_their_mask_and_weight_one() -> None:
    rollout = await agents.scripted([agents.call("2+3"), "5"]).rollout(agents.tasks(2))
    batch = af.collate(rollout, imitate=True)
    t = rollout.trajectories[0]
    assert batch.mask[0, : len(t.ids)].tolist() == [t.turns[i].kind == "action" for i in t.turn_index]
    assert batch.imitation and (batch.advantages[batch.mask] == 1).all() and torch.isnan(batch.logprobs).all()
    assert batch.mask.equal(af.collate(rollout, imitate="script").mask)


async def test_weights_of_turns_are_rejected(policy: Any) -> None:
    """They have a column per sampled turn, but scripted turns are not sampled."""
    given = shown(policy, "1+2", "2+3")
    turns = len(given[0].actions)
    assert turns > 1
    errors.check(
        lambda: af.collate(given, torch.ones(2, turns), imitate=True),
        af.errors.AlignmentError,
        re.compile(r"weights \(advantages\) must have the shape \(2,\) \(one per trajectory\) or .*, got"),
    )
    shape = af.collate(given, imitate=True).ids.shape
    batch = af.collate(given, torch.full(shape, 0.5), imitate=True)
    assert (batch.advantages[batch.mask] == 0.5).all()


async def test_forced_tokens_of_one_author_are_imitated_alone(policy: Any) -> None:
    agent = af.Agent(af.LocalEngine(policy), chat=policy.chat, sampling=af.Sampling(max_tokens=4))
    chain = agent.chain(agents.tasks(1)[0])
    chain.force("1", end=False, author="expert")
    await chain.sample()
    t = await chain.finish()
    assert t.reward is None  # imitation needs no reward
    by_expert, by_policy = (af.collate(t, imitate=name).mask for name in ("expert", "policy"))
    assert int(by_expert.sum()) == len(policy.chat.encode("1"))
    assert not (by_expert & by_policy).any()
    assert (by_expert | by_policy).equal(af.collate(t, imitate=("expert", "policy")).mask)


def test_rejection_sampling_keeps_the_rows_of_positive_weight(policy: Any) -> None:
    given = [t.replace(id=f"t{i}", reward=float(i % 2)) for i, t in enumerate(shown(policy, "1+2", "2+3", "3+4"))]
    batch = af.collate(given, lambda rewards, groups: (rewards > 0).float(), imitate=True)
    assert [t.id for t in batch.trajectories] == ["t1"]
    assert [(d.trajectory, d.reason) for d in batch.dropped] == [("t0", "weight 0"), ("t2", "weight 0")]


async def test_a_chain_that_failed_on_the_host_is_not_imitated(policy: Any) -> None:
    good, bad = shown(policy, "1+2", "2+3")
    batch = af.collate([good, bad.replace(id="bad", stop="error")], imitate=True)
    assert (len(batch), [dropped.reason for dropped in batch.dropped]) == (1, ["unscored (error)"])


# --- the step


def test_only_masked_tokens_are_targets_and_shared_prefixes_change_nothing(policy: Any) -> None:
    """The gradient equals that of a plain cross-entropy with labels -100 outside of the actions."""
    texts = ("1+2", "1+2", "1+2-3", "9*9")
    batch = af.collate(shown(policy, *texts), imitate=True)
    ours, plain = policy.copy(), policy.copy()
    af.imitation_step(ours, optimizer(ours), batch, af.PPOConfig(max_grad_norm=None))
    labels = torch.where(batch.mask, batch.ids, -100)
    logits = plain.model(input_ids=batch.ids, attention_mask=batch.attention.long()).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    expected = gradients(plain)
    assert float((gradients(ours) - expected).norm() / expected.norm()) < 1e-5


def test_a_weight_scales_the_loss_of_its_rows(policy: Any) -> None:
    one, two = shown(policy, "1+2", "2*(3+4)")
    parts = []
    for given, weights in (([one, two], [2.0, 0.5]), ([one, two], [1.0, 1.0])):
        copy = policy.copy()
        batch = af.collate(given, weights, imitate=True)
        stats = af.imitation_step(copy, optimizer(copy), batch)
        assert (stats.updates, copy.version) == (1, policy.version + 1) and math.isnan(stats.entropy)
        parts.append(stats.loss)
        logprobs = policy.score(batch, {"logprob"})["logprob"].double()
        expected = -float((logprobs * batch.advantages)[batch.mask].sum() / batch.mask.sum())
        assert parts[-1] == pytest.approx(expected, rel=1e-6)
    assert parts[0] != pytest.approx(parts[1])


# --- imitate


async def test_imitation_teaches_and_is_reproducible(policy: Any) -> None:
    given = shown(policy, *(f"{a}+{b}" for a in range(1, 7) for b in range(1, 7)))
    stats, again = [await af.imitate(policy.copy(), given, epochs=6, minibatch=12, lr=3e-3) for _ in range(2)]
    assert len(stats) == 18 and [s.loss for s in stats] == [s.loss for s in again]
    assert stats[-1].loss < 0.5 * stats[0].loss
    assert stats[-1].lr < stats[1].lr <= 3e-3
