"""repo: a small repository in which something is wrong; files, a shell, and its tests as the reward.

A chain has a folder of its own, in a FileSandbox. What it is graded by is none of it: the reward takes the program's
files out of the folder, and a Grader runs the repository's own tests against them, also those that nobody sees, in
processes in which nothing of the chain ever ran. Edited tests, a conftest.py or a patched assert change nothing there.

    tasks = af.envs.repo.tasks()                     # mistakes in the repository `stall`, which ships
    rows = await af.envs.repo.bugs("my/folder")      # mistakes in yours: af.tasks_from(rows)

A repository is a folder with `tests/test_*.py` (functions test_..., plain asserts) and, where there is one, `hidden/`
with tests that no chain sees. A task has three fields: `repository`, a folder (left out, what ships); `bugs`, the lines
that are broken before the chain begins; `failing`, the tests that fail then. Or, instead of the first two, `files` and
`tests`, each {path: text}.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import os
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from agentfly_kit import tasks as task_sets
from agentfly_kit.envs import mutation
from agentfly_kit.envs.base import forward_signature
from agentfly_kit.envs.family import Family, Move, tool_outputs
from agentfly_kit.errors import SettingsError, TaskError, ToolError
from agentfly_kit.sandboxes.files import FileSandbox
from agentfly_kit.sandboxes.grader import Grade, Grader
from agentfly_kit.sandboxes.shell import ShellResult
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

Texts = dict[str, str]
"""Path within the repository -> text."""

# --- repositories --------------------------------------------------------------------------------

_HELD_BACK = "hidden/"
_MOST_FILES, _MOST_BYTES = 500, 2**21


@dataclass(frozen=True)
class Repository:
    """A program, its tests, and tests of it that no chain sees."""

    files: Mapping[str, str]
    """All but the tests."""
    tests: Mapping[str, str]
    """tests/test_*.py and hidden/test_*.py; whatever else is in `hidden/` belongs to nobody."""

    @property
    def seen(self) -> Texts:
        """What a chain finds in its folder."""
        return {**self.files, **{path: text for path, text in self.tests.items() if not path.startswith(_HELD_BACK)}}

    @property
    def modules(self) -> list[str]:
        """What the tests may import: every Python file, by its dotted name, and the packages above it."""
        found: set[str] = set()
        for path in self.files:
            parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
            if path.endswith(".py") and all(part.isidentifier() for part in parts):
                found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
        return sorted(found)

    @functools.cached_property
    def cases(self) -> tuple[tuple[str, str], ...]:
        """(path, name of the function) of every test, in order.

        Raises:  TaskError for a test file that is no Python.
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

    @functools.cached_property
    def _needs(self) -> dict[str, frozenset[str]]:
        """Path of each Python file -> paths of those that it imports, also by way of others."""
        paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in self.files}
        direct = {
            path: _imported(text, paths) for path, text in {**self.files, **self.tests}.items() if path.endswith(".py")
        }
        found = {}
        for path in direct:
            reached, pending = set[str](), [path]
            while pending:
                for other in direct.get(pending.pop(), ()):
                    if other not in reached:
                        reached.add(other)
                        pending.append(other)
            found[path] = frozenset(reached)
        return found

    def reached_by(self, files: Mapping[str, str]) -> frozenset[str]:
        """Paths of the tests that could go another way with these Python files in place of the repository's: those that
        import one that differs, or one that imports it. A file more or less, or a broken import, may change all."""
        own = {path: text for path, text in self.files.items() if path.endswith(".py")}
        differ = {path for path, text in files.items() if own.get(path) != text}
        if own.keys() != files.keys() or any(_imports(files[path]) != _imports(own[path]) for path in differ):
            return frozenset(self.tests)
        return frozenset(path for path in self.tests if differ & self._needs[path])

    def broken(self, bugs: Iterable[Mapping[str, Any]]) -> Repository:
        """With these lines changed. Raises TaskError for one that is not there as the bug says."""
        files = dict(self.files)
        for bug in bugs:
            lines = files.get(bug["file"], "").splitlines(keepends=True)
            at = bug["line"] - 1
            if not 0 <= at < len(lines) or lines[at].rstrip("\n") != bug["right"]:
                raise TaskError(f"the repository has no line {bug['right']!r} at {bug['file']}:{bug['line']}")
            lines[at] = bug["broken"] + "\n"
            files[bug["file"]] = "".join(lines)
        return Repository(files, self.tests)


