"""alfworld: household tasks in a house of text, with ALFWorld's words, commands, six kinds of task and its reward.

`tasks(n, split, size="full")` makes games from numbers, and needs nothing; `af.load_tasks("alfworld")` has small ones,
which `af.tiny.policy("alfworld")` learns to win. The original's own games, and any TextWorld game, are played by the
same agent where the packages are installed: `tasks_in(folder)`; see official.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import random
from collections.abc import Sequence
from typing import Any, get_args

from agentfly_kit import tasks as task_sets
from agentfly_kit.envs.alfworld import games, official, plans
from agentfly_kit.envs.alfworld.games import KINDS, Game, Size
from agentfly_kit.envs.alfworld.house import NOTHING, House
from agentfly_kit.envs.family import Family, Move, int_field
from agentfly_kit.errors import SettingsError
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

STEPS = 50
"""The original's usual limit."""

BRIEF: dict[str, Any] = {"steps": 16}
"""How the policy that ships was taught to keep house, in games of the size "small":
`agent(af.tiny.policy("alfworld"), options=BRIEF)` on `af.load_tasks("alfworld")`."""


class ALFWorld:
    """One game.

    steps        commands until the game is over, won or not.
    admissible   put the list of what can be done under every observation.
    """

    def __init__(self, steps: int = STEPS, admissible: bool = False) -> None:
        if steps < 1:
            raise SettingsError(f"steps={steps}: want at least 1")
        self.limit = steps
        self.shows = admissible

    async def reset(self, task: Task, seed: int) -> str:
        self.commands: list[str] = []
        self.steps = self.invalid = 0
        self.done = self.won = False
        self.stages = dict.fromkeys(("found", "taken", "prepared"), False)
        self.game: Game | None = None
        self.world: House | official.Session
        if "file" in task.fields:
            self.world = await asyncio.to_thread(official.Session, task.fields["file"])
            return self._under(self.world.opening)
        self.game = game_of(task)
        self.world = self.game.house()
        return self._under(self.game.opening)

    def _under(self, text: str) -> str:
        return f"{text}\n\nAdmissible: {', '.join(self.world.admissible())}" if self.shows else text

    @tool
    async def act(self, command: str) -> ToolResult:
        """Do one thing in the house.

        Args:
            command: such as "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "heat apple 1 with
                microwave 1", "move apple 1 to shelf 1", "use desklamp 1", "examine shelf 1", "inventory", "look".
        """
        self.steps += 1
        self.commands.append(command)
        if isinstance(self.world, House):
            said = self.world.do(command)
            assert self.game is not None
            self.won = self.game.goal.met(self.world)
            self._progress(self.world, self.game)
        else:
            said = await asyncio.to_thread(self.world.do, command)
            self.won = self.world.won
        self.done = self.won or self.steps >= self.limit
        happened = said != NOTHING
        self.invalid += not happened
        return ToolResult(happened, said if self.done else self._under(said))

    @tool
    async def admissible_commands(self) -> str:
        """List every command that does something now. It takes no time."""
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
        """Commands that win from here on, by one who knows where everything is."""
        if isinstance(self.world, House):
            assert self.game is not None
            return plans.plan(self.world, self.game.goal)
        return self.world.plan

    @property
    def state(self) -> dict[str, Any]:
        """For rewards."""
        return {
            "won": self.won, "steps": self.steps, "invalid": self.invalid, "commands": list(self.commands),
            "world": self.world, "game": self.game, **self.stages,
        }  # fmt: skip

    async def reward(self) -> dict[str, float]:
        """1 where the goal is met, else 0. Beside it how far the chain came.

        `found` and `taken` are of a thing of the goal's kind. `prepared`: it is clean, hot or cool as wanted, the lamp
        is on, or the first of two is in its place.
        """
        score = float(self.won)
        stages = {} if self.game is None else {name: float(was or self.won) for name, was in self.stages.items()}
        return {"reward": score, "success": score, "steps": self.steps, "invalid": self.invalid, **stages}

    async def fork(self, into: ALFWorld) -> None:
        """A game of TextWorld's is begun anew, and its commands are run again."""
        world = self.world
        into.__dict__.update(self.__dict__)
        into.commands = list(self.commands)
        into.world = world.copy() if isinstance(world, House) else await asyncio.to_thread(world.copy)


