"""Settings, runs, teachers and trackers that are rejected before anything is sampled."""

from __future__ import annotations

import functools
import math
from typing import Any

import errors
from agents import agent, fresh, random_policy, scripted, tasks
from test_distillation import DISTIL
from test_trainer import NO_ESTIMATORS, SMALL, TASKS, small, start

from agentfly_kit import advantages, tiny
from agentfly_kit.errors import EngineError, RunError, SettingsError, TaskError
from agentfly_kit.policy.policy import Policy
from agentfly_kit.trainer.loop import train
from agentfly_kit.trainer.run_dir import Run
from agentfly_kit.types import Sampling

made = SMALL.replace
NONE = {"advantage": "none", "teacher_coef": 1.0}


@errors.table(
    (lambda: made(steps=0), SettingsError, "steps must be at least 1, got 0"),
    (lambda: made(budget=9), SettingsError, "budget must be an af.Budget"),
    (lambda: made(max_kl=0.0), SettingsError, "max_kl must be above 0"),
    (lambda: made(overlap=2), SettingsError, "overlap must be one of 0, 1, got 2"),
    (lambda: made(overlap=1, advantage="remax"), SettingsError, "overlap must be 0 for advantage='remax'"),
    (lambda: made(advantage="none"), SettingsError, "finite number, and above 0 with advantage='none', got 0"),
    (lambda: made(teacher_coef=-1.0), SettingsError, "teacher_coef must be at least 0, got -1"),
    (lambda: made(teacher_coef=math.inf), SettingsError, "teacher_coef must be a finite number"),
    (lambda: made(advantage="gdpo", truncated="penalty"), SettingsError, "'gdpo' needs unmodified rewards"),
    (lambda: made(advantage_per="row", advantage="opo"), SettingsError, "which requires whole chains"),
    (lambda: made(advantage_per="row", advantage="reinforce_plus_plus"), SettingsError, "requires whole chains"),
    (lambda: made(advantage_per="row", advantage="gigpo"), SettingsError, "whole chains"),
    (lambda: made(advantage_per="row", kl_in="reward", kl_coef=0.1), SettingsError, "summed over all rows of a chain"),
    (lambda: made(advantage_per="task"), SettingsError, "advantage_per must be one of 'trajectory', 'row'"),
    (lambda: made(old_logprobs="newest"), SettingsError, "old_logprobs must be one of"),
    (lambda: made(advantage="best"), SettingsError, "advantage must be one of 'grpo'"),
    (lambda: made(lr=0.0), SettingsError, "lr must be a positive finite number, got 0.0"),
    (lambda: made(lr=math.inf), SettingsError, "lr must be a positive finite number, got inf"),
    (lambda: made(lr=math.nan), SettingsError, "lr must be a number, got nan"),
    (
        lambda: made(lr=1e-6),
        SettingsError,
        "lr=1e-06, which is below the default lr_end=3e-05: the rate would rise",
    ),
    (lambda: made(lr_end=math.inf), SettingsError, "lr_end must be a finite number of at least 0, or None, got inf"),
    (lambda: made(lr_end=-1e-5), SettingsError, "lr_end must be a finite number of at least 0, or None, got -1e-05"),
    (lambda: made(row_credit="last", **NONE), SettingsError, "row_credit has an effect only with"),
    (lambda: made(truncated="penalty", **NONE), SettingsError, "truncated='penalty' has no effect with"),
    (lambda: made(kl_coef=0.1, kl_in="reward", **NONE), SettingsError, "kl_in has an effect only"),
    (lambda: made(refill=2), SettingsError, "refill=2 needs filters="),
    (lambda: made(refill=-1), SettingsError, "refill must be at least 0"),
    (lambda: made(truncated="drop"), SettingsError, "truncated must be one of"),
    (lambda: made(truncated="bootstrap"), SettingsError, "advantage='gae'"),
    (lambda: made(gamma=0.9), SettingsError, "leave it at 1.0, got 0.9"),
    (lambda: made(lam=0.9, advantage="gigpo"), SettingsError, "lam has an effect only with advantage 'gae'"),
    (lambda: made(whiten=False, advantage=lambda rewards, groups: rewards), SettingsError, "whiten has an effect only"),
    (lambda: made(value_coef=0.1), SettingsError, "value_coef has an effect only with advantage 'gae'"),
    (lambda: made(row_credit="first"), SettingsError, "must be one of 'broadcast', 'last', 'uniform', 'geometric'"),
    (lambda: made(row_credit="last", advantage="gigpo"), SettingsError, "an effect only with outcome estimators"),
    (lambda: made(row_discount=0.5), SettingsError, "row_discount has an effect only with row_credit='geometric'"),
    (
        lambda: made(row_discount=1.5, row_credit="geometric"),
        SettingsError,
        "must be from 0 to 1, got 1.5",
    ),
    (lambda: made(kl_horizon=10), SettingsError, "kl_horizon has an effect only with kl_target"),
    (lambda: made(kl_target=0.1), SettingsError, "kl_target"),
    (lambda: made(truncated_penalty=1.0), SettingsError, "has an effect only with truncated='penalty'"),
    (lambda: made(kl_kind="k2"), SettingsError, "kl_kind has an effect only with kl_coef above 0"),
    (lambda: made(kl_weighted=True, kl_coef=0.1, kl_in="reward"), SettingsError, "an effect only with kl_in='loss'"),
    (
        lambda: made(advantage=lambda rewards: rewards),
        SettingsError,
        "must be a function of (rewards, groups)",
    ),
    (lambda: made(advantage=functools.partial(advantages.gae, gamma=0.9)), SettingsError, "got 'gae'"),
    *((lambda n=n: made(advantage=n), SettingsError, f"got '{n}'; trajectory_level is") for n in sorted(NO_ESTIMATORS)),
    (lambda: made(advantage=advantages.whiten), SettingsError, "got 'whiten'; trajectory_level is applied by default"),
)
async def test_settings(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)


