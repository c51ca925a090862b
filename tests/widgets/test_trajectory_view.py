"""TrajectoryView without a browser: sending, searching, selecting and opening."""

import dataclasses
import gc
import json
import math
from pathlib import Path

import agents
import errors
import numpy as np
import pytest_asyncio
from test_chain_stepper import again
from views import NASTY, check_static, leaves, press, put, sent, trajectory, unpack

import agentfly_kit as af
from agentfly_kit import widgets as w


def text_at(packed: dict[str, bytes], i: int) -> str:
    ends = np.frombuffer(packed["ends"], "<i4")
    return packed["text"][ends[i] : ends[i + 1]].decode()


@pytest_asyncio.fixture
async def rollout() -> af.Rollout:
    agent = agents.played(lambda task, turn: [agents.call("2+3"), "42"][turn], max_turns=3)
    return await agent.rollout(agents.tasks(3), group_size=2)


async def test_it_shows_a_rollout_and_selects_trajectories(rollout: af.Rollout) -> None:
    view = w.TrajectoryView(rollout)
    assert repr(view) == "TrajectoryView(6 trajectories, 0 succeeded, 0 unscored)"
    assert sent(view)["_about"]["n"] == 6
    assert [text_at(view._buffers["ids"], i) for i in range(6)] == [t.id for t in rollout]
    np.testing.assert_array_equal(unpack(view._buffers["columns"]["calls"]), [1] * 6)
    assert not view.selection
    put(view, "_selected", [2, 0])
    assert view.selection.ids == (rollout.trajectories[2].id, rollout.trajectories[0].id)
    assert next(iter(view.selection)) is rollout.trajectories[2]
    assert list(view.selection.to_frame()["trajectory"]) == list(view.selection.ids)
    assert set(view.selection.to_frame("turns")["kind"]) == {"prompt", "action", "observation"}
    call = view._detail["columns"][0]["turns"][2]["calls"][0]
    assert (call["name"], call["result"], call["ok"]) == ("calculator", "5", True)
    put(view, "_selected", [99])
    assert "trajectory must be between" in view._notice
    view.select(rollout.trajectories[1])
    assert view._selected == [1]
    check_static(view)


async def test_tasks_of_a_table_are_shown_by_their_question_and_answer() -> None:
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in (1, 2)]
    agent = agents.played(lambda task, turn: [agents.call("2+3"), "4"][turn], max_turns=3)
    rollout = await agent.rollout(af.tasks_from(rows), group_size=2)
    view = w.TrajectoryView(rollout)
    assert [text_at(view._buffers["labels"], i) for i in range(4)] == ["chain 0", "chain 1", "chain 0", "chain 1"]
    assert view._about["tasks"] == ["What is 1+1?", "What is 2+2?"]
    columns = view._buffers["columns"]
    shown = [(text_at(columns["question"], i), text_at(columns["expected"], i)) for i in range(2)]
    assert shown == [("What is 1+1?", "2"), ("What is 2+2?", "4")]
    assert list(np.frombuffer(columns["question"]["index"], "<i4")) == [0, 0, 1, 1]
    assert [c["label"] for c in view._about["columns"] if c["widths"]] == [
        "question", "expected", "reward", "stop reason"
    ], "the metric exact equals the reward"  # fmt: skip
    page = check_static(view).text
    assert "What is 2+2?" in page and "expected" in page
    assert rollout.trajectories[0].task.id not in page
    put(view, "_selected", [3])
    (column,) = view._detail["columns"]
    assert (column["name"], column["question"], column["fields"]) == ("chain 1", "What is 2+2?", [["answer", "4"]])
    assert [[m["role"] for m in turn["messages"]] for turn in column["turns"]] == [
        ["user"], ["assistant"], ["tool"], ["assistant"]
    ]  # fmt: skip


