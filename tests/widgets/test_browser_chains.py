"""ChainStepper, TrajectoryView and RolloutView in a real JupyterLab."""

import re
from typing import Any

import browser
import pytest
from paths import TESTS
from test_browser_access import check_axe
from waiting import blocking_until

WHY_NOT = browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

START = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import asyncio, dataclasses, random
import agents
import agentfly_kit as af
from agentfly_kit import widgets as w
"""
MANY = (
    START
    + """
def answer(task, turn):
    n = sum(map(ord, task.id)) + turn
    if turn < 1 + n % 3:
        return [agents.call(f"{n}+3"), agents.call("2**99"), agents.call(name="nobody")][n % 3]
    return "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'> 42"

agent = agents.played(answer, max_turns=6)
rollout = await agent.rollout(agents.tasks(4), group_size=3)
"""
)


# --- stepper -------------------------------------------------------------------------------------


@browser.both
def test_a_chain_is_stepped_by_mouse_and_keys_while_a_cell_awaits(notebook: Any) -> None:
    nb = notebook(
        START + "agent = agents.agent(seed=3)\ntask = agents.tasks()[0]\nchain = agent.chain(task)",
        "view = w.ChainStepper(chain)\nview",
        "while view.trajectory is None:\n    await asyncio.sleep(0.05)",
    )
    page = nb.run(wait=False)
    view = page.locator(".afk-stepper")
    view.locator(".afk-turn2").first.wait_for()
    # The candidates for the next token, from the engine.
    view.locator(".afk-next").first.wait_for()
    browser.expect(view.locator(".afk-next")).to_have_count(20)
    assert not page.evaluate("() => window.ran")

    words = view.get_by_role("textbox")
    words.fill('<tool_call>{"name":"calculator","arguments":{"expression":"6*7"}}</tool_call>')
    words.press("Control+Enter")
    view.locator(".afk-turn2.afk-forced").wait_for()
    browser.expect(view.get_by_role("button", name="Sample", exact=True)).to_be_disabled()
    browser.expect(view.locator(".afk-bars")).to_contain_text("does not expect an action", use_inner_text=True)
    view.locator(".afk-turns").focus()
    page.keyboard.press("r")
    view.locator(".afk-turn2.afk-observation").wait_for()
    browser.expect(view.locator(".afk-turn2.afk-observation .afk-said")).to_contain_text("42", use_inner_text=True)
    view.get_by_role("button", name="Edit the result of turn 2").click()
    browser.expect(words).to_have_value("42")
    words.fill("<script>window.hacked = 1</script>")
    view.get_by_role("button", name="Replace the result").click()
    view.get_by_text("<script>window.hacked = 1</script>").first.wait_for()
    assert page.evaluate("() => window.hacked") is None
    view.locator(".afk-turns").focus()
    page.keyboard.press("u")
    page.wait_for_function("() => document.querySelectorAll('.afk-turn2').length === 2")
    page.keyboard.press("k")
    view.locator(".afk-tabs button").nth(1).wait_for()
    page.keyboard.press("r")
    view.locator(".afk-turn2.afk-observation").wait_for()
    view.locator(".afk-next").first.click()  # clicking a candidate adds the token and leaves the action open
    view.get_by_text("unfinished: the policy continues").wait_for()
    page.keyboard.press("g")
    view.get_by_text("stopped: answered").wait_for()
    assert not page.evaluate("() => window.ran")  # the cell still awaits
    page.keyboard.press("f")
    view.locator(".afk-result").get_by_text("reward", exact=False).first.wait_for()
    nb.finish()
    assert nb.python("[t.kind for t in view.chain.turns]") == ["prompt", "forced", "observation", "forced", "action"]
    assert nb.python("view.trajectory.reward") == 0.0
    # The first chain is unchanged, and is the chain object of the cell.
    assert nb.python("view.chains[0] is chain, len(chain.turns), view._notice") == (True, 2, "")

    # The code of the fork reproduces the chain.
    view.get_by_role("button", name="As code").click()
    browser.expect(view.locator(".afk-code")).to_have_value(re.compile(r"^chain = agent\.chain\(task\)\n"))
    code = view.locator(".afk-code").input_value()
    nb.execute("wanted = view.chain\nkept = chain")
    nb.execute(code)
    assert nb.python("[t.ids for t in chain.turns] == [t.ids for t in wanted.turns]")
    view.get_by_role("button", name="Close").click()

    # Open the tokens of the chain.
    view.get_by_role("button", name="Tokens").click()
    view.locator(".afk-tokenview .afk-tok").first.wait_for()
    assert nb.python("view.opened.tokens == len(view.chain.ids) == len(view.selection.to_frame('tokens'))")

    # The view shows changes made in Python, and errors.
    view.locator(".afk-tabs button").first.click()
    page.wait_for_function("() => document.querySelectorAll('.afk-turn2').length === 2")
    nb.execute("kept.rewind(0); kept.force('by the cell')")
    view.get_by_text("by the cell").first.wait_for()
    nb.execute("view._handle_custom_msg({'kind': 'do', 'page': 'p', 'name': 'act', 'value': None}, [])")
    page.locator(".afk-notice", has_text="there is nothing to run").wait_for()
    # A key pressed in the view does not reach the notebook.
    cells = "() => window.jupyterapp.shell.currentWidget.content.widgets.length"
    before = page.evaluate(cells)
    view.locator(".afk-turns").focus()
    nb.press("d", "d", "a", "b")
    assert page.evaluate(cells) == before


# Block the kernel, as a long computation does, until a file exists.
BLOCK = """
import pathlib, time
def block():
    pathlib.Path({blocked!r}).touch()
    while not pathlib.Path({released!r}).exists():
        time.sleep(0.05)
