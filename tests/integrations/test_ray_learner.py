"""Updates by two processes of a Ray cluster, each with half of the weights: equal to those of one process."""

import asyncio
import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import errors
import pytest
import torch
from agents import played, random_policy, tasks
from processes import alive
from test_ppo_settings import made, trajectories
from test_trainer import SMALL, digits, learner, numbers, small
from waiting import blocking_until, until

import agentfly_kit as af
from agentfly_kit.batch.batch import Dropped

pytest.importorskip("ray", reason='needs the extra: pip install -e ".[ray]"')

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

STATS = ("loss", "approx_kl", "clip_fraction", "entropy", "grad_norm", "kl_reference", "lr", "updates")
CONFIG = af.PPOConfig(max_lag=None, old_logprobs="recompute", epochs=2, minibatch=4, kl_coef=0.1)


def processes(learner: Any) -> list[int]:
    return [int(node.rpartition(":")[2]) for node in learner.nodes]


def away(a: af.Policy, b: af.Policy) -> float:
    mine, other = a.state(), b.state()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@pytest.mark.real
def test_steps_equal_those_of_one_process(cluster: Any) -> None:
    policy = random_policy(3)
    alone, reference, batch = policy.copy(), policy.reference(), made(policy, 9)
    batch = batch.replace(dropped=(Dropped("other", "truncated"),))
    shown = trajectories(policy, 6)
    optimizer = af.adamw(alone, 1e-3)

    async def steps(there: Any) -> None:
        for i in range(3):
            for each in (optimizer, there.optimizer):
                each.param_groups[0]["lr"] = 1e-3 / (i + 1)
            here = af.ppo_step(alone, optimizer, batch, CONFIG, reference=reference, seed=i, detail=True)
            stats = await there.step(batch, CONFIG, reference=reference, seed=i, detail=True)
            got, wanted = ([getattr(s, name) for name in STATS] for s in (stats, here))
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5) and stats.batch is batch
            assert stats.dropped == here.dropped == {"truncated": 1}
            assert policy.version == alone.version
        assert away(policy, alone) < 1e-5
        assert torch.allclose(
            there.score(policy, batch, "logprob", None)[batch.mask],
            alone.score(batch, {"logprob"})["logprob"][batch.mask],
            atol=1e-4,
        )
        assert not there.score(reference, batch, "logprob", None)[batch.mask].isnan().any()
        got = await af.imitate(policy, shown, minibatch=3, lr=1e-3, learner=there)
        assert len(got) == 4 and policy.version == alone.version + 4
        assert there.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for stats, here in zip(got, await af.imitate(alone, shown, minibatch=3, lr=1e-3), strict=True):
            assert (stats.loss, stats.grad_norm, stats.lr) == pytest.approx(
                (here.loss, here.grad_norm, here.lr), 1e-4
            )
        print("imitated", away(policy, alone))
        assert away(policy, alone) < 1e-4

        # An error that all processes raise leaves them usable, and so does a cancelled step.
        undefined = batch.replace(advantages=batch.advantages * torch.nan)
        await errors.check(lambda: there.step(undefined, CONFIG), af.errors.BatchError, "finite advantages")
        for long in (
            there.step(batch, CONFIG.replace(epochs=2000), reference=reference),
            af.imitate(policy, shown, epochs=2000, learner=there),
        ):
            before, steps = policy.version, there._steps
            task = asyncio.ensure_future(long)
            await until(lambda steps=steps: there._steps > steps)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert policy.version < before + 2000
            await there.step(batch, CONFIG, reference=reference)

        # Weights that were changed here are not overwritten silently.
        with torch.no_grad():
            next(policy.parameters()).mul_(2)
        await errors.check(lambda: there.step(batch, CONFIG), af.errors.SettingsError, "must not be changed between")
        await there.reset(1e-3)
        changed = policy.copy()
        await there.step(batch, CONFIG, reference=reference)
        af.ppo_step(changed, af.adamw(changed, 1e-3), batch, CONFIG, reference=reference)
        assert away(policy, changed) < 1e-5

        # Concurrent calls run one after the other. A reference that was changed is sent again.
        reference.load_state(policy.state())
        before = policy.version
        found = await asyncio.gather(*(there.step(batch, CONFIG, reference=reference) for _ in range(2)))
        assert policy.version == before + found[0].updates + found[1].updates
        assert found[0].kl_reference < 0.5, found

    with af.ray.learner(policy, 2, lr=1e-3) as there:
        asyncio.run(steps(there))
        pids = processes(there)
    blocking_until(lambda: not any(map(alive, pids)))


def run_of(policy: af.Policy, **options: Any) -> af.TrainRun:
    """Return a run on played chains with different rewards."""
    agent = played(lambda task, turn: f"{'7' * (int(task.id[-1]) % 5)} x", reward=digits, max_turns=2)
    agent.engine.update = AsyncMock()  # type: ignore[method-assign]
    config = SMALL.replace(steps=3, advantage="reinforce_plus_plus", group_size=2, checkpoint_every=1)
    return af.train(agent, policy, tasks(12), config, **options)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*sampler")  # the played chains were not sampled from the policy
