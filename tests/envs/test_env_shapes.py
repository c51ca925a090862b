"""Shapes: the answers can be read from the pixels, the tool returns an image, and what is refused."""

from typing import Any

import errors
import numpy as np
import pytest

import agentfly_kit as af
from agentfly_kit.envs import desk, shapes


def seen(image: af.Image) -> list[shapes.Shape]:
    """Read the shapes from the pixels of an image. A form is recognized by the share of its box that it fills."""
    pixels, found = np.asarray(image.to_pil(), int), []
    for cell in range(9):
        top, left = (shapes.CELL * at for at in divmod(cell, 3))
        part = pixels[top : top + shapes.CELL, left : left + shapes.CELL]
        ink = np.ptp(part, axis=2) > 60
        if ink.any():
            height, width = (np.ptp(np.nonzero(ink)[axis]) + 1 for axis in (0, 1))
            share, mean = ink.sum() / (height * width), part[ink].mean(0)
            form = "square" if share > 0.95 else "circle" if share > 0.65 else "triangle"
            colour = min(shapes.COLOURS, key=lambda name: np.abs(mean - shapes.COLOURS[name]).sum())
            found.append(shapes.Shape(form, colour, cell))
    return found


def test_the_answers_follow_from_the_pixels() -> None:
    answers: dict[str, set[str]] = {kind: set() for kind in shapes.KINDS}
    for task in shapes.tasks(200):
        image, text = task.messages[0]["content"]
        found, kind, answer = seen(image), task.fields["kind"], task.fields["answer"]
        answers[kind].add(answer)
        form = text.removesuffix("?").split()[-1]
        asked = [shape for shape in found if form in (shape.form, "shape", "there")]
        if kind == "count":
            assert answer == str(len(asked)), task.id
        else:
            assert len(asked) == 1 and (len(found) > 1) == (kind == "binding"), task.id
            assert answer == (shapes.POSITIONS[asked[0].cell] if kind == "position" else asked[0].colour), task.id
    assert answers == {kind: set(every) for kind, every in shapes.KINDS.items()}


@pytest.mark.parametrize(
    ("of", "kinds"),
    [(shapes, "'count', 'colour', 'position', 'binding'"), (desk, "'click', 'tick', 'type', 'scroll'")],
)
def test_the_kinds_of_tasks_can_be_chosen(of: Any, kinds: str) -> None:
    first, *_, last = of.KINDS
    assert [task.fields["kind"] for task in of.tasks(4, "test", kinds=[first, last])] == [first, last] * 2
    for wrong in (first, [], ["size"], [["size"]], 3):
        errors.check(
            lambda: of.tasks(1, kinds=wrong),
            af.errors.SettingsError,
            f"kinds must be a list with some of {kinds}, got {wrong!r}",
        )


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((16, 0, 32, 16), ""),
        ((0, 0, 49, 48), "must lie within 0, 0, 48, 48, got 0, 0, 49, 48"),
        ((-1, 0, 8, 8), "got -1, 0, 8, 8"),
        ((8, 8, 8, 16), "the box must not be empty"),
    ],
)
async def test_a_crop_is_an_image_or_an_error_that_the_model_sees(box: tuple[int, ...], words: str) -> None:
    (crop,) = af.envs.tools(shapes.Shapes)
    task = shapes.tasks(1, "test")[0]
    result: Any = await crop.try_(**dict(zip(("left", "top", "right", "bottom"), box, strict=True)), task=task)
    assert result.ok != bool(words) and words in result.observation
    if not words:
        whole = task.messages[0]["content"][0]
        assert [image.size for image in result.images] == [whole.size]
        assert result.images[0] == af.Image(whole.to_pil().crop(box).resize(whole.size))


async def test_an_answer_must_be_exact_but_for_case_spaces_and_a_period() -> None:
    reward = shapes.Shapes().reward
    right = ["top left", "Top left.", " top left\n"]
    wrong = [None, "", ".", "top", "top left left", "It is top left."]
    assert [await reward(said, "top left") for said in (*right, *wrong)] == [1.0] * 3 + [0.0] * 6
