"""Tool-call formats: valid, malformed and unclosed calls; no text makes a parser raise."""

import itertools
import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import agentfly_kit as af

hermes = af.chat.formats.get("hermes")


def one(text: str) -> af.ToolCall:
    parsed = hermes.parse(text)
    assert len(parsed.calls) == 1, parsed
    return parsed.calls[0]


@pytest.mark.parametrize("blank", ["", " ", "\n", "\n\n  \t\r\n"])
def test_a_call_with_any_whitespace(blank: str) -> None:
    body = '{"name": "calculator", "arguments": {"expression": "2+3"}}'
    call = one(f"<tool_call>{blank}{body}{blank}</tool_call>")
    assert (call.id, call.name, call.arguments, call.error) == ("call-0", "calculator", {"expression": "2+3"}, None)
    assert call.raw == body


def test_a_malformed_call_between_valid_ones() -> None:
    good = '<tool_call>{"name":"a","arguments":{}}</tool_call>'
    parsed = hermes.parse(f"first {good}and<tool_call>{{oops}}</tool_call>{good} done")
    assert ([c.error is None for c in parsed.calls], parsed.content) == ([True, False, True], "first and done")
    assert [c.id for c in parsed.calls] == ["call-0", "call-1", "call-2"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("{'name': 'a'}", "the tool call is not valid JSON at character 1; write"),
        ('{"name": "a", "arguments": {}} and more', "text after the JSON object: 'and more'"),
        ("[1, 2]", "must be an object, got a list"),
        ('"a"', "must be an object, got a string"),
        ('{"arguments": {}}', 'has no "name"'),
        ('{"name": "", "arguments": {}}', 'must have a non-empty string as "name"'),
        ('{"name": 5, "arguments": {}}', 'must have a non-empty string as "name"'),
        ('{"name": "a", "arguments": [1]}', 'must have an object as "arguments", got a list'),
        ('{"name": "a", "arguments": "{}"}', 'must have an object as "arguments", got a string'),
        ('{"name": "a", "arguments": null}', 'must have an object as "arguments", got null'),
        ('{"name": "a", "arguments": true}', 'must have an object as "arguments", got a boolean'),
        ('{"name": "a", "arguments": 3}', 'must have an object as "arguments", got a number'),
        ('{"name": "a", "parameters": {}}', "has no \"arguments\" (it has 'parameters')"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a JSON number"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "contains an unpaired surrogate"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "too large"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 900 + "]" * 900 + "}}", "call is nested too deeply; write"),
    ],
)
def test_the_error_of_a_malformed_call(body: str, words: str) -> None:
    call = one(f"<tool_call>{body}</tool_call>")
    assert words in call.error
    assert '<tool_call>{"name": ..., "arguments": {...}}</tool_call>' in call.error
    assert call.arguments == {}


def test_a_call_without_arguments_key_is_a_call_without_arguments() -> None:
    assert one('<tool_call>{"name": "look"}</tool_call>') == af.ToolCall("call-0", "look", {}, raw='{"name": "look"}')


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
    assert parsed.unclosed and "not closed" in parsed.complaint
    assert (parsed.calls, parsed.content) == ((), "I say")


def test_calls_before_an_unclosed_one_stay() -> None:
    parsed = hermes.parse('<tool_call>{"name":"a","arguments":{}}</tool_call><tool_call>{"name":"b"')
    assert [c.name for c in parsed.calls] == ["a"]
    assert parsed.unclosed


def test_a_tag_inside_an_unclosed_body_starts_no_call() -> None:
    assert one('<tool_call>{"name": <tool_call>{"name":"b","arguments":{}}</tool_call>').error is not None


def test_thinking_that_the_prompt_opened() -> None:
    assert hermes.parse("<think>\n\n</think>It").thinking == ""
    parsed = hermes.parse('hm, <tool_call>{"name":"a"}</tool_call>?\n</think>\nNo.')
    assert (parsed.thinking, parsed.content, parsed.calls) == ('hm, <tool_call>{"name":"a"}</tool_call>?', "No.", ())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tag_soup = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":"a"}', "\n", " "])


