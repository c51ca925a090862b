"""Rollouts of other projects: files written by verifiers and ART (in `recorded/`), layouts of others, and messages.

`recorded/` holds files that verifiers 0.1.14 (`save_outputs`) and 0.4.0 (`write_episode`) wrote from states and traces
with the tokens of a calculator chain, and that ART 0.5.18 (`write_trajectory_groups_parquet`) wrote from two chains. A
table that TRL writes is in test_trl.py. Files of verl, SkyRL and AgentFly have the layout that their sources write.
"""

import json
import re
from pathlib import Path
from typing import Any

import errors
import pandas as pd
import pytest
from agents import calculator, chat, fresh, put_call
from chat_templates import NAMES, named

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


def test_files_of_art() -> None:
    one, two = rollout = af.read_rollouts(RECORDED / "art-0.5.18.parquet", chat=chat())
    assert [group.id for group in rollout.groups] == [one.group] and one.metrics["level"] == 2
    assert (one.reward, one.metrics["exact"], one.final) == (1.0, 1.0, "16")
    assert [str(call) for call in one.tool_calls] == ["ToolCall(calculator(expression='9+7') -> '16')"]
    # A message that the policy did not sample is no action, although its role is that of the assistant.
    assert [turn.kind for turn in two.turns] == ["prompt", "action", "observation", "action"]
    assert [message["content"] for message in two.turns[2].messages] == ["Let me think.", "Sure?"]
    old = {"messages_and_choices": [QUESTION, {"finish_reason": "stop", "index": 0, "message": ANSWER}]}
    assert len(af.read_rollouts([{"messages_and_choices": [QUESTION, ANSWER]}])[0].turns) == 1, "nothing was sampled"
    group = {"trajectories": [{**old, "reward": reward, "metrics": {}} for reward in (0, 1)], "metadata": {}}
    rollout = af.read_rollouts([group], chat=chat())
    assert [(t.reward, t.final) for t in rollout] == [(0.0, "5"), (1.0, "5")] and len(rollout.groups) == 1


def test_files_of_skyrl(tmp_path: Path) -> None:
    row = {
        "input_prompt": "<|im_start|>user\n2+3?",
        "output_response": "5",
        "score": [0.0, 1.0],
        "stop_reason": "length",
    }
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({**row, "env_extras": {"answer": "5"}, "data_source": "gsm8k"}))
    (tmp_path / "aggregated_results.jsonl").write_text(json.dumps({"eval/gsm8k/pass_at_1": 1.0}))
    (t,) = af.read_rollouts(tmp_path)
    assert (t.reward, t.turns[-1].text, t.stop) == (1.0, "5", "chain_tokens")
    assert t.task.fields["env_extras"] == {"answer": "5"}
    # The text contains the results of tools, so it is not known which of its tokens were sampled.
    errors.check(lambda: af.collate([t], imitate=True), af.errors.BatchError, "must have token ids")


async def test_samples_of_a_generator_of_skyrl_are_imitated() -> None:
    """Rows of a `GeneratorOutput`: one reward per row or per token, and a mask that leaves out observations."""
    prompt, action, seen, answer = (list(chat().encode(text)) for text in ("2+3?", "add", "5", "five"))
    mask = [1] * len(action) + [0] * len(seen) + [1] * len(answer)
    columns = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    ids, logprobs = [*action, *seen, *answer], [-0.5] * len(mask)
    rows = [
        dict(zip(columns, (prompt, ids, reward, mask, "stop", logprobs), strict=True))
        for reward in (0.5, [0.0] * (len(mask) - 1) + [1.0])
    ]
    rollout = af.read_rollouts(pd.DataFrame(rows), chat=chat())
    assert [t.reward for t in rollout] == [0.5, 1.0] and len(rollout.groups) == 1
    (known,) = af.read_rollouts(pd.DataFrame([rows[0] | {"reward": 0.7}]), chat=chat())
    assert known.reward == 0.7, "a total beside its parts"
    batch = af.collate(rollout, imitate=True)
    assert [batch.ids[0][batch.mask[0]].tolist(), batch.mask.sum().item()] == [action + answer, 2 * sum(mask)]
    stats = await af.imitate(fresh(), rollout, epochs=8, lr=1e-3)
    assert stats[-1].loss < stats[0].loss


