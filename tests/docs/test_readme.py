"""The examples of README.md run as pasted, in a notebook cell and as a script; the site's sources are complete."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import waiting
from paths import ROOT

import agentfly_kit as af

README = (ROOT / "README.md").read_text(encoding="utf-8")
CELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance(colors="nocolor").run_cell(sys.stdin.read()).raise_error()
"""


EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def example(steps: int, held_out: int) -> str:
    """Return the first example with fewer steps and held-out tasks."""
    code = EXAMPLES[0]
    shorter = code.replace("steps=24", f"steps={steps}").replace("tasks.test)", f"tasks.test[:{held_out}])")
    assert shorter != code
    return str(shorter)


def as_script(code: str) -> str:
    """Replace each await with asyncio.run, as README.md says."""
    return "import asyncio\n" + re.sub(
        r"await (af\.\w+\(.*?\))(\)?)$", r"asyncio.run(\1)\2", code, flags=re.MULTILINE
    )


@pytest.mark.parametrize("how", [pytest.param("cell", marks=pytest.mark.real), "script"])
def test_the_first_example_runs_as_pasted(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = example(steps=1, held_out=8)
    if how == "script":
        code = as_script(code)
        assert "await" not in code
        (tmp_path / "example.py").write_text(code, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        runpy.run_path("example.py", run_name="__main__")
        output = capsys.readouterr().out
    else:
        code += "".join(EXAMPLES[1:]) + "\nprint(stats)"  # the later examples continue the first
        command = [sys.executable, "-c", CELL]
        done = subprocess.run(
            command, cwd=tmp_path, input=code, capture_output=True, text=True, timeout=waiting.GUARD
        )
        assert done.returncode == 0, done.stderr
        output = done.stdout
        assert "Stats(" in output
    assert "Evaluation(" in output
    assert (tmp_path / "runs" / "calculator" / "steps.jsonl").read_text().count("\n") == 1


def test_the_api_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto(?:class|function|exception|data):: agentfly_kit\.(\w+)$", reference, re.MULTILINE)
    assert sorted(named) == sorted(af._WHERE)
    assert set(re.findall(r"automodule:: agentfly_kit\.([\w.]+)", reference)) == set(af._MODULES.values())


def test_the_moving_picture_is_small() -> None:
    assert "docs/images/live.webp" in README
    assert (ROOT / "docs" / "images" / "live.webp").stat().st_size < 1_500_000


def test_the_page_for_pypi_has_no_relative_link() -> None:
    page = (ROOT / "docs" / "pypi.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https://)|<img", page)


def test_the_site_draws_the_figures_of_notebooks() -> None:
    """Every saved plotly figure becomes HTML for plotly.js, which each page loads once and from the site."""
    conf, drawn = runpy.run_path(str(ROOT / "docs" / "conf.py")), 0
    assert [Path(path).name for path in conf["html_static_path"]] == ["plotly.min.js"]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        saved = path.read_text(encoding="utf-8")
        source = [saved]
        conf["_draw_figures"](None, f"notebooks/{path.stem}", source)
        bundles = [
            output.get("data", {}) for cell in json.loads(source[0])["cells"] for output in cell.get("outputs", [])
        ]
        html = "".join("".join(data.get("text/html", "")) for data in bundles)
        assert not any("plotly" in kind for data in bundles for kind in data)
        assert html.count("Plotly.newPlot(") == saved.count('"application/vnd.plotly.v1+json"')
        assert html.count('src="../_static/plotly.min.js"') == ("Plotly.newPlot(" in html)
        drawn += html.count("Plotly.newPlot(")
    assert drawn >= 10


@pytest.mark.long
def test_a_broken_link_fails_the_build_of_the_site(tmp_path: Path) -> None:
    """A copy of the site with links to a missing page and to a missing heading does not build."""
    pytest.importorskip("sphinx")
    site = tmp_path / "docs"
    site.mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", site)
    links = ("[a](missing.md)", "[b](#no-such-heading)", "[c](other.md#no-such-heading)")
    (site / "other.md").write_text("# Other\n", encoding="utf-8")
    (site / "index.md").write_text(
        "# Site\n\n" + "\n".join(links) + "\n\n```{toctree}\nother\n```\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", site, tmp_path, tmp_path / "out"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=waiting.GUARD)
    assert done.returncode != 0
    assert done.stderr.count("WARNING") == len(links), done.stderr


def test_the_files_that_process_a_token_are_short() -> None:
    """Count the whole files, but of files with a list of functions only these. README.md states the rounded numbers."""
    section = README.partition("## Read the code")[2].partition("## ")[0]
    rows = re.findall(r"^\| \[.*?\]\((.*?)\)(?:: `(\w+)`)? \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 6
    whole = path = 0
    for file, function, shows in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        lines = len(text.splitlines())
        whole += lines
        if function:
            names = {function, *re.findall(r"`(_\w+)`", shows)}
            found = [
                node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in names
            ]
            assert len(found) == len(names)
            lines = sum(node.end_lineno - node.lineno + 1 for node in found if node.end_lineno is not None)
        path += lines
    assert path <= 1500
    stated = re.search(r"about ([\d,]+) lines, of which you can skip (\d+)", section)
    assert stated is not None
    assert abs(whole - int(stated[1].replace(",", ""))) <= 50 and abs(whole - path - int(stated[2])) <= 50