def test_rendered_calls_are_compact() -> None:
    text = hermes.render_call(af.ToolCall("call-0", "say", {"x": "é", "n": [1, 2]}))
    assert text == '<tool_call>{"name":"say","arguments":{"x":"é","n":[1,2]}}</tool_call>'


SOUP = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"a"', "null", "NaN", "1e999", "9" * 50,
    *'{}[],:"-<>` \n\\é🙂\x00\ud800', "\\ud800", ";", "```", "```python\n", "\n```\n", '{"x":1}', '"parameters":',
    "Thought: ", "Action: a\n", "Action Input: ", "Observation:", "Final Answer:", "[TOOL_CALLS]", "[ARGS]",
    "<search>", "</search>", "<answer>", "</answer>", "<action>", "</action>", "<|python_tag|>", '"arguments":',
    "<function=a>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|tool_call>call:", '<|"|>', "<tool_call|>", "a(", "<|tool_call_start|>", "<|tool_call_end|>",
    "to=functions.a", "<|channel|>", "<|message|>", "<|call|>", "x='", "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>a", "a<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
]  # fmt: skip
SCHEMAS = [{"function": {"name": "a", "parameters": {"properties": {"x": {"type": "string"}}}}}]
ALL = af.chat.formats.NAMES
# Tool and parameter of the formats that call a fixed tool.
CALLED = {"code": ("python", "code"), "search": ("search", "query"), "action": ("act", "action")}
# Tags around thinking, for formats that do not use <think> and </think>.
THINKING = {
    "gemma4": ("<|channel>thought", "<channel|>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}


def fuzz(name: str, count: int, seed: int) -> tuple[int, int, int]:
    """Parse random texts with calls. Return the numbers of valid calls, malformed calls and unclosed texts."""
    fmt = af.chat.formats.get(name)
    shown = (("a", "x", "b"), ("python", "code", "print(1)\n"), ("search", "query", "who"), ("act", "action", "go"))
    good = [fmt.render_call(af.ToolCall("call-0", tool, {key: value})) for tool, key, value in shown]
    rng = random.Random(seed)
    called = failed = unclosed = 0
    for i in range(count):
        text = "".join(rng.choices([*SOUP, *good, *good, *good], k=rng.randrange(9)))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice([*SOUP, ""]) + text[at + rng.randrange(3) :]
        parsed = fmt.parse(text, SCHEMAS if i % 2 else ())
        assert [c.id for c in parsed.calls] == [f"call-{n}" for n in range(len(parsed.calls))]
        unclosed += parsed.unclosed
        for call in parsed.calls:
            if call.error is None:
                called += 1
                assert call.name
                json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
                if name == "hermes":
                    body = json.loads(call.raw)
                    assert (body["name"], body.get("arguments", {})) == (call.name, call.arguments)
            else:
                failed += 1
                assert call.arguments == {}
    return called, failed, unclosed


@pytest.mark.parametrize("name", ALL)
def test_random_texts(name: str) -> None:
    """Usually the first 3,000 texts contain valid and malformed calls and, if the format has them, unclosed ones."""
    fmt, (tool, key) = af.chat.formats.get(name), CALLED.get(name, ("a", "x"))
    text = fmt.render_call(af.ToolCall("call-0", tool, {key: "b"}))
    has_unclosed = any(fmt.parse(text[:cut]).unclosed for cut in range(len(text)))
    counts = (fuzz(name, 3_000, seed) for seed in range(10))
    assert any(called and failed and bool(unclosed) is has_unclosed for called, failed, unclosed in counts)


# Text before, repeated text, and text after, with which a pattern or loop may take quadratic time.
CALL = '{"name":"a","arguments":{}}'
REPEATED = [
    "<tool_call>", "Action: a\n", "```python\n", "[TOOL_CALLS]", '{"name":', "<think>", "</think>", "[", "`", " ",
    "\n", " \n", "<function=", "<search>", "<answer>", "Action Input: {", "Observation:\n", "</parameter>",
    "<tool_call>x</tool_call>\n", f"<tool_call>{CALL}</tool_call>", f"[TOOL_CALLS][{CALL}]", "[TOOL_CALLS]a{}",
    "Action: a\nAction Input: {}\n", "```python\nx\n```\n", f"{CALL};", "<search>{}</search>", "[TOOL_CALLS][",
    "<arg_key>x</arg_key><arg_value>", "</arg_value>", "<tool_call>a</tool_call>", "<|tool_call>", '<|"|>',
    "<|tool_call>call:a{}<tool_call|>", '<|"|>a<|"|>,', "{a:", "<|tool_call_start|>", "a(), ", "a(x='y'), ", "'",
    "<|tool_call_start|>[a()]<|tool_call_end|>", "\\'", '"', "x=", "x=[", "' ", "to=functions.a", "<|message|>",
    "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{}<|call|>", "<|channel|>", "a", "<|",
    "<tool_call><function=a><parameter=x></tool_call>", '<tool_call>["</tool_call>', '<tool_call>"', "``` ",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>\n",
]  # fmt: skip
AROUND = [
    ("", ""), ("<tool_call>a<arg_key>x</arg_key><arg_value>", "</tool_call>"), ("to=functions.a<|message|>", ""),
    ("<|tool_call>call:a{", "}<tool_call|>"), ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    ("<|tool_call_start|>[a(x=", ")]<|tool_call_end|>"), ("<|tool_call_start|>[a(x='", "')]<|tool_call_end|>"),
    ('{"name":"a"}', "x"), ("[TOOL_CALLS]a", "x"), ("Action: a", "Final Answer: x"), ("```python", "x"),
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_parsing_takes_linear_time(name: str) -> None:
    """A text of four times the length takes about four times as long; in quadratic time it would take 16 times.

    The limit is 10, and the test fails only if every one of several measurements of CPU time is above it.
    """

    def seconds(text: str) -> float:
        began = time.process_time()
        af.chat.formats.get(name).parse(text)
        return time.process_time() - began

    for (before, after), piece in itertools.product(AROUND, REPEATED):
        once, more = (before + piece * (n // len(piece)) + after for n in (10_000, 40_000))
        ratios = ((first := seconds(once)) < 0.0015 or seconds(more) < 10 * first for _ in range(20))
        assert any(ratios), (before, piece, after)


# --- properties of all formats ---

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
markup = re.compile(r"</?(?:parameter|function|tool_call)")


def reads_as_json(value: object) -> bool:
    """Return True if a text without a schema would be parsed as JSON."""
    try:
        return not isinstance(json.loads(str(value)), str)
    except (ValueError, RecursionError):
        return False


def back(fmt: af.chat.formats.Format, call: af.ToolCall, tools: list[dict[str, Any]] | None = None) -> None:
    parsed = fmt.parse(fmt.render_call(call), tools or ())
    assert [(c.name, c.arguments, c.error) for c in parsed.calls] == [(call.name, call.arguments, None)]
    assert (parsed.content, parsed.unclosed) == ("", False)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "react", "gpt_oss", "deepseek_v3", "deepseek_v31"])
@settings(max_examples=60, deadline=None)
@given(names, st.dictionaries(st.text() | tag_soup, json_values | tag_soup, max_size=4))
def test_json_formats_parse_rendered_calls(name: str, tool: str, arguments: dict[str, Any]) -> None:
    back(af.chat.formats.get(name), af.ToolCall("call-0", tool, arguments))


@settings(max_examples=80, deadline=None)
@given(names, st.dictionaries(names, json_values, max_size=4))
def test_qwen3_coder_parses_rendered_calls(tool: str, arguments: dict[str, Any]) -> None:
    """Strings can be any text with a schema, and any text that is not JSON without one, but must not contain tags."""
    assume(not any(markup.search(json.dumps(v)) for v in arguments.values()))
    fmt = af.chat.formats.get("qwen3_coder")
    properties = {k: {"type": "string"} if isinstance(v, str) else {} for k, v in arguments.items()}
    back(
        fmt,
        af.ToolCall("call-0", tool, arguments),
        [{"function": {"name": tool, "parameters": {"properties": properties}}}],
    )
    if not any(isinstance(v, str) and reads_as_json(v) for v in arguments.values()):
        back(fmt, af.ToolCall("call-0", tool, arguments))


@settings(max_examples=80, deadline=None)
@given(st.text() | st.lists(st.sampled_from(["```", "````", "\n", "x", " ", "</think>"])).map("".join))
def test_code_parses_rendered_calls(code: str) -> None:
    back(af.chat.formats.get("code"), af.ToolCall("call-0", "python", {"code": code}))


@pytest.mark.parametrize(("name", "tool", "parameter"), [("search", "search", "query"), ("action", "act", "action")])
@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1) | st.sampled_from(["</search>", "</action>", "<answer>x", "{", " a ", "</think>"]))
def test_tags_parse_rendered_calls(name: str, tool: str, parameter: str, text: str) -> None:
    back(af.chat.formats.get(name), af.ToolCall("call-0", tool, {parameter: text}))
    back(af.chat.formats.get(name), af.ToolCall("call-0", "other", {"n": 1, "text": text}))


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_call_is_no_call_and_several_calls_are_in_order(name: str) -> None:
    fmt = af.chat.formats.get(name)
    tool, key = CALLED.get(name, ("a", "x"))
    text = fmt.render_call(af.ToolCall("call-0", tool, {key: "rm -r }] here"}))
    # Without the last call's ending, which is not part of the parsed text or may be missing.
    text = text.removesuffix("<|call|>").removesuffix("<｜tool▁calls▁end｜>")
    before = "" if name in ("llama3", "code", "react", "gpt_oss") else "I say. "
    for cut in range(len(text)):
        parsed = fmt.parse(before + text[:cut])
        assert not [call for call in parsed.calls if call.error is None], text[:cut]
        assert not parsed.unclosed or parsed.content == before.strip(), text[:cut]
    assert fmt.parse(text).calls[0].error is None
    text = "\n".join(fmt.render_call(af.ToolCall(f"call-{i}", tool, {key: f"n{i}"})) for i in range(3))
    calls = fmt.parse(text).calls
    assert [(c.id, c.name, c.arguments) for c in calls] == [(f"call-{i}", tool, {key: f"n{i}"}) for i in range(3)]


@pytest.mark.parametrize("name", ALL)
def test_thinking_in_every_format(name: str) -> None:
    fmt = af.chat.formats.get(name)
    tool, key = CALLED.get(name, ("a", "x"))
    call = fmt.render_call(af.ToolCall("call-0", tool, {key: "b"}))
    assert fmt.parse("Five.") == af.chat.formats.Parsed("Five.")
    think, end = THINKING.get(name, ("<think>", "</think>"))
    assert fmt.parse(f"{think}hm{end}Five.") == af.chat.formats.Parsed("Five.", thinking="hm")
    if name == "gpt_oss":  # a call ends the thinking
        assert [c.arguments for c in fmt.parse(f"{think}hm{end}{call}").calls] == [{key: "b"}]
        return
    parsed = fmt.parse(f"{think}\nhm, {call}\n{end}\n\n{call}")
    assert [c.arguments for c in parsed.calls] == [{key: "b"}]
    assert parsed.thinking == f"hm, {call}"
    assert fmt.parse(f"{think}{call}").calls == ()
    assert fmt.parse(f"hm{end}Five.") == af.chat.formats.Parsed("Five.", thinking="hm")


@pytest.mark.parametrize("name", ALL)
def test_instructions_and_observations(name: str) -> None:
    tools = [{"function": {"name": "look_up", "parameters": {"properties": {"x": {"type": "string"}}}}}]
    text = af.chat.formats.get(name).instructions(tools)
    assert name == "code" or "look_up" in text
    assert "5" in af.chat.formats.get(name).observation("look_up", "5")


# --- single formats ---


def test_llama3() -> None:
    llama = af.chat.formats.get("llama3")
    two = llama.parse('<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "arguments": {}}')
    assert [(c.name, c.arguments) for c in two.calls] == [("a", {"x": 1}), ("b", {})]
    assert llama.parse('{"type": "function", "name": "a", "parameters": {}}').calls[0].name == "a"
    # JSON that is not a call is an answer, and so is a call that is quoted within a sentence.
    assert llama.parse('{"answer": 5}') == af.chat.formats.Parsed('{"answer": 5}')
    assert llama.parse('I would write {"name": "a", "parameters": {}}').calls == ()
    assert llama.parse('{"name": "a", "parameters": {}}\nDone.').content == "Done."


def test_mistral() -> None:
    mistral = af.chat.formats.get("mistral")
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "abcDEF123"}, {"name": "b", "arguments": {}}]'
    assert [(c.id, c.name) for c in mistral.parse(text).calls] == [("abcDEF123", "a"), ("call-1", "b")]
    newer = mistral.parse('Yes.[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]abcDEF123[ARGS]{}')
    assert [(c.id, c.name, c.arguments) for c in newer.calls] == [("call-0", "a", {"x": 1}), ("abcDEF123", "b", {})]
    assert newer.content == "Yes."
    assert mistral.render_call(af.ToolCall("abcDEF123", "a", {})) == (
        '[TOOL_CALLS][{"name":"a","arguments":{},"id":"abcDEF123"}]'
    )


