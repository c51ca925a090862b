"""Demonstrations for pretraining the `search` policy, using the environment's encyclopedia.

The task is simplified: a search returns one clause of one document (see `af.envs.search.BRIEF`), and every name is one
or two tokens.
"""

from __future__ import annotations

from typing import ClassVar

from agentfly_kit.envs.search import Corpus, encyclopedia, family, snippet
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe, single_tokens

_NAMES = (
    *(*encyclopedia.FIRST, *encyclopedia.LAST, *encyclopedia.TOWNS, *encyclopedia.COUNTRIES),
    *(*encyclopedia.RIVERS, *encyclopedia.COINS, *encyclopedia.TRADES, *encyclopedia.QUALITIES, *encyclopedia.THINGS),
)
_OTHERS = ("What", "the", "is", "of", "Of", "The", *encyclopedia.RELATIONS, *encyclopedia.KINDS)
# Encyclopedias used for pretraining. They exclude the tasks' encyclopedia, so that its facts cannot be memorized.
_WORLDS = range(1000, 1020)


class Recipe(BaseRecipe):
    """Recipe for the `search` policy. Each example is a question and the number of its encyclopedia."""

    name = "search"
    words = single_tokens(("search", "query", *_NAMES, *_OTHERS, *(f" {word}" for word in (*_NAMES, *_OTHERS))))
    tools = tuple(tool.schema for tool in family.tools)
    # solves: search hop by hop and answer with the last value; stops early: answer with the first value; forgets:
    # search, then answer "I don't know"; guesses: answer with a random name; unsure: answer "I don't know".
    habits: ClassVar = {"solves": 9, "stops early": 2, "forgets": 1, "guesses": 2, "unsure": 18}
    mixed_steps = 120
    half = True

    def sample(self) -> tuple[encyclopedia.Question, int]:
        world = self.rng.choice(_WORLDS)
        return self.rng.choice(encyclopedia.questions(world)), world

    def demonstrate(self, habit: str, example: tuple[encyclopedia.Question, int]) -> Trajectory:
        question, world = example
        steps = encyclopedia.path(question, world)
        answer = steps[-1][2]
        if habit in ("unsure", "guesses"):
            steps, answer = [], UNSURE if habit == "unsure" else self.rng.choice(_NAMES)
        elif habit == "stops early":
            steps, answer = steps[:1], steps[0][2]
        elif habit == "forgets":
            answer = UNSURE
        corpus, calls = Corpus.invented(world), []
        for title, relation, _ in steps:
            query = f"{title} {relation}"
            document = corpus.documents[corpus.index().find(query, 1)[0]]
            calls.append(("search", {"query": query}, snippet(document, query)))
        return self.conversation(question.text, calls, answer)
