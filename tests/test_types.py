"""Records: rejected values, and the per-token views of a trajectory."""

import dataclasses
import math
import re
from typing import Any

import errors
import numpy as np
import pytest

import agentfly_kit as af
from agentfly_kit.errors import AlignmentError, EngineError, SettingsError, TaskError

TASK = af.Task("t", ({"role": "user", "content": "2+3"},), {"answer": "5"})


def prompt(*ids: int) -> af.Turn:
    return af.Turn("prompt", "task", ids, messages=TASK.messages)


def action(ids: tuple[int, ...], parent: af.Turn | None = None, **more: Any) -> af.Turn:
    more.setdefault("messages", ({"role": "assistant", "content": "5"},))
    return af.Turn(
        "action", "policy", ids, sampled=True, logprobs=tuple(-float(i) for i in ids),
        entropies=tuple(i / 2 for i in ids), versions=(3,) * len(ids), parent=parent, **more,
    )  # fmt: skip


def trajectory(*turns: af.Turn, **more: Any) -> af.Trajectory:
    more.setdefault("stop", "answered")
    return af.Trajectory("g/0", TASK, "g", 0, turns, **more)


# --- rejected values ---


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: af.Task("", TASK.messages), TaskError, "non-empty string, got ''"),
        (lambda: af.Task(3, TASK.messages), TaskError, "got 3"),  # type: ignore[arg-type]
        (lambda: af.Task("x", ()), TaskError, "task 'x' must have at least one message"),
        (lambda: af.Task("x", ({"role": "user"},)), TaskError, r"task 'x': message 0 \(role 'user'\): 'content' must"),
        (lambda: af.Task("x", ("hi",)), TaskError, "message 0"),  # type: ignore[arg-type]
        (lambda: af.Sample((1, 2), (-1.0,), None, "stop", None), AlignmentError, r"must .* per id \(2\), got 1"),
        (lambda: af.Turn("action", "a", (1,), sampled=True, logprobs=(-1.0,)), AlignmentError, "a policy version"),
        (lambda: af.Turn("action", "a", None, sampled=True), AlignmentError, "must have ids"),
        *(
            (lambda name=name: af.Turn("action", "a", (1, 2), **{name: (0,)}), AlignmentError, rf"{name} must .* got 1")
            for name in ("logprobs", "entropies", "kept_mass", "versions", "token_texts")
        ),
        *(
            (lambda options=options: af.Sampling(**options), SettingsError, next(iter(options)))
            for options in (
                {"temperature": -0.1}, {"temperature": math.inf}, {"temperature": math.nan}, {"max_tokens": 0},
                {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1.5}, {"top_p": math.nan}, {"stop": ""},
                {"stop": ("a", "")},
            )
        ),
        (lambda: af.TrainConfig(lr=True), SettingsError, r"^lr must be a finite number above 0, got True$"),
        (lambda: af.PPOConfig(checkpointing=1), SettingsError, r"^checkpointing must be True or False, got 1$"),  # type: ignore[arg-type]
        (lambda: af.PPOConfig(minibatch=2.5), SettingsError, r"^minibatch must be an integer .* or None, got 2\.5$"),  # type: ignore[arg-type]
        (lambda: af.TrainConfig(clip=-0.1), SettingsError, "clip must be a finite number of at least 0 or None"),
        (lambda: af.TrainConfig(dual_clip=0.5), SettingsError, "dual_clip must be a finite number above 1 or None"),
        (lambda: af.TrainConfig(max_grad_norm=0), SettingsError, "max_grad_norm must be a finite number above 0"),
        (lambda: af.TrainConfig(correction="tokens"), SettingsError, "correction='tokens': level must be one of"),
        (lambda: af.TrainConfig(correction={"caps": 2.0}), SettingsError, "correction={'caps': 2.0}: .* 'caps'"),
    ],
)  # fmt: skip
def test_values_that_are_rejected(make: Any, error: type[Exception], says: str) -> None:
    errors.check(make, error, re.compile(says))


def test_sampling_settings() -> None:
    assert af.Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert af.Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert not af.Sampling().truncates and af.Sampling(temperature=0).greedy
    assert all(s.truncates for s in (af.Sampling(top_p=0.9), af.Sampling(top_k=5), af.Sampling(min_p=0.1)))
    # Numbers of numpy are accepted.
    assert af.Budget(tokens=np.int64(3)).tokens == 3 and af.TrainConfig(lr=np.float32(1e-3), lr_end=0).lr_end == 0


# --- per token ---


def test_token_views_are_nan_where_nothing_was_sampled() -> None:
    first = prompt(7, 8)
    a = action((1, 2), first)
    seen = af.Turn("observation", "tool", (9,), parent=a)
    forced = af.Turn("forced", "person", (4,), parent=seen)
    b = action((5,), forced)
    t = trajectory(first, a, seen, forced, b)
    assert t.ids.tolist() == [7, 8, 1, 2, 9, 4, 5]
    assert t.action_mask.tolist() == [False, False, True, True, False, False, True]
    assert (t.turn_index.tolist(), t.versions.tolist()) == ([0, 0, 1, 1, 2, 3, 4], [-1, -1, 3, 3, -1, -1, 3])
    for values, wanted in ((t.logprobs, [-1, -2, -5]), (t.entropies, [0.5, 1, 2.5])):
        assert np.isnan(values[~t.action_mask]).all()
        assert values[t.action_mask].tolist() == wanted
    assert t.token_texts == ("[7]", "[8]", "[1]", "[2]", "[9]", "[4]", "[5]")
    assert not t.ids.flags.writeable
    assert t.turns[-1].path == t.turns
    forced = af.Turn("forced", "hook", (4,), logprobs=(-1.0,), versions=(0,), parent=first)
    assert np.isnan(trajectory(first, forced).logprobs).all(), "logprobs of tokens that were not sampled"