def test_react() -> None:
    react = af.chat.formats.get("react")
    assert react.stop == ("Observation:",)
    parsed = react.parse('Thought: look.\nAction: a\nAction Input: {"x": 1}\nObservation: I made this up\nAction: b')
    assert [(c.name, c.arguments) for c in parsed.calls] == [("a", {"x": 1})]
    assert (parsed.thinking, parsed.content) == ("look.", "")
    done = react.parse("Thought: I know.\nFinal Answer: 5")
    assert (done.thinking, done.content, done.calls) == ("I know.", "5", ())
    assert react.parse("Thought: only this").content == "only this"
    bare = react.parse("Action: a\nAction Input: five", SCHEMAS).calls[0]
    assert (bare.name, bare.arguments, bare.error) == ("a", {"x": "five"}, None)
    quoted = react.parse('Action: a\nAction Input: {"x":\n"y",\n"z": "Observation: q"}')
    assert quoted.calls[0].arguments == {"x": "y", "z": "Observation: q"}


def test_code() -> None:
    code = af.chat.formats.get("code")
    parsed = code.parse("So:\n```python\nprint(1)\n```\nand\n```json\n{}\n```")
    assert [c.arguments for c in parsed.calls] == [{"code": "print(1)"}] and "```json" in parsed.content
    assert code.parse("use `x` and ``` no fence").calls == ()
    mine = af.chat.formats.FencedCode(tool="shell", parameter="line", languages=("bash", "sh"))
    assert mine.parse("```sh\nls\n```").calls[0] == af.ToolCall("call-0", "shell", {"line": "ls"}, raw="ls")


