"""Generator of household games. A game's number determines its house and goal. Goals and wording follow ALFWorld."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentfly_kit.envs.alfworld.house import CLEANABLE, COOLABLE, HEATABLE, HOLDS, LAMPS, OPENABLE, WORLD, House, Name
from agentfly_kit.errors import check_choice

# Size of a game's room. A "small" room has four or five receptacles and a few objects, none of them hidden. A "full"
# room has seven to thirty receptacles, as in ALFWorld, and may hide objects in closed receptacles.
Size: TypeAlias = Literal["small", "full"]

WORDING = {
    "pick_and_place_simple": ("put a {} in {}", "put some {} on {}"),
    "look_at_obj_in_light": ("look at {} under the {}", "examine the {} with the {}"),
    "pick_clean_then_place_in_recep": ("put a clean {} in {}", "clean some {} and put it in {}"),
    "pick_heat_then_place_in_recep": ("put a hot {} in {}", "heat some {} and put it in {}"),
    "pick_cool_then_place_in_recep": ("put a cool {} in {}", "cool some {} and put it in {}"),
    "pick_two_obj_and_place": ("put two {} in {}", "find two {} and put them in {}"),
}
KINDS = tuple(WORDING)
# Maps a task type to the command that prepares the object, the required receptacle, and the possible object types.
TREATED = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin", CLEANABLE),
    "pick_heat_then_place_in_recep": ("heat", "microwave", HEATABLE),
    "pick_cool_then_place_in_recep": ("cool", "fridge", COOLABLE),
}


@dataclass(frozen=True)
class Goal:
    """The goal of a game. `place` is a receptacle type, or a lamp type for "look_at_obj_in_light" tasks."""

    kind: str
    thing: str
    place: str
    wording: int = 0

    @property
    def text(self) -> str:
        return WORDING[self.kind][self.wording].format(self.thing, self.place)

    def ready(self, house: House, thing: Name) -> bool:
        """Return True if an object has the type and state that the goal requires."""
        if thing[0] != self.thing:
            return False
        if self.kind not in TREATED:
            return True
        return thing in {"clean": house.clean, "heat": house.hot, "cool": house.cool}[TREATED[self.kind][0]]

    def placed(self, house: House) -> int:
        """Return the largest number of objects that meet the requirements in one receptacle of the goal's type."""
        inside = [things for place, things in house.inside.items() if place[0] == self.place]
        return max((sum(self.ready(house, thing) for thing in things) for things in inside), default=0)

    def met(self, house: House) -> bool:
        if self.kind == "look_at_obj_in_light":
            here = [] if house.here is None else house.inside[house.here]
            lit = any(thing[0] == self.place and thing in house.used for thing in here)
            return lit and house.held is not None and house.held[0] == self.thing
        return self.placed(house) >= (2 if self.kind == "pick_two_obj_and_place" else 1)


@dataclass(frozen=True)
class Game:
    number: int
    size: Size
    goal: Goal
    _house: House

    def house(self) -> House:
        """Return a new copy of the initial house."""
        return self._house.copy()

    @property
    def opening(self) -> str:
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{self._house.room()}\n\nYour task is to: {self.goal.text}."


_LAMP_STANDS = ("desk", "dresser", "shelf", "sidetable")


def game(number: int, size: Size = "full") -> Game:
    """Generate the game with a given number, of type `KINDS[number % 6]`. Raise SettingsError for an invalid size."""
    check_choice("size", size, Size)
    return _game(number, size)


@functools.lru_cache(maxsize=4096)
def _game(number: int, size: Size) -> Game:
    rng = random.Random(f"alfworld {size} {number}")
    kind = KINDS[number % len(KINDS)]
    while True:
        made = _drawn(rng, kind, size)
        if made is not None:
            return Game(number, size, *made)


def _drawn(rng: random.Random, kind: str, size: Size) -> tuple[Goal, House] | None:
    """Sample a goal of type `kind` and a house. Return None if the objects do not fit or the goal is already met."""
    rooms = {name.split()[1]: room for name, room in WORLD["rooms"].items() if name.split()[0] == size}
    if kind in TREATED:
        _, at, treated = TREATED[kind]
        fitting = [room for room in rooms if rooms[room].get(at, (0, 0))[0]]
    else:
        at, treated = "", frozenset()
        fitting = [room for room in rooms if kind != "look_at_obj_in_light" or set(_LAMP_STANDS) & set(rooms[room])]
        if kind == "look_at_obj_in_light":
            fitting = [room for room in fitting if room != "kitchen"]
    room = rng.choice(fitting)
    places: list[Name] = []
    for place, (low, high) in rooms[room].items():
        # List receptacle numbers in descending order, as in ALFWorld's initial observation.
        places += [(place, n) for n in range(rng.randint(low, high), 0, -1)]
    kinds = sorted({place for place, _ in places})
    all_things = WORLD["things"][f"{size} {room}"].split()
    wanted = [
        thing for thing in all_things
        if (not treated or thing in treated) and len([k for k in kinds if thing in HOLDS[k]]) >= 2
    ]  # fmt: skip
    if not wanted:
        return None
    thing = rng.choice(wanted)
    house = House({place: [] for place in places})

    def put(name: Name, fits: Callable[[str], bool]) -> bool:
        found = [place for place in places if fits(place[0]) and (size == "full" or place[0] not in OPENABLE)]
        if found:
            house.inside[rng.choice(found)].append(name)
        return bool(found)

    if kind == "look_at_obj_in_light":
        goal_place = rng.choice(LAMPS) if size == "full" else "desklamp"
        if not put((goal_place, 1), lambda place: place in _LAMP_STANDS):
            return None
        barred: set[str] = set()
    else:
        ends = [k for k in kinds if thing in HOLDS[k] and k != at]
        if not ends:
            return None
        goal_place = rng.choice(ends)
        barred = set() if treated else {goal_place}
    count = rng.randint(2, 3) if kind == "pick_two_obj_and_place" else rng.randint(1, 2)
    if size == "small":
        count = 2 if kind == "pick_two_obj_and_place" else 1
    for n in range(count, 0, -1):
        if not put((thing, n), lambda place: place not in barred and thing in HOLDS[place]):
            return None
    others = [other for other in all_things if other != thing]
    for other in rng.sample(others, rng.randint(6, min(16, len(others))) if size == "full" else rng.randint(2, 3)):
        for n in range(rng.choice((1, 1, 2, 3)) if size == "full" else 1, 0, -1):
            put((other, n), lambda place, other=other: other in HOLDS[place])  # type: ignore[misc]
    goal = Goal(kind, thing, goal_place, rng.randrange(2))
    return None if goal.met(house) else (goal, house)
