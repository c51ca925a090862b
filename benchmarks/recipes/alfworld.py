"""Demonstrations for the `alfworld` policy: small houses, with one token for each word and phrase.

The demonstrator knows only what an agent would observe: it visits the receptacles in the order in which the house lists
them until it finds the object. The policy is limited to this grammar and does not work in houses of size "full".
Observations, commands and reward are those of the environment.
"""

from __future__ import annotations

from typing import Any, ClassVar

from agentfly_kit.envs import alfworld
from agentfly_kit.envs.alfworld import games
from agentfly_kit.envs.alfworld.games import TREATED, Game, Goal
from agentfly_kit.envs.alfworld.house import OPENABLE, House, Name, text
from agentfly_kit.envs.alfworld.plans import Walk
from agentfly_kit.trajectories import Trajectory
from recipes.base import UNSURE, BaseRecipe, single_tokens

_PLACES = ("bed", "countertop", "desk", "diningtable", "drawer", "fridge", "microwave", "shelf", "sinkbasin")
_THINGS = (
    "apple", "book", "bowl", "bread", "cd", "cellphone", "cup", "egg", "laptop", "mug", "pen", "pencil", "plate",
    "potato", "tomato",
)  # fmt: skip
_GOALS = (
    "put a", "put some", "look at", "examine the", "put a clean", "clean some", "put a hot", "heat some", "put a cool",
    "cool some", "put two", "find two",
)  # fmt: skip
_PHRASES = (
    " in", " on", " under the", " with the", " and put it in", " and put them in", ", a", ", and a", ". On the",
    ", you see a", ", you see nothing.", ". The", " is closed.", " is open. In it, you see a",
    " is open. In it, you see nothing.", "You arrive at", "You open the", "You pick up the", " from the",
    "You move the", " to the", "You heat the", "You clean the", "You cool the", " using the", "You turn on the",
    "Nothing happens.", "-= Welcome to TextWorld, ALFRED! =-", "Your task is to:",
    "You are in the middle of a room. Looking quickly around you, you see a",
    '{"name":"act","arguments":{"command":"', "go to", "open", "take", "move", "use", "heat", "clean", "cool",
    " from", " to", " with", "act", "command", ", admissible_commands",
)  # fmt: skip
# First game number used for pretraining; tasks use lower numbers.
_FIRST_GAME = 10_000_000_000


class _Search(Walk):
    """Solves a task using only observed information."""

    def __init__(self, house: House) -> None:
        super().__init__(house)
        self._unseen = [place for place in house.inside if place[0] not in OPENABLE]  # small houses hide no objects
        self._brought: set[Name] = set()

    def run(self, goal: Goal) -> None:
        """Execute commands until the goal is met."""
        if goal.kind == "look_at_obj_in_light":
            self._take_any(goal.thing)
            self.do(f"use {text(self._find(goal.place))}")
        else:
            for _ in range(2 if goal.kind == "pick_two_obj_and_place" else 1):
                self._bring(goal)
        assert goal.met(self.house), (goal, self.steps)

    def go(self, place: Name) -> None:
        super().go(place)
        if place in self._unseen:
            self._unseen.remove(place)

    def _bring(self, goal: Goal) -> None:
        thing = self._take_any(goal.thing)
        if goal.kind in TREATED:
            verb, where, _ = TREATED[goal.kind]
            self.go((where, 1))
            self.do(f"{verb} {text(thing)} with {where} 1")
        self.put(thing, (goal.place, 1))
        self._brought.add(thing)

    def _take_any(self, kind: str) -> Name:
        thing = self._find(kind)
        assert self.house.here is not None
        self.do(f"take {text(thing)} from {text(self.house.here)}")
        return thing

    def _find(self, kind: str) -> Name:
        """Go to an object of this type that is not delivered yet, visiting new receptacles if none has been seen."""
        while True:
            for place, things in self.house.inside.items():
                for thing in things if place not in self._unseen else ():
                    if thing[0] == kind and thing not in self._brought:
                        self.go(place)
                        return thing
            self.go(self._unseen[0])


def searched(game: Game, goal: Goal | None = None) -> list[tuple[str, str]]:
    """Return the (command, observation) pairs of a solution that uses only observed information."""
    search = _Search(game.house())
    search.run(goal or game.goal)
    return search.steps


class Recipe(BaseRecipe):
    """Recipe for the `alfworld` policy. Each example is a game."""

    name = "alfworld"
    words = single_tokens(
        [
            *(f" {name}" for name in (*_PLACES, *_THINGS, "desklamp", "1", "2")),
            *(word for goal in _GOALS for word in (f" {goal}", f"{goal[0].upper()}{goal[1:]}")),
            *_PHRASES,
        ]
    )
    tools = tuple(tool.schema for tool in alfworld.family.tools)
    # solves: do the task; careless: deliver the object without cleaning, heating or cooling it, then answer "I don't
    # know"; gives up: answer "I don't know" halfway; unsure: answer "I don't know" immediately.
    habits: ClassVar = {"solves": 9, "careless": 2, "gives up": 2, "unsure": 19}
    mixed_steps = 100
    skill_batch = 16
    half = True

    @classmethod
    def tasks(cls, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
        return {
            split: list(alfworld.rows(n, split, seed, size="small")) for split, n in (("train", 768), ("test", 192))
        }

    def sample(self) -> Game:
        return games.game(_FIRST_GAME + self.rng.randrange(10_000_000_000), "small")

    def demonstrate(self, habit: str, example: Game) -> Trajectory:
        goal, answer = example.goal, UNSURE
        as_it_is = Goal("pick_and_place_simple", goal.thing, goal.place)
        if habit == "unsure":
            steps = []
        elif habit == "careless" and goal.kind in TREATED and not as_it_is.met(example.house()):
            steps = searched(example, as_it_is)
        else:
            steps = searched(example)
            if habit == "solves":
                answer = ""
            else:
                steps = steps[: self.rng.randrange(1, len(steps))]
        calls: list[tuple[str, dict[str, Any], str | None]] = [("act", {"command": c}, seen) for c, seen in steps]
        if not answer:  # the game is over: the model does not see the last observation
            calls[-1] = (*calls[-1][:2], None)
        question = f"{goal.text[0].upper()}{goal.text[1:]}."
        return self.conversation(f"{question}\n\n{example.opening}", calls, answer)
