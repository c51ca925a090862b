"""The training loop: it learns, resumes to the same bits, and rejects settings before anything runs."""

import asyncio
import functools
import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import errors
import pytest
import torch
from agents import agent, exact, fresh, tasks
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.ppo.distributed import WorkerGroup
from agentfly_kit.trainer import updates
from agentfly_kit.trainer.sampling import RolloutSampler

SMALL = af.TrainConfig(steps=4, tasks_per_step=3, group_size=4, minibatch=6, lr=1e-3, lr_end=3e-5)
TASKS = tasks(12)
# Functions of `advantages` that cannot be the setting `advantage`.
NO_ESTIMATORS = {"branch_weights", "distillation", "row_credit", "trajectory_level", "whiten"}


@af.reward
def digits(final: str | None) -> float:
    """Return a quarter of the number of digits, so that random chains have different rewards, or all 0 in one step."""
    return sum(c.isdigit() for c in final or "") / 4


@af.reward(weight=0.5)
def short(final: str | None) -> float:
    return 1 / (1 + len(final or ""))


def small(policy: af.Policy, **settings: Any) -> af.Agent:
    settings.setdefault("reward", digits)
    settings.setdefault("sampling", af.Sampling(max_tokens=8))
    return agent(policy, max_turns=2, **settings)


learner = fresh


def start(
    run: Path | None = None, policy: af.Policy | None = None, config: af.TrainConfig = SMALL, **more: Any
) -> af.TrainRun:
    policy = learner() if policy is None else policy
    settings = {k: more.pop(k) for k in list(more) if k in ("reward", "sampling", "tools", "seed", "engine")}
    agent = more.pop("agent", None) or small(policy, **settings)
    return af.train(agent, policy, more.pop("given", TASKS), config, run=run, **more)


def numbers(run: af.TrainRun | af.Run) -> list[dict[str, float]]:
    """Return the records without durations."""
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in run.records]


def left() -> list[str]:
    """Return the names of the tasks of training runs."""
    return [t.get_name() for t in asyncio.all_tasks() if "agentfly" in t.get_name()]


Whole = tuple[str, list[dict[str, float]]]


def uninterrupted(config: af.TrainConfig = SMALL) -> Whole:
    """Return the weights and records of a run that was not interrupted."""
    policy = learner()
    run = asyncio.run(start(None, policy, config))
    return policy.fingerprint(), numbers(run)


# --- iterations ----------------------------------------------------------------------------------


async def test_budgets_limit_an_iteration() -> None:
    config = SMALL.replace(steps=1, budget=af.Budget(turns=9), group_budget=af.Budget(turns=4), max_concurrency=1)
    (step,) = [step async for step in start(config=config)]
    actions = [sum(len(t.actions) for t in group) for group in step.rollout.groups]
    assert (sum(actions), max(actions), len(step.rollout) + len(step.rollout.not_run)) == (9, 4, 12)


async def test_records_and_steps(whole: Whole) -> None:
    run = start()
    reported: list[dict[str, float]] = []
    run.subscribe(reported.append)
    assert "0 of 4 steps done" in repr(run) and "write `await` before it" in repr(run)
    seen = [step async for step in run]
    assert [(s.step, s.replayed, len(s.rollout or ())) for s in seen] == [(n, False, 12) for n in (1, 2, 3, 4)]
    assert [s.record for s in seen] == reported == run.records and all(s.stats is not None for s in seen)
    assert run.policy.version == sum(r["updates"] for r in run.records)
    assert numbers(run) == whole[1]
    first, *_, last = run.records
    assert f"success {first['success']:.3f} (step 1) -> {last['success']:.3f} (step 4), in" in repr(run)
    compared = [[len({t.reward for t in group}) == 1 for group in s.rollout.groups] for s in seen]
    assert [s.record["equal_groups"] for s in seen] == [sum(equal) / len(equal) for equal in compared]
    wanted = {"step", "reward", "success", "success_se", "loss", "entropy", "grad_norm", "lr", "version"}
    assert all(wanted <= set(record) for record in run.records)
    assert any("approx_kl" in record for record in run.records)  # a batch without signal has none
    assert [r["lr"] for r in run.records] == pytest.approx([1e-3, 1e-3 - 9.7e-4 / 3, 1e-3 - 2 * 9.7e-4 / 3, 3e-5])
    assert "reward" in repr(seen[0])


