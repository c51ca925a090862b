"""chess: rules, puzzles, the defender, and files of Lichess."""

import importlib.util
import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import errors
import pytest

import agentfly_kit as af
from agentfly_kit.envs.chess import puzzles
from agentfly_kit.envs.chess.board import START, Board, Move

DATA = files("agentfly_kit._data").joinpath("chess")


def count(board: Board, plies: int) -> int:
    return sum(count(board.push(move), plies - 1) for move in board.legal()) if plies else 1


@pytest.mark.parametrize(
    ("fen", "plies", "moves"),
    [
        (START, 3, 8902),
        ("r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1", 2, 2039),
        ("8/2p5/3p4/KP5r/1R3p1k/8/4P1P1/8 w - - 0 1", 3, 2812),
        ("r3k2r/Pppp1ppp/1b3nbN/nP6/BBP1P3/q4N2/Pp1P2PP/R2Q1RK1 w kq - 0 1", 2, 264),
        ("rnbq1k1r/pp1Pbppp/2p5/8/2B5/8/PPP1NnPP/RNBQK2R w KQ - 1 8", 2, 1486),
    ],
)
def test_move_counts_are_the_known_ones(fen: str, plies: int, moves: int) -> None:
    """The positions and counts are those of "Perft Results" in the Chess Programming Wiki."""
    assert count(Board.from_fen(fen), plies) == moves
    assert Board.from_fen(fen).fen == fen


@pytest.mark.skipif(importlib.util.find_spec("chess") is None, reason="not installed: the extra [chess]")
def test_python_chess_agrees_in_drawn_games() -> None:
    import chess as theirs

    rng = random.Random(5)
    for _ in range(4):
        board, other = Board.from_fen(START), theirs.Board()
        for ply in range(60):
            legal = list(board.legal())
            assert sorted(map(str, legal)) == sorted(m.uci() for m in other.legal_moves), board.fen
            assert (board.mate, board.check, board.stalemate) == (
                other.is_checkmate(), other.is_check(), other.is_stalemate())  # fmt: skip
            if not legal:
                break
            move = rng.choice(legal)
            if ply % 6 == 0:
                assert board.san(move) == other.san(theirs.Move.from_uci(str(move))), board.fen
            board = board.push(move)
            other.push_uci(str(move))
            assert board.fen == other.fen(en_passant="fen")
    for row in af.envs.chess.rows(64, "test"):
        other = theirs.Board(row["fen"])
        assert other.is_valid(), row
        for move in row["solution"]:
            other.push_uci(move)  # raises where it is illegal
        assert other.is_checkmate(), row


def test_moves_are_parsed_in_common_notations() -> None:
    board = Board.from_fen("r3k2r/pPp5/8/3pP3/8/8/P7/R3K2R w KQkq d6 0 1")
    for text, move in [
        ("e1g1", "e1g1"), ("O-O", "e1g1"), ("0-0-0", "e1c1"), ("exd6", "e5d6"), ("ed6", "e5d6"), ("b8=Q+", "b7b8q"),
        ("bxa8=N", "b7a8n"), ("B7B8Q", "b7b8q"), ("Rxh8+", "h1h8"), ("a4!", "a2a4"), (" Kd2 ", "e1d2"),
    ]:  # fmt: skip
        assert str(board.read(text)) == move, text
    for text in ("", "e9", "Ke8", "b8", "R", "Raf1", "é4", "x" * 9999, "e5e6\x00"):
        assert board.read(text) is None, text
    twins = Board.from_fen("4k3/8/8/8/8/8/4K3/R6R w - - 0 1")
    assert (str(twins.read("Rad1")), twins.read("Rd1"), twins.san(Move(0, 3))) == ("a1d1", None, "Rad1")


def test_shipped_puzzles_are_reproducible_and_have_one_solution() -> None:
    assert "python -m recipes tasks --name chess" in DATA.joinpath("ORIGIN.md").read_text(encoding="utf-8")
    for split, size in puzzles.SIZES.items():
        lines = DATA.joinpath(f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == size
        assert [json.loads(line) for line in lines[:3]] == list(puzzles.made(3, split=split))
    for row in af.envs.chess.rows(8, "test"):
        board = Board.from_fen(row["fen"])
        if row["mate"] == 1:
            assert [str(m) for m in board.mates()] == row["solution"]
        else:
            assert not board.mates()
            assert [str(m) for m in board.mating()] == row["solution"][:1]
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