def test_a_run_continues_after_a_process_was_killed(cluster: Any, tmp_path: Path) -> None:
    whole = run_of(random_policy(3))
    asyncio.run(whole)
    policy = random_policy(3)

    async def go(there: Any, last: int) -> None:
        async for step in run_of(policy, run=tmp_path, learner=there):
            if step.step == last:
                break
            if not step.replayed:
                os.kill(processes(there)[1], signal.SIGKILL)

    with af.ray.learner(policy, 2) as there:
        errors.check(lambda: asyncio.run(go(there, 9)), af.errors.TrainingError, "process 1 of 2 of the learner, on ")
        assert "no process is running" in repr(there)
        asyncio.run(go(there, 2))
    # Another process, without a learner, continues the run.
    run = run_of(random_policy(3), run=tmp_path)
    asyncio.run(run)
    assert run.resumed_from == 2
    for got, wanted in zip(numbers(run), numbers(whole), strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_a_learner_of_an_adapter(cluster: Any, tmp_path: Path) -> None:
    """Only the adapter is sent after a step, and the reference is the policy without it."""
    random_policy(3).save(tmp_path / "base")
    policy = af.Policy.load(tmp_path / "base", lora=4)
    alone, batch = policy.copy(), made(policy, 5)
    optimizer = af.adamw(alone, 1e-2)
    with af.ray.learner(policy, 1, lr=1e-2) as there:
        for _ in range(3):
            stats = asyncio.run(there.step(batch, CONFIG, reference=policy.reference()))
            here = af.ppo_step(alone, optimizer, batch, CONFIG, reference=alone.reference())
            assert stats.kl_reference == pytest.approx(here.kl_reference, rel=1e-3)
    assert away(policy, alone) < 1e-5 and stats.kl_reference > 0


@pytest.mark.long
def test_a_failure_in_one_process(cluster: Any) -> None:
    """An error of one process alone is reported, and a process that has ended is started again. In bfloat16."""
    policy = random_policy(3)
    policy.model.to(torch.bfloat16)
    alone, before, batch = policy.copy(), policy.copy(), made(policy, 5)
    constant = af.PPOConfig(loss=lambda *_: torch.zeros(()), minibatch=1, max_lag=None)

    async def go(there: Any) -> None:
        await errors.check(lambda: there.step(batch, constant), af.errors.TrainingError, "(SettingsError: loss must")
        await there.reset()
        os.kill(processes(there)[1], signal.SIGKILL)
        blocking_until(lambda: not alive(processes(there)[1]))
        await there.reset()
        assert (await there.step(batch, af.PPOConfig(max_lag=None))).updates == 1
        af.ppo_step(alone, af.adamw(alone, 1e-2), batch, af.PPOConfig(max_lag=None))
        differs = [(a != b).float().mean() for a, b in zip(policy.parameters(), alone.parameters(), strict=True)]
        assert max(differs) < 0.1 and away(policy, before) > 5e-3 and policy.model.dtype == torch.bfloat16
        there.optimizer.load_state_dict(there.optimizer.state_dict())
        await there.step(batch, af.PPOConfig(max_lag=None))

    with af.ray.learner(policy, 2, lr=1e-2) as there:
        asyncio.run(go(there))


@pytest.mark.long
def test_what_a_learner_refuses(cluster: Any) -> None:
    policy = learner()
    with af.ray.learner(policy.copy(), 1) as other:
        errors.check(
            lambda: af.train(small(policy), policy, tasks(3), SMALL, learner=other),
            af.errors.SettingsError,
            "learner must update the policy that is trained",
        )
        shown = trajectories(policy, 2)
        for trained, options, text in (
            (policy, {"learner": other}, "learner must update the policy"),
            (policy, {"learner": 2}, "learner must update the policy"),
            (other.policy, {"learner": other, "lr": 0}, "lr must be a finite number above 0"),
        ):
            call: Any = functools.partial(af.imitate, trained, shown, **options)
            errors.check(lambda call=call: asyncio.run(call()), af.errors.SettingsError, text)
        batch = made(other.policy, 2)
        lock, other_words = threading.Lock(), batch.trajectories[0].replace(vocabulary="another")
        locked = af.PPOConfig(loss=lambda *_: lock)
        errors.check(lambda: asyncio.run(other.step(batch, locked)), af.errors.SettingsError, "cannot be sent")
        batch = batch.replace(trajectories=(other_words, *batch.trajectories[1:]))
        errors.check(lambda: asyncio.run(other.step(batch)), af.errors.BatchError, "another tokenizer")
    errors.check(lambda: af.ray.learner(policy, 1, num_cpus=99, timeout=1.0), af.errors.SettingsError, "needs 99 CPU")
    half = af.Policy(policy.model.half(), policy.chat)
    errors.check(lambda: af.ray.learner(half, 2), af.errors.SettingsError, "must have float32 or bfloat16 weights")