async def test_the_means_of_metrics_are_recorded() -> None:
    @af.reward
    def parts(trajectory: Any) -> dict[str, Any]:
        value = None if trajectory.chain == 1 else float(trajectory.chain)
        return {"reward": value, "loss": 2.0, "chain": trajectory.chain} | {f"m{i:02}": i for i in range(40)}

    config = SMALL.replace(steps=1, evaluate_every=1)
    with pytest.warns(UserWarning, match="25% of the chains were unscored"):
        record = (await start(config=config, reward=parts, eval_tasks=TASKS[:2])).records[0]
    names = [name for name in record if name.startswith("metric_")]
    assert names == ["metric_chain", "metric_loss", *(f"metric_m{i:02}" for i in range(30))], "sorted, at most 32"
    assert record["metric_chain"] == pytest.approx((0 + 2 + 3) / 3), "the mean over the scored chains"
    assert (record["metric_loss"], record["eval_metric_chain"]) == (2.0, 0.0) and record["loss"] != 2.0


# --- interrupted and continued -------------------------------------------------------------------


async def leave(run: af.TrainRun, how: str, after: int) -> None:
    """Run some steps, then `break` or call `stop()`."""
    async for step in run:
        if step.step == after:
            if how == "break":
                break
            run.stop()


@pytest.mark.parametrize(
    ("how", "same", "checkpoint_every"),
    [("break", "policy", 1), ("stop", "", 1), ("break", "", 2), ("break", "policy and run", 1)],
)
async def test_the_same_call_continues_to_the_same_bits(
    how: str, same: str, checkpoint_every: int, tmp_path: Path, whole: Whole
) -> None:
    policy = learner()
    config = SMALL.replace(checkpoint_every=checkpoint_every)
    run = start(tmp_path / "run", policy, config)
    await leave(run, how, 3)
    if not same:  # the kernel was restarted
        policy = learner()
    again = run if "run" in same else start(tmp_path / "run", policy, config)
    assert [s.step async for s in again if s.replayed] == ([] if "run" in same else [1, 2, 3][: 4 - checkpoint_every])
    assert (policy.fingerprint(), numbers(again)) == whole


@pytest.mark.parametrize(
    ("when", "same_handle"),
    [
        ("rollout", False), ("update", True), ("first update", False), ("persist", True), ("evaluate", False),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (
                ("rollout", True), ("update", False), ("first update", True), ("persist", False), ("evaluate", True),
            )
        ),
    ],
)  # fmt: skip
async def test_a_run_cancelled_within_a_step_continues_to_the_same_bits(
    when: str, same_handle: bool, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner()
    config = SMALL.replace(evaluate_every=2 if when == "evaluate" else 0)
    more = {"eval_tasks": TASKS[:2]} if when == "evaluate" else {}
    run = start(tmp_path / "run", policy, config, **more)
    going = asyncio.create_task(run)

    persisting, cancelled, real = threading.Event(), threading.Event(), af.TrainRun._persist

    def held(self: af.TrainRun, *given: Any) -> Any:
        if when == "persist" and policy.version >= 8:
            persisting.set()
            cancelled.wait(GUARD)
        return real(self, *given)

    monkeypatch.setattr(af.TrainRun, "_persist", held)
    reached = {
        "rollout": lambda: len(af.Run(tmp_path / "run").records) >= 1 and run.rollout is not None,
        "first update": lambda: policy.version >= 1,
        "update": lambda: policy.version >= 5,  # 4 updates per step
        "persist": persisting.is_set,
        "evaluate": lambda: policy.version == 8 and run.rollout is None,
    }[when]
    while not going.done() and not reached():
        await asyncio.sleep(0)
    assert not going.done(), "too late to be cancelled"
    going.cancel()
    cancelled.set()
    await asyncio.wait([going])
    assert going.cancelled() and not left()
    monkeypatch.undo()
    again = run if same_handle else start(tmp_path / "run", policy, config, **more)
    steps = [step.step async for step in again]
    kept = [{k: v for k, v in r.items() if not k.startswith("eval")} for r in numbers(again)]
    assert (steps[-1], (policy.fingerprint(), kept)) == (4, whole)
    assert numbers(af.Run(tmp_path / "run")) == numbers(again)


async def test_a_finished_run_is_replayed_and_trains_nothing(tmp_path: Path, whole: Whole) -> None:
    await start(tmp_path / "run", learner())
    policy = learner()
    engine = af.LocalEngine(policy)
    run = start(tmp_path / "run", policy, engine=engine)
    with pytest.warns(UserWarning, match="run' is complete: its steps are replayed and nothing is trained"):
        seen = [step async for step in run]
    assert "4 of 4 steps done" in repr(run) and "complete, nothing is left to train" in repr(run)
    assert [(s.step, s.replayed, s.stats, s.rollout) for s in seen] == [(n, True, None, None) for n in (1, 2, 3, 4)]
    assert (engine.sampled, (policy.fingerprint(), numbers(run))) == (0, whole)
    assert (await run) is run


async def test_a_full_disk_keeps_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole) -> None:
    policy = learner()
    run = start(tmp_path / "run", policy)
    await leave(run, "break", 2)
    for error in (OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")):

        def full(*args: Any, _error: Exception = error, **options: Any) -> None:
            raise _error

        monkeypatch.setattr(torch, "save", full)
        await errors.check(lambda: run, af.errors.RunError, "no checkpoint could be written")
    monkeypatch.undo()
    again = start(tmp_path / "run", policy)
    assert [s.step async for s in again] == [1, 2, 3, 4]
    assert (policy.fingerprint(), numbers(again)) == whole


# --- identity ------------------------------------------------------------------------------------


async def test_a_different_run_is_rejected_with_the_difference(tmp_path: Path) -> None:
    policy, other = learner(), learner()
    await leave(start(tmp_path / "run", policy), "break", 1)
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1e-3)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"config": SMALL.replace(lr=5e-4)}, r"config\.lr: was 0\.001, now 0\.0005"),
        ({"config": SMALL.replace(advantage="rloo")}, 'config.advantage: was "grpo", now "rloo"'),
        ({"config": SMALL.replace(budget=af.Budget(turns=9))}, r'config\.budget: was null, now .*"turns": 9'),
        ({"reward": exact}, r"reward\.digits: was .*|reward\.exact: not in the folder's run"),
        ({"sampling": af.Sampling(max_tokens=9)}, r"agent\.sampling\.max_tokens: was 8, now 9"),
        ({"seed": 5}, r"agent\.seed: was 0, now 5"),
        ({"tools": []}, r"tools\.calculator: was"),
        ({"agent": small(policy, before_turn=lambda chain: None)}, "hooks"),
        ({"given": TASKS[:11]}, r"tasks\.count: was 12, now 11"),
        ({"policy": other}, "policy: was"),
    ]
    for change, says in changes:
        errors.check(
            lambda: start(tmp_path / "run", **({"policy": policy} | change)), af.RunMismatch, re.compile(says)
        )


