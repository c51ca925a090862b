"""The quickstart in a real JupyterLab: run the notebook, interrupt the training, and re-run the cell."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import errors
import nbformat
import pytest
import waiting
from paths import ROOT

WHY_NOT = browser.missing()
pytestmark = [pytest.mark.real, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
PICTURES = QUICKSTART.parent.parent / "build" / "screenshots"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[browser.Lab]:
    lab = browser.Lab(tmp_path / "lab")
    lab.start_browser()
    yield lab
    lab.close()


def steps(file: Path) -> list[int]:
    if not file.exists():
        return []
    return [json.loads(line)["step"] for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_an_interrupted_training_cell_goes_on_when_it_is_run_again(lab: browser.Lab) -> None:
    sources = [cell.source for cell in nbformat.read(QUICKSTART, as_version=4).cells if cell.cell_type == "code"]
    train = next(i for i, source in enumerate(sources) if "af.train(" in source)
    # Run only the cells up to and including the training cell, and query the results in the kernel.
    page = lab.open("quickstart", [*(s for s in sources[:train] if "TokenView" not in s), sources[train]])
    file = lab.root / "runs" / "quickstart" / "steps.jsonl"
    try:
        page.run(wait=False)
        waiting.blocking_until(lambda: len(steps(file)) >= 4)
        page.command("notebook:interrupt-kernel")
        errors.check(page.finish, AssertionError, re.compile(r"CancelledError|KeyboardInterrupt"))
        done = len(steps(file))
        assert 4 <= done < 24
        # No training continues after the interrupt: another second changes nothing.
        time.sleep(1)
        assert len(steps(file)) == done
        assert (
            page.python("[t.get_name() for t in __import__('asyncio').all_tasks() if 'agentfly' in t.get_name()]") == []
        )

        page.page.evaluate(
            """() => { window.ran = false; const app = window.jupyterapp;
            app.commands.execute('notebook:run-cell').then(() => { window.ran = true; }); }"""
        )
        page.finish()
        assert steps(file) == list(range(1, 25))
        assert page.python("[s.replayed for s in steps].count(True)") == done
        assert page.python("steps[-1].success > 0.8")
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.page.screenshot(path=PICTURES / "quickstart-after-interrupt.png")
        # A third run replays all steps, because training has finished.
        page.page.evaluate(
            """() => { window.ran = false; const app = window.jupyterapp;
            app.commands.execute('notebook:run-cell').then(() => { window.ran = true; }); }"""
        )
        page.finish()
        assert page.python("all(s.replayed for s in steps)")
    finally:
        page.close()
    assert page.errors == []
