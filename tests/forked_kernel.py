"""Jupyter kernels that are forked from a process which has imported the large packages: saves seconds for each kernel.

The library is not among them: its modules are imported by each notebook. `server` starts the process and yields an
environment in which the kernel named "python3" refers to it. Jupyter starts this file as the kernel: it sends its own
arguments, environment and working folder to the process. It forwards interrupts to the forked kernel, and each of the
two ends with the other.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-S", __file__, str(address), "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    process = subprocess.Popen(
        [sys.executable, __file__, str(address)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield {"JUPYTER_PATH": str(folder)}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def connect(address: str, *arguments: str) -> None:
    """Ask the process for a kernel, and wait until the kernel has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        connection.sendall(json.dumps(request).encode() + b"\n")
        kernel = int(connection.recv(20))

        def forward(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(kernel, number)

        signal.signal(signal.SIGINT, forward)
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
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    others: dict[object, tuple[socket.socket, int, int]] = {}  # by connection and by descriptor of the process
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = json.loads(connection.makefile().readline())
                if (kernel := os.fork()) == 0:
                    for each in (connection, listener, selector, *(other[0] for other in others.values())):
                        each.close()
                    return run(request)
                connection.sendall(str(kernel).encode())
                each = (connection, kernel, os.pidfd_open(kernel))
                for end in (connection, each[2]):
                    others[end] = each
                    selector.register(end, selectors.EVENT_READ)
            elif key.fileobj in others:  # the kernel, or the program that Jupyter started, has ended
                connection, kernel, descriptor = others[key.fileobj]
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.waitpid(kernel, 0)
                for end in (connection, descriptor):
                    selector.unregister(end)
                    del others[end]
                os.close(descriptor)
                connection.close()


def run(request: dict[str, Any]) -> None:
    """Run a kernel in this process, which has just been forked."""
    from ipykernel.kernelapp import launch_new_instance

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    launch_new_instance(argv=["-f", *request["arguments"]])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        connect(*sys.argv[1:])
    else:
        serve(sys.argv[1])
