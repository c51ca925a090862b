"""Benchmarks: of a GPU, as far as a CPU can run it, of images without images, and of a notebook with several seeds."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from paths import ROOT
from waiting import GUARD

SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=GUARD)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device")
def test_without_a_gpu_it_exits_with_one_sentence() -> None:
    done = run()
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip() == (
        "bench-gpu needs a CUDA device; `--device cpu --tiny` checks the script without one"
    )


@pytest.mark.long
def test_results_are_kept_after_a_part_that_fails_and_printed_as_a_table(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    parts = ("--parts", "local", "update", "--timeout", "0.1")
    done = run("--device", "cpu", "--tiny", "--repeats", "1", "--out", str(out), *parts)
    assert done.returncode == 1 and done.stderr.strip().endswith("failed: local, update")
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["results"]["update"]["failed"].startswith("took more than 0 s")
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    found["results"]["local"] = {"tokens per second": {"8 chains": 12.5}}
    out.write_text(json.dumps(found), encoding="utf-8")
    printed = run("--markdown", str(out)).stdout
    assert "| local, tokens per second, 8 chains | 12.5 |" in printed
    assert printed.startswith(f"cpu, {found['date']}, agentfly_kit ")


@pytest.mark.soak
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--tiny", "--repeats", "1", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    results = found["results"]
    assert results["local"]["tokens per second"]["8 chains"] > 0
    assert all(0 < results["update"][name]["MFU"] < 1 for name in ("all weights", "LoRA"))
    assert results["ours"]["seconds per iteration"] > 0 and results["trl"]["seconds per iteration"] > 0
    assert found["times faster than TRL"] > 0
    if "not measured" not in results["vllm"]:
        assert results["vllm"]["weight transfer"]["GB per second"] > 0


@pytest.mark.long
@pytest.mark.parametrize(("most", "failed"), [(2, {}), (1, {"1": ["SEED < 1"]})])
def test_a_notebook_that_fails_with_one_seed_fails(most: int, failed: dict[str, list[str]], tmp_path: Path) -> None:
    """The exit code is 1 if an assertion fails with any seed; the other seeds are reported nevertheless."""
    sources = ("SEED = 0", f"results = {{'twice': 2 * SEED}}\nassert SEED < {most}")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(notebook, tmp_path / "toy.ipynb")
    script = ROOT / "benchmarks" / "bench_notebooks.py"
    command = [sys.executable, str(script), str(tmp_path / "toy.ipynb"), "--seeds", "2", "--other", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    report = json.loads(done.stdout)["toy"]
    assert done.returncode == int(bool(failed)), done.stderr
    assert report["failed"] == failed
    assert report["spread"]["twice"] == {"mean": pytest.approx(2 / 3, abs=1e-4), "min": 0, "max": 2}
    margin = {"margin": most - 1, "difference": 0, "sufficient": True, "values": [most, most - 1, most]}
    assert report["margins"] == {f"SEED < {most}": margin}


@pytest.mark.long
def test_text_only_work_spends_little_time_in_functions_for_images() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_images.py"), "share"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=GUARD, check=True).stdout)
    assert 0 < found["rollout"] < 0.02 and found["ppo_step"] < 0.001, found
