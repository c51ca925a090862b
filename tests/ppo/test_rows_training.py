"""Trajectories of several rows in training: token weights, advantages, and minibatches."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import agents
import pytest
import torch
from agents import trajectory
from test_ppo_settings import gradient, plain
from torch import Tensor

import agentfly_kit as af
from agentfly_kit.ppo.inputs import minibatches
from agentfly_kit.trainer.batch_builder import BatchBuilder

Plan = list[list[tuple[str, int]]]
nan = math.nan


def folded(policy: af.Policy | None, *, seed: int = 0, count: int = 8, most: int = 4) -> list[af.Trajectory]:
    """Trajectories of one to `most` rows of random turns, in groups of four."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        plan: Plan = []
        for _ in range(rng.randint(1, most)):
            row = [("task", rng.randint(2, 5))]
            for _ in range(rng.randint(1, 2)):
                row += [("policy", rng.randint(1, 6)), ("tool", rng.randint(0, 4))]
            plan.append(row)
        out.append(
            trajectory(
                policy,
                plan,
                name=f"g{i // 4}/{i % 4}",
                reward=rng.choice([0.0, 1.0, rng.random()]),
                seed=100 * seed + i,
            )
        )
    return out


# --- collate -------------------------------------------------------------------------------------


def test_the_batch_has_every_row_of_every_trajectory() -> None:
    given = folded(None, seed=1)
    batch = af.collate(given, af.advantages.grpo)
    every = [(t, row) for t in given for row in t.rows]
    assert len(every) > len(given) and batch.rows == tuple(row for _, row in every)
    assert [t.id for t in batch.trajectories] == [t.id for t, _ in every]
    assert batch.row_index.tolist() == [row.index for _, row in every]
    for i, (t, row) in enumerate(every):
        n, padding = len(row), [False] * (batch.mask.shape[1] - len(row))
        assert (batch.ids[i, :n].tolist(), batch.mask[i].tolist()) == (row.ids.tolist(), [*row.action_mask, *padding])
        torch.testing.assert_close(batch.logprobs[i, :n], torch.tensor(row.logprobs), equal_nan=True)
        assert float(batch.rewards[i]) == pytest.approx(float(t.reward or 0))
    assert batch.trajectory_index.tolist() == [given.index(t) for t, _ in every]
    assert batch.first_rows.tolist() == [i for i, (_, row) in enumerate(every) if row.index == 0]


def test_advantages_per_trajectory_or_per_row() -> None:
    """One trajectory succeeds and has three rows; another fails and has one row, as in docs/conventions.md."""
    success = trajectory(None, [[("task", 2), ("policy", 2)]] * 3, name="g/0")
    failure = trajectory(None, [[("task", 2), ("policy", 2)]], name="g/1", reward=0.0, seed=1)
    once = af.collate([success, failure], af.advantages.grpo)
    assert once.advantages[:, 2].tolist() == pytest.approx([0.7071, 0.7071, 0.7071, -0.7071], abs=1e-4)
    each = af.collate([success, failure], af.advantages.grpo, per="row")
    assert each.advantages[:, 2].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)
    again = af.advantages.trajectory_level(once.rewards, once.groups, trajectory_index=once.trajectory_index)
    torch.testing.assert_close(once.advantages[:, 2], again)
    assert af.collate([success, failure], [1.0, 2.0]).advantages[:, 2].tolist() == [1, 1, 1, 2]
    assert af.collate([success, failure], [1.0, 2.0, 3.0, 4.0], per="row").advantages[:, 2].tolist() == [1, 2, 3, 4]


def test_masked_trajectories_still_count_in_their_group() -> None:
    """Truncated trajectories that are masked count in the baseline, whereas unscored trajectories do not."""
    cut = trajectory(None, [[("task", 2), ("policy", 2)]] * 2, name="g/0", reward=0.0, stop="timeout")
    good = trajectory(None, [[("task", 2), ("policy", 2)]], name="g/1", seed=1)
    lost = trajectory(None, [[("task", 2), ("policy", 2)]] * 2, name="g/2", reward=None, stop="error", seed=2)
    batch = af.collate([cut, good, lost], af.advantages.dr_grpo, truncated="mask", per="row")
    assert batch.advantages[:, 2].tolist() == pytest.approx([2 / 3])
    assert af.collate([cut, good, lost], af.advantages.dr_grpo, truncated="mask").advantages[0, 2] == pytest.approx(
        0.5
    )


