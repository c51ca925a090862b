"""Trajectories with several rows: compaction, re-rendered histories, authors, records and views."""

import math
import re
from pathlib import Path
from typing import Any

import errors
import numpy as np
import pytest
from agents import Played, TextOnly, agent, call, chat, played, stepped
from test_chat import with_template

import agentfly_kit as af

TASK = af.Task("t", ({"role": "user", "content": "What is 1+1, and twice that?"},), {"answer": "4"})
VIEWS = ("ids", "action_mask", "logprobs", "entropies", "versions", "token_texts", "turn_index")


def engine_rows(engine: Played) -> list[tuple[int, ...]]:
    """Return the rows of an engine's requests: a request that begins with a whole row continues it."""
    rows: list[tuple[int, ...]] = []
    for given, gave in zip(engine.given, engine.gave, strict=True):
        if rows and given[: len(rows[-1])] == rows[-1]:
            rows.pop()
        rows.append((*given, *gave))
    return rows


def row_ids(t: af.Trajectory) -> list[tuple[int, ...]]:
    return [tuple(row.ids.tolist()) for row in t.rows]


async def compacted(**settings: Any) -> tuple[af.Chain, af.Trajectory]:
    """Return a chain of three rows: two calls, each followed by a compaction, and an answer."""
    chain = await stepped(played([call("1+1"), call("2*2"), "4"], **settings).chain(TASK))
    chain.compact("So far: 2")
    await chain.step()
    chain.compact("So far: 2, then 4", author="person")
    return chain, await chain.run()


async def test_each_row_equals_inputs_and_outputs_of_the_engine() -> None:
    chain, t = await compacted()
    assert row_ids(t) == engine_rows(chain.agent.engine)
    assert (t.reward, t.stop, t.final, len(t.actions)) == (1.0, "answered", "4", 3)
    assert [(turn.row, turn.kind, turn.author) for turn in t.turns] == [
        (0, "prompt", "task"), (0, "action", "policy"), (0, "observation", "tool"), (1, "prompt", "hook"),
        (1, "action", "policy"), (1, "observation", "tool"), (2, "prompt", "person"), (2, "action", "policy"),
    ]  # fmt: skip
    # The observation before a compaction was never given to an engine: it has text and no ids.
    assert (t.turns[2].ids, t.turns[2].text) == ((), "2")
    assert chat().text(t.rows[1].ids.tolist()).count("So far: 2") == 1
    assert chat().text(t.rows[1].turns[0].ids or ()) == chat().text(
        chat().prompt([{"role": "user", "content": f"{TASK.messages[0]['content']}\n\nSo far: 2"}], t.tools)
    )
    for row, turn in zip(t.rows, [turn for turn in t.turns if turn.sampled], strict=True):
        assert row.ids[row.action_mask].tolist() == list(turn.ids or ())
        assert row.logprobs[row.action_mask].tolist() == pytest.approx(list(turn.logprobs or ()))
        assert set(row.turn_index[row.action_mask].tolist()) == {t.turns.index(turn)}
    assert [len(row) for row in t.rows] == [len(row.ids) for row in t.rows]
    assert repr(t.rows[2]) == f"Row(2 of '{t.id}', 2 turns, {len(t.rows[2])} tokens, 2 sampled)"
    assert f"{sum(map(len, t.rows))} tokens in 3 rows" in repr(t) and " in 3 rows" in repr(chain)
    assert "<th>row</th>" in t._repr_html_()

    # The seeds are those of a chain without compaction.
    plain = played([call("1+1"), call("2*2"), "4"]).chain(TASK)
    await plain.run()
    assert chain.agent.engine.seeds == plain.agent.engine.seeds
    assert len(set(plain.agent.engine.seeds)) == 3


async def test_views_and_drift_of_a_trajectory_require_a_single_row() -> None:
    plain = await played([call("1+1"), "4"]).chain(TASK).run()
    for name in VIEWS:
        assert getattr(plain, name) is getattr(plain.rows[0], name)
    assert "<th>row</th>" not in plain._repr_html_()
    _, t = await compacted()
    for name in VIEWS:
        errors.check(
            lambda: getattr(t, name),
            af.errors.AlignmentError,
            re.compile(rf"has 3 rows, so \.{name} is ambiguous.*trajectory\.rows\[0\]\.{name}"),
        )
    errors.check(lambda: chat().drift(t), af.errors.AlignmentError, "3 rows")
    assert all(chat().drift(row).cause == "none" for row in t.rows)
    assert af.Trajectory("x", TASK, "g", 0, (), "error").rows[0].ids.tolist() == []


