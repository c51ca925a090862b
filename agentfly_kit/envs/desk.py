"""desk: small screens with buttons, a box and a text field, which an agent sees as images and operates with tools.

Every task is to click one of several buttons, either at once ("click") or after ticking the box ("tick"), typing a
number into the field ("type") or scrolling to the button ("scroll"). A click on any button ends the chain. The reward
is 1 if the task names this button and the box and the field are in the required state.

Screens have 64 x 64 pixels. The tool `click` takes the coordinates of a cell of 8 x 8 pixels; the tool `pyautogui` runs
calls of PyAutoGUI, whose coordinates are pixels.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit.envs.family import Family, Move, check_kinds, first_world, int_field, row_id
from agentfly_kit.envs.shapes import COLOURS
from agentfly_kit.errors import ToolError
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

KINDS = ("click", "tick", "type", "scroll")
# Side lengths in pixels of the screen, of a cell for `click`, and of a slot, which holds one widget.
SIDE, CELL, SLOT = 64, 8, 16
_ACROSS = SIDE // SLOT
# Maximum lengths of the text in the field and of a script.
MAX_TEXT, MAX_SCRIPT = 20, 2000


@dataclass(frozen=True)
class Widget:
    """A button, the box or the field.

    Args:
        form: "button", "box" or "field".
        slot: Number of the widget's slot on the page, counted row by row.
        place: Left, upper, right and lower edge on the page in pixels. A click within this box, including its edges and
            the corners of round buttons, is a click on the widget.
        colour: Name of the colour, for buttons.
        fill: Colour as RGB.
        round: Whether a button is a circle.
    """

    form: str
    slot: int
    place: tuple[int, int, int, int]
    colour: str = ""
    fill: tuple[int, ...] = (255, 255, 255)
    round: bool = False


@dataclass(frozen=True)
class Screen:
    """State of a screen. Actions return a new state.

    Args:
        widgets: The widgets of the page.
        shade: Grey level of the background.
        height: Height of the page in pixels.
        top: Number of the first visible pixel row of the page.
        ticked: Whether the box is ticked.
        focused: Whether typed text goes to the field.
        text: Content of the field.
        pressed: Colour of the button that was clicked, or "".
        clipboard: Text that a script copied.
    """

    widgets: tuple[Widget, ...]
    shade: int = 240
    height: int = SIDE
    top: int = 0
    ticked: bool = False
    focused: bool = False
    text: str = ""
    pressed: str = ""
    clipboard: str = ""

    def click(self, x: float, y: float, *, button: str = "left") -> Screen:
        if not (0 <= x < SIDE and 0 <= y < SIDE):
            raise ToolError(f"x and y must be at least 0 and less than {SIDE}, got {x}, {y}")
        if button != "left":
            raise ToolError(f"button must be 'left', got {button!r}")
        for widget in self.widgets:
            left, top, right, bottom = widget.place
            if left <= int(x) <= right and top <= int(y) + self.top <= bottom:
                if widget.form == "box":
                    return dataclasses.replace(self, ticked=not self.ticked, focused=False)
                return dataclasses.replace(self, focused=widget.form == "field", pressed=widget.colour)
        raise ToolError(f"there is nothing to click at x={x}, y={y}")

    def type(self, message: str, interval: float = 0) -> Screen:
        text = self.text + message
        if not self.focused:
            raise ToolError("text can be typed only after a click on the field")
        if not text.isprintable() or len(text) > MAX_TEXT:
            raise ToolError(f"the field holds at most {MAX_TEXT} printable characters, got {text!r:.80}")
        return dataclasses.replace(self, text=text)

    def press(self, keys: str) -> Screen:
        if keys not in ("backspace", "enter"):
            raise ToolError(f"keys must be 'backspace' or 'enter', got {keys!r:.80}")
        return dataclasses.replace(self, text=self.text[:-1]) if keys == "backspace" and self.focused else self

    def copy(self, text: str) -> Screen:
        return dataclasses.replace(self, clipboard=text)

    def paste(self, *keys: Any) -> Screen:
        if keys != ("ctrl", "v"):
            raise ToolError(f"the keys must be 'ctrl', 'v', got {', '.join(map(repr, keys)):.80}")
        return self.type(self.clipboard)

    def scroll(self, clicks: int, x: float = 0, y: float = 0) -> Screen:
        """Scroll by `clicks` cells, down if negative, as far as the page extends. The mouse position is ignored."""
        return dataclasses.replace(self, top=min(max(self.top - CELL * clicks, 0), self.height - SIDE))

    def draw(self) -> Any:
        """Draw the visible part of the page as a Pillow image."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE, SIDE), (self.shade,) * 3)
        pen = ImageDraw.Draw(image)
        for widget in self.widgets:
            left, right = widget.place[::2]
            top, bottom = (edge - self.top for edge in widget.place[1::2])
            shape = pen.ellipse if widget.round else pen.rectangle
            marked = self.focused if widget.form == "field" else self.pressed == widget.colour != ""
            edge = (0, 0, 0) if marked else widget.fill if widget.colour else (120, 120, 120)
            shape((left, top, right, bottom), widget.fill, edge)
            if widget.form == "box" and self.ticked:
                pen.line((left + 2, top + 2, right - 2, bottom - 2), (0, 0, 0), 2)
                pen.line((left + 2, bottom - 2, right - 2, top + 2), (0, 0, 0), 2)
            if widget.form == "field":
                pen.text((left + 3, top), self.text[-4:], (0, 0, 0))
        if self.height > SIDE:
            # The bar at the right edge shows which part of the page is visible.
            bar = self.top * SIDE // self.height
            pen.line((SIDE - 1, bar, SIDE - 1, bar + SIDE * SIDE // self.height), (120, 120, 120))
        return image


def make(world: int) -> tuple[Screen, str, dict[str, Any]]:
    """Generate a task: the screen, the instruction, and the required state as a dict of fields of `Screen`."""
    kind, rng = KINDS[world % len(KINDS)], random.Random(f"desk {world}")
    free, widgets = [*range(_ACROSS**2)], []

    def place(form: str, slot: int, colour: str = "") -> None:
        row, column = divmod(slot, _ACROSS)
        height = rng.randint(11, 13)
        width = height + SLOT if form == "field" else height
        left, top = (SLOT * at + rng.randint(1, SLOT - 2 - height) for at in (column, row))
        fill = [value + rng.randint(-24, 24) for value in COLOURS[colour]] if colour else (255,) * 3
        place = left, top, left + width, top + height
        widgets.append(Widget(form, slot, place, colour, (*fill,), bool(colour) and rng.random() < 0.5))

    if kind == "type" or rng.random() < 0.3:
        slot = _ACROSS * rng.randrange(_ACROSS) + rng.randrange(_ACROSS - 1)
        place("field", slot)
        free.remove(slot)
        free.remove(slot + 1)
    rng.shuffle(free)
    if kind == "tick" or rng.random() < 0.3:
        place("box", free.pop())
    colours = rng.sample([*COLOURS], rng.randint(2, len(COLOURS)))
    for colour in colours:
        below = kind == "scroll" and colour == colours[0]
        place("button", free.pop() + _ACROSS**2 * below, colour)
    number, height = str(rng.randint(1, 9)), SIDE * (1 + (kind == "scroll"))
    before = {
        "tick": "Tick the box, then c",
        "type": f"Type {number} into the field, then c",
        "scroll": "Scroll down, then c",
    }
    goal = {"pressed": colours[0], "ticked": kind == "tick", "text": number if kind == "type" else ""}
    screen = Screen((*widgets,), rng.randint(216, 248), height)
    return screen, f"{before.get(kind, 'C')}lick the {colours[0]} button.", goal


def rows(n: int, split: str, seed: int = 0, *, kinds: Sequence[str] = KINDS) -> Iterator[dict[str, Any]]:
    """Generate tasks as rows {"id", "messages", "world", "kind"}.

    Args:
        n: number of tasks.
        split: "train" or "test".
        seed: selects the tasks.
        kinds: kinds of tasks to generate in turn; any of `KINDS`.

    Raises:  SettingsError for an unknown kind.
    """
    check_kinds(kinds, [*KINDS])
    for i in range(n):
        kind = kinds[i % len(kinds)]
        world = len(KINDS) * (first_world(split, seed) + i) + KINDS.index(kind)
        screen, text, _ = make(world)
        message = {"role": "user", "content": [screen.draw(), text]}
        yield {"id": row_id("desk", split, seed, i), "messages": [message], "world": world, "kind": kind}


class Desk:
    """Environment for one screen. A task has the field `world`, from which `make` generates the screen and the goal."""

    def check_task(self, task: Task) -> None:
        """Raise TaskError if the field `world` is missing or not an integer of at least 0."""
        int_field(task, "world")

    async def reset(self, task: Task, seed: int) -> None:
        self._screen, _, self._goal = make(int_field(task, "world"))
        self.done = False

    @tool
    async def click(self, column: int, row: int) -> Any:
        """Click on the screen, which is divided into cells of 8 x 8 pixels.

        Args:
            column: number of the cell from the left, from 0 to 7.
            row: number of the cell from the top, from 0 to 7.
        """
        if not (0 <= column < SIDE // CELL and 0 <= row < SIDE // CELL):
            raise ToolError(f"column and row must be from 0 to {SIDE // CELL - 1}, got {column}, {row}")
        return self._show(self._screen.click(CELL * column + CELL // 2, CELL * row + CELL // 2))

    @tool
    async def type(self, text: str) -> Any:
        """Type text into the field, which must have been clicked.

        Args:
            text: the characters to append.
        """
        return self._show(self._screen.type(text))

    @tool
    async def scroll(self, rows: int) -> Any:
        """Scroll the page, as far as it extends.

        Args:
            rows: number of cells, down if positive and up if negative.
        """
        return self._show(self._screen.scroll(-rows))

    @tool
    async def pyautogui(self, script: str) -> Any:
        """Run calls of PyAutoGUI, one per line, such as pyautogui.click(x=12, y=30).

        Args:
            script: the lines, with the functions click, write, press, hotkey and scroll, pyperclip.copy and time.sleep.
        """
        # The whole script is parsed before its first call runs. If a call fails, the screen remains as before the
        # script.
        screen = self._screen
        for function, given, named in [*_calls(script)]:
            screen = screen if screen.pressed else function(screen, *given, **named)
        return self._show(screen)

    def _show(self, screen: Screen) -> Any:
        self._screen, self.done = screen, bool(screen.pressed)
        return screen.draw()

    async def reward(self) -> float:
        """Return 1 if the screen is in the state that the task requires, else 0."""
        return float(all(getattr(self._screen, name) == value for name, value in self._goal.items()))

    async def fork(self, into: Desk) -> None:
        into._screen, into._goal, into.done = self._screen, self._goal, self.done


# Functions that scripts can call, and the Python type for each annotation of their parameters.
_FUNCTIONS: Mapping[str, Callable[..., Screen]] = {
    "pyautogui.click": Screen.click,
    "pyautogui.write": Screen.type,
    "pyautogui.typewrite": Screen.type,
    "pyautogui.press": Screen.press,
    "pyautogui.hotkey": Screen.paste,
    "pyautogui.scroll": Screen.scroll,
    "pyperclip.copy": Screen.copy,
    "time.sleep": lambda screen, seconds: screen,
}
_TYPES: Mapping[str, Any] = {"float": int | float, "int": int, "str": str}


def _calls(script: str) -> Iterator[tuple[Callable[..., Screen], list[Any], dict[str, Any]]]:
    """Parse a script. Yield each function to call with its arguments, which must be literals."""
    if len(script) > MAX_SCRIPT:
        raise ToolError(f"a script must have at most {MAX_SCRIPT} characters, got {len(script)}")
    try:
        lines = ast.parse(script).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"the script is not valid Python: {error}") from error
    for line in lines:
        call = line.value if isinstance(line, ast.Expr) else line
        # Skip imports, and strings that serve as comments, because generated scripts contain them.
        if isinstance(call, ast.Import | ast.Constant):
            continue
        shown = str(ast.get_source_segment(script, line))[:80]
        if not isinstance(call, ast.Call):
            raise ToolError(f"a line must be a call such as pyautogui.click(x=12, y=30), got {shown}")
        if (name := str(ast.get_source_segment(script, call.func))) not in _FUNCTIONS:
            raise ToolError(f"unknown function {name[:80]}; known are {', '.join(_FUNCTIONS)}")
        try:
            given = [ast.literal_eval(value) for value in call.args]
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            signature = inspect.signature(_FUNCTIONS[name])
            for parameter, value in signature.bind(None, *given, **named).arguments.items():
                kind = signature.parameters[parameter].annotation
                if not isinstance(value, _TYPES.get(kind, object)):
                    raise TypeError(f"{parameter} must be of type {kind}, got {value!r:.80}")
        except TypeError as error:
            raise ToolError(f"{shown}: {error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise ToolError(f"{shown}: arguments must be literals such as 12 or '42'") from error
        yield _FUNCTIONS[name], given, named


def cell(widget: Widget) -> dict[str, int]:
    """Return the arguments of `click` for a widget that is visible when the page is scrolled to its top or end."""
    row, column = divmod(widget.slot % _ACROSS**2, _ACROSS)
    return {"column": 2 * column, "row": 2 * row + 1}


def plan(world: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the shortest sequence of calls that solves a task."""
    screen, _, goal = make(world)
    kind, at = KINDS[world % len(KINDS)], {widget.colour or widget.form: cell(widget) for widget in screen.widgets}
    before: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "tick": [("click", at.get("box", {}))],
        "type": [("click", at.get("field", {})), ("type", {"text": goal["text"]})],
        "scroll": [("scroll", {"rows": SIDE // CELL})],
    }
    return [*before.get(kind, []), ("click", at[goal["pressed"]])]


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Make the next call of `plan`."""
    move: Move = plan(task.fields["world"])[sum(message["role"] == "assistant" for message in messages)]
    return move


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Click on a random cell, type a random number, scroll, or answer."""
    cell = {"column": rng.randrange(SIDE // CELL), "row": rng.randrange(SIDE // CELL)}
    number = str(rng.randint(1, 9))
    others: list[Move] = [("type", {"text": number}), ("scroll", {"rows": SIDE // CELL}), number]
    return ("click", cell) if rng.random() < 0.7 else rng.choice(others)


family = Family(
    name="desk",
    what="small graphical screens operated with clicks, keys and scrolling; accepts PyAutoGUI scripts",
    environment=Desk,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    size="any number can be generated",
    needs=("PIL",),
    install='pip install "agentfly_kit[images]"',
    chance=0.15,
    images=True,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
