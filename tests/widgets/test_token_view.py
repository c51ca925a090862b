"""TokenView without a browser: its sources, signals and selection, and the static form."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import agents
import errors
import numpy as np
import pytest
import vision_models
from agentfly_kit.widgets._tokens import visible
from views import NASTY, batch_of, check_static, sent, stats_of, trajectory, unpack

import agentfly_kit as af
from agentfly_kit import widgets as w
from agentfly_kit.types import ImageSpan


def test_what_cannot_be_seen_is_made_visible() -> None:
    wanted = {
        " the\n": "·the⏎", "": "∅", "\u200b\u202e": "‹U+200B›‹U+202E›", "\ud800": "‹U+D800›", "·": "‹U+00B7›",
        "\u0301": "◌\u0301", "e\u0301": "e\u0301",
    }  # fmt: skip
    assert {text: visible(text) for text in wanted} == wanted
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
        page = check_static(view)
        assert not page.tags & {"script", "img"}
        assert "<script>alert(1)</script>" in page.text and "<b>id</b>" in page.text


def test_the_static_form_marks_mask_and_signal_in_its_text() -> None:
    """Hosts that remove inline styles show brackets and superscript digits instead of colours."""
    t = trajectory(actions=1, width=3)
    t = t.replace(
        turns=tuple(dataclasses.replace(x, logprobs=(-0.5, -7.0, -0.1)) if x.sampled else x for x in t.turns)
    )
    stats = stats_of(batch_of([t]))
    unknown = t.replace(turns=tuple(dataclasses.replace(x, entropies=None) if x.sampled else x for x in t.turns))
    for source, signal, marked, legend in (
        (t, "mask", "⟦·w0·w1·w2⟧", "⟦ ⟧ enclose tokens with mask 1"),
        (t, "logprob", "·w0¹·w1⁹·w2⁰", "⁰ to ⁹ after a token: logprob from 0 nats down to −3 nats"),
        (stats, "ratio", "·w0⁺⁹·w1⁺⁹·w2⁺⁹", "⁻⁹ to ⁺⁹ after a token: ratio from 0"),
        (stats, "clipped", "·w0ꜝ·w1ꜝ·w2ꜝ", "ꜝ after a token: clipped"),
        (unknown, "entropy", "·w0ˣ·w1ˣ·w2ˣ", "entropy"),
    ):
        text = check_static(w.TokenView(source, signal=signal)).text
        assert text.count(marked) == 1 and legend in text
    # With styles, the marks ⟦ and ⟧ are hidden, and lines may break before each run of dots, which stand for spaces.
    assert '<span style="display:none">⟦</span><wbr>·w0<wbr>·w1' in w.TokenView(t).freeze()._repr_html_()


def test_the_placeholders_of_an_image_are_one_cell() -> None:
    t = trajectory(actions=1, width=3)
    image = vision_models.picture(1)
    first, *others = t.turns
    t = t.replace(turns=(dataclasses.replace(first, images=(ImageSpan(image, 1, 2),)), *others))
    for source in (t, batch_of([t, t])):
        view = w.TokenView(source, signal="logprob")
        about, page = sent(view)["_about"], check_static(view)
        assert about["pictures"] == [[image.data_url, "[image 24 x 16]"]] and about["rows"][0]["images"] == [
            [1, 3, 0]
        ]
        assert "img" in page.tags and 'title="[image 24 x 16], 2 tokens"' in view._static()
        assert (about["rows"][0]["n"], about["rows"][0]["sampled"]) == (len(t.ids), 3)
    other = dataclasses.replace(first, images=(ImageSpan(vision_models.picture(2), 1, 2),))
    view = w.TokenView(t, compare=t.replace(id="b", turns=(other, *others)))
    assert view._about["notes"][0].endswith("share their first 1 token") and view._about["rows"][0]["parts"] == 1


def test_the_number_of_previews_is_limited() -> None:
    first, *others = trajectory(actions=1, width=3).turns
    shown = [
        dataclasses.replace(first, images=(ImageSpan(vision_models.picture(i, (2, 2)), 1, 2),)) for i in range(130)
    ]
    view = w.TokenView([trajectory(f"t-{i}").replace(turns=(turn, *others)) for i, turn in enumerate(shown)])
    assert [source != "" for source, _ in view._about["pictures"]] == [True] * 128 + [
        False
    ] * 2 and "2 of 130 different images" in check_static(view).text


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


def test_rows_are_joined_by_trajectory_and_span_not_by_position() -> None:
    ts = [trajectory(f"t-{i}", actions=1 + i, seed=i) for i in range(3)]
    view = w.TokenView(batch_of([ts[2], ts[0], ts[1]]), compare=batch_of(ts))
    view.select("t-0", 5, 7)
    frame = view.selection.to_frame()
    np.testing.assert_allclose(frame["logprob"], ts[0].logprobs[5:7])
    # Row 1 of the source, and row 0 of the other source.
    assert frame[["trajectory", "advantage", "advantage ′", "Δ advantage"]].values.tolist() == [
        ["t-0", 105.0, 5.0, -100.0],
        ["t-0", 106.0, 6.0, -100.0],
    ]


def test_a_batch_row_may_hold_a_span_of_its_trajectory() -> None:
    t = trajectory()
    batch = batch_of([t])
    batch.attention[0, :4] = False
    view = w.TokenView(batch)
    assert view.tokens == len(t.ids) - 4
    view.select("t-0", 5, 6)
    frame = view.selection.to_frame()
    assert (int(frame["token"][0]), int(frame["id"][0])) == (5, int(t.ids[5]))
    errors.check(lambda: view.select("t-0", 0), ValueError, re.compile(r"tokens 0 to 1 of .* are not in this view"))
    batch.ids[0, 6] = 999
    errors.check(lambda: w.TokenView(batch), af.errors.AlignmentError, "must be a span of its trajectory 't-0'")


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
    legends = {x["name"]: x for x in view._about["signals"]}
    assert legends["clipped"]["set"] == legends["clipped"]["n"] == int(sum(t.action_mask.sum() for t in ts))
    assert legends["ratio"]["middle"] == 1.0
    assert legends["ratio"]["lo"] >= 0, "a ratio is never below 0"
    check_static(view)


def test_a_batch_of_the_library() -> None:
    ts = [dataclasses.replace(trajectory(f"t-{i}", 1 + i, seed=i), chain=i, reward=float(i % 2)) for i in range(4)]
    batch = af.collate(ts, advantages=af.advantages.grpo)
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
    assert "not in the second source: b" in notes and "only in the second source, not shown: c" in notes
    assert "2 tokens differ between the sources" in notes
    turns = (*a.turns[:3], dataclasses.replace(a.turns[3], ids=(7,) * len(a.turns[3].ids or ())), *a.turns[4:])
    view = w.TokenView(a, compare=dataclasses.replace(a, id="b", turns=turns))
    assert [row["parts"] for row in view._about["rows"]] == [13, 13]
    assert view._about["notes"] == ["a and b share their first 13 tokens"]


def test_sources() -> None:
    a, b = trajectory("a"), trajectory("b")
    group = SimpleNamespace(trajectories=(a, b))
    for source in ((a, b), [a, b], group, [SimpleNamespace(trajectories=(a,)), SimpleNamespace(trajectories=(b,))]):
        assert repr(w.TokenView(source)) == "TokenView(2 rows, 46 tokens)"
    assert repr(w.TokenView([])) == "TokenView(0 rows, 0 tokens)"
    check_static(w.TokenView([]))


def test_odd_trajectories_are_shown() -> None:
    text_only = dataclasses.replace(trajectory("text"), turns=(af.Turn("prompt", "task", None, text="hello"),))
    one = dataclasses.replace(trajectory("one"), turns=(af.Turn("prompt", "task", (1,), text="x"),))
    empty = dataclasses.replace(trajectory("empty"), turns=())
    unscored = dataclasses.replace(trajectory("unscored"), reward=None)
    view = w.TokenView([text_only, one, empty, unscored], signal="logprob")
    text = check_static(view).text
    assert all(words in text for words in ("only text", "unscored", "[1]"))


def test_signals_are_checked() -> None:
    view = w.TokenView(trajectory())
    assert view.signals == ("mask", "logprob", "entropy")
    errors.check(
        lambda: setattr(view, "signal", "ratio"), ValueError, "one of mask, logprob, entropy for this source"
    )
    assert view.signal == "mask"
    view.signal = "entropies"
    assert view.signal == "entropy"


def test_all_missing_and_infinite_numbers() -> None:
    t = trajectory()
    batch = batch_of([t], values=None, returns=None)
    batch.advantages[:] = math.nan
    batch.token_rewards[batch.mask] = math.inf
    view = w.TokenView(batch, signal="reward")
    legends = {x["name"]: x for x in view._about["signals"]}
    n = int(t.action_mask.sum())
    assert (legends["advantage"]["n"], legends["advantage"]["missing"]) == (0, n), "shown, as missing"
    assert (legends["reward"]["n"], legends["reward"]["infinite"]) == (n, n)
    check_static(view)


def test_selection_comes_from_the_page() -> None:
    view = w.TokenView([trajectory("a"), trajectory("b")])
    assert not view.selection
    view.set_state({"_selected": [[1, 5, 8], [0, 0, 1]]})
    assert [(s.trajectory, s.start, s.stop) for s in view.selection] == [("b", 5, 8), ("a", 0, 1)]
    assert repr(view.selection) == "Selection(4 tokens: b[5:8], a[0:1])"
    frame = view.selection.to_frame()
    assert list(frame["kind"]) == ["action"] * 3 + ["prompt"]
    assert math.isnan(frame["logprob"][3])
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
    assert repr(cell["view"].selection) == repr(view.selection) and cell["chain"] is t
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


def test_the_kl_to_a_reference_comes_from_the_step_or_from_its_logprobs() -> None:
    t = trajectory()
    batch = batch_of([t])
    batch.ref_logprobs = batch.logprobs - 0.5
    values = unpack(w.TokenView(batch, signal="kl")._buffers["columns"]["kl_reference"])
    np.testing.assert_allclose(values[t.action_mask], math.exp(-0.5) - 1 + 0.5, rtol=1e-5)
    assert np.isnan(values[~t.action_mask]).all()
    stats = stats_of(batch)
    stats.detail["kl_reference"] = np.full(batch.ids.shape, 0.25, np.float32)
    values = unpack(w.TokenView(stats)._buffers["columns"]["kl_reference"])
    assert set(values[t.action_mask]) == {0.25}


def test_5000_tokens_stay_small() -> None:
    rows = [trajectory(f"t-{i}", actions=12, width=20, seed=i) for i in range(18)]
    view = w.TokenView(batch_of(rows), signal="logprob")
    assert view.tokens > 5000 and "Left out of this static view:" in check_static(view).text
    assert len(json.dumps(view._about)) < 60_000  # grows with turns and distinct pieces, not with tokens
