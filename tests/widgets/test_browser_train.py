"""TrainView of a real training run: buttons while the cell awaits, opening a step, and several runs."""

from __future__ import annotations

from typing import Any

import browser
import pytest
from paths import TESTS
from test_browser_access import AXE, complaints

WHY_NOT = browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

AGENT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import asyncio, agents
import agentfly_kit as af
from agentfly_kit import widgets as w

def started(name, **more):
    policy = agents.fresh()
    agent = af.Agent(af.LocalEngine(policy), chat=policy.chat, tools=[agents.calculator], reward=agents.exact,
                     max_turns=2, sampling=af.Sampling(max_tokens=32))
    config = af.TrainConfig(steps=60, tasks_per_step=2, group_size=2, save_rollouts=True, **more)
    return af.train(agent, policy, agents.tasks(4), config, run=name)
"""


@pytest.mark.real
def test_a_run_is_steered_from_its_view(notebook: Any) -> None:
    nb = notebook(
        AGENT,
        "other = started('other', lr=1e-4)\nasync for step in other:\n    if step.step == 3:\n        break",
        "run = started('mine')\nview = w.TrainView(run, 'other')\nview",
        "await run",
    )
    nb.run(wait=False)
    page = nb.page
    view = page.locator(".afk-trainview")
    view.wait_for(timeout=60_000)
    page.wait_for_function("() => document.querySelectorAll('.afk-trainview .afk-line').length > 20", timeout=60_000)
    assert not page.evaluate("() => window.ran")
    view.get_by_role("button", name="Pause").click()
    view.get_by_role("button", name="Resume").wait_for()
    page.wait_for_timeout(700)
    key = view.locator(".afk-chartkey")
    before = key.inner_text()
    page.wait_for_timeout(700)
    assert key.inner_text() == before  # "mine 7 steps other 3 steps"
    view.get_by_role("button", name="Resume").click()
    page.wait_for_function("(text) => document.querySelector('.afk-chartkey').innerText !== text", arg=before)
    # Open a step of the active run and its tokens while the cell awaits.
    view.locator(".afk-charts").focus()
    for key in ("Home", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    view.locator(".afk-listbox").wait_for()
    view.locator(".afk-listbox button").nth(1).click()
    child = view.locator(".afk-child .afk-tokenview")
    child.locator(".afk-lines .afk-tok").first.wait_for()
    assert child.count() == 1
    view.locator(".afk-listbox button").nth(2).click()
    view.get_by_role("button", name="Stop after this step").click()
    nb.finish(60)
    assert nb.python("3 < len(run.records) < 60")
    assert nb.python("view.step, len(view.rollout), view._notice") == (2, 4, "")
    assert nb.python("view.opened.trajectories[0].id == view._list['rows'][2][0]")
    assert child.count() == 1
    page.evaluate(AXE.read_text(encoding="utf-8"))
    assert complaints(page) == []  # in the list of a step and the tokens opened below
    view.get_by_role("button", name="Clear", exact=True).first.click()
    page.wait_for_function("() => !document.querySelector('.afk-child .afk-tokenview')")
