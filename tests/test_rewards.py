"""Rewards: injected arguments, return values, and failures, which leave only the failing chain unscored."""

import asyncio
import dataclasses
import decimal
import fractions
import math
import re
import sys
import threading
from typing import Any

import errors
import numpy as np
import pytest
import torch
import waiting
from agents import Box, TextOnly, agent

import agentfly_kit as af
from agentfly_kit.rewards import RewardSet

TASK = af.Task("t", ({"role": "user", "content": "2+3"},), {"answer": "5", "tags": ["sum"]})


def said(text: str, *calls: af.ToolCall) -> af.Turn:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [{"name": c.name} for c in calls]
    return af.Turn("action", "policy", None, text=text, messages=(message,), tool_calls=calls)


CALL = af.ToolCall("call-0", "calculator", {"expression": "2+3"})
RESULT = af.ToolCall("call-0", "calculator", {"expression": "2+3"}, result=af.ToolResult(True, "5"))
OBSERVED = af.Turn(
    "observation", "tool", None, text="5", messages=({"role": "tool", "content": "5"},), tool_calls=(RESULT,)
)
PROMPT = af.Turn("prompt", "task", None, text="2+3", messages=TASK.messages)
ANSWERED = af.Trajectory("x", TASK, "g", 0, (PROMPT, said("", CALL), OBSERVED, said("5")), "answered")
CUT = af.Trajectory("y", TASK, "g", 1, (PROMPT, said("", CALL), OBSERVED), "max_turns")


@af.reward
def exact(final: str | None, answer: str) -> float:
    """1 for the right answer."""
    return float(final == answer)


async def score(function: Any, trajectory: af.Trajectory = ANSWERED, **options: Any) -> af.Score:
    made = function if isinstance(function, af.Reward) else af.reward(**options)(function)
    return await made.score(trajectory, af.Context(trajectory.task))


# --- injection -----------------------------------------------------------------------------------


async def test_injection_by_name() -> None:
    seen: list[Any] = []

    @af.reward
    def look(final, trajectory, context, answer, tags, missing="default"):  # type: ignore[no-untyped-def]
        seen.extend((final, trajectory, context, answer, list(tags), missing))
        return len(tags)

    context = af.Context(TASK)
    context.fields["tags"].append("cheat")  # what a tool changes does not reach the reward
    assert (await look.score(ANSWERED, context)).reward == 1
    assert seen == ["5", ANSWERED, context, "5", ["sum"], "default"]

    def field(final: af.FromTask[str]) -> bool:
        return final == "field"

    task = af.Task("t", TASK.messages, {"final": "field"})
    assert (await score(field, ANSWERED.replace(task=task))).reward == 1.0
    # `final` is None without an answer, even if the last observation contains the correct number.
    result = await exact.try_(CUT)
    assert (result.arguments["final"], result.reward) == (None, 0.0)
    assert (await exact.try_(ANSWERED)).reward == 1.0


async def test_a_turn_reward_sees_the_turn_and_its_observation() -> None:
    seen = []

    @af.reward(per="turn")
    def each(turn: af.Turn, observation: af.Turn | None) -> float:
        seen.append((turn, observation))
        return float(observation is not None)

    got = await RewardSet([each]).score(ANSWERED, af.Context(TASK))
    assert {(t.text, o and o.text) for t, o in seen} == {("", "5"), ("5", None)}
    assert got.turn_rewards == {1: 1.0, 3: 0.0}
    assert (got.reward, got.metrics) == (0.0, {"each": 1.0})
    assert (await each.try_(ANSWERED)).reward == 0.0  # by default, the last action is scored
    assert (await each.try_(ANSWERED, turn=1)).reward == 1.0
    await errors.check(lambda: each.try_(ANSWERED, turn=0), af.errors.RewardError, "turn must be an action")


@af.reward
async def wrote(sandbox: Box, answer: str) -> float:
    return float((await sandbox.run("end")).startswith(answer))


