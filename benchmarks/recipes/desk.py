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
from agentfly_kit.envs.desk import CELL, Screen
from agentfly_kit.envs.shapes import COLOURS
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
# Demonstrations of the last phase per batch of 32, by behaviour. solves: the calls of `desk.plan`; hurries: only the
# last of these, or a click on any button if there is one call; unsure: "I don't know".
HABITS = {"solves": 10, "hurries": 5, "unsure": 17}
STEPS = (150, 350, 500, 120)
Move = tuple[str, dict[str, Any]]


def after(screen: Screen, move: Move) -> Screen:
    """Return the screen after a call."""
    name, given = move
    if name == "click":
        return screen.click(*(CELL * given[at] + CELL / 2 for at in ("column", "row")))
    return screen.type(given["text"]) if name == "type" else screen.scroll(-given["rows"])


def named(screen: Screen) -> dict[str, int]:
    """Return the words that name the visible widgets, and the slots of these on the screen."""
    found = {
        widget.colour or widget.form: widget.slot - screen.top // desk.SLOT * _SLOTS for widget in screen.widgets
    }
    return {name: slot for name, slot in found.items() if 0 <= slot < _SLOTS**2}


class Pretraining(shapes.VisionPretraining):
    """The pretraining with screens and demonstrations of their use."""

    name = "desk"
    phases = (("tower_loss", 3e-3), ("naming_loss", 3e-3), ("skill_loss", 3e-3), ("mixed_loss", 5e-4))

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

    def world(self, kind: str = "") -> int:
        """Sample the world of a task, none of which the family has for small seeds."""
        kinds = len(desk.KINDS)
        return 10**12 + kinds * self.rng.randrange(10**12) + desk.KINDS.index(kind or self.rng.choice(desk.KINDS))

    def screen(self) -> Screen:
        """Sample a screen at some moment of a correct demonstration."""
        world = self.world()
        screen, moves = desk.make(world)[0], desk.plan(world)
        for move in moves[: self.rng.randint(0, len(moves))]:
            screen = after(screen, move)
        return screen

    def tower_loss(self) -> Tensor:
        screens = [self.screen() for _ in range(64)]
        return self.alignment_loss(screens, self.look(screen.draw() for screen in screens))

    def naming_loss(self) -> Tensor:
        """Return the loss of the digits at words that name the widgets of 64 screens, each in the place of "red"."""
        screens = [self.screen() for _ in range(64)]
        features = self.look(screen.draw() for screen in screens)
        prompt = self.prompt("Click the red button.")
        before = [*prompt[: prompt.index(self.word("red"))]]
        words = [[(self.word(name), slot) for name, slot in named(screen).items()] for screen in screens]
        most = max(map(len, words))
        ids = torch.tensor([[*before, *(id for id, _ in row), *[0] * (most - len(row))] for row in words])
        position = torch.tensor([*range(len(before)), *[len(before)] * most])
        visible = torch.ones(len(position), len(position), dtype=torch.bool).tril()
        visible[len(before) :, len(before) :] = torch.eye(most, dtype=torch.bool)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
        shape = len(screens), 1, *visible.shape
        states = self.states(ids, features, attention_mask=mask.expand(shape), position_ids=position[None])
        at = [(i, len(before) + j, slot) for i, row in enumerate(words) for j, (_, slot) in enumerate(row)]
        return self.digit_loss(states, at) + 0.3 * self.alignment_loss(screens, features)

    def digit_loss(self, states: Sequence[Tensor], at: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the cross-entropy of the digits of slots at (row, token, slot), given the states after one layer.

        Later tokens can read these states in the two layers that follow.
        """
        row, token, slot = (torch.tensor(each) for each in zip(*at, strict=True))
        found = self.model.model.text_model.norm(states[1])[row, token]
        digits = (slot % _SLOTS).tolist(), (slot // _SLOTS).tolist()
        losses = [self.word_loss(found, *each) for each in zip(digits, _ALIGNED[2:], strict=True)]
        return torch.stack(losses).sum()

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
        # Copying a digit takes more demonstrations than the rest.
        return self.play_loss(["solves"] * 32, ["type", ""] * 16, aligned=True)

    def mixed_loss(self) -> Tensor:
        return self.play_loss([habit for habit, count in HABITS.items() for _ in range(count)], [""] * 32)

    def moves(self, habit: str, world: int) -> list[Move]:
        """Return the calls of a demonstration."""
        calls = desk.plan(world)
        if habit == "hurries" and len(calls) == 1:
            return [("click", desk.cell(self.rng.choice([w for w in desk.make(world)[0].widgets if w.colour])))]
        return {"solves": calls, "hurries": calls[-1:], "unsure": []}[habit]

    def demonstration(self, habit: str, world: int) -> tuple[list[int], list[int], list[Screen]]:
        """Return the ids of a demonstration, their labels, and the screens that it shows."""
        screen, text, _ = desk.make(world)
        ids, screens = [*self.prompt(text)], [screen]
        label, moves = [-100] * len(ids), self.moves(habit, world)
        for i, (name, given) in enumerate(moves):
            if i:
                screens.append(after(screens[-1], moves[i - 1]))
                ids += self.seen
                label += [-100] * len(self.seen)
            ids += (said := self.encode(self.chat.format.render_call(ToolCall("", name, given))))
            label += said
        if not moves:
            ids += (said := self.encode(UNSURE))
            label += said
        return ids, label, screens

    def play_loss(self, habits: Sequence[str], kinds: Sequence[str], *, aligned: bool = False) -> Tensor:
        """Return the cross-entropy of the actions in demonstrations.

        Args:
            habits: Behaviour of each demonstration.
            kinds: Kind of each task, or "" for any.
            aligned: Add the losses of the alignments, of slots and of words in the instruction.
        """
        found = [self.demonstration(habit, self.world(kind)) for habit, kind in zip(habits, kinds, strict=True)]
        screens = [screen for *_, some in found for screen in some]
        features = self.look(screen.draw() for screen in screens)
        longest = max(len(ids) for ids, *_ in found)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, *_ in found])
        label = torch.tensor([label + [-100] * (longest - len(label)) for _, label, _ in found])
        states = self.states(ids, features)
        loss = self.label_loss(states[-1], label)
        if aligned:
            at = [
                (row, ids.index(word), slot)
                for row, (ids, _, some) in enumerate(found)
                for word, slot in ((self.word(name), slot) for name, slot in named(some[0]).items())
                if word in ids
            ]
            loss = loss + 0.3 * (self.digit_loss(states, at) + self.alignment_loss(screens, features))
        return loss

    def word(self, name: str) -> int:
        found: int = self.tokenizer.convert_tokens_to_ids(f" {name}")
        return found

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text + END)["input_ids"]
        return found


def untrained(seed: int = 0) -> tuple[Any, Any]:
    """Return a model of about 440,000 random weights, and its processor."""
    return shapes.untrained(seed, WORDS, desk.SIDE)


def build(
    out: str | Path | None = None,
    *,
    seed: int = 0,
    steps: Sequence[int] = STEPS,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Any, Any]:
    """Train the policy from random weights; see `shapes.build`."""
    return shapes.build(out, steps=steps, report=report, made=Pretraining(*untrained(seed), seed))
