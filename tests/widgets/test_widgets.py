"""Tests of all views: messages of a page, the rate of updates, pictures, and saved notebooks."""

import ast
import asyncio
import gc
import json
import random
import re
import shutil
import subprocess
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import agents
import errors
import kernels
import pytest
from agentfly_kit.widgets._format import number
from agentfly_kit.widgets._saved import WIDGET_MIME, is_headless
from agentfly_kit.widgets._throttle import Throttle
from paths import TESTS
from views import Box, FakeRun, click, press, put, show, trajectory
from waiting import GUARD, until

import agentfly_kit as af
from agentfly_kit import widgets as w

JS = TESTS / "widgets_js"


# --- shared --------------------------------------------------------------------------------------


def test_a_rule_of_a_widget_says_nothing_of_another() -> None:
    """A page loads the CSS of all widgets, so rules shared by two widgets must be in _shared.css."""
    here = Path(w.__file__).parent
    stems = [path.stem for path in here.glob("[!_]*.css")]
    words = {stem: (here / f"{stem}.js").read_text() + (here / f"{stem}.css").read_text() for stem in stems}
    used = {stem: set(re.findall(r"(?<!-)afk-[\w-]*\w", text)) for stem, text in words.items()}
    leaks = []
    for stem in stems:
        css = re.sub(r"/\*.*?\*/|@container[^{]*\{", "", (here / f"{stem}.css").read_text(), flags=re.DOTALL)
        for selector in ",".join(re.findall(r"([^{}]+)\{", css)).split(","):
            named = set(re.findall(r"\.(afk-[\w-]+)", selector))
            own = [x for x in named if not any(x in used[other] for other in stems if other != stem)]
            if not own:
                leaks.append(f"{stem}.css: {selector.strip()}")
    assert len(stems) == 8
    assert leaks == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed; CI has it")
def test_the_page_side() -> None:
    done = subprocess.run(["node", "--test", str(JS)], capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed; CI has it")
def test_a_number_is_written_the_same_in_the_cell_and_on_the_page() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) * 10 ** rng.randint(-7, 9) for _ in range(500)] + [0.0, 9.99996, 1e-4, 999999.9, 1e6]
    values += [21.125, 0.50125, -1234.5, 10_005_000.0, 2**-20]  # halves
    script = f"""import {{ load }} from {json.dumps(JS.as_uri() + "/load.mjs")};
    const {{ number }} = await load(); console.log(JSON.stringify({json.dumps(values)}.map(number)));"""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=GUARD
    )
    assert json.loads(done.stdout) == [number(v) for v in values]


@pytest.fixture
def view() -> w.TokenView:
    return w.TokenView(trajectory())


def test_bundle_holds_the_live_and_the_static_form(view: w.TokenView) -> None:
    assert set(view._repr_mimebundle_()[0]) == {"text/plain", "text/html", WIDGET_MIME}
    assert view._repr_html_() is None
    view.close()
    assert "w0" in (view._repr_html_() or "")
    assert not hasattr(view.freeze(), "_repr_mimebundle_")
    assert repr(view.freeze()) == "Static(TokenView(1 row, 23 tokens))"


def test_a_view_keeps_no_record_alive() -> None:
    t = trajectory()
    view = w.TokenView(t)
    assert view.record is t and view.trajectories == (t,)
    gone = weakref.ref(t)
    del t
    gc.collect()
    assert gone() is None
    assert (view.record, view.trajectories) == (None, ())
    assert "w0" in view.freeze()._repr_html_()
    view.select("t-0", 6, 8)
    assert len(view.selection.to_frame()) == 2


def test_views_and_their_comms_are_freed() -> None:
    """Undisplayed views, closed views, and views whose cells have run again. Their layouts have comms, too.

    Reference counts suffice, so that nothing waits for a garbage collection. IPython keeps the last three results.
    """
    names = f"import comm, gc, sys, weakref; sys.path.insert(0, {str(TESTS)!r})\nfrom views import *\n"
    with kernels.kernel() as (_, client):

        def run(code: str, cell: str = "other") -> str:
            content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True}
            request = client.session.msg("execute_request", content, metadata={"cellId": cell})
            client.shell_channel.send(request)
            return kernels.until_idle(client, request["header"]["msg_id"])

        def left() -> str:
            for _ in range(3):
                run("0")
            return run("print(len(made), len(comms) - before)")

        run(
            f"{names}made, comms = weakref.WeakSet(), comm.get_comm_manager().comms; before = len(comms); gc.disable()"
        )
        run("for _ in range(8): made.add(w.TokenView(trajectory()))")
        assert left() == "0 0\n"
        for _ in range(5):
            run("view = w.TokenView(trajectory()); made.add(view); view", "a")
        assert left() == "1 2\n"
        run("view", "b")
        run("del view", "a")
        assert left() == "1 2\n", "cell b shows it"
        run("0", "b")
        assert left() == "0 0\n"
        run("view = w.TokenView(trajectory()); view.close(); made.add(view)")
        assert left() == "1 0\n"


