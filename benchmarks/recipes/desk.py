"""Recipe of `desk`, a vision policy that operates small screens. It reuses the model and the phases of `shapes`.

The feature of each slot of a screen is aligned with four words: the form and the colour of the widget, and the column
and the row of a click on it. Columns of clicks are even and rows odd, so that a digit says which of the two it is. The
state of the word that names a widget in the instruction is aligned with the same two digits, which are then copied into
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import agentfly_kit as af
from agentfly_kit.chat.chat import Chat
from agentfly_kit.envs import desk
from agentfly_kit.envs.desk import CELL, COLOURS, Screen
from agentfly_kit.tiny import END
from agentfly_kit.types import ToolCall
from recipes import shapes
from recipes.base import UNSURE

_FORMS, _COLOURS = (" button", " box", "ticked", " field", "nothing"), (*(f" {name}" for name in COLOURS), "nothing")
_ALIGNED = (_FORMS, _COLOURS, ("0", "2", "4", "6"), ("1", "3", "5", "7"))
_SLOTS = 4
WORDS = (
    "Click the", "Tick the", "Type", "Scroll down", " into the", ", then click the",
    "click(column, row), type(text), scroll(rows), pyautogui(script)",
    '{"name":"click","arguments":{"column":', ',"row":', '{"name":"type","arguments":{"text":"',
    '{"name":"scroll","arguments":{"rows":', *dict.fromkeys((*_FORMS, *_COLOURS)),
)  # fmt: skip
# Demonstrations of the third phase per batch of 32, by behaviour. solves: the calls of `desk.plan`; hurries: clicks on
# the button at once; guesses: clicks on any button; unsure: "I don't know".
HABITS = {"solves": 9, "hurries": 6, "guesses": 7, "unsure": 10}
STEPS = (200, 400, 120)
Move = tuple[str, dict[str, Any]]


def after(screen: Screen, move: Move) -> Screen:
    """Return the screen after a call."""
    name, given = move
    if name == "click":
        return screen.click(*(CELL * given[at] + CELL / 2 for at in ("column", "row")))
    return screen.type(given["text"]) if name == "type" else screen.scroll(-given["rows"])


class Pretraining(shapes.VisionPretraining):
    """The pretraining with screens and demonstrations of their use."""

    name = "desk"

    def __init__(self, model: Any, processor: Any, seed: int = 0) -> None:
        super().__init__(model, processor, seed)
        self.chat = Chat(self.tokenizer, processor=processor)
        schemas, blank = [tool.schema for tool in desk.family.tools], af.Image(Screen(()).draw())

        @cache
        def prompt(text: str) -> tuple[int, ...]:
            return self.chat.prompt([{"role": "user", "content": [blank, text]}], schemas)

        self.prompt = prompt
        # The ids after an action, up to the next one. They are the same for all screens.
        seen: Any = {"role": "tool", "name": "click", "tool_call_id": "call-0", "content": [blank]}
        end = self.tokenizer(END)["input_ids"]
        self.seen = self.chat.observation_ids([seen], schemas, after=end)

    def world(self) -> int:
        """Sample the world of a task, none of which the family has for small seeds."""
        return 10**12 + self.rng.randrange(10**12)

    def tower_loss(self) -> Tensor:
        screens = []
        for _ in range(64):
            world = self.world()
            screen, moves = desk.make(world)[0], desk.plan(world)
            for move in moves[: self.rng.randint(0, len(moves))]:
                screen = after(screen, move)
            screens.append(screen)
        return self.alignment_loss(screens, self.look(screen.draw() for screen in screens))

    def alignment_loss(self, screens: Sequence[Screen], features: Tensor) -> Tensor:
        """Return the cross-entropy of the four words of each slot."""
        words: list[list[int]] = [[], [], [], []]
        for screen in screens:
            first, at = screen.top // desk.SLOT * _SLOTS, {}
            for widget in screen.widgets:
                form = "ticked" if widget.form == "box" and screen.ticked else f" {widget.form}"
                for slot in (widget.slot, widget.slot + 1)[: 1 + (widget.form == "field")]:
                    at[slot - first] = form, f" {widget.colour}" if widget.colour else "nothing"
            for slot in range(_SLOTS**2):
                form, colour = at.get(slot, ("nothing", "nothing"))
                found = _FORMS.index(form), _COLOURS.index(colour), slot % _SLOTS, slot // _SLOTS
                for some, word in zip(words, found, strict=True):
                    some.append(word)
        flat = features.flatten(0, 1)
        return torch.stack([self.word_loss(flat, *each) for each in zip(words, _ALIGNED, strict=True)]).sum()

    def skill_loss(self) -> Tensor:
        return self.play_loss(["solves"] * 32, aligned=True)

    def mixed_loss(self) -> Tensor:
        return self.play_loss([habit for habit, count in HABITS.items() for _ in range(count)])

    def moves(self, habit: str, world: int) -> list[Move]:
        """Return the calls of a demonstration."""
        buttons = [widget for widget in desk.make(world)[0].widgets if widget.colour and widget.slot < _SLOTS**2]
        calls = desk.plan(world)
        if habit == "guesses":
            return [("click", desk.cell(self.rng.choice(buttons)))]
        return {"solves": calls, "unsure": []}.get(habit, calls[-1:])

    def play_loss(self, habits: Sequence[str], *, aligned: bool = False) -> Tensor:
        """Return the cross-entropy of the actions in demonstrations.

        Args:
            habits: Behaviour of each demonstration.
            aligned: Add the losses of the alignments, of slots and of words in the instruction.
        """
        rows: list[tuple[list[int], list[int]]] = []
        screens: list[Screen] = []
        named: list[tuple[int, int, int, int]] = []
        for habit in habits:
            world = self.world()
            screen, text, _ = desk.make(world)
            ids = [*self.prompt(text)]
            label = [-100] * len(ids)
            for widget in screen.widgets:
                word = self.tokenizer.convert_tokens_to_ids(f" {widget.colour or widget.form}")
                if word in ids and widget.slot < _SLOTS**2:
                    named.append((len(rows), ids.index(word), widget.slot % _SLOTS, widget.slot // _SLOTS))
            screens.append(screen)
            moves = self.moves(habit, world)
            for i, (name, given) in enumerate(moves):
                if i:
                    screen = after(screen, moves[i - 1])
                    screens.append(screen)
                    ids += self.seen
                    label += [-100] * len(self.seen)
                said = self.encode(self.chat.format.render_call(ToolCall("", name, given)))
                ids += said
                label += said
            if not moves:
                ids += (said := self.encode(UNSURE))
                label += said
            rows.append((ids, label))
        longest = max(len(ids) for ids, _ in rows)
        pad = self.tokenizer.pad_token_id
        ids_ = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        label_ = torch.tensor([label + [-100] * (longest - len(label)) for _, label in rows])
        features = self.look(screen.draw() for screen in screens)
        states = self.states(ids_, features)
        loss = self.label_loss(states, label_)
        if aligned:
            row, at, column, line = (torch.tensor(each) for each in zip(*named, strict=True))
            found = states[row, at]
            for digits, known in zip((column, line), _ALIGNED[2:], strict=True):
                loss = loss + 0.3 * self.word_loss(found, digits.tolist(), known)
            loss = loss + 0.3 * self.alignment_loss(screens, features)
        return loss

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text + END)["input_ids"]
        return found


def build(
    out: str | Path | None = None,
    *,
    seed: int = 0,
    steps: Sequence[int] = STEPS,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Any, Any]:
    """Train the policy from random weights; see `shapes.build`."""
    made = Pretraining(*shapes.untrained(seed, WORDS, desk.SIDE), seed)
    return shapes.build(out, steps=steps, report=report, made=made)
