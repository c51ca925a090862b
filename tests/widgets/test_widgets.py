"""Views without a browser: reading sources, sending state, and the static form."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import gc
import html.parser
import json
import math
import random
import re
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import agents
import numpy as np
import pytest
from agentfly_kit.widgets._base import STATIC_LIMIT, Throttle, number, pack
from agentfly_kit.widgets._saved import WIDGET_MIME, is_headless
from agentfly_kit.widgets._tokens import visible
from ipywidgets.widgets import widget as ipywidget
from paths import TESTS

import agentfly_kit as af
from agentfly_kit import widgets as w
from agentfly_kit.errors import AlignmentError
from agentfly_kit.pool.pool import Pool
from agentfly_kit.ppo.stats import Stats
from agentfly_kit.types import Task, Trajectory, Turn

JS = TESTS / "widgets_js"
NASTY = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'`${x}", "&lt;", "\x00", "\x1b[31m", "\u202eabc",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u200b", "\u200d", "\ufeff", "\ufffd", "\ud800", "\udfff", "e\u0301", "\u0301", "\U0001f9d1\u200d\U0001f680",
    "\xa0", "\u2028", "", " ", "\n", "\r\n", "\t", "·", "⏎", "\ue000", "a" * 5000,
)  # fmt: skip


def trajectory(id: str = "t-0", actions: int = 2, width: int = 5, seed: int = 0, token_texts: Any = None) -> Trajectory:
    rng = np.random.default_rng(seed)
    counter = iter(range(10, 10**6))

    def turn(kind: Any, author: str, n: int, *, sampled: bool = False, own: Any = None) -> Turn:
        words = tuple(own or (f" w{i}" for i in range(n)))
        extra: dict[str, Any] = {}
        if sampled:
            extra = {
                "logprobs": tuple(-rng.exponential(1.0, len(words))),
                "entropies": tuple(rng.exponential(1.0, len(words))),
                "versions": (0,) * len(words),
            }
        ids = tuple(next(counter) for _ in words)
        return Turn(kind, author, ids, sampled, text="".join(words), token_texts=words, **extra)

    turns = [turn("prompt", "task", width)]
    for _ in range(actions):
        turns += [
            turn("action", "policy", width, sampled=True, own=token_texts),
            turn("observation", "tool", 3, own=token_texts),
        ]
    turns.append(turn("forced", "hook", 2))
    task = Task("task-1", ({"role": "user", "content": "?"},))
    return Trajectory(id, task, "g", 0, tuple(turns), "answered", reward=1.0)


def batch_of(trajectories: list[Trajectory], **more: Any) -> SimpleNamespace:
    """Return a padded batch like that of `collate`, with the rows in the given order."""
    import torch

    width = max(len(t.ids) for t in trajectories) + 3
    shape = (len(trajectories), width)
    ids, attention = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    mask, logprobs, advantages = attention.clone(), torch.full(shape, math.nan), torch.full(shape, math.nan)
    for b, t in enumerate(trajectories):
        n = len(t.ids)
        ids[b, :n], attention[b, :n] = torch.tensor(t.ids), True
        mask[b, :n], logprobs[b, :n] = torch.tensor(t.action_mask), torch.tensor(t.logprobs)
        advantages[b, :n] = torch.where(mask[b, :n], torch.arange(n) + 100.0 * b, math.nan)
    return SimpleNamespace(
        trajectories=tuple(trajectories), ids=ids, attention=attention, mask=mask, logprobs=logprobs,
        advantages=advantages, token_rewards=torch.where(mask, 0.0, math.nan), **more,
    )  # fmt: skip


def stats_of(batch: Any, shift: float = 0.1) -> Stats:
    before = batch.logprobs.numpy()
    after = before + np.float32(shift)
    detail = {
        "logprob_before": before, "logprob_after": after, "ratio": np.exp(after - before),
        "clipped": np.where(batch.mask.numpy(), (after - before > 0.05).astype(np.float32), np.nan),
        "advantage": batch.advantages.numpy(),
    }  # fmt: skip
    return Stats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, detail=detail, batch=batch)


def unpack(packed: dict[str, bytes]) -> np.ndarray:
    values = np.frombuffer(packed["values"], "<f4").copy()
    present = np.unpackbits(np.frombuffer(packed["present"], np.uint8), bitorder="little")[: len(values)]
    values[present == 0] = np.nan
    return values


class Page(html.parser.HTMLParser):
    """Parser that collects the tags, attributes and text of a static form."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.images: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.images += [value or "" for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


def check_static(view: w.View) -> Page:
    """Check that a static form is small and contains only HTML that untrusted notebooks keep; return it parsed."""
    text = view.freeze()._repr_html_()
    assert len(text.encode()) <= STATIC_LIMIT
    page = Page(text)
    assert page.tags <= {
        "div", "span", "b", "code", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "img", "wbr",
    }  # fmt: skip
    assert page.attributes <= {"style", "title", "src", "alt", "width", "height"}
    assert all(src.startswith("data:image/svg+xml;base64,") for src in page.images)
    return page


def sent(view: w.View) -> dict[str, Any]:
    """Return the state as it is sent to the page. Fail if it cannot be encoded as JSON or UTF-8."""
    state = view.get_state()
    kept = {k: v for k, v in state.items() if k not in ("_buffers", "_esm", "_css", "layout")}
    json.dumps(kept, allow_nan=False, ensure_ascii=False).encode("utf-8")
    return state


def leaves(x: Any) -> list[bytes]:
    """Return the buffers in nested lists and dictionaries."""
    if isinstance(x, bytes):
        return [x]
    return [leaf for value in (x.values() if isinstance(x, dict) else x) for leaf in leaves(value)]


# --- shared --------------------------------------------------------------------------------------