def test_what_the_page_sets_is_checked(view: w.TokenView) -> None:
    put(view, "signal", "entropy")
    put(view, "_selected", [[0, 1, 3]])
    assert (view.signal, view.selection.tokens, view._notice) == ("entropy", 2, "")
    put(view, "_about", {})
    put(view, "_rows", [])
    assert view.tokens == 23
    put(view, "_selected", [[0, 9, 99]])
    assert view.selection.tokens == 2 and "do not exist" in view._notice


def test_open_and_close_are_told_by_the_pages(view: w.TokenView) -> None:
    for content, expected in (
        ({"kind": "open", "page": "a"}, True), ({"kind": "open", "page": "b"}, True),
        ({"kind": "close", "page": "a"}, True),
        ({"kind": "nonsense", "page": "b"}, True), ("nonsense", True), ({"kind": "close", "page": "b"}, False),
        ({"kind": "close", "page": "b"}, False), ({"kind": "open", "page": 7}, False),
    ):  # fmt: skip
        view._on_message(view, content, [])
        assert view.is_open is expected


class Doer(w.View):
    actions = frozenset({"plain", "slow", "bad", "late"})
    done: list[Any]

    def _do_plain(self, value: Any) -> None:
        self.done.append((value, threading.current_thread()))

    async def _do_slow(self, value: Any) -> None:
        await asyncio.sleep(0)
        self.done.append((value, threading.current_thread()))

    def _do_bad(self, value: Any) -> None:
        raise ValueError("no\ud800")

    async def _do_late(self, value: Any) -> None:
        await asyncio.sleep(value)
        raise KeyError("late")

    def _do_secret(self, value: Any) -> None:
        raise AssertionError("a page must not reach this")


async def test_what_a_page_asks_for_runs_on_the_loop_of_the_cell() -> None:
    view = Doer()
    view.done = []

    def ask(*given: Any) -> None:
        thread = threading.Thread(target=click, args=(view, *given))  # like a kernel subshell
        thread.start()
        thread.join()

    ask("plain", 1)
    ask("slow", 2)
    ask("secret")
    await until(lambda: len(view.done) == 2 and not view._jobs)
    assert view.done == [(1, threading.main_thread()), (2, threading.main_thread())]
    ask("bad")
    await until(lambda: view._notice == "ValueError: no\\ud800")
    ask("late", 0.0)
    await until(lambda: view._notice == "KeyError: 'late'" and not view._jobs)
    ask("late", 1e6)
    await until(lambda: bool(view._jobs))
    (job,) = view._jobs
    view.close()
    await until(job.cancelled)
    await until(lambda: not view._jobs)


def test_without_a_loop_a_click_says_so() -> None:
    view = Doer()
    click(view, "plain", 1)
    assert "no event loop" in view._notice


# --- update rate ---------------------------------------------------------------------------------


async def test_throttle_sends_ten_a_second_and_the_last_state() -> None:
    state, seen, began = [0], [], time.monotonic()
    throttle = Throttle(lambda: seen.append(state[0]), 0.05)
    for i in range(1, 200):
        state[0] = i
        throttle.schedule()
        await asyncio.sleep(0.001)
    await until(lambda: seen[-1] == 199)
    assert len(seen) <= 1 + (time.monotonic() - began) / 0.05
    state, seen, began = [0], [], time.monotonic()
    threaded = Throttle(lambda: seen.append(state[0]), 0.05)
    lock = threading.Lock()

    def work() -> None:  # without a loop and from many threads
        for _ in range(500):
            with lock:
                state[0] += 1
            threaded.schedule()

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
    await until(lambda: bool(seen) and seen[-1] == 2000)
    assert len(seen) <= 1 + (time.monotonic() - began) / 0.05


def test_throttle_outlives_its_loop() -> None:
    seen: list[int] = []
    throttle = Throttle(lambda: seen.append(1), 0.05)

    async def once() -> None:
        throttle.schedule()
        await asyncio.sleep(0.02)
        throttle.schedule()  # planned on a loop that closes before the call is due

    asyncio.run(once())
    before = len(seen)
    throttle.schedule()
    asyncio.run(until(lambda: len(seen) > before))
    throttle.close()
    throttle.schedule()
    time.sleep(0.1)
    assert len(seen) == before + 1


@pytest.mark.parametrize("open_page", [True, False])
def test_a_picture_that_cannot_be_drawn_is_reported_and_the_last_one_stays(
    monkeypatch: pytest.MonkeyPatch, open_page: bool, view: w.TokenView
) -> None:
    view._display_ids.append("cell")
    sent_messages: list[Any] = []
    monkeypatch.setattr(view, "send", sent_messages.append)
    monkeypatch.setattr(view, "_static", Mock(side_effect=OSError("the run folder is gone")))
    if open_page:
        show(view)
    view._picture_stale = True
    view._update_picture()
    assert view._notice == "OSError: the run folder is gone"
    assert sent_messages == []
    view._picture_stale = True
    view.close()


