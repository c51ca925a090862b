"""An agent with the OpenAI Agents SDK, which uses the Responses API."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(eval(expression, {"__builtins__": {}}))


def agent(base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = OpenAIResponsesModel("gpt-4o-mini", client)
    return Agent(name="Calculator", model=model, tools=[calculator])


async def solve(question, base_url, api_key):
    result = await Runner.run(agent(base_url, api_key), question)
    return result.final_output


async def solve_streaming(question, base_url, api_key):
    result = Runner.run_streamed(agent(base_url, api_key), question)
    async for _ in result.stream_events():
        pass
    return result.final_output
