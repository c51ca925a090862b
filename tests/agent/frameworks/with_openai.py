"""An agent with the openai package."""

import json

from openai import AsyncOpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


async def solve(question, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    while True:
        answer = await client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            value = eval(json.loads(call.function.arguments)["expression"], {"__builtins__": {}})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})
