"""Rollouts of other projects: files written by verifiers (in `recorded/`), the documented layout of verl, and messages.

`recorded/` holds files that verifiers 0.1.14 (`save_outputs`) and 0.4.0 (`write_episode`) wrote from states and traces
with the tokens of a calculator chain. A table that TRL writes is in test_trl.py.
"""

import json
import re
from pathlib import Path

import errors
import pandas as pd
import pytest
from agents import chat

import agentfly_kit as af
from agentfly_kit import widgets as w

RECORDED = Path(__file__).parent / "recorded"
VERL = {"input": "user\n2+3?\nassistant\n", "output": "5", "gts": "5", "score": 1.0, "step": 2, "acc": 1.0}
MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "2+3?"}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": "error"},
    {"role": "tool", "tool_call_id": "a", "content": "5"},
    {"role": "assistant", "content": "5"},
]


def test_traces_of_verifiers_keep_their_tokens() -> None:
    rollout = af.read_rollouts(RECORDED / "verifiers-0.4.0-traces.jsonl", chat=chat())
    one, two, failed = rollout
    assert [group.id for group in rollout.groups] == ["calc-0", "calc-1"]
    assert (one.reward, one.final, one.stop, one.task.fields["answer"]) == (1.0, "16", "answered", "16")
    assert (one.metrics, len(one.rows)) == ({"calls": 1.0, "exact": 1.0, "short": 1.0}, 1)  # "short" has weight 0
    assert [str(call) for call in one.tool_calls] == ["ToolCall(calculator(expression='9+7') -> '16')"]
    assert chat().text(one.ids[one.action_mask]).count("<|im_end|>") == 2
    assert "".join(one.token_texts).endswith("<|im_start|>assistant\n16<|im_end|>")
    assert float(one.logprobs[one.action_mask][0]) == pytest.approx(-1.0251)
    # Two answers after the same tool result: two rows, and each sampled token is marked once.
    assert (two.stop, [int(row.action_mask.sum()) for row in two.rows]) == ("max_turns", [19, 2])
    assert two.rows[0].ids[:52].tolist() == two.rows[1].ids[:52].tolist()
    assert not failed.exact and failed.reward is None and failed.error is not None
    assert (failed.stop, failed.error.type, failed.error.message) == ("error", "TimeoutError", "no answer")
    assert w.TokenView([one, two]).tokens == sum(len(row) for t in (one, two) for row in t.rows)
    assert af.collate([one], [1.0]).mask.sum() == one.action_mask.sum()


def test_results_of_verifiers_are_text() -> None:
    rollout = af.read_rollouts(RECORDED / "verifiers-0.1.14-results.jsonl")
    one, two, failed = rollout
    assert [(t.id, t.reward, t.stop, t.final) for t in rollout] == [
        ("0/0", 1.0, "answered", "16"),
        ("0/1", 0.0, "max_turns", None),
        ("1/0", 0.0, "error", None),
    ]
    assert one.tool_calls[0].arguments == {"expression": "9+7"} and one.metrics["exact"] == 1.0
    assert two.task == one.task and failed.error is not None and "provider failed" in failed.error.message
    errors.check(
        lambda: af.collate(list(rollout), [1.0] * 3), af.errors.BatchError, "must have token ids to be trained on"
    )
    assert "succeeded" in repr(w.TrajectoryView(rollout)) and w.TokenView(rollout).tokens == 0


def test_dumps_of_verl_are_read_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for step, scores in ((10, [0.0]), (2, [1.0, 0.5])):
        lines = [json.dumps({**VERL, "step": step, "score": score}) for score in scores]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    rollout = af.read_rollouts(tmp_path)
    assert [(t.reward, t.final, t.metrics["acc"]) for t in rollout] == [
        (1.0, "5", 1.0),
        (0.5, "5", 1.0),
        (0.0, "5", 1.0),
    ]
    assert [len(group) for group in rollout.groups] == [2, 1] and len(rollout.tasks) == 1
    assert rollout[0].group.startswith("step 2: ") and rollout[0].task.fields["answer"] == "5"
    assert [t.reward for t in af.read_rollouts(tmp_path, reward=["acc", "score"])] == [2.0, 1.5, 1.0]


def test_message_logs(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "reward": None, "model": "gpt"}) + "\n")
    (t,) = af.read_rollouts(path)
    assert [turn.kind for turn in t.turns] == ["prompt", "action", "observation", "action"]
    assert (t.reward, t.final, t.task.messages[-1]["content"]) == (None, "5", "2+3?[image_url]")
    good, bad = t.turns[1].tool_calls
    assert good.arguments == {"x": 2} and bad.error is not None and bad.raw == "{broken"
    assert [(call.id, call.result and call.result.observation) for call in t.tool_calls] == [
        ("b", "error"),
        ("a", "5"),
    ]
    again = af.Rollout.load(af.read_rollouts(path).save(tmp_path / "rollout.jsonl"))
    assert again[0].messages == t.messages


def test_tables_in_memory_and_rewards() -> None:
    table = pd.DataFrame(
        {
            "step": [1, 1, 1],
            "prompt": ["a", "a", "b"],
            "completion": ["x", "y", "z"],
            "exact": [1.0, 0.0, float("nan")],
            "short": [0.5, 0.5, float("nan")],
            "advantage": [1.0, -1.0, 0.0],
        }
    )
    rollout = af.read_rollouts(table)
    assert [t.reward for t in rollout] == [1.5, 0.5, None] and [len(g) for g in rollout.groups] == [2, 1]
    assert [t.reward for t in af.read_rollouts(table, reward="short")] == [0.5, 0.5, None]
    errors.check(
        lambda: af.read_rollouts(table, reward="prize"),
        af.errors.TaskError,
        re.compile(r"rows, row 0: the reward column 'prize' must be a number; .* exact, short"),
    )
