"""Saved notebooks without a kernel, trusted and untrusted, and the HTML pages of the tutorials without a network."""

# ruff: noqa: E501  (what runs in the page)
from pathlib import Path

import browser
import nbformat
import pytest
from paths import ROOT
from test_notebooks import NOTEBOOKS, by_name

from agentfly_kit import _demo
from agentfly_kit.__main__ import copy_course

WHY_NOT = browser.missing()
pytestmark = [pytest.mark.real, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

TOUR = ROOT / "notebooks" / "06_widgets.ipynb"
PICTURES = TOUR.parent.parent / "build" / "screenshots"
VIEWS = (
    "TokenView", "TrajectoryView", "ChainStepper", "PoolView", "RolloutView", "TrainView", "ToolForm", "RewardForm",
)  # fmt: skip


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_a_saved_tour_shows_its_pictures(lab: browser.Lab, trusted: bool) -> None:
    name = f"tour-{'trusted' if trusted else 'untrusted'}"
    path = lab.root / f"{name}.ipynb"
    copy = nbformat.read(TOUR, as_version=4)
    copy.metadata["copy"] = name  # trust depends on the content, so copies must differ
    nbformat.write(copy, path)
    if trusted:
        lab.trust(path)
    # Shut down the kernel, which has run nothing, before the checks.
    nb = browser.Notebook(lab, path, 1280, 1400)
    page = nb.page
    page.evaluate(f"async () => {{ {nb._PANEL} await panel.sessionContext.shutdown(); }}")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    trusts = page.evaluate(
        f"() => {{ {nb._PANEL} return [...panel.content.model.cells].filter((c) => c.type === 'code').map((c) => c.trusted); }}"
    )
    assert all(trusts) if trusted else not all(trusts)
    nb.command("notebook:show-all-cell-outputs")  # some are saved collapsed
    shown = page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output")
    wanted = sum("text/html" in output.get("data", {}) for cell in cells for output in cell.outputs)
    page.wait_for_function(
        "(n) => document.querySelectorAll('.jp-RenderedHTMLCommon.jp-OutputArea-output').length === n", arg=wanted
    )
    text = "\n".join(shown.all_inner_texts())
    assert [name for name in VIEWS if name not in text] == []
    body = page.locator(".jp-Notebook").inner_text()
    for complaint in ("Error displaying widget", "model not found", "Loading widget"):
        assert complaint not in body
    assert all(box["height"] > 20 for box in (each.bounding_box() or {"height": 0} for each in shown.all()))
    # Token colours and curves appear in trusted and untrusted notebooks.
    assert shown.locator("span[style*='background-color']").count() > 20
    page.evaluate("() => document.querySelectorAll('.jp-OutputArea details').forEach((x) => { x.open = true; })")
    images = shown.locator("img")
    assert images.count() > 4
    for image in images.all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("async (x) => { await x.decode(); return x.naturalWidth; }") > 0
    PICTURES.mkdir(parents=True, exist_ok=True)
    shown.first.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / f"{name}.png")
    page.context.close()
    # JupyterLab reports this error if a kernel is shut down during a debugger request. No other error is allowed.
    assert [error for error in nb.errors if "Could not restore the debugger state" not in error] == []


def test_the_links_of_the_index_open_notebooks(lab: browser.Lab) -> None:
    copy_course(lab.root)
    nb = browser.Notebook(lab, lab.root / "index.ipynb", 1280, 1000)
    page = nb.page
    for name in ("01_quickstart", "30_apt"):
        page.locator(f".jp-MarkdownOutput a[href*='{name}']").filter(visible=True).first.click()
        page.wait_for_function(
            "(path) => window.jupyterapp.shell.currentWidget?.context?.path === path", arg=f"{name}.ipynb"
        )
        page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-MarkdownOutput h1").first.wait_for()
        page.get_by_role("tab", name="index.ipynb").click()
    page.evaluate("async () => { await window.jupyterapp.serviceManager.sessions.shutdownAll(); }")
    page.context.close()
    assert [error for error in nb.errors if "Could not restore the debugger state" not in error] == []


