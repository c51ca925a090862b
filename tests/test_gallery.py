"""The pictures of docs/gallery.md: made here from records like those of the other browser tests, to be looked at.

They are written to build/gallery; after a change of a view copy them to docs/images/gallery.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import browser
import pytest
from test_browser import RECORDS
from test_browser_access import CELLS, VIEWS
from test_browser_forms import TOOL

WHY_NOT = browser.missing()
ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "images" / "gallery"
MADE = ROOT / "build" / "gallery"
MORE = {
    "TrajectoryView": "many = w.TrajectoryView(Rollout.of(ts))\nmany.select(*[t.id for t in ts[:2]])\nmany",
    "ChainStepper": (
        "import agents\nfrom agentfly_kit import tiny\npolicy = tiny.policy('calculator')\n"
        "agent = af.Agent(af.LocalEngine(policy), chat=policy.chat, tools=[agents.calculator], reward=agents.exact)\n"
        "chain = agent.chain(agents.tasks(1)[0])\nawait chain.step()\nstepper = w.ChainStepper(chain)\nstepper"
    ),
}
SHOTS = {
    "token_view": "TokenView ratio", "token_view_mask": "TokenView mask", "pool_view": "PoolView",
    "train_view": "TrainView of two", "tool_form": "ToolForm", "reward_form": "RewardForm",
    "trajectory_view": "TrajectoryView", "chain_stepper": "ChainStepper",
}  # fmt: skip
NARROW = ("token_view", "pool_view", "train_view")


def names() -> set[str]:
    return {f"{name}-{theme}.png" for name in SHOTS for theme in ("light", "dark")} | {
        f"{name}-narrow.png" for name in NARROW
    }


def test_the_gallery_has_its_pictures() -> None:
    shown = set(re.findall(r"images/gallery/([\w.-]+)", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")))
    assert shown == names() == {path.name for path in KEPT.glob("*.png")}
    assert sum(path.stat().st_size for path in KEPT.glob("*.png")) < 2_000_000


@pytest.mark.real
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_pictures_for_the_gallery(notebook: Any) -> None:
    cells = {name: (MORE | {k: v for k, v in CELLS.items() if k not in MORE})[name] for name in SHOTS.values()}
    path = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    nb = notebook(path + RECORDS + "\n" + TOOL, VIEWS, *cells.values(), size=(1060, 2400))
    nb.command("application:toggle-left-area")
    nb.run(wait=False)
    nb.finish(240)
    page = nb.page
    MADE.mkdir(parents=True, exist_ok=True)
    page.wait_for_function("(n) => document.querySelectorAll('.afk').length >= n", arg=len(SHOTS))

    def shoot(name: str, end: str) -> None:
        cell = page.locator(".jp-Notebook .jp-Cell").nth(2 + list(SHOTS).index(name))
        view = cell.locator(".afk").first
        view.scroll_into_view_if_needed()
        page.wait_for_timeout(250)
        view.screenshot(path=MADE / f"{name}-{end}.png")

    for theme in ("Light", "Dark"):
        nb.theme(theme)
        page.wait_for_timeout(400)
        for name in SHOTS:
            shoot(name, theme.lower())
    nb.theme("Light")
    page.set_viewport_size({"width": 520, "height": 2000})
    page.wait_for_timeout(500)
    for name in NARROW:
        shoot(name, "narrow")
    assert names() == {path.name for path in MADE.glob("*.png")}
