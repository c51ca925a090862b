"""The loop: it learns, and however it is stopped the same call goes on to the same bits."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import agent, exact, fresh, scripted, tasks

from agentfly_kit import advantages
from agentfly_kit.agent.agent import Agent
from agentfly_kit.agent.budget import Budget
from agentfly_kit.engines.local.engine import LocalEngine
from agentfly_kit.errors import BatchError, EngineError, RunError, RunMismatch, SettingsError, TaskError, TrainingError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.rewards import reward
from agentfly_kit.trainer import loop
from agentfly_kit.trainer.config import TrainConfig
from agentfly_kit.trainer.loop import TrainRun, train
from agentfly_kit.trainer.run_dir import Run
from agentfly_kit.types import Sampling

SMALL = TrainConfig(steps=4, tasks_per_step=3, group_size=4, minibatch=6, lr=1e-3)
TASKS = tasks(12)


@reward
def digits(final: str | None) -> float:
    """Something that random chains differ in."""
    return sum(c.isdigit() for c in final or "") / 4


def small(policy: Policy, **settings: Any) -> Agent:
    settings.setdefault("reward", digits)
    settings.setdefault("sampling", Sampling(max_tokens=8))
    return agent(policy, max_turns=2, **settings)


def learner(*, value_head: bool = False) -> Policy:
    return fresh(value_head=value_head)


def start(run: Path | None = None, policy: Policy | None = None, config: TrainConfig = SMALL, **more: Any) -> TrainRun:
    policy = learner() if policy is None else policy
    settings = {k: more.pop(k) for k in list(more) if k in ("reward", "sampling", "tools", "seed", "engine")}
    return train(small(policy, **settings), policy, TASKS, config, run=run, **more)


def numbers(run: TrainRun | Run) -> list[dict[str, float]]:
    """The records without what the clock says."""
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in run.records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """Weights and records of a run that nobody stopped."""

    async def go() -> tuple[str, list[dict[str, float]]]:
        policy = learner()
        run = await start(tmp_path_factory.mktemp("whole") / "run", policy)
        return policy.fingerprint(), numbers(run)

    return asyncio.run(go())


# --- budgets -------------------------------------------------------------------------------------


async def test_an_iteration_keeps_to_its_budgets_and_a_run_without_them_has_none(tmp_path: Path) -> None:
    config = SMALL.replace(steps=1, budget=Budget(turns=9), group_budget=Budget(turns=4), max_concurrency=1)
    run = start(tmp_path / "run", config=config)
    (step,) = [step async for step in run]
    assert step.rollout is not None
    assert sum(len(t.actions) for t in step.rollout) == 9
    assert max(sum(len(t.actions) for t in group) for group in step.rollout.groups) == 4
    assert len(step.rollout) + len(step.rollout.not_run) == 12
    assert run.fingerprint["config"]["budget"]["turns"] == 9
    with pytest.raises(RunMismatch, match="budget"):
        start(tmp_path / "run", config=config.replace(budget=None))
    plain = start(tmp_path / "plain", config=SMALL)
    assert not {"budget", "group_budget"} & set(plain.fingerprint["config"])
    with pytest.raises(SettingsError, match=r"budget must be an af\.Budget"):
        TrainConfig(budget=9)  # type: ignore[arg-type]


# --- it learns -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no chain of the first 5 steps")
async def test_it_learns(tmp_path: Path) -> None:
    policy = fresh()
    config = TrainConfig(steps=8, tasks_per_step=8, group_size=8, minibatch=32, epochs=2, lr=1e-3, lr_end=None)

    @reward
    def short(trajectory: Any) -> float:
        return -float(trajectory.action_mask.sum())

    a = agent(policy, reward=short, sampling=Sampling(max_tokens=40))
    run = await train(a, policy, tasks(64), config, run=tmp_path / "run")
    assert len(run.records) == 8
    first, last = run.records[0]["reward"], run.records[-1]["reward"]
    assert last > 0.7 * first, f"{first} -> {last}"
    assert policy.version == sum(r["updates"] for r in run.records)


async def test_records_and_steps_say_what_happened(whole: tuple[str, list[dict[str, float]]]) -> None:
    run = start()
    heard: list[dict[str, float]] = []
    run.subscribe(heard.append)
    assert "0 of 4 steps done" in repr(run)
    assert "write `await` before it" in repr(run)
    seen = [step async for step in run]
    assert [s.step for s in seen] == [1, 2, 3, 4]
    assert [s.record for s in seen] == heard == run.records
    assert all(s.stats is not None and s.rollout is not None and not s.replayed for s in seen)
    assert len(seen[0].rollout or ()) == 12
    assert numbers(run) == whole[1]
    wanted = {"step", "reward", "success", "loss", "entropy", "grad_norm", "lr", "version"}
    assert all(wanted <= set(record) for record in run.records)
    assert any("approx_kl" in record for record in run.records)  # a batch without signal has none
    assert [r["lr"] for r in run.records] == pytest.approx([1e-3, 1e-3 - 9.7e-4 / 3, 1e-3 - 2 * 9.7e-4 / 3, 3e-5])
    assert "reward" in repr(seen[0])


# --- stopped and continued -----------------------------------------------------------------------


async def leave(run: TrainRun, how: str, after: int) -> None:
    """Begin a run and stop it in some way after some steps."""
    if how == "break":
        async for step in run:
            if step.step == after:
                break
    elif how == "stop":
        async for step in run:
            if step.step == after:
                run.stop()
    else:
        raise AssertionError(how)


@pytest.mark.parametrize("how", ["break", "stop"])
@pytest.mark.parametrize("same_policy", [True, False])
async def test_the_same_call_goes_on_to_the_same_bits(
    how: str, same_policy: bool, tmp_path: Path, whole: tuple[str, list[dict[str, float]]]
) -> None:
    policy = learner()
    await leave(start(tmp_path / "run", policy), how, 2)
    if not same_policy:  # the kernel was restarted
        policy = learner()
    again = start(tmp_path / "run", policy)
    seen = [step async for step in again]
    assert [s.replayed for s in seen] == [True, True, False, False]
    assert policy.fingerprint() == whole[0]
    assert numbers(again) == whole[1]


async def test_the_same_handle_goes_on_too(whole: tuple[str, list[dict[str, float]]]) -> None:
    policy = learner()
    run = start(None, policy)
    await leave(run, "break", 2)
    assert [step.step async for step in run] == [3, 4]
    assert policy.fingerprint() == whole[0]
    assert numbers(run) == whole[1]


@pytest.mark.parametrize("same_handle", [True, False])
@pytest.mark.parametrize("when", ["rollout", "update", "first update", "keep", "evaluate"])
async def test_cancelled_in_the_middle_of_a_step(
    when: str,
    same_handle: bool,
    tmp_path: Path,
    whole: tuple[str, list[dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = learner()
    config, more = SMALL, {}
    if when == "evaluate":
        more = {"eval_tasks": TASKS[:2]}
        config = SMALL.replace(evaluate_every=2)
    run = start(tmp_path / "run", policy, config, **more)
    going = asyncio.create_task(run._run_to_end())

    def count() -> int:
        return len(Run(tmp_path / "run").records) if (tmp_path / "run" / "steps.jsonl").exists() else 0

    if when == "keep":
        real = TrainRun._persist

        def slow(self: TrainRun, *given: Any) -> Any:
            time.sleep(0.05)
            out = real(self, *given)
            time.sleep(0.05)
            return out

        monkeypatch.setattr(TrainRun, "_persist", slow)
    while not going.done():
        await asyncio.sleep(0)
        if when == "first update" and policy.version >= 1:
            break
        if when == "update" and policy.version >= 5:  # 4 updates a step: in the middle of the second
            break
        if when == "rollout" and count() >= 1 and run.rollout is not None:
            break
        if when == "keep" and policy.version >= 8:
            await asyncio.sleep(0.03)
            break
        if when == "evaluate" and run.rollout is None and policy.version == 8:
            break
    assert not going.done(), "too late to be cancelled"
    going.cancel()
    await asyncio.wait([going])
    assert going.cancelled()
    assert not [t for t in asyncio.all_tasks() if "agentfly" in t.get_name()]
    monkeypatch.undo()
    again = run if same_handle else start(tmp_path / "run", policy, config, **more)
    steps = [step.step async for step in again]
    assert steps[-1] == 4
    assert policy.fingerprint() == whole[0]
    kept = [{k: v for k, v in r.items() if not k.startswith("eval")} for r in numbers(again)]
    assert kept == whole[1]
    assert numbers(Run(tmp_path / "run")) == numbers(again)


async def test_a_finished_run_is_replayed_and_trains_nothing(
    tmp_path: Path, whole: tuple[str, list[dict[str, float]]]
) -> None:
    await start(tmp_path / "run", learner())
    policy = learner()
    engine = LocalEngine(policy)
    run = start(tmp_path / "run", policy, engine=engine)
    seen = [step async for step in run]
    assert all(s.replayed and s.stats is None and s.rollout is None for s in seen)
    assert [s.step for s in seen] == [1, 2, 3, 4]
    assert engine.sampled == 0
    assert policy.fingerprint() == whole[0]
    assert numbers(run) == whole[1]
    assert (await run) is run


async def test_fewer_checkpoints_continue_from_the_last_one(
    tmp_path: Path, whole: tuple[str, list[dict[str, float]]]
) -> None:
    config = SMALL.replace(checkpoint_every=2)
    policy = learner()
    run = start(tmp_path / "run", policy, config)
    await leave(run, "break", 3)
    again = start(tmp_path / "run", policy, config)
    seen = [step async for step in again]
    assert [(s.step, s.replayed) for s in seen] == [(1, True), (2, True), (3, False), (4, False)]
    assert policy.fingerprint() == whole[0]


async def test_a_disk_that_fills_up_keeps_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, list[dict[str, float]]]
) -> None:
    policy = learner()
    run = start(tmp_path / "run", policy)
    await leave(run, "break", 2)
    for error in (OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")):

        def full(*args: Any, _error: Exception = error, **options: Any) -> None:
            raise _error

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(RunError, match="no checkpoint could be written"):
            await run
    monkeypatch.undo()
    again = start(tmp_path / "run", policy)
    assert [s.step async for s in again] == [1, 2, 3, 4]
    assert policy.fingerprint() == whole[0]
    assert numbers(again) == whole[1]


# --- the same run or another ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": SMALL.replace(lr=5e-4)}, r"config\.lr: was 0\.001, now 0\.0005"),
        ({"config": SMALL.replace(advantage="rloo")}, 'config.advantage: was "grpo", now "rloo"'),
        ({"reward": exact}, r"reward\.digits: was .*|reward\.exact: not in the folder's run"),
        ({"sampling": Sampling(max_tokens=9)}, r"agent\.sampling\.max_tokens: was 8, now 9"),
        ({"seed": 5}, r"agent\.seed: was 0, now 5"),
        ({"tools": []}, r"tools\.calculator: was"),
    ],
)
async def test_another_run_is_refused_at_once_with_the_difference(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    policy = learner()
    await leave(start(tmp_path / "run", policy), "break", 1)
    with pytest.raises(RunMismatch, match=says):
        start(tmp_path / "run", policy, **change)


async def test_other_tasks_or_weights_are_refused(tmp_path: Path) -> None:
    policy = learner()
    await leave(start(tmp_path / "run", policy), "break", 1)
    with pytest.raises(RunMismatch, match=r"tasks\.count: was 12, now 11"):
        train(small(policy), policy, TASKS[:11], SMALL, run=tmp_path / "run")
    other = learner()
    with torch.no_grad():
        next(iter(other.model.parameters())).add_(1e-3)
    with pytest.raises(RunMismatch, match="policy: was"):
        start(tmp_path / "run", other)


async def test_resume_false_starts_anew(tmp_path: Path, whole: tuple[str, list[dict[str, float]]]) -> None:
    await leave(start(tmp_path / "run", learner(), SMALL.replace(lr=0.01)), "break", 2)
    policy = learner()
    run = start(tmp_path / "run", policy, resume=False)
    assert run.records == []
    await leave(run, "break", 1)
    again = start(tmp_path / "run", policy)  # and that one continues
    await again
    assert policy.fingerprint() == whole[0]
    assert numbers(again) == whole[1]


async def test_options_that_are_functions_are_the_same_in_another_process(tmp_path: Path) -> None:
    first = SMALL.replace(steps=1, advantage=functools.partial(advantages.grpo, std=None))
    await start(tmp_path / "run", learner(), first)
    found = Run(tmp_path / "run").path / "run.json"
    assert " at 0x" not in found.read_text()
    again = SMALL.replace(steps=1, advantage=functools.partial(advantages.grpo, std=None))
    await start(tmp_path / "run", learner(), again)
    with pytest.raises(RunMismatch, match=r"config\.advantage"):
        start(
            tmp_path / "run",
            learner(),
            SMALL.replace(steps=1, advantage=functools.partial(advantages.grpo, std="sample")),
        )


async def test_without_a_folder_each_run_is_its_own() -> None:
    a, b = start(config=SMALL.replace(steps=1)), start(config=SMALL.replace(steps=1))
    assert a.path != b.path
    await a
    assert numbers(a) == numbers(await b)
    gone = a.path
    del a
    import gc

    gc.collect()
    assert not gone.exists()


# --- pause and stop ------------------------------------------------------------------------------


async def test_pause_and_resume(whole: tuple[str, list[dict[str, float]]]) -> None:
    policy = learner()
    run = start(None, policy)
    going = asyncio.create_task(run._run_to_end())
    for _ in range(3):
        await asyncio.sleep(0.02)
        run.pause()
        await asyncio.sleep(0.02)
        run.resume()
    await going
    assert policy.fingerprint() == whole[0]
    held = start()
    held.pause()
    waiting = asyncio.create_task(held._run_to_end())
    await asyncio.sleep(0.2)
    assert held.records == []
    held.stop()
    await asyncio.wait_for(waiting, 60)
    assert len(held.records) <= 1


async def test_one_loop_a_run() -> None:
    run = start()
    going = asyncio.create_task(run._run_to_end())
    await asyncio.sleep(0.02)
    with pytest.raises(SettingsError, match="already being awaited elsewhere"):
        await run
    going.cancel()
    await asyncio.wait([going])


# --- kinds of training ---------------------------------------------------------------------------


def plus_one(rewards: Any, groups: Any) -> torch.Tensor:
    return torch.nan_to_num(torch.as_tensor(rewards, dtype=torch.float32)) + 1


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": "gae"},
        {"advantage": "gae", "truncated": "bootstrap"},
        {"advantage": "rloo"},
        {"advantage": "dr_grpo", "aggregate": {"how": "fixed", "denominator": 8.0}},
        {"advantage": "reinforce_plus_plus"},
        {"advantage": "reinforce_plus_plus_baseline"},
        {"advantage": plus_one},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "reward"},
        {"entropy_coef": 0.01},
        {"truncated": "mask"},
        {"truncated": "penalty"},
        {"target_kl": 1e-9},
        {"minibatch": None, "epochs": 1, "lr_end": None},
    ],
    ids=lambda o: " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in o.items()),
)
async def test_kinds_of_training_run_and_continue(options: dict[str, Any], tmp_path: Path) -> None:
    value = options.get("advantage") == "gae"
    config = SMALL.replace(steps=3, tasks_per_step=2, **options)
    once = learner(value_head=value)
    whole_run = await start(None, once, config)
    policy = learner(value_head=value)
    await leave(start(tmp_path / "run", policy, config), "break", 1)
    policy = learner(value_head=value)
    again = await start(tmp_path / "run", policy, config)
    assert policy.fingerprint() == once.fingerprint()
    assert numbers(again) == numbers(whole_run)
    assert once.version > 0
    assert once.fingerprint() != learner(value_head=value).fingerprint()


async def test_evaluation_in_between_changes_no_training(whole: tuple[str, list[dict[str, float]]]) -> None:
    policy = learner()
    run = start(None, policy, SMALL.replace(evaluate_every=3), eval_tasks=TASKS[:3])
    seen = [step async for step in run]
    assert [s.evaluation is not None for s in seen] == [False, False, True, True]
    assert {"eval_success", "eval_low", "eval_high"} <= set(seen[3].record)
    assert policy.fingerprint() == whole[0]


async def test_rollouts_can_be_kept(tmp_path: Path) -> None:
    run = start(tmp_path / "run", config=SMALL.replace(steps=2, save_rollouts=True))
    seen = [step async for step in run]
    assert Run(tmp_path / "run").rollout(2) == seen[1].rollout


def test_a_pass_goes_from_easy_to_hard_and_shuffles_within_a_level() -> None:
    level = {t.id: i // 4 for i, t in enumerate(TASKS)}
    run = start(config=SMALL.replace(difficulty=lambda task: level[task.id]))
    passes = [[t.id for i in range(4 * k, 4 * k + 4) for t in run._sampler.task_sampler.sample(i)] for k in range(6)]
    for one in passes:
        assert sorted(one) == sorted(t.id for t in TASKS)
        assert [level[i] for i in one] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(one) for one in passes}) > 1


def test_a_difficulty_that_a_task_lacks_is_named() -> None:
    with pytest.raises(SettingsError, match=r"got 'masks', which task .* lacks \(its fields: answer\)"):
        start(config=SMALL.replace(difficulty="masks"))
    with pytest.raises(SettingsError, match="difficulty must be a finite number, got None"):
        start(config=SMALL.replace(difficulty=lambda task: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(SettingsError, match="difficulty must be a finite number"):
        start(config=SMALL.replace(difficulty="answer"))  # a text


async def test_a_bar_shows_the_steps_and_goes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = start(tmp_path / "run", progress=True)
    async for step in run:
        if step.step == 2:
            break
    await run
    said = capsys.readouterr().err
    assert "4/4" in said
    assert "success=" in said
    assert run._bar is None
    assert capsys.readouterr().out == ""


def test_each_pass_takes_every_task_once() -> None:
    run = start(config=SMALL.replace(tasks_per_step=5))
    drawn = [t.id for i in range(12) for t in run._sampler.task_sampler.sample(i)]
    passes = [drawn[i : i + 12] for i in range(0, 60, 12)]
    assert all(sorted(p) == sorted(t.id for t in TASKS) for p in passes)
    assert len({tuple(p) for p in passes}) == 5
    assert [t.id for t in run._sampler.task_sampler.sample(7)] == drawn[35:40]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"max_kl": 0.0}, "max_kl must be above 0"),
        ({"overlap": 2}, "overlap must be one of 0, 1, got 2"),
        ({"old_logprobs": "newest"}, "old_logprobs must be one of"),
        ({"advantage": "best"}, "advantage must be one of 'grpo'"),
        ({"lr": 0.0}, "lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"refill": 2}, "refill=2 needs filters="),
        ({"refill": -1}, "refill must be at least 0"),
        ({"truncated": "drop"}, "truncated must be one of"),
        ({"advantage_per": "task"}, "advantage_per must be one of 'trajectory', 'row'"),
        ({"advantage_per": "row", "kl_in": "reward", "kl_coef": 0.1}, "summed over a chain"),
    ],
)
def test_configs_are_checked_where_they_are_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        SMALL.replace(**options)


def test_runs_that_cannot_be_are_refused_at_once() -> None:
    policy = learner()
    with pytest.raises(TaskError, match="at least one task"):
        train(small(policy), policy, [], SMALL)
    with pytest.raises(SettingsError, match="value_head=True"):
        train(small(policy), policy, TASKS, SMALL.replace(advantage="gae"))
    with pytest.raises(SettingsError, match="needs eval_tasks="):
        train(small(policy), policy, TASKS, SMALL.replace(evaluate_every=1))
    with pytest.raises(SettingsError, match="has no reward to learn from"):
        train(small(policy, reward=None), policy, TASKS, SMALL)
    with pytest.raises(SettingsError, match="must sample from the policy that is trained"):
        train(small(policy), learner(), TASKS, SMALL)
    with pytest.raises(SettingsError, match="temperature"):
        train(small(policy, sampling=Sampling(temperature=0)), policy, TASKS, SMALL)


async def test_a_scripted_agent_has_nothing_to_train(tmp_path: Path) -> None:
    policy = learner()
    a = scripted(["5"])
    with pytest.raises(EngineError, match="has no weights to update; train with LocalEngine"):
        await train(a, policy, TASKS, SMALL)


async def test_nothing_scored_says_why() -> None:
    @reward
    def broken(final: str | None) -> float:
        raise KeyError("no such column")

    with pytest.raises(
        BatchError, match=r"step 1: none of 12 trajectories can be trained on: unscored \(reward broken\)"
    ):
        await start(reward=broken)


async def test_a_step_that_diverges_says_where_the_good_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, list[dict[str, float]]]
) -> None:
    policy = learner()
    run = start(tmp_path / "run", policy)
    await leave(run, "break", 2)
    real = loop.ppo_step_async

    def diverging(*args: Any, **options: Any) -> Any:
        args[2].advantages[args[2].mask] = 1e38
        return real(*args, **options)

    monkeypatch.setattr(loop, "ppo_step_async", diverging)
    with pytest.raises(
        TrainingError,
        match=r"step 3: .*\(steps 1 to 2 are kept in .*run; the policy has the weights",
    ):
        await run
    monkeypatch.undo()
    await run
    assert policy.fingerprint() == whole[0]


async def test_the_event_loop_goes_on_while_it_trains() -> None:
    run = start(config=SMALL.replace(steps=2))
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    async for _ in run:
        pass
    ticking.cancel()
    assert len(gaps) > 20
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.1


@pytest.fixture(autouse=True)
def _no_warnings_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
