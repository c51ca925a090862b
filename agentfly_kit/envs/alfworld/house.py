"""State and commands of a household world.

Vocabulary, commands and their conditions follow ALFWorld's domain files, alfred.pddl and alfred.twl2 (MIT licence).
ALFWorld's engine is not used. Unlike in ALFWorld, no two receptacles share a location.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentfly_kit import task_files

# An object or receptacle as (type, number). For example, ("apple", 1) is the object "apple 1".
Name = tuple[str, int]


# World data: object types by property, by receptacle type that can contain them (ALFWorld's `canContain`) and by room,
# and the minimum and maximum number of receptacles of each type in a room.
WORLD = task_files.bundled_json("vocabularies", "alfworld.json")
OPENABLE, HEATABLE, COOLABLE, CLEANABLE, SLICEABLE, KNIVES = (
    frozenset(WORLD["kinds"][name].split())
    for name in ("openable", "heatable", "coolable", "cleanable", "sliceable", "knives")
)
# Object types that can be used but not taken.
LAMPS = ("desklamp", "floorlamp")
# Maps a receptacle type to the object types that it can contain.
HOLDS: dict[str, frozenset[str]] = {place: frozenset(things.split()) for place, things in WORLD["holds"].items()}

# Observation after a command that is unknown or impossible in the current state.
NOTHING = "Nothing happens."

HELP = """
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

_NAMED = r"([a-z]+) ([0-9]{1,4})"
_FORMS = [
    (re.compile(form.replace("X", _NAMED)), verb)
    for form, verb in (
        ("go to X", "go"),
        ("open X", "open"),
        ("close X", "close"),
        ("take X from X", "take"),
        ("move X to X", "move"),
        (r"put X (?:in/on|in|on|into|onto) X", "move"),
        ("examine X", "examine"),
        ("use X", "use"),
        ("heat X with X", "heat"),
        ("clean X with X", "clean"),
        ("cool X with X", "cool"),
        ("slice X with X", "slice"),
    )
]
_WITH = {"heat": ("microwave", HEATABLE), "clean": ("sinkbasin", CLEANABLE), "cool": ("fridge", COOLABLE)}


def text(name: Name) -> str:
    return f"{name[0]} {name[1]}"


def listed(names: Iterable[Name]) -> str:
    """Format a list as ALFWorld does: "a apple 1, a mug 2, and a mug 1" (the article is always "a")."""
    parts = [f"a {text(name)}" for name in names]
    if not parts:
        return "nothing"
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f", and {parts[-1]}"


