"""The import rule, and the cost of `import agentfly_kit`. docs/architecture.md has the same table."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dice
from waiting import GUARD

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    "_display",
    "errors seeds",
    "images",
    "types _async",
    "samples task_files",
    "trajectories",
    "chat tasks success batch pool sandboxes advantages losses",
    "tools policy",
    "rewards engines endpoint ppo _doctor",
    "agent",
    "evaluation envs diagnosis",
    "trainer tiny",
    "integrations",
    "widgets",
    "_demo",
    "__main__",
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
LIBRARY = sorted((ROOT / "agentfly_kit").rglob("*.py")) + sorted((ROOT / "widgets").rglob("*.py"))


def module_name(path: Path) -> str:
    """Convert a path to a module name, such as widgets/token.py to agentfly_kit.widgets.token."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "widgets":
        parts.insert(0, "agentfly_kit")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in LIBRARY}


def imported(name: str, path: Path, *, typing: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of every import, also in functions and, if `typing`, under TYPE_CHECKING."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                yield node.lineno, deeper if deeper in MODULES else origin
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from ((node.lineno, str(given.value)) for given in node.args[:1] if isinstance(given, ast.Constant))


def package_of(name: str) -> str:
    """Return the package or module directly below agentfly_kit; "" for agentfly_kit itself."""
    return name.split(".")[1] if "." in name else ""


def test_imports_point_to_a_lower_layer() -> None:
    """Imports within a package are allowed. No module in the library imports names from agentfly_kit itself."""
    wrong = []
    for name, path in MODULES.items():
        # The first imports all modules lazily, and the second the HTML code of other modules when displaying.
        if name in ("agentfly_kit", "agentfly_kit._display"):
            continue
        for line, other in imported(name, path):
            if other.split(".")[0] not in ("agentfly_kit", "widgets") or (
                package_of(other) == package_of(name) and package_of(name)
            ):
                continue
            if LAYER.get(package_of(other), 99) >= LAYER[package_of(name)]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}, which is not in a lower layer")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_modules_import_each_other_in_one_direction() -> None:
    """Imports in functions count, and those under TYPE_CHECKING do not. Two of the widgets open each other."""
    modules = {name: path for name, path in MODULES.items() if package_of(name) not in ("", "widgets")}
    graph = {
        name: {other for _, other in imported(name, path, typing=False)} & modules.keys() - {name}
        for name, path in modules.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_every_file_has_fewer_than_500_lines() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in LIBRARY}
    assert {name: length for name, length in lengths.items() if length >= 500} == {}


def test_every_package_has_a_layer() -> None:
    unknown = {package_of(name) for name in MODULES if package_of(name)} - set(LAYER)
    assert not unknown, f"give {sorted(unknown)} a layer, here and in docs/architecture.md"


def test_the_documentation_has_the_same_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    stated = {
        name: int(number) for number, names in rows for name in re.findall(r"`(\w+)/?`", names) if name in LAYER
    }
    assert stated == LAYER


def test_every_module_says_what_it_is_and_none_prints() -> None:
    wrong = []
    for path in LIBRARY:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            wrong.append(f"{path.relative_to(ROOT)}:1 has no docstring")
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno} prints"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if path.name not in ("__main__.py", "_demo.py")  # the command line
        ]
    assert not wrong, "\n".join(wrong)


def run(code: str, *arguments: str) -> dict[str, list[str]]:
    """Run code in a new interpreter and return the last line of its output, parsed as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_import_is_light_and_changes_nothing() -> None:
    found = run("""
import os, sys, threading, json, warnings
environment, filters, path = dict(os.environ), list(warnings.filters), list(sys.path)
import agentfly_kit
dir(agentfly_kit)
print(json.dumps({
    "loaded": sorted({name.split(".")[0] for name in sys.modules}),
    "changed": [what for what, same in {
        "os.environ": environment == dict(os.environ), "warnings.filters": filters == list(warnings.filters),
        "sys.path": path == sys.path, "threads": threading.active_count() == 1}.items() if not same],
}))
""")
    heavy = {
        "torch", "transformers", "tokenizers", "safetensors", "vllm", "trl", "datasets", "pandas", "pyarrow",
        "numpy", "tensorboard", "trackio", "plotly", "anywidget", "ipywidgets", "IPython", "ipykernel", "jinja2",
        "pydantic", "ray",
    }  # fmt: skip
    assert heavy.isdisjoint(found["loaded"]), sorted(heavy & set(found["loaded"]))
    assert found["changed"] == []


def test_no_module_hides_a_public_name() -> None:
    """Importing agentfly_kit.x binds `x` on the package, which could hide a public function named `x`."""
    found = run(
        """
import importlib, json, random, sys
import agentfly_kit as af
shuffled = random.Random(int(sys.argv[1])).sample
problems = []
def touch(names):
    got = {}
    for name in names:
        try:
            got[name] = getattr(af, name)
        except ImportError as error:
            if str(getattr(error, "name", None) or "").startswith("agentfly_kit"):
                raise
    return got
for module in shuffled(sys.argv[2:], len(sys.argv) - 2):
    try:
        importlib.import_module(module)
    except ImportError as error:    # an extra that is not installed; a name of ours must be there
        if (error.name or "agentfly_kit").startswith("agentfly_kit"):
            problems.append(f"{module}: {error}")
names = [name for name in dir(af) if not name.startswith("_")]
first = touch(shuffled(names, len(names)))
second = touch(shuffled(names, len(names)))
for name in first:
    if first[name] is not second[name]:
        problems.append(f"af.{name} changed between two looks")
    module = sys.modules.get(f"agentfly_kit.{name}")
    if module is not None and first[name] is not module:
        problems.append(f"af.{name} is {first[name]!r}, and agentfly_kit/{name}.py is a module")
print(json.dumps({"problems": problems, "names": names}))
""",
        str(dice.seed()),
        *(name for name in MODULES if name != "agentfly_kit"),
    )
    assert found["problems"] == []


def test_the_stub_names_what_is_there() -> None:
    """Tab completion and the type checker read __init__.pyi; the interpreter reads __init__.py."""
    stub = ast.parse((ROOT / "agentfly_kit" / "__init__.pyi").read_text(encoding="utf-8"))
    named = set()
    for node in stub.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            named |= {alias.asname for alias in node.names if alias.asname}  # only `x as x` is re-exported
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named.add(node.target.id)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # an alias of a module
            named.add(node.targets[0].id)
    code = "import agentfly_kit as af, json; print(json.dumps({'names': dir(af)}))"
    there = {name for name in run(code)["names"] if not name.startswith("_")}
    assert {name for name in named if not name.startswith("_")} == there


def test_contributing_names_the_tests_that_ci_does_not_run() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What CI does not run")[2]
    named = set(re.findall(r"`(\w+\.py)`", section.partition("\n## ")[0]))
    files = set((ROOT / "tests").rglob("*.py")) - {Path(__file__)}
    assert named == {path.name for path in files if "pytest.mark.long" in path.read_text(encoding="utf-8")}
