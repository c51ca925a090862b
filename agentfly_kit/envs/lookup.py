"""lookup: questions about people that require one to three successive look-ups in a private store of facts.

The facts are not in the prompt and every task has its own store, so an answer must be looked up or guessed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.envs.family import Family, Move, check_answer, first_world, follow, int_field, row_id, tool_outputs
from agentfly_kit.errors import ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, text_of

_WORDS: dict[str, str] = task_files.bundled_json("vocabularies", "lookup.json")
NAMES, CITIES, PETS = (tuple(words.split()) for words in _WORDS.values())
# Keys whose value is another person.
PEOPLE = ("boss", "friend", "mentor")
THINGS = {"city": CITIES, "pet": PETS}
KEYS = (*PEOPLE, *THINGS)

Store = dict[str, dict[str, str]]


def store(world: int) -> Store:
    """Generate the facts of world number `world`: ten people, each with a boss, a friend and a mentor among the others,
    a city and a pet."""
    rng = random.Random(f"lookup world {world}")
    people = rng.sample(NAMES, 10)
    return {
        person: {key: rng.choice([other for other in people if other != person]) for key in PEOPLE}
        | {key: rng.choice(values) for key, values in THINGS.items()}
        for person in people
    }


@dataclass(frozen=True)
class Question:
    """A question: the person to start from, and the keys to look up in order."""

    name: str
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        return "What is " + "'s ".join((self.name, *self.keys)) + "?"

    def steps(self, facts: Store) -> list[tuple[str, str, str]]:
        """Return (person, key, value) for each look-up."""
        return follow(self.name, self.keys, facts)


def read(text: str) -> Question:
    """Parse a question in the form that `Question.text` produces."""
    name, *keys = text.removeprefix("What is ").removesuffix("?").split("'s ")
    return Question(name, tuple(keys))


def question(facts: Store, rng: random.Random) -> Question:
    """Sample a question of one, two or three look-ups with equal probability."""
    hops = rng.randint(1, 3)
    return Question(rng.choice(list(facts)), (*(rng.choice(PEOPLE) for _ in range(hops - 1)), rng.choice(KEYS)))


def rows(n: int, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "answer", "world"}. The facts of a task are generated from `world`."""
    for i in range(n):
        world = first_world(split, seed) + i
        facts = store(world)
        asked = question(facts, random.Random(f"lookup question {world}"))
        answer = asked.steps(facts)[-1][2]
        yield {"id": row_id("lookup", split, seed, i), "question": asked.text, "answer": answer, "world": world}


class Lookup:
    """Environment for one question, with a tool that looks up facts in a private store."""

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the field `world` is not an integer or the answer is not a string."""
        int_field(task, "world")
        check_answer(task.fields.get("answer", ""), str, "a string")

    async def reset(self, task: Task, seed: int) -> None:
        self.facts = store(int_field(task, "world"))
        self.asked: list[tuple[str, str]] = []

    @tool
    async def lookup(self, of: str, what: str) -> str:
        """Look up one fact about a person.

        Args:
            of: the person's name.
            what: boss, friend, mentor, city or pet.
        """
        self.asked.append((of, what))
        if of not in self.facts:
            raise ToolError("no such person")
        if what not in self.facts[of]:
            raise ToolError("no such fact")
        return self.facts[of][what]

    async def reward(self, final: str | None, answer: str) -> float:
        """Return 1 if the final text equals the answer, ignoring surrounding whitespace, else 0."""
        return float(final is not None and final.strip() == answer.strip())

    async def fork(self, into: Lookup) -> None:
        into.facts, into.asked = self.facts, list(self.asked)


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Make the look-ups that the question requires, one per turn, then answer with the last result."""
    asked = read(text_of(task.messages[-1]))
    results = tool_outputs(messages)
    if len(results) == len(asked.keys):
        return results[-1]
    return "lookup", {"of": [asked.name, *results][-1], "what": asked.keys[len(results)]}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Either look up a random fact, or answer with a random word."""
    if rng.random() < 0.5:
        return rng.choice((*NAMES, *CITIES, *PETS))
    return "lookup", {"of": rng.choice(NAMES), "what": rng.choice(KEYS)}


family = Family(
    name="lookup",
    what="a private store of facts; questions of one to three look-ups",
    environment=Lookup,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    size="1,500 train and 512 test tasks included; any number can be generated",
    splits={"train": 1500, "test": 512},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