async def test_compact_can_replace_the_prompt() -> None:
    chain = await stepped(played([call("1+1"), "4"], system="Be brief.").chain(TASK))
    prompt = chain.compact([{"role": "user", "content": "2, twice?"}])
    assert prompt.ids == chat().prompt([{"role": "user", "content": "2, twice?"}], chain.agent.tools.schemas)
    assert "Be brief." not in prompt.text
    prompt = chain.compact("2 so far")
    assert "Be brief." in prompt.text and prompt.row == 2


async def test_policy_can_write_the_summary() -> None:
    """The summary is requested after a tool result, and sampled as the last action of the row."""
    chain = await stepped(played([call("1+1"), "I have 2.", "4"]).chain(TASK))
    told = chain.observe("What do you know so far?")
    assert [m["role"] for m in told.messages] == ["tool", "user"]
    assert told.ids == chat().observation_ids(
        told.messages, chain.agent.tools.schemas, after=chain.turns[1].ids or ()
    )
    summary = await chain.sample()
    assert chain.stop == "answered"
    chain.compact(str(summary.messages[0]["content"]))
    assert chain.stop is None
    t = await chain.run()
    assert row_ids(t) == engine_rows(chain.agent.engine)
    one, two, three = map(len, chain.agent.engine.gave)
    assert [int(row.action_mask.sum()) for row in t.rows] == [one + two, three]
    assert (t.reward, t.final) == (1.0, "4")


async def test_compact_requires_a_prepared_prompt() -> None:
    chain = played(["4"], before_chain=lambda chain: "The board is empty.").chain(TASK)
    errors.check(
        lambda: chain.compact("x"), af.errors.SettingsError, re.compile(r"before_chain.*await chain\.prepare\(\)")
    )
    await chain.prepare()
    prompt = chain.compact("x")
    assert (prompt.row, "The board is empty." in chain.turns[0].text, "The board" in prompt.text) == (1, True, True)
    t = await chain.run()
    assert (t.reward, [len(row.turns) for row in t.rows]) == (1.0, [1, 2])


async def test_compact_rejects_invalid_states() -> None:
    chain = played([call("1+1"), "4"]).chain(TASK)
    await chain.sample()
    errors.check(lambda: chain.compact("x"), af.errors.SettingsError, "have not run yet; call chain.act()")
    await chain.act()
    for nothing in ([], [{"role": "user"}]):
        errors.check(lambda: chain.compact(nothing), af.errors.SettingsError, "content of compact")
    await chain.finish()
    errors.check(lambda: chain.compact("x"), af.errors.SettingsError, "chain.compact: this chain is finished")


async def test_compact_without_remaining_actions_ends_the_chain() -> None:
    chain = await stepped(played([call("1+1"), "2", "4"], max_turns=2).chain(TASK))
    chain.observe("What do you know?")
    await chain.sample()
    chain.compact("x")
    t = await chain.finish()
    assert (t.stop, len(t.rows)) == ("max_turns", 1)


async def test_rewind_before_a_compaction() -> None:
    chain = await stepped(played([call("1+1"), "4", "5"]).chain(TASK))
    before = chain.turns[2]
    chain.compact("2")
    chain.rewind(2)
    assert (chain.turn.row, chain.turn.ids) == (0, before.ids)
    assert chain.ids == tuple(i for turn in (*chain.turns[:2], before) for i in turn.ids or ())
    assert (await chain.run()).ids.tolist() == list(engine_rows(chain.agent.engine)[0])


async def test_forks_after_a_compaction_share_earlier_rows() -> None:
    chain = await stepped(played([call("1+1"), call("2*2"), "4"]).chain(TASK))
    chain.compact("2")
    await chain.step()
    fork = await chain.fork()
    one, other = await chain.run(), await fork.run()
    assert len(one.rows) == len(other.rows) == 2
    assert all(a is b for a, b in zip(one.turns[:5], other.turns[:5], strict=True))


LONG = "word " * 40