async def test_a_new_run_from_weights_of_another_run_warns(tmp_path: Path) -> None:
    policy = learner()
    one = SMALL.replace(steps=1)
    imitated = learner()
    imitated.version = 2
    start(tmp_path / "imitated", imitated, one)  # imitation before a run is usual, so this does not warn
    await start(tmp_path / "first", policy, one)
    assert policy.version == 4
    start(tmp_path / "first", policy, one)  # the same run
    words = r"starts from trained weights \(version 4\); for the original weights, load the policy again"
    with pytest.warns(UserWarning, match=words) as caught:
        run = start(tmp_path / "second", policy, one)
    assert caught[0].filename == __file__
    await run
    assert "from trained weights (version 4)" in repr(start(tmp_path / "second", policy, one))
    assert "version" not in repr(start(tmp_path / "first", policy, one))
    with pytest.warns(UserWarning, match=r"version 8"):
        start(tmp_path / "second", policy, one, resume=False)


async def test_resume_false_starts_from_scratch(tmp_path: Path, whole: Whole) -> None:
    await leave(start(tmp_path / "run", learner(), SMALL.replace(lr=0.01)), "break", 2)
    policy = learner()
    run = start(tmp_path / "run", policy, resume=False)
    assert run.records == []
    await leave(run, "break", 1)
    again = await start(tmp_path / "run", policy)  # continues the run that started from scratch
    assert (policy.fingerprint(), numbers(again)) == whole


async def test_functions_as_settings_have_stable_fingerprints(tmp_path: Path) -> None:
    def config(std: Any) -> af.TrainConfig:
        return SMALL.replace(steps=1, advantage=functools.partial(af.advantages.grpo, std=std))

    await start(tmp_path / "run", learner(), config(None))
    assert " at 0x" not in (tmp_path / "run" / "run.json").read_text()
    start(tmp_path / "run", learner(), config(None))
    errors.check(lambda: start(tmp_path / "run", learner(), config("sample")), af.RunMismatch, "config.advantage")
    alone = functools.partial(af.advantages.grpo, singleton="raw")
    start(config=SMALL.replace(group_size=1, advantage=alone))  # a group of one has an advantage


async def test_runs_without_a_folder_are_independent() -> None:
    a, b = start(config=SMALL.replace(steps=1)), start(config=SMALL.replace(steps=1))
    assert a.path != b.path
    await a
    assert numbers(a) == numbers(await b)
    path = a.path
    del a
    gc.collect()
    assert not path.exists()