def test_files_of_the_monitor_of_agentfly(tmp_path: Path) -> None:
    """The agent of the second chain replaced its context by a summary, so the chain has two conversations."""
    summary = {"role": "tool", "tool_call_id": "a", "content": "2+3 is 5"}
    chains = [[[QUESTION, ANSWER]], [OPENAI[:2], [QUESTION, OPENAI[1], summary, ANSWER]]]
    infos = [
        {"reward": 0.5, "messages": [ANSWER], "system": "linux", "id": 7, "step": 3},
        {"reward": {"reward": 1.0, "f1": 0.25}, "answer": "5"},
    ]
    for name, values in (("trajectory", chains), ("info", infos)):
        event = {"kind": "text", "name": f"agent/rollout/{name}", "x": 0, "x_name": "agent/rollout/step"}
        lines = [json.dumps({**event, "value": json.dumps(value, indent=2)}) for value in values]
        (tmp_path / f"agent-rollout-{name}.jsonl").write_text("\n".join(lines))
    one, two = af.read_rollouts(tmp_path, chat=chat(), tools=[calculator])
    assert (one.reward, one.final, len(one.rows), one.task.fields) == (0.5, "5", 1, {})
    assert (two.reward, two.metrics["f1"], two.task.fields["answer"]) == (1.0, 0.25, "5")
    assert [(turn.kind, turn.row) for turn in two.turns] == [
        ("prompt", 0),
        ("action", 0),
        ("prompt", 1),
        ("action", 1),
    ]
    batch = af.collate([two], imitate=True)
    assert [chat().text(row[mask].tolist()) for row, mask in zip(batch.ids, batch.mask, strict=True)] == [
        f"{TEXT}<|im_end|>",
        "5<|im_end|>",
    ]


def test_rows_of_token_ids() -> None:
    """With logprobs, they can be trained on like the chain from which they were made; without, they can be imitated."""
    prompt, action, seen, answer = (chat().encode(text) for text in ("2+3?", "add", "5", "five"))
    row = {"prompt_token_ids": prompt, "response_ids": [*action, *seen, *answer], "reward": 1}
    mask = [1] * len(action) + [0] * len(seen) + [1] * len(answer)
    exact = {**row, "loss_mask": mask, "rollout_logprobs": [-0.5] * len(mask)}
    (t,) = trained = af.read_rollouts([exact], chat=chat())
    assert t.ids.tolist() == [*prompt, *action, *seen, *answer] and t.task.messages[0]["content"] == "2+3?"
    assert [turn.kind for turn in t.turns] == ["prompt", "action", "observation", "action"]
    batch = af.collate(trained, [1.0])
    assert batch.mask[0, len(prompt) :].int().tolist() == mask and set(t.logprobs[t.action_mask].tolist()) == {-0.5}
    (t,) = shown = af.read_rollouts([row])
    assert t.final == f"[{len(mask)} token ids]" and not t.action_mask.any()
    assert af.collate(shown, imitate=True).mask.sum() == len(mask)
    other = {**exact, "response_ids": [*action, *answer[:1], *answer][: len(mask)]}
    assert len(af.read_rollouts([exact, {**other, "loss_mask": [0, *mask[1:]]}]).groups) == 1
    errors.check(
        lambda: af.read_rollouts([{**exact, "loss_mask": [1]}]),
        af.errors.TaskError,
        f"row 0: loss_mask and rollout_logprobs must have one entry per id of response_ids ({len(mask)})",
    )


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


# --- message logs that are encoded

