"""Run a notebook in a clean folder, show its progress in the terminal, and write a self-contained HTML page.

    python -m agentfly_kit demo [notebook] [--out agentfly-demo]
    python -m agentfly_kit demo notebooks/02_two.ipynb --save     # save the outputs in the notebook

If the notebook measures `success: <before> -> <after>`, this is the last printed line. If a cell fails, the script
prints the cell and its traceback and exits with code 1. Training progress is read from the files written by
training runs, so it is shown for any notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

SUCCESS = re.compile(r"success: (\d*\.\d+) -> (\d*\.\d+)(?![^\s'\"])")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


class Interrupted(Exception):
    """Raised when SIGINT or SIGTERM stops the run."""


def title(source: str) -> str:
    """Return a short title for a cell: its first comment or, if there is none, its first line."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    comment = next((line.lstrip("# ") for line in lines if line.startswith("#") and "NBVAL" not in line), None)
    return (comment or (lines[0] if lines else ""))[:70]


def static(notebook: Any) -> None:
    """Remove empty outputs, memory addresses and widgets with a text/html version, and describe plotly figures."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if o.get("data") != {}]  # `show_progress` leaves empty outputs
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PLOTLY in data:
                data.setdefault("text/plain", "An interactive figure, shown only in JupyterLab.")
            if "text/plain" in data:
                data["text/plain"] = re.sub(" at 0x[0-9a-f]+", "", data["text/plain"])
            if "text/html" in data:
                data.pop(WIDGET, None)
                output.get("metadata", {}).pop("agentfly_kit", None)  # id of the removed widget


def measured(notebook: Any) -> str | None:
    """Return the last text of the form `success: <before> -> <after>` printed by the notebook, or None."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = ["".join(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs]
    return next((found[-1].group() for text in reversed(texts) if (found := list(SUCCESS.finditer(text)))), None)


def heading(notebook: Any) -> str | None:
    """Return the first heading of the notebook."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = re.search(r"^# +(.+)$", text, flags=re.MULTILINE)
    return found.group(1) if found else None


def page(notebook: Any, name: str) -> str:
    """Convert the executed notebook to a single HTML page that loads nothing from the network.

    By default, nbconvert pages load require.js, MathJax, Mermaid and the widget manager from CDNs. All scripts and
    remote images are removed, and formulas are shown as LaTeX source. The page supports light and dark color schemes.
    `name` is the title if the notebook has no heading.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    template = """
        {%- extends 'lab/index.html.j2' -%}
        {%- block html_head_js -%}{%- endblock -%}
        {%- block html_head_js_mathjax -%}{%- endblock -%}
        {%- block html_head_js_mermaidjs -%}{%- endblock -%}
        {%- block jupyter_widgets -%}{%- endblock -%}
        {%- block html_head_css -%}
        {{ resources.include_css("static/theme-dark.css")
           | replace('<style type="text/css">', '<style media="(prefers-color-scheme: dark)">') }}
        <style>:root { color-scheme: light dark; }</style>
        {%- endblock -%}
    """
    loader = DictLoader({"offline.html.j2": template})
    exporter = HTMLExporter(extra_loaders=[loader], template_file="offline.html.j2", embed_images=True)
    resources = {"metadata": {"name": heading(notebook) or name}}
    body, _ = exporter.from_notebook_node(notebook, resources=resources)
    body = re.sub(r"<script\b.*?</script\s*>", "", body, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"\ssrc(set)?\s*=\s*([\"'])\s*(https?:)?//.*?\2", "", body, flags=re.DOTALL | re.IGNORECASE)