async def test_notes_are_saved_with_the_rollout(tmp_path: Path, rollout: af.Rollout) -> None:
    rollout.trajectories[2].annotate("from a cell")
    view = w.TrajectoryView(rollout)
    assert view._notes == {"2": "from a cell"}
    await press(view, "annotate", [4, " wrong tool "])
    assert rollout.trajectories[4].note == "wrong tool"
    put(view, "_query", "WRONG TOOL")
    assert view._found["n"] == 1 and "wrong tool" in check_static(view).text
    back = af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))
    assert [t.note for t in back] == ["", "", "from a cell", "", "wrong tool", ""]
    assert w.TrajectoryView(back)._notes == view._notes
    await press(view, "annotate", [4, ""])
    assert view._notes == {"2": "from a cell"}


async def test_search_looks_in_all_texts_and_results(rollout: af.Rollout) -> None:
    view = w.TrajectoryView(rollout)
    put(view, "_query", "2+3")
    assert view._found["n"] == 6
    put(view, "_query", rollout.trajectories[3].id.upper())
    assert view._found["n"] == 1
    bits = np.unpackbits(np.frombuffer(view._found["bits"], np.uint8), bitorder="little")
    assert bits[:6].tolist() == [0, 0, 0, 1, 0, 0]
    put(view, "_query", "")
    assert view._found["n"] == 0


async def test_what_a_batch_left_out_says_why(rollout: af.Rollout) -> None:
    first = rollout.trajectories[0].replace(
        reward=None, stop="error", error=af.Failure("tool x", "OSError", "disk full")
    )
    mixed = af.Rollout.from_trajectories([first, *rollout.trajectories[1:]])
    batch = af.collate(mixed)
    (dropped,) = batch.dropped
    view = w.TrajectoryView(mixed, batch=batch)
    put(view, "_selected", [0])
    (column,) = view._detail["columns"]
    assert (column["outcome"], column["dropped"]) == ("dropped", dropped.reason) and "disk full" in column["error"]
    assert text_at(view._buffers["why"], 0) == dropped.reason and dropped.reason[:40] in check_static(view).text
    assert w.TrajectoryView(batch)._about["n"] == 5  # the trajectories in the batch


async def test_forks_are_a_tree_of_shared_turns() -> None:
    chain = agents.played([agents.call("1+1"), agents.call("2+2"), "42"]).chain(agents.tasks()[0])
    await chain.step()
    fork = await chain.fork()
    await chain.step()
    fork.force("7")
    third = await chain.fork()
    third.force("8")
    trajectories = [await c.finish() for c in (chain, fork, third)]
    view = w.TrajectoryView(trajectories)
    view.select(*trajectories)
    tree = view._detail["tree"]
    assert [(n["from"], n["to"], n["of"]) for n in tree] == [(0, 3, [0, 1, 2])]
    below = tree[0]["then"]
    # The first and third chain share the second action and its result; the first chain ends there.
    assert [(n["from"], n["to"], n["of"], n["ends"]) for n in below] == [(3, 5, [0, 2], [0]), (3, 4, [1], [1])]
    assert [n["of"] for n in below[0]["then"]] == [[2]]


async def test_it_opens_tokens_and_the_stepper() -> None:
    agent = agents.played(lambda task, turn: [agents.call("2+3"), "42"][turn], max_turns=3)
    rollout = await agent.rollout(agents.tasks(3), group_size=2)
    view = w.TrajectoryView(rollout, agent=agent)
    await press(view, "tokens", 1)
    assert isinstance(view.opened, w.TokenView) and view.opened.tokens == len(rollout.trajectories[1].ids)
    first = view.opened
    await press(first, "stepper", 0)
    assert first.stepper.chain.turns == rollout.trajectories[1].turns, "the agent is handed on"
    await press(view, "tokens", [0, 1])
    assert first.comm is None
    assert "share their first" in view.opened._about["notes"][0]
    await press(view, "stepper", 1)
    assert isinstance(view.opened, w.ChainStepper)
    assert view.opened.chain.turns == rollout.trajectories[1].turns
    await press(view, "leave")
    assert view.opened is None
    await press(view, "code", 1)
    assert (await again(view._code["text"], rollout=rollout, agent=agent)).turns == rollout.trajectories[1].turns


