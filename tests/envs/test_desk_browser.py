"""The tools of desk fit a page in Chromium: the same tasks and calls, with its mouse, keys and screenshots."""

import dataclasses

import browser
import numpy as np
import pytest
import waiting

import agentfly_kit as af
from agentfly_kit.envs import desk

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
]
TAGS = {"button": "<button onclick='pressed = this.id'", "box": "<input type=checkbox", "field": "<input class=field"}
STATE = """() => ({pressed, ticked: !!document.querySelector(":checked"),
                   text: document.querySelector(".field") ? document.querySelector(".field").value : ""})"""


def html(screen: desk.Screen) -> str:
    """Return a page with the widgets of a screen."""
    rows = []
    for widget in screen.widgets:
        left, top, right, bottom = widget.place
        style = f"left: {left}px; top: {top}px; width: {right - left + 1}px; height: {bottom - top + 1}px; "
        style += f"background: rgb{widget.fill}; border-radius: {50 * widget.round}%"
        rows.append(f"{TAGS[widget.form]} id='{widget.colour}' style='{style}'>")
    rules = f"body {{margin: 0; height: {screen.height}px; background: rgb{(screen.shade,) * 3}}} "
    rules += "body > * {position: absolute; margin: 0; border: 0}"
    return f"<style>{rules} ::-webkit-scrollbar {{display: none}}</style><script>pressed = ''</script>{''.join(rows)}"


class Page(desk.Desk):
    """The screen of a task as a page in Chromium."""

    async def start(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        launch = self._playwright.chromium.launch
        self._browser = await launch(executable_path=browser.CHROMIUM, headless=True, args=browser.FLAGS)
        self._page = await self._browser.new_page(viewport={"width": desk.SIDE, "height": desk.SIDE})
        self._page.set_default_timeout(1000 * waiting.GUARD)

    async def close(self) -> None:
        await self._browser.close()
        await self._playwright.stop()

    async def reset(self, task: af.Task, seed: int) -> None:
        await super().reset(task, seed)
        await self._page.set_content(html(self._screen))

    async def _look(self) -> af.Image:
        self.done = bool(await self._page.evaluate("pressed"))
        return af.Image(await self._page.screenshot())

    @af.tool
    async def click(self, column: int, row: int) -> af.Image:
        """Click on the page.

        Args:
            column: number of the cell from the left.
            row: number of the cell from the top.
        """
        await self._page.mouse.click(*(desk.CELL * at + desk.CELL // 2 for at in (column, row)))
        return await self._look()

    @af.tool
    async def type(self, text: str) -> af.Image:
        """Type text.

        Args:
            text: the characters.
        """
        await self._page.keyboard.type(text)
        return await self._look()

    @af.tool
    async def scroll(self, rows: int) -> af.Image:
        """Scroll the page.

        Args:
            rows: number of cells.
        """
        await self._page.mouse.wheel(0, desk.CELL * rows)
        # The browser scrolls after the call has returned.
        await self._page.wait_for_function("scrollY === document.body.scrollHeight - innerHeight")
        return await self._look()

    async def reward(self) -> float:
        """Return 1 if the elements of the page are in the required state."""
        return float(await self._page.evaluate(STATE) == self._goal)


async def test_the_calls_that_solve_a_task_on_the_screen_solve_it_on_the_page() -> None:
    tasks = desk.tasks(16, "test")
    drawn, pages = [
        (await dataclasses.replace(desk.family, environment=of).expert(size=1).rollout(tasks)).trajectories
        for of in (desk.Desk, Page)
    ]
    for one, other in zip(drawn, pages, strict=True):
        assert other.success and other.stop == "env_done", other.explain()
        if one.task.fields["kind"] == "scroll":
            seen = [np.asarray(t.tool_calls[0].result.images[0].to_pil(), int) for t in (one, other)]
            assert np.abs(seen[0] - seen[1]).mean() < 3 < seen[1].std()
