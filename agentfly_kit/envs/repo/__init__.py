"""repo: repair a bug in a small repository, with file tools and a shell. The reward is 1 if all tests pass.

Each chain works in its own folder in a FileSandbox. Tests are not run in that folder: the reward reads the program's
files, and a Grader runs the original tests, including hidden ones, against these files in fresh processes.
Edited tests, a conftest.py or a patched assert therefore have no effect.

    tasks = af.envs.repo.tasks()                     # bugs in the included repository `stall`
    rows = await af.envs.repo.bugs("my/folder")      # bugs in your own repository, for af.tasks_from(rows)

A repository is a folder with `tests/test_*.py` (functions test_..., plain asserts) and optionally `hidden/` with tests
that the chain cannot see. A task has three fields: `repository`, a folder (by default the included one); `bugs`, the
lines to break before the chain starts; and `failing`, the tests that fail because of these bugs. Instead of
`repository` and `bugs`, a task may have `files` and `tests`, each {path: text}.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly_kit import task_files
from agentfly_kit.envs.base import SandboxEnvironment
from agentfly_kit.envs.family import Family, Move, hash_split, row_id, tool_outputs
from agentfly_kit.envs.repo import mutation
from agentfly_kit.envs.repo.grading import HELD_BACK, MOST_BYTES, MOST_FILES, Repository, grade, repository
from agentfly_kit.errors import SettingsError, TaskError, ToolError
from agentfly_kit.sandboxes.files import FileSandbox
from agentfly_kit.sandboxes.grader import Grader
from agentfly_kit.sandboxes.settings import forward_signature
from agentfly_kit.sandboxes.shell import ShellResult
from agentfly_kit.tools import builtin
from agentfly_kit.tools.tool import Tool, tool
from agentfly_kit.types import Message, Task, grouped

# --- the environment -----------------------------------------------------------------------------


def _on_sandbox(given: Tool[..., Any], edits: int = 0) -> Tool[..., Any]:
    """Return a built-in file tool as a method of `Repo` that works on the environment's own sandbox.

    Args:
        given: the built-in tool.
        edits: number added to the environment's `edits` by every call that succeeds.
    """

    async def call(self: Repo, **arguments: Any) -> Any:
        output = await given.function(sandbox=self._sandbox, **arguments)
        self.edits += edits
        return output

    own: Any = functools.update_wrapper(call, given.function)
    del own.__wrapped__  # the tool is this function, not the built-in one
    own.__qualname__ = f"Repo.{given.name}"  # a tool whose first parameter is `self` is a method
    shown = [p for p in inspect.signature(given.function).parameters.values() if p.name != "sandbox"]
    own.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *shown]
    )
    return tool(timeout=given.timeout)(own)


@forward_signature(FileSandbox)
class Repo(SandboxEnvironment):
    """Environment with a working copy of a repository and the tests of its task.

    Args:
        seconds: time limit for one shell command.
        **sandbox: settings of `FileSandbox`: isolation, memory_mb, disk_mb, ...
    """

    _sandbox: FileSandbox

    def __init__(self, *, seconds: float = 20.0, **sandbox: Any) -> None:
        self._sandbox = FileSandbox(**sandbox)
        self._seconds = seconds
        self._repository = Repository({}, {})
        self._used = False
        self.done = False
        # Number of successful calls of write_file and edit_file, minus those of undo_edit.
        self.edits = 0

    def check_task(self, task: Task) -> None:
        """Raise TaskError or SettingsError for an invalid repository or bug."""
        _broken_repository(task)
        failing = task.fields.get("failing", ())
        if not isinstance(failing, list | tuple):
            raise TaskError(f"failing must be a list of tests, got {failing!r:.100}")

    async def reset(self, task: Task, seed: int) -> None:
        """Clear the folder and copy the task's repository, with its bugs, into it."""
        self._repository = _broken_repository(task)
        self.done, self.edits = False, 0
        await self.cleanup()
        self._used = True
        await self._sandbox.seed(self._repository.seen)

    async def cleanup(self) -> None:
        """Empty the folder and stop all processes in it."""
        if self._used:
            await self._sandbox.reset()
            self._used = False

    read_file = _on_sandbox(builtin.read_file)
    write_file = _on_sandbox(builtin.write_file, edits=1)
    edit_file = _on_sandbox(builtin.edit_file, edits=1)
    undo_edit = _on_sandbox(builtin.undo_edit, edits=-1)
    list_files = _on_sandbox(builtin.list_files)
    search_files = _on_sandbox(builtin.search_files)

    @tool(timeout=120.0)
    async def shell(self, command: str) -> ShellResult:
        """Run a command in a bash shell in the repository, for example "python run_tests.py".

        Args:
            command: one or more lines.
        """
        return await self._sandbox.run(command, timeout=self._seconds)

    async def run_agent(self, command: Sequence[str], endpoint: Any, timeout: float = 3600.0) -> ShellResult:
        """Run a command-line agent in the repository's folder; see `ShellSandbox.run_agent`."""
        return await self._sandbox.run_agent(command, endpoint, timeout)

    @tool
    async def submit(self) -> str:
        """Report that the repository is repaired. It cannot be changed afterwards."""
        self.done = True
        return "Submitted."

    async def sources(self) -> dict[str, str]:
        """Return the program's Python files in their current state, keyed by path. Unreadable files are skipped."""
        found: dict[str, str] = {}
        try:
            names = await self._sandbox.list(".", depth=12)
        except ToolError:
            return found
        size = 0
        for name in names:
            if not name.endswith(".py") or name.startswith(("tests/", HELD_BACK)):
                continue
            try:
                text = await self._sandbox.read(name)
            except ToolError:  # skip links out of the folder, devices, binary and overlong files
                continue
            size += len(text)
            if len(found) >= MOST_FILES or size > MOST_BYTES:
                break
            found[name] = text
        return found

    async def reward(self, grader: Grader, failing: Sequence[str] = ()) -> dict[str, float]:
        """Return 1 if all tests pass, including hidden ones, else 0.

        The folder is graded as the chain left it, submitted or not. Additional metrics: fixed (fraction of initially
        failing tests that now pass), kept (fraction of the other tests that still pass), edits and submitted. If the
        bug is not fixed, the remaining tests are skipped and count as unchanged.
        """
        was = self._repository
        first = set(failing)
        results = {f"{path}::{name}": f"{path}::{name}" not in first for path, name in was.cases}
        others = {path: text for path, text in was.files.items() if not path.endswith(".py")}
        files = others | await self.sources()
        # First run the test files with initially failing tests. If one still fails, skip the other test files.
        mended = {name.partition("::")[0] for name in first}
        for paths in (mended, was.tests.keys() - mended):
            graded = await grade(grader, was, files, only=paths)
            results |= {name: why is None for name, why in graded.items()}
            if not all(results[name] for name in first & results.keys()):
                break  # the reward is already 0
        fixed = [passed for name, passed in results.items() if name in first]
        kept = [passed for name, passed in results.items() if name not in first]
        good = all(fixed) and all(kept)
        return {
            "reward": float(good),
            "success": float(good),
            "fixed": sum(fixed) / len(fixed) if fixed else 1.0,
            "kept": sum(kept) / len(kept) if kept else 1.0,
            "edits": float(self.edits),
            "submitted": float(self.done),
        }

    async def fork(self, into: Repo) -> None:
        """Copy the files and the state of the shell, or raise SandboxError if background processes are running."""
        into._used = True
        await self._sandbox.fork(into._sandbox)
        into._repository, into.done, into.edits = self._repository, self.done, self.edits


