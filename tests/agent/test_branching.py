"""Branching of groups: number of leaves, seeds, shared turns, room in pools, cancellation, invalid settings."""

import asyncio
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import errors
import pytest
import torch
from agents import (
    ForkingBox,
    Played,
    agent,
    calculator,
    call,
    chat,
    fresh,
    numbered,
    pass_time,
    played,
    put_call,
    put_forking,
    scripted,
)
from agents import tasks as calculator_tasks
from cancelling import tasks_left
from test_ppo_settings import gradient
from torch import Tensor
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.batch.turn_data import executed_calls
from agentfly_kit.samples import TurnRequest
from agentfly_kit.trainer.batch_builder import BatchBuilder


class Coin(af.Engine):
    """Engine that draws its actions from the seed: each action calls a tool with a fixed probability, else answers.

    The answer is right with a probability that depends on the number of calls before. Entropies are random too.
    """

    reproducible = True

    def __init__(
        self, calls: float = 0.5, right: Sequence[float] = (0.2, 0.5, 0.8), name: str = "put_forking"
    ) -> None:
        self.calls, self.right, self.name = calls, right, name

    async def sample(
        self, ids: Sequence[int], sampling: af.Sampling, seed: int, *, request: TurnRequest | None = None
    ) -> af.Sample:
        rng = random.Random(seed)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < self.calls and request.turn < len(self.right) - 1:
            digit = str(rng.randrange(10))
            text = call(digit) if self.name == "calculator" else put_call(digit, self.name)
        else:
            text = "5" if rng.random() < self.right[request.turn] else "6"
        out = (*chat().encode(text), chat().stop_ids[0])
        return af.Sample(out, (-0.5,) * len(out), (rng.random() * 3,) * len(out), "stop", (0,) * len(out))


def coins(pool: Any, **settings: Any) -> af.Agent:
    engine = settings.pop("engine", None) or Coin()
    return agent(engine=engine, chat=chat(), tools=[put_forking], pools=[pool], **settings)


def assert_trees(rollout: af.Rollout, size: int) -> None:
    for group in rollout.groups:
        assert len(group) == size
        by = {t.id: t for t in group}
        assert len(by) == size
        for t in group:
            parent = by.get(t.id.rpartition(".")[0])
            if parent is not None:
                shared = [turn for turn, other in zip(t.turns, parent.turns, strict=False) if turn is other]
                assert shared[-1].kind == "observation" and shared == list(t.turns[: len(shared)])
                assert t.turns[len(shared)].seed != parent.turns[len(shared)].seed


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.soak)])
async def test_every_group_has_all_leaves_for_random_settings(count: int) -> None:
    rng = random.Random(0)
    async with af.Pool(ForkingBox, size=64) as pool:
        for _ in range(count):
            size = rng.randint(1, 12)
            branch = af.Branch(
                initial=rng.choice([None, rng.randint(1, size)]),
                base=rng.random(),
                weight=rng.uniform(-2, 2),
                threshold=rng.choice([None, rng.random()]),
                width=rng.randint(1, 4),
                tokens=rng.randint(1, 30),
            )
            a = coins(pool, engine=Coin(calls=rng.random()), seed=rng.randrange(1000))
            rollout = await a.rollout(numbered(3), size, branch=branch)
            assert_trees(rollout, size)
            assert executed_calls(rollout) <= sum(len(t.tool_calls) for t in rollout)
            assert pool.snapshot().leased == 0
            assert {t.stop for t in rollout} == {"answered"}


async def test_results_do_not_depend_on_concurrency() -> None:
    """The rollouts have nested forks, added chains and sandboxes, and differ only in the order of their events."""
    found = []
    for concurrency, size in ((8, 8), (16, 24), (64, 64)):
        async with af.Pool(ForkingBox, size=size) as pool:
            rollout = await coins(pool).rollout(
                numbered(6), 8, branch=af.Branch(initial=2, base=0.7, weight=0.5), max_concurrency=concurrency
            )
            assert_trees(rollout, 8)
            found.append(rollout)
    assert found[0].trajectories == found[1].trajectories == found[2].trajectories
    depths = [t.id.count(".") for t in found[0]]
    assert 2 in depths and found[0].summary()["forks"] == len(depths) - depths.count(0)


