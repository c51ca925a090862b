"""Generator of mate-in-one and mate-in-two puzzles with a unique first move, found by searching random positions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from agentfly_kit.envs.chess.board import BLACK, WHITE, Board, Move
from agentfly_kit.envs.family import row_id

SIZES = {"train": 128, "test": 64}


def random_position(rng: random.Random) -> Board | None:
    """Sample a position with few pieces and white to move. Return None if one of the kings is in check."""
    cells = [""] * 64
    pieces = ["K", "k"]
    pieces += rng.choice(("Q", "QN", "QB", "QR", "RR", "QP", "RRN", "RBN", "QNP", "RRB", "QRB"))
    pieces += ["pnbrq"[min(rng.randrange(5), rng.randrange(5))] for _ in range(rng.randint(1, 5))]
    # Place the black king mostly at the edge, where mates are more likely.
    edge = [s for s in range(64) if s % 8 in (0, 7) or s // 8 in (0, 7)]
    for piece in pieces:
        home = edge if piece == "k" and rng.random() < 0.8 else range(8, 56) if piece in "pP" else range(64)
        cells[rng.choice([s for s in home if not cells[s]])] = piece
    board = Board(tuple(cells), WHITE)
    return None if board.attacked(board.king(BLACK), WHITE) or board.check else board


def puzzle(rng: random.Random, mate: int) -> tuple[Board, list[Move]]:
    """Sample a position where exactly one move forces mate in `mate` (1 or 2) moves. Return it with the solution."""
    while True:
        board = random_position(rng)
        if board is None:
            continue
        mates = board.mates()
        if mate == 1 and len(mates) == 1:
            return board, mates
        if mate == 1 or mates:
            continue
        first = list(itertools.islice(board.mating(), 2))
        if len(first) == 1:
            after = board.push(first[0])
            reply = after.defence()
            assert reply is not None
            return board, [first[0], reply, after.push(reply).mates()[0]]


def made(n: int, *, seed: int = 0, split: str = "train") -> Iterator[dict[str, Any]]:
    """Generate n puzzles, alternately mates in one and in two, as rows {"id", "question", "fen", "solution", "mate"}.

    The puzzles depend on seed and split. Each puzzle takes 0.1 to 1 second to generate.
    """
    for i in range(n):
        rng = random.Random(f"chess {split} {seed} {i}")
        mate = 1 + i % 2
        board, line = puzzle(rng, mate)
        if rng.random() < 0.5:
            board = board.flipped()
            line = [Move(m.start ^ 56, m.end ^ 56, m.into) for m in line]
        side = "White" if board.turn == WHITE else "Black"
        yield {
            "id": row_id("chess", split, seed, i),
            "question": f"{side} to move and mate in {mate}.\n{board.fen}",
            "fen": board.fen,
            "solution": [str(move) for move in line],
            "mate": mate,
        }
