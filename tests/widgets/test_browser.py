"""Views in a real JupyterLab: rendering, clicks that reach Python, and updates while a cell awaits."""

import inspect
import textwrap
from typing import Any

import browser
import pytest
from paths import TESTS

WHY_NOT = browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


# --- records, made in the notebook's kernel -------------------------------------------------------


def records() -> None:
    """The body of this function is the first cell of every notebook in this file."""
    import asyncio
    import math
    import re

    import numpy as np
    import torch
    from views import FakeRun, batch_of, stats_of

    from agentfly_kit import widgets as w  # noqa: F401  (for the cells)
    from agentfly_kit.trajectories import Trajectory
    from agentfly_kit.types import Task, Turn

    vocabulary: dict = {}

    def turn(kind, author, text, rng=None):
        token_texts = tuple(re.findall(r"<[^<>\s]+>|\s?\w+|\n|\s?[^\w\s]|\s", text))
        ids = tuple(vocabulary.setdefault(piece, len(vocabulary) + 10) for piece in token_texts)
        extra = {}
        if rng is not None:
            extra = {
                "logprobs": tuple(-rng.gamma(0.5, 0.7, len(ids))), "entropies": tuple(rng.gamma(1, 0.4, len(ids))),
                "versions": (3,) * len(ids),
                "alternatives": tuple(
                    ((i, piece, -0.2), (10, "<|im_start|>", -1.9)) for i, piece in zip(ids, token_texts, strict=True)
                ),
            }  # fmt: skip
        return Turn(kind, author, ids, rng is not None, text=text, token_texts=token_texts, **extra)

    def trajectory(i, calls=2, wide=1):
        rng = np.random.default_rng(i)
        system = "<|im_start|>system\nYou are a calculator agent.<|im_end|>\n"
        user = "<|im_start|>user\nWhat is 3 * (4 + 5) - 7?<|im_end|>\n<|im_start|>assistant\n"
        turns = [turn("prompt", "task", system + user)]
        for k in range(calls):
            call = f'{{"name": "calculator", "arguments": {{"expression": "3*(4+{k})"}}}}'
            thought = "I need the calculator for this.\n" * wide
            turns.append(turn("action", "policy", f"{thought}<tool_call>{call}</tool_call><|im_end|>", rng))
            answer = f"<|im_start|>tool\n{3 * (4 + k)} <script>alert(1)</script><|im_end|>\n<|im_start|>assistant\n"
            turns.append(turn("observation", "tool", answer))
        turns.append(turn("forced", "hook", "Therefore"))
        turns.append(turn("action", "policy", " the answer is 20.<|im_end|>", rng))
        task = Task("calc-7", ({"role": "user", "content": "What is 3 * (4 + 5) - 7?"},))
        return Trajectory(f"calc-7/{i}", task, "calc-7", i, tuple(turns), "answered", reward=float(i % 2))

    def step(trajectories):
        batch = batch_of(trajectories)
        advantage = torch.tensor([[0.9 if t.reward else -0.7] for t in trajectories])
        batch.advantages = torch.where(batch.mask, advantage, math.nan)
        before = batch.logprobs.numpy()
        after = np.minimum(before + np.random.default_rng(0).normal(0, 0.15, before.shape), -1e-4)
        return stats_of(batch, after - before)

    class Box:
        async def start(self):
            await asyncio.sleep(0.02)

        async def reset(self):
            await asyncio.sleep(0.02)

    class Run(FakeRun):
        total = 24

        def step(self):
            i = len(self.records) + 1
            rng = np.random.default_rng(i)
            level = 1 - 0.75 * math.exp(-i / 7)
            record = {
                "success": min(1.0, max(0.0, level + rng.normal(0, 0.05))), "reward": level * 1.1,
                "approx_kl": abs(rng.normal(0, 0.008)), "clip_fraction": abs(rng.normal(0, 0.04)),
                "entropy": 1.8 * math.exp(-i / 15) + 0.1 * rng.random(), "grad_norm": 0.7 + rng.random(),
                "loss": rng.normal(0, 0.01), "tokens": int(rng.integers(9000, 15000)), "turns": 2 + rng.random(),
                "seconds": 1.5 + rng.random(),
            }  # fmt: skip
            if i % 4 == 0:
                record |= {"eval_success": level, "eval_low": level - 0.12, "eval_high": min(1.0, level + 0.08)}
            super().step(**record)