async def test_parts_of_a_rollout_have_the_same_trajectories() -> None:
    branch = af.Branch(initial=2, base=0.7)
    async with af.Pool(ForkingBox, size=16) as pool:
        whole = await coins(pool).rollout(numbered(4), 6, branch=branch)
        parts = [await coins(pool).rollout(numbered(4), 6, branch=branch, share=(i, 2)) for i in range(2)]
    assert [group for pair in zip(*(part.groups for part in parts), strict=True) for group in pair] == list(
        whole.groups
    )


async def test_without_forks_the_trajectories_are_those_of_a_plain_rollout() -> None:
    a = agent()
    branch = af.Branch(initial=3, base=0.0, weight=0.0)
    assert (await a.rollout(calculator_tasks(3), 4, branch=branch)).trajectories == (
        await a.rollout(calculator_tasks(3), 4)
    ).trajectories


async def test_share_of_forks_is_the_mean_probability() -> None:
    """The group has room for every fork, so each decision is an independent draw."""
    branch = af.Branch(initial=4, base=0.4, weight=0.3, tokens=1)
    engine = Coin(calls=1.0, right=(0.5, 0.5))
    async with af.Pool(ForkingBox, size=64) as pool:
        rollout = await coins(pool, engine=engine).rollout(numbered(40), 8, branch=branch)
    roots = [t for t in rollout if t.chain < 4 and "." not in t.id]
    vocabulary = len(chat().tokenizer)
    probabilities = [branch.probability(t.actions[1], t.actions[0], vocabulary) for t in roots]
    assert min(probabilities) < 0.35 < 0.45 < max(probabilities)
    forked = {t.id.rpartition(".")[0] for t in rollout if "." in t.id}
    deviation = math.sqrt(sum(p * (1 - p) for p in probabilities))
    assert abs(len(forked) - sum(probabilities)) <= 3 * deviation
    # With a threshold, exactly the chains above it fork.
    async with af.Pool(ForkingBox, size=64) as pool:
        rollout = await coins(pool, engine=engine).rollout(
            numbered(10), 8, branch=af.Branch(initial=4, base=0.4, weight=0.3, tokens=1, threshold=0.4)
        )
    for t in rollout:
        if t.chain < 4 and "." not in t.id:
            above = branch.probability(t.actions[1], t.actions[0], vocabulary) > 0.4
            assert above == any(other.id == f"{t.id}.1" for other in rollout)


soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("calls", "ratio"),
    [(1, 0.75), *(pytest.param(*given, marks=soak) for given in ((2, 0.64), (3, 0.74), (5, 0.85)))],
)
async def test_executed_calls_relative_to_independent_chains(calls: int, ratio: float) -> None:
    """Each chain makes a fixed number of calls. With one call and fork probability P, 1 - P/2 of the calls run, because
    added chains cannot fork."""
    engine = Coin(calls=1.0, right=(0.5,) * (calls + 1), name="calculator")
    a = agent(engine=engine, chat=chat(), tools=[calculator], max_turns=8)
    rollout = await a.rollout(numbered(30), 16, branch=af.Branch(initial=8, weight=0.0))
    assert executed_calls(rollout) / (calls * 16 * 30) == pytest.approx(ratio, abs=0.03)


async def test_nudged_action_after_a_tool_result_is_a_fork_point() -> None:
    """Chain 0 forks before its second action, which gets a nudge, and before its third, which follows the nudge."""
    a = played([call("1"), "let me think", "5"], nudge="Answer.")
    rollout = await a.rollout(numbered(1), 3, branch=af.Branch(initial=1, base=1.0, weight=0.0))
    authors = ["task", "policy", "tool", "policy", "nudge", "policy"]
    assert [(t.id.rpartition("/")[2], [turn.author for turn in t.turns]) for t in rollout] == [
        (name, authors) for name in ("0", "0.1", "0.2")
    ]
    first, *forks = rollout
    shared = [[turn is other for turn, other in zip(t.turns, first.turns, strict=True)].count(True) for t in forks]
    assert shared == [3, 5]


