"""A loop around LangChain's `ChatOpenAI`, without a graph."""

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return str(eval(expression, {"__builtins__": {}}))


async def solve(question, base_url, api_key):
    model = ChatOpenAI(model="gpt-4o-mini", base_url=base_url, api_key=api_key).bind_tools([calculator])
    messages = [HumanMessage(question)]
    while True:
        message = await model.ainvoke(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append(ToolMessage(calculator.invoke(call["args"]), tool_call_id=call["id"]))