# --- pause and stop ------------------------------------------------------------------------------


async def test_pause_and_resume(whole: Whole) -> None:
    policy = learner()
    run = start(None, policy)
    going = asyncio.create_task(run)
    for _ in range(3):
        await asyncio.sleep(0.02)
        run.pause()
        await asyncio.sleep(0.02)
        run.resume()
    await going
    assert policy.fingerprint() == whole[0]


@pytest.mark.parametrize(
    ("config", "more"),
    [(SMALL.replace(evaluate_every=1), {"eval_tasks": TASKS[:2]}), (SMALL.replace(advantage="remax"), {})],
    ids=["evaluation", "remax"],
)
async def test_pause_reaches_every_rollout_of_a_run(config: af.TrainConfig, more: dict[str, Any]) -> None:
    policy = learner()
    started: list[Any] = []

    def watch(rollout: Any) -> None:
        started.append(rollout)
        if len(started) == 2:  # the evaluation, or the greedy chains
            run.pause()

    run = start(None, policy, config.replace(steps=1), agent=small(policy, watch=watch), **more)
    going = asyncio.create_task(run)
    await until(lambda: len(started) == 2 and started[1].snapshot().state == "paused")
    await asyncio.sleep(0.1)
    assert started[1].snapshot().state == "paused" and not going.done()
    run.resume()
    await going


async def test_pause_reaches_chains_sampled_ahead_beside_an_evaluation() -> None:
    policy = learner()
    sampler = RolloutSampler(small(policy), policy, TASKS, SMALL, WorkerGroup(None))
    agent = sampler._pausable(sampler.agent)
    handles = [agent.rollout(TASKS, 2), agent.rollout(TASKS[:2], purpose="evaluate"), agent.rollout(TASKS[:3])]
    running = []
    for handle in handles:
        running.append(asyncio.ensure_future(handle))
        await asyncio.sleep(0)
    sampler.pause()
    assert [handle.snapshot().state for handle in handles] == ["paused"] * 3
    assert not any(each.done() for each in running)
    sampler.resume()
    await asyncio.gather(*running)


async def test_a_run_has_one_loop() -> None:
    run = start()
    going = asyncio.create_task(run)
    await asyncio.sleep(0)
    await errors.check(lambda: run, af.errors.SettingsError, "already being awaited elsewhere")
    going.cancel()
    await asyncio.wait([going])


# --- kinds of training ---------------------------------------------------------------------------


def plus_one(rewards: Any, groups: Any) -> torch.Tensor:
    return torch.nan_to_num(torch.as_tensor(rewards, dtype=torch.float32)) + 1


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": "gae", "truncated": "bootstrap"},
        {"advantage": "reinforce_plus_plus", "kl_coef": 0.1, "kl_in": "reward"},
        {"kl_coef": 0.1, "entropy_coef": 0.01},
        {"truncated": "mask", "target_kl": 1e-9},
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                {"advantage": "gae"},
                {"advantage": "dr_grpo", "aggregate": {"how": "fixed", "denominator": 8.0}},
                {"advantage": plus_one, "truncated": "penalty"},
                {"minibatch": None, "epochs": 1, "lr_end": None},
            )
        ),
    ],
    ids=lambda o: " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in o.items()),
)
async def test_every_kind_of_training_runs_and_continues(options: dict[str, Any], tmp_path: Path) -> None:
    value = options.get("advantage") == "gae"
    config = SMALL.replace(steps=3, tasks_per_step=2, **options)
    once, policy = learner(value_head=value), learner(value_head=value)
    before = once.fingerprint()
    whole_run = await start(None, once, config)
    await leave(start(tmp_path / "run", learner(value_head=value), config), "break", 1)
    again = await start(tmp_path / "run", policy, config)
    assert (policy.fingerprint(), numbers(again)) == (once.fingerprint(), numbers(whole_run))
    assert once.version > 0 and once.fingerprint() != before


async def test_evaluation_does_not_change_training(whole: Whole) -> None:
    policy = learner()
    run = start(None, policy, SMALL.replace(evaluate_every=3), eval_tasks=TASKS[:3])
    seen = [step async for step in run]
    assert [s.evaluation is not None for s in seen] == [False, False, True, True]
    assert {"eval_success", "eval_low", "eval_high"} <= set(seen[3].record)
    assert "evaluated success " in repr(run) and "(step 3) -> " in repr(run)
    assert policy.fingerprint() == whole[0]


