"""Two processes train like one: same chains, records and weights."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import errors
import pytest
import torch
from processes import run_two
from test_trainer import SMALL, TASKS, digits, numbers, short, small
from test_trainer import learner as fresh_learner

import agentfly_kit as af
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.trainer import loop
from agentfly_kit.trainer.sampling import RolloutSampler

pytest.importorskip("accelerate")

CASES: dict[str, af.TrainConfig] = {
    # Passes of 12 tasks: a task may occur twice in a rollout.
    "grpo": SMALL.replace(steps=3, tasks_per_step=5, lr=1e-4, minibatch=8),
    "gae, overlap": SMALL.replace(steps=3, advantage="gae", lr=1e-4, overlap=1, kl_coef=0.01),
}


def learner(*, value_head: bool = False) -> af.Policy:
    """Return a policy without prefix sharing, whose order of summation depends on the distribution of the rows."""
    policy = fresh_learner(value_head=value_head)
    policy._sharing_obstacle = "a test"
    return policy


async def trained(name: str, folder: Path, accelerator: Any = None) -> dict[str, Any]:
    policy = learner(value_head="gae" in name)
    # With constant rewards, the gradients would consist of rounding errors, whose size does not affect Adam's steps.
    a = small(policy, reward=[digits, short] if "gae" in name else digits)
    run = af.train(a, policy, TASKS, CASES[name], run=folder, accelerator=accelerator)
    ids = []
    async for step in run:
        ids.append([(t.id, t.ids.tolist()) for t in step.rollout or ()])
    weights = torch.cat([p.detach().flatten() for p in policy.parameters()])
    return {"weights": weights, "records": numbers(run), "ids": ids, "version": policy.version}


async def resumed(folder: Path, accelerator: Any = None) -> dict[str, Any]:
    """Run two of three steps, then continue with another handle."""
    policy = learner()
    async for step in af.train(small(policy), policy, TASKS, CASES["grpo"], run=folder, accelerator=accelerator):
        if step.step == 2:
            break
    policy = learner()
    run = af.train(small(policy), policy, TASKS, CASES["grpo"], run=folder, accelerator=accelerator)
    replayed = [step.replayed async for step in run]
    return {"weights": torch.cat([p.detach().flatten() for p in policy.parameters()]), "replayed": replayed}


def child(folder: Path) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    if accelerator.process_index == 1:  # process 0 has written the record of a step before this process continues
        warn = loop.warn_about_step

        def late(*args: Any) -> None:
            time.sleep(0.3)
            warn(*args)

        loop.warn_about_step = late

    async def go() -> dict[str, Any]:
        out: dict[str, Any] = {name: await trained(name, folder / name, accelerator) for name in CASES}
        out["resumed"] = await resumed(folder / "resumed", accelerator)
        policy = learner()
        errors.check(
            lambda: af.train(small(policy), policy, TASKS, CASES["grpo"], accelerator=accelerator),
            af.errors.SettingsError,
            "run must be a folder that all processes can access",
        )
        broken = small(policy)
        if accelerator.process_index == 1:  # all processes raise

            async def gone(policy: Any) -> None:
                raise af.errors.EngineError("the server went away")

            broken.engine.update = gone  # type: ignore[method-assign]
        with pytest.raises((af.errors.TrainingError, af.errors.EngineError)) as raised:
            await af.train(broken, policy, TASKS, CASES["grpo"], run=folder / "broken", accelerator=accelerator)
        out["raised"] = str(raised.value)
        return out

    torch.save(asyncio.run(go()), folder / f"{accelerator.process_index}.pt")
    accelerator.end_training()


@pytest.mark.long  # about 30 cpu seconds, most of them imports in two more processes
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    ranks = run_two(Path(__file__).resolve(), tmp_path)
    for name in CASES:
        alone = asyncio.run(trained(name, tmp_path / f"alone {name}"))
        for rank in ranks:
            got = rank[name]
            assert got["ids"] == alone["ids"], name
            assert got["version"] == alone["version"]
            for mine, wanted in zip(got["records"], alone["records"], strict=True):
                assert mine == pytest.approx(wanted, rel=1e-4, abs=1e-5), name
            away = (got["weights"] - alone["weights"]).abs()
            print(name, "largest", float(away.max()), "99.9 %", float(away.quantile(0.999)))
            assert float(away.max()) < 1e-6, name
        assert torch.equal(ranks[0][name]["weights"], ranks[1][name]["weights"])
        assert numbers(af.Run(tmp_path / name)) == ranks[0][name]["records"]
    for rank in ranks:
        assert rank["resumed"]["replayed"] == [True, True, False]
        assert torch.equal(rank["resumed"]["weights"], rank["grpo"]["weights"])
    assert ranks[1]["raised"] == "the server went away"
    assert ranks[0]["raised"] == "process 1 of 2 failed: EngineError: the server went away"


async def test_gathered_rollouts_are_in_task_order_even_if_a_group_did_not_run() -> None:
    """A group without finished chains, such as after a `group_budget`, is absent from the rollout of its process."""
    policy = learner()
    config = af.TrainConfig(steps=1, tasks_per_step=6, group_size=2)
    sampler = RolloutSampler(small(policy), policy, TASKS[:3], config, WorkerGroup(None))
    tasks = sampler.task_sampler.sample(0)  # each task twice
    whole = await sampler.sample(0)
    parts = [await sampler.agent.rollout(tasks, 2, purpose="train", share=(i, 2)) for i in range(2)]

    class Two:
        is_single, size, rank = False, 2, 0

        async def all_gather_or_raise(self, mine: af.Rollout, error: Exception | None) -> list[af.Rollout]:
            assert error is None
            return parts

    sampler.workers = Two()  # type: ignore[assignment]

    async def gathered() -> af.Rollout:
        return await sampler._gather(0, asyncio.sleep(0, parts[0]))

    assert [t.id for t in await gathered()] == [t.id for t in whole]
    for missing, rank in ((0, 0), (2, 0), (1, 1), (5, 1)):
        before = parts[rank]
        kept = tuple(g for g in before.groups if g.id != whole.groups[missing].id)
        parts[rank] = af.Rollout(kept, before.seconds, {f"{whole.groups[missing].id}/0": "group_seconds"}, 1)
        rollout = await gathered()
        assert [g.id for g in rollout.groups] == [g.id for i, g in enumerate(whole.groups) if i != missing]
        assert list(rollout.not_run.values()) == ["group_seconds"] and rollout.forks_refused == 1
        parts[rank] = before


if __name__ == "__main__":
    child(Path(sys.argv[1]))
