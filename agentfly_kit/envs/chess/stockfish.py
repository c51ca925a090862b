"""Stockfish as a player: the program of that name, spoken to by UCI. Debian has it; GPL-3, and never required."""

from __future__ import annotations

import os
import shutil
import subprocess

from agentfly_kit.errors import SandboxError, SettingsError


class Stockfish:
    """One engine with one thread and 16 MB. Blocking. The same position and depth give the same move."""

    def __init__(self, depth: int = 12, program: str | None = None) -> None:
        """Raises SettingsError where it is not installed; SandboxError if it does not answer as UCI says."""
        if isinstance(depth, bool) or not 1 <= depth <= 40:
            raise SettingsError(f"depth={depth}: want 1 to 40")
        found = program or shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")
        if not found or not os.access(found, os.X_OK):
            raise SettingsError(
                f"there is no {program or 'stockfish'}; type: apt-get install stockfish, or take opponent='best'"
            )
        self.depth = depth
        self._process = subprocess.Popen(
            [found], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        try:
            self._command("uci", "uciok")
            self._command("setoption name Threads value 1\nsetoption name Hash value 16\nisready", "readyok")
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def best(self, fen: str) -> str:
        """Its move, as "e2e4". Raises SandboxError if it ends."""
        self._command("ucinewgame\nisready", "readyok")
        return self._command(f"position fen {fen}\ngo depth {self.depth}", "bestmove").split()[1]

    def _command(self, command: str, until: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SandboxError("Stockfish has ended") from error
        for line in self._process.stdout:
            if line.startswith(until):
                return line
        raise SandboxError(f"Stockfish ended before it said {until!r}")

    def close(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
