"""Settings of the agent loop: nudges, users, texts of exceptions, a sliding window, summaries of a full context."""

import asyncio
from typing import Any

import errors
import pytest
from agents import agent, calculator, call, chat, exact, played, shipped, tasks

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
    finals = [(await one(a.replace(**other))).final for other in ({"nudge": None}, {"name": "nudge"})]
    assert finals == ["let me think", "2"]


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_nudge_that_never_helps_ends_with_the_answer(limit: int) -> None:
    t = await one(played(["no"] * 9, nudge="Call the tool.", max_nudges=limit, max_turns=9))
    assert (t.stop, len(t.actions), t.final) == ("answered", limit + 1, "no")
    within = await one(played(["no"] * 9, nudge="Call the tool.", max_nudges=9, max_turns=limit))
    assert (within.stop, len(within.actions)) == ("answered", limit)


async def test_a_nudge_applies_in_steps_and_to_an_appended_sample() -> None:
    a = played(["hm", call("1+1"), "2"], nudge="Call the tool.")
    chain = a.chain(TASK)
    assert ((await chain.step()).kind, chain.turn.author) == ("action", "nudge")
    other = a.chain(TASK)
    (sample,) = (await other.sample_turns(1)).trajectories
    other.append_sample(sample)
    assert other.ids == chain.ids


# --- users


async def test_a_user_replies_to_texts_until_it_has_nothing_to_say() -> None:
    heard: list[str] = []

    async def user(chain: Any) -> str | None:
        heard.append(chain.turn.messages[0]["content"])
        return {"Which sum?": "1+1, please", "2": "Thanks."}.get(heard[-1])

    a = played(["Which sum?", call("1+1"), "2", "Bye."], user=user, max_turns=5)
    t = await one(a)
    assert [turn.author for turn in t.turns[1:]] == ["policy", "user", "policy", "tool", "policy", "user", "policy"]
    assert heard == ["Which sum?", "2", "Bye."] and (t.stop, t.final) == ("answered", "Bye.")
    assert t.turns[2].messages == ({"role": "user", "content": "1+1, please"},)
    assert list(t.ids) == [*a.engine.given[-1], *a.engine.gave[-1]]
    assert not any(t.action_mask[t.turn_index == i].any() for i in (2, 6))
    limited = await one(a.replace(max_turns=3))  # no reply to the action at the limit
    assert (limited.stop, limited.final, heard[3:]) == ("answered", "2", ["Which sum?"])


async def test_a_person_replies_in_place_of_the_user_in_steps() -> None:
    replies = iter(["1+1", None])
    a = played(["Which sum?", "2", "3"], user=lambda chain: next(replies))
    chain = a.chain(TASK)
    await chain.sample()
    assert (chain.stop, chain.user_due) == (None, True)
    for early in (chain.sample, chain.step):
        await errors.check(early, af.errors.SettingsError, "the user has not replied yet")
    errors.check(lambda: chain.force("2"), af.errors.SettingsError, "the last action is complete")
    twin = await chain.fork()
    chain.observe("2-1")
    assert (chain.turn.author, chain.user_due, twin.user_due) == ("person", False, True)
    assert (await twin.ask_user()).messages[0]["content"] == "1+1"
    assert (await twin.step()).messages[0]["content"] == "2" and twin.stop == "answered"
    assert twin.rewind(3).kind == "action" and twin.user_due
    chain.rewind(2)
    chain.force("What?")
    assert chain.user_due


@pytest.mark.parametrize(("reply", "error"), [(3, "SettingsError"), (KeyError("no reply"), "KeyError")])
async def test_a_user_that_fails_leaves_the_chain_unscored(reply: Any, error: str) -> None:
    def user(chain: Any) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    t = await one(played(["2"], user=user))
    assert (t.stop, t.reward, t.error.type) == ("error", None, error)