def test_rewards_are_at_the_tokens_that_earned_them() -> None:
    last: list[tuple[str, int]] = [("hook", 1), ("policy", 1), ("tool", 1), ("policy", 2), ("tool", 0)]
    plan: Plan = [[("task", 1), ("policy", 2), ("tool", 1)], last]
    t = trajectory(None, plan, reward=10.0, turn_rewards={2: 0.5, 3: 0.25, 4: 2.0, 5: 0.125, 7: -1.0})
    batch = af.collate([t])
    # The reward on the prompt of the second row belongs to the last action of the first row.
    torch.testing.assert_close(
        batch.token_rewards, torch.tensor([[nan, 0, 0.75, nan, nan], [nan, 2.125, nan, 0, 9]]), equal_nan=True
    )
    assert batch.truncated.tolist() == [False, False]
    assert af.collate([t.replace(stop="timeout")]).truncated.tolist() == [False, True]


def test_rows_without_sampled_tokens_are_dropped() -> None:
    t = trajectory(None, [[("task", 1), ("policy", 1)], [("hook", 2)], [("hook", 1), ("person", 1)]], reward=3.0)
    batch = af.collate([t], af.advantages.dr_grpo)
    assert batch.token_rewards[:, 1].tolist() == [3.0]
    assert [(d.trajectory, d.row, d.reason) for d in batch.dropped] == [
        ("g/0", row, "no token was sampled by a policy") for row in (1, 2)
    ]


def test_a_mask_of_authors() -> None:
    plan: Plan = [[("task", 1), ("WHITE", 2), ("BLACK", 2), ("WHITE", 1)], [("hook", 1), ("BLACK", 1)]]
    t = trajectory(None, plan, reward=1.0, turn_rewards={1: 0.5, 2: 0.25, 5: 0.125})
    batch = af.collate([t], [2.0], authors="WHITE")
    assert batch.mask.tolist() == [[False, True, True, False, False, True]]
    for name, wanted in {
        "advantages": [[nan, 2, 2, nan, nan, 2]],
        "token_rewards": [[nan, 0, 0.5, nan, nan, 1]],  # without the rewards of BLACK
    }.items():
        torch.testing.assert_close(getattr(batch, name), torch.tensor(wanted), equal_nan=True)
    for name in ("logprobs", "entropies"):
        assert torch.isnan(getattr(batch, name)).tolist() == (~batch.mask).tolist()
    assert (batch.versions >= 0).tolist() == batch.mask.tolist()
    both = af.collate([t], [2.0], authors=["WHITE", "BLACK"])
    torch.testing.assert_close(both.mask, af.collate([t], [2.0]).mask)
    only = trajectory(None, [[("task", 1), ("BLACK", 2)]], name="g/1")
    assert [d.reason for d in af.collate([t, only], [1.0, 1.0], authors="WHITE").dropped] == [
        "no token was sampled by WHITE",
        "no token was sampled by WHITE",
    ]


def test_the_tokens_of_other_authors_get_no_gradient() -> None:
    """Under a sum over tokens, the gradients for WHITE and for BLACK add up to the gradient for both."""
    policy = agents.random_policy(3)
    plan: Plan = [[("task", 2), ("WHITE", 3), ("BLACK", 4), ("WHITE", 2)], [("hook", 2), ("BLACK", 3), ("WHITE", 1)]]
    t = trajectory(policy, plan)
    parts = [
        gradient(policy, af.collate([t], [1.5], authors=who), aggregate={"how": "fixed", "denominator": 7.0})[0]
        for who in ("WHITE", "BLACK", ("WHITE", "BLACK"))
    ]
    agents.assert_same_gradient(parts[0] + parts[1], parts[2])
    assert float((parts[0] - parts[2]).abs().max()) > 1e-3


# --- the step against its definition -------------------------------------------------------------

