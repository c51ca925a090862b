"""The calculator policy: its tasks, tokenizer and template, demonstrations, and the recipe as a whole."""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import errors
import pytest
import recipes
import torch
from recipes.calculator import Expression, Recipe, expression, tasks

import agentfly_kit as af
from agentfly_kit.ppo import imitation

TOOLS = Recipe.tools


@pytest.fixture(scope="module")
def policy() -> Any:
    return af.tiny.policy("calculator")


@pytest.fixture(scope="module")
def writer(policy: Any) -> Recipe:
    return Recipe(policy.chat)


# --- tasks


def test_tasks_are_many_exact_and_in_one_split_only() -> None:
    splits = tasks()
    assert len(splits["test"]) >= 1000
    assert sum(map(len, splits.values())) >= 2000
    rows = [row for rows in splits.values() for row in rows]
    assert len({row["id"] for row in rows}) == len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        text = row["question"].removeprefix("What is ").removesuffix("?")
        assert re.fullmatch(r"[0-9+\-*()]{3,12}", text), row
        assert row["answer"] == str(eval(text)), row
    found = af.load_tasks("calculator")
    assert len(found.train) == len(splits["train"])
    assert found.test[0].fields == {"answer": splits["test"][0]["answer"]}


def test_a_shortened_expression_is_an_expression() -> None:
    rng = random.Random(0)
    for _ in range(500):
        e = expression(rng)
        part = e.shortened(rng)
        assert e.value == eval(e.text)
        assert part.value == eval(part.text)
        assert len(part.text) < len(e.text)


# --- tokenizer and template


def test_digits_and_operators_are_single_tokens(policy: Any) -> None:
    assert policy.chat.token_texts(policy.chat.encode("12*(3+45)-6?")) == tuple("12*(3+45)-6?")


@pytest.mark.parametrize("text", ["naïve 東京 🙂\n", "  two  blanks", '{"name": "x"}', "<tool_call>{}</tool_call>"])
def test_any_text_is_decoded_unchanged(text: str, policy: Any) -> None:
    assert policy.chat.text(policy.chat.encode(text)) == text


def test_the_padding_token_occurs_in_no_text(policy: Any) -> None:
    tokenizer = policy.chat.tokenizer
    assert tokenizer.pad_token_id not in (tokenizer.eos_token_id, *policy.chat.stop_ids)
    assert tokenizer.pad_token_id not in policy.chat.encode("What is <|im_start|>1+2?<|im_end|>")


def test_the_template_lists_the_tools(policy: Any) -> None:
    user = {"role": "user", "content": "What is 1+2?"}
    second = {"function": {"name": "lookup", "parameters": {"properties": {"person": {}, "fact": {}}}}}
    render = policy.chat.render
    assert "Tools: calculator(expression)<|im_end|>" in render([user], TOOLS, generate=True)
    assert "Tools: calculator(expression), lookup(person, fact)<" in render([user], [*TOOLS, second], generate=True)
    assert render([user], generate=True) == "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
    system = {"role": "system", "content": "Be brief."}
    assert render([system, user], TOOLS, generate=True).startswith("<|im_start|>system\nBe brief.\nTools: calc")


