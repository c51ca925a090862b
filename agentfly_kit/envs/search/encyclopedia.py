"""A fictional encyclopedia of people, works, towns and countries, with multi-hop questions about them.

An encyclopedia is generated from a number. The same number gives the same encyclopedia on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from agentfly_kit import task_files
from agentfly_kit.envs.family import follow

_WORDS: dict[str, str] = task_files.bundled_json("vocabularies", "encyclopedia.json")
FIRST, LAST, TOWNS, COUNTRIES, RIVERS, COINS, TRADES, QUALITIES, THINGS = (
    tuple(words.split()) for words in _WORDS.values()
)

# Maps each kind of entry to its relations, and each relation to the kind of its values.
KINDS = {
    "work": {"author": "person"},
    "person": {"birthplace": "town", "mentor": "person", "trade": "trade"},
    "town": {"country": "country", "river": "river"},
    "country": {"capital": "town", "currency": "coin"},
}
RELATIONS = tuple(dict.fromkeys(relation for relations in KINDS.values() for relation in relations))
PEOPLE, WORKS = 80, 60
# Maximum number of hops of a question.
MAX_HOPS = 3


@dataclass(frozen=True)
class Entry:
    """One article: its title, its kind, and its facts as (relation, value) pairs."""

    title: str
    kind: str
    facts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The text of the article, in two sentences."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        facts = ", and ".join(f"the {relation} is {value}" for relation, value in self.facts)
        return f"{self.title} is {article} {self.kind}. Of {self.title}, {facts}."


@dataclass(frozen=True)
class Question:
    """A multi-hop question: the title of an entry to start from, and the relations to follow in order."""

    start: str
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        """The question in English, with the last relation first."""
        return "What is " + "".join(f"the {relation} of " for relation in reversed(self.relations)) + self.start + "?"


def read(text: str) -> Question:
    """Parse a question in the form that `Question.text` produces."""
    *relations, start = text.removeprefix("What is ").removesuffix("?").split(" of ")
    return Question(start, tuple(r.removeprefix("the ") for r in reversed(relations)))


@lru_cache(32)
def entries(world: int = 0) -> dict[str, Entry]:
    """Generate encyclopedia number `world` and return its entries, keyed by title."""
    rng = random.Random(f"encyclopedia {world}")
    people = [f"{a} {b}" for a, b in _pairs(FIRST, LAST, PEOPLE, rng)]
    works = [f"The {a} {b}" for a, b in _pairs(QUALITIES, THINGS, WORKS, rng)]
    home = {town: rng.choice(COUNTRIES) for town in TOWNS}
    # Every country needs at least one town, its capital.
    home |= zip(rng.sample(TOWNS, len(COUNTRIES)), COUNTRIES, strict=True)
    coins = dict(zip(COUNTRIES, rng.sample(COINS, len(COINS)), strict=True))
    found = {title: Entry(title, "work", (("author", rng.choice(people)),)) for title in works}
    for title in people:
        mentor = rng.choice([other for other in people if other != title])
        facts = (("birthplace", rng.choice(TOWNS)), ("mentor", mentor), ("trade", rng.choice(TRADES)))
        found[title] = Entry(title, "person", facts)
    for title in TOWNS:
        found[title] = Entry(title, "town", (("country", home[title]), ("river", rng.choice(RIVERS))))
    for title in COUNTRIES:
        capital = rng.choice([town for town in TOWNS if home[town] == title])
        found[title] = Entry(title, "country", (("capital", capital), ("currency", coins[title])))
    return found


def _pairs(first: tuple[str, ...], second: tuple[str, ...], n: int, rng: random.Random) -> list[tuple[str, str]]:
    return rng.sample([(a, b) for a in first for b in second], n)


@lru_cache(32)
def _facts(world: int) -> dict[str, dict[str, str]]:
    return {title: dict(entry.facts) for title, entry in entries(world).items()}


def path(question: Question, world: int = 0) -> list[tuple[str, str, str]]:
    """Follow a question's relations. Return (title, relation, value) for each hop; the last value is the answer."""
    return follow(question.start, question.relations, _facts(world))


@lru_cache(32)
def questions(world: int = 0) -> tuple[Question, ...]:
    """Return all questions of one to three hops that visit no entry twice, in random order.

    Questions of one, two and three hops alternate until no question of one of these lengths is left. The rest follow.
    """
    by_length: dict[int, list[Question]] = {n: [] for n in range(1, MAX_HOPS + 1)}
    every = entries(world)
    for title, entry in every.items():
        trails: list[tuple[Entry, tuple[str, ...], tuple[str, ...]]] = [(entry, (), (title,))]
        while trails:
            at, relations, been = trails.pop()
            for relation, value in at.facts:
                if value in been:
                    continue
                chain = (*relations, relation)
                by_length[len(chain)].append(Question(title, chain))
                if len(chain) < MAX_HOPS and value in every:
                    trails.append((every[value], chain, (*been, value)))
    rng = random.Random(f"encyclopedia questions {world}")
    for some in by_length.values():
        rng.shuffle(some)
    shortest = min(map(len, by_length.values()))
    mixed = [q for row in zip(*by_length.values(), strict=False) for q in row]
    rest = [q for some in by_length.values() for q in some[shortest:]]
    rng.shuffle(rest)
    return (*mixed, *rest)
