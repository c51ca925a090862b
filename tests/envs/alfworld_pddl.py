"""Export of generated games as `game.tw-pddl` files for ALFWorld's own engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from agentfly_kit.envs.alfworld.games import TREATED, Game, Goal
from agentfly_kit.envs.alfworld.house import (
    CLEANABLE,
    COOLABLE,
    HEATABLE,
    HOLDS,
    LAMPS,
    OPENABLE,
    SLICEABLE,
    Name,
)
from agentfly_kit.errors import SettingsError

# Receptacle and object types that the domain refers to, so that they must be declared even if not in the house.
_NEEDED = ("sinkbasin", "microwave", "fridge"), ("knife", "butterknife")


def entity(name: Name) -> str:
    """Return an entity id that ALFWorld shows as `name`: it numbers the sorted ids of a type in descending order."""
    kind, number = name
    if kind.endswith("basin"):
        return f"{kind.removesuffix('basin')}_bar_{9999 - number}_bar_{kind}"
    return f"{kind}_bar_{9999 - number}"


def problem(game: Game) -> str:
    """Return the house and the goal as a PDDL problem."""
    house = game.house()
    places = list(house.inside)
    things = [thing for inside in house.inside.values() for thing in inside]
    rtypes = sorted({kind for kind, _ in places} | set(_NEEDED[0]) | _ends(game.goal))
    otypes = sorted({kind for kind, _ in things} | set(_NEEDED[1]) | {game.goal.thing})
    at = {place: f"loc_{i + 1}" for i, place in enumerate(places)}
    facts = ["atLocation agent1 loc_0"]
    for place in places:
        facts += [f"receptacleAtLocation {entity(place)} {at[place]}", f"receptacleType {entity(place)} {place[0]}Type"]
        facts += [f"openable {entity(place)}"] if place[0] in OPENABLE else []
        for thing in house.inside[place]:
            facts += [
                f"inReceptacle {entity(thing)} {entity(place)}",
                f"objectAtLocation {entity(thing)} {at[place]}",
                f"objectType {entity(thing)} {thing[0]}Type",
            ]
            facts.append(f"{'toggleable' if thing[0] in LAMPS else 'pickupable'} {entity(thing)}")
            facts += [
                f"{able} {entity(thing)}"
                for able, kinds in (
                    ("heatable", HEATABLE),
                    ("coolable", COOLABLE),
                    ("cleanable", CLEANABLE),
                    ("sliceable", SLICEABLE),
                )
                if thing[0] in kinds
            ]
    facts += [f"canContain {r}Type {o}Type" for r in rtypes for o in otypes if o in HOLDS.get(r, ())]
    objects = ["agent1 - agent", *(f"loc_{i} - location" for i in range(len(places) + 1))]
    objects += [f"{entity(place)} - receptacle" for place in places]
    objects += [f"{entity(thing)} - object" for thing in things]
    objects += [f"{kind}Type - rtype" for kind in rtypes] + [f"{kind}Type - otype" for kind in otypes]
    lines = "\n".join(f"    ({fact})" for fact in facts)
    return (
        f"(define (problem plan_{game.size}_{game.number})\n  (:domain alfred)\n  (:objects\n    "
        + "\n    ".join(objects)
        + f"\n  )\n  (:init\n    (= (total-cost) 0)\n{lines}\n  )\n  (:goal {_goal(game.goal)})\n"
        + "  (:metric minimize (total-cost))\n)\n"
    )


def _ends(goal: Goal) -> set[str]:
    return set() if goal.place in LAMPS else {goal.place}


def _goal(goal: Goal) -> str:
    if goal.kind == "look_at_obj_in_light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
            f"(objectType ?ot {goal.place}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) "
            "(atLocation ?a ?l) (inReceptacle ?ot ?r))) (exists (?o - object ?a - agent) (and "
            f"(objectType ?o {goal.thing}Type) (holds ?a ?o))))"
        )

    def there(name: str) -> str:
        treated = {"clean": "(isClean {})", "heat": "(isHot {})", "cool": "(isCool {})"}
        more = treated[TREATED[goal.kind][0]].format(name) if goal.kind in TREATED else ""
        return f"(objectType {name} {goal.thing}Type) {more}(inReceptacle {name} ?r)"

    where = f"(receptacleType ?r {goal.place}Type)"
    if goal.kind == "pick_two_obj_and_place":
        inner = f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) {there('?o2')}))"
        return f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {there('?o1')} {where} {inner}))))"
    return f"(and (exists (?r - receptacle) (exists (?o - object) (and {there('?o')} {where}))))"


def write(game: Game, file: Path) -> None:
    """Write a game as a `game.tw-pddl` file, with the domain and grammar of the package `alfworld`.

    Raises:  SettingsError if `alfworld` is not installed.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise SettingsError("the alfworld package is needed for its domain; type: pip install alfworld (compiles)")
    package = Path(spec.origin).parent / "data"
    grammar = (package / "alfred.twl2").read_text(encoding="utf-8").replace("UNKNOWN GOAL", game.goal.text)
    made = {
        "pddl_domain": (package / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar,
        "pddl_problem": problem(game),
        "solvable": True,
        "walkthrough": [],
    }
    file.write_text(json.dumps(made), encoding="utf-8")
