"""An invented encyclopedia: people, works, towns and countries that do not exist, and questions that lead from one to
another. The same number makes the same one everywhere. Knows no search.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

FIRST = tuple(
    "Abel Brana Caro Delia Edan Fenna Goran Hedda Isko Jelle Karin Lorcan Mirel Nevin Odile Petra Quint Rurik Selma "  # noqa: SIM905
    "Tavi Ulla Viggo Wilma Yorick".split()
)
LAST = tuple(
    "Ambrose Balt Corrin Dovale Estrid Fallow Grane Holm Ister Jarrow Kestle Lindow Mosk Norby Orrin Penhale Quist "  # noqa: SIM905
    "Rask Sorrel Tolland Ulven Varley Westrin Zander".split()
)
TOWNS = tuple(
    "Aldermoor Brinhaven Calder Dunmere Eastvale Fenwick Garlow Hexham Ivelford Jarndale Kelmont Larkhill Marrow "  # noqa: SIM905
    "Nethby Ormsk Pendral Quarley Redmarsh Stavern Thornby Umberg Vessany Wexmoor Yarrow".split()
)
COUNTRIES = tuple("Belvoria Cantara Drennia Estovia Fervale Gaulden Hestria Ordania".split())  # noqa: SIM905
RIVERS = tuple("Ash Brell Cornet Dove Elbin Fossil Glim Mell".split())  # noqa: SIM905
COINS = tuple("bezant crown dorn florin groat mark sequin taler".split())  # noqa: SIM905
TRADES = tuple("baker carpenter doctor engineer gardener painter sailor teacher".split())  # noqa: SIM905
QUALITIES = tuple("Amber Broken Crimson Distant Empty Frozen Golden Hidden Ivory Quiet Silver Winter".split())  # noqa: SIM905
THINGS = tuple("Bridge Castle Door Forest Garden Harbour Island Lantern Mirror Orchard River Tower".split())  # noqa: SIM905

KINDS = {
    "work": {"author": "person"},
    "person": {"birthplace": "town", "mentor": "person", "trade": "trade"},
    "town": {"country": "country", "river": "river"},
    "country": {"capital": "town", "currency": "coin"},
}
"""What is told of each kind of thing, and of which kind that is."""
RELATIONS = tuple(dict.fromkeys(relation for relations in KINDS.values() for relation in relations))
PEOPLE, WORKS = 80, 60
MAX_HOPS = 3
"""Hops of the longest questions."""


@dataclass(frozen=True)
class Entry:
    """One article: its title, the kind of thing, and what is told of it."""

    title: str
    kind: str
    facts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """Two sentences."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        facts = ", and ".join(f"the {relation} is {value}" for relation, value in self.facts)
        return f"{self.title} is {article} {self.kind}. Of {self.title}, {facts}."


@dataclass(frozen=True)
class Question:
    """Where to begin, and what to follow from there on, in order."""

    start: str
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        """The last relation comes first, as in English."""
        return "What is " + "".join(f"the {relation} of " for relation in reversed(self.relations)) + self.start + "?"


def read(text: str) -> Question:
    """The question of a task's text."""
    *relations, start = text.removeprefix("What is ").removesuffix("?").split(" of ")
    return Question(start, tuple(r.removeprefix("the ") for r in reversed(relations)))


@lru_cache(32)
def entries(world: int = 0) -> dict[str, Entry]:
    """By title."""
    rng = random.Random(f"encyclopedia {world}")
    people = [f"{a} {b}" for a, b in _pairs(FIRST, LAST, PEOPLE, rng)]
    works = [f"The {a} {b}" for a, b in _pairs(QUALITIES, THINGS, WORKS, rng)]
    home = {town: rng.choice(COUNTRIES) for town in TOWNS}
    for country, town in zip(COUNTRIES, rng.sample(TOWNS, len(COUNTRIES)), strict=True):
        home[town] = country  # so that each has a capital of its own
    coins = dict(zip(COUNTRIES, rng.sample(COINS, len(COINS)), strict=True))
    found: dict[str, Entry] = {}
    for title in works:
        found[title] = Entry(title, "work", (("author", rng.choice(people)),))
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


def path(question: Question, world: int = 0) -> list[tuple[str, str, str]]:
    """(title, relation, value) of each hop; the last value is the answer.

    Raises:  KeyError for what the encyclopedia does not have.
    """
    steps, title = [], question.start
    for relation in question.relations:
        value = dict(entries(world)[title].facts)[relation]
        steps.append((title, relation, value))
        title = value
    return steps


@lru_cache(32)
def questions(world: int = 0) -> tuple[Question, ...]:
    """All of one to three hops that never come back to where they were, in drawn order: a third of each length as far
    as the shortest reach, then the rest."""
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
