"""Forms in a real JupyterLab: typing, calling tools, and re-running the cell that defines a reward."""

import re
from typing import Any

import browser
import pytest

WHY_NOT = browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TOOL = """
import asyncio
from typing import Annotated, Literal
from pydantic import BaseModel
import agentfly_kit as af
from agentfly_kit import widgets as w

class Place(BaseModel):
    city: str
    metres: int = 0

@af.tool
async def weather(places: Annotated[list[Place], "where"], unit: Annotated[Literal["C", "F"], "of the answer"] = "C",
            days: Annotated[float, "from today"] = 1, exact: Annotated[bool, "no rounding"] = False,
            note: Annotated[str | None, "anything else"] = None, wait: Annotated[float, "seconds"] = 0.0) -> str:
    '''Say the weather. <img src=x onerror="alert(1)">'''
    await asyncio.sleep(wait)
    if note == "fail":
        raise ZeroDivisionError("ours")
    if note == "open":
        gate.set()
    return f"<b>{[(p.city, p.metres) for p in places]}</b> {days} {unit} {exact} {note!r}\\u200b"
"""


@browser.both
def test_a_tool_is_called_from_its_form_while_a_cell_awaits(notebook: Any) -> None:
    nb = notebook(TOOL, "form = w.ToolForm(weather)\nform", "gate = asyncio.Event()\nawait gate.wait()")
    page = nb.run(wait=False)
    form = page.locator(".afk-toolform")
    form.wait_for()
    form.get_by_role("button", name="Add to places").click()
    form.get_by_label("places, item 1: city").fill("Rome <i>")
    form.get_by_label("Pass metres").check()
    form.get_by_label("places, item 1: metres").fill("12")
    form.get_by_role("button", name="Add to places").click()
    form.get_by_label("places, item 2: city").fill("Oslo")
    form.get_by_label("Pass unit").check()
    form.get_by_label("unit", exact=True).select_option(label="F")
    form.get_by_label("Pass days").check()
    form.get_by_label("days", exact=True).fill("2.50")
    form.get_by_label("Pass note").check()
    form.get_by_label("note", exact=True).fill("two\nlines")
    form.get_by_role("button", name="Call", exact=True).click()
    seen = form.locator(".afk-seen")
    seen.wait_for()
    browser.expect(seen).to_have_text(
        "<b>[('Rome <i>', 12), ('Oslo', 0)]</b> 2.5 F False 'two\\nlines'‹U+200B›", use_inner_text=True
    )
    browser.expect(form.locator(".afk-answer")).to_contain_text("✓ ok", use_inner_text=True)
    assert "null" not in form.locator(".afk-answer").inner_text()
    assert not page.evaluate("() => window.ran")  # the cell still awaits
    # A slow call can be cancelled with a button; a bug in the tool shows its traceback.
    form.get_by_label("Pass wait").check()
    form.get_by_label("wait", exact=True).fill("100000")
    form.get_by_role("button", name="Call", exact=True).click()
    form.get_by_role("button", name="Cancel").click()
    page.wait_for_function("() => !document.querySelector('.afk-go').disabled")
    form.get_by_label("Pass wait").uncheck()
    form.get_by_label("note", exact=True).fill("fail")
    form.get_by_label("note", exact=True).press("Control+Enter")
    form.locator("text=failed with an error").wait_for()
    browser.expect(form.locator(".afk-seen")).to_have_text("weather failed.", use_inner_text=True)
    browser.expect(form.locator("summary").first).to_contain_text("ZeroDivisionError: ours", use_inner_text=True)
    # JSON arguments may be invalid, as a model could write them.
    form.get_by_role("button", name="JSON").click()
    browser.expect(form.get_by_label("arguments as JSON")).to_have_value(re.compile('"days": 2\\.50'))
    form.get_by_label("arguments as JSON").fill('{"places": "x"}')
    form.get_by_role("button", name="Call", exact=True).click()
    form.locator("text=failed, and the model sees the reason").wait_for()
    form.get_by_label("arguments as JSON").fill("{oops")
    form.get_by_role("button", name="Call", exact=True).click()
    form.locator(".afk-notice:has-text('not valid JSON')").wait_for()
    assert not page.evaluate("() => window.ran")
    form.get_by_label("arguments as JSON").fill('{"places": [], "note": "open"}')
    form.get_by_role("button", name="Call", exact=True).click()
    nb.finish()  # the tool call let the cell continue
    assert nb.python("len(form.results)") == 4
    # Picking an earlier call shows its result and selects it.
    form.get_by_label("Call shown").select_option(value="1")
    nb.wait_python("form.selection.to_frame()[['call', 'ok']].values.tolist()", [[1, True]])
    page.wait_for_function("() => document.querySelector('.afk-seen').innerText.includes('Rome <i>')")
    # Fill in the fields from Python.
    nb.execute("form.fill(places=[{'city': 'Bern', 'metres': 5}], exact=True)")
    form.get_by_role("button", name="Fields").click()
    page.wait_for_function("() => document.querySelector('[aria-label=\"places, item 1: city\"]')?.value === 'Bern'")
    browser.expect(form.get_by_label("Pass exact")).to_be_checked()
    browser.expect(form.get_by_label("Pass days")).not_to_be_checked()


