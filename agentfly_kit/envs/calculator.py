"""calculator: integer arithmetic with a calculator tool. The policy `af.tiny.policy()` was trained on these tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentfly_kit.envs import exact
from agentfly_kit.envs.family import Family, Move, check_answer, shipped_rows, tool_outputs
from agentfly_kit.errors import ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, text_of


class Calculator:
    """Stateless environment with a calculator tool."""

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the answer is neither a string nor a number."""
        check_answer(task.fields.get("answer", ""), str | int | float, "a string or a number")

    async def reset(self, task: Task, seed: int) -> None: ...

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: for example "3*(4+5)".
        """
        try:
            return exact.shown(exact.value(expression))
        except exact.NotArithmetic as error:
            raise ToolError(str(error)) from error

    def reward(self, final: str | None, answer: str | float) -> float:
        """Return 1 if the final text and the answer have the same exact value, such as 1/2 and 0.5, else 0."""
        return float(final is not None and bool(exact.same(final, str(answer))))

    async def fork(self, into: Calculator) -> None: ...


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return n included tasks of a split as rows: the first n if seed is 0, otherwise a random sample."""
    return shipped_rows("calculator", n, split, seed)


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Call the calculator with the expression in the question, then answer with the result."""
    results = tool_outputs(messages)
    if results:
        return results[-1]
    question = text_of(task.messages[-1])
    expression = question.removeprefix("What is ").removeprefix("the exact value of ").removesuffix("?")
    return "calculator", {"expression": expression}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Answer with a random number, or call the calculator with a random number as the expression."""
    number = str(rng.randint(-999, 9999))
    return number if rng.random() < 0.5 else ("calculator", {"expression": number})


family = Family(
    name="calculator",
    what="integer arithmetic with + - * and parentheses, and a calculator tool",
    environment=Calculator,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
    size="2,000 train and 1,024 test tasks included",
    splits={"train": 2000, "test": 1024},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
