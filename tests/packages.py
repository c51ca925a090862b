"""Install packages for one test, because they require other versions of packages of the environment."""

import os
import subprocess
import sys
from pathlib import Path

import waiting
from paths import TESTS


def install(folder: Path, requirements: str) -> None:
    """Install requirements, separated by spaces, in a folder, without their dependencies."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *requirements.split()], check=True)


def run(folder: Path, code: str, input: str = "", **environment: str) -> str:
    """Run code in a new process with the packages of a folder and all modules of the tests. Return what it printed."""
    modules = [folder, TESTS, *(path for path in TESTS.iterdir() if path.is_dir())]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=input,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, modules)), **environment},
        capture_output=True,
        text=True,
        timeout=waiting.GUARD,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
