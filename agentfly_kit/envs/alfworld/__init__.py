"""alfworld: household tasks in a text world, with the vocabulary, commands, six task types and reward of ALFWorld.

`tasks(n, split, size="full")` generates games and needs no other package. `af.load_tasks("alfworld")` returns small
games that `af.tiny.policy("alfworld")` can learn to win. With the packages listed in official.py, `tasks_in(folder)`
loads ALFWorld's own games and other TextWorld games for the same agent.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from agentfly_kit import tasks as task_sets
from agentfly_kit._async import threads
from agentfly_kit.envs.alfworld import games, official, plans
from agentfly_kit.envs.alfworld.games import KINDS, Game, Size
from agentfly_kit.envs.alfworld.house import NOTHING, House
from agentfly_kit.envs.family import Family, Move, check_kinds, first_world, int_field, row_id
from agentfly_kit.errors import SettingsError, check_count
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

# Default maximum number of commands per game, as in ALFWorld.
STEPS = 50

# Environment options with which the shipped policy was trained on the small games of `af.load_tasks("alfworld")`. Run
# that policy with `agent(af.tiny.policy("alfworld"), options=BRIEF)`.
BRIEF: dict[str, Any] = {"steps": 16}


class ALFWorld:
    """Environment for one ALFWorld game.

    Args:
        steps: maximum number of commands per game.
        admissible: append the list of admissible commands to every observation.
    """

    def __init__(self, steps: int = STEPS, admissible: bool = False) -> None:
        check_count("steps", steps)
        self.limit = steps
        self.shows = admissible

    def check_task(self, task: Task) -> None:
        """Raise TaskError or SettingsError if the task has no playable game."""
        if "file" in task.fields:
            official.check(task.fields["file"])
        else:
            game_of(task)

    async def reset(self, task: Task, seed: int) -> str:
        self.commands: list[str] = []
        self.steps = self.invalid = 0
        self.done = self.won = False
        self.stages = dict.fromkeys(("found", "taken", "prepared"), False)
        self.game: Game | None = None
        self.world: House | official.Session
        if "file" in task.fields:
            self.world = await threads.call(official.Session, task.fields["file"])
            return self._under(self.world.opening)
        self.game = game_of(task)
        self.world = self.game.house()
        return self._under(self.game.opening)

    def _under(self, text: str) -> str:
        return f"{text}\n\nAdmissible: {', '.join(self.world.admissible())}" if self.shows else text

    @tool
    async def act(self, command: str) -> ToolResult:
        """Carry out one command in the house.

        Args:
            command: such as "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "heat apple 1 with
                microwave 1", "move apple 1 to shelf 1", "use desklamp 1", "examine shelf 1", "inventory", "look".
        """
        self.steps += 1
        self.commands.append(command)
        if isinstance(self.world, House):
            observation = self.world.do(command)
            assert self.game is not None
            self.won = self.game.goal.met(self.world)
            self._progress(self.world, self.game)
        else:
            observation = await threads.call(self.world.do, command)
            self.won = self.world.won
        self.done = self.won or self.steps >= self.limit
        happened = observation != NOTHING
        self.invalid += not happened
        return ToolResult(happened, observation if self.done else self._under(observation))

    @tool
    async def admissible_commands(self) -> str:
        """List the commands that are possible in the current state. This is not counted as a step."""
        return ", ".join(self.world.admissible())

    def _progress(self, house: House, game: Game) -> None:
        goal, held = game.goal, house.held
        near = [*house.seen, *([held] if held else [])]
        reached = {
            "found": any(thing[0] == goal.thing for thing in near),
            "taken": held is not None and held[0] == goal.thing,
            "prepared": self._prepared(house, game),
        }
        self.stages = {name: was or reached[name] for name, was in self.stages.items()}

    @staticmethod
    def _prepared(house: House, game: Game) -> bool:
        goal = game.goal
        if goal.kind == "look_at_obj_in_light":
            return any(thing[0] == goal.place for thing in house.used)
        if goal.kind == "pick_two_obj_and_place":
            return goal.placed(house) >= 1
        return house.held is not None and goal.ready(house, house.held)

    @property
    def plan(self) -> list[str]:
        """Commands that win the game from the current state, even if the agent has not seen all objects yet."""
        if isinstance(self.world, House):
            assert self.game is not None
            return plans.plan(self.world, self.game.goal)
        return self.world.plan

    async def reward(self) -> dict[str, float]:
        """Return 1 if the goal is met, else 0. Additional metrics: `steps` and `invalid` (number of invalid commands).

        Generated games have further metrics: `found` and `taken` are 1 if an object of the goal's type was seen or
        held; `prepared` is 1 if such an object was in the required state, the lamp was on, or one of two objects was in
        its place.
        """
        score = float(self.won)
        stages = {} if self.game is None else {name: float(was or self.won) for name, was in self.stages.items()}
        return {"reward": score, "success": score, "steps": self.steps, "invalid": self.invalid, **stages}

    async def fork(self, into: ALFWorld) -> None:
        """Copy the state to `into`. A TextWorld game is restarted and its commands are replayed."""
        world = self.world
        into.__dict__.update(self.__dict__)
        into.commands = list(self.commands)
        into.world = world.copy() if isinstance(world, House) else await threads.call(world.copy)


def game_of(task: Task) -> Game:
    """Generate the game from a task's `game` and `size`. Raises SettingsError or TaskError if a field is invalid."""
    if "game" not in task.fields:
        raise SettingsError("field 'game' is missing; create tasks with af.envs.alfworld.tasks() or tasks_in(folder)")
    return games.game(int_field(task, "game"), task.fields.get("size", "full"))


