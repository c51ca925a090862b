"""Rules of chess: positions, legal moves, check, mate, and move notation.

Squares are numbered 0 (a1) to 63 (h8). Draws by repetition and the fifty-move rule are not implemented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentfly_kit.errors import SettingsError

WHITE, BLACK = "w", "b"
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
_WAYS = {
    "N": ((1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2)),
    "B": ((1, 1), (1, -1), (-1, -1), (-1, 1)),
    "R": ((1, 0), (0, -1), (-1, 0), (0, 1)),
}
_WAYS["Q"] = _WAYS["K"] = (*_WAYS["B"], *_WAYS["R"])


def _rays(square: int, ways: tuple[tuple[int, int], ...], far: int) -> tuple[tuple[int, ...], ...]:
    file, rank = square % 8, square // 8
    rays = []
    for right, up in ways:
        ray = []
        for step in range(1, far + 1):
            x, y = file + right * step, rank + up * step
            if not (0 <= x < 8 and 0 <= y < 8):
                break
            ray.append(8 * y + x)
        if ray:
            rays.append(tuple(ray))
    return tuple(rays)


_RAYS = {kind: [_rays(s, ways, 1 if kind in "NK" else 7) for s in range(64)] for kind, ways in _WAYS.items()}
# The fields of a FEN after the piece placement: side to move, castling, en passant square, and the two move counters.
_FEN = re.compile(r"[wb] (-|K?Q?k?q?) (-|[a-h][36])( [0-9]{1,5} [0-9]{1,5})?")
# Maps the initial square of each rook to the castling right that is lost when the rook moves or is captured there.
_ROOKS = {0: "Q", 7: "K", 56: "q", 63: "k"}


def square_name(square: int) -> str:
    return "abcdefgh"[square % 8] + str(square // 8 + 1)


def square_of(name: str) -> int:
    return "abcdefgh".index(name[0]) + 8 * (int(name[1]) - 1)


@dataclass(frozen=True, slots=True)
class Move:
    """A move between two squares, numbered from 0 (a1) to 63 (h8). `into` is the piece to promote to, if any."""

    start: int
    end: int
    into: str = ""

    def __str__(self) -> str:
        return square_name(self.start) + square_name(self.end) + self.into


@dataclass(frozen=True)
class Board:
    """A position. `cells` contains the FEN letter of the piece on each square, or "". Upper case is white."""

    cells: tuple[str, ...]
    turn: str = WHITE
    castling: str = ""
    passant: int | None = None
    halfmoves: int = 0
    number: int = 1

    @classmethod
    def from_fen(cls, fen: str) -> Board:
        """Parse a FEN.

        Raises:  SettingsError if the FEN is malformed or describes an impossible position.
        """
        parts = fen.split()
        # Expand the FEN's digits, so that each rank has one character per square and "." is an empty square.
        ranks = re.sub(r"[1-8]", lambda digit: "." * int(digit[0]), parts[0] if parts else "").split("/")
        good = _FEN.fullmatch(" ".join(parts[1:])) is not None
        good = good and len(ranks) == 8 and all(re.fullmatch(r"[.pnbrqkPNBRQK]{8}", rank) for rank in ranks)
        cells = ["" if c == "." else c for rank in reversed(ranks) for c in rank]
        good = good and cells.count("K") == cells.count("k") == 1
        good = good and not any(c and c in "pP" for c in (*cells[:8], *cells[56:]))
        if not good:
            raise SettingsError(f"{fen!r} is not a valid position; pass a FEN such as {START!r}")
        passant = None if parts[3] == "-" else square_of(parts[3])
        halfmoves, number = (int(parts[4]), int(parts[5])) if len(parts) == 6 else (0, 1)
        rights = "".join(
            side for rook, side in _ROOKS.items()
            if side in parts[2] and cells[rook] == ("R" if side.isupper() else "r")
            and cells[4 if side.isupper() else 60] == ("K" if side.isupper() else "k")
        )  # fmt: skip
        board = cls(tuple(cells), parts[1], "".join(s for s in "KQkq" if s in rights), passant, halfmoves, number)
        if board.attacked(board.king(board.other), board.turn):
            raise SettingsError(f"{fen!r} is not a valid position: the side that has just moved is in check")
        return board

    @property
    def fen(self) -> str:
        rows = []
        for rank in range(7, -1, -1):
            row = "".join(c or "." for c in self.cells[8 * rank : 8 * rank + 8])
            rows.append(re.sub(r"\.+", lambda run: str(len(run[0])), row))
        passant = "-" if self.passant is None else square_name(self.passant)
        return f"{'/'.join(rows)} {self.turn} {self.castling or '-'} {passant} {self.halfmoves} {self.number}"

    @property
    def other(self) -> str:
        return BLACK if self.turn == WHITE else WHITE

    def text(self) -> str:
        """Return a text diagram of the board, with white at the bottom."""
        ranks = [
            f"{rank + 1} " + " ".join(c or "." for c in self.cells[8 * rank : 8 * rank + 8])
            for rank in range(7, -1, -1)
        ]
        return "\n".join([*ranks, "  a b c d e f g h"])

    def king(self, side: str) -> int:
        return self.cells.index("K" if side == WHITE else "k")

    def attacked(self, square: int, by: str) -> bool:
        """Return True if a piece of side `by` attacks the square."""
        cells = self.cells
        own = str.upper if by == WHITE else str.lower
        if any(cells[ray[0]] == own("N") for ray in _RAYS["N"][square]):
            return True
        if any(cells[ray[0]] == own("K") for ray in _RAYS["K"][square]):
            return True
        for kind in "BR":
            takers = (own(kind), own("Q"))
            for ray in _RAYS[kind][square]:
                for cell in ray:
                    if cells[cell]:
                        if cells[cell] in takers:
                            return True
                        break
        down = -1 if by == WHITE else 1
        file, rank = square % 8, square // 8 + down
        return 0 <= rank < 8 and any(
            0 <= x < 8 and cells[8 * rank + x] == own("P") for x in (file - 1, file + 1)
        )  # fmt: skip

    @property
    def check(self) -> bool:
        return self.attacked(self.king(self.turn), self.other)

    @property
    def mate(self) -> bool:
        return self.check and next(self.legal(), None) is None

    @property
    def stalemate(self) -> bool:
        return not self.check and next(self.legal(), None) is None

    def legal(self) -> Iterator[Move]:
        """Yield the legal moves: those that do not leave the mover's own king in check."""
        for move in self._moves():
            after = self.push(move)
            if not after.attacked(after.king(self.turn), after.turn):
                yield move

    def _moves(self) -> Iterator[Move]:
        cells, white = self.cells, self.turn == WHITE
        for start, piece in enumerate(cells):
            if not piece or piece.isupper() != white:
                continue
            kind = piece.upper()
            if kind == "P":
                yield from self._pawn(start, white)
                continue
            for ray in _RAYS[kind][start]:
                for end in ray:
                    if cells[end]:
                        if cells[end].isupper() != white:
                            yield Move(start, end)
                        break
                    yield Move(start, end)
            if kind == "K":
                yield from self._castles(start, white)

    def _pawn(self, start: int, white: bool) -> Iterator[Move]:
        cells, up = self.cells, 8 if white else -8
        file, last = start % 8, (7 if white else 0)
        ends = []
        if not cells[start + up]:
            ends.append(start + up)
            if start // 8 == (1 if white else 6) and not cells[start + 2 * up]:
                ends.append(start + 2 * up)
        for side in (-1, 1):
            end = start + up + side
            if 0 <= file + side < 8:
                taken = cells[end]
                if (taken and taken.isupper() != white) or (end == self.passant and end // 8 == (5 if white else 2)):
                    ends.append(end)
        for end in ends:
            if end // 8 == last:
                yield from (Move(start, end, into) for into in "qrbn")
            else:
                yield Move(start, end)

    def _castles(self, start: int, white: bool) -> Iterator[Move]:
        for side, between, over in (("K", (1, 2), (0, 1)), ("Q", (-1, -2, -3), (0, -1))):
            if (side if white else side.lower()) not in self.castling:
                continue
            if any(self.cells[start + step] for step in between):
                continue
            if not any(self.attacked(start + step, self.other) for step in over):
                yield Move(start, start + 2 * over[1])

    def push(self, move: Move) -> Board:
        """Apply a move without validating it and return the new position."""
        cells = list(self.cells)
        piece, taken = cells[move.start], cells[move.end]
        cells[move.start] = ""
        white = piece.isupper()
        cells[move.end] = (move.into.upper() if white else move.into) if move.into else piece
        passant = None
        if piece in "Pp":
            if move.end == self.passant and not taken and (move.end - move.start) % 8:
                cells[move.end + (-8 if white else 8)] = ""
            if abs(move.end - move.start) == 16:
                passant = (move.start + move.end) // 2
        elif piece in "Kk" and abs(move.end - move.start) == 2:
            rook, beside = (
                (move.start + 3, move.start + 1) if move.end > move.start else (move.start - 4, move.start - 1)
            )
            cells[beside], cells[rook] = cells[rook], ""
        castling = self.castling
        if castling:
            if piece in "Kk":
                castling = "".join(c for c in castling if c.isupper() != white)
            for square in (move.start, move.end):
                castling = castling.replace(_ROOKS.get(square, "-"), "")
        return Board(
            tuple(cells), self.other, castling, passant, 0 if taken or piece in "Pp" else self.halfmoves + 1,
            self.number + (not white),
        )  # fmt: skip

    def san(self, move: Move) -> str:
        """Return a move in standard algebraic notation, such as Qh7#."""
        kind = self.cells[move.start].upper()
        takes = bool(self.cells[move.end]) or (kind == "P" and (move.end - move.start) % 8 != 0)
        if kind == "K" and abs(move.end - move.start) == 2:
            text = "O-O" if move.end > move.start else "O-O-O"
        elif kind == "P":
            into = f"={move.into.upper()}" if move.into else ""
            text = (square_name(move.start)[0] + "x" if takes else "") + square_name(move.end) + into
        else:
            others = [
                m.start for m in self.legal()
                if m.end == move.end and m.start != move.start and self.cells[m.start] == self.cells[move.start]
            ]  # fmt: skip
            name = square_name(move.start)
            if not others:
                name = ""
            elif all(other % 8 != move.start % 8 for other in others):
                name = name[0]
            elif all(other // 8 != move.start // 8 for other in others):
                name = name[1]
            text = kind + name + ("x" if takes else "") + square_name(move.end)
        after = self.push(move)
        return text + ("#" if after.mate else "+" if after.check else "")

    def read(self, text: str) -> Move | None:
        """Parse a legal move such as "e7e8q" or "e8=Q+". Return None if no move matches, or more than one."""
        stripped = text.strip()
        if len(stripped) > 20:  # no move is this long, and the regular expression below takes quadratic time
            return None
        plain = re.sub(r"[+#!?]|\s*e\.p\.$", "", stripped).replace("0-0-0", "O-O-O").replace("0-0", "O-O")
        for move in self.legal():
            if str(move) == stripped.lower():
                return move
        found = []
        for move in self.legal():
            written = re.sub(r"[+#]", "", self.san(move))
            if plain in (written, written.replace("=", ""), written.replace("x", "")):
                found.append(move)
        return found[0] if len(found) == 1 else None

    def mates(self) -> list[Move]:
        """Return the moves that mate immediately."""
        return [move for move in self.legal() if self.push(move).mate]

    def defence(self) -> Move | None:
        """Return the first legal move that avoids immediate mate, else the first legal move, else None."""
        replies = sorted(self.legal(), key=str)
        return next((reply for reply in replies if not self.push(reply).mates()), replies[0] if replies else None)

    def mating(self) -> Iterator[Move]:
        """Yield the moves that force mate in at most two moves."""
        for move in self.legal():
            after = self.push(move)
            replies = list(after.legal())
            if all(after.push(reply).mates() for reply in replies) if replies else after.check:
                yield move

    def flipped(self) -> Board:
        """Return the position mirrored vertically, with colours exchanged. Castling rights are not converted."""
        rows = [self.cells[8 * rank : 8 * rank + 8] for rank in range(7, -1, -1)]
        return replace(self, cells=tuple(c.swapcase() for row in rows for c in row), turn=self.other)
