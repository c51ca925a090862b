"""A failing test leaves nothing behind that makes later tests fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import waiting
from paths import ROOT, TESTS

FAILS_AND_GOES_ON = """
import pytest
import agentfly_kit as af
from test_sandbox_python import nothing_left

async def test_fails_with_a_sandbox_and_a_lease(nothing_left):
    sandbox = af.ShellSandbox(isolation="none")
    await sandbox.run("sleep 1000 &")
    pool = af.Pool(af.PythonSandbox, size=1, isolation="none")
    lease = await pool.acquire(owner="test")
    assert not lease, "meant to fail"

def test_the_next_one_finds_nothing(nothing_left):
    pass
"""


@pytest.mark.real
def test_a_failing_test_does_not_fail_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(FAILS_AND_GOES_ON)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path / "test_inner.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "sandboxes")))}
    environment.pop("AGENTFLY_TEST_FAILURES", None)  # this failure is wanted
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=waiting.GUARD)
    assert "1 failed, 1 passed in" in done.stdout, done.stdout + done.stderr
    assert "meant to fail" in done.stdout