def _imports(text: str) -> tuple[str, ...] | None:
    """Its import statements, and None for what is no Python or imports in other ways."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tuple(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _imported(text: str, paths: Mapping[str, str]) -> set[str]:
    """Of the modules in {dotted name: path}, those that a text imports, and the packages that they are in."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            found |= {paths[above] for n in range(len(parts)) if (above := ".".join(parts[: n + 1])) in paths}
    return found


def _is_test(path: str) -> bool:
    return re.fullmatch(r"(tests|hidden)/(.*/)?test_[^/]*\.py", path) is not None


def repository(folder: str | Path | None = None) -> Repository:
    """That of a folder; without one, `stall`, which ships. Files that are no text, and hidden folders, are left out.

    Raises:  SettingsError for no folder, one without tests, or one that is too large to be carried into every chain.
    """
    if folder is None:
        return _shipped()
    top = Path(folder)
    if not top.is_dir():
        raise SettingsError(f"repository={str(folder)!r}: there is no such folder")
    return _read(top, str(folder))


@functools.cache
def _shipped() -> Repository:
    return _read(task_sets._data().joinpath("repo"), "repo")


def _read(top: Traversable, name: str) -> Repository:
    files: Texts = {}
    tests: Texts = {}
    size = 0
    pending = [(top, "")]
    while pending:
        folder, prefix = pending.pop()
        for entry in folder.iterdir():
            path = prefix + entry.name
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            if entry.is_dir():
                pending.append((entry, path + "/"))
                continue
            try:
                text = entry.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            size += len(text)
            if len(files) + len(tests) >= _MOST_FILES or size > _MOST_BYTES:
                raise SettingsError(
                    f"the repository {name!r} has more than {_MOST_FILES} files or {_MOST_BYTES // 2**20} MB of text: "
                    "every chain gets a copy of it"
                )
            if _is_test(path):
                tests[path] = text
            elif not path.startswith(_HELD_BACK) and path not in _OURS:
                files[path] = text
    if not tests:
        raise SettingsError(f"the repository {name!r} has no tests/test_*.py, so nothing could be graded")
    return Repository(dict(sorted(files.items())), dict(sorted(tests.items())))


_OURS = ("bugs.jsonl", "ORIGIN.md")
"""What lies beside the repository that ships, and is none of it."""

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
    """Run the repository's own tests against other files of it, in fresh processes: {test: None, or why it failed}.

    only     paths of the test files to run; None is all.
    seconds  of one test; total: of all. See `Grader.grade` for what tests may do: they are handed data.
    """
    cases = [case for case in repository.cases if only is None or case[0] in only]
    if not cases:
        return {}
    texts = {path: repository.tests[path] for path, _ in cases}
    # As text within text: its names are then none that the submission is asked for.
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


# --- the environment -----------------------------------------------------------------------------


