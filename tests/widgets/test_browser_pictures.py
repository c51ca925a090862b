"""Pictures of views in a saved notebook, reopened without a kernel and reloaded with a kernel."""

import html
import re
import subprocess
import sys
import textwrap
import time
from typing import Any

import browser
import nbformat
import pytest
from paths import ROOT
from waiting import GUARD

from agentfly_kit import widgets as w

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
    "RolloutView": "16 of 16 chains", "TrainView": "2 steps", "PoolView": "1 leased", "ChainStepper": "stop",
    "ToolForm": "5",
}  # fmt: skip


def _save(nb: Any) -> Any:
    nb.page.evaluate(f"async () => {{ {nb._PANEL} await panel.context.save(); }}")
    return nbformat.read(nb.path, as_version=4)


def _saved_when(nb: Any, texts: dict[str, str]) -> dict[str, str]:
    """Save until the pictures contain these texts, because pictures are updated at most every two seconds."""
    end = time.monotonic() + GUARD
    while True:
        pictures = _pictures(_save(nb))
        lacking = [
            name for name, text in texts.items() if text not in html.unescape(re.sub("<[^>]+>", "", pictures[name]))
        ]
        if not lacking:
            return pictures
        assert time.monotonic() < end, lacking
        nb.page.wait_for_timeout(200)


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


