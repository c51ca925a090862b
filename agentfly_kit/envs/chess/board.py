"""Positions of chess: parsing, text, move notation and forced mates.

The rules are those of python-chess (`chess`, GPL-3), which is imported when the first position is created.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentfly_kit.errors import SettingsError

if TYPE_CHECKING:
    from chess import Board, Move

INSTALL = 'pip install "agentfly_kit[envs]"'
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
# python-chess also reads a FEN without some of these fields, or with the files of rooks as castling rights.
_FEN = re.compile(r"\S+ [wb] (-|K?Q?k?q?) (-|[a-h][36])( [0-9]{1,5} [0-9]{1,5})?")


def rules() -> Any:
    """Import python-chess, or raise SettingsError with the install command."""
    try:
        import chess
    except ImportError:
        raise SettingsError(f"af.envs.chess needs chess; type: {INSTALL}") from None
    return chess


def from_fen(fen: str) -> Board:
    """Parse a FEN.

    Raises:  SettingsError if the FEN is malformed, the position is impossible, or python-chess is not installed.
    """
    chess = rules()
    impossible = chess.STATUS_NO_WHITE_KING | chess.STATUS_NO_BLACK_KING | chess.STATUS_TOO_MANY_KINGS
    try:
        board: Board = chess.Board(fen)
    except ValueError:
        board = chess.Board(None)  # without kings
    status = board.status()
    if status & (impossible | chess.STATUS_PAWNS_ON_BACKRANK) or not _FEN.fullmatch(" ".join(fen.split())):
        raise SettingsError(f"{fen!r} is not a valid position; pass a FEN such as {START!r}")
    if status & chess.STATUS_OPPOSITE_CHECK:
        raise SettingsError(f"{fen!r} is not a valid position: the side that has just moved is in check")
    return board


def fen_of(board: Board) -> str:
    """Return the FEN, with the en passant square after each double step of a pawn."""
    return board.fen(en_passant="fen")


def diagram(board: Board) -> str:
    """Return a text diagram of the board, with white at the bottom."""
    return "\n".join([*(f"{8 - i} {rank}" for i, rank in enumerate(str(board).split("\n"))), "  a b c d e f g h"])


def after(board: Board, move: Move) -> Board:
    """Return the position after a move. The given board is unchanged."""
    board = board.copy(stack=False)
    board.push(move)
    return board


def read(board: Board, text: str) -> Move | None:
    """Parse a legal move such as "e7e8q" or "e8=Q+". Return None unless exactly one move matches."""
    plain = re.sub(r"[#!?]+$|\s*e\.p\.$", "", text.strip()[:20])  # no move is longer
    for parse, written in ((board.parse_uci, plain.lower()), (board.parse_san, plain)):
        try:
            return parse(written) or None  # python-chess also reads null moves
        except ValueError:
            continue
    return None


def mates(board: Board) -> list[Move]:
    """Return the moves that mate immediately."""
    return [move for move in board.legal_moves if board.gives_check(move) and after(board, move).is_checkmate()]


def defence(board: Board) -> Move | None:
    """Return the first legal move that avoids immediate mate, else the first legal move, else None."""
    replies = sorted(board.legal_moves, key=str)
    return next((reply for reply in replies if not mates(after(board, reply))), replies[0] if replies else None)


def mating(board: Board) -> Iterator[Move]:
    """Yield the moves that force mate in at most two moves."""
    for move in board.legal_moves:
        reached = after(board, move)
        replies = list(reached.legal_moves)
        if all(mates(after(reached, reply)) for reply in replies) if replies else reached.is_check():
            yield move
