"""TrainView of a real training run: buttons while the cell awaits, opening a step, and several runs."""

import os
import re
import signal
from typing import Any

import browser
import pytest
from paths import ROOT, TESTS
from test_browser_access import check_axe

WHY_NOT = browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

PICTURES = ROOT / "build" / "screenshots"

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
    config = af.TrainConfig(steps=20_000, tasks_per_step=2, group_size=2, save_rollouts=True, **more)
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
    page = nb.run(wait=False)
    view = page.locator(".afk-trainview")
    page.wait_for_function("() => document.querySelectorAll('.afk-trainview .afk-line').length > 20")
    assert not page.evaluate("() => window.ran")
    view.get_by_role("button", name="Pause").click()
    view.get_by_role("button", name="Resume").wait_for()
    key = view.locator(".afk-chartkey")
    at_pause = key.inner_text()  # "mine 7 steps other 3 steps"
    page.wait_for_timeout(1000)
    before = key.inner_text()
    # At most the step that was in progress ends during a pause.
    assert int(before.split()[1]) <= int(at_pause.split()[1]) + 1
    view.get_by_role("button", name="Resume").click()
    page.wait_for_function("(text) => document.querySelector('.afk-chartkey').innerText !== text", arg=before)
    # Open a step of the active run and its tokens while the cell awaits.
    view.locator(".afk-charts").focus()
    nb.press("Home", "ArrowRight", "Enter")
    chains = view.get_by_role("region", name="trajectories of step")
    chains.wait_for()
    chains.locator("button").nth(1).click()
    child = view.locator(".afk-child .afk-tokenview")
    child.locator(".afk-lines .afk-tok").first.wait_for()
    browser.expect(child).to_have_count(1)
    chains.locator("button").nth(2).click()
    view.get_by_role("button", name="Stop after this step").click()
    nb.finish()
    assert 2 <= nb.python("len(run.records)") < 20_000
    assert nb.python("view.step, len(view.rollout), view._notice") == (2, 4, "")
    assert nb.python("view.opened.trajectories[0].id == view._list['rows'][2][0]")
    browser.expect(child).to_have_count(1)
    check_axe(nb, "Light")  # includes the list of a step and the tokens opened below
    view.get_by_role("button", name="Clear", exact=True).first.click()
    page.wait_for_function("() => !document.querySelector('.afk-child .afk-tokenview')")


@pytest.mark.long
def test_an_interrupted_run_continues_and_a_killed_kernel_is_noticed(notebook: Any) -> None:
    nb = notebook(
        AGENT,
        "run = started('kept')\nlanes = w.RolloutView(run)\nlanes",
        """
        view = w.TrainView(run, panels=["success", ["reward", "entropy"], lambda r: r["tokens"] / r["seconds"]])
        view
        """,
        "await run",
        size=(1280, 1500),
    )
    page = nb.page
    PICTURES.mkdir(parents=True, exist_ok=True)

    def shoot(name: str) -> None:
        for theme in ("Light", "Dark"):
            nb.theme(theme)
            page.wait_for_timeout(200)
            page.screenshot(path=PICTURES / f"train-{name}-{theme.lower()}.png")

    nb.run(wait=False)
    view = page.locator(".afk-trainview")
    state = view.locator(".afk-state")
    page.wait_for_function("() => Number(document.querySelector('.afk-trainview [aria-valuenow]')?.ariaValueNow) > 2")
    browser.expect(state).to_have_text("running", use_inner_text=True)
    shoot("running")
    nb.command("notebook:interrupt-kernel")
    with pytest.raises(AssertionError, match="training was interrupted after step") as caught:
        nb.finish()
    assert "agentfly_kit/trainer" not in str(caught.value)
    page.wait_for_function("() => /^interrupted after/.test(document.querySelector('.afk-state').innerText)")
    done = nb.python("len(run.records)")
    browser.expect(state).to_have_text(f"interrupted after step {done}", use_inner_text=True)
    browser.expect(view.locator(".afk-note")).to_contain_text(
        f"Steps 1 to {done} and the checkpoint are kept in 'kept'", use_inner_text=True
    )
    browser.expect(view.locator(".afk-note")).to_contain_text("run await run,", use_inner_text=True)
    for name in ("Pause", "Stop after this step"):
        browser.expect(view.get_by_role("button", name=name)).to_be_disabled()
    page.wait_for_function(
        "() => /^interrupted/.test(document.querySelector('.afk-rolloutview .afk-facts2').innerText)"
    )
    browser.expect(page.locator(".afk-rolloutview").get_by_role("button", name="Pause")).to_be_disabled()
    shoot("interrupted")
    check_axe(nb, "Dark")

    pid = nb.python("__import__('os').getpid()")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
    page.wait_for_function("() => document.querySelector('.afk-state').innerText === 'running'")
    browser.expect(view.locator(".afk-note")).to_contain_text(f"Continued after step {done}.", use_inner_text=True)
    page.wait_for_function(
        "(n) => Number(document.querySelector('.afk-trainview [aria-valuenow]').ariaValueNow) > n", arg=done + 1
    )
    os.kill(pid, signal.SIGKILL)
    page.wait_for_function(
        """() => [...document.querySelectorAll('.afk-stale')]
        .filter((x) => /^kernel (ended|restarted)/.test(x.innerText)).length === 2"""
    )
    browser.expect(state).to_have_text("was running", use_inner_text=True)
    assert not page.locator(".afk-rolloutview .afk-facts2").inner_text().startswith("running")
    last = view.locator(".afk-bar .afk-num").first.inner_text()
    for name in ("Pause", "Stop after this step"):
        browser.expect(view.get_by_role("button", name=name)).to_be_disabled()
    browser.expect(page.locator(".afk-rolloutview").get_by_role("button", name="Stop")).to_be_disabled()
    lanes = page.locator(".afk-rolloutview .afk-window").inner_text()
    page.wait_for_timeout(1500)
    browser.expect(view.locator(".afk-bar .afk-num").first).to_have_text(last, use_inner_text=True)
    browser.expect(page.locator(".afk-rolloutview .afk-window")).to_have_text(
        lanes, use_inner_text=True
    )  # the clocks have stopped
    assert view.locator(".afk-line").count() >= 4
    shoot("killed")
    page.locator(".jp-Dialog .jp-mod-accept").click()  # "The kernel appears to have died. It will restart."
    nb.run(wait=False)
    browser.expect(state).to_have_text("running", use_inner_text=True)
    page.wait_for_function(
        "(n) => Number(document.querySelector('.afk-trainview [aria-valuenow]').ariaValueNow) > n", arg=done + 1
    )
    browser.expect(page.locator(".afk-stale").filter(visible=True)).to_have_count(0)
    view.get_by_role("button", name="Stop after this step").click()
    nb.finish()
    assert nb.python("run.resumed_from") > done


