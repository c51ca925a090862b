"""An agent with LangChain's `create_agent`, which builds a LangGraph graph."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(eval(expression, {"__builtins__": {}}))


async def solve(question, base_url, api_key):
    model = ChatOpenAI(model="gpt-4o-mini", base_url=base_url, api_key=api_key)
    out = await create_agent(model, [calculator]).ainvoke({"messages": [("user", question)]})
    return out["messages"][-1].content
