"""Pictures of views in a saved notebook, reopened without a kernel and reloaded with a kernel."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import browser
import nbformat
import pytest
from paths import ROOT

WHY_NOT = browser.missing()
needs_browser = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

SCREENSHOTS = ROOT / "build" / "screenshots"
LIVE = "application/vnd.jupyter.widget-view+json"
WIDGETS = (
    "TokenView", "TrajectoryView", "ChainStepper", "PoolView", "RolloutView", "TrainView", "ToolForm", "RewardForm",
)  # fmt: skip

# One cell per view. The records change after their views were displayed.
CELLS = (
    """
    import asyncio
    import agentfly_kit as af
    from agentfly_kit import widgets as w

    class Box:
        async def reset(self):
            pass

    @af.reward
    def short(final: str | None) -> float:
        return float(final is not None and len(final) < 3)

    policy = af.tiny.policy("calculator")
    agent = af.envs.calculator.agent(policy)
    tasks = af.load_tasks("calculator").train[:4]
    run = agent.rollout(tasks, group_size=4)
    pool = af.Pool(Box, size=3)
    chain = agent.chain(tasks[0])
    training = af.train(agent, policy, tasks, af.TrainConfig(steps=2, tasks_per_step=4, group_size=4))
    """,
    "w.RolloutView(run)",
    "w.TrainView(training)",
    "w.PoolView(pool)",
    "w.ChainStepper(chain)",
    "form = w.ToolForm(next(iter(agent.tools)))\nform",
    """
    rollout = await run
    await training
    await chain.run()
    lease = await pool.acquire("a chain")
    result = await form.call(expression="2+3")
    await asyncio.sleep(0.5)
    """,
    "rewards = w.RewardForm(short, rollout)\nrewards",
    "w.TokenView(rollout)",
    "w.TrajectoryView(rollout)",
    "rescored = await rewards.score()",
)
# Text in the picture of a finished view that is not in the picture of the initial view.
FINISHED = {
    "RolloutView": "16 of 16 chains",
    "TrainView": "2 steps",
    "PoolView": "1 leased",
    "ChainStepper": "stop",
    "ToolForm": "5",
}


def _save(nb: Any) -> Any:
    nb.page.evaluate(f"async () => {{ {nb._PANEL} await panel.context.save(); }}")
    return nbformat.read(nb.path, as_version=4)


def _pictures(saved: Any) -> dict[str, str]:
    """Return the HTML of the views in a notebook, by class. Fail if an output also has the live form."""
    found = {}
    for cell in saved.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            name = data.get("text/plain", "").partition("(")[0]
            if name in WIDGETS:
                assert LIVE not in data, name
                found[name] = data["text/html"]
    return found


@needs_browser
@pytest.mark.real
@browser.both
def test_a_saved_notebook_shows_finished_pictures_without_a_kernel(notebook: Any) -> None:
    nb = notebook(*CELLS)
    nb.run()
    nb.page.wait_for_timeout(2_500)  # pictures are updated at most every two seconds
    assert nb.page.locator(".afk").count() == len(WIDGETS)
    saved = _save(nb)
    pictures = _pictures(saved)
    assert sorted(pictures) == sorted(WIDGETS)
    for name, text in FINISHED.items():
        assert text in pictures[name], name
    assert nb.page.locator(".afk").count() == len(WIDGETS), "saving changed the open page"

    # Open the notebook with a new kernel, in which the views do not exist.
    page = nb.page
    page.evaluate(f"async () => {{ {nb._PANEL} await panel.sessionContext.shutdown(); }}")
    page.reload()
    page.wait_for_function(
        "(n) => document.querySelectorAll('.jp-RenderedHTMLCommon.jp-OutputArea-output').length >= n", arg=len(WIDGETS)
    )
    text = "\n".join(page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output").all_inner_texts())
    for shown in FINISHED.values():
        assert shown in text
    body = page.locator(".jp-Notebook").inner_text()
    for complaint in ("Error displaying widget", "model not found", "Loading widget"):
        assert complaint not in body
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{nb.path.stem}.png", full_page=True)


@needs_browser
def test_views_are_live_again_after_the_page_was_reloaded(notebook: Any) -> None:
    nb = notebook(
        """
        import agentfly_kit as af
        from agentfly_kit import widgets as w

        @af.tool
        def double(n: int) -> int:
            '''Double a number.

            Args:
                n: the number.
            '''
            return 2 * n

        view = w.ToolForm(double)
        view
        """
    )
    nb.run()
    nb.page.wait_for_selector(".afk")
    assert list(_pictures(_save(nb))) == ["ToolForm"]
    nb.page.reload()
    nb.page.wait_for_selector(".afk")
    nb.page.wait_for_function("() => window.jupyterapp.shell.currentWidget?.context?.isReady")
    assert not nb.page.evaluate(f"() => {{ {nb._PANEL} return panel.context.model.dirty; }}")
    nb.wait_python("view.is_open", True)


@pytest.mark.real
def test_a_notebook_executed_without_a_browser_holds_finished_pictures(tmp_path: Path) -> None:
    path = tmp_path / "run.ipynb"
    browser.write(path, [textwrap.dedent(cell).strip() for cell in CELLS])
    subprocess.run(
        [sys.executable, "-m", "nbconvert", "--execute", "--inplace", "--to", "notebook", str(path)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    found = {}
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error", json.dumps(output)
            data = output.get("data", {})
            found[data.get("text/plain", "").partition("(")[0]] = data.get("text/html", "")
    for name, text in FINISHED.items():
        assert text in found[name], name