REWARD = """
import agentfly_kit as af
from agentfly_kit import widgets as w

def chain(i):
    text = ("<script>alert(1)</script> " if i == 0 else "it is ") + str(i if i % 3 == 0 else -1)
    turns = (af.Turn("prompt", "task", (1, 2), text="?"),
             af.Turn("action", "policy", (3,), True, logprobs=(-0.5,), versions=(0,), text=text,
                     messages=({"role": "assistant", "content": text},)))
    task = af.Task(f"q{i}", ({"role": "user", "content": f"{i}?"},), {"answer": str(i)})
    return af.Trajectory(f"q{i}/0", task, f"q{i}", 0, turns, "answered", reward=0.0)

from agentfly_kit.agent.rollout import Rollout
rollout = Rollout.from_trajectories([chain(i) for i in range(12)])
"""


@browser.both
def test_a_reward_is_edited_and_scored_again(notebook: Any) -> None:
    nb = notebook(
        REWARD,
        "@af.reward\ndef ends(final: str | None, answer: str) -> float:\n    return float(final.endswith(answer))",
        "form = w.RewardForm(ends, rollout)\nform",
    )
    page = nb.run()
    form = page.locator(".afk-rewardform")
    form.locator("text=changed (5)").wait_for(state="attached")
    browser.expect(form.locator("tbody tr td.afk-k-gained")).to_have_count(5)
    browser.expect(form.locator(".afk-scores")).to_contain_text("0 → 0.4167", use_inner_text=True)
    # After the cell that defines the reward is edited and re-run, the form re-scores.
    page.evaluate(
        """async () => { const nb = window.jupyterapp.shell.currentWidget.content;
        nb.activeCellIndex = 1;
        nb.activeCell.model.sharedModel.setSource(
          "@af.reward\\ndef ends(final: str | None) -> float:\\n    return 0.5");
        window.jupyterapp.commands.execute('notebook:run-cell'); }"""
    )
    form.locator("text=changed (12)").wait_for(state="attached")
    form.locator("text=(previously 0.4167)").first.wait_for()
    form.get_by_label("Trajectories shown").select_option("higher")
    form.get_by_role("button", name="q0/0").click()
    nb.wait_python("form.picked.id", "q0/0")
    detail = form.get_by_role("region", name="Selected trajectory")
    detail.locator("text=Reward 0.5").wait_for()
    browser.expect(detail).to_contain_text("<script>alert(1)</script>", use_inner_text=True)
    assert "null" not in detail.inner_text()
    assert nb.python("float(form.rescored.trajectories[0].reward)") == 0.5
    assert nb.python("form._notice") == ""
