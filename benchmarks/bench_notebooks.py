"""Measure how far the figures of notebooks are from what the notebooks assert, over seeds and processors.

    python benchmarks/bench_notebooks.py                     # the notebooks that train a policy
    python benchmarks/bench_notebooks.py 22_masksearch --seeds 2 --other 0

Each notebook runs, with the assertions of tests/notebooks/checks.py and the settings of `make test-real`, with the
seeds 0 to 4 and the kernels that torch and MKL select on this processor, and again with the first two seeds and the
kernels for a processor without AVX. A seed replaces the value of `SEED`, or the default seeds
of agents and of `TrainConfig` if a notebook does not set them.

The output is JSON: for each ordering comparison of an assertion the least `margin` between its two sides, negative if
the assertion fails, and the largest `difference` of this margin between kernels. A comparison is `sufficient` if the
margin is at least twice the difference. The rest of a notebook's report is the spread of its dict `results`, if it
has one, what failed, and CPU seconds. The exit code is 1 if a cell failed or a margin is insufficient.
"""

import argparse
import ast
import asyncio
import json
import operator
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SIGNS: dict[type[ast.cmpop], tuple[str, Any, int]] = {
    ast.Lt: ("<", operator.lt, 1),
    ast.LtE: ("<=", operator.le, 1),
    ast.Gt: (">", operator.gt, -1),
    ast.GtE: (">=", operator.ge, -1),
}
PLAIN = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "DNNL_MAX_CPU_ISA": "SSE41"}


# ---- in the kernel