async def test_chains_do_not_fork_after_a_compaction() -> None:
    room = len(played([]).chain(numbered(1)[0]).ids) + 4 * len(chat().encode(call("1+1"))) + 24
    a = played(
        [call("1+1")] * 3 + ["found 2", "5", "5", "5"],
        max_length=room,
        on_context_full=af.hooks.summarize("Sum up.", tokens=24),
        max_turns=9,
        sampling=af.Sampling(max_tokens=24),
    )
    rollout = await a.rollout(numbered(1), 12, branch=af.Branch(initial=1, base=1.0, weight=0.0))
    assert_trees(rollout, 12)
    assert max(len(t.rows) for t in rollout) > 1
    assert rollout.summary()["forks"] >= 3


async def test_call_that_several_leaves_share_runs_once() -> None:
    ran: list[str] = []

    @af.tool
    def look(expression: str) -> str:
        """Look.

        Args:
            expression: what.
        """
        ran.append(expression)
        return "seen"

    rollout = await played([call("1", "look"), "5"], tools=[look]).rollout(
        numbered(2), 4, branch=af.Branch(initial=2, base=1.0, weight=0.0), group_budget=af.Budget(tool_calls=3)
    )
    assert [t.id for t in rollout.groups[0]] == [f"rollout-0:t0/{i}" for i in ("0", "0.1", "1", "1.1")]
    assert len(ran) == 4
    summary = rollout.summary()
    assert (summary["forks"], summary["executed"], summary["calls"]) == (4, 4, 1)


async def test_saved_rollout_has_the_same_summary(tmp_path: Any) -> None:
    async with af.Pool(ForkingBox, size=16) as pool:
        rollout = await coins(pool).rollout(numbered(4), 6, branch=af.Branch(initial=2, base=0.9))
    loaded = af.Rollout.load(rollout.save(tmp_path / "rollout.jsonl"))
    assert loaded.summary() == rollout.summary()
    assert loaded.summary()["executed"] < rollout.summary()["calls"] * len(rollout)


# --- training ---