def test_missing_is_a_bit_and_not_a_number() -> None:
    packed = pack([0.0, math.nan, -1.5, math.inf])
    assert np.isfinite(np.frombuffer(packed["values"], "<f4")[:3]).all()
    np.testing.assert_array_equal(unpack(packed), np.float32([0, np.nan, -1.5, np.inf]))
    assert pack([]) == {"values": b"", "present": b""}


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
    done = subprocess.run(["node", "--test", str(JS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed; CI has it")
def test_a_number_is_written_the_same_in_the_cell_and_on_the_page() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0, 1) * 10 ** rng.randint(-7, 9) for _ in range(500)] + [0.0, 9.99996, 1e-4, 999999.9, 1e6]
    values += [21.125, 0.50125, -1234.5, 10_005_000.0, 2**-20]  # halves
    script = f"""import {{ load }} from {json.dumps(JS.as_uri() + "/load.mjs")};
    const {{ number }} = await load(); console.log(JSON.stringify({json.dumps(values)}.map(number)));"""
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [number(v) for v in values]


def test_bundle_holds_the_live_and_the_static_form() -> None:
    view = w.TokenView(trajectory())
    assert set(view._repr_mimebundle_()[0]) == {"text/plain", "text/html", WIDGET_MIME}
    assert view._repr_html_() is None
    view.close()
    assert "w0" in (view._repr_html_() or "")
    assert not hasattr(view.freeze(), "_repr_mimebundle_")
    assert repr(view.freeze()) == "Static(TokenView(1 row, 23 tokens))"


def test_a_view_keeps_no_record_alive() -> None:
    t = trajectory()
    view = w.TokenView(t)
    assert view.record is t
    assert view.trajectories == (t,)
    gone = weakref.ref(t)
    del t
    gc.collect()
    assert gone() is None
    assert view.record is None
    assert view.trajectories == ()
    assert "w0" in view.freeze()._repr_html_()
    view.select("t-0", 6, 8)
    assert len(view.selection.to_frame()) == 2


def test_what_the_page_sets_is_checked() -> None:
    view = w.TokenView(trajectory())

    def put(name: str, value: Any) -> None:
        view._on_message(view, {"kind": "set", "page": "a", "name": name, "value": value}, [])

    put("signal", "entropy")
    put("_selected", [[0, 1, 3]])
    assert (view.signal, view.selection.tokens, view._notice) == ("entropy", 2, "")
    put("_about", {})
    put("_rows", [])
    assert view.tokens == 23
    put("_selected", [[0, 9, 99]])
    assert view.selection.tokens == 2
    assert "do not exist" in view._notice


def test_open_and_close_are_told_by_the_pages() -> None:
    view = w.TokenView(trajectory())
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

    def ask(name: str, value: Any = None) -> None:
        content = {"kind": "do", "page": "a", "name": name, "value": value}
        thread = threading.Thread(target=view._on_message, args=(view, content, []))  # like a kernel subshell
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
    ask("late", 60)
    await until(lambda: bool(view._jobs))
    (job,) = view._jobs
    view.close()
    await until(job.cancelled)
    await until(lambda: not view._jobs)


def test_without_a_loop_a_click_says_so() -> None:
    view = Doer()
    view._on_message(view, {"kind": "do", "page": "a", "name": "plain", "value": 1}, [])
    assert "no event loop" in view._notice


# --- text ----------------------------------------------------------------------------------------


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert visible(" the\n") == "·the⏎"
    assert visible("") == "∅"
    assert visible("\u200b\u202e") == "‹U+200B›‹U+202E›"
    assert visible("\ud800") == "‹U+D800›"
    assert visible("·") == "‹U+00B7›"
    assert visible("\u0301") == "◌\u0301"
    assert visible("e\u0301") == "e\u0301"
    assert visible("x" * 500).startswith("x" * 120 + "… (500 characters)")
    shown = [visible(text) for text in NASTY]
    assert len(set(shown)) == len(set(NASTY))
    for text in shown:
        text.encode("utf-8")
        assert not any(ord(c) < 32 or c in "\u202e\u200b\u2028" for c in text)


def test_nothing_in_a_token_becomes_html() -> None:
    t = trajectory("<b>id</b>", token_texts=NASTY)
    for signal in ("mask", "logprob"):
        view = w.TokenView(t, signal=signal)
        sent(view)
        page = check_static(view)
        assert not page.tags & {"script", "img"}
        assert "<script>alert(1)</script>" in page.text
        assert "<b>id</b>" in page.text


def test_the_static_form_marks_mask_and_signal_in_its_text() -> None:
    """Hosts that remove inline styles show brackets and superscript digits instead of colours."""
    t = trajectory(actions=1, width=3)
    values = (-0.5, -2.0, -0.1)
    t = t.replace(turns=tuple(dataclasses.replace(x, logprobs=values) if x.sampled else x for x in t.turns))
    text = check_static(w.TokenView(t)).text
    assert text.count("⟦·w0·w1·w2⟧") == 1 and "⟦ ⟧ enclose tokens with mask 1" in text
    text = check_static(w.TokenView(t, signal="logprob")).text
    assert "·w0²·w1⁹·w2⁰" in text and "⁰ to ⁹ after a token: logprob from 0 nats down to −2 nats" in text
    batch = batch_of([t])
    text = check_static(w.TokenView(stats_of(batch), signal="ratio")).text
    assert "·w0⁺⁹·w1⁺⁹·w2⁺⁹" in text and "⁻⁹ to ⁺⁹ after a token: ratio from 0" in text
    text = check_static(w.TokenView(stats_of(batch), signal="clipped")).text
    assert "·w0ꜝ·w1ꜝ·w2ꜝ" in text and "ꜝ after a token: clipped" in text
    unknown = t.replace(turns=tuple(dataclasses.replace(x, entropies=None) if x.sampled else x for x in t.turns))
    assert "·w0ˣ·w1ˣ·w2ˣ" in check_static(w.TokenView(unknown, signal="entropy")).text
    # With styles, the marks ⟦ and ⟧ are hidden, and lines may break before each run of dots, which stand for spaces.
    html = w.TokenView(t).freeze()._repr_html_()
    assert '<span style="display:none">⟦</span><wbr>·w0<wbr>·w1' in html


def test_recorded_alternatives_are_sent_and_framed() -> None:
    t = trajectory(actions=1, width=3)
    best = (((12, " x", -0.1), (9, " y", -2.5)), ((7, " <b>", -0.2), (8, " q", -3.0)), ((1, " z", -0.3),))
    ids = next(x for x in t.turns if x.sampled).ids
    best = (((ids[0], " w0", -0.1), *best[0][1:]), best[1], best[2])
    t = t.replace(turns=tuple(dataclasses.replace(x, alternatives=best) if x.sampled else x for x in t.turns))
    for source in (t, batch_of([t])):
        view = w.TokenView(source, signal="logprob")
        shown = sent(view)
        n, width = view.tokens, shown["_about"]["alternatives"]
        packed = shown["_buffers"]["alternatives"]
        at = np.frombuffer(packed["id"], "<i4").reshape(n, width)
        assert at[3:6].tolist() == [[ids[0], 9], [7, 8], [1, -1]] and (at[[0, 1, 2, 6]] == -1).all()
        pieces = np.frombuffer(packed["piece"], "<i4").reshape(n, width)
        assert shown["_about"]["vocabulary"][pieces[4, 0]][0] == "·<b>"
        assert unpack(packed["logprob"]).reshape(n, width)[3].tolist() == pytest.approx([-0.1, -2.5])
        frame = view.to_frame()
        assert frame["rank"].tolist()[3] == 1 and frame["rank"].isna().sum() == n - 1
        assert frame["alternatives"].tolist()[5] == [(" z", pytest.approx(math.exp(-0.3)))]
        assert "·<b> 81.9 %, ·q 5.0 %" in check_static(view).text
    plain = w.TokenView(trajectory())
    assert "alternatives" not in plain._about and "rank" not in plain.to_frame()


# --- sources of a TokenView ----------------------------------------------------------------------


def test_rows_are_joined_by_trajectory_and_span_not_by_position() -> None:
    ts = [trajectory(f"t-{i}", actions=1 + i, seed=i) for i in range(3)]
    order = [ts[2], ts[0], ts[1]]
    view = w.TokenView(batch_of(order), compare=batch_of(ts))
    view.select("t-0", 5, 7)
    frame = view.selection.to_frame()
    assert list(frame["trajectory"]) == ["t-0", "t-0"]
    np.testing.assert_allclose(frame["logprob"], ts[0].logprobs[5:7])
    assert list(frame["advantage"]) == [105.0, 106.0]  # row 1 of the source
    assert list(frame["advantage ′"]) == [5.0, 6.0]  # row 0 of the other source
    assert list(frame["Δ advantage"]) == [-100.0, -100.0]


def test_a_batch_row_may_hold_a_span_of_its_trajectory() -> None:
    t = trajectory()
    batch = batch_of([t])
    batch.attention[0, :4] = False
    view = w.TokenView(batch)
    assert view.tokens == len(t.ids) - 4
    view.select("t-0", 5, 6)
    frame = view.selection.to_frame()
    assert (int(frame["token"][0]), int(frame["id"][0])) == (5, int(t.ids[5]))
    with pytest.raises(ValueError, match=r"tokens 0 to 1 of .* are not in this view"):
        view.select("t-0", 0)
    batch.ids[0, 6] = 999
    with pytest.raises(AlignmentError, match="not a span of its trajectory 't-0'"):
        w.TokenView(batch)


def test_stats_bring_before_after_ratio_and_clip() -> None:
    ts = [trajectory("a"), trajectory("b", seed=1)]
    view = w.TokenView(stats_of(batch_of(ts)), signal="clip")
    assert view.signal == "clipped"
    assert {"ratio", "clipped", "prob_before", "prob_after", "prob_change", "sampler_gap", "advantage"} <= set(
        view.signals
    )
    columns = view._buffers["columns"]
    change = unpack(columns["prob_after"]) - unpack(columns["prob_before"])
    np.testing.assert_allclose(unpack(columns["prob_change"]), change, atol=1e-6)
    legend = next(x for x in view._about["signals"] if x["name"] == "clipped")
    assert legend["set"] == legend["n"] == int(sum(t.action_mask.sum() for t in ts))
    ratio = next(x for x in view._about["signals"] if x["name"] == "ratio")
    assert ratio["middle"] == 1.0
    assert ratio["lo"] >= 0, "a ratio is never below 0"
    check_static(view)
    with pytest.raises(ValueError, match="detail=True"):
        w.TokenView(Stats(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(AlignmentError, match="'odd' must have one value per token"):
        w.TokenView(dataclasses.replace(stats_of(batch_of(ts)), detail={"odd": np.zeros((2, 1))}))


def test_a_batch_of_the_library() -> None:
    from agentfly_kit import advantages
    from agentfly_kit.batch.collate import collate

    ts = [dataclasses.replace(trajectory(f"t-{i}", 1 + i, seed=i), chain=i, reward=float(i % 2)) for i in range(4)]
    batch = collate(ts, advantages=advantages.grpo)
    expected = np.concatenate([batch.advantages[b, : len(t.ids)].numpy() for b, t in enumerate(batch.trajectories)])
    # Numbers outside the mask are missing, whatever the tensor holds.
    for filled in (batch.advantages, batch.advantages.nan_to_num(0.0)):
        view = w.TokenView(batch.replace(advantages=filled), signal="advantage")
        np.testing.assert_array_equal(unpack(view._buffers["columns"]["advantage"]), expected)


def test_compare_says_what_it_could_not_join_and_where_chains_part() -> None:
    a, b, c = trajectory("a"), trajectory("b"), trajectory("c")
    changed = dataclasses.replace(a, turns=(*a.turns[:-1], dataclasses.replace(a.turns[-1], ids=(1, 2))))
    view = w.TokenView([a, b], compare=[changed, c])
    notes = " / ".join(view._about["notes"])
    assert "not in compare: b" in notes
    assert "only in compare, not shown: c" in notes
    assert "2 tokens of the same trajectory differ" in notes
    turns = (*a.turns[:3], dataclasses.replace(a.turns[3], ids=(7,) * len(a.turns[3].ids or ())), *a.turns[4:])
    view = w.TokenView(a, compare=dataclasses.replace(a, id="b", turns=turns))
    assert [row["parts"] for row in view._about["rows"]] == [13, 13]
    assert view._about["notes"] == ["a and b share their first 13 tokens"]


def test_sources_and_what_is_no_source() -> None:
    a, b = trajectory("a"), trajectory("b")
    group = SimpleNamespace(trajectories=(a, b))
    for source in ((a, b), [a, b], group, [SimpleNamespace(trajectories=(a,)), SimpleNamespace(trajectories=(b,))]):
        assert repr(w.TokenView(source)) == "TokenView(2 rows, 46 tokens)"
    assert repr(w.TokenView([])) == "TokenView(0 rows, 0 tokens)"
    check_static(w.TokenView([]))
    for wrong in (7, "text", None, [1], {"a": 1}):
        with pytest.raises(TypeError, match="source must be"):
            w.TokenView(wrong)


def test_odd_trajectories_are_shown() -> None:
    text_only = dataclasses.replace(trajectory("text"), turns=(Turn("prompt", "task", None, text="hello"),))
    one = dataclasses.replace(trajectory("one"), turns=(Turn("prompt", "task", (1,), text="x"),))
    empty = dataclasses.replace(trajectory("empty"), turns=())
    unscored = dataclasses.replace(trajectory("unscored"), reward=None)
    view = w.TokenView([text_only, one, empty, unscored], signal="logprob")
    sent(view)
    page = check_static(view)
    assert "text only" in page.text
    assert "unscored" in page.text
    assert "[1]" in page.text


def test_signals_are_checked() -> None:
    view = w.TokenView(trajectory())
    assert view.signals == ("mask", "logprob", "entropy")
    with pytest.raises(ValueError, match="signal must be one of mask, logprob, entropy for this source"):
        view.signal = "ratio"
    assert view.signal == "mask"
    view.signal = "entropies"
    assert view.signal == "entropy"


def test_all_missing_and_infinite_numbers() -> None:
    t = trajectory()
    batch = batch_of([t], values=None, returns=None)
    batch.advantages[:] = math.nan
    batch.token_rewards[batch.mask] = math.inf
    view = w.TokenView(batch, signal="reward")
    missing = next(x for x in view._about["signals"] if x["name"] == "advantage")
    assert (missing["n"], missing["missing"]) == (0, int(t.action_mask.sum())), "shown, as missing"
    legend = next(x for x in view._about["signals"] if x["name"] == "reward")
    assert legend["infinite"] == legend["n"] == int(t.action_mask.sum())
    sent(view)
    check_static(view)


# --- selection -----------------------------------------------------------------------------------


def test_selection_comes_from_the_page() -> None:
    view = w.TokenView([trajectory("a"), trajectory("b")])
    assert not view.selection
    view.set_state({"_selected": [[1, 5, 8], [0, 0, 1]]})
    assert [(s.trajectory, s.start, s.stop) for s in view.selection] == [("b", 5, 8), ("a", 0, 1)]
    assert repr(view.selection) == "Selection(4 tokens: b[5:8], a[0:1])"
    frame = view.selection.to_frame()
    assert list(frame["kind"]) == ["action"] * 3 + ["prompt"]
    assert math.isnan(frame["logprob"][3])
    for wrong in ([[2, 0, 1]], [[0, 3, 3]], [[0, 0, 999]], [[0, -1, 2]]):
        with pytest.raises(ValueError, match="do not exist"):
            view.set_state({"_selected": wrong})
    view.clear()
    assert repr(view.selection) == "Selection(nothing)"
    assert list(view.selection.to_frame().columns)[:4] == ["trajectory", "token", "id", "piece"]


def test_a_view_as_python_and_as_a_frame() -> None:
    t = trajectory()
    view = w.TokenView(t, signal="entropy")
    assert view.to_code() == "view = w.TokenView(source, signal='entropy')\nview"
    view.select("t-0", 6, 9)
    cell: dict[str, Any] = {"w": w, "source": t, "agent": SimpleNamespace(chain=lambda t: t)}
    exec(view.to_code(), cell)
    assert repr(cell["view"].selection) == repr(view.selection)
    assert cell["chain"] is t
    view = w.TokenView([t, trajectory("t-1", seed=1)])
    frame = view.to_frame()
    assert len(frame) == view.tokens == 46
    view.select("t-1", 3, 9)
    some = view.selection.to_frame().reset_index(drop=True)
    assert some.equals(frame[frame["trajectory"] == "t-1"].iloc[3:9].reset_index(drop=True))
    assert frame["logprob"].isna().sum() == (~frame["mask"]).sum()
    assert len(w.TokenView([]).to_frame()) == 0


async def test_a_chain_goes_on_by_hand_from_its_tokens() -> None:
    agent = af.Agent(af.ScriptedEngine(["4", "5"]), chat=agents.chat(), reward=agents.exact, max_turns=2)
    rollout = await agent.rollout(agents.tasks(2))
    view = w.TokenView(rollout, agent=agent)
    view._do_stepper(1)
    assert view.stepper.chains[0].ids == tuple(rollout.trajectories[1].ids)
    assert view._child == view.stepper.model_id
    with pytest.raises(ValueError, match="pass agent="):
        w.TokenView(rollout)._do_stepper(0)


def test_the_kl_to_a_reference_comes_from_the_step_or_from_its_logprobs() -> None:
    t = trajectory()
    batch = batch_of([t])
    batch.ref_logprobs = batch.logprobs - 0.5
    view = w.TokenView(batch, signal="kl")
    values = unpack(view._buffers["columns"]["kl_reference"])
    np.testing.assert_allclose(values[t.action_mask], math.exp(-0.5) - 1 + 0.5, rtol=1e-5)
    assert np.isnan(values[~t.action_mask]).all()
    stats = stats_of(batch)
    stats.detail["kl_reference"] = np.full(batch.ids.shape, 0.25, np.float32)
    values = unpack(w.TokenView(stats)._buffers["columns"]["kl_reference"])
    assert set(values[t.action_mask]) == {0.25}


# --- size ----------------------------------------------------------------------------------------


def test_5000_tokens_stay_small() -> None:
    rows = [trajectory(f"t-{i}", actions=12, width=20, seed=i) for i in range(18)]
    view = w.TokenView(batch_of(rows), signal="logprob")
    page = check_static(view)
    assert view.tokens > 5000
    assert "Left out of this static form:" in page.text
    assert len(json.dumps(view._about)) < 60_000  # grows with turns and distinct pieces, not with tokens


# --- update rate ---------------------------------------------------------------------------------


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_throttle_sends_ten_a_second_and_the_last_state() -> None:
    state, seen = [0], []
    throttle = Throttle(lambda: seen.append(state[0]), 0.05)
    for i in range(1, 200):
        state[0] = i
        throttle.schedule()
        await asyncio.sleep(0.001)
    await until(lambda: seen[-1] == 199)
    assert len(seen) < 100
    state, seen = [0], []
    threaded = Throttle(lambda: seen.append(state[0]), 0.05)
    lock = threading.Lock()

    def work() -> None:  # without a loop and from many threads
        for _ in range(500):
            with lock:
                state[0] += 1
            threaded.schedule()

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
    await until(lambda: bool(seen) and seen[-1] == 2000)
    assert len(seen) < 100


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


# --- PoolView ------------------------------------------------------------------------------------


class Box:
    async def reset(self) -> None: ...


async def ask(view: w.View, name: str, value: Any = None) -> None:
    """Click a button as a page does, and wait until it is done."""
    view._on_message(view, {"kind": "do", "page": "a", "name": name, "value": value}, [])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    while view._jobs:
        await asyncio.wait(list(view._jobs))
        await asyncio.sleep(0)
    view.refresh()


def tell(view: w.View, kind: str, page: str) -> None:
    view._on_message(view, {"kind": kind, "page": page}, [])


async def test_pool_view_follows_a_pool() -> None:
    async with Pool(Box, size=len(NASTY)) as pool:
        view = w.PoolView(pool)
        assert repr(view) == f"PoolView(Box 0 leased, 0 idle, 0 starting, 0 waiting, size {len(NASTY)})"
        updates = view.updates
        for _ in range(300):
            async with pool.lease(owner="quick"):
                pass
        async with pool.lease(owner="me"):
            await until(lambda: view.counts["leased"] == 1)
            assert view.updates - updates < 100
            assert "me" in view.freeze()._repr_html_()
            view.refresh()
            (lane,) = view._state["lanes"]
            assert (lane[1:4], lane[6]) == (["leased", "me", 301], False)
        await until(lambda: view.counts["leased"] == 0)
        assert view.counts == {
            "size": len(NASTY), "idle": 1, "starting": 0, "leased": 0, "waiting": 0, "recycled": 301, "dead": 0,
            "failed_starts": 0,
        }  # fmt: skip
        assert "at most 1 leased at once" in check_static(view).text
        # The view rests while no page shows it.
        tell(view, "open", "a")
        tell(view, "close", "a")
        held = [await pool.acquire(owner) for owner in NASTY]
        waiting = [asyncio.ensure_future(pool.acquire(owner)) for owner in NASTY]
        await asyncio.sleep(0.12)
        assert view.counts["leased"] == 0
        tell(view, "open", "b")
        assert view.counts["leased"] == view.counts["waiting"] == len(NASTY)
        sent(view)
        assert "script" not in check_static(view).tags
        # An error while sending is shown.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "snapshot", Mock(side_effect=TypeError("odd")))
            await held.pop().release()
            await until(lambda: view._notice == "TypeError: odd")
        for request in waiting[1:]:
            request.cancel()
        await asyncio.wait(waiting)
        for lease in (*held, waiting[0].result()):
            await lease.release()
    view.refresh()
    assert view._state["closed"] and view._state["lanes"] == []
    assert "Box, closed" in check_static(view).text and "not started" not in check_static(view).text
    with pytest.raises(TypeError, match="pool must be a Pool"):
        w.PoolView(7)


async def test_a_pool_and_its_view_do_not_keep_each_other_alive() -> None:
    pool = Pool(Box, size=1)
    closed, view = w.PoolView(pool), w.PoolView(pool)
    assert pool._listeners
    closed.close()
    assert "0 leased" in closed.freeze()._repr_html_()
    ipywidget._instances.pop(view.model_id)
    view.comm.on_msg(None)
    view.comm = None
    view._msg_callbacks.callbacks.clear()
    del view
    gc.collect()
    assert not pool._listeners
    view = w.PoolView(pool)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    view.refresh()
    assert view._state["gone"]
    check_static(view)


async def test_views_of_one_pool_share_history_events_and_what_was_taken() -> None:
    async with Pool(Box, size=2, max_uses=1) as pool:
        first = w.PoolView(pool)
        first._on_message(first, {"kind": "set", "page": "a", "name": "_tab", "value": "events"}, [])
        await first._do_take(None)
        with pytest.raises(ValueError, match="at most 1 of 2 sandboxes can be taken"):
            await first._do_take(None)
        second = w.PoolView(pool)  # as after re-running the cell of the view
        assert second._tab == "events" and second._points is first._points
        (number,) = second.held
        first.close()
        await asyncio.sleep(0.01)
        assert pool.snapshot().leased == 1, "another view still shows the sandbox as taken"
        held = await pool.acquire("a chain")
        waiting = asyncio.ensure_future(pool.acquire("x" * 300))
        await asyncio.sleep(0.02)
        second.refresh()
        ((owner, seconds),) = second._state["queue"]
        assert owner == "x" * 200 and seconds >= 0.01
        await second._do_give_back(number)
        await held.release()
        await (await waiting).release()
        second.refresh()
        kinds = [(event[2], event[3], event[4]) for event in second._state["events"]]
        assert kinds == [("closed", name, "used 1 times") for name in ("x" * 200, "a chain", "by hand")]
        second._on_message(second, {"kind": "open", "page": "b"}, [])
        assert max(leased for _, leased, *_ in second._history) == 2
        sent(second)


async def test_pool_view_by_hand() -> None:
    class Box:
        def __init__(self) -> None:
            self.things: list[int] = []

        async def reset(self) -> None:
            self.things.clear()

    async with Pool(Box, size=2) as pool:
        view = w.PoolView(pool)
        assert view._state["recycles"]
        await ask(view, "take")
        (number,) = view.held
        view.held[number].things.append(1)
        assert view._state["lanes"][0][:3] == [number, "leased", "by hand"]
        assert view._state["lanes"][0][6] is True and "by hand, from this view" in check_static(view).text
        await ask(view, "reset", number)
        assert view.held[number].things == [], "reset, and still ours"
        chain = await pool.acquire("chain")
        await ask(view, "reset", chain.id)
        assert chain.revoked == "reset by hand"
        again = await pool.acquire("chain")
        await ask(view, "close", again.id)
        assert again.revoked == "closed by hand"
        await ask(view, "close", 99)
        assert view._notice.startswith("SettingsError: sandbox must be the number of a Box"), "it says so"
        await ask(view, "give_back", number)
        assert view.held == {} and pool.snapshot().leased == 0 and view._notice == ""
        await ask(view, "give_back", number)
        assert "was not leased in this view" in view._notice
        await ask(view, "take")
        (number,) = view.held
        await ask(view, "close", number)
        assert view.held == {} and number not in [box.id for box in pool.snapshot().sandboxes]
        await ask(view, "reset", "x")
        assert view._notice.startswith("ValueError")
        await ask(view, "take")
        view.close()
        await asyncio.sleep(0.01)
        assert pool.snapshot().leased == 0, "a closed view holds nothing"


async def test_pool_view_by_hand_of_a_pool_elsewhere() -> None:
    async with Pool(Box, size=2) as pool, af.serve_pool(pool) as server:
        async with af.RemotePool(server.url, token=server.token, sandbox_type=Box) as far:
            view = w.PoolView(far)
            assert not view._state["recycles"]
            await ask(view, "take", None)
            (number,) = view.held
            await ask(view, "reset", number)
            assert view._notice == "" and number in view.held
            await ask(view, "give_back", number)
            assert pool.snapshot().leased == 0
            view.close()


async def test_pool_view_selection_is_a_frame() -> None:
    async with Pool(Box, size=3) as pool:
        view = w.PoolView(pool)
        assert not view.selection
        assert list(view.selection.to_frame().columns) == list(view.to_frame().columns)
        assert view.to_code().splitlines()[-1] == "view.to_frame()"
        leases = [await pool.acquire("calc-1/0"), await pool.acquire("a person")]
        leases[0].turn = 2
        # A click on a sandbox that no longer exists is ignored.
        view._on_message(view, {"kind": "set", "page": "a", "name": "_selected", "value": [leases[0].id, 99]}, [])
        assert view.selection.numbers == (leases[0].id,)
        frame = view.selection.to_frame()
        assert frame.iloc[0][["sandbox", "state", "owner", "turn", "leases", "hand"]].tolist() == [
            leases[0].id, "leased", "calc-1/0", "2", 1, False,
        ]  # fmt: skip
        assert frame["seconds"].iloc[0] >= 0
        view.select(leases[1].id, leases[0].id)
        assert [row["owner"] for row in view.selection] == ["calc-1/0", "a person"]
        assert view.to_frame()["hand"].tolist() == [False, False]
        assert view.to_code().splitlines() == [
            "view = w.PoolView(pool)", f"view.select({leases[0].id}, {leases[1].id})", "view.selection.to_frame()",
        ]  # fmt: skip
        with pytest.raises(ValueError, match="sandbox 99 does not exist; the pool has 1, 2"):
            view.select(99)
        view._on_message(view, {"kind": "set", "page": "a", "name": "_selected", "value": ["x"]}, [])
        assert "x" in view._notice and len(view.selection) == 2, "it says so, and nothing is lost"
        view.select()
        assert not view.selection
        view.select(leases[0].id)
        for lease in leases:
            await lease.release()
        sent(view)
    del pool, lease, leases
    gc.collect()
    view.refresh()
    assert view.selection.to_frame()["state"].tolist() == ["leased"], "of a pool that is gone, what was last seen"


# --- TrainView -----------------------------------------------------------------------------------


class FakeRun:
    total = 20

    def __init__(self, n: int = 0) -> None:
        self.records: list[dict[str, float]] = []
        self.listeners: list[Callable[..., Any]] = []
        for _ in range(n):
            self.step()

    def subscribe(self, callback: Callable[..., Any]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def step(self, **more: float) -> None:
        i = len(self.records) + 1
        record = {
            "step": i,
            "success": i / 20,
            "reward": i / 10,
            "approx_kl": 0.01,
            "grad_norm": 1.0,
            "seconds": 2.0,
            **more,
        }
        self.records.append(record)
        for listener in list(self.listeners):
            listener(record)


def test_train_view_follows_a_run() -> None:
    run = FakeRun()
    view = w.TrainView(run)
    assert repr(view) == "TrainView(0 of 20 steps)"
    assert "No step is recorded yet" in check_static(view).text
    for _ in range(5):
        run.step(eval_success=0.5, eval_low=0.4, eval_high=0.6)
    view._repr_mimebundle_()  # displaying the view refreshes it immediately
    assert view.steps == (1, 2, 3, 4, 5)
    run.step(eval_success=0.5, eval_low=0.4, eval_high=0.6)
    asyncio.run(until(lambda: len(view.steps) == 6))
    run.records.pop()
    view.refresh()
    assert repr(view) == "TrainView(5 of 20 steps)"
    columns = view._buffers["runs"][0]["columns"]
    np.testing.assert_allclose(unpack(columns["success"]), np.float32([0.05, 0.1, 0.15, 0.2, 0.25]))
    assert np.isnan(unpack(columns["entropy"])).all()
    sent(view)
    page = check_static(view)
    assert len(page.images) == 5
    assert "not recorded: clip fraction, entropy, loss, tokens, turns" in page.text
    view.close()
    assert run.listeners == []


def test_train_view_of_a_folder(tmp_path: Path) -> None:
    run = FakeRun(4)
    lines = [json.dumps(r) for r in run.records]
    (tmp_path / "steps.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 4, "success": 0.9}), '{"step": 5, "succ'])
    )
    for path in (tmp_path, str(tmp_path), tmp_path / "steps.jsonl"):
        view = w.TrainView(path)
        assert view.steps == (1, 2, 3, 4)
        assert view.to_frame()["success"][4] == np.float32(0.9)  # after a resume, the last record of a step is used
        assert math.isnan(view.to_frame()["reward"][4])
    view.set_state({"step": 2})
    assert view.step == 2
    with pytest.raises(ValueError, match="steps 1 to 4"):
        view.step = 9
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines, '{"step": 5, "success": 0.75}\n']))
    tell(view, "open", "a")
    assert view.steps == (1, 2, 3, 4, 5)
    (tmp_path / "steps.jsonl").write_text("\n".join([lines[0], "broken", lines[1]]))
    with pytest.raises(ValueError, match="line 2"):
        w.TrainView(tmp_path)
    with pytest.raises(FileNotFoundError, match="pass a run"):
        w.TrainView(tmp_path / "nothing")
    with pytest.raises(TypeError, match="runs must be training runs"):
        w.TrainView(7)


def test_train_view_with_odd_numbers() -> None:
    run = FakeRun(3)
    run.step(grad_norm=math.inf, success=math.nan, loss=-1.0)
    run.step(grad_norm=math.nan)
    view = w.TrainView(run)
    sent(view)
    panel = next(p for p in view._about["panels"] if p["label"] == "grad norm")
    assert (panel["odd"], panel["n"]) == (1, 3)
    assert math.isfinite(panel["lo"])
    assert math.isfinite(panel["hi"])
    check_static(view)
    one = w.TrainView(FakeRun(1))
    check_static(one)


def test_metrics_of_rewards_are_charted_and_the_others_listed() -> None:
    run = FakeRun()
    names = ["exact", *(f"m{i}" for i in range(8)), NASTY[0]]
    run.step()
    for step in range(3):
        run.step(metric_success=0.5, **{f"metric_{name}": step / 4 for name in names})
    view = w.TrainView(run)
    charted = [p["label"] for p in view._about["panels"] if p["points"].startswith("eval_metric_")]
    assert charted == names[:6]
    assert [row[0] for row in view._about["metrics"]] == ["success", *names[6:]]
    assert view._about["metrics"][1][2:] == ["0", "0.5"]
    columns = view._buffers["runs"][0]["columns"]
    np.testing.assert_array_equal(unpack(columns["metric_exact"]), np.float32([math.nan, 0, 0.25, 0.5]))
    assert "metric_m7" not in columns and view.to_frame()["metric_m7"][4] == 0.5
    sent(view)
    page = check_static(view)
    assert "exact" in page.text and "m7" in page.text
    both = w.TrainView(run, FakeRun(2), panels=["metric_m7"], names=["a", "b"])
    assert [p["label"] for p in both._about["panels"]] == ["m7"]
    assert ["exact", "b", "–", "–"] in both._about["metrics"]
    check_static(both)


@pytest.mark.parametrize(
    ("key", "values", "axis"),
    [
        ("truncated", [0.0, 0.0, 0.0], (0.0, 1.0)),  # the axis of a fraction does not go below 0
        ("clip_fraction", [0.0, 0.0, 0.0], (0.0, 1.0)),
        ("loss", [0.0, 0.0, 0.0], (0.0, 1.0)),
        ("clip_fraction", [0.5, 1.0, 0.98], (0.0, 1.0)),
        ("clip_fraction", [0.97, 1.0, 0.98], (0.9688, 1.0)),
        ("turns", [2.0, 2.0, 2.0], (0.0, 2.08)),
        ("loss", [-1.0, -1.0, -1.0], (-1.04, 0.0)),
        ("truncated", [1.5, 1.5, 1.5], (0.0, 1.5)),  # impossible values are drawn too
    ],
)
def test_the_axis_of_a_chart(key: str, values: list[float], axis: tuple[float, float]) -> None:
    run = FakeRun()
    for value in values:
        run.step(**{key: value})
    view = w.TrainView(run)
    panel = next(p for p in view._about["panels"] if [line["key"] for line in p["lines"]] == [key])
    assert (panel["lo"], panel["hi"]) == pytest.approx(axis, abs=1e-4)
    assert panel["lo"] <= min(values) and panel["hi"] >= max(values)


def test_a_thousand_steps_stay_small() -> None:
    view = w.TrainView(FakeRun(3000))
    assert sum(len(p["values"]) for p in view._buffers["runs"][0]["columns"].values()) < 400_000
    check_static(view)


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    long, short = FakeRun(12), FakeRun(3)
    lines = [json.dumps({"step": i, "success": 0.5, "trajectories": 64, "seconds_update": 0.1}) for i in range(4, 9)]
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "steps.jsonl").write_text("\n".join(lines) + "\n")
    view = w.TrainView(long, short, tmp_path / "saved", names=["long", "short", "<b>saved</b>"])
    assert repr(view) == "TrainView(3 runs, 20 steps)"
    frame = view.to_frame()
    assert list(frame.loc["<b>saved</b>"].index) == [4, 5, 6, 7, 8]
    assert math.isnan(frame.loc[("long", 1), "success_low"])  # the record lacks the number of chains
    assert frame.loc[("<b>saved</b>", 4), "success_low"] == pytest.approx(0.3808, abs=1e-3)  # Wilson, 32 of 64
    panel = {p["lines"][0]["key"]: p for p in view._about["panels"]}
    assert panel["reward"]["hi"] >= 1.2  # all runs share the range
    assert "seconds_update" in panel
    assert "kl_reference" not in panel
    short.step()
    asyncio.run(until(lambda: len(view.to_frame().loc["short"]) == 4))
    view.step = 11  # a step of only one run
    sent(view)
    assert "<b>saved</b>" in check_static(view).text
    with pytest.raises(ValueError, match="one entry per run"):
        w.TrainView(long, short, names=["one"])
    with pytest.raises(TypeError, match="runs must be training runs"):
        w.TrainView(long, 7)
    view.close()
    assert long.listeners == short.listeners == []


