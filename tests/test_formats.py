"""The hermes format: what is a call, what is a failed call, what is none; and no text makes it raise."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly_kit import errors, formats
from agentfly_kit.types import ToolCall

hermes = formats.get("hermes")


def one(text: str) -> ToolCall:
    parsed = hermes.parse(text)
    assert len(parsed.calls) == 1, parsed
    return parsed.calls[0]


def test_plain_text_is_content() -> None:
    parsed = hermes.parse("\n The answer is 5. ")
    assert parsed == formats.Parsed("The answer is 5.")


@pytest.mark.parametrize("blank", ["", " ", "\n", "\n\n  \t\r\n"])
def test_a_call_with_any_whitespace(blank: str) -> None:
    body = '{"name": "calculator", "arguments": {"expression": "2+3"}}'
    call = one(f"<tool_call>{blank}{body}{blank}</tool_call>")
    assert (call.id, call.name, call.arguments, call.error) == ("call-0", "calculator", {"expression": "2+3"}, None)
    assert call.raw == body


def test_several_calls_in_order_and_content_around_them() -> None:
    text = "first " + "and ".join(f'<tool_call>{{"name":"t{i}","arguments":{{"i":{i}}}}}</tool_call>' for i in range(3))
    parsed = hermes.parse(text + " done")
    assert [(c.id, c.name, c.arguments["i"]) for c in parsed.calls] == [
        ("call-0", "t0", 0),
        ("call-1", "t1", 1),
        ("call-2", "t2", 2),
    ]
    assert parsed.content == "first and and  done"
    assert hermes.parse(text) == hermes.parse(text)


def test_a_broken_call_between_good_ones_loses_neither() -> None:
    good = '<tool_call>{"name":"a","arguments":{}}</tool_call>'
    parsed = hermes.parse(f"{good}<tool_call>{{oops}}</tool_call>{good}")
    assert [c.error is None for c in parsed.calls] == [True, False, True]
    assert [c.id for c in parsed.calls] == ["call-0", "call-1", "call-2"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("{'name': 'a'}", "not valid JSON"),
        ('{"name": "a", "arguments": {}} and more', "text after the JSON object: 'and more'"),
        ("[1, 2]", "is a list, not an object"),
        ('"a"', "is a text, not an object"),
        ('{"arguments": {}}', 'has no "name"'),
        ('{"name": "", "arguments": {}}', '"name" is not a text'),
        ('{"name": 5, "arguments": {}}', '"name" is not a text'),
        ('{"name": "a", "arguments": [1]}', '"arguments" is a list, not an object'),
        ('{"name": "a", "arguments": "{}"}', '"arguments" is a text, not an object'),
        ('{"name": "a", "arguments": null}', '"arguments" is null, not an object'),
        ('{"name": "a", "arguments": true}', '"arguments" is true or false, not an object'),
        ('{"name": "a", "arguments": 3}', '"arguments" is a number, not an object'),
        ('{"name": "a", "parameters": {}}', "has no \"arguments\" (it has 'parameters')"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is no JSON number"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "too large for a float"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unreadable_call_says_what_was_wrong(body: str, words: str) -> None:
    call = one(f"<tool_call>{body}</tool_call>")
    assert call.error is not None
    assert words in call.error
    assert '<tool_call>{"name": ..., "arguments": {...}}</tool_call>' in call.error  # and what to write
    assert call.arguments == {}


def test_a_call_without_arguments_key_is_a_call_without_arguments() -> None:
    assert one('<tool_call>{"name": "look"}</tool_call>') == ToolCall("call-0", "look", {}, raw='{"name": "look"}')


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>{"name": "rm", "arguments": {}}',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call',
        '<tool_call>{"name": "rm", "argum',
        '<tool_call>{"name": "rm", "arguments": {"x": "</tool_call>"}}',
    ],
)
def test_an_unclosed_call_is_never_a_call(text: str) -> None:
    parsed = hermes.parse("I say " + text)
    assert parsed.unclosed
    assert "not closed" in parsed.complaint
    assert parsed.calls == ()
    assert parsed.content == "I say"


def test_every_cut_of_a_call_is_unclosed_until_the_last_character() -> None:
    text = '<tool_call>\n{"name": "a", "arguments": {"x": "}</tool_call>"}}\n</tool_call>'
    for cut in range(len("<tool_call>"), len(text)):
        parsed = hermes.parse(text[:cut])
        # A cut inside the quoted tag leaves a closed tag and broken JSON: told to the model, never run.
        assert all(call.error for call in parsed.calls), text[:cut]
        assert parsed.unclosed or parsed.calls
    assert one(text).arguments == {"x": "}</tool_call>"}


def test_calls_before_an_unclosed_one_stay() -> None:
    parsed = hermes.parse('<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b"')
    assert [c.name for c in parsed.calls] == ["a"]
    assert parsed.unclosed


def test_a_tag_inside_an_unclosed_body_does_not_smuggle_a_call() -> None:
    call = one('<tool_call>{"name": <tool_call>{"name":"b","arguments":{}}</tool_call>')
    assert call.error is not None


def test_thinking_is_kept_apart() -> None:
    parsed = hermes.parse("<think>\n2+3 is 5\n</think>\n\nIt is 5.")
    assert (parsed.thinking, parsed.content) == ("2+3 is 5", "It is 5.")
    assert hermes.parse("It is 5.").thinking is None
    assert hermes.parse("<think>\n\n</think>It").thinking == ""


def test_thinking_that_the_prompt_opened() -> None:
    parsed = hermes.parse('hm, <tool_call>{"name":"a"}</tool_call>?\n</think>\nNo.')
    assert (parsed.thinking, parsed.content, parsed.calls) == ('hm, <tool_call>{"name":"a"}</tool_call>?', "No.", ())


def test_a_call_in_a_thought_is_not_made() -> None:
    thought = '<think>maybe <tool_call>{"name":"a"}</tool_call>'
    assert hermes.parse(thought).calls == ()
    assert hermes.parse(f"{thought}</think>done") == formats.Parsed(
        "done", thinking='maybe <tool_call>{"name":"a"}</tool_call>'
    )


def test_thinking_tags_inside_an_argument_are_text() -> None:
    assert one('<tool_call>{"name":"echo","arguments":{"x":"</think><think>"}}</tool_call>').arguments == {
        "x": "</think><think>"
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tag_soup = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":"a"}', "\n", " "])


@settings(max_examples=150, deadline=None)
@given(st.text(min_size=1), st.dictionaries(st.text() | tag_soup, json_values | tag_soup, max_size=4))
def test_what_is_rendered_is_read_back(name: str, arguments: dict[str, object]) -> None:
    call = ToolCall("call-0", name, arguments)
    parsed = hermes.parse(hermes.render_call(call))
    assert parsed.calls == (ToolCall("call-0", name, arguments, raw=parsed.calls[0].raw),)
    assert parsed.content == ""


def test_rendered_calls_are_compact() -> None:
    text = hermes.render_call(ToolCall("call-0", "say", {"x": "é", "n": [1, 2]}))
    assert text == '<tool_call>{"name":"say","arguments":{"x":"é","n":[1,2]}}</tool_call>'


def test_ten_thousand_broken_texts() -> None:
    """Cut, spliced and scrambled calls: none raises, and only a well-formed closed object is ever a call."""
    soup = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"a"', "null", "NaN", "1e999", "9" * 50]
    soup += [*'{}[],:"-<> \n\\é🙂\x00\ud800', "\\ud800"]
    good = '<tool_call>{"name": "a", "arguments": {"x": [1, "b"]}}</tool_call>'
    rng = random.Random(0)
    called = failed = 0
    for _ in range(10_000):
        text = "".join(rng.choices([*soup, good, good], k=rng.randrange(8)))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice([*soup, ""]) + text[at + rng.randrange(3) :]
        parsed = hermes.parse(text)
        assert bool(parsed.complaint) == parsed.unclosed
        for call in parsed.calls:
            if call.error is None:
                called += 1
                body = json.loads(call.raw)
                assert (body["name"], body.get("arguments", {})) == (call.name, call.arguments)
            else:
                failed += 1
                assert call.arguments == {}
    assert called > 500  # the soup does hold real calls
    assert failed > 500


def test_get() -> None:
    assert hermes.name == "hermes"
    assert formats.get(hermes) is hermes
    with pytest.raises(errors.SettingsError, match="'hermez' is not known; give one of action, code, hermes"):
        formats.get("hermez")