async def test_the_reward_reads_the_sandbox_that_the_chain_used() -> None:
    async with af.Pool(Box, size=2) as pool:
        context = af.Context(TASK, pools=[pool])
        box = await context.sandbox(Box)
        await box.run("5")
        assert (await wrote.score(ANSWERED, context)).reward == 1.0
        assert box.alive
        await context.close()
        assert wrote.sandbox_types == (Box,)
        assert (await wrote.try_(ANSWERED, pool=pool)).reward == 0.0  # uses a fresh sandbox
        assert pool.snapshot().leased == 0
    assert (await wrote.try_(ANSWERED)).reward == 0.0
    result = await wrote.score(ANSWERED, af.Context(TASK))
    assert result.reward is None and "Agent(pools=[af.Pool(Box)])" in str(result.error)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            (value, af.Score(number, {"f": number}, name="f"))
            for value, number in (
                (1, 1.0), (0.25, 0.25), (-3, -3.0), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5),
                (np.int64(2), 2.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (np.array([0.5]), 0.5),
                (fractions.Fraction(1, 2), 0.5), (decimal.Decimal("0.5"), 0.5), ({"reward": 1}, 1.0),
                ({"reward": np.float64(0.5)}, 0.5), (torch.tensor([0.5], requires_grad=True), 0.5),
            )
        ),
        (None, af.Score(None, name="f")),  # unscored, without a failure
        (
            {"reward": None, "length": 3, "left_out": None, "note": "short"},
            af.Score(None, {"length": 3.0}, extras={"note": "short"}, name="f"),
        ),
    ],
)  # fmt: skip
async def test_values(value: Any, expected: af.Score) -> None:
    result = await score(lambda: value, name="f")
    assert result == expected and type(result.reward) is type(expected.reward)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "'reward' must be finite, or None for unscored, got nan"),
        (math.inf, "'reward' must be finite"),
        (np.float32("nan"), "'reward' must be finite"),
        ("1.0", "'reward' must be a number, True or False, or None (unscored), got '1.0', a str"),
        ([1.0], "a list"),
        (1j, "a complex"),
        (np.array([1.0, 2.0]), "a ndarray"),
        ({"score": 1.0}, "must return a dict with the key 'reward', got score"),
        ({"reward": "yes"}, "got 'yes', a str"),
        ({"reward": 1.0, "f1": math.nan}, "'f1' must be finite"),
    ],
)
async def test_an_invalid_value_is_a_failure(value: Any, words: str) -> None:
    result = await score(lambda: value, name="f")
    assert (result.reward, result.metrics) == (None, {})
    assert (result.error.where, result.error.type) == ("reward f", "RewardError")
    assert words in result.error.message


# --- failures ------------------------------------------------------------------------------------


def raises(final: str) -> float:
    raise ZeroDivisionError("oh")


def exits(final: str) -> float:
    sys.exit(1)


async def raises_later(final: str) -> float:
    await asyncio.sleep(0)
    raise ZeroDivisionError("oh")


async def test_exceptions_leave_the_chain_unscored_and_keep_the_metrics_of_other_rewards() -> None:
    for function, kind in ((raises, "ZeroDivisionError"), (exits, "SystemExit")):
        error = (await score(function)).error
        assert error is not None and (error.where, error.type) == (f"reward {function.__name__}", kind)
        assert f"in {function.__name__}" in error.traceback and "function.py" not in error.traceback
    barrier = threading.Barrier(2, timeout=waiting.GUARD)  # the rewards run concurrently

    def meet() -> int:
        return barrier.wait() >= 0

    rewards = [exact, raises, raises_later, af.reward(name="a")(meet), af.reward(name="b")(meet)]
    got = await RewardSet(rewards).score(ANSWERED, af.Context(TASK))
    assert (got.reward, got.metrics) == (None, {"exact": 1.0, "a": 1.0, "b": 1.0})
    assert got.error.where == "reward raises"  # the first by order of the rewards, not by time


