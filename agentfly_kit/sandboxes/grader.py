"""Run tests against submitted code, in fresh processes that the chain that wrote the code never had access to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Self

from ..errors import SettingsError, ToolError
from .grading import Grade, Grading, InvalidTest, SubmissionSandbox, TestsSandbox, Verdict
from .host.limits import Limits
from .hosted import Files, HostedSandbox
from .result import SandboxResult
from .settings import check_seconds, forward_signature

__all__ = ["Grade", "Grader", "Verdict"]


@forward_signature(HostedSandbox)
class Grader:
    """Grade code written by a policy in fresh, resource-limited processes: `await grader.grade(source, tests)`.

    The submission and the tests run in two separate confined interpreters. Each call from a test to the submission is
    relayed as data, and so is its result. The process of the submission contains no test, answer or verdict, whether in
    a frame, file, module or argument, and whatever the submission prints, patches, raises or kills affects only its own
    process. Both interpreters are new for each `grade` and see nothing of a chain's PythonSandbox.

    A Grader is pooled like other sandboxes: `af.Pool(af.Grader, size=4)`. A reward requests one by its type annotation:

        @af.reward
        async def solved(final: str | None, tests: list[str], grader: af.Grader) -> float:
            return (await grader.grade(final or "", tests)).share

    The settings are those of PythonSandbox and apply to each of the two interpreters. isolation="none" does not
    protect the tests from the submission.
    """

    def __init__(self, **settings: Any) -> None:
        self._work = SubmissionSandbox(**settings)
        self._tests = TestsSandbox(**settings)
        self._used = False
        self._busy = False
        self._graded = 0

    @classmethod
    def validate_options(cls, **options: Any) -> None:
        """Check the settings of a pool of Graders when the pool is created, instead of at the first start."""
        cls(**options)

    # --- lifecycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start both interpreters.

        Raises:  IsolationError or SandboxError, as `PythonSandbox.start`.
        """
        await self._work.start()
        await self._tests.start()

    async def reset(self) -> None:
        """Restart both interpreters with empty folders."""
        self._used = False
        await self._work.reset()
        await self._tests.reset()

    @property
    def alive(self) -> bool:
        """True if both interpreters can be used or reset."""
        return self._work.alive and self._tests.alive

    @property
    def isolation(self) -> str | None:
        """The isolation level in use; before `start`, the requested one."""
        return self._work.isolation

    @property
    def limits(self) -> Limits:
        """The resource limits of each interpreter."""
        return self._work.limits

    @property
    def limit_mechanisms(self) -> Mapping[str, str]:
        """Mechanism that enforces each limit, as text; "not limited" if there is none."""
        return self._work.limit_mechanisms

    async def close(self) -> None:
        """Close both interpreters, leaving no process and no file behind. Idempotent."""
        try:
            await self._work.close()
        finally:
            await self._tests.close()

    def kill(self) -> None:
        """Close both interpreters immediately, without an event loop."""
        self._work.kill()
        self._tests.kill()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = f"{self._graded} graded" if self.alive else "not running"
        return f"<Grader {self.isolation or 'best available isolation'}, {state}>"

    # --- grading ---------------------------------------------------------------------------------

    @classmethod
    def validate_remote_options(cls, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of a remote call: a client must not name files on the server's machine.

        Raises:  SettingsError if it does.
        """
        if not isinstance(kwargs.get("files") or {}, Mapping):
            raise SettingsError(f"files must be a dict from paths to text or bytes in a remote call of {method}()")

    async def grade(
        self,
        source: str,
        tests: Iterable[str | tuple[str, str]],
        *,
        setup: str = "",
        names: Sequence[str] = (),
        module: str = "solution",
        modules: Sequence[str] = (),
        files: Files | None = None,
        timeout: float = 5.0,
        total: float = 60.0,
    ) -> Grade:
        """Run each test against the submission and return the verdicts, in order.

        Args:
            source: source code of the submission. It is run as a module named `module`.
            tests: each test is either Python code or a pair (stdin, stdout). Python code passes if it raises no
                exception (`assert add(1, 2) == 3`); functions named test_... and unittest.TestCase classes that it
                defines are run too. For a pair, the submission is run as a whole program, and its output must equal
                `stdout` except for whitespace at the ends of lines and empty lines at the end.
            setup: Python code to run once in the tests' interpreter, before the tests; they share its definitions.
            names: names to take from the submission although they are also built-in names (such as a function `sum`).
                All other names that a test uses and does not define are looked up in the submission.
                `from solution import add` works as well.
            module: name of the submission's module.
            modules: modules among `files` that the tests import. They run in the submission's interpreter.
            files: files for the submission's working directory: a dict from paths to contents, or a folder.
            timeout: seconds for loading the submission, and for each test.
            total: seconds for the whole call.

        Only data is exchanged between tests and submission: None, bool, numbers, str, bytes, list, tuple, set, dict.
        Arguments are copied, so a test does not see the submission modify a list passed to it. Other objects stay in
        the submission's process, and the test gets a proxy. A test can call a proxy, read and set its attributes and
        items, iterate over it, and take its `len`, `str` and truth value, but not compare it, because `==` would run
        the submission's code. A test cannot pass a function to the submission. Built-in exceptions are re-raised in the
        test with their own type; others, and exits, as SubmissionError.

        Raises:  SettingsError for invalid tests (a syntax error, or a setup that fails before it has used the
                 submission); SandboxError for failures of the host. Failures of the submission are verdicts.
        """
        cases = list(tests)
        _check(source, cases, timeout, total)
        async with self._exclusive():
            run = Grading(
                self._work, self._tests, source, setup=setup, module=module, names=names, modules=modules, files=files,
                timeout=timeout, total=total,
            )  # fmt: skip
            verdicts = []
            for number, case in enumerate(cases, 1):
                try:
                    verdicts.append(await (run.python(case) if isinstance(case, str) else run.program(*case)))
                except InvalidTest as error:
                    raise SettingsError(f"test {number}: {error}") from None
            self._graded += 1
            return Grade(tuple(verdicts), run.load_error)

    async def run(self, source: str, stdin: str = "", timeout: float = 5.0) -> SandboxResult:
        """Run a whole program in a fresh process and return its output and how it ended.

        Args:
            source: source code of the program.
            stdin: text of its standard input.
            timeout: seconds until it is stopped.

        Raises:  SandboxError for failures of the host. Failures of the program are not raised.
        """
        _check(source, [(stdin, "")], timeout, timeout)
        async with self._exclusive():
            try:
                result, reply = await self._work._call("program", timeout, source=source, stdin=stdin)
            except ToolError:  # the program itself wrote this answer
                return SandboxResult(error="it gave no readable answer")
            answer = reply.get("answer")
            error = answer.get("error") if isinstance(answer, dict) else result.error or "it gave no readable answer"
            return dataclasses.replace(result, value=None, error=None if error is None else str(error)[-4000:])

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Reserve this Grader for one call, and start from two fresh processes."""
        if self._busy:
            raise SettingsError("this Grader is already grading; use a pool of Graders to grade concurrently")
        self._busy = True
        try:
            if self._used or not self.alive:
                await self._work.restart()
                await self._tests.restart()
            self._used = True
            yield
        finally:
            self._busy = False


def _check(source: str, cases: Sequence[object], timeout: float, total: float) -> None:
    if not isinstance(source, str):
        raise SettingsError(f"source must be the text of a program, got {type(source).__name__}")
    if not cases:
        raise SettingsError("tests must contain at least one test, got none")
    for number, case in enumerate(cases, 1):
        pair = isinstance(case, tuple | list) and len(case) == 2 and all(isinstance(each, str) for each in case)
        if not isinstance(case, str) and not pair:
            raise SettingsError(f"test {number} must be Python text or a pair (stdin, stdout), got {case!r}")
    check_seconds(timeout=timeout, total=total)
