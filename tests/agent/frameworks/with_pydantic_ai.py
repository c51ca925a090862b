"""An agent with PydanticAI, over the Chat Completions API and over the Responses API."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(eval(expression, {"__builtins__": {}}))


async def solve_with(kind, question, base_url, api_key):
    model = kind("gpt-4o-mini", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    return (await Agent(model, tools=[calculator]).run(question)).output


async def solve(question, base_url, api_key):
    return await solve_with(OpenAIChatModel, question, base_url, api_key)


async def solve_responses(question, base_url, api_key):
    return await solve_with(OpenAIResponsesModel, question, base_url, api_key)
