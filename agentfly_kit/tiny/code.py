"""Demonstrations for the pretraining of the `code` policy, with instructions and programs of the environment."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import base
from agentfly_kit.envs.code import STEPS, Code, Step, _split_of, instruction, program, steps_and_inputs
from agentfly_kit.tiny import UNSURE, Demonstration, joined
from agentfly_kit.types import ToolCall

# Words with one token each. A line break in the JSON of a call is a backslash and an n, so some words start with n.
WORDS = (
    "Write f(x):", *dict.fromkeys(word for what in STEPS for word in what.split()), "python", "submit", "code",
    "def f(x):", "n    x =", "n    return x", "max(x,", "min(x,",
)  # fmt: skip

HALF = True
SKILL = 700

# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: submit the program; leaves one out: without one step; changes a number: with a wrong operand; does nothing: a
# function that returns x; unsure: answer "I don't know".
HABITS = {"solves": 9, "leaves one out": 1, "changes a number": 1, "does nothing": 1, "unsure": 20}

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
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def habit(self, name: str, steps: list[Step], rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
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
    """Return infinite iterators over batches of 32 for both phases, without instructions of the test split."""
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
