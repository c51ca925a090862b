"""Saved pictures of the views in front ends that rewrite the HTML of an output.

| front end | what happens to `text/html` | source |
|---|---|---|
| GitHub | elements and attributes outside an allowlist are removed: no style, script, SVG or data URI; `<details>` is shown open | the allowlist of html-pipeline (below); reports pandas-dev/pandas#33076, volkamerlab/teachopencadd#189 |
| VS Code | inserted unchanged, scripts are run; used if the widget of an output has no kernel | microsoft/vscode, `extensions/notebook-renderers/src/index.ts` `renderHTML`; microsoft/vscode-jupyter#12611 |
| JupyterLab, untrusted | style attributes and data URIs are kept, scripts removed | `test_browser.py`: `test_the_static_form_survives_an_untrusted_notebook` |

GitHub does not publish the rules of its notebook renderer. The rules of html-pipeline, which originated at GitHub, are
the strictest published rules: https://github.com/gjtorikian/html-pipeline, `lib/html/pipeline/sanitization_filter.rb`.
"""  # noqa: E501

import re
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from typing import Any

import agents
import bleach  # installed with nbconvert
import pytest
from views import Box, FakeRun, trajectory

import agentfly_kit as af
from agentfly_kit import widgets as w

ELEMENTS = re.findall(
    r"\w+",
    "h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p ol ul table thead tbody tfoot "
    "blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary details",
)
# Allowed attributes that the pictures use or might use.
ATTRIBUTES = {
    "*": ["align", "alt", "border", "colspan", "height", "open", "rowspan", "title", "width"],
    "img": ["src"],
}


class Text(HTMLParser):
    """Parser that lays out HTML as text, with one line per block or table row and cells separated by " | "."""

    BLOCKS = ("div", "tr", "p", "summary", "pre", "li", "table", "details", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(page)
        self.lines = [line.strip() for line in "".join(self.parts).split("\n") if line.strip()]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif tag == "img":
            self.parts.append(f"[{dict(attrs).get('alt')}]")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def on_github(page: str) -> str:
    """Return what GitHub keeps of a page, as text."""
    kept = bleach.clean(page, tags=ELEMENTS, attributes=ATTRIBUTES, protocols=["http", "https"], strip=True)
    return "\n".join(Text(kept).lines)


def scripted() -> Any:
    return agents.scripted([agents.call(), "42"])


async def tokens() -> tuple[w.View, list[str]]:
    rows = [trajectory("a"), trajectory("b", seed=1)]
    lowest = min(value for row in rows for value in row.logprobs if value < 0)
    words = [
        *("TokenView(2 rows, ", "mean −", "lowest logprob", f"−{abs(lowest):.4g}"[:5]),
        *("a · reward 1 · answered · 23 tokens, 10 trained", "0 prompt", "action", "policy", "observation", "w4"),
    ]
    return w.TokenView(rows, signal="logprob"), words


async def trajectories() -> tuple[w.View, list[str]]:
    rollout = await scripted().rollout(agents.tasks(2), group_size=2)
    questions = [t.task.messages[-1]["content"] for t in rollout]
    return w.TrajectoryView(rollout), ["TrajectoryView(4 trajectories", "| reward |", "answered", *questions]


async def stepper() -> tuple[w.View, list[str]]:
    chain = scripted().chain(agents.tasks()[0])
    await chain.step()
    return w.ChainStepper(chain), ["ChainStepper(", "0 prompt by task", "1 action by ", "1+1", "2 observation by "]


async def sandboxes() -> tuple[w.View, list[str]]:
    async with af.Pool(Box, size=3) as pool, pool.lease(owner="one"), pool.lease(owner="two"):
        view = w.PoolView(pool)
        page = view._static()
    view._static = lambda: page
    return view, ["PoolView", "2 leased", "leased one", "leased two", "size 3"]


async def chains() -> tuple[w.View, list[str]]:
    run = scripted().rollout(agents.tasks(2), group_size=2)
    view = w.RolloutView(run)
    await run
    return view, ["RolloutView(done, 4 of 4 chains done", "○ 4 no success", "| chain | state |", "| answered"]


async def curves() -> tuple[w.View, list[str]]:
    # Images are removed, so the text and the table must contain the curve.
    return w.TrainView(FakeRun(9)), [
        "TrainView(9", "[success (share) over steps 1 to 9, last ", "| first | last |", "| reward |", "▁",
    ]  # fmt: skip


async def calls() -> tuple[w.View, list[str]]:
    form = w.ToolForm(agents.calculator)
    await form.call(expression="6*7")
    return form, ["ToolForm calculator", '{"expression": "6*7"}', "✓ ok", "42"]


async def rewards() -> tuple[w.View, list[str]]:
    @af.reward
    def anything(final: str | None) -> float:
        return 1.0

    form = w.RewardForm(anything, await scripted().rollout(agents.tasks(2)))
    await form.score()
    return form, [
        "RewardForm(anything, 2 trajectories", "mean reward", "| reward | recorded | now", "▲ succeeds now", "0 → 1",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [tokens, trajectories, stepper, sandboxes, chains, curves, calls, rewards])
async def test_a_picture_is_readable_without_styles_and_images(
    make: Callable[[], Awaitable[tuple[w.View, list[str]]]],
) -> None:
    view, words = await make()
    page = view.freeze()._repr_html_()
    text = on_github(page)
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"
    assert "<" not in re.sub(r"<(\||/?tool)", "", text), "markup is shown as text"
    assert max(map(len, text.split("\n"))) < 2_000, "without styles a line never ends"
    # Without margins, the texts of adjacent elements would run together.
    assert not re.search(r"</(\w+)><\1 [^>]*style=\"[^\"]*margin", page.replace("</div><div", ""))
