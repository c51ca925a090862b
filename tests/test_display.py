"""Errors of this package in IPython: their tracebacks show the user's code only."""

import re
import subprocess
import sys

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
