"""Planner that finds commands to reach a goal from any state. Plans use all objects, including those not yet seen."""

from __future__ import annotations

from agentfly_kit.envs.alfworld.games import TREATED, Goal
from agentfly_kit.envs.alfworld.house import HOLDS, OPENABLE, House, Name, text


class Walk:
    """Sequence of commands executed in a copy of a house, recorded with their observations."""

    def __init__(self, house: House) -> None:
        self.house = house.copy()
        self.steps: list[tuple[str, str]] = []

    @property
    def commands(self) -> list[str]:
        return [command for command, _ in self.steps]

    def do(self, command: str) -> None:
        self.steps.append((command, self.house.do(command)))

    def go(self, place: Name) -> None:
        if self.house.here != place:
            self.do(f"go to {text(place)}")

    def reach(self, place: Name) -> None:
        """Go to a receptacle and open it if needed."""
        self.go(place)
        if self.house.shut(place):
            self.do(f"open {text(place)}")

    def take(self, thing: Name) -> None:
        if self.house.held == thing:
            return
        if self.house.held is not None:
            self.drop()
        place = self.house.where(thing)
        assert place is not None
        self.reach(place)
        self.do(f"take {text(thing)} from {text(place)}")

    def drop(self) -> None:
        """Put the held object into the current receptacle if possible, else preferably into one that is always open."""
        held = self.house.held
        assert held is not None
        places = [place for place in self.house.inside if held[0] in HOLDS[place[0]]]
        place = min(places, key=lambda place: (place != self.house.here, place[0] in OPENABLE, place))
        self.put(held, place)

    def put(self, thing: Name, place: Name) -> None:
        self.reach(place)
        self.do(f"move {text(thing)} to {text(place)}")


def plan(house: House, goal: Goal) -> list[str]:
    """Return commands that reach the goal, or [] if it is already met. The plan is not always the shortest."""
    walk = Walk(house)
    if goal.met(house):
        return []
    everything = [thing for things in house.inside.values() for thing in things]
    things = [thing for thing in ([house.held] if house.held else []) + everything if thing[0] == goal.thing]
    # Prefer objects that need few commands: the held one, then those in the required state, then those nearby.
    things.sort(key=lambda t: (t != house.held, not goal.ready(house, t), house.where(t) != house.here))
    if goal.kind == "look_at_obj_in_light":
        lamps = [thing for thing in everything if thing[0] == goal.place]
        walk.take(things[0])
        stand = house.where(lamps[0])
        assert stand is not None
        walk.go(stand)
        if lamps[0] not in house.used:
            walk.do(f"use {text(lamps[0])}")
        return walk.commands
    count = 2 if goal.kind == "pick_two_obj_and_place" else 1
    ends = [place for place in house.inside if place[0] == goal.place]
    end = max(ends, key=lambda place: sum(goal.ready(house, thing) for thing in house.inside[place]))
    lying = [thing for thing in things if thing in house.inside[end] and goal.ready(house, thing)]
    for thing in [thing for thing in things if thing not in lying][: count - len(lying)]:
        walk.take(thing)
        if not goal.ready(walk.house, thing):
            verb, where, _ = TREATED[goal.kind]
            at = next(place for place in house.inside if place[0] == where)
            walk.go(at)
            walk.do(f"{verb} {text(thing)} with {text(at)}")
        walk.put(thing, end)
    return walk.commands
