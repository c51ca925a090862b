"""alfworld: texts and rules of the house, generated games and plans, rewards, and folders of game files."""

import importlib.util
import json
import random
import re
from pathlib import Path
from typing import Any

import errors
import pytest

import agentfly_kit as af
from agentfly_kit.envs.alfworld import games, official, plans
from agentfly_kit.envs.alfworld.house import NOTHING, House


def kitchen() -> House:
    return House(
        {
            ("fridge", 1): [("apple", 1)],
            ("countertop", 1): [("knife", 1), ("apple", 2), ("bread", 1)],
            ("microwave", 1): [],
            ("sinkbasin", 1): [],
            ("desk", 1): [("desklamp", 1)],
        }
    )


def test_observations_are_those_of_alfworld() -> None:
    house = kitchen()
    for command, said in [
        ("look", "You are in the middle of a room. Looking quickly around you, you see nothing."),
        ("inventory", "You are not carrying anything."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("go to fridge 1", NOTHING),
        ("take apple 1 from fridge 1", NOTHING),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
        ("open fridge 1", NOTHING),
        ("examine apple 1", NOTHING),
        ("take apple 1 from fridge 1", "You pick up the apple 1 from the fridge 1."),
        ("examine fridge 1", "The fridge 1 is open. In it, you see nothing."),
        ("close fridge 1", "You close the fridge 1."),
        ("look", "You are facing the fridge 1. Next to it, you see nothing."),
        ("inventory", "You are carrying: a apple 1."),
        ("examine apple 1", "There's nothing special about apple 1."),
        ("heat apple 1 with microwave 1", NOTHING),
        ("GO  to Microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat apple 1 with microwave 1", "You heat the apple 1 using the microwave 1."),
        ("examine apple 1", "This is a hot apple 1."),
        ("move apple 1 to microwave 1", NOTHING),
        ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
        ("clean apple 1 with sinkbasin 1", "You clean the apple 1 using the sinkbasin 1."),
        ("examine apple 1", "This is a hot and clean apple 1."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("cool apple 1 with fridge 1", "You cool the apple 1 using the fridge 1."),
        ("examine apple 1", "This is a cool and clean apple 1."),
        ("go to countertop 1",
         "You arrive at countertop 1. On the countertop 1, you see a knife 1, a apple 2, and a bread 1."),
        ("take knife 1 from countertop 1", NOTHING),
        ("put apple 1 in/on countertop 1", "You move the apple 1 to the countertop 1."),
        ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
        ("slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1."),
        ("slice apple 2 with knife 1", NOTHING),
        ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
        ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
        ("examine apple 2", "This is a sliced apple 2."),
        ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a desklamp 1."),
        ("move apple 2 to desk 1", NOTHING),
        ("take desklamp 1 from desk 1", NOTHING),
        ("use desklamp 1", "You turn on the desklamp 1."),
    ]:  # fmt: skip
        assert house.do(command) == said, command
    assert "Available commands:" in house.do("help")


@pytest.mark.parametrize(
    "command",
    ["", " ", "go", "go to", "go to moon 1", "go to fridge", "go to fridge 01", "go to fridge -1", "go to fridge 99999",
     "take apple 1", "put apple 1", "heat fridge 1 with fridge 1", "use fridge 1", "slice fridge 1 with fridge 1",
     "move None to fridge 1", "go to fridge 1; open fridge 1", "go to fridge 1\x00", "геть to fridge 1", "look " * 5000,
     "__init__", "go to 'fridge 1'", "open apple 1", "close countertop 1"],
)  # fmt: skip
def test_invalid_commands_change_nothing(command: str) -> None:
    house, before = kitchen(), kitchen()
    assert house.do(command) == NOTHING
    assert house == before and vars(house) == vars(before)


@pytest.mark.parametrize("size", ["small", "full"])
def test_admissible_commands_have_an_effect_and_a_plan_wins_from_any_state(size: Any) -> None:
    rng = random.Random(3)
    kinds = set()
    for number in range(120):
        game = games.game(number, size)
        house = game.house()
        assert not game.goal.met(house)
        for _ in range(rng.randrange(12)):
            command = rng.choice(house.admissible())
            assert house.copy().do(command) != NOTHING, (number, command)
            house.do(command)
        for command in plans.plan(house, game.goal):
            assert command in house.admissible(), (number, command)
            house.do(command)
        assert game.goal.met(house), number
        assert plans.plan(house, game.goal) == []
        kinds.add(game.goal.kind)
        assert game.house() == games.game(number, size).house(), "a game begins as it was made"
    assert kinds == set(games.KINDS)


def test_goals_are_met_exactly_when_their_conditions_hold() -> None:
    house = kitchen()
    heat = games.Goal("pick_heat_then_place_in_recep", "apple", "countertop")
    two = games.Goal("pick_two_obj_and_place", "apple", "countertop", 1)
    light = games.Goal("look_at_obj_in_light", "bread", "desklamp")
    assert (heat.text, two.text) == ("put a hot apple in countertop", "find two apple and put them in countertop")
    for command in ("go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to microwave 1",
                    "heat apple 1 with microwave 1", "go to fridge 1", "cool apple 1 with fridge 1",
                    "go to countertop 1", "move apple 1 to countertop 1"):  # fmt: skip
        assert not heat.met(house) and not two.met(house)
        assert house.do(command) != NOTHING
    assert not heat.met(house), "it was cooled again"
    assert two.met(house)
    assert games.Goal("pick_cool_then_place_in_recep", "apple", "countertop").met(house)
    for command in ("go to desk 1", "use desklamp 1", "go to countertop 1", "take bread 1 from countertop 1"):
        house.do(command)
        assert not light.met(house)
    house.do("go to desk 1")
    assert light.met(house)


async def test_the_reward_contains_the_stages() -> None:
    tasks = af.envs.alfworld.tasks(6, "test")
    for t in (await af.envs.alfworld.expert().rollout(tasks)).trajectories:
        assert (t.stop, t.reward, t.success) == ("env_done", 1.0, True)
        assert {name: t.metrics[name] for name in ("found", "taken", "prepared", "invalid")} == {
            "found": 1.0, "taken": 1.0, "prepared": 1.0, "invalid": 0.0}  # fmt: skip

    def hostile(task: af.Task, turn: int) -> str:
        command = ("take everything", "go to nowhere 1")[turn % 2]
        return f'<tool_call>{{"name":"act","arguments":{{"command":"{command}"}}}}</tool_call>'

    lost = af.envs.alfworld.agent(af.ScriptedEngine(hostile), chat=af.envs.family.small_chat(), options={"steps": 6})
    for t in (await lost.rollout(tasks[:3])).trajectories:
        assert (t.stop, t.reward, t.metrics["invalid"], t.metrics["steps"]) == ("env_done", 0.0, 6.0, 6.0)
        assert [c.result.observation for c in t.tool_calls] == [NOTHING] * 6


async def test_admissible_commands_are_listed() -> None:
    task = af.envs.alfworld.tasks(1, "test", size="small")[0]
    act, admissible = af.envs.alfworld.family.tools
    assert (act.name, admissible.name) == ("act", "admissible_commands")
    told = (await admissible.try_(task=task)).observation
    assert told == ", ".join(af.envs.alfworld.game_of(task).house().admissible())
    (t,) = (await af.envs.alfworld.expert(options={"admissible": True}).rollout([task])).trajectories
    assert f"\n\nAdmissible: {told}" in t.turns[0].text
    assert all("\n\nAdmissible: " in c.result.observation for c in t.tool_calls[:-1])


def test_tasks_of_one_kind() -> None:
    only = af.envs.alfworld.tasks(5, "train", kinds=("pick_two_obj_and_place",))
    assert {task.fields["kind"] for task in only} == {"pick_two_obj_and_place"}


# ---- games in files


def a_file(folder: Path, number: int = 0, **changes: Any) -> Path:
    """Write a game file with the path and format of ALFWorld's, but without the domain of ALFWorld's engine."""
    game = games.game(number)
    inside = folder / "json_2.1.1" / "train" / f"{game.goal.kind}-Apple-None-Fridge-1" / f"trial_{number}"
    inside.mkdir(parents=True)
    grammar = f'"rhs": "Your task is to: {game.goal.text}."'
    row = {"pddl_domain": "(define)", "grammar": grammar, "pddl_problem": "(define)", "solvable": True}
    (inside / "game.tw-pddl").write_text(json.dumps(row | changes), encoding="utf-8")
    (inside / "traj_data.json").write_text("{}", encoding="utf-8")
    return inside / "game.tw-pddl"


def test_a_folder_of_alfworlds_games_becomes_tasks(tmp_path: Path) -> None:
    for number in range(3):
        a_file(tmp_path, number)
    a_file(tmp_path, 3, solvable=False)
    tasks = af.envs.alfworld.tasks_in(tmp_path)
    assert tasks.splits == {"train": 3}
    assert [t.fields["kind"] for t in tasks] == sorted(games.KINDS[:3])
    first = next(t for t in tasks if t.fields["kind"] == games.KINDS[0])
    goal = games.game(0).goal.text
    assert first.messages[-1]["content"] == f"{goal[0].upper()}{goal[1:]}."
    assert len(af.envs.alfworld.tasks_in(tmp_path, kinds=[games.KINDS[1]])) == 1
    if importlib.util.find_spec("textworld") is None:
        errors.check(
            lambda: af.envs.alfworld.random_agent().rollout([first]),
            af.errors.TaskError,
            "type: pip install textworld",
        )


def test_invalid_folders_and_files_are_named(tmp_path: Path) -> None:
    for name, text, words in (
        ("readme.txt", "", r"no games \(.*alfworld-download"),
        ("game.tw-pddl", "{", "cannot read '.*game.tw-pddl' as a game"),
        ("game.tw-pddl", '{"grammar": ""}', "has no pddl_domain, pddl_problem"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        errors.check(lambda: af.envs.alfworld.tasks_in(tmp_path), af.errors.SettingsError, re.compile(words))


def test_entities_have_the_names_that_alfworld_shows() -> None:
    ids = ["apple_bar_1", "apple_bar_2", "sink_bar_3_bar_sinkbasin", "agent1"]
    assert official.shown(ids) == {ids[0]: "apple 2", ids[1]: "apple 1", ids[2]: "sinkbasin 1", "agent1": "agent1"}