def _broken_repository(task: Task) -> Repository:
    fields = task.fields
    if "files" in fields:
        files, tests = fields["files"], fields.get("tests")
        if not isinstance(files, Mapping) or not isinstance(tests, Mapping) or not tests:
            raise TaskError("`files` and `tests` must each be {path: text}, with at least one test")
        return Repository(dict(files), dict(tests))
    bugs = fields.get("bugs", ())
    if not bugs and "repository" not in fields:
        raise TaskError(
            "the task has nothing to repair: add the field `bugs` or `repository`, or the fields `files` and `tests`, "
            "or use af.envs.repo.tasks()"
        )
    if not isinstance(bugs, Sequence) or not all(isinstance(bug, Mapping) and bug.keys() >= _BUG for bug in bugs):
        raise TaskError(f"`bugs` must be a list of objects with {', '.join(sorted(_BUG))}, got {bugs!r:.300}")
    return repository(fields.get("repository")).broken(bugs)


_BUG = {"file", "line", "right", "broken"}


# --- tasks ---------------------------------------------------------------------------------------

_RUN = "python run_tests.py"


@functools.cache
def _shipped_bugs() -> tuple[dict[str, Any], ...]:
    text = task_files.bundled_folder().joinpath("repo", "bugs.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def rows(n: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generate tasks with bugs in the included repository `stall`, as rows {"id", "question", "bugs", "failing"}.

    Every third task has two bugs, in different files. A line that is broken in one split is not broken in the other.
    """
    rng = random.Random(f"repo {split} {seed}")
    mine = [bug for bug in _shipped_bugs() if hash_split(f"repo split {bug['file']}:{bug['line']}", 0.3) == split]
    singles = rng.sample(mine, len(mine))
    found: list[dict[str, Any]] = []
    seen: set[tuple[str, ...]] = set()
    for _ in range(50 * n + 1000):  # after so many attempts, all pairs have probably been tried
        if len(found) >= n:
            break
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
        found.append(
            {
                "id": row_id("repo", split, seed, len(found)),
                "question": _question(chosen),
                "bugs": [{name: bug[name] for name in ("file", "line", "right", "broken")} for bug in chosen],
                "failing": sorted({test for bug in chosen for test in bug["failing"]}),
            }
        )
    return found


def _question(bugs: Sequence[Mapping[str, Any]]) -> str:
    failures = "\n".join(str(bug["says"]) for bug in bugs)
    return (
        f"Tests of this repository fail since the last commit. `{_RUN}` says:\n\n{failures}\n\n"
        "Find the bug in the program and fix it there. All tests are correct; some are not shown."
    )


async def bugs(
    folder: str | Path | None = None, *, most: int = 3, grader: Grader | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Generate single-line bugs that the repository's visible tests detect. All tests are run once per bug.

    Args:
        folder: the repository; by default the included `stall`.
        most: maximum number of bugs tried per line, sampled with `seed`.
        grader: the grader that runs the tests; by default a temporary one.
        seed: seed of the sampling.

    Returns: rows for `af.tasks_from`, in line order.
    Raises:  SettingsError if a test fails in the unchanged repository.
    """
    whole, place = repository(folder), os.path.abspath(folder or ".")  # noqa: ASYNC240 - it touches no disk
    own = Grader() if grader is None else grader
    try:
        before = await grade(own, whole, whole.files)
        if wrong := {name: why for name, why in before.items() if why is not None}:
            name, why = next(iter(wrong.items()))
            raise SettingsError(f"{len(wrong)} tests fail in the unchanged repository; the first is {name}:\n{why}")
        found = []
        for path, text in whole.files.items():
            if not path.endswith(".py") or path == _RUN.split()[-1]:
                continue
            for number, change in enumerate(_sample_changes(mutation.mutations(text), most, f"{seed} {path}")):
                bug = {"file": path, "line": change.line, "right": change.right, "broken": change.broken}
                results = await grade(own, whole, whole.broken([bug]).files, seconds=1.0, total=10.0)
                failing = [name for name, why in results.items() if why is not None]
                shown = [name for name in failing if not name.startswith(HELD_BACK)]
                if not shown:
                    continue  # no visible test detects this bug
                row = {"id": f"{path}-{number:03}", **bug, "kind": change.kind, "failing": failing}
                row["says"] = _failure_line(
                    shown[0], results[shown[0]] or "", whole.tests[shown[0].partition("::")[0]]
                )
                if folder is not None:
                    row |= {"question": _question([row]), "repository": place, "bugs": [bug]}
                found.append(row)
        return found
    finally:
        if grader is None:
            await own.close()


def _sample_changes(changes: Sequence[mutation.Mutation], most: int, seed: str) -> list[mutation.Mutation]:
    by_line = grouped(changes, lambda change: change.line)
    rng = random.Random(f"repo mutations {seed}")
    return [
        change
        for line in by_line.values()
        for change in sorted(rng.sample(line, min(most, len(line))), key=lambda c: c.broken)
    ]


def _failure_line(test: str, why: str, text: str) -> str:
    """Format a failure as run_tests.py of the repository does: the test, the line that failed, and the error."""
    path, _, name = test.partition("::")
    numbers = re.findall(rf'File "{re.escape(path)}", line (\d+)', why)
    lines = text.splitlines()
    where = f", line {numbers[-1]}: {lines[int(numbers[-1]) - 1].strip()}" if numbers else ""
    last = why.strip().splitlines()[-1].removeprefix("in the submission: ") if why.strip() else "it failed"
    return f"FAILED {path.removeprefix('tests/')}::{name}{where}\n  {last[:200]}"


# --- scripted players ----------------------------------------------------------------------------


def patch(bug: Mapping[str, Any], text: str) -> tuple[str, str]:
    """Return arguments (old, new) of the tool `edit_file` that repair a bug. `old` is the broken line, with enough
    preceding lines to be unique in the text."""
    lines = text.splitlines()
    at = bug["line"] - 1
    for above in range(at + 1):
        old = "\n".join(lines[at - above : at + 1])
        if text.count(old) == 1:
            return old, "\n".join([*lines[at - above : at], bug["right"]])
    raise TaskError(f"line {bug['line']} of {bug['file']} is not unique, even with all lines above it")


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Read and repair the broken lines one at a time, then submit."""
    broken = _broken_repository(task)
    plan: list[Move] = []
    for bug in task.fields["bugs"]:
        old, new = patch(bug, broken.files[bug["file"]])
        plan += [
            ("read_file", {"path": bug["file"], "first_line": max(1, bug["line"] - 3), "last_line": bug["line"] + 3}),
            ("edit_file", {"path": bug["file"], "old": old, "new": new}),
        ]
    plan.append(("submit", {}))
    return plan[len(tool_outputs(messages))]


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Change a random operator or number, look at a file, or submit."""
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
    what="repair a bug in a small repository with file tools and a shell; its tests are the reward",
    environment=Repo,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=16,
    max_tokens=512,
    size="generated from the included bugs, one or two per task",
    splits={"train": 128, "test": 64},
    pool_size=8,
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
