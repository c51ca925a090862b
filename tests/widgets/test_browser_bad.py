"""Hostile input and bad timing for every view on a real page: no model output is executed and no page errors occur."""

# ruff: noqa: E501  (cells of a notebook)
import re
from pathlib import Path
from typing import Any

import browser
import pytest
from paths import TESTS
from test_browser import RECORDS

WHY_NOT = browser.missing()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

START = (
    RECORDS
    + f"\nimport sys\nsys.path[:0] = {[str(TESTS), str(Path(__file__).parent)]!r}\nimport agents\nimport agentfly_kit as af\n"
    + """
from dataclasses import replace
from views import NASTY
BOMB = "<script>window.hacked = 1</script><img src=x onerror='window.hacked=2'><svg onload='window.hacked=3'>"
NASTY = tuple(x for x in NASTY if len(x) < 100) + (BOMB, "javascript:alert(1)", "</textarea></pre></style>" + BOMB)

def stay(view):
    views.append(view)
    return view
views = []
"""
)
NASTY = """
def made(i, *turns, **more):
    id = f"{BOMB}/{i}"
    task = Task(BOMB + str(i), ({"role": "user", "content": "".join(NASTY)},), {"answer": BOMB, "n": i})
    linked, before = [], None
    for t in turns:
        before = replace(t, parent=before)
        linked.append(before)
    more = {"stop": "answered", "reward": 0.5, "metrics": {BOMB: 1.0}} | more
    return Trajectory(id, task, BOMB, i, tuple(linked), **more)

def ids(token_texts, off=0):
    return tuple(range(10 + off, 10 + off + len(token_texts)))

def one(kind, author, token_texts=NASTY, off=0, **more):
    token_texts = tuple(token_texts)
    sampled = {}
    if kind == "action":
        sampled = {"sampled": True, "logprobs": (-0.5,) * len(token_texts), "entropies": (0.1,) * len(token_texts), "versions": (0,) * len(token_texts)}
    return Turn(kind, author, ids(token_texts, off), text="".join(token_texts), token_texts=token_texts, **sampled, **more)

failure = af.Failure(f"tool {BOMB}", "OSError", BOMB, f"Traceback {BOMB}")
from agentfly_kit.types import ToolCall, ToolResult
call = ToolCall("c", BOMB, {"x": "".join(NASTY)}, result=ToolResult(False, "".join(NASTY), error=failure))
said = {"role": "assistant", "content": BOMB}
nasty = made(0, one("prompt", "task"), one("action", BOMB, messages=(said,), tool_calls=(call,)), one("observation", "tool", tool_calls=(call,)), error=failure, stop="error")
no_action = made(1, one("prompt", "task"), stop="cancelled", reward=None)
single = made(2, one("action", "policy", ("x",), messages=(said,)))
foreign = made(3, one("prompt", "task", NASTY[:5], 90_000), one("action", "policy", ("Ġhello", "▁there", "Ċ", "<0x0A>"), 90_000, messages=(said,)))
bare = made(4, Turn("prompt", "task", None, text=BOMB), Turn("action", "policy", None, text=BOMB, messages=(said,)))
empty = made(5)
all_of_them = [nasty, no_action, single, foreign, bare, empty]

stats = step([nasty, single])
import torch
stats.detail["advantage"][:] = math.nan
stats.batch.advantages[:] = math.nan

class Named(Box):
    pass
pool = af.Pool(Named, size=3)
leases = [await pool.acquire(owner=BOMB), await pool.acquire(owner="".join(x for x in NASTY if x.isprintable()))]
runs = Run(3)
runs.records[1] |= {"reward": math.nan, "loss": math.inf, "grad_norm": -math.inf, "success": None}

@af.tool
def evil(text: str = BOMB) -> str:
    '''<script>window.hacked = 4</script>

    Args:
        text: <img src=x onerror=window.hacked=5>
    '''
    return "".join(NASTY)

@af.reward
def hostile(final: str | None) -> float:
    raise ValueError(BOMB)

agent = agents.played(lambda task, turn: [agents.call(BOMB), agents.call(name="evil"), BOMB][min(turn, 2)], tools=[agents.calculator, evil])
ran = agent.rollout([af.Task(BOMB, ({"role": "user", "content": BOMB},), {"answer": "1"}), agents.tasks(1)[0]])
"""
SHOWN = (
    "stay(w.TokenView([nasty, single, foreign, no_action, bare, empty], signal='logprob'))",
    "stay(w.TokenView(stats, signal='advantage'))",
    "stay(w.TokenView(nasty, compare=foreign))",
    "stay(w.TokenView(no_action))",
    "stay(w.TokenView(single, signal='entropy'))",
    "everything = stay(w.TrajectoryView(all_of_them))\neverything.select(*all_of_them)\neverything",
    "stay(w.PoolView(pool))",
    "stay(w.TrainView(runs, names=[BOMB]))",
    "form = stay(w.ToolForm(evil))\nawait form.call()\nform",
    "scores = stay(w.RewardForm(hostile, [nasty, single]))\nawait scores.score()\nscores._do_look(nasty.id)\nscores",
    "lanes = stay(w.RolloutView(ran))\nrollout = await ran\nlanes",
    "chain = agent.chain(agents.tasks(1)[0])\nchain.force(agents.call(BOMB))\nawait chain.act()\nchain.force(''.join(NASTY).encode('utf-8', 'replace').decode())\nstay(w.ChainStepper(chain))",
    "stay(w.TokenView([]))",
    "stay(w.TrajectoryView([]))",
)
INSIDE = """() => [window.hacked ?? null, [...document.querySelectorAll('.afk script, .afk img, .afk iframe, .afk object, .afk a[href]')]
  .map((x) => x.outerHTML.slice(0, 120))]"""


