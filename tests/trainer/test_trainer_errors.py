"""Settings, runs, teachers and trackers that are rejected before anything is sampled."""

import functools
import math
from typing import Any

import errors
from agents import agent, fresh, random_policy, scripted, tasks
from test_distillation import DISTIL
from test_trainer import NO_ESTIMATORS, SMALL, TASKS, digits, small, start

import agentfly_kit as af

made = SMALL.replace
NONE = {"advantage": "none", "teacher_coef": 1.0}


test_settings = errors.rejected(
    (lambda: made(steps=0), af.errors.SettingsError, "steps must be an integer of at least 1, got 0"),
    (lambda: made(budget=9), af.errors.SettingsError, "budget must be an af.Budget or None, got 9"),
    (lambda: made(max_kl=0.0), af.errors.SettingsError, "max_kl must be a finite number above 0 or None"),
    (lambda: made(overlap=-1), af.errors.SettingsError, "overlap must be an integer of at least 0, got -1"),
    (lambda: made(overlap=1, advantage="remax"), af.errors.SettingsError, "overlap must be 0 for advantage='remax'"),
    (
        lambda: made(advantage="none"),
        af.errors.SettingsError,
        "teacher_coef must be above 0 with advantage='none', got 0",
    ),
    (
        lambda: made(teacher_coef=-1.0),
        af.errors.SettingsError,
        "teacher_coef must be a finite number of at least 0",
    ),
    (lambda: made(teacher_coef=math.inf), af.errors.SettingsError, "teacher_coef must be a finite number"),
    (lambda: made(advantage="gdpo", truncated="penalty"), af.errors.SettingsError, "'gdpo' needs unmodified rewards"),
    (lambda: made(advantage_per="row", advantage="opo"), af.errors.SettingsError, "which requires whole chains"),
    (
        lambda: made(advantage_per="row", advantage="reinforce_plus_plus"),
        af.errors.SettingsError,
        "requires whole chains",
    ),
    (lambda: made(advantage_per="row", advantage="gigpo"), af.errors.SettingsError, "whole chains"),
    (
        lambda: made(advantage_per="row", kl_in="reward", kl_coef=0.1),
        af.errors.SettingsError,
        "summed over all rows of a chain; use",
    ),
    (lambda: made(advantage_per="task"), af.errors.SettingsError, "advantage_per must be one of 'trajectory', 'row'"),
    (lambda: made(old_logprobs="newest"), af.errors.SettingsError, "old_logprobs must be one of"),
    (lambda: made(advantage="best"), af.errors.SettingsError, "advantage must be one of 'grpo'"),
    (lambda: made(lr=0.0), af.errors.SettingsError, "lr must be a finite number above 0, got 0.0"),
    (lambda: made(lr=math.inf), af.errors.SettingsError, "lr must be a finite number above 0, got inf"),
    (lambda: made(lr=math.nan), af.errors.SettingsError, "lr must be a finite number above 0, got nan"),
    (
        lambda: made(lr_end=math.inf),
        af.errors.SettingsError,
        "lr_end must be a finite number of at least 0 or None, got inf",
    ),
    (
        lambda: made(lr_end=-1e-5),
        af.errors.SettingsError,
        "lr_end must be a finite number of at least 0 or None, got -1e-05",
    ),
    (lambda: made(row_credit="last", **NONE), af.errors.SettingsError, "row_credit has an effect only with"),
    (lambda: made(truncated="penalty", **NONE), af.errors.SettingsError, "truncated='penalty' has no effect with"),
    (lambda: made(kl_coef=0.1, kl_in="reward", **NONE), af.errors.SettingsError, "kl_in has an effect only"),
    (lambda: made(refill=2), af.errors.SettingsError, "refill has an effect only with filters"),
    (lambda: made(refill=-1), af.errors.SettingsError, "refill must be an integer of at least 0"),
    (lambda: made(truncated="drop"), af.errors.SettingsError, "truncated must be one of"),
    (lambda: made(truncated="bootstrap"), af.errors.SettingsError, "advantage='gae'"),
    (lambda: made(gamma=0.9), af.errors.SettingsError, "leave it at 1.0, got 0.9"),
    (
        lambda: made(lam=0.9, advantage="gigpo"),
        af.errors.SettingsError,
        "lam has an effect only with advantage 'gae'",
    ),
    (
        lambda: made(whiten=False, advantage=lambda rewards, groups: rewards),
        af.errors.SettingsError,
        "whiten has an effect only",
    ),
    *(
        (lambda names=names: made(authors=names), af.errors.SettingsError, f"or None for all, got {names!r}")
        for names in ((), ("a", 3), 3)
    ),
    (lambda: made(value_coef=0.1), af.errors.SettingsError, "value_coef has an effect only with advantage 'gae'"),
    (
        lambda: made(row_credit="first"),
        af.errors.SettingsError,
        "must be one of 'broadcast', 'last', 'uniform', 'geometric'",
    ),
    (
        lambda: made(row_credit="last", advantage="gigpo"),
        af.errors.SettingsError,
        "an effect only with outcome estimators",
    ),
    (
        lambda: made(row_discount=0.5),
        af.errors.SettingsError,
        "row_discount has an effect only with row_credit='geometric'",
    ),
    (
        lambda: made(row_discount=1.5, row_credit="geometric"),
        af.errors.SettingsError,
        "must be a finite number of at least 0 and at most 1, got 1.5",
    ),
    (
        lambda: made(sum_turn_rewards=True, advantage="gigpo"),
        af.errors.SettingsError,
        "sum_turn_rewards has an effect only with estimators that compare",
    ),
    (lambda: made(kl_horizon=10), af.errors.SettingsError, "kl_horizon has an effect only with kl_target"),
    (lambda: made(kl_target=0.1), af.errors.SettingsError, "kl_target has an effect only with kl_coef"),
    (lambda: made(truncated_penalty=1.0), af.errors.SettingsError, "has an effect only with truncated='penalty'"),
    (lambda: made(kl_kind="k2"), af.errors.SettingsError, "kl_kind has an effect only with kl_coef above 0"),
    (
        lambda: made(kl_weighted=True, kl_coef=0.1, kl_in="reward"),
        af.errors.SettingsError,
        "an effect only with kl_in='loss'",
    ),
    (
        lambda: made(advantage=lambda rewards: rewards),
        af.errors.SettingsError,
        "must be a function of (rewards, groups)",
    ),
    (lambda: made(advantage=functools.partial(af.advantages.gae, gamma=0.9)), af.errors.SettingsError, "got 'gae'"),
    (
        lambda: made(advantage=functools.partial(af.advantages.grpo, singleton="one")),
        af.errors.SettingsError,
        "got 'one'",
    ),
    *(
        (lambda n=n: made(advantage=n), af.errors.SettingsError, f"got '{n}'; trajectory_level is")
        for n in sorted(NO_ESTIMATORS)
    ),
    (
        lambda: made(advantage=af.advantages.whiten),
        af.errors.SettingsError,
        "got 'whiten'; trajectory_level is applied by default",
    ),
)


