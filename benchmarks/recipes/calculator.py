"""Tasks and demonstrations for the `calculator` policy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import exact
from agentfly_kit.envs.calculator import family
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe


@dataclass(frozen=True)
class Expression:
    """An arithmetic expression of integers, + - * and parentheses."""

    text: str

    @property
    def value(self) -> int:
        return int(exact.value(self.text))

    @property
    def question(self) -> str:
        return f"What is {self.text}?"

    def shortened(self, rng: random.Random) -> Expression:
        """Return a careless copy: without the parentheses, or only up to an operator outside the parentheses."""
        if "(" in self.text and rng.random() < 0.5:
            text = self.text.replace("(", "").replace(")", "")
        else:
            depth, ends = 0, []
            for i, c in enumerate(self.text):
                depth += (c == "(") - (c == ")")
                if depth == 0 and c in "+-*":
                    ends.append(i)
            text = self.text[: rng.choice(ends)]
        return Expression(text)


def expression(rng: random.Random) -> Expression:
    """Sample an expression of one to three operations, at most 12 characters and at most four digits in its value."""
    while True:
        text, _ = _grow(rng, rng.choice((1, 2, 2, 3, 3)))
        e = Expression(text)
        if len(text) <= 12 and abs(e.value) <= 9999:
            return e


def _grow(rng: random.Random, operations: int) -> tuple[str, int]:
    """Sample an expression. Return its text, without redundant parentheses, and the precedence of its root operator."""
    if operations == 0:
        return str(rng.randint(2, 9) if rng.random() < 0.6 else rng.randint(10, 99)), 3
    left = rng.randrange(operations)
    sign = rng.choice("+-*")
    binds = 2 if sign == "*" else 1
    a, a_binds = _grow(rng, left)
    b, b_binds = _grow(rng, operations - 1 - left)
    if a_binds < binds:
        a = f"({a})"
    if b_binds < binds or (sign == "-" and b_binds == binds):
        b = f"({b})"
    return a + sign + b, binds


def tasks(train: int = 2000, test: int = 1024, *, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Generate rows {"id", "question", "answer"} for both splits. All expressions are different."""
    rng = random.Random(f"calculator tasks {seed}")
    found: dict[str, Expression] = {}
    while len(found) < train + test:
        new = expression(rng)
        found.setdefault(new.text, new)
    every = list(found.values())
    return {
        split: [
            {"id": f"calculator-{split}-{i:04}", "question": e.question, "answer": str(e.value)}
            for i, e in enumerate(rows)
        ]
        for split, rows in (("train", every[:train]), ("test", every[train:]))
    }


class Recipe(BaseRecipe):
    """Recipe for the `calculator` policy. Each example is an expression."""

    name = "calculator"
    tools = tuple(tool.schema for tool in family.tools)
    # solves: copy the whole expression into a call and answer with the result; careless: call with a part of the
    # expression; forgets: make the call, then answer "I don't know"; guesses: answer with a random number; unsure:
    # answer "I don't know". Fixed counts keep the initial success rate from varying.
    habits: ClassVar = {"solves": 9, "careless": 1, "forgets": 1, "guesses": 1, "unsure": 20}

    def __init__(self, chat: Chat, seed: int = 0) -> None:
        super().__init__(chat, seed)
        self._habit_rng = random.Random(f"calculator shy {seed}")
        self._test = {row["question"] for row in tasks()["test"]}

    @classmethod
    def tasks(cls, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
        return tasks(seed=seed)

    def sample(self) -> Expression:
        example: Expression = self.sample_unseen(expression, self._test)
        return example

    def demonstrate(self, habit: str, example: Expression) -> Trajectory:
        if habit == "unsure":
            return self.conversation(example.question, (), UNSURE)
        if habit == "guesses":
            return self.conversation(example.question, (), str(self._habit_rng.randint(-99, 999)))
        copied = example.shortened(self._habit_rng) if habit == "careless" else example
        result = str(copied.value)
        calls = [("calculator", {"expression": copied.text}, result)]
        return self.conversation(example.question, calls, UNSURE if habit == "forgets" else result)
