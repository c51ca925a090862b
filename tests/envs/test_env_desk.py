"""Desk: screens show their state, calls and scripts operate them, and errors say what was accepted."""

import itertools
from typing import Any

import errors
import numpy as np
import pytest

import agentfly_kit as af
from agentfly_kit.envs import desk

TOOLS = {tool.name: tool for tool in af.envs.tools(desk.Desk)}


def script(name: str, given: dict[str, Any]) -> str:
    """Return a call as AgentFly's parser of UI-TARS actions writes it."""
    if name == "click":
        x, y = (desk.CELL * given[at] + desk.CELL / 2 for at in ("column", "row"))
        return f"pyautogui.click({x}, {y}, button='left')"
    if name == "scroll":
        return f"pyautogui.scroll({-given['rows']})"
    return f"import pyperclip\npyperclip.copy('{given['text']}')\npyautogui.hotkey('ctrl', 'v')\ntime.sleep(0.5)\n"


def task_of(world: int) -> af.Task:
    return af.Task("t", ({"role": "user", "content": "Click."},), {"world": world})


async def played(world: int, calls: list[tuple[str, dict[str, Any]]]) -> tuple[desk.Desk, list[Any]]:
    """Return a screen after calls, and the images that they returned."""
    environment = desk.Desk()
    await environment.reset(task_of(world), 0)
    return environment, [await getattr(environment, name)(**given) for name, given in calls]


async def test_images_show_the_widgets_and_every_call_changes_the_image() -> None:
    for task in desk.tasks(64, "test"):
        image, text = task.messages[0]["content"]
        environment, images = await played(task.fields["world"], desk.plan(task.fields["world"]))
        seen = [np.asarray(each.to_pil() if isinstance(each, af.Image) else each, int) for each in (image, *images)]
        assert environment.done and await environment.reward() == 1 and seen[0].shape == (64, 64, 3)
        assert all((before != after).any() for before, after in itertools.pairwise(seen)), text
        for widget in environment._screen.widgets:
            left, top, right, bottom = widget.place
            x, y = (left + right) // 2, (top + bottom) // 2
            if y < 64 and widget.form != "field":
                wanted = desk.COLOURS.get(widget.colour, (255,) * 3)
                assert np.abs(seen[0][y, x] - wanted).max() <= 24, (text, widget)


async def test_scripts_as_agentfly_writes_them_solve_the_tasks() -> None:
    for task in desk.tasks(8, "test"):
        world = task.fields["world"]
        lines = "\n".join(
            ["import pyautogui", "import time", "'''Thought'''", *(script(*c) for c in desk.plan(world))]
        )
        by_script, (image,) = await played(world, [("pyautogui", {"script": lines})])
        _, images = await played(world, desk.plan(world))
        assert await by_script.reward() == 1 and (np.asarray(image) == np.asarray(images[-1])).all()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("tick", lambda calls: [calls[0], *calls]), ("tick", lambda calls: calls[1:]),
        ("tick", lambda calls: calls[:1]), ("scroll", lambda calls: [calls[0], ("scroll", {"rows": -99})]),
        ("type", lambda calls: [*calls[:2], *calls[1:]]), ("type", lambda calls: [calls[0], calls[2]]),
    ],
)  # fmt: skip
async def test_other_states_are_worth_nothing(kind: str, change: Any) -> None:
    world = desk.tasks(1, "test", kinds=[kind])[0].fields["world"]
    environment, _ = await played(world, change(desk.plan(world)))
    assert await environment.reward() == 0


async def test_another_button_is_worth_nothing_and_ends_the_chain() -> None:
    world = desk.tasks(1, "test", kinds=["click"])[0].fields["world"]
    screen, _, goal = desk.make(world)
    other = next(w for w in screen.widgets if w.colour not in ("", goal["pressed"]))
    click = script("click", desk.cell(other))
    right = script(*desk.plan(world)[0])
    environment, _ = await played(world, [("pyautogui", {"script": f"{click}\n{right}"})])
    assert environment.done and await environment.reward() == 0


