"""Random clicks on the buttons of a PoolView while the tutorial about sandboxes runs."""

from typing import Any

import browser
import nbformat
import pytest
from paths import ROOT

WHY_NOT = browser.missing()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

# Presses a random button of the view 20 times per second. Every second press is Take or Release.
PRESS = """() => { let seed = 7; window.pressed = {};
  const random = (n) => { seed = (seed * 1103515245 + 12345) % 2147483648; return Math.floor(seed / 65536) % n; };
  setInterval(() => {
    const view = document.querySelector('.afk-poolview');
    const select = view?.querySelector('select');
    if (!select) return;
    if (select.options.length) {
      const taken = [...select.options].findIndex((x) => x.textContent.includes('by hand'));
      select.selectedIndex = random(2) && taken >= 0 ? taken : random(select.options.length);
      select.dispatchEvent(new Event('change'));
    }
    const names = random(2) ? ['Take', 'Release'] : null;
    const buttons = [...view.querySelectorAll('button')].filter((x) => !x.disabled && x.checkVisibility() && (!names || names.includes(x.textContent)));
    if (!buttons.length) return;
    const button = buttons[random(buttons.length)];
    window.pressed[button.textContent] = (window.pressed[button.textContent] ?? 0) + 1;
    button.click();
  }, 50); }"""  # noqa: E501


def test_the_sandbox_tutorial_survives_every_button(notebook: Any) -> None:
    saved = nbformat.read(ROOT / "notebooks" / "04_sandboxes.ipynb", as_version=4)
    nb = notebook(*[cell.source for cell in saved.cells if cell.cell_type == "code"])
    nb.page.evaluate(PRESS)
    nb.run(wait=False)
    nb.finish()
    pressed = nb.page.evaluate("() => window.pressed")
    print(pressed, nb.python("repr(rollout)"))
    assert pressed["Take"] > 5 and pressed["Release"] > 2 and pressed["Close"] + pressed["Reset"] > 2
    assert nb.python("len(rollout)") == 64
    # Chains that lost their sandbox are not scored. All other chains have reward 1.
    assert nb.python("{t.reward for t in rollout if t.reward is not None}") == {1.0}
    reasons = (
        nb.python("{t.error.type for t in rollout if t.reward is None}") if nb.python("len(rollout.failed)") else {}
    )
    assert set(reasons) <= {"LeaseRevoked", "SandboxError"}
    nb.page.locator(".afk-poolview", has_text="This pool is closed.").wait_for()
    assert nb.python("af.pools()") == []
