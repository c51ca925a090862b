"""A synchronous agent with smolagents, which rewrites the output of the model."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example "3*(4+5)".
    """
    return str(eval(expression, {"__builtins__": {}}))


def solve(question, base_url, api_key):
    model = OpenAIServerModel("gpt-4o-mini", api_base=base_url, api_key=api_key)
    return ToolCallingAgent([calculator], model, max_steps=3, verbosity_level=0).run(question)
