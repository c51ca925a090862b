"""The Messages API with the package anthropic as the client."""

from typing import Any

import anthropic
import pytest
from agents import call
from test_harness import TASK, TOOLS, harnessed, run_one

import agentfly_kit as af

SCHEMAS = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS.schemas]
ASKED: list[Any] = [{"role": "user", "content": "a"}]
DEFAULTS: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": ASKED}


def client_of(endpoint: af.Endpoint) -> Any:
    return anthropic.AsyncAnthropic(api_key="-", http_client=endpoint.http_client, max_retries=0)


async def test_a_chain_with_thinking_and_a_tool_is_one_row_and_its_tokens_are_counted() -> None:
    seen: list[Any] = []

    async def solve(question: str, endpoint: af.Endpoint) -> str:
        client = client_of(endpoint)
        ask = {**DEFAULTS, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}
        ask |= {"tools": SCHEMAS, "metadata": {"user_id": "u"}, "service_tier": "auto"}
        ask |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        ask["messages"] = messages = [{"role": "user", "content": question}]
        for _ in range(2):
            counted = {name: ask[name] for name in ("model", "messages", "system", "tools")}
            count = (await client.messages.count_tokens(**counted)).input_tokens
            seen.append(await client.messages.create(**ask))
            assert count == seen[-1].usage.input_tokens
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
                for block in seen[-1].content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": seen[-1].content}, {"role": "user", "content": results}]
        return str(seen[-1].content[-1].text)

    agent = harnessed(solve, [f"<think>add</think>Let me see.{call('2+3')}", "5"])
    (t,) = await agent.rollout([TASK])
    first, last = seen
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thinking, text, used = first.content
    assert (thinking.thinking, text.text, used.name) == ("add", "Let me see.", "calculator")
    assert used.input == {"expression": "2+3"}
    assert (first.stop_reason, last.stop_reason, last.content[0].text) == ("tool_use", "end_turn", "5")
    engine: Any = agent.engine
    assert len(t.rows) == 1 and tuple(t.ids) == engine.given[1] + engine.gave[1]
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(engine.given[0]), len(engine.gave[0]))
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [c.result.observation for c in t.tool_calls if c.result] == ["5"]


async def test_the_events_of_a_stream_add_up_to_the_message() -> None:
    kinds: list[str] = []

    async def streaming(endpoint: af.Endpoint) -> None:
        async with client_of(endpoint).messages.stream(**DEFAULTS, tools=SCHEMAS) as stream:
            async for event in stream:
                kinds.append(event.type + (f" {event.delta.type}" if event.type == "content_block_delta" else ""))
            got = await stream.get_final_message()
        assert [block.to_dict() for block in got.content[:2]] == [
            {"type": "thinking", "thinking": "so", "signature": ""},
            {"type": "text", "text": "Hm."},
        ]
        assert got.content[2].input == {"expression": "2+3"} and got.stop_reason == "tool_use"
        assert got.usage.output_tokens == endpoint.usage.completion_tokens > 0

    t = await run_one(streaming, [f"<think>so</think>Hm.{call('2+3')}"])
    assert t.stop == "answered", t.error
    expected = ["message_start"]
    for kind in ("thinking", "text", "input_json"):
        expected += ["content_block_start", f"content_block_delta {kind}_delta", kind, "content_block_stop"]
    assert kinds == [*expected, "message_delta", "message_stop"]


async def test_stop_sequences_limits_and_histories() -> None:
    async def asking(endpoint: af.Endpoint) -> None:
        create = client_of(endpoint).messages.create
        first = await create(**DEFAULTS, stop_sequences=["zz", "END"])
        assert (first.stop_reason, first.stop_sequence, first.content[0].text) == ("stop_sequence", "END", "one")
        short = await create(**DEFAULTS | {"max_tokens": 2, "tools": SCHEMAS}, tool_choice={"type": "none"})
        assert (short.stop_reason, short.stop_sequence, short.usage.output_tokens) == ("max_tokens", None, 2)
        # A history that this chain did not sample, with text between two results and after them.
        uses = [{"type": "tool_use", "id": i, "name": "f", "input": {"a": 1}} for i in "xy"]
        hidden = {"type": "redacted_thinking", "data": "?"}
        results: list[Any] = [{"type": "tool_result", "tool_use_id": i, "content": i, "is_error": True} for i in "xy"]
        results.insert(1, {"type": "text", "text": "b"})
        given = [*ASKED, {"role": "assistant", "content": [hidden, *uses]}, {"role": "user", "content": results}]
        await create(**DEFAULTS | {"messages": given, "model": "policy/writer"})

    t = await run_one(asking, ["one END§", "a long answer…", "x"])
    assert t.stop == "answered" and t.turns[-1].author == "writer", t.error
    roles = [(m["role"], m["content"]) for m in t.rows[-1].turns[0].messages]
    assert roles == [("user", "a"), ("assistant", ""), ("tool", "x"), ("user", "b"), ("tool", "y")]


async def test_over_http_the_key_is_in_the_url_or_in_either_header() -> None:
    async def over_http(endpoint: af.Endpoint) -> None:
        url, key = endpoint.env["ANTHROPIC_BASE_URL"], endpoint.env["ANTHROPIC_API_KEY"]
        root = url.rpartition("/")[0]
        for given in (
            {"base_url": url, "api_key": "-"},
            {"base_url": root, "api_key": key},
            {"base_url": root, "auth_token": key},
        ):
            async with anthropic.AsyncAnthropic(**given) as client:
                await client.messages.create(**DEFAULTS)
                assert [model.id async for model in client.models.list()] == ["policy"]
        for address, given_key, body, error, kind in (
            (url, "-", {"mcp_servers": ["u"]}, anthropic.BadRequestError, "invalid_request_error"),
            (root, "-", {}, anthropic.NotFoundError, "not_found_error"),
            (url, f"{key}0", {}, anthropic.AuthenticationError, "authentication_error"),
        ):
            async with anthropic.AsyncAnthropic(base_url=address, api_key=given_key) as client:
                with pytest.raises(error) as refused:
                    await client.messages.create(**DEFAULTS, extra_body=body)
            answer: Any = refused.value.body
            assert (answer["type"], answer["error"]["type"]) == ("error", kind)

    t = await run_one(over_http, ["x", "y", "z"])
    assert (t.stop, len(t.actions)) == ("answered", 3), t.error
