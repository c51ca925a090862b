"""A Jupyter kernel that is forked from a process which has imported the large packages: saves six seconds per notebook.

The library is not among them: its modules are imported by the notebook. `server` starts the process and returns the
environment in which `kernel_name="forked"` refers to it. Jupyter starts this file as the kernel: it sends its own
arguments, environment and working folder to the process, and ends when the forked kernel ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PACKAGES = """
IPython, anywidget, docstring_parser, httpx2, ipykernel.kernelapp, ipywidgets, jinja2, nbformat, numpy, pandas,
pandas.io.formats.style, plotly.graph_objs._figure, plotly.io._renderers, pydantic.main, safetensors.torch, sympy,
tokenizers, torch, torch._dynamo, torch.optim, tqdm.auto, transformers, transformers.masking_utils,
transformers.modeling_utils, transformers.models.auto.modeling_auto, transformers.models.qwen3.modeling_qwen3,
transformers.tokenization_utils_tokenizers
"""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """Run the process, and yield the environment for programs that start kernels. All kernels end with the process."""
    address = folder / "socket"
    spec = folder / "kernels" / "forked" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-S", __file__, str(address), "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "forked", "language": "python"}))
    process = subprocess.Popen([sys.executable, __file__, str(address)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield {**os.environ, "JUPYTER_PATH": str(folder)}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def connect(address: str, *arguments: str) -> None:
    """Ask the process for a kernel, and wait until the kernel has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts a kernel before it shuts it down
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.recv(1)


def serve(address: str) -> None:
    """Fork a kernel for each connection."""
    import importlib

    for name in PACKAGES.split(","):
        importlib.import_module(name.strip())
    # The only other thread is that of pyarrow's allocator, which is prepared for forks.
    threads = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")}
    assert len(threads - {"jemalloc_bg_thd"}) == threading.active_count() == 1, threads
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            break
        connection.close()
    # In the kernel. The connection closes when it ends.
    from ipykernel.kernelapp import launch_new_instance

    request = json.loads(connection.makefile().readline())
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    launch_new_instance(argv=["-f", *request["arguments"]])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        connect(*sys.argv[1:])
    else:
        serve(sys.argv[1])