def test_intervals() -> None:
    from agentfly_kit.widgets._curves import intervals

    (low, high), (below, above) = intervals(
        {"trajectories": 110, "unscored": 1 / 11, "success": 1.0, "reward": 2.0, "reward_std": 0.5}
    )
    assert (low, high) == pytest.approx((0.963, 1.0), abs=1e-3)
    assert (below, above) == pytest.approx((1.902, 2.098), abs=1e-3)
    for record in ({}, {"trajectories": 0}, {"trajectories": 8, "unscored": 1.0}):
        assert all(math.isnan(x) for pair in intervals(record) for x in pair)


async def test_a_run_is_paused_and_stopped_from_its_view(tmp_path: Path) -> None:
    policy = agents.fresh()
    agent = af.Agent(
        af.LocalEngine(policy), chat=policy.chat, tools=[agents.calculator], reward=agents.exact, max_turns=2,
        sampling=af.Sampling(max_tokens=32),
    )  # fmt: skip
    config = af.TrainConfig(steps=6, tasks_per_step=2, group_size=2, save_rollouts=True)
    run = af.train(agent, policy, agents.tasks(4), config, run=tmp_path / "run")
    view = w.TrainView(run)
    assert view._about["control"] == {"can": True, "ended": False, "paused": False, "stopping": False}

    await ask(view, "pause")
    running = asyncio.ensure_future(run)
    await asyncio.sleep(0.3)
    assert run.records == []
    async with asyncio.timeout(20):
        while not view._about["control"]["paused"]:
            await asyncio.sleep(0.02)
    await ask(view, "resume")
    while not run.records:
        await asyncio.sleep(0.01)
    await ask(view, "stop")
    await running
    done = len(run.records)
    assert 1 <= done < 6
    view.refresh()
    assert view._about["control"] == {"can": False, "ended": True, "paused": False, "stopping": False}
    assert view._about["runs"][0]["word"] == f"stopped after step {done}"
    await ask(view, "open", {"step": 1, "run": 0})
    assert [t.id for t in view.rollout] == [row[0] for row in view._list["rows"]]
    assert len(view._list["rows"]) == 4
    await ask(view, "chain_tokens", view._list["rows"][2][0])
    assert view.opened.trajectories[0].id == view._list["rows"][2][0] == view.selection.ids[0]
    sent(view)
    assert len(view.selection.to_frame()) == 1
    await ask(view, "chain_stepper")
    assert view.opened.chain.origin is next(iter(view.selection))
    await ask(view, "chain_code")
    cell: dict[str, Any] = {"af": af, "agent": agent}
    exec(view._cell["text"], cell)
    assert cell["trajectory"].id == view.selection.ids[0]
    assert cell["chain"].turns == cell["trajectory"].turns
    shown = view.opened
    await ask(view, "open", {"step": 99, "run": 0})
    assert len(view.selection) == 0
    assert "not one of" in view._list["note"]
    assert view.rollout is None
    assert shown.comm is None  # closed together with the list
    view.refresh()
    low, high = view.to_frame().loc[1, ["success_low", "success_high"]]
    assert 0 <= low <= view.to_frame().loc[1, "success"] <= high <= 1
    folder = w.TrainView(tmp_path / "run")  # without a handle, from the folder only
    assert folder._about["control"]["can"] is False
    assert len(await folder.open_step(1)) == 4
    folder.pick(folder.rollout.trajectories[0])
    assert folder._chain["agent"] is False
    with pytest.raises(ValueError, match="pass agent="):
        folder._do_chain_stepper(None)
    with pytest.raises(LookupError, match="trajectory nobody is not listed"):
        folder.pick("nobody")
    await ask(view, "stop")
    bare = w.TrainView(FakeRun(2))
    assert await bare.open_step(1) is None
    assert "did not keep its rollouts" in bare._list["note"]
    with pytest.raises(ValueError, match="run must be between 0 and 0, got 3"):
        await bare.open_step(1, 3)