async def test_a_timeout_leaves_the_chain_unscored() -> None:
    release, called = threading.Event(), []

    @af.reward(timeout=0.5)  # the call must begin before
    def slow() -> float:
        called.append(1)
        release.wait(10)
        return 1.0

    for stop in ("error", "cancelled"):  # chains that failed are not scored
        assert await RewardSet([slow]).score(ANSWERED.replace(stop=stop), af.Context(TASK)) == af.Score(None)
    assert called == []
    result = await slow.try_(ANSWERED)
    release.set()
    assert (result.reward, result.error.type, result.error.where) == (None, "TimeoutError", "reward slow")
    assert "took longer than 0.5 s and was abandoned" in result.error.message


# --- composition ---------------------------------------------------------------------------------


@af.reward(weight=0.5)
def short(final: str | None) -> dict[str, Any]:
    return {"reward": len(final or "") < 3, "length": len(final or ""), "text": final}


async def test_the_sum_is_weighted_and_each_value_is_a_metric() -> None:
    got = await RewardSet([exact, short]).score(ANSWERED, af.Context(TASK))
    assert (got.reward, got.extras) == (1.5, {"text": "5"})
    assert got.metrics == {"exact": 1.0, "short": 1.0, "length": 1.0}
    assert repr(RewardSet([exact, short])) == "<RewardSet 1 exact + 0.5 short>"
    # Equal names of metrics are prefixed.
    twin = af.reward(name="b", weight=0)(short.function)
    got = await RewardSet([short, twin]).score(ANSWERED, af.Context(TASK))
    assert got.metrics == {"short": 1.0, "b": 1.0, "short/length": 1.0, "b/length": 1.0}


async def test_one_unscored_leaves_the_sum_unscored_unless_its_weight_is_zero() -> None:
    @af.reward
    def unknown() -> None:
        return None

    got = await RewardSet([exact, unknown]).score(ANSWERED, af.Context(TASK))
    assert (got.reward, got.metrics, got.error) == (None, {"exact": 1.0}, None)
    watched = [exact, af.reward(weight=0)(unknown.function), af.reward(weight=0)(raises)]
    got = await RewardSet(watched).score(ANSWERED, af.Context(TASK))
    assert got.reward == 1.0
    assert got.error is not None  # reported even with weight 0


async def test_turn_rewards_are_summed_per_turn() -> None:
    @af.reward(per="turn", weight=0.1)
    def calls(turn: af.Turn) -> int:
        return len(turn.tool_calls)

    @af.reward(per="turn", weight=2.0)
    def only_first(turn: af.Turn, observation: af.Turn | None) -> float | None:
        return 1.0 if observation else None

    got = await RewardSet([exact, calls, only_first]).score(ANSWERED, af.Context(TASK))
    assert (got.reward, got.turn_rewards) == (1.0, {1: pytest.approx(2.1), 3: 0.0})
    assert got.metrics == {"exact": 1.0, "calls": 1.0, "only_first": 1.0}

    @af.reward(per="turn")
    def breaks(turn: af.Turn) -> float:
        return 1.0 / len(turn.tool_calls)

    got = await RewardSet([exact, breaks]).score(ANSWERED, af.Context(TASK))
    assert (got.reward, got.turn_rewards) == (None, {})
    assert got.error is not None


async def test_a_set_of_one_or_several_rewards() -> None:
    assert await RewardSet(None).score(ANSWERED, af.Context(TASK)) == af.Score(None)
    whole = RewardSet([exact, raises])
    assert (RewardSet(exact).names, whole.names) == (("exact",), ("exact", "raises"))
    assert list(RewardSet(whole)) == list(whole) and whole["exact"] is exact
    errors.check(
        lambda: RewardSet([exact, exact]), af.errors.RewardError, "names of rewards must be unique, got 'exact' twice"
    )