def show_steps(folder: Path, shown: Counter[Path]) -> None:
    """Print the steps that training runs have appended to steps.jsonl. `shown` counts the lines printed per file."""
    for path in sorted(folder.glob("runs/*/steps.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last part is empty or incomplete
        for record in map(json.loads, lines[shown[path] :]):
            numbers = [f"{k} {record[k]:.3f}" for k in ("reward", "success", "approx_kl", "entropy") if k in record]
            print("   ".join([f"        step {record['step']:>3}", *numbers]), flush=True)
        shown[path] = len(lines)


async def execute(notebook: Any, folder: Path) -> None:
    """Run all cells with `folder` as the working directory. The kernel is stopped even if a cell fails."""
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    shown = Counter[Path]()

    def starts(cell: Any, cell_index: int) -> None:
        if cell_index in code_cells:
            number = code_cells.index(cell_index) + 1
            print(f"[{number:2d}/{len(code_cells)}] {title(cell.source)}", flush=True)

    async def keep_showing() -> None:
        while True:
            show_steps(folder, shown)
            await asyncio.sleep(0.2)

    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],  # silences a warning about unencrypted local connections
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=starts,
        on_cell_executed=lambda **_: show_steps(folder, shown),
    )
    # The context manager of nbclient is unsuitable: its signal handlers kill the kernel but leave the client waiting
    # for a reply. Instead, a signal cancels the run, and the `finally` block stops the kernel.
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        this.cancel()

    with contextlib.suppress(NotImplementedError):  # not available on Windows
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    shower = asyncio.ensure_future(keep_showing())
    client.create_kernel_manager()
    try:
        await client.async_start_new_kernel()
        await client.async_start_new_kernel_client()
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
    except (asyncio.CancelledError, DeadKernelError):  # nbclient reports any cancellation as a dead kernel
        if stopped:
            raise Interrupted from None
        raise
    finally:
        shower.cancel()
        if client.kc is not None:
            client.kc.stop_channels()
        if client.km is not None and client.km.has_kernel:
            await client.km.shutdown_kernel(now=True)  # type: ignore[misc]  # km is an AsyncKernelManager


def run_demo(path: Path, out: Path, save: bool = False) -> int:
    """Run the notebook at `path` in the folder `out`. If `save` is True, save its outputs. Return the exit code."""
    name = re.sub(r"^\d+_", "", path.stem)
    if not path.exists():
        print(f"demo: the notebook {path} does not exist", file=sys.stderr)
        return 1

    if save and not os.access(path, os.W_OK):
        print(f"demo: cannot write to {path}; leave out --save", file=sys.stderr)
        return 1
    # Empty the folder only if it contains the marker file of an earlier demo.
    folder = out.resolve()
    mark = folder / ".agentfly-demo"
    try:
        if folder.is_dir() and any(folder.iterdir()):
            if not mark.exists():
                print(f"demo: {folder} contains other files; choose an empty folder with --out", file=sys.stderr)
                return 1
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        print(f"demo: cannot write to {out} ({error.strerror}); choose another folder with --out", file=sys.stderr)
        return 1

    # Use one thread, which is fastest for a tiny model, and disable downloads. Prefer the kernel of this environment to
    # a kernel with the same name in the home directory.
    for key, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JUPYTER_PREFER_ENV_PATH": "1"}.items():
        os.environ.setdefault(key, value)

    import nbformat
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    started = time.perf_counter()
    print(f"{path.name} in {os.path.relpath(folder)}", flush=True)
    failure: Exception | None = None
    try:
        asyncio.run(execute(notebook, folder))
    except (CellExecutionError, DeadKernelError) as error:
        failure = error
    except Interrupted:
        print("demo: interrupted; the kernel is stopped")
        return 130

    static(notebook)
    nbformat.write(notebook, folder / path.name)
    html = folder / f"{name}.html"
    html.write_text(page(notebook, name), encoding="utf-8")
    size = html.stat().st_size / 1e6
    print(f"{time.perf_counter() - started:.0f} s; the page: {os.path.relpath(html)}, {size:.1f} MB", flush=True)
    if failure is not None:
        print(str(failure) if sys.stderr.isatty() else ESCAPES.sub("", str(failure)), file=sys.stderr)
        return 1
    if save:
        nbformat.write(notebook, path)
        print(f"saved {path}")
        return 0
    print(measured(notebook) or "all cells ran")
    return 0