def test_each_pass_contains_every_task_once() -> None:
    run = start(config=SMALL.replace(tasks_per_step=5))
    sampled = [t.id for i in range(12) for t in run._sampler.task_sampler.sample(i)]
    passes = [sampled[i : i + 12] for i in range(0, 60, 12)]
    assert all(sorted(p) == sorted(t.id for t in TASKS) for p in passes) and len({tuple(p) for p in passes}) == 5
    assert [t.id for t in run._sampler.task_sampler.sample(7)] == sampled[35:40]


def test_a_pass_goes_from_easy_to_hard_and_shuffles_within_a_level() -> None:
    level = {t.id: i // 4 for i, t in enumerate(TASKS)}
    run = start(config=SMALL.replace(difficulty=lambda task: level[task.id]))
    passes = [[t.id for i in range(4 * k, 4 * k + 4) for t in run._sampler.task_sampler.sample(i)] for k in range(6)]
    assert all([level[i] for i in one] == [0] * 4 + [1] * 4 + [2] * 4 and len(set(one)) == 12 for one in passes)
    assert len({tuple(one) for one in passes}) > 1


async def test_the_progress_bar_shows_the_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = start(tmp_path / "run", progress=True)
    await leave(run, "break", 2)
    await run
    out, printed = capsys.readouterr()
    assert "4/4" in printed and "success=" in printed
    assert (run._bar, out) == (None, "")


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*af.advantages.__all__} - NO_ESTIMATORS))
async def test_every_estimator_trains(name: str) -> None:
    config = SMALL.replace(advantage=name, steps=1)
    assert SMALL.replace(advantage=getattr(af.advantages, name), steps=1) == config
    rewards = [digits, short] if name == "gdpo" else [digits]
    assert len((await start(None, learner(value_head=name == "gae"), config, reward=rewards)).records) == 1


def wrong_shape(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return rewards.mean()


def failing(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    raise KeyError("column")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (wrong_shape, r"advantages must have the shape \(12,\) .*, got \(\)"),
        (failing, "the advantage function failing raised KeyError: 'column'"),
    ],
)
async def test_an_estimator_that_fails_loses_no_chains(function: Any, says: str, tmp_path: Path) -> None:
    policy = learner()
    # The pattern matches one line.
    await errors.check(
        lambda: start(tmp_path / "run", policy, SMALL.replace(advantage=function)),
        af.errors.AgentFlyError,
        re.compile(rf"\A.*step 1: {says}.*no step was kept.*step-00001-failed.jsonl.*\Z"),
    )
    assert len(af.Rollout.load(tmp_path / "run" / "rollouts" / "step-00001-failed.jsonl")) == 12
    assert policy.version == 0


async def test_the_reason_is_reported_if_no_chain_was_scored() -> None:
    @af.reward
    def broken(final: str | None) -> float:
        raise KeyError("no such column")

    await errors.check(
        lambda: start(reward=broken),
        af.errors.BatchError,
        "step 1: none of 12 trajectories can be trained on: unscored (reward broken)",
    )


async def test_a_diverged_step_restores_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    policy = learner()
    run = start(tmp_path / "run", policy)
    await leave(run, "break", 2)
    real = updates.ppo_step_async

    def diverging(*args: Any, **options: Any) -> Any:
        args[2].advantages[args[2].mask] = 1e38
        return real(*args, **options)

    monkeypatch.setattr(updates, "ppo_step_async", diverging)
    await errors.check(
        lambda: run,
        af.errors.TrainingError,
        re.compile(r"step 3: .*\(steps 1 to 2 are kept in .*run; the policy has the weights"),
    )
    monkeypatch.undo()
    await run
    assert policy.fingerprint() == whole[0]


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


async def test_a_given_reference_policy_replaces_the_initial_one(tmp_path: Path) -> None:
    config = SMALL.replace(steps=2, kl_coef=0.1, lr=1e-6, lr_end=None)
    other = learner()
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(0.05)
    before = other.fingerprint()
    run = await start(tmp_path / "run", config=config, reference=other)
    assert run.records[0]["kl_reference"] > 1e-3 > abs((await start(config=config)).records[0]["kl_reference"])
    assert other.fingerprint() == before and not (run.path / "reference.pt").exists()
    longer = await start(tmp_path / "run", config=config.replace(steps=3), reference=other)
    assert longer.resumed_from == 2 and "kl_reference" in longer.records[2]
    errors.check(lambda: start(tmp_path / "run", config=config), af.errors.RunMismatch, "reference: was")
    policy = learner()
    for wanted, settings in [
        ("kl_coef=", {"config": SMALL, "reference": other}),
        ("weights of its own", {"policy": policy, "config": config, "reference": policy}),
        ("reference must be an af.Policy", {"config": config, "reference": "base"}),
    ]:
        errors.check(functools.partial(start, **settings), af.errors.SettingsError, wanted)