@pytest.mark.real
def test_two_browsers_show_the_same_state_and_a_click_acts_once(notebook: Any, lab: browser.Lab) -> None:
    nb = notebook(
        AGENT,
        """
        run, calls = started('shared'), []
        view = w.TrainView(run)
        for name in ("pause", "resume", "stop"):
            def counted(name=name, call=getattr(run, name)):
                calls.append(name)
                call()
            setattr(run, name, counted)
        view
        """,
        "stepper = w.ChainStepper(agents.scripted([agents.call('6*7'), '42']).chain(agents.tasks()[0]))\nstepper",
        "lanes = w.RolloutView(run)\nlanes",
    )
    for button in nb.run().get_by_role("button", name=re.compile("^(Pause|Stop)")).all():
        browser.expect(button).to_be_disabled()
        browser.expect(button).to_have_attribute("title", "The run has not started; await it in a cell")
    nb.execute("training = asyncio.ensure_future(run._wait())")
    nb.page.evaluate(f"async () => {{ {nb._PANEL} await panel.context.save(); }}")
    other = browser.Notebook(lab, nb.path, 1280, 1100)
    trains = [each.page.locator(".afk-trainview") for each in (nb, other)]
    steppers = [each.page.locator(".afk-stepper") for each in (nb, other)]

    def press(view: Any, name: str) -> None:
        view.get_by_role("button", name=name, exact=True).click()

    nb.wait_python("len(view._pages), len(stepper._pages)", (2, 2))
    nb.wait_python("len(run.records) > 2", True)
    # Each browser shows what was done in the other one.
    press(trains[0], "Pause")
    for view in trains:
        view.get_by_role("button", name="Resume").wait_for()
    trains[1].locator(".afk-charts").focus()
    other.press("Home", "ArrowRight", "Enter")
    for view in trains:
        view.get_by_text("step 2 · view.step", exact=True).wait_for()
        browser.expect(view.get_by_role("region", name="trajectories of step 2").locator("tbody tr")).to_have_count(4)
    trains[0].locator(".afk-charts").focus()
    nb.press("Escape")
    for view in trains:
        view.get_by_role("region", name="trajectories of step 2").wait_for(state="hidden")
    press(trains[1], "Resume")
    for view in trains:
        view.get_by_role("button", name="Pause").wait_for()
    press(steppers[1], "Sample")
    for view in steppers:
        browser.expect(view.locator(".afk-turn2")).to_have_count(2)
    press(steppers[0], "Run the tools")
    for view in steppers:
        browser.expect(view.locator(".afk-turn2")).to_have_count(3)
    press(steppers[1], "Fork")
    for view in steppers:
        browser.expect(view.locator(".afk-tabs button")).to_have_count(2)
    # A view continues when the other browser is closed.
    other.context.close()
    press(trains[0], "Stop after this step")
    nb.wait_python("training.done()", True)
    browser.expect(trains[0].locator(".afk-state")).to_contain_text("stopped after step", use_inner_text=True)
    assert nb.python("calls, len(stepper.chains), view._notice, stepper._notice") == (
        ["pause", "resume", "stop", "resume"], 2, "", "",  # `stop` calls `resume`
    )  # fmt: skip
    # JupyterLab logs an error for messages of the comm with which the other browser restores its views.
    nb.errors[:] = [each for each in nb.errors + other.errors if "Comm not found for comm id" not in each]