def unusual(**changed: Any) -> Any:
    policy = fresh()
    valid: Any = {"agent": agent(policy), "policy": policy, "tasks": tasks(2), "config": SMALL}
    return train(**valid | changed)


def distilled(**options: Any) -> Any:
    return start(None, fresh(), DISTIL, **options)


def own_teacher() -> Any:
    policy = fresh()
    return start(None, policy, DISTIL, teacher=policy)


def tracked(*trackers: Any) -> Any:
    return start().track(*trackers)


async def tracked_late() -> None:
    run = start(config=made(steps=1))
    async for _ in run:
        run.track(print)


@errors.table(
    (lambda: unusual(agent="agent"), SettingsError, "agent must be an "),
    (lambda: unusual(policy=None), SettingsError, "policy must be "),
    (lambda: unusual(config={"steps": 1}), SettingsError, "got {'steps': 1}"),
    (lambda: unusual(run=3), SettingsError, "run must be "),
    (lambda: unusual(workers=3), SettingsError, "workers must be "),
    (lambda: start(given=[]), TaskError, "at least one task"),
    (lambda: start(config=made(advantage="gae")), SettingsError, "value_head=True"),
    (lambda: start(config=made(evaluate_every=1)), SettingsError, "needs eval_tasks="),
    (lambda: start(eval_tasks=TASKS), SettingsError, "eval_tasks (12 tasks) need TrainConfig(evaluate_every=)"),
    (lambda: start(config=made(group_size=1)), SettingsError, "group_size must be at least 2 for advantage='grpo'"),
    (lambda: start(config=made(group_size=1, advantage="gigpo")), SettingsError, "at least 2 for advantage='gigpo'"),
    (lambda: start(config=made(advantage="gdpo")), SettingsError, "needs an agent with at least two rewards per chain"),
    (lambda: start(reward=None), SettingsError, "agent must have a reward to learn from, got none"),
    (lambda: start(agent=small(fresh())), SettingsError, "must sample from the policy that is trained"),
    (lambda: start(sampling=Sampling(temperature=0)), SettingsError, "temperature"),
    (lambda: start(agent=scripted(["5"])), EngineError, "has no weights to update; train with LocalEngine"),
    (lambda: start(config=made(difficulty="masks")), SettingsError, "lacks (its fields: answer)"),
    (lambda: start(config=made(difficulty=lambda task: None)), SettingsError, "must be a finite number, got None"),
    (lambda: start(config=made(difficulty="answer")), SettingsError, "difficulty must be a finite number, got '"),
    (lambda: distilled(teacher=None), SettingsError, "above 0, and vice versa"),
    (lambda: start(teacher=fresh()), SettingsError, "above 0, and vice versa"),
    (lambda: distilled(teacher=tiny.policy("lookup")), SettingsError, "teacher must have the vocabulary of the policy"),
    (lambda: distilled(teacher=random_policy()), SettingsError, "must have a context of at least 512 tokens"),
    (own_teacher, SettingsError, "teacher must not be the policy that is trained"),
    (lambda: tracked("wandb"), SettingsError, "a tracker must be a function of "),
    (lambda: tracked(lambda: None), SettingsError, "a tracker must be a function of "),
    (lambda: tracked(print, print), SettingsError, "trackers must be different objects, got "),
    (lambda: tracked(print).track(print), SettingsError, " twice"),
    (tracked_late, SettingsError, "before the run is awaited"),
    (lambda: Run("none").policy(2, best=True), RunError, "step must be None with best=True, got 2"),
    (lambda: Policy.load("none", torch_dtype="float32"), SettingsError, "must be passed as dtype="),
    (
        lambda: Policy.load("none", device="cpu", device_map="auto"),
        SettingsError,
        "None if device_map is given",
    ),
    (lambda: Policy.load("none", device="mps"), SettingsError, "usable by torch on this machine, got 'mps'"),
    (lambda: Policy.load("none", valuehead=True), TypeError, "'valuehead'; did you mean 'value_head'"),
)
async def test_runs(call: Any, error: Any, text: str) -> None:
    await errors.check(call, error, text)
