"""Processes of this machine, and test programs in two processes that communicate through torch.distributed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from waiting import GUARD


def running(command: str) -> set[int]:
    """Return the processes of this machine whose command line contains a text."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if command.encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files() -> set[tuple[str, str]]:
    """Return the open descriptors of this process with what they refer to. Sockets and pipes have unique names."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def run_two(program: Path, folder: Path) -> list[dict[str, Any]]:
    """Run `torchrun program folder` with two ranks, and return the contents of the files <rank>.pt that they saved."""
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(program.parent), str(program.parent.parent), *sys.path[1:]]),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(program), str(folder)], env=environment, capture_output=True, text=True, timeout=2 * GUARD
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