def test_search_and_action_tags() -> None:
    search = af.chat.formats.get("search")
    assert search.stop == ("</search>", "</answer>")
    parsed = search.parse("<think>who?</think> <search> capital of Peru </search>")
    assert [(c.name, c.arguments) for c in parsed.calls] == [("search", {"query": "capital of Peru"})]
    assert search.parse("So it is clear. <answer> Lima </answer> and more") == af.chat.formats.Parsed("Lima")
    assert search.parse("<answer>Lima") == af.chat.formats.Parsed("Lima")  # cut before its closing tag by a stop text
    assert search.observation("search", "Lima") == "<information>Lima</information>"
    action = af.chat.formats.get("action").parse(
        '<action>go north</action><action>{"name":"look","arguments":{}}</action>'
    )
    assert [(c.name, c.arguments) for c in action.calls] == [("act", {"action": "go north"}), ("look", {})]


def test_qwen3_coder() -> None:
    qwen = af.chat.formats.get("qwen3_coder")
    text = "<tool_call>\n<function=a>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
    assert qwen.parse(text).calls[0].arguments == {"x": 5}
    assert qwen.parse(text, SCHEMAS).calls[0].arguments == {"x": "5"}
    inner = "<tool_call><function=a><parameter=x>if a</parameter> b</parameter></function></tool_call>"
    assert qwen.parse(inner).calls[0].arguments == {"x": "if a</parameter> b"}