async def test_the_overlong_penalty_falls_linearly_over_the_last_tokens() -> None:
    penalty = af.overlong_penalty(10, 4)
    for tokens, wanted in {1: 0.0, 6: 0.0, 7: -0.25, 9: -0.75, 10: -1.0, 12: -1.0}.items():
        turns = [af.Turn("prompt", "task", (1,) * 9), af.Turn("action", "policy", (1,) * (tokens - 1)), said("x")]
        chain = ANSWERED.replace(turns=tuple(dataclasses.replace(turn, ids=turn.ids or (1,)) for turn in turns))
        assert (await penalty.try_(chain)).reward == wanted
    assert "counts tokens" in str((await penalty.try_(ANSWERED)).error)
    text_only = agent(engine=TextOnly(["5"]), reward=[penalty])
    errors.check(
        lambda: text_only.rollout([TASK]), af.errors.SettingsError, "'overlong_penalty' requires an engine with"
    )
    for buffer, words in ((5, "of at least 1 and at most 4, got 5"), (0, "buffer must be an integer of at least 1")):
        errors.check(lambda: af.overlong_penalty(4, buffer), af.errors.SettingsError, words)


def test_a_missing_task_field_is_rejected() -> None:
    wrong = af.Task("w", TASK.messages, {"anwser": "5", "level": 2})
    errors.check(
        lambda: RewardSet([exact]).check([TASK, wrong]),
        af.errors.TaskError,
        re.compile(
            r"^reward exact requires the field 'answer', which task 'w' does not have \(its fields: anwser, level; "
            r"also available: final, trajectory, context\); did you mean 'anwser'\?; rename the parameter or give it a "
            r"default$"
        ),
    )
    RewardSet([exact]).check([TASK])

    @af.reward
    def turned(turn: af.Turn) -> int:  # `turn` is only available with per="turn"
        return 1

    errors.check(lambda: turned.check([TASK]), af.errors.TaskError, "requires the field 'turn'")


# --- calling and display -------------------------------------------------------------------------


async def test_a_reward_is_callable_as_its_function() -> None:
    assert (exact("5", "5"), exact(None, answer="5"), await wrote(Box(), "end")) == (1.0, 0.0, 1.0)
    assert exact.__doc__ == "1 for the right answer."
    assert (repr(exact), repr(short)) == ("<Reward exact(final, answer)>", "<Reward short(final), weight 0.5>")


async def test_try_shows_the_score_and_all_arguments() -> None:
    result = await short.try_(ANSWERED)
    assert result.reward == 1.0  # unweighted
    assert repr(result) == "short: 1\n  final = '5'\n  -> length 1\n  -> text '5'"
    page = result._repr_html_()
    assert ">final</td>" in page and "&#x27;5&#x27;" in page
    failed = await af.reward(raises).try_(ANSWERED)
    assert repr(failed) == "raises: unscored\n  final = '5'\n  reward raises: ZeroDivisionError: oh"
    assert "raise ZeroDivisionError" in failed._repr_html_()
    assert " at 0x" not in repr(await exact.try_(CUT))


def vague(sandbox) -> float:  # type: ignore[no-untyped-def]
    return 0.0


class Judge:
    def judge(self, final: str) -> float:
        return 0.0


test_invalid_rewards_are_rejected_when_decorated = errors.rejected(
    (lambda: af.reward(vague), af.errors.RewardError,
     "vague: parameter 'sandbox' must have a type, for example sandbox: af.PythonSandbox"),
    (lambda: af.reward(Judge.judge), af.errors.RewardError, "judge: a reward must not be an unbound method"),
)  # fmt: skip


def test_a_fingerprint_includes_the_settings() -> None:
    settings: list[dict[str, Any]] = [{}, {"weight": 2}, {"per": "turn"}, {"timeout": 9}, {"name": "other"}]
    assert len({af.reward(**options)(raises).fingerprint for options in settings}) == 5
    assert af.reward(raises).fingerprint == af.reward(raises).fingerprint
    # The same function with other settings is not a redefinition.
    assert RewardSet(af.reward(weight=0.5)(exact.function)).redefined() == ()
