"""An agent with AutoGen. With `reflect_on_tool_use`, its second request has no tools."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False, "function_calling": True, "json_output": False, "structured_output": False, "family": "unknown",
}  # fmt: skip


async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(eval(expression, {"__builtins__": {}}))


async def solve(question, base_url, api_key):
    client = OpenAIChatCompletionClient(model="gpt-4o-mini", base_url=base_url, api_key=api_key, model_info=INFO)
    agent = AssistantAgent("assistant", client, tools=[calculator], system_message=None, reflect_on_tool_use=True)
    result = await agent.run(task=question)
    return result.messages[-1].content


async def solve_without_reflection(question, base_url, api_key):
    client = OpenAIChatCompletionClient(model="gpt-4o-mini", base_url=base_url, api_key=api_key, model_info=INFO)
    agent = AssistantAgent(
        "assistant", client, tools=[calculator], system_message=None, reflect_on_tool_use=False, max_tool_iterations=4
    )
    result = await agent.run(task=question)
    return result.messages[-1].content
