"""Demonstrations for the `code` policy: what its warm-up shows it. Instructions and programs are the environment's."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import base
from agentfly_kit.envs.code import STEPS, Code, Step, _split_of, instruction, program, steps_and_inputs
from agentfly_kit.tiny import UNSURE, Demonstration, joined
from agentfly_kit.types import ToolCall

WORDS = (
    "Write f(x):", *dict.fromkeys(word for what in STEPS for word in what.split()), "python", "submit", "code",
    "def f(x):", "n    x =", "n    return x", "max(x,", "min(x,",
)  # fmt: skip
"""Each is one token. A line's break is two characters in the JSON of a call, and its n begins the next line."""

HALF = True
SKILL = 700

HABITS = {"solves": 9, "leaves one out": 1, "changes a number": 1, "does nothing": 1, "unsure": 20}
"""Of 32 demonstrations of the second phase. It submits the program of all steps; of all but one; with another number;
a function that gives x; it says that it does not know."""

ORIGIN = """\
# Code tasks: steps

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

A restricted grammar: "Write f(x): add 3, at most 20." One to three of eight kinds of step, numbers from 2 to 30.
Rows are as MBPP has them: `code` is the function, `test_list` four asserts, of which every program that leaves a step
out fails at least one. No instruction is in both splits. Licence: that of the project.
"""

TOOLS = [tool.schema for tool in base.tools(Code)]


class Demonstrator:
    """Writes conversations through the policy's own chat: all ids are those an agent would see."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def habit(self, name: str, steps: list[Step], rng: random.Random) -> Demonstration:
        """One of `HABITS`."""
        at = rng.randrange(len(steps))
        said = UNSURE
        if name != "unsure":
            if name == "leaves one out":
                done = [*steps[:at], *steps[at + 1 :]]
            elif name == "changes a number":
                done = [*steps[:at], (steps[at][0], rng.randint(2, 30)), *steps[at + 1 :]]
            else:
                done = [] if name == "does nothing" else steps
            said = self.chat.format.render_call(ToolCall("call-0", "submit", {"code": program(done)}))
        prompt = self.chat.prompt([{"role": "user", "content": instruction(steps)}], TOOLS)
        return joined((prompt, False), (self.chat.encode(said + "<|im_end|>"), True))


def lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Endless batches of 32, of the first phase and of the second. None shows an instruction of the test split."""
    writer = Demonstrator(chat)
    rng = random.Random(f"code warm-up {seed}")

    def drawn() -> list[Step]:
        while True:
            steps, _ = steps_and_inputs(rng)
            if _split_of(instruction(steps)) == "train":
                return steps

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit("solves", drawn(), rng) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, drawn(), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()
