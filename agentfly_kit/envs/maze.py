"""maze: find the exit of a 5 x 5 maze. The model sees the open directions of its cell and the offset to the exit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from agentfly_kit.envs.family import Family, Move, first_world, int_field, row_id, tool_outputs
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

WIDTH = 5
STEPS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
# Position of a cell: (column, row). Columns are counted from the west and rows from the north, starting at 0.
Cell = tuple[int, int]


class Grid:
    """A maze without loops, with a start and an exit."""

    def __init__(self, which: int, far: int) -> None:
        """Generate maze number `which`. The exit is `far` steps from the start, or as far as the maze allows."""
        rng = random.Random(f"maze {which}")
        here: Cell = (rng.randrange(WIDTH), rng.randrange(WIDTH))
        self.open: dict[Cell, set[str]] = {(x, y): set() for x in range(WIDTH) for y in range(WIDTH)}
        trail, seen = [here], {here}
        while trail:
            ways = [(way, cell) for way in STEPS if (cell := beside(trail[-1], way)) in self.open and cell not in seen]
            if not ways:
                trail.pop()
                continue
            way, cell = rng.choice(ways)
            self.open[trail[-1]].add(way)
            self.open[cell].add(_BACK[way])
            seen.add(cell)
            trail.append(cell)
        self.exit: Cell = (rng.randrange(WIDTH), rng.randrange(WIDTH))
        self.away = self._distances(self.exit)
        most = min(far, max(self.away.values()))
        self.start: Cell = rng.choice([cell for cell, steps in self.away.items() if steps == most])

    def _distances(self, to: Cell) -> dict[Cell, int]:
        found, queue = {to: 0}, deque([to])
        while queue:
            cell = queue.popleft()
            for way in self.ways(cell):
                if (other := beside(cell, way)) not in found:
                    found[other] = found[cell] + 1
                    queue.append(other)
        return found

    def ways(self, cell: Cell) -> list[str]:
        """Return the directions without a wall, in a fixed order, because set order differs between processes."""
        return [way for way in STEPS if way in self.open[cell]]

    def toward(self, cell: Cell) -> str:
        """Return the direction of the first step on the shortest path from the cell to the exit."""
        return min(self.ways(cell), key=lambda way: self.away[beside(cell, way)])


_BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}


def beside(cell: Cell, way: str) -> Cell:
    return cell[0] + STEPS[way][0], cell[1] + STEPS[way][1]


class Maze:
    """Environment for one walk through one maze.

    Args:
        shaped: if true, each step's turn reward is its progress toward the exit; the turn rewards of any walk from
            start to exit sum to 1, even with detours. Otherwise the reward is 1 for reaching the exit.
    """

    def __init__(self, shaped: bool = False) -> None:
        self.shaped = shaped

    def check_task(self, task: Task) -> None:
        """Raise TaskError if a field is not an integer."""
        int_field(task, "maze")
        int_field(task, "far", 1)

    async def reset(self, task: Task, seed: int) -> str:
        self.grid = Grid(int_field(task, "maze"), int_field(task, "far", 1))
        self.cell, self.steps, self.done = self.grid.start, 0, False
        return self._seen()

    def _seen(self) -> str:
        x, y = self.cell
        ex, ey = self.grid.exit
        parts = [f"{abs(ey - y)} {'south' if ey > y else 'north'}"] if ey != y else []
        parts += [f"{abs(ex - x)} {'east' if ex > x else 'west'}"] if ex != x else []
        return f"Open: {' '.join(self.grid.ways(self.cell))}. Exit: {' '.join(parts)}."

    @tool
    async def go(self, way: Literal["north", "east", "south", "west"]) -> ToolResult:
        """Move one cell.

        Args:
            way: the direction.
        """
        self.steps += 1
        if way not in self.grid.open[self.cell]:
            return ToolResult(False, f"There is a wall. {self._seen()}")
        before = self.grid.away[self.cell]
        self.cell = beside(self.cell, way)
        self.done = self.cell == self.grid.exit
        nearer = (before - self.grid.away[self.cell]) / self.grid.away[self.grid.start]
        text = "You are out." if self.done else self._seen()
        return ToolResult(True, text, reward=nearer if self.shaped else None)

    async def reward(self) -> dict[str, float]:
        """Return 1 if the exit was reached, else 0; always 0 if `shaped`. The metric `success` ignores `shaped`."""
        return {"reward": 0.0 if self.shaped else float(self.done), "success": float(self.done), "steps": self.steps}

    async def fork(self, into: Maze) -> None:
        into.__dict__.update(self.__dict__)


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generate tasks as rows {"id", "question", "maze", "far"} with `far` from 3 to 7. The splits are disjoint."""
    first = first_world(split, seed)
    return [
        {"id": row_id("maze", split, seed, i), "question": "Find the way out.", "maze": first + i, "far": 3 + i % 5}
        for i in range(n)
    ]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Take the next step on the shortest path to the exit."""
    grid = Grid(task.fields["maze"], task.fields["far"])
    cell = grid.start
    for _ in tool_outputs(messages):
        cell = beside(cell, grid.toward(cell))
    return "go", {"way": grid.toward(cell)}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Go in a random direction, possibly into a wall."""
    return "go", {"way": rng.choice(list(STEPS))}


family = Family(
    name="maze",
    what="find the way out of a 5 x 5 maze; options={'shaped': True} rewards each step",
    environment=Maze,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=8,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
