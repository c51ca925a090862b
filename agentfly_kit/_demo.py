"""Run a notebook in a clean folder, show its progress in the terminal, and write a self-contained HTML page.

    python -m agentfly_kit demo [notebook] [--out agentfly-demo]
    python -m agentfly_kit demo notebooks/02_two.ipynb --save     # save the outputs in the notebook

The last line printed is the result measured by the notebook: `success: <before> -> <after>`. If a cell fails, the
script prints the cell and its traceback and exits with code 1. Training progress is read from the files that training
runs write, so it can be shown for any notebook.
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
from pathlib import Path
from typing import Any

SUCCESS = re.compile(r"success: (\d*\.\d+) -> (\d*\.\d+)(?![^\s'\"])")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
WIDGET = "application/vnd.jupyter.widget-view+json"


class Interrupted(Exception):
    """Raised when SIGINT or SIGTERM stops the run."""


class Display:
    """Progress display with one line per cell. In a terminal, the line of the running cell is updated in place."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.drawn = ""

    def line(self, text: str) -> None:
        print(("\r\x1b[K" if self.terminal else "") + text, flush=True)
        self.drawn = ""

    def redraw(self, text: str) -> None:
        if self.terminal and text != self.drawn:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[K" + text[:width], end="", flush=True)
            self.drawn = text


class Follower:
    """Reader of lines that training runs append to steps.jsonl. Invalid lines are skipped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.offsets = folder, dict[Path, int]()

    def new(self) -> list[dict[str, Any]]:
        records = []
        for path in sorted(self.folder.glob("runs/*/steps.jsonl")):
            found, self.offsets[path] = read_steps(path, self.offsets.get(path, 0))
            records += found
        return records


def read_steps(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the records in the complete lines after byte `offset`, and the offset after these lines."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records, offset + len(whole)


def step_text(record: dict[str, Any]) -> str:
    """Format a record, for example as `step 7   reward 0.61   success 0.66`. A record may contain nested dicts."""
    flat = dict(record)
    for value in record.values():
        if isinstance(value, dict):
            flat = {**value, **flat}
    parts = [f"step {flat['step']:>3}"] if "step" in flat else []
    names = {
        "reward": ("reward_mean", "reward"),
        "success": ("success",),
        "kl": ("approx_kl",),
        "entropy": ("entropy",),
    }
    for label, keys in names.items():
        value = next((flat[key] for key in keys if isinstance(flat.get(key), int | float)), None)
        if value is not None:
            parts.append(f"{label} {value:.3f}")
    return "   ".join(parts)


def title(source: str) -> str:
    """Return a short title for a cell: its first comment, or its first line if it has no comment."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    comment = next((line.lstrip("# ") for line in lines if line.startswith("#") and "NBVAL" not in line), None)
    return (comment or (lines[0] if lines else ""))[:70]


def texts(cell: Any) -> list[str]:
    """Return the plain-text outputs of a code cell, in order."""
    found = []
    for output in cell.get("outputs", []):
        found.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return ["".join(text) for text in found]


def static(notebook: Any) -> None:
    """Remove widget views that have a text/html alternative, so that the page is readable without a kernel."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data.pop(WIDGET, None)
                output.get("metadata", {}).pop("agentfly_kit", None)  # id of a view that no longer exists


def measured(notebook: Any) -> re.Match[str] | None:
    """Return the last line `success: <before> -> <after>` that the notebook printed, if any."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [match for cell in code for text in texts(cell) for match in SUCCESS.finditer(text)]
    return found[-1] if found else None


def heading(notebook: Any) -> str | None:
    """Return the first heading of the notebook."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = re.search(r"^# +(.+)$", text, flags=re.MULTILINE)
    return found.group(1) if found else None


def result(notebook: Any, folder: Path, wall: float, cpu: float) -> str:
    """Return a summary as HTML: success before and after training, steps, times, and the curve of the newest run."""
    runs = sorted(folder.glob("runs/*/steps.jsonl"), key=lambda path: path.stat().st_mtime)
    records = read_steps(runs[-1])[0] if runs else []
    points = [
        (record["step"], record["success"])
        for record in records
        if all(isinstance(record.get(key), int | float) for key in ("step", "success"))
    ]
    match = measured(notebook)
    parts = [f"{len(records)} training step{'s' if len(records) > 1 else ''}"] if records else []
    parts += [f"{wall:.0f} s in total", f"{cpu:.0f} s of CPU time"]
    if match:
        before, after = (float(number) for number in match.groups())
        head = f"<b>{before:.0%} → {after:.0%}</b> success before and after training"
    else:
        head = "The notebook measured no success."
    about = f'<p class="demo-head">{head}</p><p>{" · ".join(parts)}</p>'
    return f'<header class="demo">{about}{curve(points) if len(points) > 1 else ""}</header>'


def curve(points: list[tuple[float, float]]) -> str:
    """Return an SVG plot of success against the training step, in the colours of the page."""
    width, height, left, right, top, bottom = 560, 190, 44, 12, 10, 34
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return left + (width - left - right) * (step - first) / (last - first)

    def y(success: float) -> float:
        return top + (height - top - bottom) * (1 - success)

    lines = "".join(
        f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="demo-grid"/>'
        f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0%}</text>'
        for value in (0, 0.5, 1)
    )
    names = "".join(
        f'<text x="{x(step):.1f}" y="{height - 18}" text-anchor="middle">{step}</text>' for step in (first, last)
    )
    middle, caption = (left + width - right) / 2, "success of the chains sampled in each training step"
    names += f'<text x="{middle:.1f}" y="{height - 3}" text-anchor="middle">{caption}</text>'
    path = " ".join(f"{x(step):.1f},{y(success):.1f}" for step, success in points)
    label = (
        f"Success of the sampled chains, from {points[0][1]:.0%} in step {first} to {points[-1][1]:.0%} in step {last}"
    )
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<title>{label}</title>{lines}{names}<polyline points="{path}" class="demo-line"/></svg>'
    )


STYLE = """
    :root { color-scheme: light dark; }
    .demo { margin-left: calc(var(--jp-cell-prompt-width) + 22px); color: var(--jp-content-font-color1);
      font-family: var(--jp-content-font-family); }
    .demo p { margin: 4px 0; }
    .demo-head { font-size: 1.3em; }
    .demo-head b { font-size: 2em; margin-right: 0.2em; }
    .demo svg { max-width: 100%; height: auto; fill: currentColor; font-size: 12px; }
    .demo-grid { stroke: var(--jp-border-color1); }
    .demo-line { fill: none; stroke: var(--jp-brand-color1); stroke-width: 2.5; }
"""


def page(notebook: Any, name: str, top: str = "") -> str:
    """Return the executed notebook as one HTML page that loads nothing from the network.

    By default, nbconvert's page loads require.js, MathJax, Mermaid and the widget manager from CDNs. All scripts and
    remote images are removed; formulas are shown as LaTeX source. The page supports light and dark colour schemes.

    Args:
        name: title of the page if the notebook has no heading.
        top: HTML to show above the first cell.
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
        <style>{{ resources.demo.style }}</style>
        {%- endblock -%}
        {%- block body_header -%}{{ super() }}{{ resources.demo.top }}{%- endblock -%}
    """
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"offline.html.j2": template})],
        template_file="offline.html.j2",
        embed_images=True,
    )
    resources = {"metadata": {"name": heading(notebook) or name}, "demo": {"style": STYLE, "top": top}}
    body, _ = exporter.from_notebook_node(notebook, resources=resources)
    body = re.sub(r"<script\b.*?</script\s*>", "", body, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"\ssrc(set)?\s*=\s*([\"'])\s*(https?:)?//.*?\2", "", body, flags=re.DOTALL | re.IGNORECASE)


async def execute(notebook: Any, folder: Path, display: Display) -> None:
    """Run all cells with `folder` as the working directory. The kernel is always stopped on return."""
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    code_cells = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    follower = Follower(folder)
    running: dict[str, Any] = {"head": "starting the kernel", "since": time.perf_counter(), "step": ""}

    def starts(cell: Any, cell_index: int) -> None:
        number = code_cells.index(cell_index) + 1 if cell_index in code_cells else 0
        running.update(head=f"[{number:2d}/{len(code_cells)}] {title(cell.source)}", since=time.perf_counter(), step="")

    def ended(cell: Any, cell_index: int, execute_reply: Any) -> None:
        show()
        display.line(f"{running['head']:<76} {time.perf_counter() - running['since']:6.1f} s")
        running.update(head="", step="")

    def show() -> None:
        for record in follower.new():
            running["step"] = step_text(record)
            if running["step"] and not display.terminal:
                display.line(f"        {running['step']}")
        if running["head"]:
            seconds = time.perf_counter() - running["since"]
            display.redraw(f"{running['head']}   {running['step']}   {seconds:.0f} s")

    async def keep_showing() -> None:
        while True:
            show()
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
        on_cell_executed=ended,
    )
    # nbclient's context manager is unsuitable: its signal handlers kill the kernel but leave the client waiting for a
    # reply. Instead, a signal cancels the run, and the `finally` block stops the kernel.
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
    """Run the notebook at `path` in the folder `out`; with `save`, write its outputs back. Return the exit code."""
    name = re.sub(r"^\d+_", "", path.stem)
    if not path.exists():
        print(f"demo: no notebook {path}", file=sys.stderr)
        return 1

    # Only a folder with this marker file may be emptied.
    folder = out.resolve()
    mark = folder / ".agentfly-demo"
    if folder.is_dir() and any(folder.iterdir()):
        if not mark.exists():
            print(f"demo: {folder} contains other files; choose an empty folder with --out", file=sys.stderr)
            return 1
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()

    # Use one thread, which is fastest for a tiny model, disable downloads, and prefer this environment's kernel to a
    # kernel with the same name in the home directory.
    for key, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JUPYTER_PREFER_ENV_PATH": "1"}.items():
        os.environ.setdefault(key, value)

    import nbformat
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    display, started = Display(), time.perf_counter()
    display.line(f"{path.name} in {os.path.relpath(folder)}")
    failure: Exception | None = None
    try:
        asyncio.run(execute(notebook, folder, display))
    except (CellExecutionError, DeadKernelError) as error:
        failure = error
    except Interrupted:
        display.line("demo: interrupted; the kernel is stopped")
        return 130

    wall, used = time.perf_counter() - started, os.times()
    cpu = used.children_user + used.children_system  # the kernel and its child processes have exited
    static(notebook)
    nbformat.write(notebook, folder / path.name)
    html = folder / f"{name}.html"
    html.write_text(page(notebook, name, result(notebook, folder, wall, cpu)), encoding="utf-8")
    display.line(
        f"{wall:.0f} s, {cpu:.0f} s of CPU time; the page: {os.path.relpath(html)}, {html.stat().st_size / 1e6:.1f} MB"
    )
    if failure is not None:
        text = str(failure)
        print(text if display.terminal else ESCAPES.sub("", text), file=sys.stderr)
        return 1
    if save:
        nbformat.write(notebook, path)
        display.line(f"saved {path}")
        return 0
    match = measured(notebook)
    if match is None:
        print("demo: all cells ran, but none printed a line `success: <before> -> <after>`", file=sys.stderr)
        return 1
    print(match.group())
    return 0
