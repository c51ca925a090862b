"""The quickstart in a real JupyterLab: run the notebook, interrupt the training, and re-run the cell."""

import json
import re
import shutil
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
    train = next(i for i, source in enumerate(sources) if "await run" in source)
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
            page.python("[t.get_name() for t in __import__('asyncio').all_tasks() if 'agentfly' in t.get_name()]")
            == []
        )

        page.page.evaluate(
            """() => { window.ran = false; const app = window.jupyterapp;
            app.commands.execute('notebook:run-cell').then(() => { window.ran = true; }); }"""
        )
        page.finish()
        assert steps(file) == list(range(1, 25))
        # An interrupt between two iterations leaves the policy complete, so the checkpoint is not loaded again.
        assert page.python("run.resumed_from") in (0, done)
        assert page.python("run.records[-1]['success'] > 0.8")
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.page.screenshot(path=PICTURES / "quickstart-after-interrupt.png")
        # A third run trains nothing, because training has finished.
        page.page.evaluate(
            """() => { window.ran = false; const app = window.jupyterapp;
            app.commands.execute('notebook:run-cell').then(() => { window.ran = true; }); }"""
        )
        page.finish()
        assert steps(file) == list(range(1, 25))
    finally:
        page.close()
    assert page.errors == []


# The position of the chart of the success rate during training, and whether it is visible at its centre.
LIVE = """() => {
  const now = Number(document.querySelector('.afk-trainview [role=progressbar]')?.ariaValueNow);
  const chart = document.querySelector('.afk-trainview .afk-chart:has(polyline)')?.getBoundingClientRect();
  if (!(now > 3) || !chart) return null;
  const panel = document.querySelector('.jp-NotebookPanel-notebook').getBoundingClientRect();
  const seen = document.elementFromPoint((chart.left + chart.right) / 2, (chart.top + chart.bottom) / 2);
  const saved = [...document.querySelectorAll('.jp-OutputArea-output')].map((x) => x.innerText).join();
  const inside = chart.top >= panel.top && chart.bottom <= panel.bottom && Boolean(seen?.closest('.afk-chart'));
  return inside ? { now, saved } : null;
}"""


def test_the_quickstart_runs_by_keyboard_with_the_live_curves_in_view(lab: browser.Lab) -> None:
    """Open the shipped notebook with the default settings of JupyterLab, and press only Shift+Enter."""
    settings = lab.folder / "app-settings" / "overrides.json"
    settings.write_text(
        json.dumps({key: value for key, value in json.loads(settings.read_text()).items() if "tracker" not in key})
    )
    path = lab.root / "keyboard.ipynb"
    shutil.copyfile(QUICKSTART, path)
    nb = browser.Notebook(lab, path, 1280, 800)
    try:
        live = None
        for index, cell in enumerate(nbformat.read(path, as_version=4).cells):
            nb.press("Shift+Enter")
            if "await run" in cell.source:
                live = nb.page.wait_for_function(LIVE).json_value()
                nb.page.screenshot(path=PICTURES / "quickstart-live.png")
            nb.page.wait_for_function(
                f"""(i) => {{ {nb._PANEL} const cell = panel.content.model.cells.get(i);
                return cell.type !== 'code' || (cell.executionState === 'idle' && cell.executionCount); }}""",
                arg=index,
            )
        assert live["now"] < 24
        assert "success: " not in live["saved"], "the saved result of the next cell is shown during training"
        # A result that was collapsed in the saved notebook is shown when its cell has run.
        browser.expect(nb.page.locator(".jp-OutputArea-output", has_text="success: 0.")).to_have_count(1)
        assert nb.python("len(run.records), last > first") == (24, True)
    finally:
        nb.close()
    assert nb.errors == []
