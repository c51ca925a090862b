"""Messages to ids: appending never changes ids already held, and what a template cannot promise is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from agents import calculator, call, chat

from agentfly_kit import chat as chat_module
from agentfly_kit import tiny
from agentfly_kit.chat import Chat, check
from agentfly_kit.errors import ChatTemplateError
from agentfly_kit.types import Message

USER: Message = {"role": "user", "content": "What is 2+3?"}
SCHEMAS = [calculator.schema]
QWEN_LIKE = tiny.TEMPLATE


def tool(content: str, id: str = "call-0") -> Message:
    return {"role": "tool", "name": "calculator", "tool_call_id": id, "content": content}


def with_template(template: str | None) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_the_prompt_is_what_the_template_says() -> None:
    ids = chat().prompt([USER], SCHEMAS)
    assert chat().text(ids) == (
        "<|im_start|>system\nTools: calculator(expression)<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("answer", ["5", "", call("2+3"), "it\n is ", "été 🎉"])
@pytest.mark.parametrize(
    "following", [[tool("5")], [tool("5"), tool("6", "call-1")], [{"role": "user", "content": "?"}]]
)
def test_what_was_grown_is_what_would_be_rendered(answer: str, following: list[Message]) -> None:
    prompt = chat().prompt([USER], SCHEMAS)
    action = (*chat().encode(answer), chat().stop_ids[0])
    grown = (*prompt, *action, *chat().bridge(following, SCHEMAS, after=action))
    whole = chat().render([USER, {"role": "assistant", "content": answer}, *following], SCHEMAS, generate=True)
    assert chat().text(grown) == whole


def test_a_cut_action_gets_its_stop_token_from_the_bridge() -> None:
    action = chat().encode("5 and")
    stop = chat().stop_ids[0]
    assert chat().bridge([USER], after=action)[0] == stop
    assert chat().bridge([USER], after=(*action, stop)) == chat().bridge([USER], after=action)[1:]


def test_parse_reads_and_leaves_the_ids() -> None:
    ids = (*chat().encode(call("2+3")), chat().stop_ids[0])
    parsed = chat().parse(ids)
    assert parsed.calls[0].name == "calculator"
    assert parsed.calls[0].arguments == {"expression": "2+3"}
    assert chat().parse(chat().encode("<tool_call>{")).unclosed
    assert chat().parse((*chat().encode("hello"), chat().stop_ids[0])).content == "hello"
    assert chat().parse(()).content == ""


def test_pieces_are_one_text_an_id() -> None:
    ids = chat().encode("été 🎉 2+3")
    pieces = chat().pieces(ids)
    assert len(pieces) == len(ids)
    assert all(pieces)
    assert not any("�" in piece for piece in pieces)


def test_stops_are_the_templates_own_end_and_eos() -> None:
    assert chat().pieces(chat().stop_ids) == ("<|im_end|>",)


def test_repr_has_no_address() -> None:
    assert repr(chat()) == "Chat(400 tokens, format 'hermes', stops at '<|im_end|>')"


# --- what is refused ---


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match=r"has no chat template; set tokenizer.chat_template"):
        Chat(with_template(None))


def test_a_template_that_complains_is_quoted() -> None:
    template = QWEN_LIKE.replace(
        "{%- for message in (messages",
        "{%- if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif -%}\n"
        "{%- for message in (messages",
    )
    with pytest.raises(ChatTemplateError, match=r"roles \(system, user\): no system here; leave out the role"):
        Chat(with_template(template)).prompt([{"role": "system", "content": "x"}, USER])


def test_a_template_that_drops_history_is_refused() -> None:
    template = (
        "{%- for m in messages -%}{%- if m.role != 'assistant' or loop.last -%}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
        "{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}"
    )
    broken = Chat(with_template(template))
    with pytest.raises(ChatTemplateError, match="drops or changes an earlier assistant message"):
        broken.bridge([USER])
    report = check(with_template(template))
    assert not report.exact
    assert "drops or changes" in report.tool_results


def test_a_generation_prompt_that_is_no_prefix_is_refused() -> None:
    template = QWEN_LIKE.replace(
        "'<|im_start|>assistant\\n' if add_generation_prompt",
        "'<|im_start|>assistant\\n<think>\\n' if add_generation_prompt",
    )
    # With thinking, a finished message does begin so; without, it does not: a model that must think is exact.
    assert check(with_template(template)).exact
    plain = template.replace("{{- message.content or ''", "{{- (message.content or '').split('</think>')[-1]")
    report = check(with_template(plain))
    assert not report.exact
    assert "what is sampled would not be what is trained" in report.tool_results
    assert report.thinking == "unknown"
    with pytest.raises(ChatTemplateError, match=r'cannot take tool results by appending: .*history="append"'):
        Chat(with_template(plain)).bridge([tool("5")])
    with pytest.raises(ChatTemplateError, match="what is sampled would not be what is trained"):
        Chat(with_template(plain)).prompt([USER], SCHEMAS)  # before a token is sampled
    assert Chat(with_template(plain), history="append").bridge([tool("5")])


def test_a_template_that_changes_what_came_before_is_refused() -> None:
    template = QWEN_LIKE.replace("{{- message.content or ''", "{{- (message.content or '') ~ ('!' if loop.length > 3)")
    report = check(with_template(template))
    assert not report.exact
    assert report.tool_results.startswith("it writes history otherwise once more follows: '")
    with pytest.raises(
        ChatTemplateError, match=r"'\?<\|im_end\|>.* became .*'\?!<\|im_end\|>|writes history otherwise"
    ):
        Chat(with_template(template)).bridge([USER])


def test_no_stop_token() -> None:
    tokenizer = with_template(
        "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
        "{{- 'assistant: ' if add_generation_prompt -}}"
    )
    tokenizer.eos_token = None
    with pytest.raises(ChatTemplateError, match="which token ends a turn; set"):
        Chat(tokenizer)


def test_check_says_what_a_template_promises() -> None:
    report = check(tiny.tokenizer())
    assert report.exact
    assert report.tools
    assert report.stop == "<|im_end|>"
    assert report.generation_prompt == "<|im_start|>assistant\n"
    assert report.boundary == "<|im_end|>\n<|im_start|>tool\n<tool_response>"
    assert report.thinking == "kept"
    assert "im_end" in report._repr_html_()
    assert chat_module.check(chat()) == report


def test_check_sees_dropped_thinking() -> None:
    template = QWEN_LIKE.replace("{{- message.content or ''", "{{- (message.content or '').split('</think>')[-1]")
    report = check(with_template(template))
    assert (report.thinking, report.exact) == ("dropped", False)
    assert report.user_messages.startswith("it drops an assistant's thinking")
