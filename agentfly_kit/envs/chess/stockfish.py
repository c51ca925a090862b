"""Stockfish as an opponent, over the UCI protocol. The program is optional (GPL-3; packaged by Debian)."""

from __future__ import annotations

import os
import shutil
import subprocess

from agentfly_kit.errors import SandboxError, SettingsError


class Stockfish:
    """A Stockfish process with one thread and 16 MB of hash. Deterministic for a position and depth. Methods block."""

    def __init__(self, depth: int = 12, program: str | None = None) -> None:
        """Start the process. Raise SettingsError if it is not installed, SandboxError if it does not respond."""
        if isinstance(depth, bool) or not 1 <= depth <= 40:
            raise SettingsError(f"depth must be from 1 to 40, got {depth}")
        found = program or shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")
        if not found or not os.access(found, os.X_OK):
            raise SettingsError(
                f"cannot find {program or 'stockfish'}; type: apt-get install stockfish, or use opponent='best'"
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
        """Return the best move, such as "e2e4", or raise SandboxError if the process ends."""
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
        raise SandboxError(f"Stockfish ended before it sent {until!r}")

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