@settings(max_examples=80, deadline=None)
@given(names, st.dictionaries(names, json_values, max_size=4))
def test_markup_formats_parse_rendered_calls(tool: str, arguments: dict[str, Any]) -> None:
    """Strings can be any text for GLM-4 with a schema, for LFM2, and for Gemma 4 with bare keys."""
    texts = json.dumps(arguments, ensure_ascii=False)
    call = af.ToolCall("call-0", tool, arguments)
    properties = {k: {"type": "string"} if isinstance(v, str) else {} for k, v in arguments.items()}
    if not re.search(r"</?(?:arg_|tool_call)", texts):
        back(
            af.chat.formats.get("glm4"),
            call,
            [{"function": {"name": tool, "parameters": {"properties": properties}}}],
        )
    identifiers = not re.search(r'"(?![A-Za-z_][A-Za-z0-9_.-]*"|")[^"]*":', texts) and '"":' not in texts
    if identifiers and '<|\\"|>' not in texts and "\\" not in texts:
        back(af.chat.formats.get("gemma4"), call)
    if all(key.isidentifier() for key in arguments) and "<|tool_call_end|>" not in texts:
        back(af.chat.formats.get("lfm2"), call)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("glm4", "<tool_call></tool_call>", "does not begin with the name of a tool"),
        ("glm4", "<tool_call>a\n<arg_key>x</arg_key></tool_call>", "text where a tag is expected"),
        ("glm4", "<tool_call>a<arg_key>x</arg_key><arg_value>1</tool_call>", "does not close <arg_key>x</arg_key>"),
        ("gemma4", "<|tool_call>a{}<tool_call|>", "does not begin with call:name"),
        ("gemma4", "<|tool_call>call:a{x:y}<tool_call|>", "is not valid JSON"),
        ("gemma4", "<|tool_call>call:a{}{}<tool_call|>", "has text after the arguments"),
        ("gemma4", "<|tool_call>call:a{x:" + "[" * 9999 + "<tool_call|>", "nested too deeply"),
        ("lfm2", "<|tool_call_start|>a()<|tool_call_end|>", "is not a list"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "has no name(...)"),
        ("lfm2", "<|tool_call_start|>[a(1)]<|tool_call_end|>", "has no key=value at '1)]'"),
        ("lfm2", "<|tool_call_start|>[a(x=open)]<|tool_call_end|>", "is not valid JSON"),
        ("lfm2", "<|tool_call_start|>[a() b()]<|tool_call_end|>", "has no comma between two calls"),
        ("lfm2", "<|tool_call_start|>[a(x=1e999)]<|tool_call_end|>", "too large"),
        ("lfm2", "<|tool_call_start|>[a()] b<|tool_call_end|>", "has no name(...)"),
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "does not begin with a name and a separator",
        ),
        ("deepseek_v31", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{} b<｜tool▁call▁end｜>", "after the JSON object: 'b'"),
        ("gpt_oss", "to=functions.a<|message|>{} and<|call|>", "text after the JSON object: 'and'"),
        ("gpt_oss", "to=functions.a<|message|>[]", 'must have an object as "arguments", got a list'),
        ("gpt_oss", "to=functions.a<|message|>{x}", "is not valid JSON"),
        ("llama3", '{"name": "a", "parameters": {x}}', "not valid JSON"),
        ("llama3", "<|python_tag|>print(1)", "not a JSON object"),
        ("mistral", "[TOOL_CALLS] []", "is an empty list"),
        ("mistral", "[TOOL_CALLS] [{}]", 'no "name"'),
        ("react", "Action: a\nand then", "no Action Input"),
        ("react", "Action: a\nAction Input: 5", "is not a JSON object"),
        ("search", "<search> </search>", "is empty"),
        *(
            ("qwen3_coder", f"<tool_call>{body}</tool_call>", words)
            for body, words in (
                ("", "does not begin with <function=name>"),
                ("<function=>", "an empty function name"),
                ("<function=a>", "does not close <function"),
                ("<function=a><parameter=x>1</function>", "does not close <parameter=x>"),
                ("<function=a>text</function>", "text where a tag is expected"),
                ("<function=a><parameter=x>1</parameter><parameter=x>2</parameter></function>", "sets 'x' twice"),
            )
        ),
    ],
)
def test_errors_of_malformed_calls(name: str, text: str, words: str) -> None:
    call = af.chat.formats.get(name).parse(text).calls[-1]
    assert words in str(call.error)
    assert "; write " in str(call.error) and call.arguments == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "a", "parameters": {"x"'),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"x"'),
        ("mistral", "[TOOL_CALLS]a[AR"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("react", "Action: a"),
        ("react", 'Action: a\nAction Input: {"x"'),
        ("code", "```python\nprint(1)"),
        ("search", "<search>Peru"),
    ],
)
def test_unclosed_calls(name: str, text: str) -> None:
    assert af.chat.formats.get(name).parse(text).unclosed


