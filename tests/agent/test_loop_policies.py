"""Settings of the agent loop: nudges, texts of exceptions, a sliding window, and summaries of a full context."""

from typing import Any

import pytest
from agents import Played, agent, calculator, call, chat, exact, played, shipped, tasks

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "What is 1+1?"},), {"answer": "2"})


# --- nudges


async def one(a: af.Agent) -> Any:
    return (await a.rollout([TASK])).trajectories[0]


async def test_a_nudge_continues_the_chain_after_an_action_without_a_call() -> None:
    a = played(["let me think", call("1+1"), "2"], nudge="Call the tool.")
    t = await one(a)
    assert [(turn.kind, turn.author) for turn in t.turns[1:]] == [
        ("action", "policy"),
        ("observation", "nudge"),
        ("action", "policy"),
        ("observation", "tool"),
        ("action", "policy"),
    ]
    assert (t.stop, t.final, t.reward) == ("answered", "2", 1.0)
    assert t.turns[2].messages == ({"role": "user", "content": "Call the tool."},)
    assert list(t.ids) == [*a.engine.given[-1], *a.engine.gave[-1]]
    assert not t.action_mask[t.turn_index == 2].any()
    assert (await one(a.replace(nudge=None))).final == "let me think"


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_nudge_that_never_helps_ends_with_the_answer(limit: int) -> None:
    t = await one(played(["no"] * 9, nudge="Call the tool.", max_nudges=limit, max_turns=9))
    assert (t.stop, len(t.actions), t.final) == ("answered", limit + 1, "no")
    within = await one(played(["no"] * 9, nudge="Call the tool.", max_nudges=9, max_turns=limit))
    assert (within.stop, len(within.actions)) == ("answered", limit)


async def test_a_nudge_applies_in_steps_and_to_an_appended_sample() -> None:
    a = played(["hm", call("1+1"), "2"], nudge="Call the tool.")
    chain = a.chain(TASK)
    assert (await chain.step()).kind == "action"
    assert chain.turn.author == "nudge"
    other = a.chain(TASK)
    (sample,) = (await other.sample_turns(1)).trajectories
    other.append_sample(sample)
    assert other.ids == chain.ids


# --- exceptions


@af.tool
def divide(expression: str) -> float:
    """Divide 1 by a number.

    Args:
        expression: the number.
    """
    return 1 / float(expression)


@pytest.mark.parametrize(
    ("shown", "text"), [(False, "divide failed."), (True, "divide failed: ZeroDivisionError: float division by zero")]
)
async def test_the_text_of_an_exception_is_shown_on_request(shown: bool, text: str) -> None:
    t = await one(played([call("0", name="divide"), "2"], tools=[calculator, divide], show_exceptions=shown))
    assert t.tool_calls[0].result.observation == text
    assert text in chat().text(t.ids.tolist())
    assert t.tool_calls[0].result.error.type == "ZeroDivisionError"


# --- sliding window


async def test_a_window_makes_each_step_a_row() -> None:
    a = played([call("1+1"), call("2+2"), call("3+3"), "2"], before_turn=af.hooks.sliding_window(1))
    t = await one(a)
    assert (t.reward, t.error, len(t.rows)) == (1.0, None, 4)
    assert [row.turns[0].author for row in t.rows] == ["task", "window", "window", "window"]
    shown = chat().text(t.rows[3].ids.tolist())
    assert "3+3" in shown
    assert "2+2" not in shown
    assert "What is 1+1?" in shown
    assert af.collate(t, [1.0]).mask.sum() == sum(int(row.action_mask.sum()) for row in t.rows)
    wide = await one(a.replace(before_turn=af.hooks.sliding_window(2)))
    assert "2+2" in chat().text(wide.rows[3].ids.tolist())
    none = await one(a.replace(before_turn=af.hooks.sliding_window(0)))
    assert "3+3" not in chat().text(none.rows[3].ids.tolist())
    assert "\n6<" in chat().text(none.rows[3].ids.tolist())


# --- penalties


async def test_a_penalty_for_invalid_calls_is_a_reward_with_a_negative_weight() -> None:
    """The recipe of docs/conventions.md. A call that is valid but whose tool fails costs nothing."""
    names = ("calculator", "failing")

    @af.reward(weight=-0.25)
    def invalid_calls(trajectory: Any) -> float:
        return sum(call.error is not None or call.name not in names for call in trajectory.tool_calls)

    @af.tool
    def failing(expression: str) -> str:
        """Fail.

        Args:
            expression: anything.
        """
        raise af.ToolError("no")

    script = [call("1+1", "unknown"), "<tool_call>{oops</tool_call>", call("1", "failing"), call("1+1"), "2"]
    a = played(script, tools=[calculator, failing], reward=[exact, invalid_calls], max_turns=9)
    t = await one(a)
    assert (t.reward, t.metrics["exact"], t.metrics["invalid_calls"]) == (0.5, 1.0, 2.0)
    assert (await one(played(script[2:], tools=[calculator, failing], reward=a.reward, max_turns=9))).reward == 1.0


# --- summaries


async def summarized(script: list[str], max_length: int, **options: Any) -> tuple[Any, Played]:
    options.setdefault("tokens", 24)
    a = played(script, max_length=max_length, on_context_full=af.hooks.summarize("Sum up.", **options), max_turns=9)
    return await one(a.replace(sampling=a.sampling.replace(max_tokens=24))), a.engine


async def test_a_full_context_is_summarized_by_the_policy() -> None:
    room = len(played([]).chain(TASK).ids) + 4 * len(chat().encode(call("1+1"))) + 24
    script = [call("1+1"), call("1+1"), call("1+1"), call("1+1")]
    for n in range(1, 4):
        t, _ = await summarized([*script[:n], "found 2", "2", "2"], room)
        if len(t.rows) > 1:
            break
    assert (t.stop, t.reward, len(t.rows)) == ("answered", 1.0, 3)
    question, rest = (chat().text(row.ids.tolist()) for row in t.rows[1:])
    assert "Sum up." in question
    assert question.endswith("found 2<|im_end|>")
    assert "found 2" in rest
    assert "Sum up." not in rest
    assert max(map(len, t.rows)) <= room
    assert int(t.rows[1].action_mask.sum()) == len(chat().encode("found 2")) + 1  # the summary is trained


async def test_a_context_without_room_for_a_summary_ends_the_chain() -> None:
    room = len(played([]).chain(TASK).ids) + 3 * len(chat().encode(call("1+1")))
    t, _ = await summarized([call("1+1")] * 8, room, tokens=400)
    assert (t.stop, t.reward) == ("context_full", 0.0)
    t, _ = await summarized([call("1+1")] * 8, room, rows=1)
    assert t.stop == "context_full"


async def test_hooks_work_with_a_policy() -> None:
    a = agent(before_turn=af.hooks.sliding_window(1), nudge="Use the tool.", max_turns=3)
    rollout = await a.rollout(tasks(3), 2)
    assert all(t.error is None for t in rollout)
    batch = af.collate(rollout, [1.0] * 6)
    scored = shipped().score(batch, {"logprob"})["logprob"]
    assert float((scored - batch.logprobs)[batch.mask].abs().max()) < 1e-4
    assert isinstance(a.chain(tasks(1)[0]), af.Chain)
