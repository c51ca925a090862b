"""A persistent Python interpreter: variables survive from call to call and are discarded with the chain."""

from __future__ import annotations

import hashlib

from ..errors import SandboxError, check_value
from .result import SandboxResult
from .sandbox import Sandbox


class PythonSandbox(Sandbox):
    """A persistent, confined Python interpreter.

    Call `await start()`, then `await run(code)` any number of times, `await reset()` for a clean interpreter (new
    process, empty folder), and finally `await close()`. `async with PythonSandbox() as sandbox` starts and closes a
    sandbox.

    Args:
        isolation: "strict" (bubblewrap), "landlock" (no namespaces), "none" (a bare process with limits), a Container,
            or None for the best level available on this machine. `start` raises IsolationError if the named level is
            unavailable. `sandbox_report()` lists what each level does not isolate.
        packages: make the packages installed for this Python importable (read-only). If False, only the standard
            library is available.
        preload: modules to import once, before interpreters are forked, so that every interpreter inherits them. For
            numpy, this saves 0.1 s per chain.
        max_output: maximum number of bytes kept of each of stdout, stderr, value and error in one call.
        limits: attributes of `agentfly_kit.sandboxes.host.limits.Limits`, such as memory_mb. `limit_mechanisms`
            describes how each limit is enforced.

    Raises:  SettingsError for an invalid setting; SandboxError only for failures of the host.
    """

    # (code, timeout, digest of the result) of each call since the last reset; the digest of a stopped call is None.
    _history: tuple[tuple[str, float, bytes | None], ...] = ()

    async def _setup(self) -> None:
        self._history = ()

    async def run(self, code: str, timeout: float = 5.0) -> SandboxResult:
        """Run code in the interpreter. The result's `value` is the repr of the last expression.

        After `timeout` seconds the code receives a KeyboardInterrupt, which preserves its variables. Code that is still
        running half a second later is killed, and the next call gets a new interpreter with the same files. Time during
        which the code's processes are stopped or wait for a CPU does not count, so results do not depend on the load of
        the machine.

        Variables, threads, child processes and signal handlers survive a call; interval timers and alarms do not. The
        sandbox restores its own handlers of SIGINT and SIGXCPU before each call.

        Raises:  SandboxError if the sandbox is closed or cannot be restarted, or if another process or the machine's
                 out-of-memory killer has killed it before or during this call. The variables are then lost, and
                 `start()` starts the sandbox again. SandboxError is also raised if the processes were held up and the
                 call took more than ten times `timeout` plus 30 s. Failures of the code itself are never raised.
        """
        check_value("timeout", timeout, limit="above 0")
        async with self._exclusive():
            earlier = self._history
            self._history = (*earlier, (code, timeout, None))  # this entry remains if the call is cancelled
            result = await self._execute(code, timeout)
            if not (result.timed_out or result.died or result.limit == "output"):
                self._history = (*earlier, (code, timeout, _digest(result)))
            return result

    async def fork(self, into: PythonSandbox) -> None:
        """Copy this sandbox's state to the fresh sandbox `into` by replaying all calls in it.

        Raises:  SandboxError if a call was stopped, or if its replay gives a different result, for example because
                 of time or randomness. `into` is then reset.
        """
        await into.start()
        calls = self._history
        for position, (code, timeout, digest) in enumerate(calls, 1):
            if digest is not None and _digest(await into.run(code, timeout=timeout)) == digest:
                continue
            await into.reset()
            why = "was stopped" if digest is None else "gave a different result when it was replayed"
            raise SandboxError(f"this PythonSandbox cannot fork: call {position} of {len(calls)} {why}")


def _digest(result: SandboxResult) -> bytes:
    """Hash the parts of a result that a replay must reproduce."""
    same = (result.stdout, result.stderr, result.value, result.error, result.limit, result.truncated)
    return hashlib.sha256(repr(same).encode()).digest()
