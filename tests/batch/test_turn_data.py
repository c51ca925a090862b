"""Per-turn advantages: the inputs of the estimators, and the tokens that receive the results."""

import dataclasses
import math
from typing import Any, cast

import errors
import pytest
import torch
from agents import agent, tasks
from test_batch import row

import agentfly_kit as af
from agentfly_kit.errors import BatchError
from agentfly_kit.rewards import RewardSet
from agentfly_kit.trainer.batch_builder import BatchBuilder

TWO = (("prompt", 2), ("action", 2), ("observation", 1), ("action", 2))


def turned(t: af.Trajectory, **rewards: float) -> af.Trajectory:
    """Return the trajectory with turn rewards: turned(t, _2=0.5) sets that of turn 2."""
    turns = [dataclasses.replace(turn, reward=rewards.get(f"_{i}", turn.reward)) for i, turn in enumerate(t.turns)]
    return t.replace(turns=tuple(turns))


def test_turn_advantages_go_to_the_tokens_of_the_turn() -> None:
    a, b = row(*TWO), row(("prompt", 1), ("action", 1), group="h", reward=0.0)
    batch = af.collate([a, b], torch.tensor([[1.0, 2.0], [3.0, 9.0]]))
    nan = math.nan
    wanted = torch.tensor([[nan, nan, 1, 1, nan, 2, 2], [nan, 3, nan, nan, nan, nan, nan]])
    torch.testing.assert_close(batch.advantages, wanted, equal_nan=True)
    # A dropped trajectory still has a row in the tensor of advantages.
    batch = af.collate([row(*TWO, reward=None, chain=1), a], torch.tensor([[5.0, 6.0], [1.0, 2.0]]))
    assert batch.advantages[0][batch.mask[0]].tolist() == [1, 1, 2, 2]


def test_turn_rewards_and_states() -> None:
    a = turned(row(*TWO, reward=1.0), _2=0.25, _3=0.5)
    turns = af.turn_data([a, row(("prompt", 1), ("action", 1), reward=None)])
    assert turns.turn_rewards == ((0.25, 1.5), (None,))
    assert turns.states == (((1, 2), (5,)), ((1,),))
    assert af.turn_data(a, rewards=[3.0]).turn_rewards == ((0.25, 3.5),)
    assert af.turn_data([a], state=lambda t, i: (t.chain, i)).states == (((0, 1), (0, 3)),)
    # `collate` assigns the same sums to tokens.
    assert af.collate([a]).token_rewards[0].nan_to_num().tolist() == [0, 0, 0, 0.25, 0, 0, 1.5]


@af.reward
def zero(final: str | None) -> float:
    return 0.0


@af.reward(per="turn")
def by_turn(turn: af.Turn) -> float:
    return 0.0


def plus_one(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return rewards + 1


@pytest.mark.parametrize("turn", ["_2", "_3"])
@pytest.mark.parametrize("name", ["arpo", "gdpo", "gigpo", "grpo", "none", "opo", "reinforce_plus_plus", plus_one])
def test_turn_rewards_have_an_effect_or_are_refused(name: Any, turn: str) -> None:
    """Turn 2 is an observation, whose reward a tool returned; turn 3 is an action, which a function rewarded.

    Filters, refills, greedy chains and KL penalties of a run also use the rollout that `sum_turn_rewards` returns.
    """
    metrics: Any = [{"zero": 0.0, "by_turn": i * (turn == "_3")} for i in range(2)]
    chains = [turned(row(*TWO, reward=0.0, chain=i, metrics=metrics[i]), **{turn: float(i)}) for i in range(2)]
    rollout, rewards = af.Rollout.from_trajectories(chains), RewardSet([zero, by_turn])
    summed = rollout.sum_turn_rewards()
    assert ([t.reward for t in summed], [t.success for t in summed]) == ([0.0, 1.0], [False, False])
    config = af.TrainConfig(advantage=name, teacher_coef=float(name == "none"))
    build = BatchBuilder(cast(af.Policy, None), config, rewards).build
    if name in ("gigpo", "reinforce_plus_plus") or (name, turn) == ("gdpo", "_3"):
        assert build(rollout, 0.0).advantages.nan_to_num().any()
    elif name == "none":
        assert not build(rollout, 0.0).advantages.nan_to_num().any()
    else:
        errors.check(
            lambda: build(rollout, 0.0), BatchError, f"turn {turn[1]} of 'g/1' has the reward 1, which has no"
        )
        wanted = [1.0, 2.0] if callable(name) else [-0.707, 0.707]
        if name not in ("gdpo", "opo"):
            torch.testing.assert_close(build(summed, 0.0).advantages[:, 2], torch.tensor(wanted), atol=1e-3, rtol=0)


def test_gigpo_compares_turns_with_equal_states() -> None:
    """With gamma 1 and std None, advantages are differences from means."""
    good = row(*TWO, reward=1.0, chain=0)
    bad = row(*TWO, reward=0.0, chain=1)
    given = [good, bad, row(("prompt", 2), ("action", 1), ("observation", 2), ("action", 1), reward=0.5, chain=2)]

    def estimator(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        turns = af.turn_data(given, rewards=rewards.tolist())
        return af.advantages.gigpo(
            rewards, groups, turn_rewards=turns.turn_rewards, states=turns.states, gamma=1.0, std=None
        )

    batch = af.collate(given, estimator)
    # The episodes have advantages +.5, -.5 and 0, and so have the first turns, which all follow the prompt. The second
    # turns of `good` and `bad` follow the same observation and have +.5 and -.5; that of the third is alone and has 0.
    assert [batch.advantages[i][batch.mask[i]].tolist() for i in range(3)] == [[1.0] * 4, [-1.0] * 4, [0.0, 0.0]]


async def forked(same_seeds: bool = False) -> list[af.Trajectory]:
    """Return a chain, its fork after the first turn, and a chain of its own."""
    one = agent()
    for task in tasks(24):
        first = one.chain(task)
        await first.step()
        if first.stop is None:
            break  # the tool was called
    assert first.stop is None
    fork = await first.fork(same_seeds=same_seeds)
    other = one.chain(tasks(24)[-1])
    return [await chain.run() for chain in (first, fork, other)]


async def test_forks_share_the_ids_of_common_turns() -> None:
    first, fork, other = await forked()
    together = [t.replace(group="g", chain=c) for t, c in ((first, 0), (fork, 0), (other, 1))]
    turn_ids = af.turn_data(together).turn_ids
    assert [len(path) for path in turn_ids] == [sum(turn.sampled for turn in t.turns) for t in together]
    common = sum(a is b and a.sampled for a, b in zip(first.turns, fork.turns, strict=False))
    assert common >= 1
    assert turn_ids[0][:common] == turn_ids[1][:common]
    assert not set(turn_ids[2]) & set(turn_ids[0] + turn_ids[1])
    assert float(af.advantages.branch_weights(turn_ids, [0, 0, 0]).sum()) == pytest.approx(1)
    adv = af.advantages.arpo(torch.tensor([1.0, 0.0, 0.5]), [0, 0, 0], turn_ids=turn_ids, attribution="hard")
    batch = af.collate(together, adv)
    assert batch.advantages[batch.mask].isfinite().all()


async def test_a_fork_with_equal_turns_is_another_leaf() -> None:
    first, fork, _ = await forked(same_seeds=True)
    turn_ids = af.turn_data([t.replace(group="g", chain=0) for t in (first, fork)]).turn_ids
    assert turn_ids[0][-1] != turn_ids[1][-1]
    af.advantages.arpo(torch.tensor([1.0, 0.0]), [0, 0], turn_ids=turn_ids)
