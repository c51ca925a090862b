"""Every notebook runs from top to bottom and is readable without a kernel; so is the page written by `make demo`."""

import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
import waiting
from checks import CHECKS, complete, with_answers
from nbclient import NotebookClient
from paths import ROOT
from processes import alive
from smaller import SMALLER

from agentfly_kit import __main__ as command_line
from agentfly_kit import _demo
from agentfly_kit.policy.gguf import models_folder

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = ROOT / "notebooks" / "01_quickstart.ipynb"  # run by `make test`; `make test-real` runs all notebooks
# The notebooks of docs/neighbours.md; each compares the figures of a paper with its own under the same heading.
RELATED = [path.stem for path in NOTEBOOKS if path.stem[:2] in ("17", "20", *map(str, range(22, 31)))]
COMPARISON = "What the authors report, and what we measure"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


# The model of this notebook is not part of the package.
REAL = ROOT / "notebooks" / "21_real_model.ipynb"
WITHOUT_MODEL = pytest.mark.skipif(
    not (models_folder() / "smollm2").exists(), reason="needs: scripts/install smollm2"
)


def marked(*marks: pytest.MarkDecorator, but: Path | None = None) -> list[Any]:
    """Return the notebooks as parameters of a test that runs them, with these marks except on one of them."""
    return [
        pytest.param(path, marks=[*(marks if path != but else ()), *([WITHOUT_MODEL] if path == REAL else ())])
        for path in NOTEBOOKS
    ]


def by_name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_fit_to_read(path: Path) -> None:
    """All outputs are readable without a kernel, and no output needs one."""
    assert path.stat().st_size < 1_000_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata, "saved widget state; nbstripout takes it out"
    assert notebook.cells[0].cell_type == "markdown", "the first cell: the idea, what you will see, how long it takes"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it once, top to bottom"
    for cell in cells:
        setting_up = re.search(r"^\s*[!%]+(pip|conda)|sys\.path|nest_asyncio", cell.source, flags=re.MULTILINE)
        assert not setting_up or cell.id == "install", cell.source
        for output in cell.outputs:
            assert output.output_type != "error" or "NBVAL_RAISES_EXCEPTION" in cell.source, output
            assert output.get("name") != "stderr", f"a saved warning: {output.text}"
            data = output.get("data", {})
            assert WIDGET not in data or "text/html" not in data, "a widget view hides the static form beside it"
            assert "<tool_call>" not in data.get("text/html", ""), "unescaped: a browser hides it"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|work|Users|opt|workspace)/|/tmp/tmp|loading the policy", text), (
        "a machine's path"
    )
    changing = re.search(r" at 0x[0-9a-f]+|/proc/[0-9]+", text)
    assert not changing, f"an address or a process, different in each run: {changing}"


def test_checks_belong_to_notebooks() -> None:
    assert CHECKS.keys() <= {path.stem for path in NOTEBOOKS}


def test_every_formula_is_closed() -> None:
    """A formula with an odd number of dollar signs, or a doubled backslash, would be shown as text."""
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                prose = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)
                assert re.sub(r"\$\$.*?\$\$|\$[^$]+?\$", "", prose, flags=re.DOTALL).count("$") == 0, cell.source
                assert not re.search(r"\\\\[a-z]", prose), f"a doubled backslash: {cell.source}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_live_view_is_above_the_cell_that_awaits_its_run(path: Path) -> None:
    """The saved outputs of the next cell, which is on the screen during the run, are collapsed to their first line."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for i, cell in enumerate(cells):
        live = re.search(r"(Train|Rollout)View\(\w+\)", cell.source)
        assert not (live and "await " in cell.source[live.end() :]), cell.source
        if live and re.search(r"^await run$(?!\nafter)", cells[i + 1].source, flags=re.MULTILINE):
            for after in cells[i + 2 : i + 3]:
                assert after.metadata.jupyter.outputs_hidden
                assert not re.search(r"\d\.\d", after.outputs[0].text.splitlines()[0]), "a result is visible"


def test_the_quickstart_is_short() -> None:
    assert len(nbformat.read(ROOT / "notebooks" / "01_quickstart.ipynb", as_version=4).cells) <= 13


@pytest.mark.parametrize(
    ("name", "answers", "broken"),
    [
        ("02_one_chain", 1, 0), ("06_widgets", 3, 1), ("07_masked_ppo", 2, 2), ("08_algorithms", 1, 1),
        ("09_conventions", 1, 1), ("31_servers", 2, 0), *((name, 2, 1) for name in RELATED),
    ],
)  # fmt: skip
def test_there_are_exercises_and_their_answers_are_run(name: str, answers: int, broken: int) -> None:
    """Ensure that the next test has answers to run. Answers that raise are checked by the cell after them."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    before = len(notebook.cells)
    told = [i for i, cell in enumerate(notebook.cells) if re.search("^## Break it", cell.source, flags=re.MULTILINE)]
    assert len(told) >= broken
    assert all(re.search("assert |raise AssertionError", notebook.cells[i + 1].source) for i in told)
    assert len(with_answers(notebook).cells) >= before + answers