def game_of(task: Task) -> Game:
    """The game that a task's fields `game` and `size` name.

    Raises:  SettingsError for a task without them, or with others than there are.
    """
    if "game" not in task.fields:
        raise SettingsError(f"task {task.id!r} has no field game=; take af.envs.alfworld.tasks(), or tasks_in(folder)")
    size = task.fields.get("size", "full")
    if size not in get_args(Size):
        raise SettingsError(f"task {task.id!r}: its field size={size!r}; want {' or '.join(map(repr, get_args(Size)))}")
    return games.game(int_field(task, "game", family="alfworld"), size)


def rows(n: int, split: str, seed: int = 0, size: Size = "full", kinds: Sequence[str] = KINDS) -> list[dict[str, Any]]:
    """Rows {"id", "question", "game", "size", "kind"}, the kinds in turn; no game is in both splits."""
    for kind in kinds:
        if kind not in KINDS:
            raise SettingsError(f"kinds has {kind!r}; there is {', '.join(KINDS)}")
    if not kinds:
        raise SettingsError(f"kinds=(): give at least one of {', '.join(KINDS)}")
    first = 2_000_000 * seed + (1_000_000 if split == "test" else 0)
    first -= first % len(KINDS)
    mark = ("" if size == "full" else f"{size}-") + ("" if seed == 0 else f"{seed}-")
    numbers = (i for i in range(first, first + 1_000_000) if KINDS[i % len(KINDS)] in kinds)
    found = []
    for _, which in zip(range(n), numbers, strict=False):
        goal = games.game(which, size).goal
        question = f"{goal.text[0].upper()}{goal.text[1:]}."
        name = f"alfworld-{split}-{mark}{which - first:04}"
        found.append({"id": name, "question": question, "game": which, "size": size, "kind": goal.kind})
    return found


def tasks_in(folder: str | os.PathLike[str], *, kinds: Sequence[str] | None = None) -> Tasks:
    """Tasks of the original's games (`json_2.1.1/...`), or of other TextWorld games, that lie in a folder.

    A folder train, valid_seen or valid_unseen gives the split of the same name. Left out, as the original leaves them
    out, are games with "movable" or "Sliced" in their path and those that are marked as unsolvable. kinds: only these.
    Needs the packages at the first chain, not here.

    Raises:  SettingsError for no folder, a folder without a game (says what to fetch), or a file that is no game.
    """
    return task_sets.tasks_from(official.rows(folder, kinds), name="alfworld")


def _played(task: Task, messages: Sequence[Message]) -> tuple[Game, House]:
    """For players: the game, and the house as the calls so far have left it."""
    made = game_of(task)
    house = made.house()
    for message in messages:
        for call in message.get("tool_calls") or ():
            command = call["function"]["arguments"].get("command")
            if call["function"]["name"] == "act" and isinstance(command, str):
                house.do(command)
    return made, house


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Follows a plan from wherever the chain is."""
    made, house = _played(task, messages)
    plan = plans.plan(house, made.goal)
    return ("act", {"command": plan[0]}) if plan else "Done."


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Does anything that can be done."""
    _, house = _played(task, messages)
    return "act", {"command": rng.choice(house.admissible())}


family = Family(
    name="alfworld",
    what="six kinds of household task in a house of text, by ALFWorld's words and rules",
    environment=ALFWorld,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=STEPS,
    size="768 train and 192 test ship, of small houses; 2 million a seed are made; the original's from a folder",
)
agent, expert, random_agent = family.agent, family.expert, family.random_agent


def tasks(
    n: int | None = None,
    split: str | None = None,
    *,
    seed: int = 0,
    size: Size = "full",
    kinds: Sequence[str] = KINDS,
) -> Tasks:
    """`n` tasks of a split; without a split, both. size: "full", or "small" with few receptacles. kinds: only these."""
    chosen = dataclasses.replace(family, rows=functools.partial(rows, size=size, kinds=tuple(kinds)))
    return chosen.tasks(n, split, seed=seed)
