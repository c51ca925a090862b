"""shapes: questions about images of one to four coloured shapes, with a tool that enlarges a part of the image.

Kinds of questions: the number of shapes ("count"), the colour or the position of the only shape ("colour", "position"),
and the colour of the one shape with a given form ("binding").
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.envs.family import Family, Move, check_answer, check_kinds, first_world, row_id
from agentfly_kit.errors import TaskError, ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, images_of

FORMS = ("circle", "square", "triangle")
COLOURS = {"red": (216, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 216), "yellow": (228, 196, 36)}
# Names of the cells of a three-by-three grid, row by row.
POSITIONS = (
    "top left", "top centre", "top right", "centre left", "centre", "centre right",
    "bottom left", "bottom centre", "bottom right",
)  # fmt: skip
COUNTS = ("1", "2", "3", "4")
# The possible answers to each kind of question.
KINDS = {"count": COUNTS, "colour": (*COLOURS,), "position": POSITIONS, "binding": (*COLOURS,)}
# Side lengths of a cell and of the image in pixels.
CELL, SIDE = 16, 48


@dataclass(frozen=True)
class Shape:
    """One shape of an image: its form, its colour, and the number of its cell."""

    form: str
    colour: str
    cell: int


def scene(count: int, rng: random.Random) -> list[Shape]:
    """Sample shapes in different cells, ordered by cell."""
    cells = sorted(rng.sample(range(len(POSITIONS)), count))
    return [Shape(rng.choice(FORMS), rng.choice([*COLOURS]), cell) for cell in cells]


def draw(shapes: Sequence[Shape], rng: random.Random) -> Any:
    """Draw shapes as a Pillow image, with random sizes, shades and places within their cells."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(232, 255),) * 3)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        side = rng.randint(10, 13)
        row, column = divmod(shape.cell, SIDE // CELL)
        left, top = (CELL * at + rng.randint(1, CELL - 2 - side) for at in (column, row))
        box = (left, top, left + side, top + side)
        fill = (*(value + rng.randint(-24, 24) for value in COLOURS[shape.colour]),)
        if shape.form == "circle":
            pen.ellipse(box, fill)
        elif shape.form == "square":
            pen.rectangle(box, fill)
        else:
            pen.polygon([(left, top + side), (left + side / 2, top), (left + side, top + side)], fill)
    return image


def question(kind: str, rng: random.Random) -> tuple[list[Shape], str, str]:
    """Sample the shapes of an image, a question of the given kind about them, and its answer."""
    if kind == "count":
        shapes = scene(rng.randint(1, len(COUNTS)), rng)
        return shapes, "How many shapes are there?", str(len(shapes))
    if kind == "binding":
        while True:
            shapes = scene(rng.randint(2, len(COUNTS)), rng)
            forms = [shape.form for shape in shapes]
            if single := [shape for shape in shapes if forms.count(shape.form) == 1]:
                asked = rng.choice(single)
                return shapes, f"What colour is the {asked.form}?", asked.colour
    (shape,) = shapes = scene(1, rng)
    if kind == "colour":
        return shapes, "What colour is the shape?", shape.colour
    return shapes, "Where is the shape?", POSITIONS[shape.cell]


def rows(n: int, split: str, seed: int = 0, *, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[dict[str, Any]]:
    """Generate tasks as rows {"id", "messages", "answer", "kind"}.

    Args:
        n: number of tasks.
        split: "train" or "test".
        seed: selects the tasks.
        kinds: kinds of questions to generate in turn; any of `KINDS`.

    Raises:  SettingsError for an unknown kind.
    """
    check_kinds(kinds, [*KINDS])
    for i in range(n):
        kind = kinds[i % len(kinds)]
        rng = random.Random(f"shapes {kind} {first_world(split, seed) + i}")
        shapes, text, answer = question(kind, rng)
        message = {"role": "user", "content": [draw(shapes, rng), text]}
        yield {"id": row_id("shapes", split, seed, i), "messages": [message], "answer": answer, "kind": kind}


class Shapes:
    """Environment for a question about an image, with a tool that enlarges a part of it."""

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the answer is not a string, or if the task does not have exactly one image."""
        check_answer(task.fields.get("answer"), str, "a string")
        if (count := len(images_of(task.messages))) != 1:
            raise TaskError(f"the messages of the task must have one image, got {count}")

    async def reset(self, task: Task, seed: int) -> None:
        (self._image,) = images_of(task.messages)

    @tool
    def crop(self, left: int, top: int, right: int, bottom: int) -> Any:
        """Enlarge a part of the image to the size of the image.

        Args:
            left: column of the first pixel; 0 is the left edge of the image.
            top: row of the first pixel; 0 is the upper edge of the image.
            right: first column to the right of the box.
            bottom: first row below the box.
        """
        width, height = self._image.size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise ToolError(
                f"the box must not be empty and must lie within 0, 0, {width}, {height}, "
                f"got {left}, {top}, {right}, {bottom}"
            )
        return self._image.to_pil().crop((left, top, right, bottom)).resize(self._image.size)

    async def reward(self, final: str | None, answer: str) -> float:
        """Return 1 if the final text equals the answer, ignoring case, surrounding whitespace and a final period."""
        return float(final is not None and final.strip().removesuffix(".").lower() == answer.lower())

    async def fork(self, into: Shapes) -> None:
        into._image = self._image


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Return the reference answer."""
    return str(task.fields["answer"])


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Either crop a random box, or answer with a random number, colour or position."""
    if rng.random() < 0.3:
        left, top = rng.randrange(SIDE - CELL), rng.randrange(SIDE - CELL)
        return "crop", {"left": left, "top": top, "right": left + CELL, "bottom": top + CELL}
    return rng.choice((*COUNTS, *COLOURS, *POSITIONS))


family = Family(
    name="shapes",
    what="questions about an image of coloured shapes: their number, colour and position",
    environment=Shapes,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=4,
    size="any number can be generated",
    needs=("PIL",),
    install='pip install "agentfly_kit[images]"',
    chance=0.2,
    images=True,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
