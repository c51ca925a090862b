"""calculator: questions with whole numbers and a tool that computes them. What the shipped policy learns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentfly_kit import tasks as task_sets
from agentfly_kit.envs import exact
from agentfly_kit.envs.family import Family, Move, tool_outputs
from agentfly_kit.errors import SettingsError, TaskError, ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task


class Calculator:
    """It keeps nothing; it is an environment so that all families are used alike."""

    async def reset(self, task: Task, seed: int) -> None:
        """Raises TaskError for an answer that no text can be compared with."""
        answer = task.fields.get("answer", "")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise TaskError(
                f"task {task.id!r}: its answer {answer!r} is {type(answer).__name__}; want a text or a number"
            )

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
        """1 for the very value, however it is written."""
        return float(final is not None and bool(exact.same(final, str(answer))))

    async def fork(self, into: Calculator) -> None: ...


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """The shipped ones, for another seed in another order."""
    shipped = task_sets.load_tasks("calculator").split(split)
    if n > len(shipped):
        raise SettingsError(f"{len(shipped)} {split} tasks of the calculator ship, and n={n} were asked for")
    chosen = shipped[:n] if seed == 0 else shipped.sample(n, seed)
    return [{"id": t.id, "messages": [dict(m) for m in t.messages], **t.fields} for t in chosen]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Copies the expression into a call, and tells the result."""
    results = tool_outputs(messages)
    if results:
        return results[-1]
    question = str(task.messages[-1]["content"])
    return "calculator", {"expression": question.removeprefix("What is ").removesuffix("?")}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Computes or says any number."""
    number = str(rng.randint(-999, 9999))
    return number if rng.random() < 0.5 else ("calculator", {"expression": number})


family = Family(
    name="calculator",
    what="whole numbers, + - * and brackets, and a tool that computes",
    environment=Calculator,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
    size="2,000 train and 1,024 test ship",
    splits={"train": 2000, "test": 1024},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