@pytest.mark.long
@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_every_saved_tutorial_shows_what_it_put_out(lab: browser.Lab, trusted: bool) -> None:
    """Open the notebooks one after another in one page, and shut down each kernel before the checks."""
    nb = lab.open(f"beside-{trusted}", ["1"])
    page = nb.page
    copies = {}
    for path in NOTEBOOKS:
        name = f"{path.stem}-{'trusted' if trusted else 'untrusted'}.ipynb"
        copies[name] = copy = nbformat.read(path, as_version=4)
        copy.metadata["copy"] = name  # trust depends on the content
        nbformat.write(copy, lab.root / name)
    if trusted:
        lab.trust(*(lab.root / name for name in copies))
    for name, copy in copies.items():
        page.evaluate(
            # The shell activates the widget only if the page has the focus.
            "async (path) => { const app = window.jupyterapp; const opened = await app.commands.execute('docmanager:open', { path, factory: 'Notebook' }); app.shell.activateById(opened.id); }",
            name,
        )
        page.wait_for_function("(path) => window.jupyterapp.shell.currentWidget?.context?.path === path", arg=name)
        page.evaluate(
            f"async () => {{ {nb._PANEL} await panel.context.ready; await panel.sessionContext.ready; await panel.sessionContext.shutdown(); }}"
        )
        cells = [cell for cell in copy.cells if cell.cell_type == "code"]
        trusts = page.evaluate(
            f"() => {{ {nb._PANEL} return [...panel.content.model.cells].filter((c) => c.type === 'code').map((c) => c.trusted); }}"
        )
        written = any("text/html" in o.get("data", {}) for cell in cells for o in cell.outputs)
        assert all(trusts) if trusted else not written or not all(trusts), name
        # JupyterLab shows the HTML form of an output rather than its text, even in untrusted notebooks.
        nb.command("notebook:show-all-cell-outputs")  # some are saved collapsed
        wanted = sum("text/html" in o.get("data", {}) for cell in cells for o in cell.outputs)
        there = f"""() => {{ {nb._PANEL} return panel.node.querySelectorAll('.jp-RenderedHTMLCommon.jp-OutputArea-output').length; }}"""
        page.wait_for_function(f"(n) => ({there})() === n", arg=wanted)
        body = page.evaluate(f"() => {{ {nb._PANEL} return panel.node.innerText; }}")
        for complaint in ("Error displaying widget", "model not found", "Loading widget", "Javascript Error"):
            assert complaint not in body, (name, complaint)
        drawn = page.evaluate(
            f"""async () => {{ {nb._PANEL} const all = [...panel.node.querySelectorAll('.jp-OutputArea-output img:not(.plot-img)')];
            return Promise.all(all.map((x) => x.decode().then(() => x.naturalWidth, () => x.outerHTML.slice(0, 300)))); }}"""
        )
        assert [width for width in drawn if not isinstance(width, int) or width <= 0] == [], name
        assert sum(cell.outputs != [] for cell in cells) == 0 or body.strip(), name
        page.evaluate(f"() => {{ {nb._PANEL} panel.dispose(); }}")
    page.context.close()
    assert [error for error in nb.errors if "Could not restore the debugger state" not in error] == []


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (i % 8 > 0)) for i, path in enumerate(NOTEBOOKS)],
    ids=by_name,
)
def test_the_page_of_a_tutorial_is_whole_without_a_network(lab: browser.Lab, path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    page_file = tmp_path / f"{path.stem}.html"
    page_file.write_text(_demo.page(notebook, path.stem), encoding="utf-8")
    context = lab.browser.new_context(viewport={"width": 1100, "height": 1400}, offline=True)
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.goto(page_file.as_uri())
    page.wait_for_load_state("load")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert errors == []
    # All cells are shown with their outputs, and all pictures are drawn.
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    browser.expect(page.locator(".jp-CodeCell")).to_have_count(len(cells))
    outputs = [o for cell in cells for o in cell.outputs]
    assert page.locator(".jp-OutputArea-child").count() >= len([o for o in outputs if o.get("data") or o.get("text")])
    for image in page.locator("img").all():
        assert image.evaluate("async (x) => { await x.decode(); return x.naturalWidth; }") > 0
    words = page.locator("body").inner_text()
    for output in outputs:
        first = (output.get("text", "") or "").strip().split("\n")[0].strip()
        assert first[:40] in words, first
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"page-{path.stem}.png", full_page=True)
    # The page follows the colour scheme of the reader.
    brightness = "(name) => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3"
    for scheme, darker, brighter in (("light", "color", "backgroundColor"), ("dark", "backgroundColor", "color")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(brightness, darker) + 150 < page.evaluate(brightness, brighter), scheme
    context.close()