async def test_it_keeps_no_rollout_alive_and_says_so(rollout: af.Rollout) -> None:
    copies = af.Rollout.from_trajectories([t.replace() for t in rollout])
    view = w.TrajectoryView(copies)
    put(view, "_selected", [0])
    del copies
    gc.collect()
    assert view.selection.ids
    errors.check(view.selection.to_frame, LookupError, "keep the rollout in a variable")
    await press(view, "tokens", 0)
    assert "no longer exists; keep it in a variable" in view._notice
    put(view, "_selected", [1])  # the view still has its texts
    assert len(view._detail["columns"][0]["turns"]) == 4


def test_10000_trajectories_stay_small() -> None:
    words = tuple(f" word{i}" for i in range(40))
    base = [dataclasses.replace(trajectory(f"t-{k}", actions=3, seed=k, token_texts=words)) for k in range(20)]
    many = [base[i % 20].replace(id=f"task-{i // 8}/{i}", group=f"g{i // 8}") for i in range(10_000)]
    view = w.TrajectoryView(many)
    state = sent(view)
    assert sum(map(len, leaves(state["_buffers"]))) < 4_000_000
    assert len(json.dumps(state["_about"])) < 120_000  # contains names of tasks, but no values per trajectory
    put(view, "_selected", list(range(10_000)))
    assert (len(view._detail["columns"]), view._detail["of"], len(view.selection)) == (12, 10_000, 10_000)
    put(view, "_query", "word39")
    assert view._found["n"] == 10_000
    check_static(view)


def nasty() -> list[af.Trajectory]:
    """Return edge cases: hostile texts, no action, one token, no turn, NaN and infinite values."""
    out = []
    for i, text in enumerate(NASTY):
        failed = af.ToolResult(False, text, error=af.Failure("tool", "E", text, text))
        turns = (
            af.Turn("prompt", "task", (1,), text=text, token_texts=(text,)),
            af.Turn(
                "action", "policy", (2,), True, logprobs=(math.nan,), versions=(0,), text=text, token_texts=(text,)
            ),
            af.Turn(
                "observation", text or "tool", (3,), text=text, token_texts=(text,),
                tool_calls=(af.ToolCall("c", text, {"x": text}, result=failed),),
            ),
        )  # fmt: skip
        task = af.Task(text or "t", ({"role": "user", "content": text},))
        metrics = {text: math.nan, "x": math.inf}
        out.append(af.Trajectory(f"{text}-{i}", task, text, 0, turns, "answered", reward=math.nan, metrics=metrics))
    task = af.Task("t", ({"role": "user", "content": "?"},))
    prompt = af.Turn("prompt", "task", (1,), text="p", token_texts=("p",))
    return [
        *out,
        af.Trajectory("no-action", task, "g", 0, (prompt,), "error"),
        af.Trajectory("no-turn", task, "g", 1, (), "error", error=af.Failure("chat", "E", "no")),
        af.Trajectory("text-only", task, "g", 2, (af.Turn("prompt", "task", None, text="p"),), "cancelled"),
    ]


def test_nasty_trajectories_are_shown_as_text() -> None:
    odd = nasty()
    view = w.TrajectoryView(odd)
    for i in range(len(odd)):
        put(view, "_selected", [i])
        assert "\u202e" not in json.dumps(sent(view)["_detail"], ensure_ascii=False)
    put(view, "_selected", list(range(len(odd))))
    assert "<script>alert(1)</script>" in check_static(view).text
    for query in NASTY[:20]:
        put(view, "_query", query.encode("utf-8", "ignore").decode())


def test_a_list_without_trajectories() -> None:
    assert w.TrajectoryView([])._about["n"] == 0
    check_static(w.TrajectoryView([]))
