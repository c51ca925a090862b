"""Constrained sampling of `LocalEngine`: calls and JSON that match schemas, exact logprobs, and training."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dice
import errors
import jsonschema
import packages
import pytest
import torch
from agents import exact, fresh, random_policy, shipped
from test_harness import TASK, TOOLS, harnessed, run_one

import agentfly_kit as af
from agentfly_kit.agent.constraint import make_constraint
from agentfly_kit.chat import formats
from agentfly_kit.endpoint.reply import ReplyOptions, RequestError
from agentfly_kit.engines.local.grammar import Grammars, allowed_tokens
from agentfly_kit.engines.local.sampling import sample_tokens
from agentfly_kit.samples import Constraint, TurnRequest

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
UNCONSTRAINED = {"code", "gemma4", "glm4", "lfm2", "qwen3_coder"}  # formats whose arguments are not JSON
ASKED = [{"role": "user", "content": "What is 2+3?"}]


def value_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of a parameter as pydantic and @af.tool write it, such that values have a bounded length."""
    kind = rng.randrange(7 if depth < 2 else 4)
    text = {"type": "string", "maxLength": 8, "description": "A text."}
    return [
        lambda: text,
        lambda: {"type": "integer", "minimum": -99, "maximum": rng.randrange(1, 10_000), "default": 0},
        lambda: {"enum": rng.sample(["low", "high", "a b", 'q"t', 3, None, True], rng.randrange(1, 5))},
        lambda: rng.choice([{"type": "boolean"}, {"type": "string", "pattern": "^[a-f0-9]{4}$"}, {"const": "x/y"}]),
        lambda: {"type": "array", "items": value_schema(rng, depth + 1), "minItems": 1, "maxItems": 3},
        lambda: {"anyOf": [value_schema(rng, depth + 1), {"type": "null"}], "title": "Maybe"},
        lambda: object_schema(rng, depth + 1),
    ][kind]()


def object_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["city", "limit", "to_address", "q", "日付", "start-line", "flags"], rng.randrange(4))
    schema = {"type": "object", "properties": {name: value_schema(rng, depth) for name in names}}
    return {**schema, "required": [n for n in names if rng.random() < 0.7], "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def agent_of(policy: af.Policy, **chat: Any) -> af.Agent:
    return af.Agent(af.LocalEngine(policy, slots=32), chat=af.Chat(policy.chat.tokenizer, **chat), reward=exact)


def constraint_of(agent: af.Agent, tools: Sequence[dict[str, Any]], **options: Any) -> Constraint:
    return make_constraint(agent, tools, ReplyOptions(**options))


async def sampled(agent: af.Agent, constraint: Constraint | None, seed: int, **settings: Any) -> af.Sample:
    request = TurnRequest(TASK, 0, f"{seed}", constraint=constraint)
    sampling = af.Sampling(**{"max_tokens": 400} | settings)
    return await agent.engine.sample(agent.chat.prompt(ASKED), sampling, seed, request=request)


def allows(chat: af.Chat, constraint: Constraint, text: str) -> bool:
    ids, matchers = list(chat.encode(text)), Grammars(chat, len(chat.tokenizer)).matchers(constraint)
    return all(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting() for matcher in matchers)


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.long)])
async def test_every_call_and_every_text_matches_its_schema(count: int) -> None:
    """An almost uniform policy writes calls of random tools and texts with random schemas, in two formats."""
    rng = random.Random(dice.seed())
    agents = [agent_of(random_policy(length=512), format=name) for name in ("hermes", "react")]
    stops: Counter[str] = Counter()

    async def one(i: int) -> None:
        agent, schemas = agents[i % 2], [object_schema(rng) for _ in range(3)]
        tools = [tool(f"tool_{k}", schema) for k, schema in enumerate(schemas)]
        must_call = rng.choice(["", "tool_1"])
        constraint = (
            constraint_of(agent, tools, must_call=must_call) if i % 3 else constraint_of(agent, (), schema=schemas[0])
        )
        sample = await sampled(agent, constraint, i)
        stops[sample.stop] += 1
        if sample.stop == "length":
            return
        parsed = agent.chat.parse(sample.ids or (), tools)
        if not i % 3:
            jsonschema.validate(json.loads(parsed.content), schemas[0])
            return
        (call,) = parsed.calls
        assert call.error is None and not parsed.content and must_call in ("", call.name), parsed
        jsonschema.validate(call.arguments, schemas[int(call.name[-1])])

    await asyncio.gather(*map(one, range(count)))
    print(stops)
    assert stops["stop"] > 0.97 * count, stops


