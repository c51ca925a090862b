"""Tasks and demonstrations for the `sums` policy, which adds well, multiplies badly, and has a calculator."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

from agentfly_kit.envs.calculator import family
from agentfly_kit.trajectories import Trajectory
from recipes.base import BaseRecipe
from recipes.calculator import Expression


def expression(rng: random.Random) -> Expression:
    """Sample a sum or product of a number of two digits and one of one or two digits, in either order."""
    numbers = [rng.randint(10, 99), rng.randint(2, 9) if rng.random() < 0.5 else rng.randint(10, 99)]
    rng.shuffle(numbers)
    return Expression(rng.choice("+*").join(map(str, numbers)))


@functools.cache
def tasks(train: int = 600, test: int = 400, *, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Generate rows {"id", "question", "answer"} for both splits. All expressions are different."""
    rng = random.Random(f"sums tasks {seed}")
    found: dict[str, Expression] = {}
    while len(found) < train + test:
        new = expression(rng)
        found.setdefault(new.text, new)
    rows = [{"question": e.question, "answer": str(e.value)} for e in found.values()]
    splits = {"train": rows[:train], "test": rows[train:]}
    return {
        split: [{"id": f"sums-{split}-{i:04}", **row} for i, row in enumerate(some)] for split, some in splits.items()
    }


class Recipe(BaseRecipe):
    """Recipe for the `sums` policy. Each example is an expression. No task of either split is ever shown.

    An answer that was not looked up begins with a space, so that the first token of an action decides whether the tool
    is called. The policy decides by chance: the decision does not depend on the expression.
    """

    name = "sums"
    tools = tuple(tool.schema for tool in family.tools)
    # solves: call the calculator and answer with the result; recalls: answer without a call.
    habits: ClassVar = {"solves": 16, "recalls": 16}
    skill_steps = 1000
    mixed_steps = 60
    skill_batch = 128
    half = True

    def __init__(self, chat: Any, seed: int = 0) -> None:
        super().__init__(chat, seed)
        self._held_out = {row["question"] for rows in tasks().values() for row in rows}

    @classmethod
    def tasks(cls, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
        return tasks(seed=seed)

    def sample(self) -> Expression:
        example: Expression = self.sample_unseen(expression, self._held_out)
        return example

    def demonstrate(self, habit: str, example: Expression) -> Trajectory:
        value = str(example.value)
        if habit == "recalls":
            return self.conversation(example.question, (), f" {value}")
        return self.conversation(example.question, [("calculator", {"expression": example.text}, value)], value)

    def batches(self) -> tuple[Iterator[list[Trajectory]], Iterator[list[Trajectory]]]:
        calls = self.skill_batch // 5
        return self._repeat({"solves": calls, "recalls": self.skill_batch - calls}), self._repeat(self.habits)