async def test_the_time_limit_of_a_chain_includes_its_user() -> None:
    t = await one(played(["2"], user=lambda chain: asyncio.Event().wait(), timeout=0.01))
    assert (t.stop, t.final) == ("timeout", None)


async def test_a_simulated_user_sees_the_conversation_with_exchanged_roles() -> None:
    seen: list[Any] = []

    def script(task: af.Task, turn: int) -> str:
        seen.append(task.messages)
        return ["It is 1+1.", "Thank you. ###STOP###"][turn]

    wishes = lambda task: f"You want to know {task.fields['answer']}."  # noqa: E731
    user = af.hooks.simulated_user(af.ScriptedEngine(script), wishes)
    says = ["Which sum?", call("1+1"), "2"]
    await one(played(says, user=user, before_turn=af.hooks.sliding_window(1)))  # its prompts repeat earlier turns
    windowed, seen[:] = seen[:], []
    t = await one(played(says, user=user))
    assert seen == windowed
    assert (t.stop, t.final, len(t.turns)) == ("answered", "2", 6)
    assert seen[0][0]["content"].endswith("write ###STOP###\n\nYou want to know 2.")
    assert [(m["role"], m["content"]) for m in seen[1][1:]] == [
        ("user", "Hello! How can I help you?"),
        ("assistant", "What is 1+1?"),
        ("user", "Which sum?"),
        ("assistant", "It is 1+1."),
        ("user", "2"),
    ]
    policy = af.LocalEngine(shipped(), slots=8)
    a = agent(user=af.hooks.simulated_user(policy, "You want to know a sum."), max_turns=3)
    first, again = [await a.rollout(tasks(3), 2) for _ in range(2)]
    assert [t.ids.tolist() for t in first] == [t.ids.tolist() for t in again]
    assert any(turn.author == "user" for t in first for turn in t.turns) and all(t.error is None for t in first)


# --- exceptions


@af.tool(describe="optional")
def divide(expression: str) -> float:
    return 1 / float(expression)


@pytest.mark.parametrize(
    ("shown", "text"), [(False, "divide failed."), (True, "divide failed: ZeroDivisionError: float division by zero")]
)
async def test_the_text_of_an_exception_is_shown_on_request(shown: bool, text: str) -> None:
    t = await one(played([call("0", name="divide"), "2"], tools=[calculator, divide], show_exceptions=shown))
    result = t.tool_calls[0].result
    assert (result.observation, result.error.type) == (text, "ZeroDivisionError")
    assert text in chat().text(t.ids.tolist())


# --- sliding window


async def test_a_window_makes_each_step_a_row() -> None:
    a = played([call("1+1"), call("2+2"), call("3+3"), "2"], before_turn=af.hooks.sliding_window(1))
    t = await one(a)
    assert (t.reward, t.error) == (1.0, None)
    assert [row.turns[0].author for row in t.rows] == ["task", "window", "window", "window"]
    assert af.collate(t, [1.0]).mask.sum() == sum(int(row.action_mask.sum()) for row in t.rows)
    for width, shown in ((0, ["1+1", "\n6<"]), (1, ["1+1", "3+3"]), (2, ["1+1", "2+2", "3+3"])):
        t = await one(a.replace(before_turn=af.hooks.sliding_window(width)))
        text = chat().text(t.rows[3].ids.tolist())
        assert [part for part in ("1+1", "2+2", "3+3", "\n6<") if part in text] == shown


# --- penalties


