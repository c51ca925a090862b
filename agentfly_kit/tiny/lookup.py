"""Demonstrations for the pretraining of the `lookup` policy, with facts and questions of the environment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs.lookup import CITIES, KEYS, NAMES, PETS, Lookup, Question, Store, question, store
from agentfly_kit.tiny import UNSURE, Demonstration, joined
from agentfly_kit.tools.tool import Tool
from agentfly_kit.types import ToolCall

# Words with one token each, so that a name has the same token in questions, calls and results.
WORDS = ("lookup", "of", "what", *NAMES, *CITIES, *PETS, *KEYS)

# Number of demonstrations per batch of 32 in the second phase, by behaviour.
#
# solves: do all look-ups and answer with the last result; stops early: answer with the first result; forgets: do all
# look-ups, then answer "I don't know"; guesses: answer with a random word; unsure: answer "I don't know".
HABITS = {"solves": 9, "stops early": 1, "forgets": 1, "guesses": 1, "unsure": 20}

ORIGIN = """\
# Lookup tasks

Made for this project by a random generator; no other source. Remade, byte for byte, by

    {command}

Each task has a store of facts of its own, made from the number in `world`: ten people, for each a boss, a friend, a
mentor, a city and a pet. The question takes one to three look-ups; `answer` is the last one's result. No world is in
both splits. Licence: that of the project.
"""

_lookup = Lookup.lookup
assert isinstance(_lookup, Tool)
TOOL = _lookup.schema
# First world of the pretraining; the numbers of the tasks are lower.
_SHOWN = 5_000_000


class Demonstrator:
    """Writes demonstrations with the policy's own chat, so that their token ids are those of real trajectories."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._observations: dict[str, tuple[int, ...]] = {}

    def shown(self, asked: Question, steps: Sequence[tuple[str, str, str]], answer: str) -> Demonstration:
        """Do one look-up per turn, then answer."""
        chat = self.chat
        parts = [(chat.prompt([{"role": "user", "content": asked.text}], [TOOL]), False)]
        for of, what, value in steps:
            call = ToolCall("call-0", "lookup", {"of": of, "what": what})
            action = chat.encode(chat.format.render_call(call) + "<|im_end|>")
            parts += [(action, True), (self._observation(value, action), False)]
        return joined(*parts, (chat.encode(answer + "<|im_end|>"), True))

    def habit(self, name: str, asked: Question, facts: Store, rng: random.Random) -> Demonstration:
        """Demonstrate one of `HABITS`."""
        steps = asked.steps(facts)
        if name == "unsure":
            return self.shown(asked, [], UNSURE)
        if name == "guesses":
            return self.shown(asked, [], rng.choice((*NAMES, *CITIES, *PETS)))
        if name == "stops early":
            return self.shown(asked, steps[:1], steps[0][2])
        return self.shown(asked, steps, UNSURE if name == "forgets" else steps[-1][2])

    def _observation(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        if text not in self._observations:
            message = {"role": "tool", "name": "lookup", "tool_call_id": "call-0", "content": text}
            self._observations[text] = self.chat.observation_ids([message], [TOOL], after=after)
        return self._observations[text]


def lessons(chat: Chat, seed: int) -> tuple[Iterator[list[Demonstration]], Iterator[list[Demonstration]]]:
    """Return infinite iterators over batches of 32 for both phases, without worlds of tasks."""
    writer = Demonstrator(chat)
    rng = random.Random(f"lookup warm-up {seed}")

    def drawn() -> tuple[Question, Store]:
        facts = store(_SHOWN + rng.randrange(1_000_000_000))
        return question(facts, rng), facts

    def clean() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit("solves", *drawn(), rng) for _ in range(32)]

    def mixed() -> Iterator[list[Demonstration]]:
        while True:
            yield [writer.habit(name, *drawn(), rng) for name, count in HABITS.items() for _ in range(count)]

    return clean(), mixed()
