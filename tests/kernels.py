"""Jupyter kernels for tests: cells are run, interrupted and awaited."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import errors
from waiting import GUARD


@contextlib.contextmanager
def kernel() -> Iterator[tuple[Any, Any]]:
    """Start a Jupyter kernel and connect a client."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=GUARD)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def start_cell(client: Any, code: str) -> str:
    """Start a cell and wait until it has printed "in"."""
    number = str(client.execute(code))
    while not any(m["content"].get("text") == "in\n" for m in [client.get_iopub_msg(timeout=GUARD)]):
        pass
    return number


def interrupted(manager: Any, client: Any, number: str) -> None:
    manager.interrupt_kernel()
    errors.check(lambda: until_idle(client, number), AssertionError, re.compile(r"KeyboardInterrupt|CancelledError"))


def run_cell(client: Any, code: str) -> str:
    """Run a cell and return what it prints; raise its error."""
    return until_idle(client, client.execute(code))


def until_idle(client: Any, number: str) -> str:
    text, trouble = "", None
    while True:
        message = client.get_iopub_msg(timeout=GUARD)
        if message["parent_header"].get("msg_id") != number:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            text += content["text"]
        elif message["msg_type"] == "error":
            trouble = "\n".join(content["traceback"])
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            assert trouble is None, trouble
            return text