def rows(
    n: int, split: str, seed: int = 0, size: Size = "full", kinds: Sequence[str] = KINDS
) -> Iterator[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "game", "size", "kind"}. No game is in both splits.

    Args:
        n: number of rows.
        split: "train" or "test".
        seed: selects the games.
        size: "full", or "small" for houses with few receptacles.
        kinds: task types to include; the rows cycle through them.
    """
    check_kinds(kinds, KINDS)
    first = first_world(split, seed)
    first -= first % len(KINDS)
    prefix = split if size == "full" else f"{split}-{size}"
    numbers = (i for i in range(first, first + 1_000_000) if KINDS[i % len(KINDS)] in kinds)
    for which in itertools.islice(numbers, n):
        goal = games.game(which, size).goal
        question = f"{goal.text[0].upper()}{goal.text[1:]}."
        name = row_id("alfworld", prefix, seed, which - first)
        yield {"id": name, "question": question, "game": which, "size": size, "kind": goal.kind}


def tasks_in(folder: str | os.PathLike[str], *, kinds: Sequence[str] | None = None) -> Tasks:
    """Load ALFWorld's own games (`json_2.1.1/...`) or other TextWorld games from a folder.

    A game in a folder named train, valid_seen or valid_unseen belongs to the split of that name. As in ALFWorld,
    games with "movable" or "Sliced" in their path and games marked as unsolvable are skipped. The TextWorld packages
    are needed only when the first chain runs.

    Args:
        folder: the folder, searched recursively.
        kinds: task types to load; by default all.

    Raises:  SettingsError if the folder does not exist, contains no game (with download instructions), or contains an
             invalid game file.
    """
    return task_sets.tasks_from(official.rows(folder, kinds), name="alfworld")


def _played(task: Task, messages: Sequence[Message]) -> tuple[Game, House]:
    made = game_of(task)
    house = made.house()
    for message in messages:
        for call in message.get("tool_calls") or ():
            command = call["function"]["arguments"].get("command")
            if call["function"]["name"] == "act" and isinstance(command, str):
                house.do(command)
    return made, house


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Choose the next command of a plan that wins the game from the current state."""
    made, house = _played(task, messages)
    plan = plans.plan(house, made.goal)
    return ("act", {"command": plan[0]}) if plan else "Done."


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Choose a random admissible command."""
    _, house = _played(task, messages)
    return "act", {"command": rng.choice(house.admissible())}


family = Family(
    name="alfworld",
    what="six types of household task in a text world, with ALFWorld's vocabulary and rules",
    environment=ALFWorld,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=STEPS,
    size="768 train and 192 test tasks in small houses included; generates 2 million per seed; reads ALFWorld's games",
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
