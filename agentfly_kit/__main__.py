"""Command-line interface, which opens the course in JupyterLab, runs the quickstart, or checks the installation."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

_MANIFEST = ".agentfly-course.json"  # checksums of the notebooks at the time of copying
_FIRST, _INDEX = "01_quickstart.ipynb", "index.ipynb"
# Links in the notebooks to files of the repository that are not part of the course.
_OUTSIDE = re.compile(r"\[([^]\n]+)\]\(\.\./[^)\n]+\)")


class _CommandError(Exception):
    """Raised when a command fails. The message is shown to the user."""


def _course() -> Path:
    """Return the folder of the notebooks, which is `_course` in an installed package and `notebooks` in a checkout."""
    installed = Path(__file__).parent / "_course"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "notebooks"


def copy_course(folder: Path) -> list[str]:
    """Copy the notebooks of the course into a folder. Notebooks that were edited there are never overwritten.

    In the copies, links to files outside the course are replaced by their text.

    Args:
        folder: The folder, which is created if it does not exist.

    Returns:
        The names of notebooks that were not overwritten because they had been edited.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / _MANIFEST
    copied: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else {}
    kept = []
    for source in sorted(_course().glob("*.ipynb")):
        text = source.read_text(encoding="utf-8")
        shipped, target = _OUTSIDE.sub(r"\1 (in the repository)", text).encode(), folder / source.name
        present = target.read_bytes() if target.exists() else None
        if present is not None and present != shipped and _checksum(present) != copied.get(source.name):
            kept.append(source.name)
            continue
        if present != shipped:
            target.write_bytes(shipped)
        copied[source.name] = _checksum(shipped)
    manifest.write_text(json.dumps(copied, indent=1) + "\n", encoding="utf-8")
    return kept


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _lab(folder: Path, port: int | None, browser: bool) -> int:
    _require("jupyterlab", "ipykernel", "anywidget")
    try:
        kept = copy_course(folder)
    except OSError as error:
        raise _CommandError(f"cannot write to {folder} ({error.strerror}); choose another folder") from None
    print(f"The course is in {folder.resolve()}")
    for name in kept:
        print(f"  kept your changed {name}; to get the shipped version, rename yours and repeat this command")
    command = [sys.executable, "-m", "jupyterlab", f"--LabApp.default_url=/lab/tree/{_INDEX}"]
    command += ["--no-browser"] if not browser else []
    command += [f"--port={port}", "--ServerApp.port_retries=0"] if port is not None else []
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # Prefer the kernel of this environment to a kernel with the same name in the home directory.
    environment = {"OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1", **os.environ}
    return _start(command, folder, environment)


def _start(command: list[str], folder: Path, environment: dict[str, str]) -> int:
    sys.stdout.flush()
    if hasattr(os, "fork"):  # replace this process so that JupyterLab receives all signals
        os.chdir(folder)
        os.execve(command[0], command, environment)
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def _demo(notebook: Path | None, out: Path, save: bool) -> int:
    _require("nbclient", "nbconvert", "ipykernel")
    from agentfly_kit._demo import run_demo

    return run_demo(notebook or _course() / _FIRST, out, save)


def _doctor() -> int:
    from agentfly_kit._doctor import doctor

    diagnosis = doctor()
    print(diagnosis)
    return 0 if diagnosis.ok else 1


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            python = Path(sys.executable).name
            raise _CommandError(f'{package} is not installed; type: {python} -m pip install "agentfly_kit[lab]"')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentfly-kit",
        description="Reinforcement learning of tool-using language-model agents in notebooks. "
        "Without a command: copy the course to ./agentfly-course and open it in JupyterLab.",
    )
    parser.add_argument(
        "--version", action="version", version=f"agentfly_kit {sys.modules['agentfly_kit'].__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    lab = commands.add_parser("lab", help="copy the course to a folder and open it in JupyterLab (the default)")
    lab.add_argument("folder", nargs="?", type=Path, default=Path("agentfly-course"), help="%(default)s by default")
    lab.add_argument("--port", type=int, help="port of JupyterLab; by default the first free port from 8888")
    lab.add_argument("--no-browser", action="store_true", help="print the address and do not open a browser")
    demo = commands.add_parser("demo", help="run the quickstart in this terminal and write it as an HTML page")
    demo.add_argument("notebook", nargs="?", type=Path, help="the quickstart by default")
    demo.add_argument(
        "--out", type=Path, default=Path("agentfly-demo"),
        help="an empty or new folder, or the folder of an earlier demo; %(default)s by default",
    )  # fmt: skip
    demo.add_argument("--save", action="store_true", help="write the outputs back into the notebook")
    commands.add_parser("doctor", help="check the installation and print commands for what is missing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command-line interface.

    Args:
        argv: The arguments; by default `sys.argv[1:]`.

    Returns:
        The exit code; 0 on success.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  (a checkout can be run with any Python)
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"agentfly-kit: needs Python 3.11 or newer, got {version} ({sys.executable})", file=sys.stderr)
        return 1
    parser = _parser()
    given = sys.argv[1:] if argv is None else argv
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help", "--version")):
        given = ["lab", *given]
    arguments = parser.parse_args(given)
    try:
        if arguments.command == "doctor":
            return _doctor()
        if arguments.command == "demo":
            return _demo(arguments.notebook, arguments.out, arguments.save)
        return _lab(arguments.folder, arguments.port, not arguments.no_browser)
    except _CommandError as error:
        print(f"agentfly-kit: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
