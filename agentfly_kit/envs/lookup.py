"""lookup: a private store of facts about people, and questions that take one to three look-ups in a row.

Nothing of the store is in the prompt, and each task has a store of its own: what is not looked up can only be guessed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.envs.family import Family, Move, int_field, tool_outputs
from agentfly_kit.errors import TaskError, ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

NAMES = tuple(
    "Ada Alma Amir Anna Aron Bela Bram Cara Cleo Dario Dina Egon Elif Emil Enzo Esra Fay Finn Greta Hana Hugo Ida Ilja "  # noqa: SIM905
    "Iris Jan Juno Kaya Kurt Lena Levi Lola Mara Milo Nadia Nils Olga Omar Otto Pia Ravi Rosa Saul Sina Theo Uma Vera "
    "Wim Yara".split()
)
CITIES = tuple(
    "Bergen Cairo Delhi Gdansk Hanoi Izmir Kyoto Lagos Lima Oslo Porto Quito Riga Seoul Turin Zagreb".split()  # noqa: SIM905
)
PETS = tuple("cat dog fish frog goat hen horse mouse owl parrot rabbit tortoise".split())  # noqa: SIM905
PEOPLE = ("boss", "friend", "mentor")
"""What leads from one person to another."""
THINGS = {"city": CITIES, "pet": PETS}
KEYS = (*PEOPLE, *THINGS)

Store = dict[str, dict[str, str]]


def store(world: int) -> Store:
    """The facts of a world: ten people, for each a boss, a friend and a mentor among the others, a city and a pet."""
    rng = random.Random(f"lookup world {world}")
    people = rng.sample(NAMES, 10)
    return {
        person: {key: rng.choice([other for other in people if other != person]) for key in PEOPLE}
        | {key: rng.choice(values) for key, values in THINGS.items()}
        for person in people
    }


@dataclass(frozen=True)
class Question:
    """Whom to begin with, and what to look up from there on, in order."""

    name: str
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        return "What is " + "'s ".join((self.name, *self.keys)) + "?"

    def steps(self, facts: Store) -> list[tuple[str, str, str]]:
        """(of, what, value) of each look-up."""
        steps, name = [], self.name
        for key in self.keys:
            steps.append((name, key, facts[name][key]))
            name = facts[name][key]
        return steps


def read(text: str) -> Question:
    """The question of a task's text."""
    name, *keys = text.removeprefix("What is ").removesuffix("?").split("'s ")
    return Question(name, tuple(keys))


def question(facts: Store, rng: random.Random) -> Question:
    """One, two or three look-ups, a third of each."""
    hops = rng.randint(1, 3)
    return Question(rng.choice(list(facts)), (*(rng.choice(PEOPLE) for _ in range(hops - 1)), rng.choice(KEYS)))


_FIRST = {"train": 0, "test": 1_000_000}
"""Where the worlds of each split begin."""


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"id", "question", "answer", "world"}; every one has a world of its own, and no world is in both splits."""
    found = []
    for i in range(n):
        world = 2_000_000 * seed + _FIRST[split] + i
        facts = store(world)
        asked = question(facts, random.Random(f"lookup question {world}"))
        answer = asked.steps(facts)[-1][2]
        name = f"lookup-{split}-{i:04}" if seed == 0 else f"lookup-{split}-{seed}-{i:04}"
        found.append({"id": name, "question": asked.text, "answer": answer, "world": world})
    return found


class Lookup:
    """The store of one task."""

    async def reset(self, task: Task, seed: int) -> None:
        """Raises TaskError for a world that is no number, and for an answer that no text can be."""
        self.facts = store(int_field(task, "world", family="lookup"))
        answer = task.fields.get("answer", "")
        if not isinstance(answer, str):
            raise TaskError(f"task {task.id!r}: its answer {answer!r} is {type(answer).__name__}; want a text")
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
        """1 for the very word."""
        return float(final is not None and final.strip() == answer.strip())

    async def fork(self, into: Lookup) -> None:
        into.facts, into.asked = self.facts, list(self.asked)


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Follows the question, one look-up a turn, and answers with the last result."""
    asked = read(str(task.messages[-1]["content"]))
    results = tool_outputs(messages)
    if len(results) == len(asked.keys):
        return results[-1]
    return "lookup", {"of": [asked.name, *results][-1], "what": asked.keys[len(results)]}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Looks up anything of anybody, or says any word."""
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
    size="1,500 train and 512 test ship; any number is made",
    splits={"train": 1500, "test": 512},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
