"""Repositories, and the grading of changes to a repository with its tests."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.errors import SettingsError, TaskError
from agentfly_kit.sandboxes.grader import Grade, Grader

# Maps a path relative to the repository to the content of the file.
Texts = dict[str, str]

# --- repositories --------------------------------------------------------------------------------

# Folder of the tests that the chain cannot see.
HELD_BACK = "hidden/"
MOST_FILES, MOST_BYTES = 500, 2**21


@dataclass(frozen=True)
class Repository:
    """A program and its tests. `tests` contains tests/test_*.py and hidden/test_*.py, `files` all other files."""

    files: Mapping[str, str]
    tests: Mapping[str, str]

    @property
    def seen(self) -> Texts:
        """Initial files of the chain's folder: all files except the hidden tests."""
        return {**self.files, **{path: text for path, text in self.tests.items() if not path.startswith(HELD_BACK)}}

    @property
    def modules(self) -> list[str]:
        """Modules that the tests may import: the dotted name of every Python file and of its parent packages."""
        found: set[str] = set()
        for path in self.files:
            parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
            if path.endswith(".py") and all(part.isidentifier() for part in parts):
                found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
        return sorted(found)

    @functools.cached_property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """All tests, as (path, function name), sorted by path.

        Raises:  TaskError for a test file that is not valid Python.
        """
        found = []
        for path, text in sorted(self.tests.items()):
            try:
                tree = ast.parse(text, path)
            except SyntaxError as error:
                raise TaskError(f"{path}: {error}") from None
            found += [
                (path, node.name)
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            ]
        return tuple(found)

    def broken(self, bugs: Iterable[Mapping[str, Any]]) -> Repository:
        """Return a copy of the repository with the bugs applied.

        Raises:  TaskError if a line does not have the content that its bug expects.
        """
        files = dict(self.files)
        for bug in bugs:
            lines = files.get(bug["file"], "").splitlines(keepends=True)
            at = bug["line"] - 1
            if not 0 <= at < len(lines) or lines[at].rstrip("\n") != bug["right"]:
                raise TaskError(
                    f"the repository does not have the line {bug['right']!r} at {bug['file']}:{bug['line']}"
                )
            lines[at] = bug["broken"] + "\n"
            files[bug["file"]] = "".join(lines)
        return Repository(files, self.tests)


def repository(folder: str | Path | None = None) -> Repository:
    """Read the repository in a folder, by default the included `stall`. Binary and hidden files are skipped.

    Raises:  SettingsError if the folder does not exist, has no tests, or is too large to be copied for every chain.
    """
    if folder is None:
        return _shipped()
    if not Path(folder).is_dir():
        raise SettingsError(f"repository must be an existing folder, got {str(folder)!r}")
    return _read(Path(folder))


@functools.cache
def _shipped() -> Repository:
    with as_file(task_files.bundled_folder().joinpath("repo")) as folder:
        return _read(folder)


def _read(top: Path) -> Repository:
    files: Texts = {}
    tests: Texts = {}
    size = 0
    for file in sorted(top.rglob("*")):
        inside = file.relative_to(top)
        if not file.is_file() or any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        path = inside.as_posix()
        size += len(text)
        if len(files) + len(tests) >= MOST_FILES or size > MOST_BYTES:
            raise SettingsError(
                f"the repository {str(top)!r} must have at most {MOST_FILES} files and {MOST_BYTES // 2**20} MB of "
                "text, because every chain gets a copy"
            )
        if re.fullmatch(r"(tests|hidden)/(.*/)?test_[^/]*\.py", path):
            tests[path] = text
        elif not path.startswith(HELD_BACK) and path not in _OURS:
            files[path] = text
    if not tests:
        raise SettingsError(f"the repository {str(top)!r} has no tests/test_*.py; add tests, which grade the result")
    return Repository(dict(sorted(files.items())), dict(sorted(tests.items())))


# Files in the included repository's folder that do not belong to the repository.
_OURS = ("bugs.jsonl", "ORIGIN.md")

# --- grading -------------------------------------------------------------------------------------

_LOAD = """
import linecache, types
spaces = {}
def run(path, name):
    if path not in spaces:
        space = {"__name__": path}
        linecache.cache[path] = (len(files[path]), None, files[path].splitlines(keepends=True), path)
        exec(compile(files[path], path, "exec", dont_inherit=True), space)
        spaces[path] = space
    spaces[path][name]()
"""


async def grade(
    grader: Grader,
    repository: Repository,
    files: Mapping[str, str | bytes],
    *,
    only: Collection[str] | None = None,
    seconds: float = 3.0,
    total: float = 30.0,
) -> dict[str, str | None]:
    """Run the repository's tests against other versions of its files in fresh processes.

    Tests get copies of plain data and proxies of all other objects of the program; see `Grader.grade`.

    Args:
        grader: the grader that runs the tests.
        repository: the repository with the original tests.
        files: dict from paths to the contents of the files to test.
        only: paths of the test files to run; by default all.
        seconds: time limit per test.
        total: time limit for all tests.

    Returns: a dictionary that maps each test to None if it passed, else to the error.
    """
    cases = [case for case in repository.cases if only is None or case[0] in only]
    if not cases:
        return {}
    texts = {path: repository.tests[path] for path, _ in cases}
    # Without exec, the grader would try to take names that the setup defines, such as `files`, from the submission.
    setup = f"exec({f'files = {texts!r}' + _LOAD!r}, globals())"
    found: Grade = await grader.grade(
        "",
        [f"run({path!r}, {name!r})" for path, name in cases],
        setup=setup,
        files=files,
        modules=repository.modules,
        timeout=seconds,
        total=total,
    )
    return {
        f"{path}::{name}": None if verdict.passed else verdict.error or "it failed"
        for (path, name), verdict in zip(cases, found.verdicts, strict=True)
    }