def test_a_text_only_trajectory_has_no_token_views() -> None:
    t = trajectory(
        prompt(1), af.Turn("action", "policy", None, text="5", messages=({"role": "assistant", "content": "5"},))
    )
    assert not t.exact and t.final == "5"
    for name in ("ids", "action_mask", "logprobs", "entropies", "versions", "token_texts", "turn_index"):
        errors.check(
            lambda: getattr(t, name), AlignmentError, "'g/0' has no token ids, because its engine is text-only"
        )
    assert "no ids" in repr(t) and "–" in t._repr_html_()


# --- stop reasons and errors ---


@pytest.mark.parametrize(
    ("stop", "final"),
    [
        ("answered", "5"), ("env_done", "5"), ("tool_stopped", "5"), ("max_turns", None), ("cancelled", None),
        ("error", None),
    ],
)  # fmt: skip
def test_there_is_a_final_answer_only_after_an_answer(stop: str, final: str | None) -> None:
    assert trajectory(prompt(1), action((5,)), stop=stop).final == final
    calls = [{"id": "call-0", "type": "function", "function": {"name": "c", "arguments": {}}}]
    calling = action((5,), messages=({"role": "assistant", "content": "let me see", "tool_calls": calls},))
    assert trajectory(prompt(1), calling, stop=stop).final is None


@pytest.mark.parametrize(
    ("reward", "metrics", "success"),
    [
        (None, {}, None), (1.0, {}, True), (0.9, {}, False), (2.0, {"success": 0.0}, False),
        (0.0, {"success": 1.0}, True),
    ],
)  # fmt: skip
def test_success(reward: float | None, metrics: dict[str, float], success: bool | None) -> None:
    assert trajectory(prompt(1), reward=reward, metrics=metrics).success is success


@pytest.mark.parametrize(
    ("actions", "more", "said"),
    [
        (1, {"reward": 1.0, "metrics": {"exact": 1.0}}, "answered '5'. Reward 1."),
        (1, {"reward": 1.0, "metrics": {"a": 1.0, "b": 0.0, "success": 1.0}}, "answered '5'. Reward 1 (a 1, b 0)."),
        (1, {"reward": 0.5, "metrics": {"success": 1.0}}, "answered '5'. Reward 0.5 (success 1)."),
        (1, {"reward": 1.0, "metrics": {"reward": 1.0, "a": 0.0}}, "answered '5'. Reward 1 (a 0)."),
        (1, {"reward": 1.0, "stop": "env_done"}, "was ended by its environment. Reward 1."),
        (1, {"reward": 0.0}, "answered '5'. Reward 0. The task's answer is '5'."),
        (
            1,
            {"reward": 0.0, "stop": "turn_tokens"},
            "was stopped by turn_tokens, without an answer.\nReward 0. The task's answer is '5'.",
        ),
        (
            0,
            {"stop": "error", "error": af.Failure("pool", "PoolTimeout", "none free")},
            "failed: pool: PoolTimeout: none free. Unscored.",
        ),
        (
            1,
            {"error": af.Failure("reward exact", "KeyError", "'x'")},
            "answered '5'. Unscored: reward exact: KeyError: 'x'.",
        ),
    ],
)
def test_explain_gives_the_reason(actions: int, more: dict[str, Any], said: str) -> None:
    counted = "1 action" if actions else "0 actions"
    assert trajectory(prompt(1), *[action((5,))] * actions, **more).explain() == f"{counted}, then the chain {said}"


def test_a_failure_is_text() -> None:
    errors.check(af.ToolCall("c", "f", {}).rerun, EngineError, "await tool.try_")
    try:
        raise ValueError("lost")
    except ValueError as error:
        failure = af.Failure.from_exception("tool f", error)
    assert str(failure) == "tool f: ValueError: lost" and 'raise ValueError("lost")' in failure.traceback


def test_stats_give_only_numbers() -> None:
    stats = af.Stats(
        loss=1.0, policy_loss=1.0, approx_kl=0.1, clip_fraction=0.0, entropy=2.0, grad_norm=1.0, detail={}
    )
    numbers = stats.scalars()
    assert numbers["loss"] == 1.0
    assert not {"value_loss", "detail", "phases"} & set(numbers)
    assert all(isinstance(v, bool | int | float) for v in numbers.values())


@pytest.mark.parametrize("settings", [af.TrainConfig, af.PPOConfig, af.Sampling, af.Branch, af.Budget])
@pytest.mark.parametrize("wrong", ["0.1", [1], math.nan, object()], ids=["text", "list", "nan", "object"])
def test_settings_of_the_wrong_type_are_rejected(settings: Any, wrong: Any) -> None:
    for field in dataclasses.fields(settings):
        if {"str", "Any"} & set(re.findall(r"\w+", str(field.type))) and isinstance(wrong, str | list):
            continue  # this field takes text
        errors.check(lambda: settings(**{field.name: wrong}), SettingsError, re.compile(field.name))