@dataclass
class House:
    """State of a house and its agent. `inside` maps each receptacle to its objects in display order."""

    inside: dict[Name, list[Name]]
    here: Name | None = None
    held: Name | None = None

    def __post_init__(self) -> None:
        self.opened: set[Name] = set()
        self.hot: set[Name] = set()
        self.cool: set[Name] = set()
        self.clean: set[Name] = set()
        self.sliced: set[Name] = set()
        self.used: set[Name] = set()

    def copy(self) -> House:
        return copy.deepcopy(self)

    # --- observations

    def shut(self, place: Name) -> bool:
        return place[0] in OPENABLE and place not in self.opened

    @property
    def seen(self) -> list[Name]:
        """Objects visible in the receptacle in front of the agent."""
        return [] if self.here is None or self.shut(self.here) else self.inside[self.here]

    def where(self, thing: Name) -> Name | None:
        """Return the receptacle that contains an object, or None for the object that the agent holds."""
        return next((place for place, things in self.inside.items() if thing in things), None)

    def room(self) -> str:
        return f"You are in the middle of a room. Looking quickly around you, you see {listed(self.inside)}."

    def _place(self, place: Name) -> str:
        if place[0] in OPENABLE:
            if place not in self.opened:
                return f"The {text(place)} is closed."
            return f"The {text(place)} is open. In it, you see {listed(self.inside[place])}."
        return f"On the {text(place)}, you see {listed(self.inside[place])}."

    def _thing(self, thing: Name) -> str:
        clean, sliced = thing in self.clean, "sliced " if thing in self.sliced else ""
        warmth = "hot" if thing in self.hot else "cool" if thing in self.cool else ""
        if warmth and clean:
            return f"This is a {warmth} and clean {sliced}{text(thing)}."
        if warmth == "cool" and not sliced:
            warmth = "cold"
        if warmth or clean:
            return f"This is a {warmth or 'clean'} {sliced}{text(thing)}."
        return f"This is a sliced {text(thing)}." if sliced else f"There's nothing special about {text(thing)}."

    # --- commands

    def do(self, command: str) -> str:
        """Execute a command and return the observation, or `NOTHING` if it is invalid. `put` is an alias of `move`."""
        command = " ".join(command.lower().split())
        if command == "look":
            if self.here is None:  # as in ALFWorld, only the initial observation lists the room
                return "You are in the middle of a room. Looking quickly around you, you see nothing."
            return f"You are facing the {text(self.here)}. Next to it, you see nothing."
        if command == "inventory":
            return f"You are carrying: a {text(self.held)}." if self.held else "You are not carrying anything."
        if command == "help":
            return HELP
        for form, verb in _FORMS:
            found = form.fullmatch(command)
            if found:
                given = found.groups()
                names = [(kind, int(number)) for kind, number in zip(given[::2], given[1::2], strict=True)]
                if any(number.startswith("0") for number in given[1::2]):
                    return NOTHING
                return str(getattr(self, f"_{verb}")(*names)) if verb not in _WITH else self._treat(verb, *names)
        return NOTHING

    def _go(self, place: Name) -> str:
        if place not in self.inside or place == self.here:
            return NOTHING
        self.here = place
        return f"You arrive at {text(place)}. {self._place(place)}"

    def _open(self, place: Name) -> str:
        if place != self.here or not self.shut(place):
            return NOTHING
        self.opened.add(place)
        return f"You open the {text(place)}. {self._place(place)}"

    def _close(self, place: Name) -> str:
        if place != self.here or place not in self.opened:
            return NOTHING
        self.opened.remove(place)
        return f"You close the {text(place)}."

    def _take(self, thing: Name, place: Name) -> str:
        if place != self.here or thing not in self.seen or self.held is not None or thing[0] in LAMPS:
            return NOTHING
        self.inside[place].remove(thing)
        self.held = thing
        return f"You pick up the {text(thing)} from the {text(place)}."

    def _move(self, thing: Name, place: Name) -> str:
        if thing != self.held or place != self.here or self.shut(place) or thing[0] not in HOLDS[place[0]]:
            return NOTHING
        self.held = None
        self.inside[place].append(thing)
        return f"You move the {text(thing)} to the {text(place)}."

    def _examine(self, name: Name) -> str:
        if name == self.here:
            return self._place(name)
        # Only the held object can be examined, as in ALFWorld's engine, but not in its domain file.
        return self._thing(name) if name == self.held else NOTHING

    def _use(self, thing: Name) -> str:
        if thing[0] not in LAMPS or self.here is None or thing not in self.inside[self.here]:
            return NOTHING
        self.used.add(thing)
        return f"You turn on the {text(thing)}."

    def _treat(self, verb: str, thing: Name, place: Name) -> str:
        kind, things = _WITH[verb]
        if thing != self.held or place != self.here or place[0] != kind or thing[0] not in things:
            return NOTHING
        if verb == "clean":
            self.clean.add(thing)
        else:
            (self.hot if verb == "heat" else self.cool).add(thing)
            (self.cool if verb == "heat" else self.hot).discard(thing)
        return f"You {verb} the {text(thing)} using the {text(place)}."

    def _slice(self, thing: Name, knife: Name) -> str:
        if knife != self.held or knife[0] not in KNIVES or thing[0] not in SLICEABLE or thing in self.sliced:
            return NOTHING
        if self.here is None or thing not in self.inside[self.here]:
            return NOTHING
        self.sliced.add(thing)
        return f"You sliced the {text(thing)} with the {text(knife)}."

    def admissible(self) -> list[str]:
        """Return all commands that are possible in the current state, sorted."""
        here, held = self.here, self.held
        found = ["help", "inventory", "look", *(f"go to {text(place)}" for place in self.inside if place != here)]
        if here is not None:
            found.append(f"examine {text(here)}")
            if here[0] in OPENABLE:
                found.append(f"{'open' if self.shut(here) else 'close'} {text(here)}")
            found += [f"use {text(thing)}" for thing in self.inside[here] if thing[0] in LAMPS]
            if held is None:
                found += [f"take {text(thing)} from {text(here)}" for thing in self.seen if thing[0] not in LAMPS]
            else:
                if not self.shut(here) and held[0] in HOLDS[here[0]]:
                    found.append(f"move {text(held)} to {text(here)}")
                for verb, (kind, things) in _WITH.items():
                    if here[0] == kind and held[0] in things:
                        found.append(f"{verb} {text(held)} with {text(here)}")
                if held[0] in KNIVES:
                    cut = [t for t in self.inside[here] if t[0] in SLICEABLE and t not in self.sliced]
                    found += [f"slice {text(thing)} with {text(held)}" for thing in cut]
        if held is not None:
            found.append(f"examine {text(held)}")
        return sorted(set(found))
