"""chess: move notation, puzzles, the defender, and files of Lichess."""

import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import errors
import pytest

import agentfly_kit as af
from agentfly_kit.envs.chess import puzzles
from agentfly_kit.envs.chess.board import START, from_fen, mates, mating, read

DATA = files("agentfly_kit._data").joinpath("chess")


def test_moves_are_parsed_in_common_notations() -> None:
    board = from_fen("r3k2r/pPp5/8/3pP3/8/8/P7/R3K2R w KQkq d6 0 1")
    for text, move in [
        ("e1g1", "e1g1"), ("O-O", "e1g1"), ("0-0-0", "e1c1"), ("exd6", "e5d6"), ("ed6", "e5d6"), ("b8=Q+", "b7b8q"),
        ("bxa8=N", "b7a8n"), ("B7B8Q", "b7b8q"), ("Rxh8+", "h1h8"), ("a4!", "a2a4"), (" Kd2 ", "e1d2"),
    ]:  # fmt: skip
        assert str(read(board, text)) == move, text
    for text in ("", "e9", "Ke8", "b8", "R", "Raf1", "é4", "x" * 9999, "e5e6\x00"):
        assert read(board, text) is None, text
    twins = from_fen("4k3/8/8/8/8/8/4K3/R6R w - - 0 1")
    assert (str(read(twins, "Rad1")), read(twins, "Rd1")) == ("a1d1", None)


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    command = 'pip install "agentfly_kit[envs]"'
    for call in (lambda: from_fen(START), lambda: af.envs.chess.tasks(1)):
        errors.check(call, af.errors.SettingsError, f"af.envs.chess needs chess; type: {command}")
    assert af.envs.list().loc["chess", "installed"] == command


def test_shipped_puzzles_are_reproducible_and_have_one_solution() -> None:
    assert "python -m recipes tasks --name chess" in DATA.joinpath("ORIGIN.md").read_text(encoding="utf-8")
    for split, size in puzzles.SIZES.items():
        lines = DATA.joinpath(f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == size
        assert [json.loads(line) for line in lines[:3]] == list(puzzles.made(3, split=split))
    for row in af.envs.chess.rows(8, "test"):
        board = from_fen(row["fen"])
        if row["mate"] == 1:
            assert [str(m) for m in mates(board)] == row["solution"]
        else:
            assert not mates(board)
            assert [str(m) for m in mating(board)] == row["solution"][:1]
    assert af.envs.chess.rows(1, "train", seed=4) == af.envs.chess.rows(2, "train", seed=4)[:1]


def plays(*moves: str) -> Any:
    def player(task: af.Task, messages: Any, rng: Any) -> Any:
        made = len(af.envs.family.tool_outputs(messages))
        return ("play", {"move": moves[made]}) if made < len(moves) else "I give up."

    chat = af.envs.family.small_chat()
    return af.envs.chess.agent(af.envs.family.PlayerEngine(player, chat), chat=chat)


async def one(agent: Any, **fields: Any) -> Any:
    (t,) = (await agent.rollout([af.Task("p", ({"role": "user", "content": "?"},), fields)])).trajectories
    return t


async def test_any_mate_within_the_limit_is_correct() -> None:
    two = {"fen": "7k/8/5K2/8/8/8/8/6Q1 w - - 0 1", "mate": 2}  # several first moves force mate
    assert (await one(plays("Qg7#"), **two)).reward == 1.0
    slow = await one(plays("Qg2", "Qg3"), **two)
    assert (slow.reward, slow.stop, slow.metrics["first"]) == (0.0, "env_done", 0.0)
    late = await one(plays("Qg3", "Kf7", "Qg7"), **two)
    assert (late.reward, len(late.tool_calls)) == (0.0, 2)
    assert "stalemate" in (await one(plays("Qg6"), **two)).tool_calls[0].result.observation
    wild = await one(plays("Qz9", "", "Kxh8", "f6f7", "g1g7"), **two)
    assert (wild.reward, wild.metrics["illegal"], wild.tool_calls[0].result.ok) == (1.0, 3.0, False)


async def test_puzzles_of_lichess_load_and_are_played_by_their_rule(tmp_path: Path) -> None:
    file = tmp_path / "puzzles.csv"
    head = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags\n"
    body = "a1,4k3/8/8/8/8/8/q7/4K2R b - - 0 1,a2a8 h1h8 e8e7 h8a8,900,75,90,10,skewer short,,\n"
    file.write_text(head + body, encoding="utf-8")
    (task,) = af.envs.chess.tasks_in(file)
    assert task.fields["solution"] == ["h1h8", "e8e7", "h8a8"]
    assert task.fields["fen"].startswith("q3k3/8/8/8/8/8/8/4K2R w")
    (won,) = (await af.envs.chess.expert().rollout([task])).trajectories
    assert (won.reward, won.tool_calls[-1].result.observation) == (1.0, "Rxa8: solved.")
    assert (await one(plays("h1h7"), **task.fields)).tool_calls[0].result.observation == "Rh7: wrong move."
    for text, wanted in [
        ("a,b\n1,2\n", "has no column FEN, Moves, PuzzleId"),
        (head + body.replace("a2a8", "a2b8"), "puzzles.csv:2: 'a2b8' is not a legal move"),
        (head + body.replace("4k3/", ""), "puzzles.csv:2: .* is not a valid position"),
        (head + body.replace(" h1h8 e8e7 h8a8", ""), "must have at least two moves"),
    ]:
        file.write_text(text, encoding="utf-8")
        errors.check(lambda: af.envs.chess.tasks_in(file), af.errors.SettingsError, re.compile(wanted))