def test_python_literals_in_lfm2() -> None:
    text = "<|tool_call_start|>[a(x='It's a \\'b\\', \n\\\\', n=None, l=[True, 'y']), b(x=\"It's\")]<|tool_call_end|>"
    calls = af.chat.formats.get("lfm2").parse(f"So: {text}").calls
    assert [c.error for c in calls] == [None, None]
    assert calls[0].arguments == {"x": "It's a 'b', \n\\", "n": None, "l": [True, "y"]}
    assert calls[1].arguments == {"x": "It's"}


def test_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x": 1}'
    )
    parsed = af.chat.formats.get("gpt_oss").parse(text)
    assert (parsed.thinking, parsed.content, parsed.unclosed) == ("Look.", "I look.", False)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("a", {"x": 1})]
    assert af.chat.formats.get("gpt_oss").parse(text[:-1]).unclosed
    assert af.chat.formats.get("gpt_oss").parse("<|channel|>final<|message|>5<|return|>") == af.chat.formats.Parsed(
        "5"
    )


@pytest.mark.parametrize("name", [format.name for format in af.chat.formats.NATIVE])
def test_detect_format(name: str) -> None:
    fmt = af.chat.formats.get(name)
    assert (
        af.chat.formats.detect_format(lambda tool, arguments: fmt.render_call(af.ToolCall("call-0", tool, arguments)))
        == fmt
    )
    assert af.chat.formats.detect_format(lambda tool, arguments: f"{tool}({arguments})") is None
    assert af.chat.formats.detect_format(lambda tool, arguments: "") is None


def test_a_custom_format() -> None:
    class Shout(af.chat.formats.Format):
        name = "shout"

        def parse(self, text: str, tools: Any = ()) -> af.chat.formats.Parsed:
            return af.chat.formats.Parsed(text, (af.ToolCall("call-0", text, {}),) if text.isupper() else ())

        def render_call(self, call: af.ToolCall) -> str:
            return call.name.upper()

    assert af.chat.formats.get(Shout()).parse("LOOK").calls[0].name == "LOOK"
    assert af.chat.formats.get(Shout()).stop == ()
