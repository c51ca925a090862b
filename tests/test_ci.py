"""The output of `.ci/run` ends with what failed, in at most 200 lines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import waiting
from paths import ROOT, TESTS

# One test fails with a long traceback, and the other prints a lot before it fails.
TESTS_THAT_FAIL = """
def test_long():
    assert 1 == 2, "the first reason\\n" + "\\n".join(f"line {i}" for i in range(1000))

def test_loud():
    print("\\n".join(f"printed {i}" for i in range(1000)))
    raise ValueError("the second reason")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with `.ci/run`. Its `bin` has the packages that `.ci/run` would install, and no apt-get."""
    for folder in (".ci", "scripts", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in ("chromium", "node", "bwrap", "podman", "runc", "java", "apt-get", "../scripts/bare"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "test_inner.py").write_text(TESTS_THAT_FAIL)
    return tmp_path


def run(project: Path, *targets: str) -> tuple[int, list[str]]:
    """Run `.ci/run` with a Makefile in which all targets without a recipe do nothing."""
    names = ("install", "install-docs", "check", "docs", "test", "install-real", "test-real")
    (project / "Makefile").write_text(f"{' '.join(names)}:\n" + "".join(f"{target}\n" for target in targets))
    environment = {
        **os.environ, "PATH": f"{project / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(TESTS),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = ["bash", str(project / ".ci" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=waiting.GUARD)
    return done.returncode, done.stdout.splitlines()


def test_a_run_that_passes_shows_the_duration_of_each_stage(project: Path) -> None:
    code, lines = run(project)
    assert code == 0
    assert lines[-1].startswith("ci: passed in ")
    assert [line.split("  ")[-1] for line in lines if line.endswith(" make test-real")] == [
        "ci: make test-real",
        "make test-real",
    ]


def test_a_command_that_fails_shows_its_last_lines(project: Path) -> None:
    code, lines = run(project, "check:\n\tseq 5000; echo the reason; exit 3")
    end = lines[lines.index("==== duration of each stage") :]
    assert code == 1
    assert "==== failed: make -j2 --output-sync=target check docs (exit status 2)" in end
    assert "the reason" in end and "4990" in end and len(end) <= 200
    assert not any("test-real" in line for line in lines)  # nothing runs after the failure


def test_tests_that_fail_are_named_with_the_end_of_each_log(project: Path) -> None:
    pytest_ = f"{sys.executable} -m pytest -q -p no:cacheprovider -p failures --rootdir={project} -c /dev/null"
    code, lines = run(project, f"test:\n\t{pytest_} {project / 'test_inner.py'}")
    end = lines[lines.index("==== duration of each stage") :]
    assert code == 1
    assert "==== failed: make test (exit status 2)" in end and len(end) <= 200
    first, second = (
        next(i for i, line in enumerate(end) if f"::test_{name} (call)" in line) for name in ("long", "loud")
    )
    assert any("line 999" in line for line in end[first:second])
    assert any("ValueError: the second reason" in line for line in end[second:])