@pytest.mark.parametrize("open_page", [True, False])
def test_a_picture_that_cannot_be_drawn_is_reported_and_the_last_one_stays(
    monkeypatch: pytest.MonkeyPatch, open_page: bool
) -> None:
    view = w.TokenView(trajectory())
    view._display_ids.append("cell")
    sent_messages: list[Any] = []
    monkeypatch.setattr(view, "send", sent_messages.append)
    monkeypatch.setattr(view, "_static", Mock(side_effect=OSError("the run folder is gone")))
    if open_page:
        view._on_message(view, {"page": "a", "kind": "open"}, [])
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
    assert refused.value.__notes__ == [f"{file} is unchanged; copy it to a folder in which you can write"]
    assert file.read_bytes() == before
    file.write_text("{}")
    with pytest.raises(Exception, match="Notebook"):
        w.freeze(file)
    assert [path.name for path in tmp_path.glob("*.part")] == []


async def test_every_view_hands_its_selection_and_its_code_to_a_cell() -> None:
    """All views have the same interface for their selection and code."""
    agent = agents.scripted(["42"])
    run = agent.rollout(agents.tasks(2))
    rollout = await run
    pool = Pool(Box, size=1)
    lease = await pool.acquire("me")
    form = w.ToolForm(agents.calculator)
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
        view._on_message(view, {"kind": "do", "page": "a", "name": "chain_code", "value": None}, [])
        await asyncio.sleep(0)
        code = view._cell["text"] if hasattr(view, "_cell") else None
        if code is None:
            code = view.to_code(0) if name == "TrajectoryView" else view.to_code()
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert not view._notice, (name, view._notice)
    await lease.release()
    await pool.close()
