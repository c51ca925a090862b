"""Accessibility of all views: axe-core in light and dark themes and two widths, and use by keyboard alone."""

import json
from pathlib import Path
from typing import Any

import browser
import pytest
from paths import ROOT, TESTS
from test_browser import RECORDS
from test_browser_forms import TOOL

WHY_NOT = browser.missing()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

VIEWS = """
from agentfly_kit.pool.pool import Pool
from agentfly_kit.agent.rollout import Rollout
ts = [trajectory(i) for i in range(3)]
stats = step(ts)
pool = Pool(Box, size=4)
held = [await pool.acquire(owner="calc-1/0"), await pool.acquire(owner="a person")]
waiting = [asyncio.ensure_future(pool.acquire(owner=f"calc-{i}")) for i in range(4)]
await asyncio.sleep(0.2)
run, other = Run(20), Run(9)

@af.reward
def short(final: str | None) -> float:
    return float(final is None)

class Scored:
    pass
"""
CELLS = {
    "TokenView mask": "tokens = w.TokenView(ts[0])\ntokens",
    "TokenView ratio": "ratio = w.TokenView(stats, signal='ratio')\nratio.select('calc-7/0', 47, 52)\nratio",
    "TokenView clipped": "w.TokenView(stats, compare=ts, signal='clipped')",
    "PoolView": "w.PoolView(pool)",
    "TrainView": "w.TrainView(run)",
    "TrainView of two": "two = w.TrainView(run, other, names=['a', 'b'])\ntwo.step = 4\nawait two.open_step(4)\ntwo",
    "ToolForm": "form = w.ToolForm(weather)\nawait form.call(places=[{'city': 'Rome'}], unit='F', note='fail')\nform",
    "RewardForm": "scores = w.RewardForm(short, ts)\nawait scores.score()\nscores._do_look(ts[1].id)\nscores",
    "TrajectoryView": "w.TrajectoryView(Rollout.from_trajectories(ts))",
    "ToolForm, a chain below": f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport agents\n"
    "chained = w.ToolForm(agents.calculator, agent=agents.scripted(['42']), task=agents.tasks()[0])\n"
    'chained._do_chain(\'{"expression": "6*7"}\')\nchained',
}
PICTURES = ROOT / "build" / "screenshots"
AXE = Path(str(__import__("axe_playwright_python").__path__[0])) / "axe.min.js"


# Whether no transition between two themes is in progress.
STILL = "() => !document.getAnimations().some((x) => x instanceof CSSTransition)"


def settle(nb: browser.Notebook, count: int) -> None:
    """Wait until `count` views are open, and until the page has handled all messages that they have sent so far."""
    views = "[v for v in w._base._instances.values() if isinstance(v, w.View) and v.is_open and not v._jobs]"
    nb.wait_python(f"len({views})", count)
    for notice, shown in (("settled", count), ("", 0)):  # sent after the other messages, which arrive in order
        nb.execute(f"for v in {views}: v._notice = {notice!r}")
        browser.expect(nb.page.get_by_text("settled", exact=True)).to_have_count(shown)


def check_axe(nb: browser.Notebook, theme: str) -> None:
    """Assert that axe-core finds no violation in our elements: WCAG 2.2 A and AA, and best practices."""
    nb.theme(theme)
    nb.page.wait_for_function(STILL)
    nb.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = nb.page.evaluate(
        """async () => (await axe.run({ include: [['.afk']] }, {
          runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'],
        })).violations.flatMap((v) => v.nodes.map((n) => [v.id, v.help, n.target.join(' '), n.html.slice(0, 160),
          n.any.concat(n.all, n.none).map((c) => c.message).join('; ').slice(0, 300)]))"""
    )
    assert not found, f"{theme}: {json.dumps(found, indent=1)}"


@pytest.mark.parametrize("width", [1280, 560])
def test_axe_has_nothing_to_say(notebook: Any, width: int) -> None:
    nb = notebook(RECORDS + "\n" + TOOL, VIEWS, *CELLS.values(), size=(width, 1400))
    if width < 1000:
        nb.without_sidebar()
    page = nb.run(wait=False)
    nb.finish()
    page.wait_for_function("(n) => document.querySelectorAll('.afk').length >= n", arg=len(CELLS) + 1)
    page.wait_for_selector(".afk-below .afk-stepper .afk-turn2")
    page.get_by_role("button", name="Owners").click()
    for theme in ("Light", "Dark"):
        check_axe(nb, theme)


def test_everything_is_reached_by_tab_and_left_again(notebook: Any) -> None:
    each = [CELLS[name] for name in ("ToolForm", "TokenView ratio", "TrainView", "PoolView", "RewardForm")]
    chains = (
        "many = w.TrajectoryView(ts)\nmany.select(ts[0], ts[1])\nmany",
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport agents\n"
        "run = agents.scripted(['42']).rollout(agents.tasks(3))\nlanes = w.RolloutView(run)\ndone = await run\n"
        "lanes.pick(done.trajectories[0])\nlanes",
        "w.ChainStepper(agents.scripted(['42']).chain(agents.tasks()[0]))",
    )
    nb = notebook(RECORDS + "\n" + TOOL, VIEWS, *each, *chains)
    page = nb.run(wait=False)
    nb.finish()
    settle(nb, 8)
    kinds = {view.get_attribute("class").split()[1] for view in page.locator(".afk").all()}
    assert len(kinds) == 8, kinds
    for view in page.locator(".afk").all():
        wanted = view.evaluate(
            """(view) => [...view.querySelectorAll('button, select, input, textarea, summary, [tabindex="0"]')].filter(
              (x) => x.checkVisibility() && !x.disabled && !x.closest('details:not([open]) > :not(summary)')).length"""
        )
        view.evaluate("(view) => { view.tabIndex = -1; view.focus(); }")
        reached = set()
        for _ in range(wanted + 1):
            page.keyboard.press("Tab")
            at = view.evaluate(
                """(view) => view.contains(document.activeElement)
                  ? [...view.querySelectorAll('*')].indexOf(document.activeElement) : -1"""
            )
            if at < 0:
                break
            reached.add(at)
            ring = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
            assert ring != "none", page.evaluate("() => document.activeElement.outerHTML.slice(0, 200)")
        assert len(reached) >= wanted, f"{len(reached)} of {wanted}"
        assert at < 0, "Tab does not leave the view"


# Controls that reach beyond the view in which they are, or that are too small to be hit. (axe-core checks checkboxes.)
CUT = """(view) => { const box = view.getBoundingClientRect();
  return [...view.querySelectorAll('button, select, input:not([type=checkbox]), textarea, summary')].filter((x) => x.checkVisibility()).map((x) => {
    const own = x.getBoundingClientRect();
    return [own.left < box.left - 1 || own.right > box.right + 1 || own.height < 16, x.outerHTML.slice(0, 160)];
  }).filter(([cut]) => cut); }"""  # noqa: E501


def test_views_are_usable_236_pixels_wide(notebook: Any) -> None:
    nb = notebook(RECORDS + "\n" + TOOL, VIEWS, *CELLS.values(), size=(1280, 3000))
    page = nb.page
    page.add_style_tag(content=".jp-Notebook .afk:not(.afk .afk) { width: 236px; }")
    nb.run()
    settle(nb, len(CELLS) + 1)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for i, view in enumerate(page.locator(".jp-OutputArea-output .afk").all()):
        name = view.get_attribute("class").split()[1]
        view.screenshot(path=PICTURES / f"236-{i}-{name}.png")
        assert view.evaluate("(x) => x.scrollWidth - x.clientWidth") <= 0, name
        assert view.evaluate(CUT) == [], name