@pytest.mark.parametrize(
    ("script", "why"), [([call("1+1") + LONG, "4"], "no room to begin"), ([LONG * 9 + "…", "4"], "cut")]
)
async def test_on_context_full_can_compact(script: list[str], why: str) -> None:
    called = []

    def compact(chain: af.Chain) -> None:
        called.append(chain.turn.kind)
        chain.compact("2")

    room = len(played([]).chain(TASK).ids) + len(chat().encode(call("1+1") + LONG)) + 3

    class Small(Played):
        async def sample(self, ids: Any, sampling: Any, seed: int, *, request: Any = None) -> Any:
            return await super().sample(
                ids, sampling.replace(max_tokens=min(sampling.max_tokens, room - len(ids))), seed, request=request
            )

    engine = Small(script, max_length=room)
    a = agent(engine=engine, chat=chat(), on_context_full=compact, max_turns=6).replace(
        sampling=agent().sampling.replace(max_tokens=4000)
    )
    t = (await a.rollout([TASK])).trajectories[0]
    assert called == ["observation" if why == "no room to begin" else "action"]
    assert (t.stop, t.reward, len(t.rows)) == ("answered", 1.0, 2)
    assert row_ids(t) == engine_rows(engine) and max(map(len, t.rows)) <= room


async def test_compaction_that_does_not_fit_ends_the_chain() -> None:
    def compact(chain: af.Chain) -> None:
        chain.compact(LONG * 20)

    room = len(played([]).chain(TASK).ids) + 40
    a = played([call("1+1") + LONG, "4"], max_length=room, on_context_full=compact)
    t = (await a.rollout([TASK])).trajectories[0]
    assert (t.stop, t.reward, len(t.rows)) == ("context_full", 0.0, 2)
    assert not t.rows[1].action_mask.any()


REWRITES = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{{- (m.content if loop.length < 4 or m.role != 'assistant' else m.content | upper) -}}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
)


async def test_rewritten_history_begins_a_row() -> None:
    """Each action is trained once, in the row in which it was sampled; later rows contain the template's rendering."""
    rewriting = af.Chat(with_template(REWRITES), history="rerender")
    assert rewriting.append_violation("user")
    engine = Played(["one", "two", "three", "four"])
    chain = agent(engine=engine, chat=rewriting, tools=(), reward=None).chain(TASK)
    for _ in range(3):
        await chain.sample()
        chain.observe("and then?")
    await chain.sample()
    t = await chain.finish()
    assert row_ids(t) == engine_rows(engine)
    # The template changes the history from the third action on, so each later action begins a new row.
    assert [turn.author for turn in t.turns if turn.kind == "prompt"] == ["task", "template", "template"]
    texts = [rewriting.text(ids) for ids in row_ids(t)]
    assert "one" in texts[0] and "two" in texts[0]
    assert "ONE" in texts[2] and "THREE" in texts[2] and "one" not in texts[2]
    assert [i for row in t.rows for i in row.ids[row.action_mask].tolist()] == [
        i for said in engine.gave for i in said
    ]
    # The last row begins with the rendering of the whole conversation.
    assert t.rows[2].ids.tolist()[: -len(engine.gave[3])] == list(rewriting.prompt(t.rows[2].turns[0].messages))
    assert [m["content"] for m in t.rows[2].messages if m["role"] == "assistant"] == ["one", "two", "three", "four"]


async def test_rewind_to_an_observation_that_began_a_row() -> None:
    rewriting = af.Chat(with_template(REWRITES), history="rerender")
    chain = agent(engine=Played(["one", "two", "three"]), chat=rewriting, tools=(), reward=None).chain(TASK)
    for _ in range(2):
        await chain.sample()
        told = chain.observe("and then?")
    assert (chain.turn.row, told.row, told.ids) == (1, 0, ())
    ids = chain.ids
    await chain.sample()
    chain.rewind(told)
    assert (chain.turn.row, chain.ids) == (1, ids)


async def test_unchanged_history_is_appended() -> None:
    a = agent(engine=Played([call("1+1"), "4"]), chat=af.Chat(chat().tokenizer, history="rerender"))
    t = await a.chain(TASK).run()
    assert len(t.rows) == 1
    assert t.ids.tolist() == (await played([call("1+1"), "4"]).chain(TASK).run()).ids.tolist()


