"""Debugging of tools and rewards in a real kernel, as described in notebook 00."""

import queue
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from waiting import GUARD

pytestmark = pytest.mark.real

SETUP = '''
import agentfly_kit as af

tasks = af.load_tasks("lookup").test[:3]
call = '<tool_call>{"name":"lookup","arguments":{"of":"Ada","what":"city"}}</tool_call>'


@af.reward
def zero(final: str | None) -> float:
    return 0.0


def agent_with(tool):
    chat = af.tiny.policy("lookup").chat
    return af.Agent(af.ScriptedEngine([call, "done"]), chat=chat, tools=[tool], reward=zero)


@af.tool(timeout=None)
def lookup(of: str, what: str) -> str:
    """Look up one fact.

    Args:
        of: the person's name.
        what: the fact.
    """
    fact = of + "'s " + what
    import pdb; pdb.set_trace()
    return fact
'''


class Kernel:
    """A kernel with an answer for each line that the debugger reads."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(startup_timeout=GUARD, kernel_name="python3")

    def run(self, code: str, answers: Sequence[str] = ()) -> str:
        """Run a cell and return its outputs as text. All answers must be used."""
        left, parts = list(answers), []
        request = self.client.execute(code, allow_stdin=True)
        until = time.monotonic() + GUARD
        while time.monotonic() < until:
            message = self._next()
            content: Any = message.get("content")
            if message.get("msg_type") == "input_request":
                self.client.input(left.pop(0))
            elif message.get("parent_header", {}).get("msg_id") != request:
                continue
            elif message["msg_type"] == "stream":
                parts.append(content["text"])
            elif message["msg_type"] == "error":
                parts += content["traceback"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert left == []
                return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(parts))
        raise TimeoutError("\n".join(parts))

    def _next(self) -> Any:
        for get in (self.client.get_stdin_msg, self.client.get_iopub_msg):
            try:
                return get(timeout=0.05)
            except queue.Empty:
                pass
        return {}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_debugger_stops_in_a_tool_during_a_rollout(kernel: Kernel, kind: str) -> None:
    kernel.run(SETUP.replace("def lookup", f"{kind} lookup"))
    output = kernel.run(
        "rollout = await agent_with(lookup).rollout(tasks, max_concurrency=1)\n"
        "print([chain.tool_calls[0].result.observation for chain in rollout])",
        ["p of, what", "fact = 'changed'", "c", "c", "c"],
    )
    assert "('Ada', 'city')" in output
    assert """['changed', "Ada's city", "Ada's city"]""" in output


def test_a_failed_call_is_rerun_and_opened_in_the_debugger(kernel: Kernel) -> None:
    kernel.run(SETUP.replace("import pdb; pdb.set_trace()", "1 / 0"))
    assert "division by zero" in kernel.run(
        "rollout = await agent_with(lookup).rollout(tasks)\n"
        "failed = rollout.trajectories[0].tool_calls[0]\n"
        "print(failed.result.error)"
    )
    assert "ZeroDivisionError: division by zero" in kernel.run("await failed.rerun()")
    assert "Ada's city" in kernel.run("%debug", ["p fact", "q"])