TEXT = '<tool_call>{"name":"calculator","arguments":{"expression":"2+3"}}</tool_call>'
CALL = {"id": "a", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}
QUESTION, ANSWER = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
OPENAI = [QUESTION, {**ANSWER, "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "5"}, ANSWER]
OPENAI[2]["tool_call_id"] = "a"
SCHEMA = calculator.schema
ANTHROPIC = [
    QUESTION,
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": ""},
            {"type": "tool_use", "id": "a", "name": "calculator", "input": {"expression": "2+3"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "5"}]}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "5"}]},
]
SHAREGPT = [
    {"from": "human", "value": "2+3?"},
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "5"},
    {"from": "gpt", "value": "5"},
]
INSPECT = [
    QUESTION,
    {**OPENAI[1], "tool_calls": [{"id": "a", **CALL["function"], "function": "calculator"}]},
    *OPENAI[2:],
]
LOGS = {
    "openai": {"system": "Add.", "messages": OPENAI, "reward": 1},
    "anthropic": {"system": [{"type": "text", "text": "Add."}], "messages": ANTHROPIC, "reward": 1},
    "sharegpt": {"system": "Add.", "conversations": SHAREGPT, "reward": 1},
    "inspect": {"samples": [{"id": 1, "messages": [{"role": "system", "content": "Add."}, *INSPECT],
                             "scores": {"match": {"value": "C"}}}]},
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
async def test_a_log_has_the_token_ids_of_an_agent_and_can_be_imitated(name: str, tmp_path: Path) -> None:
    tools = (
        [{**SCHEMA["function"], "input_schema": SCHEMA["function"]["parameters"]}]
        if name == "anthropic"
        else [SCHEMA]
    )
    row = LOGS[name] if name == "inspect" else {**LOGS[name], "tools": json.dumps(tools)}
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    given = [calculator] if name == "inspect" else []
    (t,) = logged = af.read_rollouts(tmp_path / "log.jsonl", chat=chat(), tools=given)
    agent = af.Agent(af.ScriptedEngine([TEXT, "5"]), chat=chat(), tools=[calculator], system="Add.")
    (wanted,) = await agent.rollout(af.Task("t", (QUESTION,)))
    assert t.ids.tolist() == wanted.ids.tolist() and (t.final, t.reward) == ("5", 1.0)
    assert not t.action_mask.any() and t.tool_calls[0].result.observation == "5"
    batch = af.collate(logged, imitate=True)
    assert chat().text(batch.ids[0][batch.mask[0]].tolist()) == f"{TEXT}<|im_end|>5<|im_end|>"
    stats = await af.imitate(fresh(), logged, epochs=8, lr=1e-3)
    assert stats[-1].loss < stats[0].loss


# The prompts of all but the first template begin the thoughts. The history of the third is rendered without thoughts.
THOUGHTS = {
    "qwen3": "<think>\nIt is five.\n</think>\n\n5<|im_end|>",
    "qwen3_5_think": "It is five.\n</think>\n\n5<|im_end|>",
    "glm4moe": "\n<think>It is five.</think>\n5<|user|>",  # without a token that ends a turn
    "deepseek_r1_distill": "It is five.\n</think>\n\n5<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", [name for name in THOUGHTS if name in NAMES])
def test_thoughts_of_a_log_are_encoded_as_the_model_samples_them(name: str) -> None:
    blocks = [{"type": "thinking", "thinking": "It is five."}, {"type": "text", "text": "5"}]
    chat = af.Chat(named(name))
    (t,) = af.read_rollouts([{"messages": [QUESTION, {"role": "assistant", "content": blocks}]}], chat=chat)
    assert (t.final, chat.text(t.turns[-1].ids)) == ("5", THOUGHTS[name])


LONGER = [*OPENAI, {"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}]


@pytest.mark.parametrize("history", ["exact", "rerender"])
@pytest.mark.parametrize(
    "name", [n for n in ("llama3_1", "phi3", "qwen2_5", "qwen3", "qwen3_training") if n in NAMES]
)
def test_an_encoded_log_is_what_the_template_renders(name: str, history: str) -> None:
    chat = af.Chat(named(name), history=history)
    rows = [{"messages": LONGER, "tools": [SCHEMA]}]
    if name == "qwen3" and history == "exact":  # it drops empty thoughts of earlier turns
        errors.check(lambda: af.read_rollouts(rows, chat=chat), af.errors.TaskError, "does not allow appending")
        return
    (t,) = af.read_rollouts(rows, chat=chat)
    assert len(t.rows) == (2 if name == "qwen3" else 1)
    assert not chat.drift(t.rows[-1]) and chat.text(t.rows[-1].ids.tolist()).count("Welcome.") == 1


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (MESSAGES, "row 0: message 1 must be text only to be encoded, got the part {'type': 'image_url'"),
        ([QUESTION, MESSAGES[2], *MESSAGES[3:]], "the call b of add is invalid: the arguments are not a JSON object"),
        ([*OPENAI[:2], QUESTION, ANSWER], "the calls a must have results"),
        ([QUESTION, {"role": "assistant", "content": put_call("x")}], "would not be parsed as the same message"),
        ([QUESTION, {**ANSWER, "trainable": False}], "must have a message that the policy sampled"),
    ],
)
def test_a_conversation_that_cannot_be_encoded_is_rejected(messages: Any, text: str) -> None:
    rows = [{"messages": messages, "tools": [SCHEMA]}]
    errors.check(lambda: af.read_rollouts(rows, chat=chat()), af.errors.TaskError, text)
    assert len(af.read_rollouts(rows)) == 1  # it can be displayed
