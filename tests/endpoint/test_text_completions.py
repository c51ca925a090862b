"""The Completions API with the package openai as the client: prompts of text or token ids."""

from typing import Any

import openai
import pytest
from agents import TextOnly, call, chat, exact
from test_harness import TASK, harnessed, run_one

import agentfly_kit as af

TEXT = chat().render([{"role": "user", "content": "What is 2+3?"}], generate=True)
ASK: dict[str, Any] = {"model": "policy", "prompt": TEXT, "extra_body": {"return_token_ids": True}}


async def test_prompts_that_begin_with_the_ids_of_a_row_continue_it() -> None:
    """Each row consists of the ids of the prompt and of the reply, and each sampled token is trained once."""
    sent: list[list[int]] = []
    more = list(chat().encode("again"))

    async def asking(endpoint: af.Endpoint) -> str:
        async def create(prompt: Any, **body: Any) -> Any:
            got = await endpoint.client.completions.create(**ASK | {"prompt": prompt} | body, logprobs=1)
            (choice,) = got.choices
            sent.append(choice.prompt_token_ids + choice.token_ids)
            assert (got.usage.prompt_tokens, got.usage.total_tokens) == (len(choice.prompt_token_ids), len(sent[-1]))
            assert "".join(choice.logprobs.tokens) == chat().text(choice.token_ids)
            assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
            return choice

        first = await create(TEXT, max_tokens=3)
        assert (first.finish_reason, len(first.token_ids)) == ("length", 3)
        await create([sent[0]], max_tokens=2)  # resumes the action
        last = await create([*sent[1], *more], model="policy/writer", max_tokens=2)
        await create(TEXT, max_tokens=2)  # the same prompt again
        await create(sent[0])  # no longer the end of a row
        return str(last.text)

    (t,) = await harnessed(asking, max_turns=9).rollout([TASK])
    assert t.stop == "answered", t.error
    assert [row.ids.tolist() for row in t.rows] == [sent[2], sent[3], sent[4]]
    prompt = len(chat().encode(TEXT))
    masks = [row.action_mask.tolist() for row in t.rows]
    assert masks[0] == [False] * prompt + [True] * 5 + [False] * len(more) + [True] * 2
    assert masks[1] == [False] * prompt + [True] * 2
    assert masks[2] == [False] * (prompt + 3) + [True] * (len(sent[4]) - prompt - 3)
    assert [turn.author for turn in t.actions] == ["policy", "policy", "writer", "policy", "policy"]
    assert t.actions[0].seed != t.actions[3].seed
    assert af.collate([t], [1.0]).mask.sum() == sum(map(sum, masks))


async def test_replies_are_not_parsed_and_streams_give_the_same_text() -> None:
    async def asking(endpoint: af.Endpoint) -> None:
        create = endpoint.client.completions.create
        two = await create(**ASK, n=2)
        assert [choice.text for choice in two.choices] == [call("2+3"), "<think>hm"]
        assert [choice.finish_reason for choice in two.choices] == ["stop", "stop"]
        stream = await create(**ASK, stream=True, stop=["END", "E"], stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert (chunks[0].choices[0].text, chunks[0].choices[0].finish_reason) == ("one ", "stop")
        assert chunks[-1].usage.completion_tokens == len(chat().encode("one END"))

    t = await run_one(asking, [call("2+3"), "<think>hm", "one END§"])
    assert t.stop == "answered", t.error
    assert [turn.tool_calls for turn in t.actions] == [()] * 3 and t.tool_calls == ()


async def test_a_text_only_engine_is_refused() -> None:
    async def trying(endpoint: af.Endpoint) -> str:
        with pytest.raises(openai.BadRequestError, match="requires an engine with token ids"):
            await endpoint.client.completions.create(**ASK)
        return "5"

    (t,) = await af.Agent(TextOnly(["x"]), chat=chat(), harness=trying, reward=exact).rollout([TASK])
    assert t.stop == "answered", t.error