def double_model() -> torch.nn.Module:
    """Return a small random GPT-2, all of whose operations are in float64. Qwen3 normalizes in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(chat().tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=2, initializer_range=0.25
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).double().eval()


def logprobs(model: torch.nn.Module, ids: Tensor, attention: Tensor | None = None) -> Tensor:
    """Return log p(ids[:, t] | ids[:, :t]) by one plain forward pass, (B, T), with 0 at the first position."""
    attention = torch.ones_like(ids) if attention is None else attention.long()
    logp = torch.log_softmax(model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1], -1)
    return torch.nn.functional.pad(logp.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


def gradient_of(model: torch.nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])


def relative_distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


async def test_attributions_of_branching_chains() -> None:
    """Soft and hard credit give the same gradient with a token mean and other gradients with a sequence mean."""
    policy = fresh()
    a = agent(policy, sampling=af.Sampling(max_tokens=64, temperature=1.5))
    rollout = await a.rollout(calculator_tasks(16), 8, branch=af.Branch(initial=2, base=1.0))
    assert rollout.summary()["forks"] >= 8
    rollout = af.Rollout.from_trajectories(t.replace(reward=float(i % 2)) for i, t in enumerate(rollout))

    def batch(attribution: str) -> af.Batch:
        config = af.TrainConfig(advantage="arpo", attribution=attribution)  # type: ignore[arg-type]
        return BatchBuilder(policy, config, a.reward).build(rollout, 0.0)

    soft, hard, unbiased = (batch(each) for each in ("soft", "hard", "inverse_branching"))
    torch.testing.assert_close(soft.advantages, af.collate(rollout, af.advantages.grpo).advantages, equal_nan=True)
    first, second, third = (gradient(policy, each, aggregate="token_mean")[0] for each in (soft, hard, unbiased))
    assert relative_distance(first, second) < 1e-5
    assert relative_distance(third, first) > 0.01
    means = (gradient(policy, each, aggregate="seq_mean_token_mean")[0] for each in (soft, hard))
    assert relative_distance(*means) > 0.01


def test_gradient_of_two_leaves_is_the_sum_of_a_shared_and_their_own_parts() -> None:
    """ARPO, equation 19: J = 1/G sum_i |l|/|o_i| (J_i^{<l} - J_i^{>l}) + J_i^{>l}, without the KL penalty.

    J_i^{<l} and J_i^{>l} are means over the |l| shared tokens of leaf i and over its other tokens.
    """
    shared, own, a = 9, (7, 12), (1.2, -0.4)
    rng = torch.Generator().manual_seed(0)
    prompt, prefix, *tails = (torch.randint(7, 390, (1, n), generator=rng) for n in (5, shared, *own))
    model, width = double_model(), 5 + shared + max(own)
    rows = [torch.cat([prompt, prefix, tail], 1) for tail in tails]
    ids = torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    mask = torch.tensor([[5 <= t < row.shape[1] for t in range(width)] for row in rows])
    logp = logprobs(model, ids, torch.arange(width) < torch.tensor([[row.shape[1]] for row in rows]))
    old = logp.detach() + 0.1 * torch.sin(ids)  # ratios from 0.9 to 1.1
    objective = -af.losses.ppo(logp, old, torch.tensor(a, dtype=torch.float64), mask)
    wanted = gradient_of(model, af.losses.aggregate(objective, mask, "seq_mean_token_mean"))

    # The shared tokens are computed once, in a row of their own, and each leaf in an unpadded row.
    def ratios(row: Tensor, start: int) -> Tensor:
        now = logprobs(model, row)[0, start:]
        return torch.exp(now - now.detach() - 0.1 * torch.sin(row[0, start:]))

    got = torch.zeros_like(wanted)
    below_l = ratios(torch.cat([prompt, prefix], 1), 5).mean()
    for row, n, advantage in zip(rows, own, a, strict=True):
        before = gradient_of(model, below_l * advantage)
        after = gradient_of(model, ratios(row, 5 + shared).mean() * advantage)
        got += (shared / (shared + n) * (before - after) + after) / 2
    assert relative_distance(wanted, got) < 1e-12

    # With a token mean, the shared tokens can be trained once, with twice the mean advantage.
    wanted = gradient_of(model, af.losses.aggregate(objective, mask, "token_mean"))
    got = gradient_of(model, below_l * shared * sum(a))
    for row, advantage in zip(rows, a, strict=True):
        got += gradient_of(model, ratios(row, 5 + shared).sum() * advantage)
    assert relative_distance(wanted, got / int(mask.sum())) < 1e-12


async def test_training_with_branching(tmp_path: Any) -> None:
    config = af.TrainConfig(
        steps=1, tasks_per_step=2, group_size=4, branch=af.Branch(2), advantage="arpo", attribution="hard", lr=1e-4
    )
    policy, tasks = af.tiny.policy("lookup"), af.load_tasks("lookup").train[:4]
    async for step in af.train(af.envs.lookup.agent(policy), policy, tasks, config, run=tmp_path):
        assert [len(group) for group in step.rollout.groups] == [4, 4] and "forks" in step.record
    errors.check(
        lambda: af.train(
            af.envs.lookup.agent(policy), policy, tasks, config.replace(branch=af.Branch(3)), run=tmp_path
        ),
        af.RunMismatch,
        "branch",
    )


# --- forks that are refused ---


class Stubborn(ForkingBox):
    async def fork(self, into: ForkingBox) -> None:
        raise af.errors.SandboxError("busy inside")


async def test_fork_that_fails_is_replaced_by_a_new_chain() -> None:
    async with af.Pool(Stubborn, size=8) as pool:
        with pytest.warns(UserWarning, match="was not forked: busy inside") as caught:
            rollout = await coins(pool).rollout(numbered(3), 4, branch=af.Branch(initial=2, base=1.0))
    assert len([w for w in caught if "not forked" in str(w.message)]) == 1
    assert [[t.stop for t in group] for group in rollout.groups] == [["answered"] * 4] * 3
    assert "forks" not in rollout.summary() and rollout.summary()["forks_refused"] >= 1


@pytest.mark.parametrize(("stop", "recorded"), [("stop", "answered"), ("length", "context_full")])
async def test_chain_that_ended_is_not_cut_off_while_it_waits_for_its_group(stop: Any, recorded: str) -> None:
    class Slow(Coin):
        is_slow = False

        async def sample(
            self, ids: Any, sampling: Any, seed: int, *, request: TurnRequest | None = None
        ) -> af.Sample:
            if request.turn == 1 and not self.is_slow:
                self.is_slow = True
                await until(lambda: any(group._waiting for group in run._branching.values()))
                pass_time(GUARD)
                await asyncio.Event().wait()
            sample = await super().sample(ids, sampling, seed, request=request)
            return dataclasses.replace(sample, stop=stop) if request.turn == 1 else sample

    engine = Slow(calls=1.0, right=(0.5, 0.5))
    async with af.Pool(ForkingBox, size=4) as pool:
        run = coins(pool, engine=engine, timeout=GUARD).rollout(numbered(1), 2, branch=af.Branch(initial=2, base=1.0))
        rollout = await run
        assert sorted(t.stop for t in rollout) == [recorded, "timeout"]
        assert pool.snapshot().leased == 0


# --- cancellation ---


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.soak)])
async def test_cancelled_rollouts_hold_no_lease(count: int) -> None:
    rng = random.Random(1)
    branch = af.Branch(initial=2, base=0.9)

    def interrupt() -> None:
        """Cancel all other tasks, as `asyncio.run` does."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async with af.Pool(ForkingBox, size=12) as pool:
        wanted = await coins(pool).rollout(numbered(2), 4, branch=branch, index=0)
        for i in range(count):
            run = coins(pool, seed=i).rollout(numbered(3), 6, branch=branch)
            waiting = asyncio.ensure_future(run)
            for _ in range(rng.randrange(120)):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                await asyncio.sleep(0.001 * rng.randrange(8))
            rng.choice((run.stop, waiting.cancel, interrupt))()
            await asyncio.wait([waiting])
            await until(lambda: not tasks_left())
            s = pool.snapshot()
            assert (s.leased, s.waiting) == (0, 0), f"after rollout {i}: {pool!r}"
        again = await coins(pool).rollout(numbered(2), 4, branch=branch, index=0)
        assert again.trajectories == wanted.trajectories


