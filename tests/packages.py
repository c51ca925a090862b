"""Install packages for one test, because they require other versions of packages of the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(folder: Path, requirements: str) -> None:
    """Install requirements, separated by spaces, in a folder, without their dependencies."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *requirements.split()], check=True)
