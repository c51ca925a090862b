"""overlap=: the next chains are sampled during the update, and no task of theirs is left behind."""

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import dice
import errors
import pytest
import torch
from test_trainer import SMALL, Whole, learner, leave, left, numbers, start, uninterrupted
from waiting import until

import agentfly_kit as af
from agentfly_kit.trainer import updates
from agentfly_kit.trainer.sampling import RolloutSampler

AHEAD = SMALL.replace(overlap=1)


@pytest.fixture(scope="module")
def whole() -> Whole:
    return uninterrupted(AHEAD)


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The version of the policy, the batch and the settings of each update."""
    calls, real = [], updates.ppo_step_async

    def watching(policy: Any, optimizer: Any, batch: Any, config: Any, **options: Any) -> Any:
        calls.append((policy.version, batch, config))
        return real(policy, optimizer, batch, config, **options)

    monkeypatch.setattr(updates, "ppo_step_async", watching)
    return calls


async def test_each_rollout_except_the_first_is_one_iteration_old(updated: list[Any]) -> None:
    policy = learner()
    run = start(None, policy, AHEAD)
    seen = []
    async for step in run:
        assert not left(), "nothing runs between two steps"
        seen.append(step)
    before = [0, *[int(s.record["version"]) for s in seen]]
    sampled_at = [{int(v) for v in batch.versions[batch.mask]} for _, batch, _ in updated]
    assert [at for at, _, _ in updated] == before[:4]
    assert sampled_at == [{0}, {before[0]}, {before[1]}, {before[2]}]
    lags = [s.record["lag"] for s in seen]
    assert (
        lags == [at - min(vs) for (at, _, _), vs in zip(updated, sampled_at, strict=True)] and lags[1] > lags[0] == 0
    )
    assert {config.old_logprobs for _, _, config in updated} == {"engine"}, "the denominator"
    # The second batch was sampled from the initial weights.
    second = updated[1][1]
    fresh = learner().score(second, {"logprob"})["logprob"]
    torch.testing.assert_close(fresh[second.mask], second.logprobs[second.mask], atol=2e-5, rtol=0)
    assert isinstance(run.agent.engine, af.LocalEngine) and run.agent.engine.policy is policy


async def test_chains_are_at_most_as_many_iterations_old_as_overlap(updated: list[Any]) -> None:
    run = await start(None, learner(), SMALL.replace(overlap=2))
    at = [version for version, *_ in updated]
    sampled_at = [{int(v) for v in batch.versions[batch.mask]} for _, batch, _ in updated]
    assert sampled_at == [{0}, {0}, {0}, {at[1]}] and at[1] > 0
    assert [record["lag"] for record in run.records] == [0, at[1], at[2], at[3] - at[1]]
    # The last batch was sampled from a copy of the weights after the first update, while others were trained.
    fresh = learner()
    await start(None, fresh, SMALL.replace(steps=1, lr_end=None, lr=SMALL.lr))
    last = updated[3][1]
    scored = fresh.score(last, {"logprob"})["logprob"]
    torch.testing.assert_close(scored[last.mask], last.logprobs[last.mask], atol=2e-5, rtol=0)
    assert not left()


@pytest.mark.parametrize("how", ["break", "cancel", "stop"])
async def test_chains_of_several_iterations_end_with_the_loop(how: str, tmp_path: Path) -> None:
    """They continue between two steps, and are sampled again when the run continues."""
    run = start(tmp_path / "run", learner(), SMALL.replace(overlap=2))
    if how == "cancel":
        going = asyncio.create_task(run)
        await until(lambda: run.records)
        going.cancel()
        await asyncio.wait([going])
    else:
        async for _ in run:
            assert set(run._sampler._ahead) == {2}
            if how == "break":
                break
            run.stop()
    await until(lambda: not left())
    done = len(run.records)
    assert [s.step async for s in run][done - 4 :] == [*range(done + 1, 5)] and not left()


async def test_workers_run_one_rollout_ahead() -> None:
    """No cluster is needed, because the settings are checked first."""
    await errors.check(
        lambda: start(None, learner(), SMALL.replace(overlap=2), workers=object()),
        af.errors.SettingsError,
        "overlap must be at most 1 with workers, which run one rollout after the other, got 2",
    )


async def test_chains_ahead_end_if_another_handle_continues_the_run(tmp_path: Path) -> None:
    first, second = (start(tmp_path / "run", learner(), SMALL.replace(overlap=2)) for _ in range(2))
    steps = aiter(first)
    await anext(steps)
    async for step in second:
        if step.step == 3:
            break
    await until(lambda: not second._sampler._ahead)
    assert set(first._sampler._ahead) == {2}
    seen = []
    async for step in steps:
        seen.append(step.step)
        assert 2 not in first._sampler._ahead
    assert seen == [2, 3, 4] and not left()


async def test_chains_are_sampled_during_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    real = updates.ppo_step_async
    seen: list[int] = []

    def sampled() -> int:
        return sum(agent.engine.sampled for agent in run._sampler._copies.values())  # type: ignore[attr-defined]

    async def held(*given: Any, **options: Any) -> Any:
        await until(sampled)
        seen.append(sampled())
        return await real(*given, **options)

    monkeypatch.setattr(updates, "ppo_step_async", held)
    run = start(None, learner(), AHEAD.replace(steps=2))
    assert (await anext(aiter(run))).step == 1
    assert seen[0] > 0
    monkeypatch.undo()
    await run


async def test_with_a_correction_the_old_logprobs_are_recomputed(updated: list[Any]) -> None:
    run = await start(None, learner(), AHEAD.replace(steps=3, correction="token"))
    assert [(config.old_logprobs, config.correction) for *_, config in updated] == [("auto", "token")] * 3
    first, *others = [record["effective_sample_size"] for record in run.records]
    assert first == pytest.approx(1.0, abs=1e-4) and min(others) < 0.9999


@pytest.mark.parametrize("how", ["break", "new policy", "new policy, few checkpoints"])
async def test_a_run_continues_to_the_same_bits(how: str, tmp_path: Path, whole: Whole) -> None:
    config = AHEAD.replace(checkpoint_every=2) if "few" in how else AHEAD
    policy = learner()
    run = start(tmp_path / "run", policy, config)
    await leave(run, "break", 3)
    assert not left()
    if how != "break":
        policy = learner()
        run = start(tmp_path / "run", policy, config)
    await run
    assert (policy.fingerprint(), numbers(run)) == whole


async def test_a_run_continues_without_the_prefetched_chains(tmp_path: Path) -> None:
    await leave(start(tmp_path / "run", learner(), AHEAD), "break", 2)
    (tmp_path / "run" / "checkpoint" / "ahead.jsonl").unlink()
    seen = [step async for step in start(tmp_path / "run", learner(), AHEAD)]
    assert [s.step for s in seen] == [1, 2, 3, 4]
    assert seen[2].record["lag"] == 0, "sampled again, from the weights of the checkpoint"


# An interrupt after the last checkpoint leaves a complete run. Awaiting the run again issues this warning.
@pytest.mark.filterwarnings("ignore:the run in .* is complete")
async def test_random_interrupts_leave_no_task_and_change_no_bit(tmp_path: Path, whole: Whole) -> None:
    seed = dice.seed()
    rng = random.Random(seed)
    policy = learner()
    for _ in range(30):
        run = start(tmp_path / "run", policy, AHEAD)
        going = asyncio.create_task(run)
        await asyncio.wait([going], timeout=rng.random() * 0.5)
        if going.done():
            going.result()
            break
        for _ in range(rng.randrange(1, 3)):
            going.cancel()
            await asyncio.sleep(rng.random() * 0.01)
        await asyncio.wait([going])
        assert not left(), f"seed {seed}"
    else:
        run = await start(tmp_path / "run", policy, AHEAD)
    gc.collect()  # an exception that was never retrieved would be reported here
    assert (policy.fingerprint(), numbers(run)) == whole, f"seed {seed}"


async def test_a_failed_step_cancels_the_prefetched_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tmp_path / "run", learner(), AHEAD)

    async def failing(*given: Any, **options: Any) -> Any:
        await asyncio.sleep(0.05)
        raise af.errors.TrainingError("the gradient is nan")

    await leave(run, "break", 1)
    monkeypatch.setattr(updates, "ppo_step_async", failing)
    await errors.check(lambda: run, af.errors.TrainingError, "step 2: the gradient is nan")
    assert not left()
    monkeypatch.undo()
    assert [s.step async for s in run] == [2, 3, 4]


async def test_a_prefetched_rollout_that_fails_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RolloutSampler._sample
    failed: list[int] = []

    async def failing(self: RolloutSampler, index: int, agent: Any) -> Any:
        if agent is not self.agent and not failed:
            failed.append(index)
            raise OSError("the network went away")
        return await real(self, index, agent)

    monkeypatch.setattr(RolloutSampler, "_sample", failing)
    run = start(tmp_path / "run", learner(), AHEAD)
    with pytest.warns(UserWarning, match=r"sampling the chains of step 2 ahead failed \(OSError: the network"):
        seen = [step async for step in run]
    assert failed == [1]
    assert [s.record["lag"] > 0 for s in seen] == [False, False, True, True]


async def test_a_stop_ends_the_prefetched_rollout(tmp_path: Path) -> None:
    run = start(tmp_path / "run", learner(), AHEAD)
    assert (await anext(aiter(run))).step == 1
    run.stop()
    assert ([s async for s in run], left()) == ([], [])