@af.reward(per="turn")
def called(turn: af.Turn) -> float:
    return len(turn.tool_calls)


def unusual(**changed: Any) -> Any:
    policy = fresh()
    valid: Any = {"agent": agent(policy), "policy": policy, "tasks": tasks(2), "config": SMALL}
    return af.train(**valid | changed)


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


test_runs = errors.rejected(
    (lambda: unusual(agent="agent"), af.errors.SettingsError, "agent must be an "),
    (lambda: unusual(policy=None), af.errors.SettingsError, "policy must be "),
    (lambda: unusual(config={"steps": 1}), af.errors.SettingsError, "got {'steps': 1}"),
    (lambda: unusual(run=3), af.errors.SettingsError, "run must be a folder, or None for a temporary folder, got 3"),
    (lambda: start(given=[]), af.errors.TaskError, "at least one task"),
    (
        lambda: start(given=af.load_tasks("calculator")),
        af.errors.TaskError,
        "must not contain held-out tasks, got 2000 train and 1024 test tasks; pass tasks.train",
    ),
    (lambda: start(config=made(advantage="gae")), af.errors.SettingsError, "value_head=True"),
    (lambda: start(config=made(evaluate_every=1)), af.errors.SettingsError, "needs eval_tasks="),
    (
        lambda: start(eval_tasks=TASKS),
        af.errors.SettingsError,
        "evaluate_every=0 needs eval_tasks=, such as tasks.test, and vice versa, got 12 tasks",
    ),
    (
        lambda: start(config=made(group_size=1)),
        af.errors.SettingsError,
        "group_size must be at least 2 for advantage='grpo'",
    ),
    (
        lambda: start(config=made(group_size=1, advantage="gigpo")),
        af.errors.SettingsError,
        "at least 2 for advantage='gigpo'",
    ),
    (
        lambda: start(config=made(advantage="gdpo")),
        af.errors.SettingsError,
        "needs an agent with at least two rewards per chain",
    ),
    (
        lambda: start(reward=[digits, called]),
        af.errors.SettingsError,
        "sum_turn_rewards must be True for advantage='grpo', which compares the rewards of whole chains",
    ),
    (lambda: start(reward=None), af.errors.SettingsError, "agent must have a reward to learn from, got none"),
    (lambda: start(agent=small(fresh())), af.errors.SettingsError, "must sample from the policy that is trained"),
    (lambda: start(sampling=af.Sampling(temperature=0)), af.errors.SettingsError, "temperature"),
    (lambda: start(agent=scripted(["5"])), af.errors.EngineError, "has no weights to update; train with LocalEngine"),
    (
        lambda: start(config=made(difficulty="masks")),
        af.errors.SettingsError,
        "got None from 'masks'",
    ),
    (
        lambda: start(config=made(difficulty=lambda task: None)),
        af.errors.SettingsError,
        "difficulty must give a number, got None from 'a function'",
    ),
    (
        lambda: start(config=made(difficulty="answer")),
        af.errors.SettingsError,
        "difficulty must give a number, got '",
    ),
    (lambda: distilled(teacher=None), af.errors.SettingsError, "above 0, and vice versa"),
    (lambda: start(teacher=fresh()), af.errors.SettingsError, "above 0, and vice versa"),
    (
        lambda: distilled(teacher=af.tiny.policy("lookup")),
        af.errors.SettingsError,
        "teacher must have the vocabulary of the policy",
    ),
    (
        lambda: distilled(teacher=random_policy()),
        af.errors.SettingsError,
        "must have a context of at least 512 tokens",
    ),
    (own_teacher, af.errors.SettingsError, "teacher must not be the policy that is trained"),
    (lambda: tracked("wandb"), af.errors.SettingsError, "a tracker must be a function of "),
    (lambda: tracked(lambda: None), af.errors.SettingsError, "a tracker must be a function of "),
    (lambda: tracked(print, print), af.errors.SettingsError, "trackers must be different objects, got "),
    (lambda: tracked(print).track(print), af.errors.SettingsError, " twice"),
    (tracked_late, af.errors.SettingsError, "before the run is awaited"),
    (lambda: af.Policy.load("none", torch_dtype="float32"), af.errors.SettingsError, "must be passed as dtype="),
    (
        lambda: af.Policy.load("none", device="cpu", device_map="auto"),
        af.errors.SettingsError,
        "None if device_map is given",
    ),
)
