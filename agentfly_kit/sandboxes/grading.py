"""Grading of one submission, whose tests run in a different interpreter than the submission itself.

This is the host's side: it relays requests from the tests (inside/grading_tests.py) to the submission
(inside/submission.py), and the answers back. The output of whole programs is compared here, on the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SandboxError, SettingsError, ToolError
from .hosted import Files, HostedSandbox
from .result import Limit, SandboxResult


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one test. `error` may quote the test: show it to a model only if the test is not secret.

    Attributes:
        passed: True if the test passed.
        error: Why the test failed; None if it passed.
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
class Grade:
    """The grade of a submission: one verdict per test, in order.

    Attributes:
        verdicts: One Verdict per test.
        error: Why the submission failed to load, in which case no Python test passed. Never quotes the tests.
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


class InvalidTest(Exception):
    """The test itself is invalid, whatever the submission."""


class NoAnswer(Exception):
    """An interpreter did not answer. Carries the error and the limit to report in the verdict."""

    def __init__(self, text: str, limit: Limit | None = None) -> None:
        super().__init__(text)
        self.limit = limit


class _Half(HostedSandbox):
    """One of a Grader's two interpreters."""

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


class SubmissionSandbox(_Half):
    """The interpreter of the submission. It contains no test and no answer."""

    _inside_files: ClassVar[tuple[str, ...]] = ("base", "grading_data", "submission")


class TestsSandbox(_Half):
    """The interpreter of the tests."""

    _inside_files: ClassVar[tuple[str, ...]] = ("base", "grading_data", "grading_tests")


class Grading:
    """One `Grader.grade` call: relays requests from the tests to the submission and makes the verdicts."""

    def __init__(
        self, work: SubmissionSandbox, tests: TestsSandbox, source: str, *, setup: str, module: str,
        names: Sequence[str], modules: Sequence[str], files: Files | None, timeout: float, total: float,
    ) -> None:  # fmt: skip
        self.work, self.tests = work, tests
        self.source, self.setup, self.files = source, setup, files
        self.module, self.names, self.modules = module, list(names), list(modules)
        self.timeout, self.total = timeout, total
        self.loop = asyncio.get_running_loop()
        self.end = self.loop.time() + total
        self.test_end = self.end
        # State of each interpreter: new if no code has run in it since its start, and whether it is prepared for tests.
        self.work_is_new = self.tests_are_new = True
        self.is_loaded = self.are_tests_ready = False
        self.load_error: str | None = None
        self.setup_error: str | None = None
        self.stdout = ""

    def seconds_left(self) -> float:
        return min(self.end, self.test_end) - self.loop.time()

    def timeout_message(self) -> str:
        if self.end <= self.test_end:
            return f"it was not done when the {self.total:g} s for all tests were over"
        return f"it took more than {self.timeout:g} s"

    async def call_half(self, half: _Half, name: str, **given: object) -> Any:
        """Call one of the interpreters and return its answer and its SandboxResult.

        Raises:  NoAnswer if the call was refused, timed out or failed.
        """
        seconds_left = self.seconds_left()
        if seconds_left <= 0:
            raise NoAnswer(self.timeout_message(), "time")
        try:
            # `_call` stops code that runs too long; this timeout covers an answer that never arrives.
            async with asyncio.timeout(seconds_left + 2.0):
                result, reply = await half._call(name, seconds_left, **given)
        except TimeoutError:
            raise NoAnswer(self.timeout_message(), "time") from None
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
        """Provide an interpreter for the submission in which none of its code has run yet, with `files` in place."""
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
        error = answer.get("error") if isinstance(answer, dict) else "it gave no readable answer"
        if error is not None:
            self.load_error = str(error)[-4000:]
            raise NoAnswer(self.load_error)
        self.is_loaded = True

    def begin(self) -> float:
        now = self.loop.time()
        self.test_end = now + self.timeout
        self.stdout = ""
        return now

    def verdict(self, began: float, error: str | None = None, limit: Limit | None = None) -> Verdict:
        return Verdict(error is None, error, limit, self.stdout, self.loop.time() - began)

    async def prepare(self) -> None:
        """Prepare the tests' interpreter and run the setup."""
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
            self.test_end = self.loop.time() + self.timeout
            await self.prepare()
            if self.setup_error is not None:
                return self.verdict(began, f"in the setup of the tests: {self.setup_error}")
            error, _ = await self.steps(test, setup=False)
        except NoAnswer as ended:
            # The state of both interpreters is unknown now: restart both for the next test.
            self.is_loaded = self.are_tests_ready = False
            return self.verdict(began, str(ended), ended.limit)
        return self.verdict(began, error)

    async def steps(self, text: str, setup: bool) -> tuple[str | None, bool]:
        """Run a test, relaying its requests to the submission.

        Returns:  the error (None if it passed), and whether the test used the submission.
        """
        step = await self.call_tests("begin", text=text, setup=setup)
        while "ask" in step:
            answer, _ = await self.call_half(self.work, "answer", question=step["ask"])
            if not isinstance(answer, str):
                raise NoAnswer("the submission gave no readable answer")
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
        error = answer.get("error") if isinstance(answer, dict) else "it gave no readable answer"
        if error is not None:
            return self.verdict(began, str(error)[-4000:])
        if result.truncated:
            return self.verdict(began, f"it printed more than {self.work.max_output} bytes", "output")
        if _lines(result.stdout) != _lines(stdout):
            return self.verdict(began, f"it printed\n{result.stdout[:2000]}\nand not\n{stdout[:2000]}")
        return self.verdict(began)


def _failure_message(result: SandboxResult) -> str:
    if result.limit is not None and not result.died:
        return f"it ran into the {result.limit} limit"
    return (result.error or "it gave no readable answer")[-4000:]


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
