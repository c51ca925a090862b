"""Helper functions in a notebook can be annotated with public types."""

import subprocess
import sys
from pathlib import Path

import pytest
import waiting

import agentfly_kit as af

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ROOT / "tests" / "annotated_helpers.py"


def test_annotations_of_helpers_exist() -> None:
    names: dict[str, object] = {}
    exec(compile(HELPERS.read_text(encoding="utf-8"), HELPERS, "exec"), names)
    assert {"Chain", "Engine", "Evaluation", "Reward", "Score", "Tool", "TrainRun", "TrainStep"} <= set(af.__all__)
    assert (ROOT / "agentfly_kit" / "py.typed").is_file()


@pytest.mark.long
def test_annotated_helpers_pass_mypy() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(HELPERS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=waiting.GUARD)
    assert done.returncode == 0, done.stdout