@pytest.mark.parametrize("arguments", [{"expression": "1+2"}, '{"expression":"1+2"}'])
def test_a_rendered_conversation_is_the_ids_that_an_agent_sees(arguments: Any, policy: Any, writer: Recipe) -> None:
    """Other trainers render the messages, whereas this package appends ids. The tokens must be the same."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is 1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    shown = policy.chat.render(messages, TOOLS, generate=False)
    solved = writer.demonstrate("solves", Expression("1+2"))
    assert shown == policy.chat.text(solved.ids.tolist()) + "\n"
    assert policy.chat.encode(shown)[:-1] == tuple(solved.ids.tolist())
    for end in range(1, len(messages)):  # appending keeps every token before it
        before = policy.chat.encode(policy.chat.render(messages[:end], TOOLS, generate=False))
        assert policy.chat.encode(shown)[: len(before)] == before


# --- demonstrations


def test_a_demonstration_is_masked_by_who_wrote_it(policy: Any, writer: Recipe) -> None:
    d = writer.demonstrate("solves", Expression("3*(4+5)"))
    written = policy.chat.text(
        [i for i, by_assistant in zip(d.ids.tolist(), d.rows[0].written_by(), strict=True) if by_assistant]
    )
    assert written == (
        '<tool_call>{"name":"calculator","arguments":{"expression":"3*(4+5)"}}</tool_call><|im_end|>27<|im_end|>'
    )
    assert "27" not in policy.chat.text(
        d.ids.tolist()[: d.ids.tolist().index(policy.chat.encode("<tool_response>")[0])]
    )


def test_every_habit_is_a_conversation(policy: Any, writer: Recipe) -> None:
    texts = {
        name: policy.chat.text(writer.demonstrate(name, Expression("3*(4+5)")).ids.tolist()) for name in Recipe.habits
    }
    assert texts["solves"].endswith("27<|im_end|>")
    assert texts["unsure"].endswith("I don't know<|im_end|>")
    assert "<tool_call>" not in texts["unsure"] + texts["guesses"]
    assert "<tool_call>" in texts["careless"]
    assert "27" not in texts["careless"]
    assert texts["forgets"].endswith("27</tool_response><|im_end|>\n<|im_start|>assistant\nI don't know<|im_end|>")


# --- the policy


def test_the_policy_is_small_and_fresh(policy: Any) -> None:
    other = af.tiny.policy("calculator", value_head=True)
    assert other.value_head is not None
    assert policy.value_head is None
    assert other.version == 0
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(next(policy.parameters()), next(other.parameters()))
    config = policy.model.config
    assert (config.head_dim, config.max_position_embeddings, config.dtype) == (32, 512, torch.float32)
    assert config.eos_token_id == policy.chat.tokenizer.eos_token_id


# --- building


def test_players_use_the_chat_of_the_calculator_policy() -> None:
    assert af.envs.family.small_chat().tokenizer.get_vocab() == af.tiny.tokenizer().get_vocab()


def test_a_short_build_learns() -> None:
    """Run the whole recipe at a fraction of its length. Both phases must run, and the loss must fall."""
    lines: list[str] = []
    recipes.build(skill_steps=15, mixed_steps=2, report=lines.append)
    assert [line.split(":")[0] for line in lines] == ["skill", "mixed"]
    assert float(lines[0].split("loss ")[1].split(",")[0]) < 5.0  # mean over the steps; 6.0 is a uniform guess


@pytest.mark.parametrize("format", ["hermes", "react", "code", "search"])
def test_text_before_a_call_is_encoded_so_that_the_chat_reads_both(format: str) -> None:
    """In some formats, a call must begin on its own line."""
    name = {"code": "python", "search": "search"}.get(format, "ask")
    arguments = {"code": "code", "search": "query"}.get(format, "word")
    calls = [{"function": {"name": name, "arguments": {arguments: word}}} for word in ("red", "blue")]
    asked, answer = {"role": "user", "content": "swap"}, {"role": "assistant", "content": "red", "tool_calls": calls}
    made = af.Chat(af.tiny.tokenizer(), format=format)
    (turn,) = af.tiny.demonstration(made, [asked, answer]).actions
    parsed = made.parse(turn.ids or ())
    assert parsed.content.strip() == "red" and [call.name for call in parsed.calls] == [name] * 2, turn.text


def test_a_learner_imitates_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[str] = []

    @contextlib.contextmanager
    def shown(describe: Callable[[], str], result: Callable[[], str]) -> Iterator[None]:
        progress.append(describe())
        yield
        progress.extend((describe(), result()))

    monkeypatch.setattr(imitation, "show_progress", shown)

    def demonstrate(rng: random.Random) -> list[dict[str, Any]]:
        a, b = rng.sample(("red", "blue", "green"), 2)
        return [
            {"role": "user", "content": f"swap {a} {b}"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "ask", "arguments": {"word": a}}}]},
            {"role": "tool", "name": "ask", "tool_call_id": "call-0", "content": b},
            {"role": "assistant", "content": b},
        ]

    @af.tool
    def ask(word: str) -> str:
        """Return the other word.

        Args:
            word: a word.
        """
        return word

    words = ("red", "blue", "green", " red", " blue", " green", "swap", "ask", "word")
    first, second = (af.tiny.learner(words, demonstrate, tools=[ask], steps=40, batch=8) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    batch = af.collate(af.tiny.demonstration(first.chat, demonstrate(random.Random(99)), [ask.schema]), imitate=True)
    assert float(first.score(batch, {"logprob"})["logprob"][batch.mask].mean()) > -0.7
    assert first.version == 0 and progress[0] == "imitation, update 1 of 40"
    assert re.fullmatch(r"imitation, 40 of 40 updates done, loss \d\.\d\d, about 0 s left", progress[1])
    assert re.fullmatch(r"imitation: 40 updates in \d+ s, final loss \d\.\d{3}", progress[2])

    def learn(*messages: dict[str, Any]) -> af.Policy:
        asked = {"role": "user", "content": "swap"}
        return af.tiny.learner(words, lambda rng: [asked, *messages], tools=[ask], steps=1, batch=1)

    def calling(function: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [function]}

    for message, text in (
        (
            calling({"name": "ask", "arguments": {}}),
            "demonstrate: message 1 (role 'assistant'): each of 'tool_calls'",
        ),
        (calling({"function": {"name": "aks", "arguments": {}}}), "demonstrate must call ask(word), got aks()"),
        (calling({"function": {"name": "ask", "arguments": {"w": 1}}}), "must call ask(word), got ask(w)"),
        ({"role": "user", "content": "blue"}, "at least one message with the role 'assistant', got none"),
    ):
        errors.check(lambda message=message: learn(message), af.errors.SettingsError, text)


@pytest.mark.soak
async def test_a_policy_of_another_seed_is_as_good_as_the_shipped_one(tmp_path: Path) -> None:
    """The new policy has the same initial success and learns as much in twice the iterations. Takes two minutes."""
    shipped = af.load_tasks("calculator")
    recipes.main(["policy", "--seed", "1", "--out", str(tmp_path / "policy")])
    policy = af.Policy.load(tmp_path / "policy")
    learner = af.envs.calculator.agent(policy)
    assert 0.17 <= (await af.evaluate(learner, shipped.test)).success <= 0.37
    async for _ in af.train(
        learner, policy, shipped.train, af.TrainConfig(steps=48, lr_end=3e-5), run=tmp_path / "run"
    ):
        pass
    assert (await af.evaluate(learner, shipped.test)).success >= 0.90