@pytest.mark.parametrize("name", RELATED)
def test_notebooks_on_related_systems_have_the_same_parts(name: str) -> None:
    """A notebook of docs/neighbours.md is short, and compares the authors' figures with ours in one table."""
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    hidden = {"source_hidden": True}  # drawings and checks
    code = "\n".join(c.source for c in cells if c.cell_type == "code" and c.metadata.get("jupyter") != hidden)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 160
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    title, headings = text.splitlines()[0], re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert re.search(r"^# .* \(\w[\w -]+\)$", title), f"without the name of a system: {title}"
    exercises = re.findall(r"^\*\*Exercise (\d)\.\*\*", text, flags=re.MULTILINE)
    assert exercises == [str(i + 1) for i in range(len(exercises))] and len(exercises) >= 2
    assert text.count("<details>") == text.count("</details>") >= len(exercises)
    assert any(heading.startswith("Break it") for heading in headings)
    assert [heading for heading in headings if "author" in heading] == [COMPARISON]
    section = text.partition(f"## {COMPARISON}")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\|[-:| ]+\|$", section, flags=re.MULTILINE)) == 1, "one table"
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any({PLOTLY, "image/svg+xml"} & output.get("data", {}).keys() for output in outputs), "a figure"


@pytest.mark.parametrize("path", marked(pytest.mark.real, but=FIRST), ids=by_name)
def test_runs_top_to_bottom(
    path: Path, tmp_path: Path, forked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a notebook with the settings of `SMALLER` in an empty folder. A cell that raises is an error."""
    notebook = complete(path)
    for old, new in SMALLER.get(path.stem, {}).items():
        changed = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        assert changed, f"not in {path.name}: {old}"
        for cell in changed:
            cell.source = cell.source.replace(old, new)
    for name, value in forked.items():
        monkeypatch.setenv(name, value)
    where = {"metadata": {"path": str(tmp_path)}}
    limits = {"timeout": 1800, "startup_timeout": int(waiting.GUARD)}
    NotebookClient(notebook, **limits, kernel_name="python3", resources=where).execute()


@pytest.mark.parametrize("path", marked(pytest.mark.long), ids=by_name)
def test_runs_top_to_bottom_as_saved(path: Path, tmp_path: Path) -> None:
    """Run nbval in an empty folder, with the notebook's own settings and a kernel that has imported nothing."""
    nbformat.write(complete(path), tmp_path / path.name)
    options = ("--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=1800", "--color=no")
    starting = f"--nbval-kernel-startup-timeout={waiting.GUARD}"  # by default 60 s
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, starting, path.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# ---- `agentfly-kit demo`, with notebooks of a few lines


class Requests(HTMLParser):
    """Parser that collects everything in a page that makes a browser load or run something."""

    LOADS = ("src", "srcset", "poster", "background", "data", "action", "formaction")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.style = tag == "style"
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.found.append(f"<{tag}>")
        for name, value in attributes:
            loads = name in self.LOADS or (tag in ("link", "image", "use") and name in ("href", "xlink:href"))
            if loads and not (value or "").startswith(("data:", "#")):
                self.found.append(f"<{tag} {name}={value}>")
            if name == "style":
                self.css(value or "")
            if name.startswith("on"):
                self.found.append(f"<{tag} {name}>")

    def handle_data(self, data: str) -> None:
        if self.style:
            self.css(data)

    def handle_endtag(self, tag: str) -> None:
        self.style = False

    def css(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        self.found += re.findall(r"@import[^;]*", text)
        self.found += [
            url for url in re.findall(r"url\(\s*['\"]?([^)]{0,80})", text) if not url.startswith(("data:", "#"))
        ]


def requests(html: str) -> list[str]:
    parser = Requests()
    parser.feed(html)
    parser.close()
    return parser.found


def write(path: Path, *sources: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Return a function that runs `agentfly-kit demo` and returns the exit code and what it wrote to both streams."""

    def run(notebook: Path, out: Path = tmp_path / "out") -> tuple[int, str, str]:
        code = command_line.main(["demo", str(notebook), "--out", str(out)])
        return code, *capsys.readouterr()

    return run


def test_demo_shows_progress_and_leaves_a_whole_page(demo: Any, tmp_path: Path) -> None:
    notebook = write(
        tmp_path / "07_toy.ipynb",
        "# Train a little\n"
        "import json, pathlib\n"
        "folder = pathlib.Path('runs/toy'); folder.mkdir(parents=True)\n"
        "steps = [json.dumps({'step': s, 'reward': 0.5, 'success': s / 8 + 0.25}) for s in (2, 3)]\n"
        "lines = [*steps, '{\"step\": 4']\n"
        "_ = (folder / 'steps.jsonl').write_text('\\n'.join(lines))",
        "from IPython.display import HTML, display\n"
        f"display({{'{WIDGET}': {{'model_id': '1'}}, 'text/html': '<b>still</b>'}}, raw=True)\n"
        'display(HTML(\'<script src="https://example.org/a.js"></script><img src="https://example.org/a.png">\'))\n'
        "display(HTML('<script>document.write(1)</script>'))",
        "'success: 0.24 -> 0.95'",
    )
    for _ in range(2):  # the second run overwrites the output of the first
        code, output, errors = demo(notebook)
        assert code == 0, errors
        assert output.splitlines()[-1] == "success: 0.24 -> 0.95" and "Train a little" in output
        assert "step   3   reward 0.500   success 0.625" in output
    html = (tmp_path / "out" / "toy.html").read_text(encoding="utf-8")
    assert "<b>still</b>" in html and "jp-CodeCell" in html and requests(html) == []
    executed = nbformat.read(tmp_path / "out" / "07_toy.ipynb", as_version=4)
    assert [sorted(output.data) for output in executed.cells[1].outputs] == [["text/html"]] + [
        ["text/html", "text/plain"]
    ] * 2


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (i % 8 > 0)) for i, path in enumerate(NOTEBOOKS)],
    ids=by_name,
)
def test_a_page_of_what_is_committed_asks_for_nothing(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)
    _demo.static(notebook)
    page = _demo.page(notebook, path.stem)
    assert requests(page) == []
    assert f"<title>{_demo.heading(notebook)}</title>" in page.replace("&#39;", "'")


def test_the_scan_finds_what_nbconvert_puts_in() -> None:
    """The scan used by the tests of pages must find the external requests in a page made by nbconvert."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook())
    assert "<script>" in requests(html)
    assert [found for found in requests(html) if "require" in found]


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (
            "def f():\n    raise ValueError('the reason')\nf()", 1,
            ["raise ValueError('the reason')", "ValueError: the reason"],
        ),
        ("print('success: soon')", 0, []),
    ],
    ids=["a cell that failed", "no measurement"],
)  # fmt: skip
def test_demo_fails_only_if_a_cell_fails(
    source: str, status: int, said: list[str], demo: Any, tmp_path: Path
) -> None:
    code, _, errors = demo(write(tmp_path / "bad.ipynb", "x = 1", source))
    assert code == status and "\x1b" not in errors
    assert [words for words in said if words not in errors] == []


def test_demo_spares_a_folder_with_other_things(demo: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, errors = demo(write(tmp_path / "toy.ipynb", "1"), tmp_path)
    assert code == 1 and "contains other files" in errors
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.real)])
def test_interrupting_the_demo_leaves_no_kernel(number: signal.Signals, tmp_path: Path) -> None:
    notebook = write(
        tmp_path / "slow.ipynb",
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(3600)",
    )
    command = [sys.executable, "-m", "agentfly_kit", "demo", str(notebook), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pid_file = tmp_path / "out" / "pid"
    try:
        waiting.blocking_until(lambda: process.poll() is not None or (pid_file.exists() and pid_file.read_text()))
        process.send_signal(number)
        output, _ = process.communicate(timeout=waiting.GUARD)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    waiting.blocking_until(lambda: not alive(int(pid_file.read_text())))