def _assert_pictures_shown(nb: Any) -> None:
    """Assert that the page shows the picture of every view in its final state, and no live view."""
    page = nb.page
    page.wait_for_function(
        "(n) => document.querySelectorAll('.jp-RenderedHTMLCommon.jp-OutputArea-output').length >= n",
        arg=len(WIDGETS),
    )
    text = "\n".join(page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output").all_inner_texts())
    for shown in FINISHED.values():
        assert shown in text
    body = page.locator(".jp-Notebook").inner_text()
    for complaint in ("Error displaying widget", "model not found", "Loading widget"):
        assert complaint not in body
    browser.expect(page.locator(".afk")).to_have_count(0)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{nb.path.stem}.png", full_page=True)


# Index of each view's cell, and text shown by the final state of both the live form and the picture.
HEADLINES = {
    "RolloutView": (1, "16 of 16 chains"), "TrainView": (2, "2 of 2"), "PoolView": (3, "1 leased"),
    "ChainStepper": (4, "then the chain answered"), "ToolForm": (5, "✓ ok"), "RewardForm": (7, "0.3125 → 0.25"),
    "TokenView": (8, "16 rows, 751 tokens"), "TrajectoryView": (9, "16 trajectories"),
}  # fmt: skip


@needs_browser
@pytest.mark.real
def test_views_are_shown_by_their_pictures_after_the_notebook_was_closed(notebook: Any, lab: browser.Lab) -> None:
    """Compare each live view with its picture, in JupyterLab and Notebook 7.

    The picture must fit the width of the page, be at most four times as high as the view, and not be blank: an image
    of one colour has less than one kilobyte.
    """
    nb = notebook(*CELLS)
    page = nb.run()
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    heights: dict[str, float] = {}
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name, (number, headline) in HEADLINES.items():
        live = cells.nth(number).locator(".afk")
        live.get_by_text(headline).first.wait_for()
        live.screenshot(path=SCREENSHOTS / f"saved-{name}-live.png")
        heights[name] = live.bounding_box()["height"]
    assert sorted(_saved_when(nb, {name: text for name, (_, text) in HEADLINES.items()})) == sorted(HEADLINES)
    assert page.locator(".afk").count() == len(HEADLINES), "saving changed the open page"
    nb.shut_down()
    for app, folder in (("lab", f"lab/workspaces/{nb.path.stem}/tree"), ("notebook7", "notebooks")):
        page.goto(f"{lab.url}/{folder}/{nb.path.name}")  # with a new kernel, in which the view does not exist
        page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady")
        for name, (number, headline) in HEADLINES.items():
            shown = cells.nth(number).locator(".jp-RenderedHTMLCommon.jp-OutputArea-output")
            shown.get_by_text(headline).first.wait_for()
            image = shown.screenshot(path=SCREENSHOTS / f"saved-{name}-{app}.png")
            assert shown.evaluate("(x) => x.scrollWidth <= x.clientWidth"), name
            assert 40 <= shown.bounding_box()["height"] <= 4 * heights[name], name
            assert len(image) > 3_000, name
        browser.expect(page.locator(".afk")).to_have_count(0)
        assert "Error" not in page.locator(".jp-Notebook").inner_text()


@needs_browser
@pytest.mark.real
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
    # Like nbclient: no metadata and no answer to `input()`. The output is a picture, because no page may ever show it.
    output = nb.page.evaluate(
        f"""async () => {{ {nb._PANEL} let output;
        const future = panel.sessionContext.session.kernel.requestExecute(
          {{ code: "w.PoolView(af.Pool(dict, size=1))", allow_stdin: false }});
        future.onIOPub = (m) => {{ if (m.header.msg_type === 'display_data') output = m.content; }};
        await future.done;
        const {{ data, metadata }} = output;
        panel.content.model.cells.get(0).outputs.add({{ output_type: 'display_data', data, metadata }});
        return output; }}"""
    )
    assert sorted(output["data"]) == ["text/html", "text/plain"]
    assert list(_pictures(_save(nb))) == ["ToolForm", "PoolView"]
    content = f"() => {{ {nb._PANEL} return panel.context.model.toJSON(); }}"
    saved = nb.page.evaluate(content)
    nb.page.reload()
    nb.page.wait_for_function("() => document.querySelectorAll('.afk').length === 2")
    nb.page.wait_for_function("() => window.jupyterapp.shell.currentWidget?.context?.isReady")
    assert nb.page.evaluate(content) == saved
    nb.wait_python("view.is_open", True)


@needs_browser
@pytest.mark.long
def test_a_kernel_that_dies_during_updates_leaves_the_last_pictures(notebook: Any) -> None:
    nb = notebook(
        """
        import os
        import agentfly_kit as af
        from agentfly_kit import widgets as w

        class Other(w.View):
            stem = "tool_form"  # like the state of another version: the page finds none of the traits that it needs

            def _static(self):
                return "<b>the other picture</b>"

        class Box:
            async def reset(self):
                pass

        pool = af.Pool(Box, size=3)
        view = w.PoolView(pool)
        view
        """,
        "Other()",
        "lease = await pool.acquire('a chain')",
    )
    page = nb.run()
    page.get_by_text("This view cannot be shown here").wait_for()
    page.locator(".afk").get_by_text("1 leased").first.wait_for()
    _saved_when(nb, {"PoolView": "1 leased"})
    page.evaluate(
        f"""() => {{ {nb._PANEL} panel.sessionContext.session.kernel.requestExecute(
          {{ code: "for _ in range(300): view.send_state()\\nos.kill(os.getpid(), 9)" }}).done.catch(() => {{}}); }}"""
    )
    page.locator(".jp-Dialog .jp-mod-accept").click()  # "The kernel appears to have died. It will restart."
    for stale in page.locator(".afk-stale").all():
        stale.get_by_text("this view shows the last state that it received").wait_for()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{nb.path.stem}.png")
    data = [output["data"] for cell in _save(nb).cells for output in cell["outputs"]]
    assert [LIVE in each for each in data] == [False, False]
    assert "1 leased" in data[0]["text/html"]
    page.reload()
    page.get_by_text("the other picture", exact=True).wait_for()
    page.locator(".jp-RenderedHTMLCommon").get_by_text("1 leased").first.wait_for()
    browser.expect(page.locator(".afk")).to_have_count(0)


@needs_browser
@pytest.mark.long
def test_outputs_and_widget_state_of_another_version_show_their_pictures(lab: browser.Lab) -> None:
    live, id = {"version_major": 2, "version_minor": 0}, "0" * 32
    first = {LIVE: {**live, "model_id": "1" * 32}, "text/html": "<b>picture of 0.1</b>", "text/plain": "TokenView()"}
    outputs = {
        0: [{"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": first}],
        1: [
            {
                "output_type": "display_data",
                "metadata": {"agentfly_kit": {"view": id}},
                "data": {"text/html": "<b>picture of nbclient</b>", "text/plain": "TokenView()"},
            }
        ],
    }
    path = lab.root / "another-version.ipynb"
    browser.write(path, ["# saved by version 0.1, which kept the live form", "# run by nbclient"], outputs)
    assert w.freeze(path) == 1
    saved = nbformat.read(path, as_version=4)
    esm = (ROOT / "widgets" / "_shared.js").read_text() + "\nexport default { initialize: keepPictures };"
    model = {"model_name": "AnyModel", "model_module": "anywidget", "model_module_version": "~0.9.*"}
    model["state"] = {"_esm": esm, "_view_module": "anywidget", "_view_name": "AnyView", "_anywidget_id": "old"}
    mime = "application/vnd.jupyter.widget-state+json"
    saved.metadata["widgets"] = {mime: {"version_major": 2, "version_minor": 0, "state": {id: model}}}
    nbformat.write(saved, path)
    lab.trust(path)
    nb = browser.Notebook(lab, path, 1280, 700)
    nb.page.get_by_text("picture of nbclient").wait_for()
    nb.page.wait_for_timeout(2_500)  # the models of the saved state are restored
    shown = nb.page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output").all_inner_texts()
    assert shown == ["picture of 0.1", "picture of nbclient"]
    assert "Error" not in nb.page.locator(".jp-Notebook").inner_text()
    nb.close()
    # JupyterLab reports that it cannot restore a model of another version of anywidget; the picture does not need it.
    assert [error for error in nb.errors if "Module anywidget, version ~0.9.* is not registered" not in error] == []


@needs_browser
@pytest.mark.real
def test_a_notebook_executed_without_a_page_shows_finished_pictures(lab: browser.Lab) -> None:
    path = lab.root / "headless.ipynb"
    browser.write(path, [textwrap.dedent(cell).strip() for cell in CELLS])
    _nbconvert("--execute", "--inplace", "--to", "notebook", path)
    executed = nbformat.read(path, as_version=4)
    for cell in executed.cells:
        assert not [output for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    pictures = _pictures(executed)
    assert sorted(pictures) == sorted(WIDGETS)
    for name, text in FINISHED.items():
        assert text in pictures[name], name
    _nbconvert("--to", "html", path)
    page = path.with_suffix(".html").read_text(encoding="utf-8")
    assert all(text in page for text in FINISHED.values())

    # JupyterLab prefers the live form in trusted notebooks only.
    lab.trust(path)
    for app in ("lab", "notebook7"):
        nb = browser.Notebook(lab, path, 1280, 1100, app=app)
        assert all(nb.page.evaluate(f"() => {{ {nb._PANEL} return [...panel.model.cells].map((c) => c.trusted); }}"))
        nb.page.wait_for_timeout(1_500)  # the models in the saved widget state are restored
        _assert_pictures_shown(nb)
        nb.close()
        assert nb.errors == []


def _nbconvert(*arguments: Any) -> None:
    command = [sys.executable, "-m", "nbconvert", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=GUARD)
