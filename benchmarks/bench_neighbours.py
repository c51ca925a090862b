"""Run a notebook under several seeds and report the figures that it asserts, with their spread.

The notebook sets `SEED = 0` in its first code cell and defines `results`, a dict of name -> number, in its last.

    python benchmarks/bench_neighbours.py notebooks/25_tools_as_weights.ipynb --seeds 5

`failed` lists the first line of each cell that raised, by seed: the margin of an assertion holds if it is empty for all
seeds. Otherwise, or if no seed has `results`, the exit code is 1. CPU seconds are those of the kernel. The output is
JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

REPORT = """
import json, resource, time
print("RESULTS", json.dumps([{name: float(value) for name, value in results.items()}, time.process_time()]))
"""


def run(notebook: Path, seed: int) -> dict[str, Any]:
    """Run the notebook with this seed, to the end even if a cell raises."""
    nb: Any = nbformat.read(notebook, as_version=4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    if not code or "\nSEED = 0\n" not in f"\n{code[0].source}\n":
        raise SystemExit(f"the first code cell of {notebook} must have the line `SEED = 0`")
    code[0].source = f"\n{code[0].source}\n".replace("\nSEED = 0\n", f"\nSEED = {seed}\n")
    nb.cells.append(nbformat.v4.new_code_cell(REPORT))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(nb, timeout=None, kernel_name="python3", allow_errors=True, resources=resources).execute()
    failed = [
        f"{cell.source.strip().splitlines()[0][:60]}: {output.ename}: {output.evalue[:200]}"
        for cell in nb.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error" and "NBVAL_RAISES_EXCEPTION" not in cell.source
    ]
    printed = "".join(output.get("text", "") for output in nb.cells[-1].outputs)
    results, seconds = json.loads(printed.partition("RESULTS ")[2] or "[{}, null]")
    return {"seed": seed, "results": results, "cpu_seconds": seconds, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    runs = []
    for seed in range(given.first, given.first + given.seeds):
        runs.append(run(given.notebook, seed))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    columns: dict[str, list[float]] = {}
    for each in runs:
        for name, value in each["results"].items():
            columns.setdefault(name, []).append(value)
    spread = {
        name: {"mean": round(statistics.fmean(values), 4), "min": min(values), "max": max(values), "runs": len(values)}
        for name, values in columns.items()
    }
    failed = {each["seed"]: each["failed"] for each in runs if each["failed"]}
    report = {"notebook": given.notebook.stem, "spread": spread, "failed": failed}
    print(json.dumps(report | {"cpu_seconds": [each["cpu_seconds"] for each in runs]}, indent=1))
    raise SystemExit(int(bool(failed) or not columns))


if __name__ == "__main__":
    main()