# Names of types in the function documentation of BFCL, which is written by hand
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def json_schema(given: Any) -> Any:
    """Convert the parameters of a function of BFCL to a JSON schema."""
    if isinstance(given, list):
        return [json_schema(value) for value in given]
    if not isinstance(given, dict):
        return given
    made = {key: json_schema(value) for key, value in given.items()}
    if isinstance(made.get("type"), str):
        made["type"] = BFCL_TYPES.get(made["type"], made["type"])
    return made


@pytest.mark.long
async def test_calls_of_a_thousand_real_tools_match_their_schemas(tmp_path: Path) -> None:
    """The tools are those that users contributed to the Berkeley Function Calling Leaderboard."""
    packages.install(tmp_path, "bfcl-eval==2026.3.23")
    paths = sorted((tmp_path / "bfcl_eval/data").glob("*_live_*.json"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").strip().split("\n")]
    functions = {json.dumps(tool["parameters"]): tool for line in lines for tool in json.loads(line)["function"]}
    agents = [agent_of(random_policy(length=8192), format=name) for name in ("hermes", "react")]
    given: list[tuple[af.Agent, dict[str, Any], Constraint]] = []
    refused, longest = [], 0
    for found in random.Random(dice.seed()).sample([*functions.values()], len(functions)):
        agent = agents[len(given) % 2]
        made = tool(found["name"], json_schema(found["parameters"]))
        try:
            agent.engine.check_constraint(constraint := constraint_of(agent, [made], must_call=""))
            given.append((agent, made, constraint))
        except af.errors.SettingsError as error:  # the schema is invalid
            refused.append(str(error))
        if len(given) == 1_000:
            break

    async def one(i: int) -> None:
        nonlocal longest
        agent, made, constraint = given[i]
        sample = await sampled(agent, constraint, i, max_tokens=8_000)
        assert sample.ids and sample.stop == "stop", sample
        longest = max(longest, len(sample.ids))
        (call,) = agent.chat.parse(sample.ids, [made]).calls
        assert call.error is None and call.name == made["function"]["name"], call
        jsonschema.validate(call.arguments, made["function"]["parameters"])

    await asyncio.gather(*map(one, range(1_000)))
    print(len(functions), refused, longest)


def check_masked(policy: af.Policy, given: Constraint, sample: af.Sample, temperature: float, gap: float) -> None:
    """`logprobs` are those of the policy, and with the kept mass those of the distribution that was sampled."""
    assert sample.ids and sample.logprobs and sample.kept_mass and sample.stop == "stop", sample
    prompt, grammars = policy.chat.prompt(ASKED), Grammars(policy.chat, policy.vocab_size)
    with torch.inference_mode():
        logits = policy.model(torch.tensor([[*prompt, *sample.ids]])).logits[0, len(prompt) - 1 : -1].float()
    matchers, masks = grammars.matchers(given), []
    for token in sample.ids:
        masks.append(allowed_tokens([matchers], policy.vocab_size, logits.device))
        assert all(matcher.consume_token(token) for matcher in matchers)
    logits, at = logits / temperature, torch.tensor(sample.ids)[:, None]
    masked = logits.masked_fill(~torch.cat([mask for mask in masks if mask is not None]), -torch.inf)
    for found, expected in (
        (torch.tensor(sample.logprobs), logits.log_softmax(-1)),
        (torch.tensor(sample.logprobs) - torch.tensor(sample.kept_mass).log(), masked.log_softmax(-1)),
    ):
        torch.testing.assert_close(found, expected.gather(1, at)[:, 0], atol=gap, rtol=0)


async def test_logprobs_are_those_of_a_masked_forward_pass() -> None:
    agent = agent_of(policy := shipped())
    for i, temperature in enumerate((1.0, 0.7, 1.0, 1.3)):
        constraint = (
            constraint_of(agent, TOOLS.schemas, must_call="") if i % 2 else constraint_of(agent, (), schema=SCHEMA)
        )
        sample = await sampled(agent, constraint, i, temperature=temperature)
        check_masked(policy, constraint, sample, temperature, 1e-5)


def test_the_mass_of_improbable_tokens_is_positive_and_other_filters_apply_to_the_rest() -> None:
    logits = torch.tensor([[200.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    allowed = torch.tensor([[False, True, True, False], [True] * 4, [True, True, True, False]])
    one, noise = torch.ones(3), torch.full((3,), 0.99, dtype=torch.float64)
    got = sample_tokens(logits, one, noise, allowed=allowed, top_k=torch.tensor([0, 0, 1]))
    assert got.ids.tolist() == [2, 3, 2] and got.kept_mass is not None
    assert got.kept_mass[0] > 0 and got.kept_mass[1] == 1.0
    torch.testing.assert_close(got.kept_mass[2], logits[2].softmax(-1)[2])
    assert sample_tokens(logits, 0 * one, noise, allowed=allowed).ids.tolist() == [2, 0, 2]


@pytest.mark.parametrize("size", [400, 401, 416])
def test_masks_have_an_entry_per_id(size: int) -> None:
    chat = shipped().chat
    matchers = Grammars(chat, size).matchers(Constraint((("", "{}"),)))
    mask = allowed_tokens([matchers, ()], size, torch.device("cpu"))
    (letter, digit) = chat.encode("z")[0], chat.encode("7")[0]
    assert mask.shape == (2, size) and mask[1].all() and not mask[0, letter] and mask[0, digit]


async def test_samples_do_not_depend_on_constraints_of_other_requests() -> None:
    agent = agent_of(shipped())
    constraint = constraint_of(agent, TOOLS.schemas, must_call="calculator")
    pairs = [(None if i % 2 else constraint, i) for i in range(16)]
    alone = [await sampled(agent, *pair) for pair in pairs]
    together = await asyncio.gather(*(sampled(agent, *pair) for pair in pairs))
    assert [(s.ids, s.logprobs, s.kept_mass) for s in alone] == [(s.ids, s.logprobs, s.kept_mass) for s in together]
    assert [sample.kept_mass is None for sample in alone] == [False, True] * 8


def test_thinking_precedes_the_constrained_part() -> None:
    assert allows(
        random_policy().chat,
        Constraint((("", json.dumps(SCHEMA)),), thinking_end="</think>"),
        '{so} <tool>\n</think>\n\n{"unit": "C", "days": 3}',
    )


@pytest.mark.parametrize("after", [', "id": "a1"}]', " then stop", " 7", "]</call>"])
def test_any_text_may_follow_a_value(after: str) -> None:
    constraint = Constraint((('[{"arguments": ', json.dumps(SCHEMA), after),))
    assert allows(af.tiny.policy().chat, constraint, f'[{{"arguments": {{"unit": "C", "days": 3}}{after}')


@pytest.mark.parametrize("name", [name for name in formats.NAMES if name not in UNCONSTRAINED])
def test_numbers_and_keys_are_those_that_python_can_hold(name: str) -> None:
    """The grammar allows neither infinity, which is not JSON, nor integers that `json.loads` refuses."""
    chat = af.Chat(af.tiny.tokenizer(), format=name)
    before, after = chat.call_pattern("f") or ("", "")
    call = Constraint(((before, json.dumps({"properties": {"x": {"type": "number"}}}), after),))

    def allowed(members: str) -> bool:
        return allows(chat, call, f"{before}{{{members}}}{after}")

    def allowed_number(number: str) -> bool:
        return allowed(f'"x": {number}, "1e999 \\" 1": [{{"y":{number}}}, "z", null]')

    digits = "7" * 308
    for holds, numbers in (
        (True, ["1e300", "-2.5E+9", "1e-5", "3e-999", "99999999.9e300", f"{digits}.5", digits * 12]),
        (True, ["-0", "1.0", "12e05"]),
        (False, ["1e301", "-1.5E+999", f"{digits}7.0", f"{digits}e1", digits * 14]),
    ):
        assert [number for number in numbers if allowed_number(number) is not holds] == []
    # An unpaired surrogate, and another spelling of "x", which must be a number
    assert [key for key in (r"\ud800", r"\u0078") if allowed(f'"x": 1, "{key}": true')] == []
    assert allowed(r'"x": 1, "\n\"\\\u001fé": "\u007f"')


def test_formats_whose_arguments_are_not_json_have_no_pattern() -> None:
    found = {name: af.Chat(af.tiny.tokenizer(), format=name).call_pattern("f") for name in formats.NAMES}
    assert {name for name, pattern in found.items() if pattern is None} == UNCONSTRAINED
    assert found["hermes"] == ('<tool_call>{"name":"f","arguments":', "}</tool_call>")


# --- requests ------------------------------------------------------------------------------------


async def test_every_api_constrains_its_reply() -> None:
    found: list[tuple[str, dict[str, Any]]] = []
    function = TOOLS.schemas[0]["function"]
    flat = [{"type": "function", **function}]
    parts = [{"name": "calculator", "input_schema": function["parameters"]}]

    async def asking(endpoint: af.Endpoint) -> None:
        async def post(path: str, **body: Any) -> Any:
            answer = await endpoint.handle("POST", f"/v1/{path}", json.dumps(body).encode())
            assert answer.status == 200, answer
            return json.loads(answer.body)

        for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
            got = await post("chat/completions", messages=ASKED, tools=TOOLS.schemas, tool_choice=choice)
            called = got["choices"][0]["message"]["tool_calls"][0]["function"]
            found.append((called["name"], json.loads(called["arguments"])))
        for choice in ("required", {"type": "function", "name": "calculator"}):
            (item,) = (await post("responses", input=ASKED, tools=flat, tool_choice=choice))["output"]
            found.append((item["name"], json.loads(item["arguments"])))
        for choice in ({"type": "any"}, {"type": "tool", "name": "calculator"}):
            (block,) = (await post("messages", messages=ASKED, tools=parts, tool_choice=choice))["content"]
            found.append((block["name"], block["input"]))
        got = await post("chat/completions", messages=ASKED, response_format=FORM)
        texts = [got["choices"][0]["message"]["content"]]
        form = {"type": "json_schema", "schema": SCHEMA}
        got = await post("responses", input=ASKED, text={"format": {"name": "weather", **form}})
        texts.append(got["output"][0]["content"][0]["text"])
        texts.append((await post("messages", messages=ASKED, output_config={"format": form}))["content"][0]["text"])
        texts.append((await post("completions", prompt="2+3 is", response_format=FORM))["choices"][0]["text"])
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)

    t = await run_one(asking, max_turns=20)
    assert t.stop == "answered", t.error
    for name, arguments in found:
        assert name == "calculator"
        jsonschema.validate(arguments, function["parameters"])
    assert len(found) == 6 and all(turn.constrained and turn.kept_mass for turn in t.actions)


async def test_a_constrained_chain_is_trained_with_a_correction(tmp_path: Path) -> None:
    """The importance weight of a token is the probability mass of the tokens that were allowed."""

    async def calling(endpoint: af.Endpoint) -> None:
        await endpoint.chat(ASKED, TOOLS.schemas, tool_choice="required")
        await endpoint.chat(ASKED)

    policy = fresh()
    agent = harnessed(calling).replace(engine=af.LocalEngine(policy), chat=policy.chat)
    rollout = await agent.rollout([TASK], 2)
    loaded = af.Rollout.load(rollout.save(tmp_path / "r.jsonl"))
    for given in (rollout, loaded):
        errors.check(lambda: af.collate(given, [1.0, -1.0]), af.errors.BatchError, "or a constraint")
    batch = af.collate(loaded, [1.0, -1.0], allow_truncated_sampling=True)
    assert batch.kept_mass is not None
    mass = batch.kept_mass[batch.mask]
    assert 0 < float(mass.min()) < 1
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    errors.check(lambda: af.ppo_step(policy, optimizer, batch), af.errors.BatchError, "correction must be")
    stats = af.ppo_step(policy, optimizer, batch, af.PPOConfig(correction="token"))
    assert stats.effective_sample_size == pytest.approx(float(mass.mean() ** 2 / mass.square().mean()), abs=1e-4)


async def test_what_cannot_be_constrained_is_refused_or_reported() -> None:
    wrong = [*TOOLS.schemas, tool("plot", {"properties": {"x": {"not": {}}}})]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tools": wrong, "tool_choice": "required"}, '"plot".*Unimplemented keys'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented keys"),
        ({"response_format": {"type": "json_schema"}}, "must be text, json_object or json_schema"),
        ({"tool_choice": "required"}, "'tools' must have at least one tool"),
        ({"tools": TOOLS.schemas, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "got 'f'"),
    ]

    async def asking(endpoint: af.Endpoint) -> None:
        for body, message in bodies:
            with pytest.raises((RequestError, af.errors.SettingsError), match=message):
                await endpoint.chat(ASKED, **body)
        await endpoint.chat(ASKED, response_format=FORM)

    t = await run_one(asking)
    assert (t.stop, len(t.actions), len(t.rows)) == ("answered", 1, 1), t.error
    bodies.clear()
    with pytest.warns(UserWarning, match="is not enforced, because Played cannot constrain"):
        assert (await run_one(asking, ["x"])).stop == "answered"