AGGREGATES: dict[str, dict[str, Any]] = {
    "token_mean": {}, "seq_mean_token_mean": {}, "seq_mean_token_sum": {}, "fixed": {"denominator": 20.0},
    "trajectory_mean": {}, "trajectory_mean rows": {"count": "rows"},
}  # fmt: skip


@pytest.mark.parametrize("how", AGGREGATES)
def test_the_gradient_over_compacted_rows_matches_its_definition(how: str) -> None:
    policy = agents.random_policy(5)
    given = folded(policy, seed=4)
    assert max(len(t.rows) for t in given) >= 3
    batch = af.collate(given, af.advantages.grpo)
    name, options = how.split()[0], AGGREGATES[how]
    wanted = plain(policy, batch, af.losses.ppo, name, **options)
    assert float(wanted.abs().max()) > 1e-2
    for micro in (1, 40, 10_000):
        got, stats = gradient(policy, batch, micro_tokens=micro, aggregate={"how": name, **options})
        agents.assert_same_gradient(got, wanted)
    assert stats.reward_mean == pytest.approx(sum(t.reward or 0 for t in given) / len(given))


@pytest.mark.parametrize("size", [1, 3, 5, None])
def test_minibatches_contain_whole_trajectories(size: int | None) -> None:
    batch = af.collate(folded(None, seed=6, count=11), af.advantages.grpo)
    found = minibatches(batch.trajectory_index, size, torch.Generator().manual_seed(0))
    assert sorted(i for rows in found for i in rows.tolist()) == list(range(len(batch)))
    sets = [set(batch.trajectory_index[rows].tolist()) for rows in found]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert [len(s) for s in sets] == (
        [11] if size is None else [size] * (11 // size) + ([11 % size] if 11 % size else [])
    )
    policy = agents.random_policy(3)
    batch = af.collate(folded(policy, seed=6, count=11), af.advantages.grpo)
    _, stats = gradient(policy, batch, minibatch=size, epochs=2)
    assert stats.updates == 2 * len(found)


# --- token advantages over compactions -----------------------------------------------------------


def cut_up(rng: random.Random) -> tuple[Any, Any]:
    """Return trajectories of single rows, and the same ones split into rows after actions, each with its own prompt.

    (rewards, values, mask, groups) as tensors, and the same with trajectories and, for each row, where its tokens are.
    """
    whole: list[list[tuple[float, float, bool]]] = []
    rows: list[list[tuple[float, float, bool]]] = []
    of: list[int] = []
    for i in range(rng.randint(1, 4)):
        tokens: list[tuple[float, float, bool]] = []
        row: list[tuple[float, float, bool]] = [(math.nan, 9.0, False)] * rng.randint(1, 3)
        for _ in range(rng.randint(1, 4)):
            action = [
                (rng.choice([0.0, rng.uniform(-1, 1)]), rng.uniform(-1, 1), True) for _ in range(rng.randint(1, 3))
            ]
            seen = [(math.nan, 9.0, False)] * rng.randint(1, 3)
            tokens += [*action, *seen]
            row += [*action, *seen]
            if rng.random() < 0.5:
                rows.append(row)
                of.append(i)
                row = [(math.nan, 9.0, False)] * rng.randint(1, 3)
        if any(m for _, _, m in row):
            rows.append(row)
            of.append(i)
        whole.append(tokens)
    order = list(range(len(rows)))
    rng.shuffle(order)
    order.sort(key=lambda i: of[:i].count(of[i]))  # the rows of each trajectory keep their order

    def tensors(given: list[list[tuple[float, float, bool]]]) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, given)) + rng.randint(0, 2)
        padded = [row + [(math.nan, 5.0, False)] * (width - len(row)) for row in given]
        r, v, m = (torch.tensor([[t[k] for t in row] for row in padded], dtype=torch.float64) for k in range(3))
        return r, v, m.bool()

    return (tensors(whole), torch.arange(len(whole))), (tensors([rows[i] for i in order]), torch.tensor(of)[order])


