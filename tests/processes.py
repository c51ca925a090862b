"""Processes of this machine, and test programs in two processes that communicate through torch.distributed."""

from __future__ import annotations

import contextlib
import os
import socket
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


def open_files() -> set[tuple[str, str]]:
    """Return the open descriptors of this process with what they refer to. Sockets and pipes have unique names."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def run_two(program: Path, folder: Path) -> list[dict[str, Any]]:
    """Run `python program folder` as two ranks, and return the contents of the files <rank>.pt that they saved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(program.parent), str(program.parent.parent), *sys.path[1:]]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=GUARD)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