@forward_signature(FileSandbox)
class Repo:
    """One working copy, and the tests of its task.

    seconds     that one command in the shell may take.
    sandbox     FileSandbox's settings: isolation, memory_mb, disk_mb, ...
    """

    def __init__(self, *, seconds: float = 20.0, **sandbox: Any) -> None:
        self._sandbox = FileSandbox(**sandbox)
        self._seconds = seconds
        self._repository = Repository({}, {})
        self._used = False
        self.done = False
        self.edits = 0
        """Changes of files by the tools, those taken back not counted."""

    async def start(self) -> None:
        await self._sandbox.start()

    @property
    def alive(self) -> bool:
        return self._sandbox.alive

    @property
    def isolation(self) -> str | None:
        return self._sandbox.isolation

    async def close(self) -> None:
        await self._sandbox.close()

    def kill(self) -> None:
        self._sandbox.kill()

    async def reset(self, task: Task, seed: int) -> None:
        """The task's repository with its bugs, in an empty folder.

        Raises:  SettingsError, TaskError for a task whose repository is none.
        """
        self._repository = _broken_repository(task)
        self.done, self.edits = False, 0
        await self.cleanup()
        self._used = True
        await self._sandbox.seed(self._repository.seen)

    async def cleanup(self) -> None:
        """An empty folder, and nothing that runs."""
        if self._used:
            await self._sandbox.reset()
            self._used = False

    @tool(timeout=120.0)
    async def read_file(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Show a file with line numbers.

        Args:
            path: relative to the repository, for example "src/main.py".
            first_line: the first line to show.
            last_line: the last line to show; left out, the end of the file.
        """
        return await self._sandbox.read(path, first_line, last_line, numbers=True)

    @tool(timeout=120.0)
    async def write_file(self, path: str, text: str) -> str:
        """Make a file, or overwrite all of it.

        Args:
            path: relative to the repository.
            text: all that the file shall hold.
        """
        output = await self._sandbox.write(path, text)
        self.edits += 1
        return output

    @tool(timeout=120.0)
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a piece of a file.

        Args:
            path: relative to the repository.
            old: the text to replace, exactly as it is in the file, without line numbers; it must be there once.
            new: the text to put in its place.
        """
        output = await self._sandbox.edit(path, old, new)
        self.edits += 1
        return output

    @tool(timeout=120.0)
    async def undo_edit(self) -> str:
        """Take back the last change of a file."""
        output = await self._sandbox.undo()
        self.edits -= 1
        return output

    @tool(timeout=120.0)
    async def list_files(self, path: str = ".") -> str:
        """List a folder and the folders in it.

        Args:
            path: relative to the repository.
        """
        return "\n".join(await self._sandbox.list(path)) or "(empty)"

    @tool(timeout=120.0)
    async def search_files(self, pattern: str, path: str = ".") -> str:
        """Find lines that match a regular expression.

        Args:
            pattern: a regular expression of Python.
            path: a file or a folder, relative to the repository.
        """
        return (
            "\n".join(str(each)[:300] for each in await self._sandbox.grep(pattern, path, max_matches=50))
            or "no line matches"
        )

    @tool(timeout=120.0)
    async def shell(self, command: str) -> ShellResult:
        """Run a command in a bash shell in the repository, for example "python run_tests.py".

        Args:
            command: one or more lines.
        """
        return await self._sandbox.run(command, timeout=self._seconds)

    @tool
    async def submit(self) -> str:
        """Say that the repository is repaired. Nothing can be changed after that."""
        self.done = True
        return "Submitted."

    async def sources(self) -> dict[str, str]:
        """The program as the chain left it: what is readable text in its Python files."""
        found: dict[str, str] = {}
        try:
            names = await self._sandbox.list(".", depth=12)
        except ToolError:
            return found
        size = 0
        for name in names:
            if not name.endswith(".py") or name.startswith(("tests/", _HELD_BACK)):
                continue
            try:
                text = await self._sandbox.read(name)
            except ToolError:  # a link that leads out, a device, no text, too long: not a file of the program
                continue
            size += len(text)
            if len(found) >= _MOST_FILES or size > _MOST_BYTES:
                break
            found[name] = text
        return found

    async def reward(self, grader: Grader, failing: Sequence[str] = ()) -> dict[str, float]:
        """1 if every test passes, those too that no chain sees; otherwise 0, however many do.

        Graded is the folder as the chain left it, submitted or not. Further metrics: fixed, the share of the tests that
        failed at first and pass now; kept, that of the others which still pass, as far as they were run: once a repair
        has failed, no more are. And edits, submitted.
        """
        was = self._repository
        now = await self.sources()
        first = set(failing)
        # What the changes cannot reach goes as it went before the chain began.
        only = was.reached_by(now) if first else frozenset(was.tests)
        results = {f"{path}::{name}": f"{path}::{name}" not in first for path, name in was.cases}
        others = {path: text for path, text in was.files.items() if not path.endswith(".py")}
        mended = {name.partition("::")[0] for name in first} or only
        for paths in (only & mended, only - mended):
            graded = await grade(grader, was, others | now, only=paths)
            results |= {name: why is None for name, why in graded.items()}
            if not all(results[name] for name in first & results.keys()):
                break  # it is 0 already
        fixed = [passed for name, passed in results.items() if name in first]
        kept = [passed for name, passed in results.items() if name not in first]
        good = all(fixed) and all(kept)
        return {
            "reward": float(good), "success": float(good), "fixed": sum(fixed) / len(fixed) if fixed else 1.0,
            "kept": sum(kept) / len(kept) if kept else 1.0, "edits": float(self.edits), "submitted": float(self.done),
        }  # fmt: skip

    async def fork(self, into: Repo) -> None:
        """A copy of the folder and of the shell. Raises SandboxError while something runs in the background."""
        into._used = True
        await self._sandbox.fork(into._sandbox)
        into._repository, into.done, into.edits = self._repository, self.done, self.edits


def _broken_repository(task: Task) -> Repository:
    """The repository of a task, with its bugs."""
    fields = task.fields
    if "files" in fields:
        files, tests = fields["files"], fields.get("tests")
        if not isinstance(files, Mapping) or not isinstance(tests, Mapping) or not tests:
            raise TaskError(
                f"task {task.id!r}: `files` and `tests` are each {{path: text}}, and there is a test at least"
            )
        return Repository(dict(files), dict(tests))
    bugs = fields.get("bugs", ())
    if not bugs and "repository" not in fields:
        raise TaskError(
            f"task {task.id!r} has nothing to mend: give it `bugs`, a `repository`, or `files` and `tests`; "
            "af.envs.repo.tasks() has some"
        )
    if not isinstance(bugs, Sequence) or not all(isinstance(bug, Mapping) and bug.keys() >= _BUG for bug in bugs):
        raise TaskError(
            f"task {task.id!r}: `bugs` is a list, each with {', '.join(sorted(_BUG))}; it is {bugs!r}"[:400]
        )
    return repository(fields.get("repository")).broken(bugs)


_BUG = {"file", "line", "right", "broken"}


# --- tasks ---------------------------------------------------------------------------------------

_RUN = "python run_tests.py"


@functools.cache
def _shipped_bugs() -> tuple[dict[str, Any], ...]:
    text = task_sets._data().joinpath("repo", "bugs.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {"id", "question", "bugs", "failing"}: one mistake in `stall`, in a third of them two, in two of its files.

    A line of the program that is broken in one split is broken in no task of the other.
    """
    rng = random.Random(f"repo {split} {seed}")
    mine = [
        bug
        for bug in _shipped_bugs()
        if (random.Random(f"repo split {bug['file']}:{bug['line']}").random() < 0.3) == (split == "test")
    ]
    singles = rng.sample(mine, len(mine))
    found: list[dict[str, Any]] = []
    seen: set[tuple[str, ...]] = set()
    tried = 0
    while len(found) < n:
        tried += 1
        if tried > 50 * n + 1000:
            raise SettingsError(f"there are {len(found)} different {split} tasks of repo, and n={n} were asked for")
        if singles and len(found) % 3 != 2:
            chosen = [singles.pop()]
        else:
            one, other = rng.sample(mine, 2)
            if one["file"] == other["file"]:
                continue
            chosen = [one, other]
        key = tuple(sorted(bug["id"] for bug in chosen))
        if key in seen:
            continue
        seen.add(key)
        mark = "" if seed == 0 else f"{seed}-"
        found.append(
            {
                "id": f"repo-{split}-{mark}{len(found):04}",
                "question": _question(chosen),
                "bugs": [{name: bug[name] for name in ("file", "line", "right", "broken")} for bug in chosen],
                "failing": sorted({test for bug in chosen for test in bug["failing"]}),
            }
        )
    return found


def _question(bugs: Sequence[Mapping[str, Any]]) -> str:
    says = "\n".join(str(bug["says"]) for bug in bugs)
    return (
        f"Tests of this repository fail since the last commit. `{_RUN}` says:\n\n{says}\n\n"
        "Find what is wrong in the program and mend it there. The tests are right, and there are more than you see."
    )


async def bugs(
    folder: str | Path | None = None, *, most: int = 3, grader: Grader | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Mistakes that tests notice, put into a repository one at a time: rows for `af.tasks_from`, in the order of lines.

    most     of one line, drawn by `seed`.
    grader   which runs the tests of each; else one is made for this. Takes about a third of a second for each mistake.
    Raises:  SettingsError where a test fails before anything was broken.
    """
    whole, place = repository(folder), os.path.abspath(folder or ".")  # noqa: ASYNC240 - it touches no disk
    own = Grader() if grader is None else grader
    try:
        before = await grade(own, whole, whole.files)
        if wrong := {name: why for name, why in before.items() if why is not None}:
            name, why = next(iter(wrong.items()))
            raise SettingsError(f"{len(wrong)} tests fail in the repository as it is; the first is {name}:\n{why}")
        found = []
        for path, text in whole.files.items():
            if not path.endswith(".py") or path == _RUN.split()[-1]:
                continue
            for number, change in enumerate(_sample_changes(mutation.mutations(text), most, f"{seed} {path}")):
                bug = {"file": path, "line": change.line, "right": change.right, "broken": change.broken}
                broken = whole.broken([bug]).files
                only = whole.reached_by({name: each for name, each in broken.items() if name.endswith(".py")})
                results = await grade(own, whole, broken, only=only, seconds=1.0, total=10.0)
                failing = [name for name, why in results.items() if why is not None]
                shown = [name for name in failing if not name.startswith(_HELD_BACK)]
                if not shown:
                    continue  # nobody could notice it
                row = {"id": f"{path}-{number:03}", **bug, "kind": change.kind, "failing": failing}
                row["says"] = _failure_line(shown[0], results[shown[0]] or "", whole.tests[shown[0].partition("::")[0]])
                if folder is not None:
                    row = {
                        **row,
                        "question": _question([row]),
                        "repository": place,
                        "bugs": [bug],
                    }
                found.append(row)
        return found
    finally:
        if grader is None:
            await own.close()


def _sample_changes(changes: Sequence[mutation.Mutation], most: int, seed: str) -> list[mutation.Mutation]:
    """At most so many of one line."""
    by_line: dict[int, list[mutation.Mutation]] = {}
    for change in changes:
        by_line.setdefault(change.line, []).append(change)
    rng = random.Random(f"repo mutations {seed}")
    return [
        change
        for line in by_line.values()
        for change in sorted(rng.sample(line, min(most, len(line))), key=lambda c: c.broken)
    ]


def _failure_line(test: str, why: str, text: str) -> str:
    """As run_tests.py says it: the test, the line of it that failed, and how."""
    path, _, name = test.partition("::")
    numbers = re.findall(rf'File "{re.escape(path)}", line (\d+)', why)
    lines = text.splitlines()
    where = f", line {numbers[-1]}: {lines[int(numbers[-1]) - 1].strip()}" if numbers else ""
    last = why.strip().splitlines()[-1].removeprefix("in the submission: ") if why.strip() else "it failed"
    return f"FAILED {path.removeprefix('tests/')}::{name}{where}\n  {last[:200]}"


def remake(path: str | Path) -> int:
    """Write the mistakes that ship into this file; gives how many there are. Minutes."""
    found = asyncio.run(bugs())
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
    Path(path).write_text(text, encoding="utf-8")
    return len(found)


# --- players -------------------------------------------------------------------------------------


def patch(bug: Mapping[str, Any], text: str) -> tuple[str, str]:
    """(old, new) for `edit_file`: the broken line with as many lines above it as make it the only one in this text."""
    lines = text.splitlines()
    at = bug["line"] - 1
    for above in range(at + 1):
        old = "\n".join(lines[at - above : at + 1])
        if text.count(old) == 1:
            return old, "\n".join([*lines[at - above : at], bug["right"]])
    raise TaskError(f"{bug['file']}:{bug['line']} has no place of its own")


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Knows which line it is: reads it, puts it right, and submits."""
    broken = _broken_repository(task)
    plan: list[Move] = []
    for bug in task.fields["bugs"]:
        old, new = patch(bug, broken.files[bug["file"]])
        plan.append(
            ("read_file", {"path": bug["file"], "first_line": max(1, bug["line"] - 3), "last_line": bug["line"] + 3})
        )
        plan.append(("edit_file", {"path": bug["file"], "old": old, "new": new}))
    plan.append(("submit", {}))
    return plan[len(tool_outputs(messages))]


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Changes some operator or number somewhere, or looks at something, or submits."""
    files = [path for path in _broken_repository(task).files if path.startswith("stall/")] or ["main.py"]
    path = rng.choice(files)
    luck = rng.random()
    if luck < 0.5:
        old, new = rng.sample(["<", "<=", ">", ">=", "+ 1", "- 1", "and", "or", "== 0", "!= 0", "min(", "max("], 2)
        return "edit_file", {"path": path, "old": old, "new": new}
    if luck < 0.8:
        return rng.choice([("read_file", {"path": path}), ("list_files", {}), ("undo_edit", {})])
    return "submit", {}


family = Family(
    name="repo",
    what="a small repository with a mistake in it; files, a shell, and its tests as reward",
    environment=Repo,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=16,
    max_tokens=512,
    size="made of the mistakes that ship, one or two at a time",
    splits={"train": 128, "test": 64},
    pool_size=8,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
