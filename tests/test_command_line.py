"""`python -m agentfly_kit`: copying the course, and error messages that contain the remedy."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from levels import STRICT
from paths import ROOT
from waiting import GUARD

import agentfly_kit as af
from agentfly_kit import __main__ as command_line

SHIPPED = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command and folder of each JupyterLab that would have been started."""
    calls: list[Any] = []

    def start(command: list[str], folder: Path, environment: dict[str, str]) -> int:
        calls.append((command, folder, environment))
        return 0

    monkeypatch.setattr(command_line, "_start", start)
    return calls


def test_without_arguments_the_course_is_copied_and_opened(started: list[Any]) -> None:
    assert command_line.main([]) == 0
    ((command, folder, environment),) = started
    assert command[:4] == [sys.executable, "-m", "jupyterlab", "--LabApp.default_url=/lab/tree/index.ipynb"]
    assert sorted(path.name for path in Path("agentfly-course").glob("*.ipynb")) == SHIPPED
    assert (folder, environment["JUPYTER_PREFER_ENV_PATH"]) == (Path("agentfly-course"), "1")
    assert command_line.main(["--no-browser"]) == 0
    assert "--no-browser" in started[1][0]


def test_a_changed_notebook_is_kept_and_an_unchanged_one_is_updated(
    started: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    for name in ("01_quickstart.ipynb", "02_one_chain.ipynb"):
        (new / name).write_text("version 1")
    monkeypatch.setattr(command_line, "_course", lambda: new)
    assert command_line.main(["lab", "mine"]) == 0
    Path("mine/01_quickstart.ipynb").write_text("my work")
    for name in ("01_quickstart.ipynb", "02_one_chain.ipynb"):
        (new / name).write_text("version 2")
    capsys.readouterr()
    assert command_line.main(["lab", "mine"]) == 0
    assert Path("mine/01_quickstart.ipynb").read_text() == "my work"
    assert Path("mine/02_one_chain.ipynb").read_text() == "version 2"
    assert "kept your changed 01_quickstart.ipynb" in capsys.readouterr().out


def test_every_link_in_the_course_leads_to_a_notebook_of_the_course(tmp_path: Path) -> None:
    assert command_line.copy_course(tmp_path) == []
    links: dict[str, list[str]] = {}
    for path in tmp_path.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        links[path.name] = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
        local = [link for link in links[path.name] if not link.startswith("https://")]
        assert [link for link in local if not (tmp_path / link).is_file()] == [], path.name
    assert links["index.ipynb"].count("01_quickstart.ipynb") == 2
    assert set(links["index.ipynb"]) == links.keys() - {"index.ipynb"}


@pytest.mark.parametrize("arguments", [["lab"], ["demo"]])
def test_a_missing_package_names_the_extra(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    assert command_line.main(arguments) == 1
    assert 'is not installed; type: python -m pip install "agentfly_kit[lab]"' in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_folder_that_cannot_be_written(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    for command in (["lab", "file/here"], ["demo", "--out", "file/here"]):
        assert command_line.main(command) == 1
        assert "cannot write to file/here (Not a directory); choose another folder" in capsys.readouterr().err
    assert started == []


@pytest.mark.skipif(bool(STRICT), reason=STRICT)
def test_a_demo_that_cannot_be_saved_runs_nothing(tmp_path: Path) -> None:
    locked, out = tmp_path / "locked", tmp_path / "out"
    locked.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), locked / "mine.ipynb")
    read_only = ["bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--ro-bind", locked, locked]
    demo = [sys.executable, "-m", "agentfly_kit", "demo", locked / "mine.ipynb", "--save", "--out", out]
    done = subprocess.run([*read_only, *demo], capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 1
    assert done.stderr == f"demo: cannot write to {locked / 'mine.ipynb'}; leave out --save\n"
    assert not out.exists()


def test_an_older_python_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert command_line.main([]) == 1
    assert "needs Python 3.11 or newer, got 3.9" in capsys.readouterr().err
    for name in ("__main__.py", "__init__.py"):  # files that an old Python parses before the version check
        ast.parse((ROOT / "agentfly_kit" / name).read_text(encoding="utf-8"), feature_version=(3, 9))


def test_version_and_help() -> None:
    for option, expected in {"--version": f"agentfly_kit {af.__version__}", "--help": "doctor"}.items():
        done = subprocess.run([sys.executable, "-m", "agentfly_kit", option], capture_output=True, text=True)
        assert done.returncode == 0
        assert expected in done.stdout


def test_the_doctor_reports_two_installed_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "site"
    (older / "agentfly_kit-0.1.0.dist-info").mkdir(parents=True)
    (older / "agentfly_kit-0.1.0.dist-info" / "METADATA").write_text("Name: agentfly_kit\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(older))
    importlib.invalidate_caches()
    assert command_line.main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert f"agentfly_kit {af.__version__} in {ROOT / 'agentfly_kit'}; also installed: 0.1.0 in {older}" in report
    assert "pip uninstall agentfly_kit" in report
