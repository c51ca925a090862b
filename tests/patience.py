"""Time limits of sandboxes that a slow machine could reach, raised for tests in which nothing may reach them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit.sandboxes.call import Call
from agentfly_kit.sandboxes.host.cgroups import Group
from agentfly_kit.sandboxes.hosted import HostedSandbox

_INTERNAL = (
    "call.CONTROL_SECONDS", "sandbox.CONTROL_SECONDS", "sandbox._START_SECONDS", "host.isolation._PROBE_SECONDS",
)  # fmt: skip
_CALLS: tuple[Any, ...] = (
    af.PythonSandbox.run, af.ShellSandbox.run, af.SQLSandbox.run, af.Grader.run,
    HostedSandbox._request, Group.kill, Group.remove,
)  # fmt: skip
"""The last parameter of these is a time limit."""


@pytest.fixture(autouse=True)
def raised_limits() -> Iterator[pytest.MonkeyPatch]:
    """Raise the limits for every test of a folder whose conftest.py imports this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        raise_limits(patch)
        yield patch


@pytest.fixture
def never_killed(raised_limits: pytest.MonkeyPatch) -> None:
    """Give interrupted code as long as it needs to end, instead of killing it after half a second."""
    for name in ("call", "sandbox"):
        raised_limits.setattr(f"agentfly_kit.sandboxes.{name}.GRACE_SECONDS", GUARD)


def raise_limits(patch: pytest.MonkeyPatch) -> None:
    """Raise the default time limits of calls, and those of starts, resets and removals."""
    for name in _INTERNAL:
        patch.setattr(f"agentfly_kit.sandboxes.{name}", GUARD)
    for call in _CALLS:
        patch.setattr(call, "__defaults__", (*call.__defaults__[:-1], GUARD))
    patch.setattr(
        af.Grader.grade, "__kwdefaults__", {**af.Grader.grade.__kwdefaults__, "timeout": GUARD, "total": GUARD}
    )


def _running(sandbox: Any) -> list[Call]:
    return [watch for watch in sandbox._watches if isinstance(watch, Call)]


def printed(sandbox: Any) -> bool:
    """Return True if the running call of a sandbox has printed."""
    return any(call.printed[0] for call in _running(sandbox))


async def begun(sandbox: Any, code: str) -> asyncio.Task[Any]:
    """Start a call of `run`, and wait until it has printed."""
    task = asyncio.create_task(sandbox.run(code))
    await until(lambda: task.done() or printed(sandbox))
    return task


def time_out(sandbox: Any) -> None:
    """Let the running call reach its time limit now, however long ago it began."""
    (call,) = _running(sandbox)
    call.on_timeout()
