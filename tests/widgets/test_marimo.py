"""Views and `await` in marimo, which shows anywidgets without a Jupyter kernel."""

import importlib.util
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from waiting import GUARD, blocking_until

WHY_NOT = browser.missing() or (None if importlib.util.find_spec("marimo") else "no marimo: pip install marimo")

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import agentfly_kit as af
    from agentfly_kit import widgets as w

    policy = af.tiny.policy("calculator")
    agent = af.envs.calculator.agent(policy)
    tasks = af.load_tasks("calculator").train[:4]
    run = agent.rollout(tasks, group_size=4)
    chain = agent.chain(tasks[0])
    return agent, chain, run, w


@app.cell
def _(run, w):
    w.RolloutView(run)
    return


@app.cell
async def _(run):
    rollout = await run
    rollout
    return (rollout,)


@app.cell
def _(agent, rollout, w):
    w.TrajectoryView(rollout, agent=agent)
    return


@app.cell
def _(chain, w):
    w.ChainStepper(chain)
    return


@app.cell
def _(rollout, w):
    w.TokenView(rollout).freeze()
    return
"""


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=GUARD):
            return True
    except OSError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    notebook = tmp_path / "notebook.py"
    notebook.write_text(NOTEBOOK)
    command = [sys.executable, "-m", "marimo", "run", str(notebook), "--headless", "--no-token", "--port"]
    log = tmp_path / "log"
    with log.open("wb") as out, browser.held_port() as port:
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen([*command, str(port)], stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
        try:
            blocking_until(lambda: responds(url) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield url
        finally:
            process.terminate()
            process.wait(GUARD)
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.long
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_views_open_other_views_and_async_cells_run(server: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.CHROMIUM, headless=True, args=browser.FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 2000})
        page.set_default_timeout(1000 * GUARD)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server)
        rollout = page.locator(".afk-rolloutview")
        rollout.get_by_text("16 of 16 chains").first.wait_for()  # the view follows a run that another cell awaits
        page.get_by_text("Rollout(4 tasks, 16 chains").first.wait_for()
        page.get_by_text("TokenView(16 rows").first.wait_for()
        trajectories = page.locator(".afk-trajectoryview")
        trajectories.locator(".afk-item").first.click()
        trajectories.get_by_role("button", name="Tokens of").first.click()
        trajectories.locator(".afk-tokenview .afk-tokens").first.wait_for()
        stepper = page.locator(".afk-stepper").last
        stepper.get_by_role("button", name="Run to the end").click()
        stepper.get_by_role("button", name="Score").click()  # waits until the chain has ended
        stepper.get_by_text("the chain answered").first.wait_for()
        for notice in page.locator(".afk-notice, .afk-note").all_inner_texts():
            assert notice == ""
        assert errors == []
        chromium.close()
