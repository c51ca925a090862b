"""code: write a Python function that passes its tests, with an interpreter for trying out code.

A `Grader` tests the submission in fresh processes, separate from the interpreter; the process that runs the submission
does not contain the tests. There are two task sets: "steps" (any number, generated from a restricted grammar of short
instructions) and "problems" (hand-written, in the style of MBPP). `load` reads MBPP's files. Your own tasks need the
field `test_list`, a list of assert statements.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

from agentfly_kit import task_files
from agentfly_kit import tasks as task_sets
from agentfly_kit.envs.family import Family, Move, existing_file, hash_split, row_id, shipped_rows
from agentfly_kit.errors import TaskError, check_choice, check_count, check_value
from agentfly_kit.sandboxes.grader import Grader
from agentfly_kit.sandboxes.python import PythonSandbox
from agentfly_kit.sandboxes.result import SandboxResult
from agentfly_kit.sandboxes.settings import forward_signature
from agentfly_kit.tasks import Tasks
from agentfly_kit.tools.tool import tool
from agentfly_kit.types import Message, Task

_FENCED = re.compile(r"^[ ]{0,3}```[^\n`]*\n(.*?)(?:^[ ]{0,3}```|\Z)", re.DOTALL | re.MULTILINE)


def code_in(text: str) -> str:
    """Return the last fenced code block of `text`, or `text` itself if it has none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


@forward_signature(PythonSandbox, packages=False)
class Code:
    """Environment for one programming task, with an interpreter for trying out code.

    Args:
        partial: if true, the reward is the fraction of tests that pass; otherwise it is 1 if all pass, else 0.
        seconds: time limit for each interpreter run, for loading a submission, and for each test. The limit
            for all tests of a submission together is four times `seconds`.
        **sandbox: settings of the `PythonSandbox` that runs the interpreter. The interpreter starts on first use.
            To configure the grader, pass a pool: agent(..., pools=[af.Pool(af.Grader, size=8, packages=False)]).
    """

    def __init__(self, *, partial: bool = True, seconds: float = 5.0, **sandbox: Any) -> None:
        check_value("seconds", seconds, limit="above 0")
        self._sandbox = PythonSandbox(**({"packages": False} | sandbox))
        self._used = False
        self._partial = partial
        self._seconds = seconds
        self._tests: list[str] = []
        self._setup = ""
        self._code = ""
        self.runs = 0
        self.submitted: str | None = None
        self.done = False

    async def close(self) -> None:
        await self._sandbox.close()

    def kill(self) -> None:
        self._sandbox.kill()

    def check_task(self, task: Task) -> None:
        """Raise TaskError for a task without valid tests."""
        if not _texts(task.fields.get("test_list")) or not isinstance(task.fields.get("test_setup_code") or "", str):
            raise TaskError("test_list must be a list such as ['assert f(1) == 2'], and test_setup_code a string")

    async def reset(self, task: Task, seed: int) -> None:
        """Load the tests of the task and clear the interpreter."""
        self.check_task(task)
        self._tests, self._setup = list(task.fields["test_list"]), task.fields.get("test_setup_code") or ""
        self._code = str(task.fields.get("code") or "")
        await self.cleanup()
        self.runs, self.submitted, self.done = 0, None, False

    async def cleanup(self) -> None:
        """Reset the interpreter if it was used."""
        if self._used:
            if self._sandbox.alive:
                await self._sandbox.reset()
            self._used = False

    @tool(timeout=120.0)
    async def python(self, code: str) -> SandboxResult:
        """Run Python code. Variables persist between calls. The value of the last expression is shown.

        Args:
            code: one or more statements.
        """
        self.runs += 1
        self._used = True
        return await self._sandbox.run(code, timeout=self._seconds)

    @tool
    async def submit(self, code: str) -> str:
        """Submit the solution. This runs the tests and ends the task.

        Args:
            code: the complete program, with imports and the requested function.
        """
        self.submitted = code
        self.done = True
        return "Submitted."

    async def reward(self, final: str | None, grader: Grader) -> dict[str, float]:
        """Return the fraction of tests that pass. If `partial` is false, return 1 if all tests pass, else 0.

        Without a submission, the last code block of the final text is graded. Additional metrics: success (all tests
        pass), submitted (`submit` was called), loads (the code runs without an error) and runs (interpreter calls).
        """
        source = code_in(final or "") if self.submitted is None else self.submitted
        scores = {"reward": 0.0, "success": 0.0, "submitted": float(self.submitted is not None), "loads": 0.0}
        scores["runs"] = float(self.runs)
        if not source.strip():
            return scores
        grade = await grader.grade(
            source,
            self._tests,
            setup=self._setup,
            names=_built_in_names(self._code),
            timeout=self._seconds,
            total=4 * self._seconds,
        )
        reward = grade.share if self._partial else float(grade.ok)
        return scores | {"reward": reward, "success": float(grade.ok), "loads": float(grade.error is None)}

    async def fork(self, into: Code) -> None:
        """Copy the state to `into` and repeat all interpreter runs there. Raise SandboxError if a result differs."""
        into._tests, into._setup, into._code = self._tests, self._setup, self._code
        into.runs, into.submitted, into.done = self.runs, self.submitted, self.done
        if self._used:
            into._used = True
            await self._sandbox.fork(into._sandbox)