def by_trajectory(x: Tensor, mask: Tensor, trajectory_index: Tensor) -> list[list[float]]:
    return [
        [float(a) for row in (trajectory_index == i).nonzero()[:, 0] for a in x[row][mask[row]]]
        for i in range(int(trajectory_index.max()) + 1)
    ]


ESTIMATORS: dict[str, Any] = {
    "gae": lambda r, v, m, ids: af.advantages.gae(r, v, m, gamma=0.9, lam=0.8, trajectory_index=ids)[0],
    "gae with a bootstrap value": lambda r, v, m, ids: af.advantages.gae(
        r, v, m, gamma=0.9, lam=0.7, bootstrap=ends(ids, len(r)), trajectory_index=ids
    )[0],
    "gae's returns": lambda r, v, m, ids: af.advantages.gae(r, v, m, gamma=0.9, lam=0.8, trajectory_index=ids)[1],
    "gae by turns": lambda r, v, m, ids: af.advantages.gae(
        r, v, m, gamma=0.9, lam=0.8, turns=turns(m), trajectory_index=ids
    )[0],
    "reinforce++": lambda r, v, m, ids: af.advantages.reinforce_plus_plus(
        r, m, gamma=0.9, whiten=False, trajectory_index=ids
    ),
    "reinforce++ whitened": lambda r, v, m, ids: af.advantages.reinforce_plus_plus(
        r, m, gamma=0.9, trajectory_index=ids
    ),
    "reinforce++ baseline": lambda r, v, m, ids: af.advantages.reinforce_plus_plus_baseline(
        r, m, groups=ids % 2, trajectory_index=ids
    ),
    "token baseline": lambda r, v, m, ids: af.advantages.optimal_token_baseline(
        r, m, groups=ids % 2, logprobs=-v.abs(), sum_squared_probs=0.5 + 0 * v, trajectory_index=ids
    ),
}


def ends(trajectory_index: Tensor | None, rows: int) -> Tensor:
    """Return a bootstrap value for the last row of each trajectory, and another, which is not used, for the others."""
    ids = list(range(rows)) if trajectory_index is None else trajectory_index.tolist()
    return torch.tensor([0.3 * i - 0.5 if i not in ids[at + 1 :] else 9.0 for at, i in enumerate(ids)]).double()


def turns(mask: Tensor) -> Tensor:
    """Number the runs of the mask in each row."""
    return (mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)).cumsum(1)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_compaction_changes_no_advantage(name: str) -> None:
    """Cutting a trajectory into rows changes no action's advantage."""
    several = 0
    for seed in range(20):
        rng = random.Random(seed)
        ((r, v, m), one), ((rr, vv, mm), ids) = cut_up(rng)
        several += len(ids) > len(one)
        wanted = by_trajectory(ESTIMATORS[name](r, v, m, None if "baseline" not in name else one), m, one)
        got = by_trajectory(ESTIMATORS[name](rr, vv, mm, ids), mm, ids)
        for a, b in zip(wanted, got, strict=True):
            assert a == pytest.approx(b, abs=1e-9), f"{name}, seed {seed}"
    assert several > 5


def test_a_compaction_adds_no_step() -> None:
    """Under observations="step", an observation between two actions is a step, but a compaction is not."""
    r = torch.tensor([[0.0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    v = torch.tensor([[7.0, 0.1, 0.2, 0.3, 7], [7, 0.4, 7, 7, 7]])
    m = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 0, 0]]).bool()
    for options in ({"observations": "step"}, {"discount_observations": True}):
        flat, _ = af.advantages.gae([0.0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], [1, 0, 1, 1], gamma=0.5, **options)
        got, _ = af.advantages.gae(r, v, m, gamma=0.5, trajectory_index=[3, 3], **options)
        torch.testing.assert_close(got[m], flat[[0, 2, 3]])


def test_an_unscored_row_makes_its_trajectory_unscored() -> None:
    r = torch.tensor([[0.0, math.nan], [0.0, 1.0], [0.0, 1.0]])
    m = torch.ones(3, 2).bool()
    got, _ = af.advantages.gae(r, torch.zeros(3, 2), m, lam=1.0, trajectory_index=["a", "a", "b"])
    assert got.tolist() == [[0, 0], [0, 0], [1, 1]]
    base = af.advantages.reinforce_plus_plus_baseline(
        r, m, groups=[0, 0, 0], whiten=False, trajectory_index=["a", "a", "b"]
    )
    assert base.tolist() == [[0, 0]] * 3


