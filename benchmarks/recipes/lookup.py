"""Demonstrations for pretraining the `lookup` policy, using the environment's facts and questions."""

from __future__ import annotations

from typing import ClassVar

from agentfly_kit.envs.lookup import CITIES, KEYS, NAMES, PETS, Question, Store, family, question, store
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe

# First world number used for pretraining; tasks use lower numbers.
_FIRST_WORLD = 5_000_000


class Recipe(BaseRecipe):
    """Recipe for the `lookup` policy. Each example is a question and the facts that answer it."""

    name = "lookup"
    words = ("lookup", "of", "what", *NAMES, *CITIES, *PETS, *KEYS)
    tools = tuple(tool.schema for tool in family.tools)
    # solves: do all look-ups and answer with the last result; stops early: answer with the first result; forgets: do
    # all look-ups, then answer "I don't know"; guesses: answer with a random word; unsure: answer "I don't know".
    habits: ClassVar = {"solves": 9, "stops early": 1, "forgets": 1, "guesses": 1, "unsure": 20}

    def sample(self) -> tuple[Question, Store]:
        facts = store(_FIRST_WORLD + self.rng.randrange(1_000_000_000))
        return question(facts, self.rng), facts

    def demonstrate(self, habit: str, example: tuple[Question, Store]) -> Trajectory:
        asked, facts = example
        steps = asked.steps(facts)
        answer = steps[-1][2]
        if habit in ("unsure", "guesses"):
            steps, answer = [], UNSURE if habit == "unsure" else self.rng.choice((*NAMES, *CITIES, *PETS))
        elif habit == "stops early":
            steps, answer = steps[:1], steps[0][2]
        elif habit == "forgets":
            answer = UNSURE
        return self.conversation(
            asked.text, [("lookup", {"of": of, "what": what}, value) for of, what, value in steps], answer
        )