async def test_keys_change_the_text_of_the_field() -> None:
    world = desk.tasks(1, "test", kinds=["type"])[0].fields["world"]
    lines = [
        script(*desk.plan(world)[0]),
        "pyautogui.press(keys='backspace')",
        "pyautogui.write(message='ab', interval=0.1)",
    ]
    lines += ["pyautogui.press('enter')", "pyautogui.press('backspace')"]
    environment, (image,) = await played(world, [("pyautogui", {"script": "\n".join(lines)})])
    assert environment._screen.text == "a" and image.size == (64, 64)
    await errors.check(
        lambda: environment.pyautogui("pyautogui.write('b')\npyautogui.click(63, 63)"),
        af.ToolError,
        "there is nothing to click at x=63, y=63",
    )
    assert environment._screen.text == "a", "a script that fails changes nothing"


KNOWN = "known are pyautogui.click, pyautogui.write, pyautogui.typewrite, pyautogui.press, pyautogui.hotkey"
LITERALS = "arguments must be literals such as 12 or '42'"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"column": 8, "row": 0}, "column and row must be from 0 to 7, got 8, 0"),
        ({"column": 0, "row": -1}, "column and row must be from 0 to 7, got 0, -1"),
        ({"column": 1.5, "row": 0}, "column: input should be a valid integer"),
        ({"column": 7, "row": 7}, "there is nothing to click at x=60, y=60"),
        ({"text": "42"}, "text can be typed only after a click on the field"),
        ({"script": "pyautogui.click(x=64, y=3)"}, "x and y must be at least 0 and less than 64, got 64, 3"),
        ({"script": "pyautogui.click(-1, 3)"}, "x and y must be at least 0 and less than 64, got -1, 3"),
        ({"script": "pyautogui.click(1, 1e999)"}, "got 1, inf"),
        ({"script": "pyautogui.click(63.5, 63)"}, "there is nothing to click at x=63.5, y=63"),
        ({"script": "pyautogui.click(1)"}, "pyautogui.click(1): missing a required argument: 'y'"),
        ({"script": "pyautogui.click('a', 2)"}, "x must be of type float, got 'a'"),
        ({"script": "pyautogui.click(1, 2, button='right')"}, "button must be 'left', got 'right'"),
        ({"script": "pyautogui.click(x, 2)"}, f"pyautogui.click(x, 2): {LITERALS}"),
        ({"script": f"pyautogui.click({'-' * 1900}1, 2)"}, LITERALS),
        ({"script": "pyautogui.drag(1, 2)"}, f"unknown function pyautogui.drag; {KNOWN}"),
        ({"script": "import os\nos.system('x')"}, f"unknown function os.system; {KNOWN}"),
        ({"script": "__import__('os').system('x')"}, "unknown function __import__('os').system"),
        ({"script": "x = 1"}, "a line must be a call such as pyautogui.click(x=12, y=30), got x = 1"),
        ({"script": "pyautogui.click(1,"}, "the script is not valid Python: '(' was never closed"),
        ({"script": "#" * 2001}, "a script must have at most 2000 characters, got 2001"),
        ({"script": "pyautogui.press('a')"}, "keys must be 'backspace' or 'enter', got 'a'"),
        ({"script": "pyautogui.hotkey('ctrl', 'c')"}, "the keys must be 'ctrl', 'v', got 'ctrl', 'c'"),
        ({"script": "pyautogui.scroll('down')"}, "clicks must be of type int, got 'down'"),
    ],
)
async def test_errors_that_the_model_sees(given: dict[str, Any], words: str) -> None:
    name = {"column": "click", "text": "type", "script": "pyautogui"}[next(iter(given))]
    # The corner of this screen is empty.
    result = await TOOLS[name].try_(**given, task=task_of(0))
    assert not result.ok and words in result.observation


@pytest.mark.parametrize("text", ["x" * 21, "a\n", "\ud800"])
def test_a_field_holds_some_printable_characters(text: str) -> None:
    (field,) = (w for w in desk.make(2)[0].widgets if w.form == "field")
    screen = desk.make(2)[0].click(*field.place[:2])
    errors.check(lambda: screen.type(text), af.ToolError, "the field holds at most 20 printable characters")