def press_everything(page: Any, root: str = ".afk") -> int:
    """Press every enabled button once, set every list to its last entry, and return the number of actions."""
    return int(
        page.evaluate(
            """async (root) => { let n = 0; const pause = () => new Promise((f) => setTimeout(f, 30));
            for (const view of document.querySelectorAll(root)) {
              for (const x of view.querySelectorAll('select')) {
                x.focus(); if (x.options.length) x.selectedIndex = x.options.length - 1;
                x.dispatchEvent(new Event('change', { bubbles: true })); await pause(); n++; }
              for (const x of [...view.querySelectorAll('button, summary, .afk-item, .afk-tok')].slice(0, 40)) {
                if (!x.isConnected || x.disabled) continue;
                x.dispatchEvent(new PointerEvent('pointerover', { bubbles: true })); x.click?.(); await pause(); n++; }
              for (const x of view.querySelectorAll('[tabindex="0"]')) for (const key of ['ArrowDown', 'End', 'PageUp', 'n', 'c', 'r', 'Enter', 'Escape']) {
                x.focus(); x.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true })); n++; }
            } return n; }""",
            root,
        )
    )


def test_what_a_model_or_a_tool_wrote_is_never_run(notebook: Any) -> None:
    nb = notebook(START, NASTY, *SHOWN, size=(1280, 1600))
    page = nb.run(wait=False)
    nb.finish()
    page.wait_for_function(
        "(n) => document.querySelectorAll('.jp-OutputArea-output .afk').length >= n", arg=len(SHOWN)
    )
    page.wait_for_timeout(1000)
    assert page.evaluate(INSIDE) == [None, []]
    page.evaluate("() => document.querySelectorAll('.afk-tokens').forEach((x) => x.scrollTo(0, x.scrollHeight))")
    page.get_by_text("The engine returned only text").first.wait_for()  # rows are drawn when scrolled near
    page.wait_for_function(
        "() => document.querySelector('.jp-Notebook').innerText.split('<script>window.hacked = 1</script>').length > 21"
    )
    for text in ("no action", "share their first 0 tokens"):
        page.get_by_text(text).first.wait_for()
    # An advantage of NaN counts as missing: it is neither 0 nor drawn.
    lost = page.locator(".afk-tokenview").nth(1)
    browser.expect(lost).to_contain_text(re.compile("no token has a finite advantage|missing"), use_inner_text=True)
    browser.expect(lost.locator(".afk-high, .afk-low")).to_have_count(0)
    assert press_everything(page) > 100
    page.wait_for_timeout(1500)
    assert page.evaluate(INSIDE) == [None, []]
    nb.execute("for lease in leases:\n    await lease.release()\nawait pool.close()")