@pytest.mark.parametrize(
    ("input_allowed", "metadata", "server", "headless"),
    [
        (False, {}, "", True),  # nbclient, nbconvert, papermill
        (True, {}, "", False),  # a console, or a page that does not describe its cells
        (False, {"cellId": "a"}, "", False),  # a page without a prompt for `input()`
        (False, {}, "voila/0.5.10", False),
    ],
)
def test_a_program_without_a_page_gets_only_the_picture(
    monkeypatch: pytest.MonkeyPatch, input_allowed: bool, metadata: dict[str, str], server: str, headless: bool
) -> None:
    import IPython

    request = {"content": {"allow_stdin": input_allowed}, "metadata": metadata}
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda channel: request))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setenv("SERVER_SOFTWARE", server)
    assert is_headless() is headless


def test_a_saved_notebook_keeps_its_pictures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbformat.sign import NotebookNotary

    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))  # folder of the trust database
    view, other = w.TokenView(trajectory()), {WIDGET_MIME: {"model_id": "x"}, "text/plain": "Slider()"}
    both = view._repr_mimebundle_()[0]
    new = nbformat.v4.new_output
    file = tmp_path / "mine.ipynb"
    cells = [nbformat.v4.new_code_cell("view", outputs=[new("display_data", data=both)])]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {"state": {}}})
    nbformat.write(notebook, file)
    NotebookNotary().sign(notebook)
    assert w.freeze(file) == 1
    after = nbformat.read(file, as_version=4)
    nbformat.validate(after)
    assert after.cells[0].outputs[0].data == {key: text for key, text in both.items() if key != WIDGET_MIME}
    assert "widgets" not in after.metadata
    assert NotebookNotary().check_signature(after)
    before = file.read_bytes()
    assert w.freeze(file) == 0
    assert file.read_bytes() == before
    # A widget without a picture is unchanged and keeps its state; an untrusted notebook stays untrusted.
    notebook.cells.append(nbformat.v4.new_code_cell("slider # mine", outputs=[new("display_data", data=other)]))
    nbformat.write(notebook, file)
    assert w.freeze(file) == 1
    after = nbformat.read(file, as_version=4)
    assert after.cells[1].outputs[0].data == other
    assert "widgets" in after.metadata
    assert not NotebookNotary().check_signature(after)
    # Simulate the error of a read-only folder, because root can write to any folder.
    nbformat.write(notebook, file)
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(PermissionError) as refused:
            w.freeze(file)
    assert refused.value.__notes__ == [f"{file} is unchanged; copy it to a writable folder"]
    assert file.read_bytes() == before
    file.write_text("{}")
    errors.check(lambda: w.freeze(file), Exception, "Notebook")
    assert [path.name for path in tmp_path.glob("*.part")] == []


async def test_every_view_hands_its_selection_and_its_code_to_a_cell() -> None:
    """All views have the same interface for their selection and code."""
    agent = agents.scripted(["42"])
    run = agent.rollout(agents.tasks(2))
    rollout = await run
    pool = af.Pool(Box, size=1)
    lease = await pool.acquire("me")
    form = w.ToolForm(agents.calculator)
    form.draft = '{"expression": "1+1"}'
    assert form.to_code().endswith("(expression='1+1')"), "the arguments in the fields"
    await form.call(expression="1+1")
    one = rollout.trajectories[0]
    views = {
        "TokenView": (w.TokenView(one), lambda v: v.select(one.id, 0, 2), 2),
        "TrajectoryView": (w.TrajectoryView(rollout), lambda v: v.select(one), 1),
        "ChainStepper": (w.ChainStepper(agent.chain(one)), lambda v: None, 1),
        "PoolView": (w.PoolView(pool), lambda v: v.select(lease.id), 1),
        "RolloutView": (w.RolloutView(run), lambda v: v.pick(one), 1),
        "TrainView": (w.TrainView(FakeRun(3)), lambda v: (setattr(v, "rollout", rollout), v.pick(one)), 1),
        "ToolForm": (form, lambda v: v.select(1), 1),
        "RewardForm": (w.RewardForm(agents.exact, rollout, follow=False), lambda v: v.pick(one), 1),
    }
    kinds = {name for name in w.__all__ if isinstance(kind := getattr(w, name), type) and issubclass(kind, w.View)}
    assert kinds - {"View"} == set(views)
    for name, (view, select, rows) in views.items():
        select(view)
        assert view.selection, name
        assert len(view.selection.to_frame()) == rows, name
        await press(view, "chain_code")
        code = view._cell["text"] if hasattr(view, "_cell") else None
        if code is None:
            code = view.to_code(0) if name == "TrajectoryView" else view.to_code()
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert not view._notice, (name, view._notice)
    await lease.release()
    await pool.close()