def _texts(given: Any) -> TypeGuard[list[str]]:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(test, str) for test in given)


@functools.lru_cache(maxsize=4096)
def _built_in_names(code: str) -> tuple[str, ...]:
    """Return the built-in names that the reference solution `code` redefines. Tests take them from the submission."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and hasattr(builtins, node.name)
    )


# --- generated tasks -----------------------------------------------------------------------------

# One step of a program: an operation and its operand. Some operations ignore the operand.
Step = tuple[str, int]
# Maps an operation to a line of code. A generated program is a function f(x) that applies one to three operations.
STEPS = {
    "add": "x = x + {}",
    "subtract": "x = x - {}",
    "multiply by": "x = x * {}",
    "remainder by": "x = x % {}",
    "at least": "x = max(x, {})",
    "at most": "x = min(x, {})",
    "negate": "x = -x",
    "square": "x = x * x",
}
_ALONE = ("negate", "square")


def program(steps: Sequence[Step]) -> str:
    """Return the source code of a function f(x) that applies the steps in order."""
    return "\n    ".join(["def f(x):", *(STEPS[what].format(number) for what, number in steps), "return x"])


def instruction(steps: Sequence[Step]) -> str:
    return "Write f(x): " + ", ".join(what if what in _ALONE else f"{what} {number}" for what, number in steps) + "."


def value(steps: Sequence[Step], x: int) -> int:
    """Apply the steps to x, in order, and return the result."""
    for what, number in steps:
        x = {
            "add": x + number,
            "subtract": x - number,
            "multiply by": x * number,
            "remainder by": x % number,
            "at least": max(x, number),
            "at most": min(x, number),
            "negate": -x,
            "square": x * x,
        }[what]
    return x


def steps_and_inputs(rng: random.Random) -> tuple[list[Step], list[int]]:
    """Sample one to three steps and four inputs. Omitting any step changes the result for at least one input."""
    while True:
        steps = [(rng.choice(list(STEPS)), rng.randint(2, 30)) for _ in range(rng.choice((1, 2, 2, 3, 3)))]
        others = [[*steps[:i], *steps[i + 1 :]] for i in range(len(steps))]
        inputs = rng.sample(range(-40, 41), 4)
        varied = len({value(steps, x) for x in inputs}) > 2  # rules out constant functions
        if varied and all(any(value(steps, x) != value(other, x) for x in inputs) for other in others):
            return steps, inputs


def split_of(instruction: str) -> str:
    """Derive the split of an instruction from its text, so that the splits are disjoint."""
    return hash_split(f"code split {instruction}")


def rows(n: int, split: str, seed: int = 0, kind: Literal["steps", "problems"] = "steps") -> list[dict[str, Any]]:
    """Return tasks as rows in MBPP's format: {"id", "question", "code", "test_list", "test_setup_code"}.

    Tasks of kind "steps" are generated. Tasks of kind "problems" are hand-written and included in the package.
    """
    check_choice("kind", kind, Literal["steps", "problems"])
    if kind == "problems":
        return shipped_rows("code_problems", n, split, seed)
    rng = random.Random(f"code steps {split} {seed}")
    found: dict[str, dict[str, Any]] = {}
    while len(found) < n:
        steps, inputs = steps_and_inputs(rng)
        text = instruction(steps)
        if split_of(text) != split or text in found:
            continue
        found[text] = {
            "id": row_id("code", split, seed, len(found)),
            "question": text,
            "code": program(steps),
            "test_list": [f"assert f({x}) == {value(steps, x)}" for x in inputs],
            "test_setup_code": "",
        }
    return list(found.values())


# --- external files ------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, shown: int | None = 1) -> Tasks:
    """Load tasks from a file in MBPP's format: mbpp.jsonl, sanitized-mbpp.json, the parquet files, or InterCode's
    ic_mbpp.json.

    Rows with a task_id are assigned to MBPP's splits: 1-10 "prompt", 11-510 "test", 511-600 "validation",
    601-974 "train". Nothing is downloaded; get the files from
    https://github.com/google-research/google-research/tree/master/mbpp.

    Args:
        path: the file.
        shown: number of tests included in the question. One test is enough to show the function's name; the others
            stay hidden. With None, all tests are included, as in MBPP's own prompt.

    Raises:  TaskError for a missing file or an invalid row. The message names the file and the row.
    """
    file = existing_file(path, "pass the path of MBPP's mbpp.jsonl or sanitized-mbpp.json")
    check_count("shown", shown, 0, optional=True)
    found: dict[int, dict[str, Any]] = {}
    for position, (where, row) in enumerate(task_files.read_rows(file)):
        made = _mbpp(row, where, shown)
        number = made.pop("task_id")
        known = isinstance(number, int) and not isinstance(number, bool)
        if known and 1 <= number <= 974:
            made["split"] = next(s for last, s in _MBPP_SPLITS if number <= last)
        key = number if known else position
        if key in found:
            raise TaskError(f"{where}: duplicate task_id {key}")
        found[key] = {"id": f"{file.stem}-{key:04}", **made}
    return task_sets.tasks_from(list(found.values()), name=file.stem)


_MBPP_SPLITS = ((10, "prompt"), (510, "test"), (600, "validation"), (974, "train"))


def _mbpp(row: Any, where: str, shown: int | None) -> dict[str, Any]:
    given = dict(row) if isinstance(row, Mapping) else {}
    text = given.get("text", given.get("prompt", given.get("query")))
    code = given.get("code", given.get("gold"))
    tests = given.get("test_list", given.get("tests"))
    before = given.get("test_setup_code", given.get("test_imports", ""))
    before = "\n".join(before) if _texts(before) else before or ""
    if not (isinstance(text, str) and isinstance(code, str) and _texts(tests) and isinstance(before, str)):
        have = ", ".join(map(str, given)) or type(row).__name__
        raise TaskError(
            f'{where}: a row must have "text" or "prompt", "code" and "test_list" (asserts) as in MBPP, or "query", '
            f'"gold" and "tests" as in InterCode; it has {have}'
        )
    tests = [str(test) for test in tests]
    visible = tests if shown is None else tests[:shown]
    question = "\n".join([text.strip(), *(["It must pass:"] if visible else []), *visible])
    return {
        "task_id": given.get("task_id"),
        "question": question,
        "code": code.replace("\r\n", "\n"),
        "test_list": tests,
        "test_setup_code": before.replace("\r\n", "\n"),
    }


# --- scripted players ----------------------------------------------------------------------------


def expert_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Submit the reference solution."""
    return "submit", {"code": task.fields["code"]}


def random_player(task: Task, messages: Sequence[Message], rng: random.Random) -> Move:
    """Submit a randomly generated program, or answer with an arbitrary text."""
    if rng.random() < 0.2:
        return rng.choice(["I don't know", "```python\nf = max\n```", ""])
    return "submit", {"code": program(steps_and_inputs(rng)[0])}


family = Family(
    name="code",
    what="write a Python function; the reward is the fraction of unit tests that pass; reads MBPP's files",
    environment=Code,
    rows=rows,
    expert_player=expert_player,
    random_player=random_player,
    max_turns=6,
    max_tokens=256,
    size='any number of kind="steps" can be generated; 24 of kind="problems" included; `load` reads MBPP\'s files',
    splits={"train": 1000, "test": 256},
)
tasks, agent, expert, random_agent = family.tasks, family.agent, family.expert, family.random_agent
