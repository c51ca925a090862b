"""Run tests against code written by a policy, in new processes that have not run any earlier code of the policy.

This module runs on the host. `Grading` relays requests from the tests (inside/grading_tests.py) to the submission
(inside/submission.py) and returns the answers. Whole programs are graded by comparing their output with the expected
output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly_kit._display import Displayable

from ..errors import SandboxError, SettingsError, ToolError, check_instance, check_value
from .host.limits import Limits
from .hosted import Files, HostedSandbox
from .result import Limit, SandboxResult
from .sandbox import Startable
from .settings import forward_signature

_INVALID = "no valid result was returned"


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Displayable):
    """The result of one test. `error` may quote the test: show it to a model only if the test is not secret.

    Attributes:
        passed: True if the test passed.
        error: Reason why the test failed; None if it passed.
        limit: The limit that stopped the submission or the test, if any.
        stdout: Output of the submission during the test, up to max_output bytes.
        seconds: Duration of the test.
    """

    passed: bool
    error: str | None = None
    limit: Limit | None = None
    stdout: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Grade(Displayable):
    """The grade of a submission: one verdict per test, in order.

    Attributes:
        verdicts: One Verdict per test.
        error: Reason why the submission could not be loaded, or None. The reason never quotes the tests.
    """

    verdicts: tuple[Verdict, ...]
    error: str | None = None

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def share(self) -> float:
        """Fraction of tests that passed, in [0, 1]."""
        return self.passed / len(self.verdicts)

    @property
    def ok(self) -> bool:
        """True if all tests passed."""
        return self.passed == len(self.verdicts)

    def __repr__(self) -> str:
        return f"Grade({self.passed} of {len(self.verdicts)} passed{', did not load' if self.error else ''})"


@forward_signature(HostedSandbox)
class Grader(Startable):
    """Grade code written by a policy in fresh, resource-limited processes: `await grader.grade(source, tests)`.

    The submission and the tests run in two separate confined interpreters. Each call from a test to the submission is
    relayed as data, and so is its result. Tests, expected answers and verdicts never enter the process of the
    submission, and nothing that the submission prints, patches, raises or kills affects another process. Each `grade`
    uses new interpreters, which have no access to the PythonSandbox of a chain.

    A Grader is pooled like other sandboxes: `af.Pool(af.Grader, size=4)`. A reward requests a Grader by a type
    annotation:

        @af.reward
        async def solved(final: str | None, tests: list[str], grader: af.Grader) -> float:
            return (await grader.grade(final or "", tests)).share

    The settings are those of PythonSandbox and apply to each of the two interpreters. isolation="none" does not
    protect the tests from the submission.
    """

    def __init__(self, **settings: Any) -> None:
        self._work = _Half("submission", **settings)
        self._tests = _Half("grading_tests", **settings)
        self._used = False
        self._busy = False
        self._graded = 0

    # --- lifecycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start both interpreters.

        Raises:  IsolationError or SandboxError, like `PythonSandbox.start`.
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
        """Dict from the name of each limit to a description of how it is enforced, or "not limited"."""
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

    def __repr__(self) -> str:
        state = f"{self._graded} graded" if self.alive else "not running"
        return f"<Grader {self.isolation or 'best available isolation'}, {state}>"

    # --- grading ---------------------------------------------------------------------------------

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
            source: source code of the submission, which is run as a module named `module`.
            tests: each test is either Python code or a pair (stdin, stdout). Python code passes if it raises no
                exception (`assert add(1, 2) == 3`); functions named test_... and unittest.TestCase classes that it
                defines are run too. For a pair, the submission is run as a whole program, and its output must equal
                `stdout` except for whitespace at the ends of lines and empty lines at the end.
            setup: Python code to run once before the tests, in their interpreter. The tests can use what it defines.
            names: names to take from the submission even if Python has built-ins of these names, such as `sum`. Other
                names that a test uses but does not define are always looked up in the submission.
                A test can also import names, as in `from solution import add`.
            module: name of the submission's module.
            modules: names of modules in `files` that tests may import; these run in the submission's interpreter.
            files: files for the submission's working directory: a dict from paths to contents, or a folder.
            timeout: seconds for loading the submission, and for each test.
            total: seconds for the whole call.

        Tests and submission can exchange only data: None, bool, numbers, str, bytes, dates and times, UUIDs, list,
        tuple, set and dict. Arguments are copied, so a test does not see the submission modify a list passed to it.
        Other objects stay in the submission's process, and the test gets a proxy. A test can call a proxy, read and set
        its attributes and items, iterate over it, and take its `len`, `str` and truth value, but not compare it,
        because `==` would run the submission's code. A test cannot pass a function to the submission. A built-in
        exception is re-raised in the test with its own type. Other exceptions and exits are raised as SubmissionError.

        Raises:  SettingsError for invalid tests (a syntax error, or a setup that fails before it has used the
                 submission); SandboxError for failures of the host. Failures of the submission only fail tests.
        """
        cases = list(tests)
        _check(source, cases, timeout, total)
        async with self._exclusive():
            run = Grading(
                self._work,
                self._tests,
                source,
                setup=setup,
                module=module,
                names=names,
                modules=modules,
                files=files,
                timeout=timeout,
                total=total,
            )
            verdicts = []
            for number, case in enumerate(cases, 1):
                try:
                    verdicts.append(await (run.python(case) if isinstance(case, str) else run.program(*case)))
                except InvalidTest as error:
                    raise SettingsError(f"test {number}: {error}") from None
            self._graded += 1
            return Grade(tuple(verdicts), run.load_error)

    async def run(self, source: str, stdin: str = "", timeout: float = 5.0) -> SandboxResult:
        """Run a whole program in a fresh process and return its result.

        Args:
            source: source code of the program.
            stdin: standard input of the program.
            timeout: seconds after which the program is stopped.

        Raises:  SandboxError for failures of the host. Failures of the program are reported in the result.
        """
        _check(source, [(stdin, "")], timeout, timeout)
        async with self._exclusive():
            try:
                result, reply = await self._work._call("program", timeout, source=source, stdin=stdin)
            except ToolError:  # only a forged answer raises this
                return SandboxResult(error=_INVALID)
            answer = reply.get("answer")
            error = answer.get("error") if isinstance(answer, dict) else result.error or _INVALID
            return dataclasses.replace(result, value=None, error=None if error is None else str(error)[-4000:])

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Reserve this Grader for one call, and restart both interpreters if they have been used."""
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
    check_instance("source", source, str, "the text of a program")
    if not cases:
        raise SettingsError("tests must contain at least one test, got none")
    for number, case in enumerate(cases, 1):
        pair = isinstance(case, tuple | list) and len(case) == 2 and all(isinstance(each, str) for each in case)
        if not isinstance(case, str) and not pair:
            raise SettingsError(f"test {number} must be Python code or a pair (stdin, stdout), got {case!r}")
    check_value("timeout", timeout, limit="above 0")
    check_value("total", total, limit="above 0")


class InvalidTest(Exception):
    """Raised when a test is invalid regardless of the submission."""


class NoAnswer(Exception):
    """Raised when an interpreter does not answer. The verdict contains the message and the exceeded `limit`."""

    def __init__(self, text: str, limit: Limit | None = None) -> None:
        super().__init__(text)
        self.limit = limit


class _Half(HostedSandbox):
    """One of the two interpreters of a Grader, which runs either the tests or the submission."""

    def __init__(self, program: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._inside_files = ("base", "values", "grading_data", program)

    async def restart(self) -> None:
        """Reset the interpreter, or start a new one if it is dead or cannot be reset."""
        if self.alive:
            try:
                await self.reset()
                return
            except SandboxError:
                if self._closed:
                    raise
        await self.start()


class Grading:
    """A running `Grader.grade` call, which relays requests from the tests to the submission and records verdicts."""

    def __init__(
        self,
        work: _Half,
        tests: _Half,
        source: str,
        *,
        setup: str,
        module: str,
        names: Sequence[str],
        modules: Sequence[str],
        files: Files | None,
        timeout: float,
        total: float,
    ) -> None:
        self.work, self.tests = work, tests
        self.source, self.setup, self.files = source, setup, files
        self.module, self.names, self.modules = module, list(names), list(modules)
        self.timeout, self.total = timeout, total
        self.end = self.used + total
        self.test_end = self.end
        # An interpreter is new if no code has run in it since its start.
        self.work_is_new = self.tests_are_new = True
        self.is_loaded = self.are_tests_ready = False
        self.load_error: str | None = None
        self.setup_error: str | None = None
        self.stdout = ""

    @property
    def used(self) -> float:
        """Time in seconds that the code in both interpreters has used since they were created."""
        return self.work._own_seconds + self.tests._own_seconds

    def seconds_left(self) -> float:
        return min(self.end, self.test_end) - self.used

    def timeout_message(self) -> str:
        if self.end <= self.test_end:
            return f"it was not finished after the {self.total:g} s for all tests"
        return f"it took more than {self.timeout:g} s"

    async def call_half(self, half: _Half, name: str, **given: object) -> Any:
        """Call the function `name` in an interpreter. Return (answer, SandboxResult) or raise NoAnswer."""
        seconds_left = self.seconds_left()
        if seconds_left <= 0:
            raise NoAnswer(self.timeout_message(), "time")
        try:
            result, reply = await half._call(name, seconds_left, **given)
        except ToolError as refusal:
            raise NoAnswer(str(refusal)[:2000]) from None
        if half is self.work:
            self.stdout = (self.stdout + result.stdout)[: half.max_output]
        if "answer" in reply:
            return reply["answer"], result
        raise NoAnswer(self.timeout_message() if result.limit == "time" else _failure_message(result), result.limit)

    async def call_tests(self, name: str, **given: object) -> Any:
        answer, _ = await self.call_half(self.tests, name, **given)
        return answer

    async def fresh(self) -> None:
        """Ensure that no code has run in the submission's interpreter, and write `files` to its folder."""
        if not self.work_is_new:
            await self.work.restart()
        self.work_is_new = self.is_loaded = False
        if self.files is not None:
            await self.work._seed(self.files)

    async def load(self) -> None:
        if self.is_loaded:
            return
        await self.fresh()
        try:
            answer, _ = await self.call_half(self.work, "load", source=self.source, module=self.module)
        except NoAnswer as ended:
            self.load_error = str(ended)
            raise
        error = answer.get("error") if isinstance(answer, dict) else _INVALID
        if error is not None:
            self.load_error = str(error)[-4000:]
            raise NoAnswer(self.load_error)
        self.is_loaded = True

    def begin(self) -> float:
        self.test_end = self.used + self.timeout
        self.stdout = ""
        return time.perf_counter()

    def verdict(self, began: float, error: str | None = None, limit: Limit | None = None) -> Verdict:
        return Verdict(error is None, error, limit, self.stdout, time.perf_counter() - began)

    async def prepare(self) -> None:
        """Prepare the tests' interpreter and run the setup code in it, unless it is already prepared."""
        if self.are_tests_ready:
            return
        if not self.tests_are_new:
            await self.tests.restart()
        self.tests_are_new = False
        await self.call_tests("prepare", module=self.module, names=self.names, modules=self.modules)
        try:
            self.setup_error, asked = await self.steps(self.setup, setup=True) if self.setup else (None, False)
        except InvalidTest as error:
            raise SettingsError(f"setup failed: {error}") from None
        if self.setup_error is not None and not asked:
            raise SettingsError(f"setup failed: {self.setup_error}")
        self.are_tests_ready = True

    async def python(self, test: str) -> Verdict:
        began = self.begin()
        if self.load_error is not None:
            return self.verdict(began, self.load_error)
        if self.seconds_left() <= 0:
            return self.verdict(began, self.timeout_message(), "time")
        try:
            await self.load()
            self.test_end = self.used + self.timeout
            await self.prepare()
            if self.setup_error is not None:
                return self.verdict(began, f"in the setup of the tests: {self.setup_error}")
            error, _ = await self.steps(test, setup=False)
        except NoAnswer as ended:
            # The state of both interpreters is unknown now, so both are restarted before the next test.
            self.is_loaded = self.are_tests_ready = False
            return self.verdict(began, str(ended), ended.limit)
        return self.verdict(began, error)

    async def steps(self, text: str, setup: bool) -> tuple[str | None, bool]:
        """Run a test, relaying its requests to the submission. Return (error or None, True if it made requests)."""
        step = await self.call_tests("begin", text=text, setup=setup)
        while "ask" in step:
            answer, _ = await self.call_half(self.work, "answer", question=step["ask"])
            if not isinstance(answer, str):
                raise NoAnswer("the submission returned no valid result")
            step = await self.call_tests("resume", answer=answer)
        if "broken" in step:
            raise InvalidTest(step["broken"])
        if "end" not in step:
            raise SandboxError("the tests' interpreter gave an invalid answer")
        return step["end"], bool(step["asked"])

    async def program(self, stdin: str, stdout: str) -> Verdict:
        began = self.begin()
        if self.seconds_left() <= 0:
            return self.verdict(began, self.timeout_message(), "time")
        await self.fresh()
        try:
            answer, result = await self.call_half(self.work, "program", source=self.source, stdin=stdin)
        except NoAnswer as ended:
            return self.verdict(began, str(ended), ended.limit)
        error = answer.get("error") if isinstance(answer, dict) else _INVALID
        if error is not None:
            return self.verdict(began, str(error)[-4000:])
        if result.truncated:
            return self.verdict(began, f"it printed more than {self.work.max_output} bytes", "output")
        if _lines(result.stdout) != _lines(stdout):
            return self.verdict(began, f"it printed\n{result.stdout[:2000]}\nand not\n{stdout[:2000]}")
        return self.verdict(began)


def _failure_message(result: SandboxResult) -> str:
    if result.limit is not None and not result.died:
        return f"it exceeded the {result.limit} limit"
    return (result.error or _INVALID)[-4000:]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n")]
