"""Generator of mate-in-one and mate-in-two puzzles with a unique first move, found by searching random positions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentfly_kit.envs.chess.board import after, defence, fen_of, mates, mating, rules
from agentfly_kit.envs.family import row_id

if TYPE_CHECKING:
    from chess import Board, Move

SIZES = {"train": 128, "test": 64}
# If several second moves mate, the solution is the one from the first square and, from that square, in the first of
# these directions (for pawns, the last). The included puzzles and the policies trained on them depend on the order.
_WAYS = (
    (1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2),
    (1, 1), (1, -1), (-1, -1), (-1, 1), (1, 0), (0, -1), (-1, 0), (0, 1),
)  # fmt: skip


def random_position(rng: random.Random) -> Board | None:
    """Sample a position with few pieces and white to move. Return None if one of the kings is in check."""
    chess = rules()
    pieces = ["K", "k"]
    pieces += rng.choice(("Q", "QN", "QB", "QR", "RR", "QP", "RRN", "RBN", "QNP", "RRB", "QRB"))
    pieces += ["pnbrq"[min(rng.randrange(5), rng.randrange(5))] for _ in range(rng.randint(1, 5))]
    # Place the black king mostly at the edge, where mates are more likely.
    edge = [s for s in range(64) if s % 8 in (0, 7) or s // 8 in (0, 7)]
    board: Board = chess.Board(None)
    for piece in pieces:
        home = edge if piece == "k" and rng.random() < 0.8 else range(8, 56) if piece in "pP" else range(64)
        board.set_piece_at(rng.choice([s for s in home if not board.piece_at(s)]), chess.Piece.from_symbol(piece))
    return None if board.was_into_check() or board.is_check() else board


def puzzle(rng: random.Random, mate: int) -> tuple[Board, list[Move]]:
    """Sample a position where exactly one move forces mate in `mate` (1 or 2) moves. Return it and the solution."""
    while True:
        board = random_position(rng)
        if board is None:
            continue
        found = mates(board)
        if mate == 1 and len(found) == 1:
            return board, found
        if mate == 1 or found:
            continue
        first = list(itertools.islice(mating(board), 2))
        if len(first) == 1:
            reached = after(board, first[0])
            reply = defence(reached)
            assert reply is not None
            last = after(reached, reply)
            return board, [first[0], reply, min(mates(last), key=lambda move: _order(last, move))]


def _order(board: Board, move: Move) -> tuple[int, int, int]:
    right, up = move.to_square % 8 - move.from_square % 8, move.to_square // 8 - move.from_square // 8
    far = math.gcd(right, up)
    way = _WAYS.index((right // far, up // far))
    return move.from_square, -way if board.piece_type_at(move.from_square) == rules().PAWN else way, far


def made(n: int, *, seed: int = 0, split: str = "train") -> Iterator[dict[str, Any]]:
    """Generate n puzzles, alternately mates in one and in two, as rows {"id", "question", "fen", "solution", "mate"}.

    The puzzles depend on seed and split. Each puzzle takes 0.1 to 1 second to generate.
    """
    for i in range(n):
        rng = random.Random(f"chess {split} {seed} {i}")
        mate = 1 + i % 2
        board, line = puzzle(rng, mate)
        if rng.random() < 0.5:
            board = board.mirror()
            line = [rules().Move(m.from_square ^ 56, m.to_square ^ 56, m.promotion) for m in line]
        side = "White" if board.turn else "Black"
        yield {
            "id": row_id("chess", split, seed, i),
            "question": f"{side} to move and mate in {mate}.\n{fen_of(board)}",
            "fen": fen_of(board),
            "solution": [str(move) for move in line],
            "mate": mate,
        }