RECORDS = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(
    inspect.getsource(records).split('"""', 2)[2]
)


# Whether the cursor is at a token.
CURSOR = "(i) => document.querySelector('.afk-lines .afk-cur')?.i === i"


# --- TokenView -----------------------------------------------------------------------------------


@browser.both
def test_token_view_by_mouse_and_keys(notebook: Any) -> None:
    nb = notebook(
        RECORDS, "ts = [trajectory(i) for i in range(3)]\nview = w.TokenView(step(ts), signal='ratio')\nview"
    )
    page = nb.run()
    page.wait_for_selector(".afk-tokenview .afk-tok.afk-high")
    nb.wait_python("view.is_open", True)
    n = nb.python("len(ts[0].ids)")
    tokens = page.locator(".afk-lines .afk-tok")
    # Rows are drawn when they are scrolled near the visible area.
    page.locator(".afk-tokens").evaluate("(x) => x.scrollTo(0, x.scrollHeight)")
    page.wait_for_function(
        "(n) => document.querySelectorAll('.afk-lines .afk-tok').length === n", arg=nb.python("view.tokens")
    )
    # HTML in a tool's output is shown as text.
    assert page.evaluate("() => document.querySelectorAll('.afk-tokenview script').length") == 0
    assert "<script>alert(1)</script>" in "".join(tokens.all_inner_texts()[:n])
    page.locator(".afk-tokens").evaluate("(x) => x.scrollTo(0, 0)")
    kinds = page.evaluate("() => [...document.querySelectorAll('.afk-turn .afk-kind')].map((x) => x.textContent)")
    assert kinds[:7] == [
        "0 prompt", "1 action", "2 observation", "3 action", "4 observation", "5 forced", "6 action",
    ]  # fmt: skip

    # A click, a shift-click and a drag select spans of the trajectory in Python.
    first = nb.python("int(ts[0].action_mask.argmax())")
    tokens.nth(first).click()
    nb.wait_python("[(s.trajectory, s.start, s.stop) for s in view.selection]", [("calc-7/0", first, first + 1)])
    tokens.nth(first + 4).click(modifiers=["Shift"])
    nb.wait_python("[(s.start, s.stop) for s in view.selection]", [(first, first + 5)])
    tokens.nth(first + 6).hover()
    page.mouse.down()
    tokens.nth(first + 9).hover()
    page.mouse.up()
    nb.wait_python("[(s.start, s.stop) for s in view.selection]", [(first + 6, first + 10)])
    browser.expect(page.locator(".afk-lines .afk-sel")).to_have_count(4)
    assert nb.python("len(view.selection.to_frame())") == 4

    # The hover card shows the values from Python.
    tokens.nth(first).hover()
    ratio = nb.python(f"w._format.number(float(view._rows[0].signals['ratio'][{first}]))")
    browser.expect(page.locator(".afk-numbers .afk-on b")).to_have_text(ratio, use_inner_text=True)
    for text in ("rank 1", "81.9 % (sampled)"):
        browser.expect(page.locator(".afk-alts")).to_contain_text(text, use_inner_text=True)
    assert tokens.nth(first).evaluate("(x) => getComputedStyle(x).outlineStyle") == "solid"
    tokens.nth(0).hover()
    browser.expect(page.locator(".afk-numbers .afk-on b")).to_have_text("–", use_inner_text=True)
    browser.expect(page.locator(".afk-alts")).to_have_count(0)
    # Lines do not break inside a word.
    broken = page.evaluate(
        """() => { const all = [...document.querySelectorAll('.afk-lines')].slice(0, 3);
        const tokens = all.flatMap((x) => [...x.querySelectorAll('.afk-tok')]);
        all.forEach((x) => { x.style.width = '120px'; });
        const split = tokens.filter((x) => x.getClientRects().length > 1);
        const lines = new Set(tokens.map((x) => x.getBoundingClientRect().top));
        all.forEach((x) => { x.style.width = ''; });
        return [split.map((x) => x.textContent), lines.size]; }"""
    )
    assert broken[0] == [] and broken[1] > 10

    # Keys move and select in the view, and do not reach the notebook.
    cell = "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex"
    active = page.evaluate(cell)
    tokens.nth(first).click()
    nb.press("ArrowRight", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight")
    nb.wait_python("[(s.start, s.stop) for s in view.selection]", [(first + 2, first + 5)])
    nb.press("ArrowDown", "d", "d", "Escape")
    nb.wait_python("bool(view.selection)", False)
    assert page.evaluate(cell) == active
    assert page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length") == 2

    # The signal is synced with Python, and a button jumps to the most telling token.
    page.get_by_label("Signal", exact=True).select_option("clipped")
    nb.wait_python("view.signal", "clipped")
    page.get_by_role("button", name="Next clipped").click()
    browser.expect(page.locator(".afk-lines .afk-cur.afk-flag")).to_have_count(1)
    page.get_by_label("Signal", exact=True).select_option("entropy")
    page.get_by_role("button", name="Largest |ratio").click()
    far = nb.python("max((abs(float(r.signals['ratio'][i]) - 1), k, i) for k, r in enumerate(view._rows)"
                    " for i in range(len(r.ids)) if r.mask[i])[1:]")  # fmt: skip
    page.wait_for_function(CURSOR, arg=sum(nb.python(f"[len(r.ids) for r in view._rows[:{far[0]}]]")) + far[1])
    tokens.nth(first).click()
    page.keyboard.press("c")
    clipped = nb.python("[bool(x > 0) for x in view._rows[0].signals['clipped']]")
    following = [i for i, x in enumerate(clipped) if x and i > first]
    if following:
        page.wait_for_function(CURSOR, arg=following[0])
    page.get_by_label("Go to turn").focus()
    page.get_by_label("Go to turn").select_option(label="2 observation by tool", force=True)
    page.wait_for_function(CURSOR, arg=nb.python("view._rows[0].spans[2][1]"))
    page.get_by_text("as Python").click()
    page.wait_for_selector(".afk-about pre:has-text('w.TokenView(source')")
    nb.execute("view.signal = 'mask'; view.select('calc-7/2', 2, 4)")
    page.wait_for_selector(".afk-lines .afk-trained")
    browser.expect(page.locator(".afk-lines .afk-sel")).to_have_count(2)

    # Display the view twice, then close the two outputs one after the other.
    nb.execute("view.unobserve_all(); from IPython.display import display")
    nb.command("notebook:clear-all-cell-outputs")
    nb.wait_python("view.is_open", False)


@pytest.mark.real
def test_token_view_of_5000_tokens(notebook: Any) -> None:
    nb = notebook(
        RECORDS, "ts = [trajectory(i, 8, 3) for i in range(9)]\nview = w.TokenView(ts, signal='entropy')\nview"
    )
    page = nb.run()
    page.wait_for_selector(".afk-lines .afk-tok")
    n = nb.python("view.tokens")
    assert n > 5000
    assert page.locator(".afk-lines .afk-tok").count() < 4000  # other tokens are created when scrolled near
    page.locator(".afk-tokens").evaluate("(x) => x.scrollTo(0, x.scrollHeight)")
    page.wait_for_function("(n) => [...document.querySelectorAll('.afk-tok')].some((x) => x.i === n - 1)", arg=n)
    page.locator(".afk-tokens").focus()
    nb.press("ArrowRight", "PageDown", "PageDown", "PageUp", "End")
    page.wait_for_function(CURSOR, arg=nb.python("len(ts[0].ids)") - 1)
    page.get_by_label("Signal", exact=True).select_option("logprob")
    nb.wait_python("view.signal", "logprob")


@pytest.mark.real
def test_the_placeholders_of_an_image_are_one_cell(notebook: Any) -> None:
    make = """
        from dataclasses import replace
        from PIL import Image as P
        import agentfly_kit as af
        from agentfly_kit.types import ImageSpan
        red, wide = af.Image(P.new("RGB", (48, 48), "red")), af.Image(P.linear_gradient("L").resize((90, 30)))
        t = trajectory(0)
        first, *others = t.turns
        t = t.replace(turns=(replace(first, images=(ImageSpan(red, 3, 4), ImageSpan(wide, 9, 6))), *others))
        view = w.TokenView(t)
        view"""
    nb = notebook(RECORDS, make)
    page = nb.run()
    cells = page.locator(".afk-lines .afk-tok:has(img)")
    browser.expect(cells).to_have_count(2)
    assert cells.evaluate_all("(all) => all.map((x) => [x.i, x.title])") == [
        [3, "[image 48 x 48], 4 tokens"], [9, "[image 90 x 30], 6 tokens"],
    ]  # fmt: skip
    drawn = page.locator(".afk-lines .afk-tok")
    browser.expect(drawn).to_have_count(nb.python("view.tokens") - 8)
    cells.nth(1).hover()
    browser.expect(page.locator(".afk-big")).to_have_text("[image 90 x 30], 6 tokens")
    cells.nth(0).click()
    nb.wait_python("[(s.start, s.stop) for s in view.selection]", [(3, 7)])
    nb.press("ArrowRight", "ArrowRight", "Shift+ArrowRight")
    nb.wait_python("[(s.start, s.stop) for s in view.selection]", [(8, 15)])
    nb.press("ArrowLeft")
    page.wait_for_function(CURSOR, arg=8)
    page.get_by_label("Signal", exact=True).select_option("logprob")
    browser.expect(page.locator(".afk-tok.afk-off:has(img)")).to_have_count(2)


# --- live ----------------------------------------------------------------------------------------


def watch(nb: browser.Notebook, selector: str) -> None:
    """Record every text that an element shows while the cells run."""
    nb.page.evaluate(
        """(selector) => { window.seen = []; const node = document.querySelector(selector);
        new MutationObserver(() => { if (!window.ran) window.seen.push(node.textContent); })
          .observe(node, { childList: true, characterData: true, subtree: true }); }""",
        selector,
    )


@browser.both
def test_a_view_that_changes_in_its_cell_is_shown_once(notebook: Any) -> None:
    nb = notebook(RECORDS, "view = w.TokenView(trajectory(0, 4))\ndisplay(view)\nview.signal = 'logprob'")
    nb.run()
    nb.page.wait_for_selector(".afk-tokenview")
    nb.wait_python("len(view._pages)", 1)
    nb.page.wait_for_timeout(500)  # a second rendering would follow the first
    assert nb.python("len(view._pages)") == 1
    nb.execute("view.close()")  # JupyterLab reports an error, which fails the test, if a view was rendered twice
    browser.expect(nb.page.locator(".afk-tokenview")).to_have_count(0)
    comms = nb.python("len(__import__('comm').get_comm_manager().comms)")
    for _ in range(2):  # the comms of the first view are closed, so the page keeps and saves no state of it
        nb.run()
        nb.wait_python("len(view._pages)", 1)
        nb.wait_python("len(__import__('comm').get_comm_manager().comms)", comms + 2)


@browser.both
def test_pool_view_is_live_during_an_await(notebook: Any) -> None:
    nb = notebook(
        RECORDS,
        """
        from agentfly_kit.pool.pool import Pool
        pool = Pool(Box, size=4)
        view = w.PoolView(pool)
        view
        """,
        """
        async def chain(i):
            async with pool.lease(owner=f"chain-{i}"):
                await asyncio.sleep(0.3)
        start, updates = asyncio.get_running_loop().time(), view.updates
        while not view.selection:
            await asyncio.gather(*(chain(i) for i in range(24)))
        rate = (view.updates - updates) / (asyncio.get_running_loop().time() - start)
        """,
    )
    page = nb.run(wait=False)
    page.wait_for_selector(".afk-poolview .afk-tile")
    watch(nb, ".afk-poolview .afk-tiles")
    page.wait_for_selector(".afk-tile.afk-s-leased .afk-owner:has-text('chain-')")
    assert not page.evaluate("() => window.ran")  # the cell still awaits
    page.locator(".afk-waiter").first.wait_for()
    # The view shows several changes of owners before the cell ends, which a selection causes.
    page.wait_for_function("() => new Set(window.seen.join(' ').match(/chain-\\d+/g)).size >= 12")
    page.locator(".afk-poolview .afk-tile").first.click()
    nb.finish()
    assert nb.python("rate") <= 11
    page.wait_for_function("() => document.querySelectorAll('.afk-tile.afk-s-idle').length === 4")
    assert nb.python("view.counts['idle'], view._notice") == (4, "")
    # A selection by mouse or keys is available as a frame in Python, and the view as code.
    tiles = page.locator(".afk-poolview .afk-tile")
    tiles.nth(1).click()
    nb.wait_python("view.selection.numbers", (2,))
    tiles.nth(2).click(modifiers=["Control"])
    nb.wait_python("view.selection.to_frame()['state'].tolist()", ["idle", "idle"])
    nb.press("End", "Shift+ArrowLeft")
    nb.wait_python("view.selection.numbers", (3, 4))
    browser.expect(page.locator(".afk-poolview .afk-tile[aria-selected='true']")).to_have_count(2)
    page.locator(".afk-poolview").get_by_role("button", name="As Python").click()
    page.wait_for_function(
        "() => document.querySelector('.afk-poolview .afk-code')?.value.includes('view.select(3, 4)')"
    )
    page.locator(".afk-tiles").focus()
    page.keyboard.press("Escape")
    nb.wait_python("bool(view.selection)", False)
    # The tab and the history are kept when the view is displayed again. The view says when the pool is closed.
    page.locator(".afk-poolview").get_by_role("button", name="Events").click()
    nb.wait_python("view._tab", "events")
    nb.command("notebook:clear-all-cell-outputs")
    nb.wait_python("view.is_open", False)
    page.evaluate(
        """async () => { const nb = window.jupyterapp.shell.currentWidget.content;
        nb.activeCellIndex = 2;
        nb.activeCell.model.sharedModel.setSource("view");
        window.jupyterapp.commands.execute('notebook:run-cell'); }"""
    )
    page.locator(".afk-poolview button[aria-pressed='true']", has_text="Events").wait_for()
    page.wait_for_function(
        "() => document.querySelector('.afk-strip .afk-s-leased')?.getAttribute('points').split(' ').length > 40"
    )
    nb.execute("await pool.close()")
    page.locator(".afk-poolview", has_text="This pool is closed.").wait_for()
    browser.expect(page.locator(".afk-poolview").get_by_role("button", name="Take")).to_have_count(0)
    nb.execute("view.close()")
    assert not nb.python("bool(pool._listeners)")


@browser.both
def test_train_view_is_live_during_an_await(notebook: Any) -> None:
    nb = notebook(
        RECORDS,
        "run = Run()\nview = w.TrainView(run)\nview",
        """
        async def half():
            for _ in range(12):
                run.step()
                await asyncio.sleep(0.15)
        await half()
        while view.step is None:
            await asyncio.sleep(0.05)
        chosen = view.step
        await half()
        while view.step is not None:
            await asyncio.sleep(0.05)
        """,
    )
    page = nb.run(wait=False)
    page.wait_for_selector(".afk-trainview .afk-chart")
    page.wait_for_function("() => document.querySelectorAll('.afk-trainview .afk-line').length > 5")
    watch(nb, ".afk-trainview .afk-bar")
    assert not page.evaluate("() => window.ran")
    # A click reaches Python while the cell awaits.
    page.locator(".afk-chart svg").first.click(position={"x": 60, "y": 40})
    page.wait_for_selector("text=view.step")
    page.wait_for_selector(".afk-trainview [aria-valuenow='24']")
    page.wait_for_function("() => new Set(window.seen).size >= 2")
    page.get_by_role("button", name="Clear").click()
    nb.finish()
    assert nb.python("chosen") >= 1
    page.wait_for_selector("text=step 24 of 24")
    charts = page.locator(".afk-chart").filter(visible=True)
    browser.expect(charts.locator(".afk-name")).to_have_text(["success", "reward", "approx KL"])
    page.get_by_role("button", name="7 more charts").click()
    browser.expect(charts).to_have_count(10)
    page.get_by_role("button", name="Fewer charts").click()
    browser.expect(charts).to_have_count(3)
    browser.expect(page.locator(".afk-point")).to_have_count(1 + 6)  # one in the legend, and one per four steps
    page.locator(".afk-charts").focus()
    nb.press("Home", "ArrowRight", "Enter")
    nb.wait_python("view.step", 2)
    number = nb.python("w._format.number(float(view.to_frame()['approx_kl'][2]))")
    browser.expect(page.locator(".afk-now").nth(2)).to_have_text(number, use_inner_text=True)


# --- saved notebooks and pictures -----------------------------------------------------------------


def test_the_static_form_survives_an_untrusted_notebook(notebook: Any) -> None:
    """Open an untrusted notebook without kernel state, from whose outputs the widget-view type has been removed."""
    from views import FakeRun, trajectory

    from agentfly_kit import widgets as w

    views = [w.TokenView([trajectory("a"), trajectory("b", seed=1)], signal="logprob"), w.TrainView(FakeRun(9))]
    data = [{"text/html": view.freeze()._repr_html_(), "text/plain": "x"} for view in views]
    outputs = {i: [{"output_type": "display_data", "metadata": {}, "data": each}] for i, each in enumerate(data)}
    for view in views:
        view.close()
    nb = notebook("# tokens", "# curves", outputs=outputs)
    page = nb.page
    html = page.locator(".jp-RenderedHTMLCommon")
    html.first.wait_for()
    token = html.first.locator("span[title^='logprob']").first
    assert "logprob" in str(token.get_attribute("title"))
    assert token.evaluate("(x) => getComputedStyle(x).backgroundColor").startswith("rgba(220, 110, 30")
    assert (
        "⁹" in str(html.first.text_content()) and "⁹" not in html.first.inner_text()
    )  # hidden if styles are applied
    assert html.first.locator("wbr").count() > 10
    images = page.locator(".jp-RenderedHTMLCommon img")
    browser.expect(images).to_have_count(5)
    page.wait_for_function("() => document.querySelector('.jp-RenderedHTMLCommon img').naturalWidth > 0")


@pytest.mark.real
def test_pool_view_by_hand_with_keys_while_a_cell_awaits(notebook: Any) -> None:
    nb = notebook(
        RECORDS,
        """
        from agentfly_kit.pool.pool import Pool
        pool = Pool(Box, size=3)
        view = w.PoolView(pool)
        view
        """,
        """
        lease = await pool.acquire("calc-1/0")
        while not lease.revoked:
            await asyncio.sleep(0.05)
        """,
    )
    page = nb.run(wait=False)
    hands = page.locator(".afk-poolview").get_by_role("group", name="Manual control")
    page.locator(".afk-tile.afk-s-leased .afk-owner", has_text="calc-1/0").wait_for()
    hands.get_by_role("button", name="Take").focus()
    page.keyboard.press("Enter")
    page.locator(".afk-tile .afk-hand", has_text="this view").wait_for()
    select = hands.get_by_role("combobox", name="Sandbox to act on")
    select.select_option(label="#2 leased, you")
    give_back = hands.get_by_role("button", name="Release")
    give_back.focus()
    page.keyboard.press("Space")
    page.wait_for_function("() => !document.querySelector('.afk-poolview .afk-hand:not([hidden])')")
    page.locator(".afk-tile", has_text="calc-1/0").click()
    browser.expect(select).to_have_value("1")  # a click on a tile chooses it
    hands.get_by_role("button", name="Close").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.afk-owner')].some((x) => x.textContent === 'calc-1/0')"
    )
    browser.expect(hands).to_contain_text("requested: close #1", use_inner_text=True)
    hands.get_by_role("button", name="Take").click()
    page.locator(".afk-tile .afk-hand", has_text="this view").wait_for()
    nb.finish()
    nb.wait_python("lease.revoked", "closed by hand")
    assert nb.python("len(view.held), view._notice") == (1, "")
    nb.execute("view.close()")
    nb.wait_python("pool.snapshot().leased", 0)
    nb.execute("await pool.close()")