class Claims(ast.NodeTransformer):
    """Transform cells so that they use a seed, and that assertions record margins instead of raising.

    Attributes:
        margins: Text of a comparison -> the least difference of its sides; negative if it is false.
        failed: Texts of the assertions that are false.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.margins: dict[str, float] = {}
        self.failed: list[str] = []
        self.asserting = False

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if ast.unparse(node) == "SEED = 0":
            node.value = ast.Constant(self.seed)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        names = {word.arg for word in node.keywords}  # None stands for **settings, which may have a seed
        function = ast.unparse(node.func)
        seeded = function in ("af.TrainConfig", "af.Agent") or function.endswith(".agent")
        if seeded and not {"seed", None} & names:
            node.keywords.append(ast.keyword("seed", ast.Constant(self.seed)))
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        for i, key in enumerate(node.keys):
            if isinstance(key, ast.Constant) and key.value == "seed" and ast.unparse(node.values[i]) == "0":
                node.values[i] = ast.Constant(self.seed)
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        text = ast.unparse(node.test)
        self.asserting = True
        self.generic_visit(node)
        self.asserting = False
        return ast.fix_missing_locations(
            ast.copy_location(ast.Expr(call("claim", ast.Constant(text), node.test)), node)
        )

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        if not self.asserting or not all(type(sign) in SIGNS for sign in node.ops):
            return node
        signs = [ast.Constant(SIGNS[type(sign)][0]) for sign in node.ops]
        parts = [ast.Tuple([sign, side], ast.Load()) for sign, side in zip(signs, node.comparators, strict=True)]
        return call("compare", ast.Constant(text), node.left, *parts)

    def claim(self, text: str, holds: object) -> None:
        if not holds:
            self.failed.append(text)

    def compare(self, text: str, left: Any, *rest: tuple[str, Any]) -> Any:
        """Return the result of the comparison `left < right`, and record its margin if both sides are numbers."""
        holds: Any = True
        for sign, right in rest:
            _, function, direction = next(entry for entry in SIGNS.values() if entry[0] == sign)
            try:
                margin = direction * (float(right) - float(left))
            except (TypeError, ValueError, RuntimeError):
                pass  # not numbers
            else:
                self.margins[text] = min(margin, self.margins.get(text, margin))
            result = function(left, right)
            holds = result if holds is True else holds and result
            left = right
        return holds


def call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name("_claims", ast.Load()), name, ast.Load()), list(arguments), [])


def install(shell: Any, seed: int) -> None:
    """Apply `Claims` to the cells that follow."""
    shell.user_ns["_claims"] = claims = Claims(seed)
    shell.ast_transformers.append(claims)


def report(shell: Any) -> None:
    """Print the margins, the false assertions, `results` and the CPU time of the kernel."""
    claims = shell.user_ns["_claims"]
    results = {k: float(v) for k, v in shell.user_ns.get("results", {}).items() if isinstance(v, int | float)}
    print("REPORT", json.dumps([claims.margins, claims.failed, results, time.process_time()]))


# ---- in the process that starts the kernels


def cells(path: Path) -> Any:
    """Return a notebook with the settings, answers and assertions with which `make test-real` runs it."""
    folder = ROOT / "tests" / "notebooks"
    smaller, checks = runpy.run_path(str(folder / "smaller.py")), runpy.run_path(str(folder / "checks.py"))
    notebook: Any = checks["complete"](path)
    if path.parent.resolve() == ROOT / "notebooks":
        for cell in notebook.cells:
            for old, new in smaller["SMALLER"].get(path.stem, {}).items():
                cell.source = cell.source.replace(old, new)
    return notebook


async def run(path: Path, seed: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run a notebook to the end, even if a cell raises."""
    notebook = cells(path)
    code: Any = nbformat.v4.new_code_cell
    notebook.cells.insert(0, code(f"import bench_notebooks as _bench\n_bench.install(get_ipython(), {seed})"))
    notebook.cells.append(code("_bench.report(get_ipython())"))
    variables = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks"), "OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=None, kernel_name="python3", allow_errors=True, resources=where)
        await client.async_execute(env=variables)
    raised = [
        f"{cell.source.strip().splitlines()[0][:60]}: {output.ename}: {output.evalue[:200]}"
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error" and "NBVAL_RAISES_EXCEPTION" not in cell.source
    ]
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].get("outputs", []))
    margins, failed, results, seconds = json.loads(printed.partition("REPORT ")[2] or "[{}, [], {}, null]")
    found = {"seed": seed, "plain": bool(environment), "margins": margins, "failed": raised + failed}
    return found | {"results": results, "cpu_seconds": seconds}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the margins of each comparison and the spread of each result."""
    usual = {each["seed"]: each for each in runs if not each["plain"]}
    pairs = [(usual[each["seed"]], each) for each in runs if each["plain"] and each["seed"] in usual]
    margins = {}
    for text in {text: None for each in runs for text in each["margins"]}:
        values = [each["margins"][text] for each in runs if text in each["margins"]]
        both = [pair for pair in pairs if text in pair[0]["margins"] and text in pair[1]["margins"]]
        difference = max((abs(one["margins"][text] - two["margins"][text]) for one, two in both), default=0.0)
        if len({*values}) > 1:
            found = {"margin": min(values), "difference": difference, "sufficient": min(values) >= 2 * difference}
            margins[text] = found | {"values": [round(value, 4) for value in values]}
    spread = {}
    for name in {name: None for each in runs for name in each["results"]}:
        numbers = [each["results"][name] for each in runs if name in each["results"]]
        spread[name] = {"mean": round(statistics.fmean(numbers), 4), "min": min(numbers), "max": max(numbers)}
    failed = {f"{each['seed']}{' plain' * each['plain']}": each["failed"] for each in runs if each["failed"]}
    seconds = [each["cpu_seconds"] for each in runs]
    return {"margins": margins, "spread": spread, "failed": failed, "cpu_seconds": seconds}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="paths, or names of files in notebooks/ without .ipynb")
    parser.add_argument("--seeds", type=int, default=5, help="seeds with the usual kernels")
    parser.add_argument("--other", type=int, default=2, help="seeds with the kernels for a processor without AVX")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks that run at the same time")
    given = parser.parse_args()
    known = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    paths = [known.get(name, Path(name)) for name in given.notebooks]
    if not paths:
        paths = [path for path in known.values() if "TrainConfig(" in path.read_text() or "SEED" in path.read_text()]
    limit = asyncio.Semaphore(given.jobs)

    async def measured(path: Path, seed: int, environment: dict[str, str]) -> dict[str, Any]:
        async with limit:
            found = await run(path, seed, environment)
            print(path.stem, json.dumps(found), file=sys.stderr, flush=True)
            return found

    settings: list[tuple[int, dict[str, str]]] = [(seed, {}) for seed in range(given.seeds)] + [
        (seed, PLAIN) for seed in range(given.other)
    ]
    reports = {
        path.stem: asyncio.gather(*(measured(path, seed, environment) for seed, environment in settings))
        for path in paths
    }
    found = {name: summary(await runs) for name, runs in reports.items()}
    print(json.dumps(found, indent=1))
    bad = any(each["failed"] or not all(m["sufficient"] for m in each["margins"].values()) for each in found.values())
    raise SystemExit(int(bad))


if __name__ == "__main__":
    asyncio.run(main())
