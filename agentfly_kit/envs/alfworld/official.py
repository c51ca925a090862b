"""Games run by TextWorld: ALFWorld's games (`game.tw-pddl`) and TextWorld's own games (`.json`, `.z8`).

These games require `textworld` and, for `game.tw-pddl`, ALFWorld's planner `fast_downward_textworld`, which is compiled
during installation. This module downloads nothing; ALFWorld's command `alfworld-download` downloads the games.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfly_kit.errors import SettingsError

SUFFIXES = (".tw-pddl", ".json", ".z8", ".ulx")
FETCH = (
    "to get the original games, type `pip install alfworld` (takes minutes) and `alfworld-download`, and pass "
    "the folder ~/.cache/alfworld/json_2.1.1"
)
# Lock that serializes calls to TextWorld, whose parsers keep module-level state.
_LOADING = threading.Lock()


def rows(folder: str | os.PathLike[str], kinds: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return a row {"id", "question", "file"} for each game below a folder, with "kind" and "split" if known."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise SettingsError(f"{str(root)!r} is not a folder; {FETCH}")
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SUFFIXES or path.name == "traj_data.json" or not path.is_file():
            continue
        inside = path.relative_to(root)
        if any("movable" in part or "Sliced" in part for part in inside.parts):
            continue
        row: dict[str, Any] = {"id": inside.as_posix(), "question": "Play the game.", "file": str(path.resolve())}
        if path.suffix == ".tw-pddl":
            game = _read(path)
            if game.get("solvable") is False:
                continue
            goal = re.search(r"Your task is to: (.*?)\.?\"", game["grammar"])
            if goal:
                row["question"] = f"{goal[1][:1].upper()}{goal[1][1:]}."
            kind = re.match(r"[a-z_]+", inside.parts[-3]) if len(inside.parts) > 2 else None
            row["kind"] = kind[0].rstrip("_") if kind else "unknown"
        elif path.suffix == ".json" and "metadata" not in _json(path):
            continue
        if kinds is not None and row.get("kind") not in kinds:
            continue
        split = next((part for part in inside.parts if part in ("train", "valid_seen", "valid_unseen")), None)
        if split is not None:
            row["split"] = split
        found.append(row)
    if not found:
        raise SettingsError(f"no games ({', '.join(SUFFIXES)}) in {str(root)!r}; {FETCH}")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read {str(path)!r} as a game: {error}") from error
    return read if isinstance(read, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    game = _json(path)
    lacks = [name for name in ("pddl_domain", "grammar", "pddl_problem") if not isinstance(game.get(name), str)]
    if lacks:
        raise SettingsError(f"{str(path)!r} must be an ALFWorld game, but has no {', '.join(lacks)}")
    return game


def check(file: Any) -> None:
    """Raise SettingsError if a game file is missing or invalid, or the packages that play it are not installed."""
    path = Path(str(file))
    if not path.is_file():
        raise SettingsError(f"the game {str(file)!r} does not exist; {FETCH}")
    if importlib.util.find_spec("textworld") is None:
        raise SettingsError(f"{path.name} needs TextWorld; type: pip install textworld")
    if path.suffix == ".tw-pddl":
        _read(path)
        if importlib.util.find_spec("fast_downward") is None:
            raise SettingsError(f"{path.name} needs ALFWorld's planner; type: pip install alfworld (takes minutes)")


class Session:
    """A running TextWorld game. Methods block and must not be called concurrently."""

    def __init__(self, file: str) -> None:
        check(file)
        self.file = file
        self.commands: list[str] = []
        with _LOADING:
            self._env = _start(file)
            self._state = self._env.reset()

    @property
    def opening(self) -> str:
        return str(self._state.feedback).strip()

    @property
    def won(self) -> bool:
        return bool(self._state.won)

    @property
    def plan(self) -> list[str]:
        """Commands that win the game from the current state, computed by TextWorld in a copy of the game."""
        with _LOADING:
            env = _start(self.file, policy_commands=True)
            state = env.reset()
            for command in self.commands:
                state, _, _ = env.step(command)
            return list(state.policy_commands or ())

    def do(self, command: str) -> str:
        command = " ".join(command.split())
        put = re.fullmatch(r"put (.+?) (?:in/on|in|on|into|onto) (.+)", command)
        offered = self._state.admissible_commands or ()
        if put and command not in offered and f"move {put[1]} to {put[2]}" in offered:
            command = f"move {put[1]} to {put[2]}"
        self.commands.append(command)
        with _LOADING:
            self._state, _, _ = self._env.step(command)
        return str(self._state.feedback).strip()

    def admissible(self) -> list[str]:
        return sorted(self._state.admissible_commands or ())

    def copy(self) -> Session:
        """Return a new session of the same game after replaying the same commands."""
        twin = Session(self.file)
        for command in self.commands:
            twin.do(command)
        return twin


def _start(file: str, **infos: bool) -> Any:
    """Start a TextWorld environment that reports `won`, `lost`, the admissible commands and any additional `infos`."""
    import textworld

    wanted = textworld.EnvInfos(won=True, lost=True, admissible_commands=True, **infos)
    return textworld.start(file, request_infos=wanted, wrappers=[_demangled()] if file.endswith(".tw-pddl") else [])


def _demangled() -> Any:
    """Return a TextWorld wrapper that replaces ALFWorld's entity names: `Apple|+1.2` becomes "apple 1"."""
    import textworld.core

    class Names(textworld.core.Wrapper):  # type: ignore[misc]
        def load(self, *arguments: Any, **named: Any) -> None:
            super().load(*arguments, **named)
            infos = list(self._entity_infos.values())
            for info, name in shown([info.id for info in infos]).items():
                next(each for each in infos if each.id == info).name = name

    return Names


def shown(ids: Sequence[str]) -> dict[str, str]:
    """Map entity ids to ALFWorld's names, such as "apple 2". The sorted ids of each type get descending numbers."""
    kinds = {}
    for each in ids:
        kind, bar, _ = each.partition("_bar_")
        kinds[each] = kind + ("basin" if "basin" in each else "") if bar else ""
    left = Counter(kind for kind in kinds.values() if kind)
    found = {}
    for each in sorted(ids):
        kind = kinds[each]
        found[each] = f"{kind} {left[kind]}" if kind else each
        left[kind] -= 1
    return found
