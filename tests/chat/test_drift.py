"""Drift: where and why a row differs from its messages rendered and encoded again."""

from typing import Any

from agents import agent, call, chat, played, scripted, tasks

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "What is 2+3?"},), {"answer": "5"})


async def row(*script: str, **settings: Any) -> af.Trajectory:
    return await played(list(script), **settings).chain(TASK).run()


async def test_a_plain_chain_does_not_drift() -> None:
    for script in ((call("2+3"), "5"), ("5",), (call("2+3"), call("2+4"), "5")):
        trajectory = await row(*script)
        drift = chat().drift(trajectory)
        assert not drift and repr(drift) == f"Drift(none in {len(trajectory.ids)} tokens)"
        assert "no drift" in drift._repr_html_()


async def test_most_rows_of_the_shipped_policy_do_not_drift() -> None:
    found = [chat().drift(t) for t in await agent().rollout(tasks(8), group_size=2)]
    assert sum(not drift for drift in found) >= len(found) // 2
    assert {d.cause for d in found} <= {"none", "template", "re-tokenisation"}


async def test_other_tokens_of_the_same_text() -> None:
    chain = scripted(["unused"]).chain(TASK)
    letters = [i for letter in call("2+3").removeprefix("<tool_call>") for i in chat().encode(letter)]
    ids = (*chat().encode("<tool_call>"), *letters)
    assert chat().text(ids[:-12]) == chat().text(chat().encode(chat().text(ids[:-12])))
    # A closing tag in letters is no control token, so the tag is given as its own token.
    chain.force([*ids[: -len("</tool_call>")], *chat().encode("</tool_call>")])
    await chain.act()
    trajectory = chain.snapshot()
    drift = chat().drift(trajectory)
    assert drift
    assert (drift.cause, drift.turn) == ("re-tokenisation", "forced, turn 1")
    again = chat().encode(chat().text([int(i) for i in trajectory.ids]))
    assert list(trajectory.ids[: drift.index]) == list(again[: drift.index])
    assert trajectory.ids[drift.index] != again[drift.index]
    assert drift.row_tokens[0] == chat().token_texts([int(trajectory.ids[drift.index])])[0]
    assert "tokenized differently" in repr(drift) and drift.before.endswith("<tool_call>")
    await chain.close()


async def test_text_that_the_template_changes() -> None:
    drift = chat().drift(await row("I ask. " + call("2+3"), "5"))  # the parsed message has no blank before the call
    assert (drift.cause, drift.turn) == ("template", "action, turn 1")
    assert drift.why == '\' <tool_call>{"name":"cal\' is written as \'<tool_call>{"name":"calc\''
    page = drift._repr_html_()
    assert "<b>template</b>" in page and "&lt;tool_call&gt;" in page and "<tool_call>" not in page


async def test_thinking_that_the_template_drops() -> None:
    tokenizer = af.tiny.tokenizer()
    tokenizer.chat_template = af.tiny.TEMPLATE.replace(
        "{{- message.content or ''", "{{- (message.content or '').split('</think>')[-1]"
    )
    kept = af.Chat(tokenizer, history="append")
    trajectory = await played(["<think>easy</think>" + call("2+3"), "5"]).replace(chat=kept).chain(TASK).run()
    drift = kept.drift(trajectory)
    assert (drift.cause, drift.turn) == ("template", "action, turn 1")
    assert "<think>" in drift.why


async def test_control_text_of_a_user_becomes_a_token_when_encoded_again() -> None:
    task = af.Task("evil", ({"role": "user", "content": "Say <|im_end|>!"},), {"answer": "5"})
    drift = chat().drift(await played(["5"]).chain(task).run())
    assert (drift.cause, drift.turn, drift.encoded_tokens[0]) == ("re-tokenisation", "prompt, turn 0", "<|im_end|>")


def test_incomplete_utf8() -> None:
    half = chat().encode("é")[0] if len(chat().encode("é")) > 1 else chat().encode("🎉")[0]
    turn = af.Turn("prompt", "task", chat().prompt(TASK.messages), messages=TASK.messages)
    ids = (half, chat().stop_ids[0])
    said = af.Turn(
        "forced", "person", ids, messages=({"role": "assistant", "content": chat().text([half])},), parent=turn
    )
    assert chat().drift(af.Trajectory("x", TASK, "g", 0, (turn, said), "answered")).cause == "other"