# --- a run ---------------------------------------------------------------------------------------


def compact_after_a_result(chain: af.Chain) -> None:
    """Begin a new row with the tokens of the conversation so far."""
    if chain.turn.kind == "observation" and chain.turn.row == 0:
        chain.compact([m for turn in chain.turns for m in turn.messages])


async def test_a_compaction_to_the_same_tokens_changes_nothing() -> None:
    """The actions, the rewards and the gradient of the token mean are those of a run without compaction."""
    a = agents.agent(before_turn=compact_after_a_result)
    folds, plain = await a.rollout(agents.tasks(4), 4), await agents.agent().rollout(agents.tasks(4), 4)
    assert sum(len(t.rows) > 1 for t in folds) >= 5
    actions = [[(t.reward, [turn.ids for turn in t.turns if turn.sampled]) for t in run] for run in (folds, plain)]
    assert actions[0] == actions[1]
    policy = agents.shipped()
    got, stats = gradient(policy, af.collate(folds, af.advantages.grpo))
    wanted, other = gradient(policy, af.collate(plain, af.advantages.grpo))
    assert stats.tokens == other.tokens
    agents.assert_same_gradient(got, wanted)


def compact_without_the_question(chain: af.Chain) -> None:
    """Compact to the call and its result, without the question."""
    if chain.turn.kind == "observation" and chain.turn.row == 0:
        said = [m for turn in chain.turns[1:] for m in turn.messages]
        chain.compact([{"role": "user", "content": "?"}, *said])


async def test_a_run_with_compactions_learns(tmp_path: Path) -> None:
    """The policy learns the call in the first row from the reward at the end of the second row."""
    policy = agents.fresh()
    agent = agents.agent(policy, before_turn=compact_without_the_question)
    config = af.TrainConfig(steps=3, lr_end=None)
    records = (await af.train(agent, policy, agents.tasks(64), config, run=tmp_path)).records
    assert records[0]["success"] < 0.4 and records[-1]["success"] > 0.7, [r["success"] for r in records]
    assert records[0]["rows"] < 1.6 and records[-1]["rows"] > 1.8, [r["rows"] for r in records]


def compact_to_text(chain: af.Chain) -> None:
    """Compact to a text with the tool result."""
    if chain.turn.kind == "observation" and chain.turn.row == 0:
        chain.compact(f"The calculator says {chain.turn.messages[0]['content']}.")


async def test_settings_of_rows_reach_the_batch_and_the_step(tmp_path: Path) -> None:
    policy = agents.fresh()
    agent = agents.agent(policy, before_turn=compact_to_text)
    aggregate = {"how": "trajectory_mean", "count": "rows"}
    config = af.TrainConfig(steps=1, tasks_per_step=2, aggregate=aggregate, advantage_per="row", authors="policy")
    run = await af.train(agent, policy, agents.tasks(8), config, run=tmp_path)
    assert run.records[0]["rows"] > 1 and math.isfinite(run.records[0]["policy_loss"])


@af.reward
def length(final: str | None) -> float:
    return float(len(final or ""))


async def test_earlier_rows_get_the_discounted_advantage_of_the_chain() -> None:
    policy = agents.fresh()
    agent = agents.agent(policy, before_turn=compact_to_text, reward=length)
    rollout = await agent.rollout(agents.tasks(16), 4)
    config = af.TrainConfig(row_credit="geometric", row_discount=0.25)
    batch = BatchBuilder(policy, config, agent.reward).build(rollout, 0.0)
    chains: dict[int, list[float]] = {}
    for index, row, mask in zip(batch.trajectory_index.tolist(), batch.advantages, batch.mask, strict=True):
        chains.setdefault(index, []).append(float(row[mask][0]))
    pairs = [rows for rows in chains.values() if len(rows) == 2]
    assert any(last for _, last in pairs) and all(first == 0.25 * last for first, last in pairs)
