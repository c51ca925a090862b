"""The clients of the three chat APIs give the same token ids, logprobs and seeds."""

import json
from typing import Any

import anthropic
from agents import tasks
from test_harness import TASK, TOOLS, harnessed, solve, task_with_question

import agentfly_kit as af

FUNCTIONS = [schema["function"] for schema in TOOLS.schemas]


async def run_tool(name: str, arguments: dict[str, Any]) -> str:
    return (await TOOLS.call(af.ToolCall("", name, arguments), af.Context(TASK))).observation


async def with_chat(question: str, endpoint: af.Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        got = await endpoint.client.chat.completions.create(model="policy", messages=messages, tools=TOOLS.schemas)
        messages.append(message := got.choices[0].message)
        if not message.tool_calls:
            return str(message.content)
        for made in message.tool_calls:
            result = await run_tool(made.function.name, json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


async def with_responses(question: str, endpoint: af.Endpoint, stream: bool = False) -> str:
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    items: list[Any] = [{"role": "user", "content": question}]
    while True:
        got = await endpoint.client.responses.create(model="policy", input=items, tools=tools, stream=stream)
        given: dict[str, str] = {}
        if stream:
            events = [event async for event in got]
            got = events[-1].response
            given = {e.item_id: e.arguments for e in events if e.type == "response.function_call_arguments.done"}
            items += [event.item for event in events if event.type == "response.output_item.done"]
        else:
            items += got.output
        made = [item for item in items[-len(got.output) :] if item.type == "function_call"]
        if not made:
            return str(got.output_text)
        for call in made:
            output = await run_tool(call.name, json.loads(given[call.id] if stream else call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


async def with_streamed_responses(question: str, endpoint: af.Endpoint) -> str:
    return await with_responses(question, endpoint, stream=True)


async def with_messages(question: str, endpoint: af.Endpoint) -> str:
    client: Any = anthropic.AsyncAnthropic(api_key="-", http_client=endpoint.http_client)
    tools = [{**f, "input_schema": f["parameters"]} for f in FUNCTIONS]
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        got = await client.messages.create(model="policy", max_tokens=64, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": got.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": await run_tool(block.name, block.input)}
            for block in got.content
            if block.type == "tool_use"
        ]
        if not results:
            return "".join(block.text for block in got.content if block.type == "text")
        messages.append({"role": "user", "content": results})


async def test_all_clients_give_the_same_tokens() -> None:
    given = [task_with_question(task) for task in tasks(16)]
    runs = []
    for harness in (solve, with_chat, with_responses, with_streamed_responses, with_messages):
        rollout = await harnessed(harness).rollout(given, 2)
        chains = [([row.ids.tolist() for row in t.rows], [turn.logprobs for turn in t.actions]) for t in rollout]
        runs.append([(*chain, t.seed, t.stop, t.final) for chain, t in zip(chains, rollout, strict=True)])
    assert runs[1:] == runs[:1] * 4 and len(runs[0]) == 32
    assert {len(rows) for rows, *_ in runs[0]} == {1}
    assert any(len(logprobs) > 1 for _, logprobs, *_ in runs[0]), "no chain called a tool"
