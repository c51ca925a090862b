"""Invalid arguments of integrations."""

from typing import Any

import errors
from agents import played
from test_adapters import Counter
from test_captured import TASK

import agentfly_kit as af

ROWS: tuple[tuple[Any, str], ...] = (
    ([], "at least one row"),
    ([1], "row 0: a row must be an object, got 1"),
    ([{"question": "a"}], "row 0: a row must have the columns "),
    ([{"prompt": 3, "completion": "a"}], "must be a string or a list of messages, got 3"),
    ([{"prompt": "a", "completion": [{"content": "a"}]}], "must be a string or a list of messages"),
    (
        [{"messages": [{"role": "assistant", "content": "a"}]}],
        "must not begin with an assistant message",
    ),
    ([{"traces": [{"nodes": []}]}], "the row is damaged or has an unsupported layout (KeyError"),
    ([{"traces": [{"task": {"data": {}}, "nodes": [{"parent": 0}]}]}], "the parent of a node must precede it"),
    ([{"messages": []}], "must not begin with"),
    ([{"conversations": [{"from": "robot", "value": "a"}]}], "'from' must be one of system, human, user"),
    ([{"samples": [{"id": 1}]}], "the row is damaged or has an unsupported layout (KeyError: 'messages')"),
    ([{"conversations": [{"from": "function_call", "value": "a"}]}], "a function_call must contain JSON, got 'a'"),
    ("missing.jsonl", "no such file or folder"),
    (".", " files, got none"),
)


def ours(final: str) -> Any: ...


def environments(environments: Any, **kwargs: Any) -> Any: ...


def positional(completions: Any, /) -> Any: ...


async def traced(trace: Any) -> float:
    return 0.0


class NoReset:
    def act(self) -> None: ...


class NoTool:
    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 0.0


class NoText(NoTool):
    def act(self, text: str) -> None:
        """Act."""


def tokens(mask: list[int]) -> Any:
    return af.from_tokens([1, 2, 3], mask, [0.0, -1.0, 0.0], task=TASK)


def call(**fields: Any) -> Any:
    return af.captured([{"prompt_ids": [1], "ids": [2], **fields}], task=TASK)


test_errors = errors.rejected(
    (lambda: af.trl.reward(ours), af.errors.RewardError, "ours must have a parameter `completions` "),
    (
        lambda: af.trl.reward(environments),
        af.errors.RewardError,
        "has a parameter `environments`; pass the class too",
    ),
    (
        lambda: af.trl.reward(traced),
        af.errors.RewardError,
        "traced must be a reward of verifiers before 0.4, got one with",
    ),
    (lambda: af.trl.reward(af.reward(ours)), af.errors.RewardError, "for TRL or the verifiers library, got <Reward"),
    (lambda: af.trl.reward(3), af.errors.RewardError, "for TRL or the verifiers library, got 3"),
    (
        lambda: af.trl.environment(NoReset),
        af.errors.SettingsError,
        "NoReset must have a method `reset`, got",
    ),
    (lambda: af.trl.environment(NoText), af.errors.ToolSchemaError, "act: parameter 'text' must have a description"),
    (
        lambda: af.trl.environment(lambda: Counter(2)),
        af.errors.SettingsError,
        "environment_class must be a class, got <function",
    ),
    (
        lambda: af.envs.from_env(NoTool),
        af.errors.SettingsError,
        "NoTool must have a method step, as environments of Gymnasium",
    ),
    (
        lambda: af.envs.from_env("a"),
        af.errors.SettingsError,
        "a class or a function that returns an environment, got 'a'",
    ),
    (lambda: played(["x"], watch=lambda: None), af.errors.SettingsError, "watch must be a function of (rollout)"),
    *((lambda rows=rows: af.read_rollouts(rows), af.errors.TaskError, text) for rows, text in ROWS),
    (lambda: call(), af.errors.AlignmentError, "must have 'prompt_ids', 'ids' and 'logprobs'"),
    (lambda: call(logprobs=[-1.0], text="a"), af.errors.AlignmentError, "got ids, logprobs, prompt_ids, text"),
    (lambda: call(logprobs=[]), af.errors.AlignmentError, "one entry per id"),
    *((lambda mask=mask: tokens(mask), af.errors.AlignmentError, "mask") for mask in ([1, 1, 0], [0, 0, 0], [0, 1])),
)