def test_opened_twice_closed_amid_updates_and_after_a_restart(notebook: Any) -> None:
    nb = notebook(
        START,
        """
        ts = [trajectory(i) for i in range(3)]
        pool = af.Pool(Box, size=4)
        run = Run(2)
        agent = agents.scripted([agents.call(), "42"], latency=0.02)
        going = agent.rollout(agents.tasks(1), group_size=400, max_concurrency=4)
        chain = agents.scripted([agents.call(), "42"]).chain(agents.tasks()[0])
        scores = w.RewardForm(agents.exact, await agents.scripted(["42"]).rollout(agents.tasks(4)))
        all = [w.TokenView(step(ts), signal="ratio"), w.TrajectoryView(ts), w.ChainStepper(chain), w.PoolView(pool),
               w.TrainView(run), w.RolloutView(going), w.ToolForm(agents.calculator), scores]
        """,
        "for view in all:\n    display(view)",
        "for view in all:\n    display(view)",
        """
        async def churn():
            i = 0
            while True:
                lease = await pool.acquire(owner=f"c-{i}")
                run.step()
                chain.rewind(0)
                chain.force(f"turn {i}")
                await asyncio.sleep(0.02)
                await pool.release(lease)
                i += 1
        work = asyncio.ensure_future(churn())
        rolling = asyncio.ensure_future(going._wait())
        """,
        size=(1280, 1600),
    )
    page = nb.run(wait=False)
    nb.finish()
    page.wait_for_function("() => document.querySelectorAll('.afk').length === 16")
    nb.wait_python("[len(v._pages) for v in all]", [2] * 8)
    # A selection in one output also appears in the other output of the same view.
    page.locator(".afk-tokenview").first.locator(".afk-tok").nth(30).click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.afk-tokenview')].every((x) => x.querySelector('.afk-sel'))"
    )
    # If one of two outputs is closed during updates, the other output continues.
    page.evaluate(
        """() => { const nb = window.jupyterapp.shell.currentWidget.content; nb.activeCellIndex = 2;
        return window.jupyterapp.commands.execute('notebook:clear-cell-output'); }"""
    )
    page.wait_for_function("() => document.querySelectorAll('.afk').length === 8")
    nb.wait_python("[len(v._pages) for v in all]", [1] * 8)
    before = page.locator(".afk-trainview .afk-chartkey, .afk-trainview .afk-bar").first.inner_text()
    page.wait_for_function("(was) => document.querySelector('.afk-trainview .afk-bar').innerText !== was", arg=before)
    # A view closed in Python during updates keeps its last picture and reports no error.
    nb.execute("for v in (all[3], all[4], all[5]):\n    v.close()")
    page.wait_for_timeout(500)
    # After a kernel restart, every remaining view says so, and no button raises an error.
    nb.command("kernelmenu:restart")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_selector(".afk-stale", state="visible")
    left = page.locator(".afk").count()
    page.wait_for_function(
        "(n) => [...document.querySelectorAll('.afk-stale')].filter((x) => !x.hidden && /kernel restarted/.test(x.innerText)).length === n",
        arg=left,
    )
    assert left >= 5
    assert press_everything(page) > 50
    page.wait_for_timeout(500)