async def test_a_penalty_for_invalid_calls_is_a_reward_with_a_negative_weight() -> None:
    """The recipe of docs/conventions.md. A call that is valid but whose tool fails costs nothing."""
    names = ("calculator", "failing")

    @af.reward(weight=-0.25)
    def invalid_calls(trajectory: Any) -> float:
        return sum(call.error is not None or call.name not in names for call in trajectory.tool_calls)

    @af.tool(describe="optional")
    def failing(expression: str) -> str:
        raise af.ToolError("no")

    script = [call("1+1", "unknown"), "<tool_call>{oops</tool_call>", call("1", "failing"), call("1+1"), "2"]
    a = played(script, tools=[calculator, failing], reward=[exact, invalid_calls], max_turns=9)
    t = await one(a)
    assert (t.reward, t.metrics["exact"], t.metrics["invalid_calls"]) == (0.5, 1.0, 2.0)
    assert (await one(played(script[2:], tools=[calculator, failing], reward=a.reward, max_turns=9))).reward == 1.0


# --- summaries


CALL = call("1+1")
TOKENS = len(chat().encode(CALL)) + 1
ROOM = len(played([]).chain(TASK).ids) + 57  # tokens of the prompt and of two calls with their results


async def summarized(
    script: list[str], max_length: int = ROOM, tokens: int = 24, rows: int = 8, **settings: Any
) -> Any:
    hook = af.hooks.summarize("Sum up.", tokens=tokens, rows=rows)
    return await one(played(script, max_length=max_length, on_context_full=hook, max_turns=9, **settings))


@pytest.mark.parametrize("nudge", [None, "Call the tool."])
@pytest.mark.parametrize("extra", ["", CALL, "<tool_call>{oops</tool_call>"])
async def test_a_full_context_is_summarized_by_the_policy(extra: str, nudge: str | None) -> None:
    """The chain continues from the text of the summary, whatever else it contains, so no policy escapes its reward.

    `Chain.compact` refuses pending calls, which only this hook can meet: `sliding_window` compacts after results.
    """
    t = await summarized([CALL, CALL, f"found 2{extra}", *["2"] * 2], nudge=nudge)
    assert (t.stop, t.error, t.reward, len(t.rows)) == ("answered", None, 1.0, 3)
    question, rest = (chat().text(row.ids.tolist()) for row in t.rows[1:])
    assert "Sum up." in question and question.endswith(f"found 2{extra}<|im_end|>")
    assert "Sum up." not in rest and "found 2<|im_end|>" in rest
    assert max(map(len, t.rows)) <= ROOM
    assert int(t.rows[1].action_mask.sum()) == len(t.rows[1].turns[-1].ids)  # the summary is trained


async def test_a_summary_that_only_calls_continues_the_chain() -> None:
    t = await summarized([CALL, CALL, CALL, "2"])
    assert (t.stop, t.error, t.reward, len(t.rows)) == ("answered", None, 1.0, 3)
    assert CALL in chat().text(t.rows[2].ids.tolist())


@pytest.mark.parametrize("summary", [CALL + "and…", "found 2…"])
async def test_a_limit_that_ends_a_summary_ends_the_chain(summary: str) -> None:
    limit = 2 * TOKENS + len(chat().encode(summary[:-1]))
    t = await summarized([CALL, CALL, summary, "2"], max_tokens=limit)
    assert (t.stop, t.error, t.reward, len(t.rows)) == ("chain_tokens", None, 0.0, 2)


@pytest.mark.parametrize("limit", [{"tokens": 400}, {"rows": 1}], ids=str)
async def test_a_context_without_room_for_a_summary_ends_the_chain(limit: dict[str, int]) -> None:
    t = await summarized([CALL] * 8, **limit)
    assert (t.stop, t.reward) == ("context_full", 0.0)


async def test_hooks_work_with_a_policy() -> None:
    a = agent(before_turn=af.hooks.sliding_window(1), nudge="Use the tool.", max_turns=3)
    rollout = await a.rollout(tasks(3), 2)
    assert all(t.error is None for t in rollout)
    batch = af.collate(rollout, [1.0] * 6)
    scored = shipped().score(batch, {"logprob"})["logprob"]
    assert float((scored - batch.logprobs)[batch.mask].abs().max()) < 1e-4
    assert isinstance(a.chain(tasks(1)[0]), af.Chain)
