"""Templates, settings and messages that a chat rejects."""

from typing import Any

import agents
import errors
from agents import played
from test_chat import QWEN_LIKE, TASK, USER, with_template

import agentfly_kit as af

HALF = "so \ud800 what"
NO_SYSTEM = QWEN_LIKE.replace(
    "{%- for message in (messages",
    "{%- if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif -%}\n"
    "{%- for message in (messages",
)
ANSWERED = (USER, {"role": "assistant", "content": "5"})
CALL = {"function": {"name": "x", "arguments": "[]"}}


def no_stop_token() -> af.Chat:
    tokenizer = with_template(
        "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
        "{{- 'assistant: ' if add_generation_prompt -}}"
    )
    tokenizer.eos_token = None
    return af.Chat(tokenizer)


def drift_of_text() -> Any:
    turn = af.Turn("prompt", "task", None, text="hello", messages=TASK.messages)
    return agents.chat().drift(af.Trajectory("x", TASK, "g", 0, (turn,), "answered"))


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def called(*calls: Any) -> af.Task:
    return af.Task("a", (USER, {"role": "assistant", "tool_calls": list(calls)}, USER))


MALFORMED = "message 1 (role 'assistant'): each of 'tool_calls' must be"


test_errors = errors.rejected(
    (
        lambda: af.Chat(with_template(None)),
        af.errors.ChatTemplateError,
        "has no chat template; set tokenizer.chat_template",
    ),
    (no_stop_token, af.errors.ChatTemplateError, "defines an end-of-turn token; set"),
    (
        lambda: af.Chat(with_template(NO_SYSTEM)).prompt([{"role": "system", "content": "x"}, USER]),
        af.errors.ChatTemplateError,
        "roles (system, user): no system here; remove the unsupported role",
    ),
    (
        lambda: af.Chat(af.tiny.tokenizer(), history="render"),
        af.errors.SettingsError,
        "history must be one of 'exact', 'append', 'rerender', got 'render'",
    ),
    (lambda: af.Chat(af.tiny.tokenizer(), format="hermez"), af.errors.SettingsError, "got 'hermez'"),
    (
        lambda: af.Chat(af.tiny.tokenizer(), stop=["two words"]),
        Exception,
        "each stop string must be a single token, got ",
    ),
    (
        lambda: agents.chat().observation_ids([]),
        af.errors.SettingsError,
        "observation must have at least one message",
    ),
    (
        lambda: played(["x"], reward=None).rollout([af.Task("t", (user(HALF),))]),
        af.errors.SettingsError,
        "half of a surrogate pair, near ",
    ),
    (lambda: played(["x"], system=HALF).rollout([TASK]), af.errors.SettingsError, "half of a surrogate pair, near "),
    (lambda: played(["x"]).chain(TASK).force(HALF), af.errors.SettingsError, "half of a surrogate pair, near "),
    (drift_of_text, af.errors.AlignmentError, "no token ids"),
    (
        lambda: af.Task("a", ANSWERED),
        af.errors.TaskError,
        "task 'a': the last message must not be an assistant message",
    ),
    (
        lambda: agents.chat().prompt(ANSWERED),
        af.errors.SettingsError,
        "prompt: the last message must not be an assistant message",
    ),
    (lambda: called("get_weather"), af.errors.TaskError, MALFORMED),
    (lambda: called({"name": "x"}), af.errors.TaskError, MALFORMED),
    (lambda: called(CALL), af.errors.TaskError, MALFORMED),
    (lambda: called({"function": {"name": "x", "arguments": None}}), af.errors.TaskError, MALFORMED),
    (lambda: called({"function": {"name": "x", "arguments": "x"}}), af.errors.TaskError, MALFORMED),
)


test_content_that_is_not_text = errors.rejected(
    *((lambda call=call, content=content: call(user(content)), error, text)
      for call, error in (
        (lambda message: agents.chat().prompt([message]), af.errors.SettingsError),
        (lambda message: agents.chat().observation_ids([message]), af.errors.SettingsError),
        (lambda message: af.Task("a", (message,)), af.errors.TaskError),
      )
      for content, text in (
        (None, "message 0 (role 'user'): 'content' must be a string or a list of text and image parts, got None"),
        ([], "'content' must be a string or a list of text and image parts, got []"),
        ({"text": "x"}, "'content' must be a string or a list of text and image parts"),
        ([b"x"], "or an image, got b'x'"),
        ([{"type": "image"}], "got {'type': 'image'}"),
        ([{"type": "text", "text": "x", "image_url": "y"}], "each part of 'content' must be"),
        ([{"type": "audio", "text": "x"}], "each part of 'content' must be"),
        ([{"type": "text", "text": 5}], "each part of 'content' must be"),
      )),
)  # fmt: skip