asyncio.get_running_loop().call_later(0.1, block)
"""
BOXES = """(selector) => [...document.querySelectorAll(selector)].map((b) => {
  const r = b.getBoundingClientRect(), top = b.closest('.afk').getBoundingClientRect();
  return [r.left - top.left, r.top - top.top, r.width, r.height].map(Math.round); })"""


@pytest.mark.real
def test_samples_runs_to_the_end_and_a_busy_kernel(notebook: Any) -> None:
    nb = notebook(
        START
        + """
sampling = af.Sampling(max_tokens=48, temperature=1.4)
agent = agents.agent(seed=3, sampling=sampling)
task = agents.tasks()[0]
view = w.ChainStepper(agent, task)""",
        "view",
    )
    nb.without_sidebar()
    page = nb.run()
    view = page.locator(".afk-stepper")
    view.locator(".afk-next").first.wait_for()
    boxes = page.evaluate(BOXES, ".afk-tools button")
    below = page.evaluate(BOXES, ".afk-composer button")
    assert len(boxes) == 10 and len(below) == 3

    def press(name: str) -> None:
        view.get_by_role("button", name=name, exact=True).click()

    def state(count: int, where: str) -> None:
        """Wait until the chain has this number of turns, and assert that no button has moved."""
        page.wait_for_function(
            f"() => document.querySelectorAll('.afk-turn2').length === {count} && "
            f"document.querySelector('.afk-stepper .afk-title + [role=status]').textContent.includes({where!r})"
        )
        assert page.evaluate(BOXES, ".afk-tools button") == boxes
        assert [b[::2] for b in page.evaluate(BOXES, ".afk-composer button")] == [b[::2] for b in below]

    press("As code")
    code = view.get_by_role("textbox", name="Code")
    press("Sample")
    state(2, "")
    seen = {nb.python("view.chain.turn.seed")}
    for attempt in (1, 2):
        press("Another sample")
        page.wait_for_function(
            "(n) => document.querySelector('.afk-codebox textarea').value.includes(`attempt=${n}`)", arg=attempt
        )
        seen.add(nb.python("view.chain.turn.seed"))
    assert len(seen) == 3
    press("Undo")
    state(1, "waiting for an action")
    browser.expect(code).not_to_have_value(re.compile("sample"))
    press("Sample")
    state(2, "")
    browser.expect(code).to_have_value(re.compile(re.escape("await chain.sample(attempt=3)")))
    press("Close")
    press("Undo")
    state(1, "waiting for an action")

    # Draw samples, group them, and open one as a fork.
    view.get_by_role("checkbox", name="run each to its end").check()
    press("Draw samples")
    rows = view.locator(".afk-samples .afk-histrow")
    rows.first.wait_for()
    state(1, "waiting for an action")
    counts = rows.locator("b").all_inner_texts()
    outcomes = nb.python("len({(t.success, t.reward, t.stop) for t in view.samples})")
    assert sum(map(int, counts[:-outcomes])) == sum(map(int, counts[-outcomes:])) == 16
    view.get_by_label("Group by").select_option("first")
    view.get_by_label("Group by").select_option("action")
    rows.first.get_by_role("button").click()
    view.locator(".afk-tabs button").nth(1).wait_for()
    state(2, "")
    assert nb.python("view.chain.turn.text in {t.turns[1].text for t in view.samples} and len(view.chains)") == 2

    # Run to the end, score, and undo the scoring.
    if nb.python("view.chain.stop is None"):
        press("Run to the end")
    view.get_by_text("stopped:").first.wait_for()
    turns = nb.python("len(view.chain.turns)")
    state(turns, "stopped")
    press("Score")
    state(turns, "finished")
    press("Undo")
    state(turns, "stopped")
    nb.theme("Light")

    # A click that the kernel cannot answer.
    press("Undo")
    state(turns - 1, "waiting")
    blocked, released = nb.path.with_suffix(".blocked"), nb.path.with_suffix(".released")
    nb.execute(BLOCK.format(blocked=str(blocked), released=str(released)))
    blocking_until(blocked.exists)
    press("Fork")
    waiting = view.get_by_text("waiting for the kernel")
    waiting.wait_for()
    assert page.evaluate(BOXES, ".afk-tools button") == boxes
    released.touch()
    view.locator(".afk-tabs button").nth(2).wait_for()
    waiting.wait_for(state="hidden")
    assert nb.python("view._notice") == ""


# --- trajectories ----------------------------------------------------------------------------------


@browser.both
def test_trajectories_by_mouse_and_keys(notebook: Any) -> None:
    nb = notebook(MANY, "view = w.TrajectoryView(rollout, agent=agent)\nview")
    page = nb.run()
    view = page.locator(".afk-trajectoryview")
    rows = view.locator(".afk-item")
    rows.first.wait_for()
    browser.expect(rows).to_have_count(12)
    rows.nth(1).click()
    nb.wait_python("view.selection.ids", nb.python("(rollout.trajectories[1].id,)"))
    rows.nth(2).click(modifiers=["Control"])
    nb.wait_python("len(view.selection)", 2)
    view.locator(".afk-column").nth(1).wait_for()
    browser.expect(view.locator(".afk-tree")).to_contain_text("shared by all 2", use_inner_text=True)
    rows.nth(0).click(modifiers=["Shift"])
    nb.wait_python("len(view.selection)", 3)
    page.keyboard.press("g")
    nb.wait_python("[t.group for t in view.selection] == [rollout.trajectories[0].group] * 3", True)
    nb.press("ArrowDown", "Shift+ArrowDown")
    nb.wait_python("len(view.selection.to_frame())", 2)
    # HTML from a tool or a model is shown as text.
    view.get_by_text("<script>window.hacked").first.wait_for()
    assert page.evaluate(
        "() => [window.hacked, document.querySelectorAll('.afk-trajectoryview script, .afk-trajectoryview img').length]"
    ) == [None, 0]

    # Search runs in Python; filters and sorting run on the page.
    view.get_by_role("searchbox").fill(nb.python("rollout.groups[1].task.id"))
    page.wait_for_function("() => document.querySelectorAll('.afk-trajectoryview .afk-item').length === 3")
    browser.expect(view.get_by_text("3 of 12 shown")).to_have_count(1)
    view.get_by_role("searchbox").fill("")
    page.wait_for_function("() => document.querySelectorAll('.afk-trajectoryview .afk-item').length === 12")
    view.get_by_role("button", name="reward", exact=True).click()
    browser.expect(view.get_by_label("Sort by")).to_have_value("reward")
    browser.expect(view.get_by_role("button", name="reward", exact=True, pressed=True)).to_have_count(1)
    view.get_by_label("Sort by").select_option("actions")
    most = nb.python("max(len(t.actions) for t in rollout)")
    browser.expect(rows.first).to_have_attribute("aria-label", re.compile(f"{most} actions"))
    view.get_by_label("Task").select_option(label=nb.python(
        "f'{(t := rollout.trajectories[3].task).messages[-1][\"content\"]} · {t.id}'"))  # fmt: skip
    browser.expect(view.locator(".afk-item")).to_have_count(3)

    # Compare two rows that are not adjacent, with the keyboard only. A note is stored in the trajectory.
    rows.first.click()
    nb.press("Space", "ArrowDown", "ArrowDown")
    nb.wait_python("len(view.selection)", 2)
    browser.expect(view.locator(".afk-keep:not([hidden])")).to_have_count(1)
    view.locator(".afk-role-call").first.wait_for()
    view.locator(".afk-role-result").first.wait_for()
    note = view.get_by_label(f"Note on {nb.python('view.selection.ids[1]')}")
    note.fill("<b>wrong</b> tool")
    note.press("Enter")
    nb.wait_python("[t.note for t in view.selection]", ["", "<b>wrong</b> tool"])
    view.locator(".afk-tagnote", has_text="<b>wrong</b> tool").wait_for()
    view.get_by_role("button", name="Turns", exact=True).click()
    nb.wait_python("view._chat", False)
    browser.expect(view.locator(".afk-column").first).to_contain_text("<|im_start|>", use_inner_text=True)

    # Open the tokens, and then the stepper.
    rows.first.click()
    id = nb.python("view.selection.ids[0]")
    view.get_by_role("button", name=f"Tokens of {id}").click()
    view.locator(".afk-tokenview .afk-tok").first.wait_for()
    assert nb.python("view.opened.trajectories[0].id") == id
    view.get_by_role("button", name=f"Open {id} in the stepper").click()
    stepper = view.locator(".afk-stepper")
    stepper.locator(".afk-turn2").first.wait_for()
    browser.expect(view.locator(".afk-tokenview")).to_have_count(0)
    stepper.get_by_role("button", name="Undo").click()
    nb.wait_python("len(view.opened.chain.turns)", nb.python("len(list(view.selection)[0].turns)") - 1)
    view.get_by_role("button", name=f"{id} as Python").click()
    browser.expect(view.locator(".afk-code")).to_have_value(re.compile(re.escape(id)))


@pytest.mark.long
def test_only_the_rows_in_sight_of_10000_are_drawn(notebook: Any) -> None:
    nb = notebook(
        MANY,
        """
        base = rollout.trajectories
        def one(i):
            group = f"task-{i // 8}"
            return base[i % 12].replace(id=f"{group}/{i % 8}", group=group, seconds=random.random() * 9)
        many = [one(i) for i in range(10_000)]
        view = w.TrajectoryView(many)
        """,
        "view",
    )
    page = nb.run()
    rows = page.locator(".afk-trajectoryview .afk-item")
    rows.first.wait_for()
    assert rows.count() < 60
    page.locator(".afk-trajectoryview .afk-window").focus()
    page.keyboard.press("End")
    nb.wait_python("len(view.selection)", 1)
    assert rows.count() < 60


DONE = """() => ['succeeded', 'done', 'unscored'].reduce(
  (n, name) => n + Number(document.querySelector(`.afk-chip.afk-r-${name} b`)?.textContent ?? 0), 0)"""


# Whether no chain is at work.
IDLE = """() => ['sampling', 'tool', 'scoring'].every(
  (name) => !Number(document.querySelector(`.afk-chip.afk-r-${name} b`)?.textContent ?? 0))"""


# --- rollouts --------------------------------------------------------------------------------------


@browser.both
def test_a_rollout_is_watched_paused_and_stopped_during_one_await(notebook: Any) -> None:
    nb = notebook(
        START
        + """
        import itertools
        count = itertools.count()

        async def slower(task, turn):
            await asyncio.sleep(0.01 * next(count))  # so that the run cannot end before it is stopped
            return [agents.call(), "42"][turn]

        agent = agents.scripted(slower)
        run = agent.rollout(agents.tasks(1), group_size=400, max_concurrency=8)
        view = w.RolloutView(run)
        """.replace("\n        ", "\n"),
        "view",
        "rollout = await run",
    )
    page = nb.run(wait=False)
    view = page.locator(".afk-rolloutview")
    page.wait_for_function(f"() => ({DONE})() > 0")
    view.get_by_role("button", name="Pause").click()
    view.get_by_role("button", name="Resume").wait_for()
    page.wait_for_function(IDLE)
    done = page.evaluate(DONE)
    page.wait_for_timeout(400)
    assert page.evaluate(DONE) == done
    view.get_by_role("button", name="Resume").click()
    page.wait_for_function(f"(n) => ({DONE})() > n", arg=done)
    view.locator(".afk-chip.afk-r-queued").click()
    page.wait_for_function(
        "() => document.querySelectorAll('.afk-rolloutview .afk-item:not(.afk-r-queued)').length === 0"
    )
    view.locator(".afk-chip.afk-r-queued").click()
    assert not page.evaluate("() => window.ran")
    view.get_by_role("button", name="Stop").click()
    nb.finish()
    assert 0 < nb.python("len(rollout)") < 400
    page.get_by_text("stopped ·").first.wait_for()
    # Chains that were running or queued precede the finished ones.
    view.locator(".afk-window").evaluate("(x) => x.scrollTo(0, x.scrollHeight)")
    view.locator(".afk-item:is(.afk-r-done, .afk-r-succeeded) .afk-gauge").first.wait_for()
    browser.expect(view.get_by_role("button", name="Stop")).to_be_disabled()
    assert nb.python("view.counts['done']") == nb.python("len(rollout)")
    assert nb.python("view._notice") == ""


# --- pictures --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 560])
def test_axe_has_nothing_to_say(notebook: Any, width: int) -> None:
    nb = notebook(
        MANY
        + "run = agents.scripted(['42']).rollout(agents.tasks(30))\nchain = agents.agent().chain(agents.tasks()[0])",
        "chain.force(agents.call('6*7'))\nstepper = w.ChainStepper(chain)\nstepper",
        "many = w.TrajectoryView(rollout, agent=agent)\nmany.select(*rollout.groups[0])\nmany",
        "lanes = w.RolloutView(run)\nlanes",
        "await chain.act()\nawait run",
        size=(width, 1800),
    )
    nb.without_sidebar()
    page = nb.run(wait=False)
    nb.finish()
    page.wait_for_selector(".afk-column")
    page.wait_for_selector(".afk-next")
    page.wait_for_selector(".afk-rolloutview .afk-item:is(.afk-r-done, .afk-r-succeeded)")
    # Include everything that opens below a view: tokens with a selection, code, and the stepper.
    nb.execute(
        """
many._do_tokens(0)
many._do_code(0)
stepper._do_tokens(None)
stepper._do_code(None)
lanes.pick(run.partial.trajectories[0])
lanes._do_chain_code(None)
lanes._do_chain_tokens(None)
form = many.opened
form.select(form.trajectories[0].id, 3, 6)
"""
    )
    page.wait_for_function("() => document.querySelectorAll('.afk-below .afk-tokenview .afk-tok').length > 30")
    page.wait_for_function("() => document.querySelectorAll('.afk-codebox').length === 3")
    check_axe(nb, "Light")
    nb.execute("many._do_stepper(1)")
    page.wait_for_selector(".afk-below .afk-stepper .afk-turn2")
    check_axe(nb, "Dark")