# --- forks at an earlier turn ---


async def test_fork_at_an_earlier_turn() -> None:
    async with af.Pool(ForkingBox, size=4) as pool:
        a = played(
            [put_call("x", "put_forking"), put_call("y", "put_forking"), "5"], tools=[put_forking], pools=[pool]
        )
        chain = a.chain(numbered(1)[0])
        await chain.step()
        await chain.sample()
        twin = await chain.fork(at=2)
        assert twin.turn is chain.turns[2] and twin.turns[:3] == chain.turns[:3]
        await twin.sample()
        assert twin.turn.seed != chain.turn.seed
        again = await chain.fork(at=chain.turns[2], same_seeds=True)
        await again.sample()
        assert again.turn == chain.turn
        await twin.act()
        await chain.act()
        assert [box.log for c in (chain, twin, again) for box in c.context.held.values()] == [
            ["x", "y"],
            ["x", "y"],
            ["x"],
        ]
        await errors.check(lambda: chain.fork(at=2), af.errors.SettingsError, "cannot go back: it holds ForkingBox")
        for c in (chain, twin, again):
            await c.close()


async def test_measures_of_uncertainty() -> None:
    (t,) = await played([call("1"), "5"]).rollout(numbered(1))
    vocabulary = len(chat().tokenizer)
    assert af.Branch().uncertainty(t.actions[0], vocabulary) == pytest.approx(1 / math.log(vocabulary))
    assert af.Branch(measure="surprisal", tokens=2).uncertainty(t.actions[0], vocabulary) == pytest.approx(
        0.5005 / math.log(vocabulary)
    )
    a = scripted([call("1"), "5"])
    rollout = await a.rollout(numbered(1), 4, branch=af.Branch(2, base=1.0, measure=lambda turn: 0.5))
    assert [t.id.rpartition("/")[2] for t in rollout] == ["0", "0.1", "1", "1.1"]
    (t, _) = await a.rollout(numbered(1), 2, branch=af.Branch(2, measure=lambda turn: math.nan))
    assert t.stop == "error" and "the result of measure must be a finite number, got nan" in str(t.error)

    class Silent(Played):
        async def sample(
            self, ids: Any, sampling: Any, seed: int, *, request: TurnRequest | None = None
        ) -> af.Sample:
            sample = await super().sample(ids, sampling, seed, request=request)
            return af.Sample(sample.ids, sample.logprobs, None, sample.stop, sample.versions)

    a = agent(engine=Silent([call("1"), "5"]), chat=chat())
    (t, _) = await a.rollout(numbered(1), 2, branch=af.Branch(2))
    assert "branch needs entropies, but the engine reported none" in str(t.error)
