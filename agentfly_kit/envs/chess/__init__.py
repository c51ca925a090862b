"""chess: puzzles against a scripted defender. Mates in one and two moves are included; Lichess puzzles can be loaded.

The package python-chess (GPL-3) is imported on first use.
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentfly_kit import tasks as task_sets
from agentfly_kit.envs.chess import puzzles
from agentfly_kit.envs.chess.board import INSTALL, after, defence, diagram, fen_of, from_fen, read
from agentfly_kit.envs.family import Family, existing_file, int_field, shipped_rows, tool_outputs
from agentfly_kit.envs.family import Move as Play
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task, ToolResult

if TYPE_CHECKING:
    from chess import Board, Move


class Chess:
    """Environment for one chess puzzle.

    If the task has the field `mate`, any mate within that number of moves is correct. Without `mate`, the moves of the
    solution and all moves that mate are correct. The other side replies as in the solution as long as the chain follows
    it, and otherwise with a move that avoids immediate mate, if there is one.
    """

    def check_task(self, task: Task) -> None:
        """Raise TaskError or SettingsError for an invalid position, solution or number of moves."""
        fields = task.fields
        line = fields.get("solution") or []
        if "mate" in fields:
            int_field(task, "mate", 1)
        elif not line:
            raise TaskError("a chess puzzle must have a field 'solution' or 'mate'")
        walk(from_fen(str(fields.get("fen"))), line)

    async def reset(self, task: Task, seed: int) -> str:
        fields = task.fields
        self.board = from_fen(str(fields.get("fen")))
        self.line: list[str] = list(fields.get("solution") or ())
        self.mate: int | None = fields.get("mate")
        self.left = self.mate if self.mate is not None else (len(self.line) + 1) // 2
        self.moves: list[str] = []
        self.illegal = 0
        self.first = self.won = self.done = False
        return diagram(self.board)

    @tool
    async def play(self, move: str) -> ToolResult:
        """Make a move. The other side replies.

        Args:
            move: for example "e7e8q" or "e8=Q".
        """
        found = read(self.board, move)
        if found is None:
            self.illegal += 1
            return ToolResult(False, f"{move!r:.60} is not a legal move here; `moves` lists the legal moves.")
        own = len(self.moves) // 2
        right = 2 * own < len(self.line) and str(found) == self.line[2 * own]
        self.first = self.first or (own == 0 and right)
        san = self._make(found)
        self.left -= 1
        if self.board.is_checkmate():
            self.won = self.done = True
            return ToolResult(True, f"{san}: checkmate.")
        if self.mate is None and not right:
            self.done = True
            return ToolResult(True, f"{san}: wrong move.")
        if self.mate is None and not self.left:
            self.won = self.done = True
            return ToolResult(True, f"{san}: solved.")
        if self.board.is_stalemate() or not self.left:
            self.done = True
            return ToolResult(True, f"{san}: {'stalemate' if self.board.is_stalemate() else 'no mate'}.")
        reply = self._make(self._reply())
        self.done = self.board.is_checkmate()
        return ToolResult(True, f"{san} {reply}{': you are checkmated.' if self.done else ''}\n{diagram(self.board)}")

    def _make(self, move: Move) -> str:
        san = self.board.san(move)
        self.board = after(self.board, move)
        self.moves.append(str(move))
        return san

    def _reply(self) -> Move:
        played = len(self.moves)
        if self.mate is None or (self.moves == self.line[:played] and played < len(self.line)):
            reply = read(self.board, self.line[played])
        else:
            reply = defence(self.board)
        assert reply is not None
        return reply

    @tool(name="moves")
    async def legal_moves(self) -> str:
        """List the legal moves."""
        return ", ".join(sorted(self.board.san(move) for move in self.board.legal_moves))

    @tool(name="board")
    async def shown(self) -> str:
        """Show the board, and its FEN."""
        return f"{diagram(self.board)}\n{fen_of(self.board)}"

    async def reward(self) -> dict[str, float]:
        """Return 1 if the chain mated or completed the solution, else 0.

        Additional metrics: `first` (1 if the first move was correct) and `illegal` (number of illegal moves tried).
        """
        score = float(self.won)
        return {"reward": score, "success": score, "first": float(self.first or self.won), "illegal": self.illegal}

    async def fork(self, into: Chess) -> None:
        into.__dict__.update(self.__dict__)
        into.moves = list(self.moves)


def walk(board: Board, moves: Sequence[str]) -> list[Board]:
    """Return the position after each move, or raise SettingsError for an illegal move."""
    found = []
    for text in moves:
        move = read(board, text)
        if move is None:
            raise SettingsError(f"{text!r} is not a legal move in {fen_of(board)!r}")
        board = after(board, move)
        found.append(board)
    return found


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return n puzzles as rows with the fields "fen", "solution" and "mate". If seed is not 0, or if n exceeds the
    number of included puzzles, the puzzles are generated."""
    if seed == 0 and n <= puzzles.SIZES[split]:
        return shipped_rows("chess", n, split, seed)
    return list(puzzles.made(n, seed=seed, split=split))


def tasks_in(file: str | os.PathLike[str], n: int | None = None) -> Tasks:
    """Load the first n puzzles of a Lichess puzzle file (.csv with columns PuzzleId, FEN, Moves, Rating, Themes).

    In these files each puzzle begins with a move of the opponent. The task starts from the position after that move.

    Raises:  TaskError if the file is missing; SettingsError, with the line number, if the file is malformed.
    """
    path = existing_file(file, "Lichess publishes its puzzles at database.lichess.org (CC0)")
    found: list[dict[str, Any]] = []
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        lacks = {"PuzzleId", "FEN", "Moves"} - set(reader.fieldnames or ())
        if lacks:
            raise SettingsError(
                f"{path.name} has no column {', '.join(sorted(lacks))}; pass the decompressed Lichess puzzle file"
            )
        for number, row in enumerate(reader, 2):
            if n is not None and len(found) == n:
                break
            found.append(_lichess(row, f"{path.name}:{number}"))
    return task_sets.tasks_from(found, name="chess")


def _lichess(row: dict[str, str], where: str) -> dict[str, Any]:
    first, *line = (row["Moves"] or "").split() or [""]
    try:
        board, *_ = walk(from_fen(row["FEN"]), [first, *line])
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error
    if not line:
        raise SettingsError(f"{where}: a puzzle must have at least two moves, starting with the opponent's")
    return {
        "id": row["PuzzleId"],
        "question": f"{'White' if board.turn else 'Black'} to move. Find the best moves.\n{fen_of(board)}",
        "fen": fen_of(board),
        "solution": line,
        "rating": int(row["Rating"]) if (row.get("Rating") or "").isdecimal() else None,
        "themes": (row.get("Themes") or "").split(),
    }


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Play:
    """Play the next move of the task's solution."""
    made = len(tool_outputs(messages))
    line = task.fields["solution"]
    return ("play", {"move": line[2 * made]}) if 2 * made < len(line) else "Done."


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Play:
    """Play a random move that is legal in the initial position."""
    return "play", {"move": rng.choice(sorted(str(move) for move in from_fen(task.fields["fen"]).legal_moves))}


family = Family(
    name="chess",
    what="mates in one and two against a defender; reads Lichess' puzzle files",
    environment=Chess,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    licence="that of the project; that of the package chess is GPL-3",
    needs=("chess",),
    install=INSTALL,
    size="128 train and 64 test tasks included; any number can be generated",
    splits=dict(puzzles.SIZES),
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