async def test_author_of_sampled_tokens() -> None:
    chain = played(["e4", "e5", "Nf3"], tools=(), reward=None).chain(TASK)
    for i in range(3):
        chain.author = ("white", "black")[i % 2]
        await chain.sample()
        if i < 2:
            chain.observe("your move")
    t = await chain.finish()
    assert [turn.author for turn in t.actions] == ["white", "black", "white"]
    row = t.rows[0]
    white, black = row.sampled_by("white"), row.sampled_by("black")
    assert not (white & black).any() and not row.sampled_by("nobody").any()
    for sampled in (white | black, row.sampled_by("white", "black"), row.sampled_by()):
        assert sampled.tolist() == row.action_mask.tolist()
    assert row.ids[black].tolist() == list(t.actions[1].ids or ())


async def test_rows_are_saved_and_loaded(tmp_path: Path) -> None:
    _, t = await compacted()
    plain = await played([call("1+1"), "4"]).chain(af.Task("u", TASK.messages, TASK.fields)).run()
    both = af.Rollout.from_trajectories([t, plain])
    assert af.Rollout.load(both.save(tmp_path / "r.jsonl")) == both
    for a, b in zip(t.rows, af.Rollout.load(tmp_path / "r.jsonl").trajectories[0].rows, strict=True):
        for name in VIEWS:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert '"version":2' in (tmp_path / "r.jsonl").read_text().split("\n")[0]
    af.Rollout.from_trajectories([plain]).save(tmp_path / "one.jsonl")
    assert '"version":1' in (tmp_path / "one.jsonl").read_text().split("\n")[0]


async def test_frames_contain_the_row_index() -> None:
    _, t = await compacted()
    rollout = af.Rollout.from_trajectories([t])
    assert rollout.to_frame("turns")["row"].tolist() == [turn.row for turn in t.turns]
    tokens = rollout.to_frame("tokens")
    for row in t.rows:
        own = tokens[tokens["row"] == row.index]
        columns = {"position": range(len(row)), "id": row.ids, "mask": row.action_mask, "turn": row.turn_index}
        assert {name: own[name].tolist() for name in columns} == {name: list(c) for name, c in columns.items()}
    sampled = sum(int(row.action_mask.sum()) for row in t.rows)
    assert list(rollout.to_frame().iloc[0][["rows", "tokens", "action_tokens"]]) == [
        3,
        sum(map(len, t.rows)),
        sampled,
    ]
    numbers = rollout.summary()
    assert (numbers["rows"], numbers["tokens"]) == (3.0, sampled)
    assert "rows" not in af.Rollout.from_trajectories([await played(["4"]).chain(TASK).run()]).summary()
    assert math.isnan(tokens["logprob"][0])


async def test_views_show_every_row() -> None:
    from agentfly_kit.widgets import TokenView

    chain, t = await compacted()
    plain = await played([call("1+1"), "4"]).chain(af.Task("u", TASK.messages, TASK.fields)).run()
    batch = af.collate([plain, t], [1.0, 2.0])
    view = TokenView(batch, compare=batch)
    views = [TokenView(t), TokenView(chain), TokenView(af.Rollout.from_trajectories([t, plain])), view]
    assert [repr(view).partition(",")[0] for view in views] == [f"TokenView({n} rows" for n in (3, 3, 4, 4)]
    assert all(f"{t.id} row {i}" in view._static() for i in range(3))
    view.select(f"{t.id} row 1", 0, 3)
    assert [(s.trajectory, s.start, s.stop) for s in view.selection] == [(f"{t.id} row 1", 0, 3)]


async def test_a_trajectory_of_rows_becomes_a_chain_that_can_be_rewound() -> None:
    chain = await stepped(played([call("1+1"), "I have 2.", "4"]).chain(TASK))
    chain.observe("What do you know?")
    await chain.sample()
    chain.compact("I have 2.")
    t = await chain.run()
    again = chain.agent.chain(t)
    assert again.ids == tuple(t.rows[1].ids.tolist())
    again.rewind(1)
    assert (again.turn.row, len(again.snapshot().rows)) == (0, 1)


async def test_text_only_engine_receives_only_the_new_row() -> None:
    engine = TextOnly([call("1+1"), "4"])
    chain = await stepped(agent(engine=engine, chat=chat()).chain(TASK))
    chain.compact("So far: 2")
    t = await chain.run()
    assert (t.reward, len(t.rows), t.exact) == (1.0, 2, False)
    assert [len(told) for told in engine.given] == [1, 1] and engine.given[1][0].endswith("So far: 2")
    errors.check(lambda: t.rows[1].ids, af.errors.AlignmentError, "engine is text-only")
