"""Demonstrations for pretraining the `code` policy, using the environment's instructions and programs."""

from __future__ import annotations

from typing import ClassVar

from agentfly_kit.envs.code import STEPS, Step, family, instruction, program, split_of, steps_and_inputs
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe


class Recipe(BaseRecipe):
    """Recipe for the `code` policy. Each example is a list of steps."""

    name = "code"
    # A line break in the JSON of a call is a backslash and an n, so some words start with n.
    words = (
        "Write f(x):", *dict.fromkeys(word for what in STEPS for word in what.split()), "python", "submit", "code",
        "def f(x):", "n    x =", "n    return x", "max(x,", "min(x,",
    )  # fmt: skip
    tools = tuple(tool.schema for tool in family.tools)
    # solves: submit the correct program; leaves one out: submit it with one step missing; changes a number: submit it
    # with one wrong operand; does nothing: submit a function that returns x; unsure: answer "I don't know".
    habits: ClassVar = {"solves": 9, "leaves one out": 1, "changes a number": 1, "does nothing": 1, "unsure": 20}
    skill_steps = 700
    half = True

    def sample(self) -> list[Step]:
        while True:
            steps, _ = steps_and_inputs(self.rng)
            if split_of(instruction(steps)) == "train":
                return steps

    def demonstrate(self, habit: str, example: list[Step]) -> Trajectory:
        question = instruction(example)
        at = self.rng.randrange(len(example))
        if habit == "unsure":
            return self.conversation(question, (), UNSURE)
        done = [] if habit == "does nothing" else example
        if habit == "leaves one out":
            done = [*example[:at], *example[at + 1 :]]
        elif habit == "changes a number":
            done = [*example[:at], (example[at][0], self.rng.randint(2, 30)), *example[at + 1 :]]
        return self.conversation(question, [("submit", {"code": program(done)}, None)])
